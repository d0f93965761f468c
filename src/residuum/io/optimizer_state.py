"""Read the mean of recent gradients that an optimizer keeps (momentum buffer, Adam's first moment)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from residuum.errors import ArchitectureError, InputError
from residuum.io.modules import checkpoint_from_module

# Names under which optimizers store means of gradients, and of their squares.
TORCH_MOMENTS = ("exp_avg", "momentum_buffer")  # names under which torch keeps a mean of gradients
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
    """The mean of the last gradients that a live optimizer keeps, weight decay taken out.

    trained: a torch optimizer with momentum or a first moment, of ``model``; or a fitted
    MLPClassifier or MLPRegressor of scikit-learn, whose optimizer stays in it.
    """
    if isinstance(trained, optim.Optimizer) and model is not None:
        found = _read_torch_moment(trained, model)
    else:
        found = _read_sklearn_moment(trained)
    if not found:
        raise InputError(
            "A moment is kept by an optimizer with momentum, or Adam, that has taken a step, and by "
            f"an MLPClassifier fitted with one; {type(trained).__name__} shows none.",
            "Say read_moment(optimizer, model) or read_moment(estimator).",
        )
    return found


def _read_torch_moment(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """By our names."""
    own = dict(model.named_parameters())
    try:
        checkpoint = checkpoint_from_module(model)
        names = {name: checkpoint.source_names.get(name, name) for name in checkpoint.theta}
    except ArchitectureError:  # kept as given once its shape is said, under its own names
        names = {name: name for name in own}
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for name, source in names.items():
        p = own[source]
        group = group_of.get(p, {})
        apart = isinstance(optimizer, optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        kept = remove_weight_decay(optimizer.state.get(p, {}), group, p.detach(), apart)
        if kept is not None:
            found[name] = kept.detach().cpu()
    return found


def remove_weight_decay(
    state: Mapping[str, Any], group: Mapping[str, Any], weight: Tensor, apart: bool
) -> Tensor | None:
    """The moment of one parameter; None where none is kept. apart: decay is no part of the gradients.

    Decay that is part of the gradients is part of their mean: w W, or w W / (1 - momentum).
    """
    numbers = (group.get(name) for name in ("weight_decay", "momentum", "dampening"))
    decay, momentum, dampening = (v if isinstance(v, int | float) else 0.0 for v in numbers)
    if (adam := state.get("exp_avg")) is not None:
        return adam - (0.0 if apart else decay) * weight
    if (buffer := state.get("momentum_buffer")) is not None:
        return buffer - decay * (1 - dampening) / max(1 - momentum, 1e-6) * weight
    return None


def _read_sklearn_moment(estimator: Any) -> dict[str, Tensor]:
    """By our parameter names: the mean of the last gradients in a fitted MLP of scikit-learn.

    Its gradients hold alpha W / batch of weight decay, which is taken out; its SGD keeps a velocity,
    the mean gradient times minus the rate over 1 - momentum. Its matrices are transposed to ours.
    """
    kept = getattr(estimator, "_optimizer", None)
    moments = getattr(kept, "ms", None) or getattr(kept, "velocities", None)
    if kept is None or not moments:
        return {}
    batch, samples = estimator.batch_size, round(estimator.t_ / estimator.n_iter_)
    batch = min(200, samples) if batch == "auto" else min(batch, samples)
    factor = 1.0
    if hasattr(kept, "velocities"):
        factor = -estimator.learning_rate_init / (1 - kept.momentum)
    found = {}
    for l, (m, weight) in enumerate(zip(moments, estimator.coefs_, strict=False)):
        found[f"layers.{l}.weight"] = torch.tensor(
            (m / factor - estimator.alpha * weight / batch).T
        )
    for l, m in enumerate(moments[len(estimator.coefs_) :]):
        found[f"layers.{l}.bias"] = torch.tensor(m / factor)
    return found
