"""What the experiments on uniqueness share: their size, victims, attacks, counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from residuum.attacks import AttackConfig, attack
from residuum.evaluation import score
from residuum.records import Checkpoint, Dataset, Knowledge, Reconstruction, Split
from residuum.reproduce.refael2025.measures import squares
from residuum.training import TrainingConfig, train


@dataclass(frozen=True)
class Scale:
    """How large the experiments are; tiny ones show that everything runs, not what holds."""

    n: int
    dim: int
    width: int
    training: int
    steps: int
    candidates: int
    restarts: int
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]
    images: int


def victim(
    arch: str, data: Dataset, steps: int, device: str, init: str = "small", seed: int = 0,
    path: Path | None = None,
) -> tuple[Checkpoint, dict[str, Any]]:  # fmt: skip
    """A network trained to the margin; path: where a longer run goes on from a shorter one."""
    config = TrainingConfig(steps=steps, init=init, seed=seed, dtype="float32")
    state = train(arch, data, config, task="binary", device=device, state_path=path)
    last = dict(state.history[-1]) if state.history else {}
    report = {"steps": state.step, "status": state.status, "margin": last.get("margin")}
    report["initial_squared_norms"] = squares(state.theta0)
    report["squared_norms"] = squares(state.theta)
    return Checkpoint(dict(state.theta), arch, data.shape, (), "binary"), report


def settings(scale: Scale, device: str, **changes: Any) -> AttackConfig:
    base = AttackConfig(
        steps=scale.steps, restarts=scale.restarts, candidates=scale.candidates, device=device,
        dtype="tf32" if device.startswith("cuda") else "float32",
    )  # fmt: skip
    return replace(base, **changes)


def run(checkpoint: Checkpoint, config: AttackConfig, n: int) -> Reconstruction:
    return attack(checkpoint, Knowledge(shape=checkpoint.input_shape, sample_count=n), config)


def counts(x: Tensor, split: Split) -> dict[str, Any]:
    scores = score(x.double(), split.train, split.holdout, metrics=("ncc",), subsets=200)
    metric = scores.to_json()["metrics"]["ncc"]
    names = ("recovered", "threshold_null99", "expected_by_chance", "p_value", "top10_mean")
    return {name: metric[name] for name in names}


def finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


SCALES = {
    "tiny": Scale(20, 40, 50, 200, 100, 30, 2, (0,), (30, 60, 120, 240, 480), 10),
    "paper": Scale(500, 784, 1000, 3000, 3000, 600, 3, (0, 1, 2), (100, 300, 1000, 3000, 6000), 50),
}
