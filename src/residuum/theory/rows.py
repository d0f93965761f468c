"""From labels to the constraints of the margin problem: one row per constraint.

    binary       y_i Phi(x_i) >= 1                                lam_i >= 0
    multiclass   Phi_y(x_i) - Phi_c(x_i) >= 1 for rivals c        lam_ic >= 0
    regression   no constraint; theta = sum_ik lam_ik grad Phi_k  lam free

With ONE multiplier on the best rival an exact multiclass KKT point keeps a relative residual of
0.4-0.5, because rivals tie there: ``rivals="tied"`` gives a row to every rival within a tolerance
of the best one; ``rivals="best"`` is the published form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residuum.errors import DataError, InputError, require_known
from residuum.records import TASKS
from residuum.stationarity import Rows

RIVALS = ("tied", "best")
TIED = 0.05  # of the least margin: rivals within it count as tied


def choose_task(task: str, outputs: int) -> str:
    """``auto`` means binary for one output, multiclass for more; others are checked for fit."""
    if task in ("auto", ""):
        return "binary" if outputs == 1 else "multiclass"
    require_known(task, TASKS, "No task")
    if (task == "binary" and outputs != 1) or (task == "multiclass" and outputs < 2):
        raise InputError(
            f"Task {task} needs {'one output' if task == 'binary' else 'two or more outputs'}; "
            f"this network has {outputs}.",
            f"Use --task {'multiclass' if outputs > 1 else 'binary'}.",
        )
    return task


def normalize_labels(y: Tensor, task: str, outputs: int) -> Tensor:
    """Labels as the mathematics has them: -1/+1, class indices, or (n, C) targets."""
    if task == "regression":
        targets = y.double().reshape(len(y), -1)
        if targets.shape[1] != outputs:
            raise DataError(
                f"Regression needs one target per output; got {targets.shape[1]} for {outputs}.",
                "Save y as (n, outputs).",
            )
        return targets
    values = set(y.flatten().tolist())
    if y.ndim != 1:
        raise DataError(f"Labels must be a vector; got shape {tuple(y.shape)}.", "Save y as (n,).")
    if len(values) < 2:
        raise DataError(
            f"Labels of at least two classes are needed; all {len(y)} are {values.pop()}.",
            "A margin between classes is not defined for one class: add samples of another.",
        )
    if task == "binary":
        if not (values <= {-1, 1} or values <= {0, 1}):
            raise DataError(
                f"One output takes labels -1/+1 or 0/1; got {sorted(values)[:6]}.",
                "Regroup the labels, or say --task regression.",
            )
        return torch.where(y > 0, 1.0, -1.0).double()
    if not all(v == int(v) and 0 <= v < outputs for v in values):
        raise DataError(
            f"Class indices run from 0 to {outputs - 1}; got {sorted(values)[:12]}.",
            "Renumber the classes in the order of the outputs.",
        )
    return y.long()


def accuracy(outputs: Tensor, y: Tensor, task: str) -> float:
    """Share of samples on the right side; R^2 for a regression. y as :func:`normalize_labels` has it."""
    if task == "regression":
        spread = float((y - y.mean(0)).square().sum())
        misfit = float((y - outputs).square().sum())
        return 1 - misfit / spread if spread > 0 else float(misfit == 0)
    right = outputs.argmax(1) == y if task == "multiclass" else outputs[:, 0] * y > 0
    return float(right.double().mean())


def margins(outputs: Tensor, y: Tensor) -> Tensor:
    """(n, 1) y Phi for one output; (n, C) Phi_y - Phi_c for more, infinite at the own class."""
    if outputs.shape[1] == 1:
        return y[:, None] * outputs
    own = torch.nn.functional.one_hot(y, outputs.shape[1]).bool()
    return (outputs[own][:, None] - outputs).masked_fill(own, torch.inf)


def constraint_rows(outputs: Tensor, y: Tensor, task: str, rivals: str = "tied") -> Rows:
    """Rows of the problem: (sample, covector) pairs, each with a multiplier of its own.

    Binary: y_i. Regression: one row per output. Several classes: e_y - e_c for every rival c whose
    margin is within ``TIED`` of the least, since at a KKT point several constraints of one sample
    may be tight; "best" is the published choice of one.

    outputs: (n, C).
    y: as :func:`normalize_labels` returns it.
    """
    n, classes = outputs.shape
    if task == "binary":
        return Rows(torch.arange(n), y.to(outputs.dtype)[:, None])
    if task == "regression":
        covectors = torch.eye(classes, dtype=outputs.dtype).repeat(n, 1)
        return Rows(torch.arange(n).repeat_interleave(classes), covectors)
    require_known(rivals, RIVALS, "No rivals rule")
    m = margins(outputs, y)
    best = m.amin(1, keepdim=True)
    if rivals == "best":
        chosen = torch.zeros_like(m, dtype=torch.bool).scatter(1, m.argmin(1, keepdim=True), True)
    else:
        chosen = m <= best + TIED * best.abs()
    index, rival = chosen.nonzero(as_tuple=True)
    rows = torch.arange(len(index))
    covectors = outputs.new_zeros(len(index), classes)
    covectors[rows, y[index]] = 1
    covectors[rows, rival] = -1
    return Rows(index, covectors)
