"""From labels to the constraints of the margin problem: one row per constraint.

    binary       y_i Phi(x_i) >= 1                                lam_i >= 0
    multiclass   Phi_y(x_i) - Phi_c(x_i) >= 1 for rivals c        lam_ic >= 0
    regression   no constraint; theta = sum_ik lam_ik grad Phi_k  lam free

With only ONE multiplier, on the best rival, an exact multiclass KKT point has a relative residual of 0.4-0.5,
because rivals tie there. ``rivals="tied"`` gives a row to every rival within a tolerance of the best one.
``rivals="best"`` is the published form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residuum.errors import DataError, InputError, require_known
from residuum.records import TASKS
from residuum.stationarity import Rows

RIVALS = ("tied", "best")
TIED_TOLERANCE = 0.05  # relative to the smallest margin: rivals within it count as tied


def choose_task(task: str, outputs: int) -> str:
    """Return the task, and check that it fits the number of outputs.

    Args:
        task: A task, or ``auto`` for binary with one output and multiclass with more.
        outputs: Number of outputs.

    Returns:
        The task.

    Raises:
        InputError: If the task does not fit.
    """
    if task in ("auto", ""):
        return "binary" if outputs == 1 else "multiclass"
    require_known(task, TASKS, "No task")
    if (task == "binary" and outputs != 1) or (task == "multiclass" and outputs < 2):
        raise InputError(
            f"Task {task} needs {'one output' if task == 'binary' else 'two or more outputs'}; "
            f"this network has {outputs}.",
            f"Pass --task {'multiclass' if outputs > 1 else 'binary'}.",
        )
    return task


def normalize_labels(y: Tensor, task: str, outputs: int) -> Tensor:
    """Convert labels to the form that the mathematics uses.

    Args:
        y: Labels.
        task: binary, multiclass or regression.
        outputs: Number of outputs.

    Returns:
        (n,) signs -1/+1, (n,) class indices, or (n, C) targets.

    Raises:
        DataError: If the labels do not fit the task.
    """
    if task == "regression":
        targets = y.double().reshape(len(y), -1)
        if targets.shape[1] != outputs:
            raise DataError(
                f"Regression needs one target per output; got {targets.shape[1]} targets for {outputs} "
                "outputs.",
                "Save y as (n, outputs).",
            )
        return targets
    values = set(y.flatten().tolist())
    if y.ndim != 1:
        raise DataError(
            f"Labels must be a vector; got shape {tuple(y.shape)}.", "Save y with shape (n,)."
        )
    if len(values) < 2:
        raise DataError(
            f"Labels of at least two classes are needed; all {len(y)} are {values.pop()}.",
            "Add samples of another class, because a single class has no margin.",
        )
    if task == "binary":
        if not (values <= {-1, 1} or values <= {0, 1}):
            raise DataError(
                f"A network with one output needs labels -1/+1 or 0/1; got {sorted(values)[:6]}.",
                "Change the labels, or pass --task regression.",
            )
        return torch.where(y > 0, 1.0, -1.0).double()
    if not all(v == int(v) and 0 <= v < outputs for v in values):
        raise DataError(
            f"Class indices must run from 0 to {outputs - 1}; got {sorted(values)[:12]}.",
            "Number the classes in the order of the outputs.",
        )
    return y.long()


def accuracy(outputs: Tensor, y: Tensor, task: str) -> float:
    """Return the share of correctly classified samples, or R^2 for a regression.

    Args:
        outputs: (n, C) outputs of the network.
        y: Labels from :func:`normalize_labels`.
        task: binary, multiclass or regression.

    Returns:
        The accuracy.
    """
    if task == "regression":
        spread = float((y - y.mean(0)).square().sum())
        error = float((y - outputs).square().sum())
        return 1 - error / spread if spread > 0 else float(error == 0)
    is_correct = outputs.argmax(1) == y if task == "multiclass" else outputs[:, 0] * y > 0
    return float(is_correct.double().mean())


def margins(outputs: Tensor, y: Tensor) -> Tensor:
    """Return y Phi for one output, or Phi_y - Phi_c for more.

    Args:
        outputs: (n, C) outputs of the network.
        y: Labels from :func:`normalize_labels`.

    Returns:
        (n, 1) or (n, C) margins, infinite at the sample's class.
    """
    if outputs.shape[1] == 1:
        return y[:, None] * outputs
    is_label = torch.nn.functional.one_hot(y, outputs.shape[1]).bool()
    return (outputs[is_label][:, None] - outputs).masked_fill(is_label, torch.inf)


def constraint_rows(outputs: Tensor, y: Tensor, task: str, rivals: str = "tied") -> Rows:
    """Return the rows of the problem: pairs (sample, covector), each with a separate multiplier.

    The covector is y_i for a binary network. A regression has a row per output. With several classes, it is
    e_y - e_c for every rival c whose margin is within ``TIED_TOLERANCE`` of the smallest, because several
    constraints of a sample can be tight at a KKT point. "best" is the published choice of one rival.

    Args:
        outputs: (n, C) outputs of the network.
        y: Labels from :func:`normalize_labels`.
        task: binary, multiclass or regression.
        rivals: tied or best.

    Returns:
        The rows.
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
        chosen = m <= best + TIED_TOLERANCE * best.abs()
    index, rival = chosen.nonzero(as_tuple=True)
    rows = torch.arange(len(index))
    covectors = outputs.new_zeros(len(index), classes)
    covectors[rows, y[index]] = 1
    covectors[rows, rival] = -1
    return Rows(index, covectors)
