"""What a caller hands to an audit, as the project's own records, and whether it all fits together.

Do samples and granted facts speak of the same scale? Attacks keep candidates inside the granted value
range, less the granted mean. Training samples outside it cannot come back, so that "no leak found"
would say nothing of the network; held-out samples on another scale make chance look weaker or
stronger than it is.

Was the network read rightly? A file says little of what a network is: pooling can pass for stride, an
adapter for a network, labels may be shifted. All of these show in the accuracy on the training
samples, so every audit begins with it. It does not show an activation read wrongly: small networks
fit either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residuum.checkpoints import build_model
from residuum.errors import DataError
from residuum.evaluation.matching import lay_out
from residuum.records import Checkpoint, Dataset, Knowledge
from residuum.records.base import Record
from residuum.records.data import with_mean
from residuum.theory.kkt import evaluate
from residuum.theory.rows import accuracy, choose_task, normalise_labels

Data = Dataset | tuple[Any, Any] | str | Path
NEAR = 0.01  # of the range's width: rounding, no contradiction
FAR = 1.0  # of the range's width: no sample of this range
BYTES = 255.0  # the largest value of a pixel in a file
SPREAD, SHIFT = 2.0, 0.5  # ratio of standard deviations; difference of means over the larger one
DOUBTFUL = 0.5  # of the way from naming the commonest class, or the mean, to being always right
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
        torch.zeros_like(train.x[:1]),
        train,
        control,
        candidate_labels=None,
        match_labels=True,
        same_label=False,
        seed=0,
        notes=[],
    )


def scale_notes(
    train: Dataset | None, control: Dataset | None, knowledge: Knowledge
) -> tuple[str, ...]:
    """What contradicts, one sentence each; refused where the range cannot be meant for these data."""
    if train is None:
        return ()
    return (*_bytes(train), *_range(train, knowledge), *_scales(train, control))


def _bytes(train: Dataset) -> tuple[str, ...]:
    """Pixels as files have them: most networks receive them divided by 255."""
    least, most = float(train.x.min()), float(train.x.max())
    if not (least >= 0 and BYTES / 2 < most <= BYTES):
        return ()
    return (f"The training samples have values up to {most:g}: is this what the network receives?",)


def _range(train: Dataset, knowledge: Knowledge) -> tuple[str, ...]:
    if knowledge.value_range is None:
        return ()
    x = train.x.double()
    if (mean := knowledge.mean) is not None:
        if mean.numel() not in (1, x[0].numel()):
            raise DataError(
                f"The mean must be one number or have {x[0].numel()} values; got {mean.numel()}.",
                "Grant the mean image of the data.",
            )
        x = with_mean(x, mean)
    low, high = knowledge.value_range
    least, most = float(x.min()), float(x.max())
    beyond = max(low - least, most - high) / (high - low)
    if beyond <= NEAR:
        return ()
    added = "with the granted mean added" if mean is not None else "no mean being granted"
    said = (
        f"The training samples run from {least:.3g} to {most:.3g}, {added}, outside the granted "
        f"value range {low:g} to {high:g}"
    )
    remedy = "Grant the range of the data before a mean was subtracted, and that mean (--mean)."
    if beyond > FAR:
        raise DataError(f"{said}, by more than its width.", remedy)
    share = float(((x < low) | (x > high)).double().mean())
    return (f"{said} ({share:.0%} of the values): attacks cannot bring these back. {remedy}",)


def _scales(train: Dataset, control: Dataset | None) -> tuple[str, ...]:
    if control is None:
        return ()
    (mean, spread), (other_mean, other) = (_moments(data) for data in (train, control))
    larger, smaller = max(spread, other), min(spread, other)
    if larger <= SPREAD * smaller and abs(mean - other_mean) <= SHIFT * larger:
        return ()
    return (
        "Held-out samples seem to be on another scale than training samples (mean and standard "
        f"deviation {other_mean:.2g} and {other:.2g} against {mean:.2g} and {spread:.2g}): the "
        "control holds only where both were preprocessed alike.",
    )


def _moments(data: Dataset) -> tuple[float, float]:
    x = data.x.double()
    return float(x.mean()), float(torch.std(x, correction=0))


@dataclass(frozen=True, eq=False)
class Fit(Record):
    """measure: "accuracy" or "R^2"; train, holdout: of the network as read, None without labels;
    base: what naming the commonest class, or the mean, would reach on the training samples.
    """

    measure: str
    train: float
    holdout: float | None
    base: float

    @property
    def doubtful(self) -> bool:
        """Whether the network hardly fits its own training samples."""
        return self.train - self.base < DOUBTFUL * (1 - self.base)

    @property
    def line(self) -> str:
        """What every audit says first."""
        seen = "-" if self.holdout is None else self._figure(self.holdout)
        return (
            f"{self.measure} of the network as read: {self._figure(self.train)} on the training "
            f"samples, {seen} on the held-out ones"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """A warning where the network does not know the samples it is said to have learned."""
        if not self.doubtful:
            return ()
        trivial = "the mean" if self.measure == "R^2" else "the commonest class"
        return (
            f"The network as read reaches an {self.measure} of {self._figure(self.train)} on its training "
            f"samples, where always naming {trivial} reaches {self._figure(self.base)}: it may not have "
            "been read as what it is, or the samples or labels are not those it learned. Check "
            "architecture, preprocessing and labels.",
        )

    def _figure(self, value: float) -> str:
        return f"{value:.3g}" if self.measure == "R^2" else f"{value:.1%}"


def fit_of(
    checkpoint: Checkpoint, train: Dataset | None, control: Dataset | None, task: str
) -> Fit | None:
    """Measured on samples that :func:`~residuum.auditing.inputs.check_fit` let pass."""
    if train is None:
        return None
    model = build_model(checkpoint, torch.float64)
    outputs = evaluate(model, train.x.double())
    task = choose_task(task, outputs.shape[1])
    y = normalise_labels(train.y, task, outputs.shape[1])
    holdout = None
    # Held-out samples may come without labels, which reads as one label that says nothing.
    if control is not None and (len(control.y.unique()) > 1 or task == "regression"):
        known = task == "regression" or set(control.y.tolist()) <= set(train.y.tolist())
        if known and control.y.shape[1:] == train.y.shape[1:]:
            wanted = normalise_labels(control.y, task, outputs.shape[1])
            holdout = accuracy(evaluate(model, control.x.double()), wanted, task)
    if task == "regression":
        return Fit("R^2", accuracy(outputs, y, task), holdout, 0.0)
    base = float(y.unique(return_counts=True)[1].max()) / len(y)
    return Fit("accuracy", accuracy(outputs, y, task), holdout, base)
