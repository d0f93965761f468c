"""Haim et al. 2022, Fig. 2: twenty points on a circle, recovered from the weights.

Candidates are filtered by their multiplier, then near-duplicates are dropped. The published filter
lambda < 5 holds for one network's scale (lambda is multiplied by c^(2-L) when theta is by c); here a
candidate is dropped below a share of the heaviest one, the multipliers of its near-duplicates counted
in: merged they are one candidate (Refael et al. 2025, Lemma 2), and ten that share a point would each be
too light. Duplicates lie within 0.03, as published; a
point counts as recovered when a candidate of its own lies within 0.05, which is this project's choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from residuum.attacks import PRESETS, AttackConfig
from residuum.attacks.selection import DUPLICATE, drop_duplicates
from residuum.datasets import load_dataset
from residuum.records import Knowledge
from residuum.reproduce.context import Context
from residuum.reproduce.outcome import Outcome, Row
from residuum.reproduce.published import PUBLISHED
from residuum.reproduce.victims import attacked, victim
from residuum.similarity import l2
from residuum.training import TrainingConfig

WITHIN = 0.05
LEAST = 0.2  # of the heaviest multiplier, near-duplicates counted in


@dataclass(frozen=True)
class Setting:
    """Sizes of the experiment; the paper has 20 points, width 1000 twice, 100 candidates."""

    n: int
    hidden: tuple[int, ...]
    candidates: int
    training: int
    steps: int
    restarts: int


SETTINGS = {
    "tiny": Setting(20, (300,), 100, 2500, 2500, 1),
    "small": Setting(20, (400,), 100, 4000, 5000, 2),
    "paper": Setting(20, (1000, 1000), 100, 20_000, 20_000, 1),
}
ATTACK = AttackConfig(sigma=0.5, lr_x=0.02, lr_lam=0.02, lr_decay=0.02)


def circle(context: Context) -> Outcome:
    """Train on the circle, attack, filter, count; model inversion and a rotated circle beside."""
    own = SETTINGS[context.scale.name]
    data = load_dataset("circle", own.n, seed=context.seed).train
    arch = "mlp:" + "-".join(map(str, (2, *own.hidden, 1)))
    training = TrainingConfig(steps=own.training, init_scale=0.1, seed=context.seed)
    net = victim(context, arch, data, training)
    config = replace(
        ATTACK,
        candidates=own.candidates,
        restarts=own.restarts,
        steps=own.steps,
        seed=context.seed,
        dtype="auto" if not context.device.startswith("cuda") else "float32",
    )
    found = attacked(context, net.checkpoint, Knowledge(), config)
    inversion = replace(PRESETS["model-inversion"], candidates=own.candidates, seed=context.seed)
    inverted = attacked(context, net.checkpoint, Knowledge(), inversion).x.double()
    everything, weight = found.x.double(), found.weight.double()
    heavy = heavy_enough(everything, weight)
    kept = everything[heavy][drop_duplicates(everything[heavy], weight[heavy], DUPLICATE)]
    return Outcome(
        rows(own, data.x, kept, inverted, found.layers[:, -1, 0].sqrt().tolist()),
        {
            "train": data.x.numpy(),
            "labels": data.y.numpy(),
            "all": everything.numpy(),
            "weight": weight.numpy(),
            "heavy": everything[heavy].numpy(),
            "kept": kept.numpy(),
            "inverted": inverted.numpy(),
        },
        {"victim": net.summary, "attack": found.settings, "within": WITHIN, "least_share": LEAST},
        (
            f"the published filter lambda < 5 belongs to one network's scale; here {LEAST:g} of the "
            "heaviest multiplier, those of near-duplicates summed",
            "first-layer init 0.1 instead of 1e-4, training to the margin instead of 1e6 epochs",
        ),
    )


def heavy_enough(x: Tensor, weight: Tensor) -> Tensor:
    """Candidates whose multipliers, those of near-duplicates included, are no small share of the most."""
    mass = (l2(x, x) <= DUPLICATE).to(weight) @ weight
    return mass >= LEAST * mass.max()


def rows(
    own: Setting, truth: Tensor, kept: Tensor, inverted: Tensor, residual: list[float]
) -> tuple[Row, ...]:
    """The counts; chance is the same count for the circle turned by half a spacing."""
    known: dict[str, Any] = PUBLISHED["haim2022"] if own.n == 20 else {}
    half = math.pi / own.n
    turn = torch.tensor([[math.cos(half), -math.sin(half)], [math.sin(half), math.cos(half)]])
    turned = truth @ turn.double().T
    return (
        Row(
            "recovered",
            matched(kept, truth),
            known.get("circle_recovered"),
            matched(kept, turned),
            note=f"of {own.n}, one-to-one within {WITHIN:g}",
        ),
        Row(
            "model inversion",
            matched(inverted, truth),
            known.get("circle_model_inversion"),
            matched(inverted, turned),
        ),
        Row("candidates after both filters", len(kept)),
        Row(
            "largest distance of a true point to a candidate", float(l2(kept, truth).amin(0).max())
        ),
        Row("first-layer residual", min(residual)),
    )


def matched(points: Tensor, truth: Tensor, within: float = WITHIN) -> int:
    """Largest one-to-one matching of true points to candidates closer than ``within``."""
    near = (l2(points, truth) < within).numpy().astype(float)
    a, b = linear_sum_assignment(-near)
    return int(np.sum(near[a, b]))
