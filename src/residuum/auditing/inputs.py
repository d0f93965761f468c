"""What a caller may hand to an audit, brought into the project's own records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residuum.checkpoints import build_model
from residuum.errors import DataError
from residuum.evaluation.field import lay_out
from residuum.records import Checkpoint, Dataset
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task, normalise_labels

Data = Dataset | tuple[Any, Any] | str | Path
LARGEST = 1e12  # squares and sums of such values stay far inside the finite numbers of float32


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


def task_of(checkpoint: Checkpoint, task: str) -> str:
    """The task that was said, else the one that the checkpoint names; "auto" where neither does."""
    return checkpoint.task if task == "auto" and checkpoint.task else task


def check_fit(
    checkpoint: Checkpoint, train: Dataset | None, control: Dataset | None, task: str = "auto"
) -> None:
    """Refuse before the attack whatever scoring and certificate would refuse after it."""
    for name, data in (("data", train), ("holdout", control)):
        if data is not None and (largest := float(data.x.abs().max())) > LARGEST:
            raise DataError(
                f"Values of samples must lie within +-{LARGEST:g}; {name} reaches {largest:.3g}.",
                "Give x as the network receives it.",
            )
    if train is None:
        return
    model = build_model(checkpoint)
    outputs = evaluate(model, train.x[:1].to(next(model.parameters()).dtype)).shape[1]
    normalise_labels(train.y, choose_task(task_of(checkpoint, task), outputs), outputs)
    lay_out(
        torch.zeros_like(train.x[:1]), train, control, candidate_labels=None, match_labels=True,
        same_label=False, seed=0, notes=[],
    )  # fmt: skip
