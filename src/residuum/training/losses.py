"""Losses as functions of the network's output, and margins.

logistic       mean_i log(1 + exp(-y_i Phi_i))          y in {-1, +1}
exponential    mean_i exp(-y_i Phi_i)
squared        mean_i ||Phi_i - t_i||^2
cross_entropy  mean_i -log softmax(Phi_i)_{y_i}          y class indices
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from residuum.errors import InputError

Loss = Callable[[Tensor, Tensor], Tensor]


def margins(outputs: Tensor, y: Tensor) -> Tensor:
    """(n, 1) y Phi for one output; (n, C) Phi_y - Phi_c for more, infinite at the own class."""
    if outputs.shape[1] == 1:
        return y[:, None] * outputs
    own = F.one_hot(y, outputs.shape[1]).bool()
    return (outputs[own][:, None] - outputs).masked_fill(own, torch.inf)


def logistic(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean logistic loss."""
    return F.softplus(-margins(outputs, y), threshold=40).mean()  # 20 would show in float64


def exponential(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean exponential loss."""
    return torch.exp(-margins(outputs, y)).mean()


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean over samples of the squared distance to the target."""
    return (outputs - y.reshape(outputs.shape)).square().sum(1).mean()


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(outputs, y)


LOSSES: dict[str, Loss] = {
    "logistic": logistic,
    "exponential": exponential,
    "squared": squared,
    "cross_entropy": cross_entropy,
}
TASK_LOSSES = {
    "binary": ("logistic", "exponential", "squared"),
    "multiclass": ("cross_entropy",),
    "regression": ("squared",),
}


def choose_loss(name: str, task: str) -> str:
    """The loss asked for, or the task's usual one; refused where it does not fit."""
    fitting = TASK_LOSSES[task]
    if name and name not in fitting:
        raise InputError(
            f"Loss {name} does not fit a {task} task.", f"Use one of {', '.join(fitting)}."
        )
    return name or fitting[0]
