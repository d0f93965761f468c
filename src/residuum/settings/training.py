"""Settings of the training of a network. By default, training maximizes the margin."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from residuum.errors import InputError
from residuum.settings.base import Settings

# Names of the training losses, which are the keys of ``methods.LOSSES``.
LOSSES = ("logistic", "exponential", "squared", "cross_entropy")


Initialization = Literal["small", "default", "lecun"]


class TrainingConfig(Settings):
    """Settings of a training run: how a network is initialized and trained, and when the training ends."""

    method: Literal["margin", "gd", "sgd"] = Field(
        default="margin",
        description="Training method. margin: maximize the margin by gradient descent on the logarithm of "
        "the exponential loss, where steps that increase the loss too much are undone. gd: gradient descent "
        "on full batches. sgd: gradient descent on mini-batches.",
    )
    loss: Literal["", "logistic", "exponential", "squared", "cross_entropy"] = Field(
        default="",
        description="Training loss; by default logistic, cross_entropy or squared, depending on the task.",
    )
    steps: int = Field(default=5000, gt=0, description="Maximum number of training steps.")
    lr: float = Field(
        default=0.01, gt=0, description="Learning rate of the methods 'gd' and 'sgd'."
    )
    momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Momentum of the methods 'gd' and 'sgd'. Published runs used 0 or 0.9.",
    )
    batch: int = Field(
        default=0, ge=0, description="Number of samples in a mini-batch of the method 'sgd'."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Weight decay w of the methods 'gd' and 'sgd'. It adds w theta to the gradient in the "
        "weights theta.",
    )
    init: Initialization = Field(
        default="small",
        description="Initial weights. small: weights and biases of the first layer are standard normal "
        "numbers times init_scale. default: the default of PyTorch. lecun: variance 1/fan_in, zero biases.",
    )
    init_scale: float = Field(
        default=1e-4,
        ge=0,
        description="Scale of the initial weights of the first layer, if init is 'small'.",
    )
    dtype: Literal["float64", "float32"] = Field(
        default="float64", description="Number format of the training."
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the initial weights and of the batches."
    )
    seconds: float = Field(
        default=math.inf,
        ge=0,
        allow_inf_nan=True,
        description="Stop the training after this many seconds of wall-clock time.",
    )
    stop_margin: float = Field(
        default=math.inf,
        gt=-math.inf,  # this bound refuses nan and allows every other number
        allow_inf_nan=True,
        description="Stop the training if the normalized margin reaches this number.",
    )
    stop_residual: float = Field(
        default=0.0,
        ge=0,
        description="Stop the training if the relative KKT residual falls to this number. 0 means never.",
    )
    stop_loss: float = Field(
        default=0.0,
        ge=0,
        description="Stop the training if the training loss falls to this number. 0 means never.",
    )

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        if self.method == "sgd" and self.batch < 1:
            raise InputError(
                f"The method 'sgd' needs a batch size of at least 1; got {self.batch}.",
                "Pass --batch 50, or --method gd.",
            )
        if self.method == "margin" and (self.weight_decay or self.loss == "squared"):
            raise InputError(
                "The method 'margin' must have no weight decay, and cannot minimize the loss 'squared'; got "
                f"weight decay {self.weight_decay:g} and loss {self.loss or 'default'!r}.",
                "Pass --method gd.",
            )
        return self
