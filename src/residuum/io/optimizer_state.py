"""Read the mean of recent gradients that an optimizer stores: momentum buffer or Adam's first moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from residuum.errors import ArchitectureError, InputError
from residuum.io.modules import checkpoint_from_module

TORCH_MOMENTS = ("exp_avg", "momentum_buffer")  # names under which torch stores a mean of gradients
# Names under which optimizers of any package store means of gradients (first moments), and means of squared
# gradients (second moments).
FIRST_MOMENTS = {"exp_avg", "momentum_buffer", "grad_avg", "velocities", "ms", "mu", "trace"}
SECOND_MOMENTS = {
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "sum",
    "acc_delta",
    "exp_inf",
    "vs",
    "nu",
}


def read_moment(trained: Any, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Return the mean of recent gradients that an optimizer stores, without weight decay.

    Pass the result as ``Knowledge(moment=...)`` to an attack.

    Args:
        trained: The torch optimizer of ``model``, with momentum or Adam's first moment, or a fitted
            MLPClassifier or MLPRegressor of scikit-learn, which contains its optimizer.
        model: The network that the torch optimizer trained, None for scikit-learn.

    Returns:
        The means of recent gradients by parameter name.

    Raises:
        InputError: If the optimizer stores no mean of gradients.

    Example:
        >>> import residuum as rs
        >>> moment = rs.read_moment(optimizer, model)  # doctest: +SKIP
    """
    if isinstance(trained, optim.Optimizer) and model is not None:
        moment = _read_torch_moment(trained, model)
    else:
        moment = _read_sklearn_moment(trained)
    if not moment:
        raise InputError(
            "read_moment needs an optimizer that stores a mean of gradients (Adam, or SGD with momentum, "
            "after at least one step), or an MLPClassifier that such an optimizer fitted; the "
            f"{type(trained).__name__} that you passed stores no mean of gradients.",
            "Call read_moment(optimizer, model), or read_moment(estimator) for an estimator of scikit-learn.",
        )
    return moment


def _read_torch_moment(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the mean gradients that a torch optimizer stores, by the parameter names that residuum uses."""
    parameters = dict(model.named_parameters())
    try:
        checkpoint = checkpoint_from_module(model)
        source_names = {name: checkpoint.source_names.get(name, name) for name in checkpoint.theta}
    except ArchitectureError:  # an unknown architecture, so its parameters keep their names
        source_names = {name: name for name in parameters}
    group_by_parameter = {
        parameter: parameter_group
        for parameter_group in optimizer.param_groups
        for parameter in parameter_group["params"]
    }
    moments = {}
    for name, source in source_names.items():
        parameter = parameters[source]
        parameter_group = group_by_parameter.get(parameter, {})
        is_decoupled = isinstance(optimizer, optim.AdamW) or bool(
            parameter_group.get("decoupled_weight_decay")
        )
        moment = remove_weight_decay(
            optimizer.state.get(parameter, {}), parameter_group, parameter.detach(), is_decoupled
        )
        if moment is not None:
            moments[name] = moment.detach().cpu()
    return moments


def remove_weight_decay(
    state: Mapping[str, Any], group: Mapping[str, Any], weight: Tensor, is_decoupled: bool
) -> Tensor | None:
    """Return the mean of recent gradients of one parameter, without the term of weight decay.

    If a weight decay w is added to the gradients of the parameter W, their mean contains the term w W for
    Adam, and the term w W (1 - dampening) / (1 - momentum) for SGD with momentum.

    Args:
        state: What a torch optimizer stores for this parameter.
        group: The options of the parameter group, such as "weight_decay".
        weight: The parameter W.
        is_decoupled: Whether weight decay is not added to the gradients, as in AdamW.

    Returns:
        The mean gradient, or None if the optimizer stores no mean of gradients.
    """
    decay_options = (group.get(name) for name in ("weight_decay", "momentum", "dampening"))
    decay, momentum, dampening = (v if isinstance(v, int | float) else 0.0 for v in decay_options)
    if (adam := state.get("exp_avg")) is not None:
        return adam - (0.0 if is_decoupled else decay) * weight
    if (buffer := state.get("momentum_buffer")) is not None:
        return buffer - decay * (1 - dampening) / max(1 - momentum, 1e-6) * weight
    return None


def _read_sklearn_moment(estimator: Any) -> dict[str, Tensor]:
    """Return the mean of recent gradients in a fitted MLP of scikit-learn, by residuum's parameter names.

    The gradients of scikit-learn include the weight decay alpha W / batch, where alpha is the L2 penalty, W
    are the weights and batch is the batch size. We subtract this term. The SGD of scikit-learn stores a
    velocity: the mean gradient times -rate / (1 - momentum), where rate is the learning rate. We transpose
    the matrices of scikit-learn.
    """
    optimizer = getattr(estimator, "_optimizer", None)
    moments = getattr(optimizer, "ms", None) or getattr(optimizer, "velocities", None)
    if optimizer is None or not moments:
        return {}
    batch_size, samples = estimator.batch_size, round(estimator.t_ / estimator.n_iter_)
    batch_size = min(200, samples) if batch_size == "auto" else min(batch_size, samples)
    moment_factor = 1.0
    if hasattr(optimizer, "velocities"):
        moment_factor = -estimator.learning_rate_init / (1 - optimizer.momentum)
    moments_by_name = {}
    for l, (mean_gradient, weight) in enumerate(zip(moments, estimator.coefs_, strict=False)):
        moments_by_name[f"layers.{l}.weight"] = torch.tensor(
            (mean_gradient / moment_factor - estimator.alpha * weight / batch_size).T
        )
    for l, mean_gradient in enumerate(moments[len(estimator.coefs_) :]):
        moments_by_name[f"layers.{l}.bias"] = torch.tensor(mean_gradient / moment_factor)
    return moments_by_name
