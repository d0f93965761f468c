"""Shen et al. 2026: which victims are attacked with and without splitting, at every scale.

All victims are d-1000-1000-1. At the tiny scale every one of them is the same exact cubic network,
whose samples are known and whose attack needs more candidates than it starts with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from residuum.attacks import GROWTH_PRESETS, PRESETS, AttackConfig
from residuum.attacks.objectives import BinaryKKT
from residuum.attacks.run import prepare, resolve
from residuum.attacks.solver import Solver
from residuum.records import Dataset, Knowledge, Split
from residuum.reproduce import buzaglo2023, loo2024
from residuum.reproduce.context import Context
from residuum.reproduce.exact import as_mlp, polynomial_point
from residuum.reproduce.images import ImageRun, knowledge_of, trained

CUBIC_N, CUBIC_SHAPE = 6, (1, 3, 3)
CUBIC = AttackConfig(
    objective="binary-kkt",
    steps=1500,
    lr_decay=1.0,
    sigma=0.3,
    layers="all",
    split_every=100,
)
_DECAY = AttackConfig(
    objective="weight-decay", layers="all", lam_init=(0.0, 1.0), lam_distribution="normal"
)
# By objective: task, bias, training, attack, steps, steps between rounds. NTK victims as Loo et al.
# 2024 train them, regression victims with weight decay as Buzaglo et al. 2023 do.
SETUPS: dict[str, tuple[str, str, dict[str, Any], AttackConfig, int, int]] = {
    "haim": ("binary", "first", {}, AttackConfig(objective="binary-kkt"), 100_000, 40_000),
    "buzaglo": (
        "regression",
        "first",
        buzaglo2023.TRAINING,
        _DECAY,
        80_000,
        30_000,
    ),
    "loo": (
        "regression",
        "all",
        loo2024.TRAINING,
        PRESETS["ntk"],
        80_000,
        20_000,
    ),
}


@dataclass(frozen=True)
class Case:
    """One victim and how many candidates per class an attack starts with, at the paper's size."""

    attack: str
    data: str
    n: int
    per_class: int

    @property
    def name(self) -> str:
        """Short, for legends and keys."""
        return f"{self.attack} {self.data} n={self.n} k={self.per_class}"

    @property
    def metric(self) -> str:
        """What the paper judges this dataset by."""
        return "ssim3" if self.data == "cifar10" else "l2"


@dataclass(frozen=True)
class Prepared:
    """A case at some scale: data, and the attack before its first step by the way it grows."""

    split: Split
    solvers: dict[str, Solver]
    every: int
    exact: bool = False


def prepared(context: Context, case: Case) -> Prepared:
    """Both attacks of a case; run 0 of both starts from the same candidates."""
    if context.scale.name == "tiny":
        return _cubic(context, case)
    task, bias, training, base, steps, every = SETUPS[case.attack]
    if context.scale.name != "paper":  # minutes on a CPU
        steps, every = steps // 4, every // 4
    training = dict(training)
    if context.scale.name != "paper" and "lr" in training:
        training["lr"] *= 10 / context.scale.rate  # digits: a hundredth of the inputs, larger steps
    run = ImageRun(
        case.name,
        case.data,
        case.n,
        task=task,
        bias=bias,
        training=training,
        box=True,
        initial=case.attack == "loo",
    )
    split, net = trained(context, run)
    scale = context.scale
    share = len(split.train) / case.n
    m = max(4, 2 * round(case.per_class * share))
    every = scale.attack_steps(every)
    config = replace(
        base,
        candidates=m,
        steps=scale.attack_steps(steps),
        dtype=context.fast,
        device=context.device,
        seed=context.seed,
    )
    known = knowledge_of(run, split, net)
    solvers = {}
    for arm, changed in arms(config, every).items():
        solvers[arm] = prepare(net.checkpoint, known, resolve(net.checkpoint, known, changed))
    return Prepared(split, solvers, every)


def arms(config: AttackConfig, every: int) -> dict[str, AttackConfig]:
    """none: no growth, a second restart as control; split: the published way, in the published rhythm.

    The threshold is relative to the loss, since this loss is normalised per layer and the published
    one, -0.1, is not.
    """
    growth = {
        **GROWTH_PRESETS["paper"],
        "split_every": every,
        "split_relative": True,
        "split_threshold": 0.01,
        "split_eta": 0.0,
        "split_limit": 8 * config.candidates,
    }
    return {"none": replace(config, restarts=2), "split": replace(config, restarts=1, **growth)}


def _cubic(context: Context, case: Case) -> Prepared:
    """The exact cubic network; as many candidates as the case has of its samples, at least 2."""
    shape, d = CUBIC_SHAPE, math.prod(CUBIC_SHAPE)
    point = polynomial_point(CUBIC_N, d, 3, seed=context.seed)
    m = max(2, min(CUBIC_N - 1, round(2 * CUBIC_N * case.per_class / case.n)))
    grown = {"none": {"restarts": 2}, "split": {"restarts": 1, "split": "curvature"}}
    solvers = {
        arm: Solver(
            as_mlp(point),
            BinaryKKT(),
            Knowledge(),
            replace(CUBIC, seed=context.seed, **changes),  # type: ignore[arg-type]
            shape,
            1,
            m,
        )
        for arm, changes in grown.items()
    }
    train = Dataset(point.x.reshape(-1, *shape), point.y, None, "cubic")
    held = torch.linalg.qr(torch.randn(d, d, generator=_generator(), dtype=torch.float64))[0]
    holdout = Dataset(held[:CUBIC_N].reshape(-1, *shape), point.y, None, "cubic held-out")
    return Prepared(Split(train, holdout), solvers, CUBIC.split_every, exact=True)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(12345)


def aligned(x: Tensor, samples: Tensor) -> Tensor:
    """Candidates of a cubic network as unit vectors, signs as the nearest sample has them. (m, n, d).

    (x, b), (-x, -b) and (t x, b / t^3) are one sample to such a network.
    """
    unit = x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True).clamp(min=1e-30)
    sign = (unit @ samples.flatten(1).T).sign()
    return sign[:, :, None] * unit[:, None]
