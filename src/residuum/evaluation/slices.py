"""Who is recovered? The training set cut by class and by margin."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from residuum.errors import DataError
from residuum.records.data import Dataset
from residuum.records.scores import SampleScore, ScoreSlice

BINS = 5
MOST_CLASSES = 1000


def discrete(y: Tensor) -> bool:
    """Whether targets are class labels: whole numbers, few of them, one per sample."""
    whole = not y.is_floating_point() or bool((y == y.round()).all())
    return y.ndim == 1 and whole and len(y.unique()) <= MOST_CLASSES


def margins(outputs: Tensor, y: Tensor) -> Tensor | None:
    """How clearly the network decides each sample; None for regression targets. (n,).

    One output: m_i = y_i Phi(x_i), y in -1/+1 (0/1 is read as such). Several: the output of the
    sample's class less the largest other one.
    """
    outputs, y = outputs.detach().cpu().double(), y.cpu()
    if len(outputs) != len(y):
        raise DataError(
            f"outputs need one row per training sample; got {len(outputs)} for {len(y)}.",
            "Give what the network says of train.x.",
        )
    if not discrete(y):
        return None
    outputs = outputs.reshape(len(outputs), -1)
    if outputs.shape[1] == 1:
        signs = torch.where(y > 0, 1.0, -1.0)
        return signs * outputs[:, 0] if len(y.unique()) <= 2 else None
    if y.min() < 0 or y.max() >= outputs.shape[1]:
        raise DataError(
            f"Labels must index the {outputs.shape[1]} outputs; they run from {int(y.min())} "
            f"to {int(y.max())}.",
            "Number the classes from 0.",
        )
    own = torch.zeros_like(outputs, dtype=torch.bool)
    own[torch.arange(len(y)), y.long()] = True
    return outputs[own] - outputs.masked_fill(own, -torch.inf).amax(1)


def by_class(train: Dataset, rows: tuple[SampleScore, ...], metric: str) -> tuple[ScoreSlice, ...]:
    """One slice per label, in order; none for regression targets."""
    labels = sorted({row.label for row in rows if row.label is not None})
    binary = set(labels) <= {-1, 1}
    names = {}
    for label in labels:
        at = int(label > 0) if binary else int(label)
        names[label] = train.classes[at] if 0 <= at < len(train.classes) else f"{label:g}"
    return tuple(
        _slice(names[label], [row for row in rows if row.label == label], metric)
        for label in labels
    )


def by_margin(rows: tuple[SampleScore, ...], metric: str) -> tuple[ScoreSlice, ...]:
    """Equally large slices by margin, smallest margins first; none where margins are unknown."""
    known = sorted((row for row in rows if row.margin is not None), key=lambda row: row.margin or 0)
    if not known:
        return ()
    parts = np.array_split(np.arange(len(known)), min(BINS, len(known)))
    slices = []
    for part in parts:
        some = [known[i] for i in part]
        name = f"{some[0].margin:.4g} .. {some[-1].margin:.4g}"
        slices.append(_slice(name, some, metric))
    return tuple(slices)


def _slice(name: str, rows: list[SampleScore], metric: str) -> ScoreSlice:
    flags = [row.recovered for row in rows if row.recovered is not None]
    values = [m.score for row in rows if (m := row.matches[metric]).score is not None]
    return ScoreSlice(
        name=name,
        samples=len(rows),
        recovered=sum(flags) if flags else None,
        rate=sum(flags) / len(rows) if flags else None,
        median=float(np.median(values)) if values else None,
    )
