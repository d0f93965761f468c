"""Refael et al. 2025, Fig. 2b: data whose range the attacker does not know.

The paper rewrites the first layer's biases, b -> b - <w, u>, and calls the result a network trained on
data shifted by u. It is not one (its KKT residual is not zero, appendix D): both are shown, the
rewritten network and one trained again on shifted data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from residuum.attacks import AttackConfig
from residuum.checkpoints import build_model
from residuum.records import Dataset, Knowledge
from residuum.reproduce.context import Context
from residuum.reproduce.images import as_bytes, prefixed
from residuum.reproduce.outcome import Outcome, Row
from residuum.reproduce.published import PUBLISHED
from residuum.reproduce.refael2025.measures import compare, rewritten
from residuum.reproduce.victims import Victim, attacked, victim
from residuum.similarity import ncc
from residuum.theory.kkt_sets import KKTSet
from residuum.training import TrainingConfig

AMOUNTS = (0.5, 5.0)  # per pixel
PAPER_N, WIDTH = 100, 1000
SHOWN = 5


def shift(context: Context) -> Outcome:
    """No shift, and both kinds of shift by 0.5 and 5 per pixel; no prior."""
    scale = context.scale
    split = scale.split("cifar10", PAPER_N, context.root, context.seed)
    n, width = len(split.train), scale.hidden((WIDTH, WIDTH))
    arch = "mlp:" + "-".join(map(str, (split.train.x[0].numel(), *width, 1)))
    training = TrainingConfig(steps=scale.training, dtype="float32", seed=context.seed)
    config = AttackConfig(
        steps=scale.attack_steps(6000),
        restarts=2,
        candidates=2 * n,
        dtype=context.fast,
        seed=context.seed,
    )
    found: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for kind, amount, net in networks(context, arch, split.train, training):
        x = attacked(context, net.checkpoint, Knowledge(shape=split.train.shape), config)
        data = split.train.x.double() + amount
        kkt = KKTSet.of(build_model(net.checkpoint), data, split.train.y)
        found.append(
            {
                "shift": kind,
                "per_pixel": amount,
                "residual_at_data": kkt.residual,
                "first_layer_residual": x.layers[:, -1, 0].sqrt().tolist(),
            }
            | compare(x.x.double(), x.run, data, split.holdout.x[:n].double() + amount)
        )
        arrays |= prefixed(_name(kind, amount), _pairs(x.x.double(), data))
    return Outcome(
        tuple(row for one in found for row in rows(one)), arrays, {"n": n, "rows": found}
    )


def networks(
    context: Context, arch: str, data: Dataset, training: TrainingConfig
) -> Iterator[tuple[str, float, Victim]]:
    """The network as trained, then for every amount the rewritten one and the one trained again."""
    plain = victim(context, arch, data, training)
    yield "none", 0.0, plain
    for amount in AMOUNTS:
        yield "rewrite", amount, plain.replace(checkpoint=rewritten(plain.checkpoint, amount))
        moved = data.replace(x=data.x + amount)
        yield "retrain", amount, victim(context, arch, moved, training)


def rows(one: dict[str, Any]) -> list[Row]:
    """One case: how near, how unique, and whether mixtures explain it."""
    name, known = _name(one["shift"], one["per_pixel"]), PUBLISHED["refael2025"]["shift"]
    moved = one["shift"] == "rewrite"
    printed = known.get(one["per_pixel"]) if moved else None
    says = "appendix D takes it for a network trained on shifted data" if moved else ""
    return [
        Row(
            f"{name}: NCC of the five best",
            one["five_best_ncc_train"],
            printed,
            one["five_best_ncc_holdout"],
        ),
        Row(
            f"{name}: samples above NCC 0.8",
            one["above_0.8_train"],
            chance=one["above_0.8_holdout"],
        ),
        Row(
            f"{name}: KKT residual at the data",
            one["residual_at_data"],
            0.0 if moved else None,
            note=says,
        ),
        Row(
            f"{name}: NCC with the best single sample, median",
            one["single_ncc_train"],
            chance=one["single_ncc_holdout"],
        ),
        Row(
            f"{name}: NCC with the best mixture of five, median",
            one["mixture_ncc_train"],
            chance=one["mixture_ncc_holdout"],
        ),
        Row(
            f"{name}: repeats of a sample inside a restart, chance uniform",
            one["repeats"],
            "only by chance" if one["shift"] == "none" else None,
            one["repeats_by_chance"],
        ),
        Row(
            f"{name}: repeats of a sample inside a restart, chance over restarts",
            one["repeats"],
            chance=one["repeats_if_exchanged"],
        ),
    ]


def _name(kind: str, amount: float) -> str:
    return "no shift" if kind == "none" else f"{kind} {amount:g}"


def _pairs(x: torch.Tensor, data: torch.Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """The samples matched best, each with its candidate."""
    value, candidate = ncc(x, data).max(0)
    order = value.argsort(descending=True)[:SHOWN]
    return {
        "found": as_bytes(x[candidate[order]]),
        "true": as_bytes(data[order]),
        "score": value[order].float().numpy(),
    }
