"""What a training run is told, and what it leaves behind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from residuum.errors import InputError, require_known
from residuum.records.base import Record, plain
from residuum.training.methods import LOSSES

METHODS = ("margin", "gd", "sgd")
INITS = ("small", "default", "lecun")
DTYPES = ("float64", "float32")


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of a run; the defaults train to the margin.

    method: margin (log-loss descent with a safe step), gd (full batch), sgd (mini-batches);
    loss: "" picks logistic, cross_entropy or squared by the task; lr: of gd and sgd, as published
    0.01; weight_decay w adds w theta to the gradient; init: small multiplies the first layer's
    standard normal weights and bias by init_scale, default is torch's, lecun draws every weight with
    variance 1/fan_in and starts biases at zero; stop_*: end early once the normalised margin, the
    relative KKT residual or the loss is reached, 0 (margin: inf) is no goal; seconds: wall clock.
    """

    method: str = "margin"
    loss: str = ""
    steps: int = 5000
    lr: float = 0.01
    momentum: float = 0.0
    batch: int = 0
    weight_decay: float = 0.0
    init: str = "small"
    init_scale: float = 1e-4
    dtype: str = "float64"
    seed: int = 0
    seconds: float = math.inf
    stop_margin: float = math.inf
    stop_residual: float = 0.0
    stop_loss: float = 0.0

    def __post_init__(self) -> None:
        for got, known in ((self.method, METHODS), (self.init, INITS), (self.dtype, DTYPES)):
            require_known(got, known, "No choice")
        if self.loss:
            require_known(self.loss, LOSSES, "No choice")
        for name, low in (("steps", 1), ("lr", 1e-300), ("seconds", 0), ("init_scale", 0)):
            if not getattr(self, name) >= low:
                raise InputError(
                    f"{name} must be positive; got {getattr(self, name)}.", "Raise it."
                )
        for name in ("lr", "init_scale", "weight_decay", "stop_residual", "stop_loss"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"{name} must be finite; got {getattr(self, name)}.", "Lower it.")
        if math.isnan(self.stop_margin) or not 0 <= self.seed < 2**63:
            raise InputError(
                f"A margin to stop at is a number and a seed lies between 0 and 2**63; got "
                f"{self.stop_margin}, {self.seed}.",
                "Use --seed 0.",
            )
        if not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise InputError(
                f"Momentum lies in [0, 1) and weight decay is >= 0; got {self.momentum}, "
                f"{self.weight_decay}.",
                "Published: momentum 0 or 0.9.",
            )
        if self.method == "sgd" and self.batch < 1:
            raise InputError("sgd needs a batch size.", "Say --batch 50, or --method gd.")
        if self.method == "margin" and (self.weight_decay or self.loss == "squared"):
            raise InputError(
                "Margin maximisation has no weight decay and no squared loss: its end point is a "
                "direction of maximal margin.",
                "Use --method gd.",
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values; limits that were not set are null."""
        return plain(vars(self))


@dataclass(frozen=True, eq=False)
class TrainingState(Record):
    """A run at one moment: all that is needed to go on, and what it has seen so far.

    scalars and buffers belong to the method (step size, temperature, momentum);
    history: step, loss, margin, norm, and the KKT residual where it was measured;
    status: running, steps, time, margin, residual, loss or diverged.
    """

    theta: dict[str, Tensor]
    theta0: dict[str, Tensor]
    step: int
    fingerprint: str
    status: str = "running"
    scalars: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    history: tuple[dict[str, float], ...] = ()
