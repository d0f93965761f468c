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
        "the exponential loss. gd: gradient descent "
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
        description="Momentum of the methods 'gd' and 'sgd'.",
    )
    batch: int = Field(
        default=0, ge=0, description="Number of samples in a mini-batch of the method 'sgd'."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Weight decay of the methods 'gd' and 'sgd'. In each step, the weights times this "
        "number are added to the gradient.",
    )
    init: Initialization = Field(
        default="small",
        description="Initial weights. small: the weights and biases of the first layer are normal random "
        "numbers times init_scale. default: as in PyTorch. lecun: random weights with variance 1/fan_in, "
        "and zero biases.",
    )
    init_scale: float = Field(
        default=1e-4,
        ge=0,
        description="Scale of the initial weights of the first layer, if init is 'small'.",
    )
    dtype: Literal["float64", "float32"] = Field(
        default="float64", description="Number format in which the network is trained."
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of the random initial weights and mini-batches.",
    )
    seconds: float = Field(
        default=math.inf,
        ge=0,
        allow_inf_nan=True,
        description="Stop the training after this many seconds of wall-clock time.",
    )
    stop_margin: float = Field(
        default=math.inf,
        gt=-math.inf,  # this bound rejects NaN and allows every other number
        allow_inf_nan=True,
        description="Stop the training when the normalized margin (distance of the training samples from "
        "the decision boundary) reaches this number.",
    )
    stop_residual: float = Field(
        default=0.0,
        ge=0,
        description="Stop the training when the KKT residual falls to this number. The KKT residual is "
        "the relative error of the Karush-Kuhn-Tucker conditions, which a network with the largest margin "
        "fulfills. 0 means never.",
    )
    stop_loss: float = Field(
        default=0.0,
        ge=0,
        description="Stop the training when the training loss falls to this number. 0 means never.",
    )

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        if self.method == "sgd" and self.batch < 1:
            raise InputError(
                f"The training method 'sgd' needs a batch size of at least 1; got {self.batch}.",
                "Pass --batch 50, or --method gd.",
            )
        if self.method == "margin" and (self.weight_decay or self.loss == "squared"):
            raise InputError(
                "The training method 'margin' cannot be combined with weight decay or with the loss "
                "'squared'; got "
                f"weight decay {self.weight_decay:g} and loss {self.loss or 'default'!r}.",
                "Pass --method gd.",
            )
        return self
