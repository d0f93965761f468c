"""Was the network read rightly? How well it does, as read, on the samples it is said to have seen.

A file says little of what a network is: pooling can pass for stride, an adapter for a network,
labels may be shifted. All of these show in the accuracy on the training samples, so every audit begins
with it. It does not show an activation read wrongly: small networks fit either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from residuum.checkpoints import build_model
from residuum.records import Checkpoint, Dataset
from residuum.records.base import Record
from residuum.theory.kkt import evaluate
from residuum.theory.rows import accuracy, choose_task, normalise_labels

DOUBTFUL = 0.5  # of the way from naming the commonest class, or the mean, to being always right


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
