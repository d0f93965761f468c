"""Settings of a training run. By default, training maximizes the margin."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from residuum.errors import InputError
from residuum.settings.base import Settings

LOSSES = ("logistic", "exponential", "squared", "cross_entropy")  # the keys of methods.LOSSES


Initialization = Literal["small", "default", "lecun"]


class TrainingConfig(Settings):
    """How a network is initialized and trained, and when the training ends."""

    method: Literal["margin", "gd", "sgd"] = Field(
        default="margin",
        description="Descent on the logarithm of the loss with a safe step (margin), full batches (gd) "
        "or mini-batches (sgd).",
    )
    loss: Literal["", "logistic", "exponential", "squared", "cross_entropy"] = Field(
        default="",
        description="The loss; by default logistic, cross_entropy or squared, depending on the task.",
    )
    steps: int = Field(default=5000, gt=0, description="Maximum number of steps.")
    lr: float = Field(default=0.01, gt=0, description="Learning rate of gd and sgd.")
    momentum: float = Field(
        default=0.0, ge=0, lt=1, description="Momentum of gd and sgd; published runs used 0 or 0.9."
    )
    batch: int = Field(default=0, ge=0, description="Batch size of sgd.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Weight decay w of gd and sgd: adds w theta to the gradient."
    )
    init: Initialization = Field(
        default="small",
        description="Initial weights. small has a first layer of standard normal weights and biases times "
        "init_scale. default is the default of torch. lecun has variance 1/fan_in and zero biases.",
    )
    init_scale: float = Field(
        default=1e-4, ge=0, description="Scale of the first layer if init is small."
    )
    dtype: Literal["float64", "float32"] = Field(default="float64", description="Number format.")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the initial weights and of the batches."
    )
    seconds: float = Field(
        default=math.inf, ge=0, allow_inf_nan=True, description="Stop after this wall-clock time."
    )
    stop_margin: float = Field(
        default=math.inf,
        gt=-math.inf,  # refuses nan
        allow_inf_nan=True,
        description="Stop at this normalized margin.",
    )
    stop_residual: float = Field(
        default=0.0, ge=0, description="Stop at this relative KKT residual; 0 for never."
    )
    stop_loss: float = Field(
        default=0.0, ge=0, description="Stop at this training loss; 0 for never."
    )

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        if self.method == "sgd" and self.batch < 1:
            raise InputError(
                f"sgd needs a batch size of at least 1; got {self.batch}.",
                "Pass --batch 50, or --method gd.",
            )
        if self.method == "margin" and (self.weight_decay or self.loss == "squared"):
            raise InputError(
                "Margin maximization has no weight decay and no squared loss, because it ends at a "
                "direction of maximal margin.",
                "Pass --method gd.",
            )
        return self
