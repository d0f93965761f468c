"""Settings of a training run; the defaults train to the margin."""

from __future__ import annotations

import math
from dataclasses import dataclass

from residuum.errors import InputError
from residuum.settings import Settings, setting

LOSSES = ("logistic", "exponential", "squared", "cross_entropy")  # the keys of methods.LOSSES


@dataclass(frozen=True)
class TrainingConfig(Settings):
    """How weights begin, what is descended, and when it ends."""

    method: str = setting(
        "margin",
        "Log-loss descent with a safe step (margin), full batches (gd) or mini-batches (sgd).",
        place="basic",
        choices=("margin", "gd", "sgd"),
    )
    loss: str = setting(
        "",
        "What is descended; left out, logistic, cross_entropy or squared by the task.",
        place="expert",
        choices=("", *LOSSES),
    )
    steps: int = setting(5000, "Steps at most.", place="basic", above=0)
    lr: float = setting(0.01, "Learning rate of gd and sgd.", place="expert", above=0)
    momentum: float = setting(
        0.0, "Momentum of gd and sgd; published: 0 or 0.9.", place="expert", least=0, below=1
    )
    batch: int = setting(0, "Batch size of sgd.", place="expert", least=0)
    weight_decay: float = setting(
        0.0, "Weight decay w of gd and sgd: adds w theta to the gradient.", place="expert", least=0
    )
    init: str = setting(
        "small",
        "First weights: small has the first layer's standard normal weights and bias times "
        "init_scale, default is torch's, lecun has variance 1/fan_in and biases of zero.",
        place="expert",
        choices=("small", "default", "lecun"),
    )
    init_scale: float = setting(
        1e-4, "First-layer scale of the small init.", place="expert", least=0
    )
    dtype: str = setting("float64", "Numbers.", place="expert", choices=("float64", "float32"))
    seed: int = setting(
        0, "Seed of the initial weights and the batches.", place="basic", least=0, below=2**63
    )
    seconds: float = setting(
        math.inf, "Stop after this much wall-clock time.", place="basic", least=0, endless=True
    )
    stop_margin: float = setting(
        math.inf, "Stop at this normalised margin.", place="expert", endless=True
    )
    stop_residual: float = setting(
        0.0, "Stop at this relative KKT residual; 0 for never.", place="expert", least=0
    )
    stop_loss: float = setting(
        0.0, "Stop at this training loss; 0 for never.", place="expert", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "sgd" and self.batch < 1:
            raise InputError("sgd needs a batch size.", "Say --batch 50, or --method gd.")
        if self.method == "margin" and (self.weight_decay or self.loss == "squared"):
            raise InputError(
                "Margin maximisation has no weight decay and no squared loss: its end point is a "
                "direction of maximal margin.",
                "Use --method gd.",
            )
