"""What a caller may hand to an audit, brought into the project's own records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residuum.checkpoints import build_model, checkpoint_from_module, load_checkpoint
from residuum.errors import DataError
from residuum.records import Checkpoint, Dataset
from residuum.theory.kkt import evaluate

Data = Dataset | tuple[Any, Any] | str | Path


def as_checkpoint(model: Checkpoint | nn.Module | str | Path, arch: str | None) -> Checkpoint:
    """A checkpoint as it is, of a live network, or read from a file."""
    if isinstance(model, Checkpoint):
        return model
    if isinstance(model, nn.Module):
        return checkpoint_from_module(model)
    return load_checkpoint(model, arch)


def as_dataset(given: Data | Tensor | Any, name: str) -> Dataset:
    """A dataset of what was given; samples without labels get zeros, which match no class."""
    if isinstance(given, Dataset):
        return given
    if isinstance(given, str | Path):
        return Dataset.from_npz(given)
    x, y = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    try:
        x = torch.as_tensor(x)
        y = torch.zeros(len(x), dtype=torch.long) if y is None else torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"{name} must be (x, y), a Dataset or the path of an .npz; got {type(given).__name__}.",
            f"Say audit(model, {name}=(x, y)).",
        ) from problem
    x = x.detach().cpu()
    x = x if x.is_floating_point() else x.double()
    if x.ndim < 2 or not torch.isfinite(x).all():
        raise DataError(
            f"{name} must hold finite numbers, one row per sample; got shape {tuple(x.shape)}.",
            "Give x as the network receives it.",
        )
    return Dataset(x, y.detach().cpu(), name=name)


def check_fit(checkpoint: Checkpoint, train: Dataset | None, control: Dataset | None) -> None:
    """Refuse data that the network cannot take before the attack, not after it."""
    if train is None:
        return
    model = build_model(checkpoint)
    dtype = next(model.parameters()).dtype
    outputs = evaluate(model, train.x[:1].to(dtype))
    if outputs.shape[1] > 1 and checkpoint.task != "regression":
        _check_classes(train, outputs.shape[1])
    if control is not None and control.shape != train.shape:
        raise DataError(
            f"Held-out samples must have the training samples' shape {train.shape}; "
            f"got {control.shape}.",
            "Preprocess both alike.",
        )


def _check_classes(train: Dataset, outputs: int) -> None:
    if train.y.ndim == 1 and (train.y.min() < 0 or train.y.max() >= outputs):
        raise DataError(
            f"Labels must index the {outputs} outputs; they run from {float(train.y.min()):g} to "
            f"{float(train.y.max()):g}.",
            "Number the classes from 0.",
        )
