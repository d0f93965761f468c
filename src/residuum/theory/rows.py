"""Make the constraints of margin maximization from samples and labels, one row for each constraint.

    binary       y_i Phi(x_i) >= 1                                lam_i >= 0
    multiclass   Phi_y(x_i) - Phi_c(x_i) >= 1 for rivals c        lam_ic >= 0
    regression   no constraint; theta = sum_ik lam_ik grad Phi_k  lam_ik of any sign

Phi(x_i) are the outputs of the network for sample x_i with label y_i, and lam are the multipliers. A rival is
a class that is not the label. At an exact multiclass KKT point, several rivals of a sample have the same
margin. If only one of these rivals has a constraint, the relative residual is 0.4-0.5. So ``rivals="tied"``
makes a constraint for every rival whose margin is close to the smallest margin. ``rivals="best"`` makes a
constraint only for the rival with the smallest margin, as in published attacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residuum.errors import DataError, InputError, require_known
from residuum.records import TASKS
from residuum.stationarity import Rows

RIVALS = ("tied", "best")
# A sample has a margin to each wrong class. A wrong class counts as tied if its margin exceeds the smallest
# one by at most this share.
TIED_TOLERANCE = 0.05


def choose_task(task: str, outputs: int) -> str:
    """Return the task of a network, and check that it fits the number of outputs.

    Args:
        task: binary, multiclass, regression, or ``auto``, which is binary for one output and else multiclass.
        outputs: Number of outputs of the network.

    Returns:
        binary, multiclass or regression.

    Raises:
        InputError: If the task does not fit the number of outputs.
    """
    if task in ("auto", ""):
        return "binary" if outputs == 1 else "multiclass"
    require_known(task, TASKS, "No task")
    if (task == "binary" and outputs != 1) or (task == "multiclass" and outputs < 2):
        raise InputError(
            f"For the task {task!r}, a network must have "
            f"{'one output' if task == 'binary' else 'two or more outputs'}; the number of outputs of "
            f"this network is {outputs}.",
            f"Pass --task {'multiclass' if outputs > 1 else 'binary'}.",
        )
    return task


def normalize_labels(y: Tensor, task: str, outputs: int) -> Tensor:
    """Check labels, and convert them to signs, class indices or targets.

    Args:
        y: Labels of n samples.
        task: binary, multiclass or regression.
        outputs: Number C of outputs of the network.

    Returns:
        (n,) signs -1/+1 for a binary task, (n,) class indices for several classes, or (n, C) targets for a
        regression.

    Raises:
        DataError: If the labels do not fit the task and the number of outputs.
    """
    if task == "regression":
        targets = y.double().reshape(len(y), -1)
        if targets.shape[1] != outputs:
            raise DataError(
                f"For regression, each sample needs one target for each output of the network; got "
                f"{targets.shape[1]} targets for {outputs} outputs.",
                "Save the targets 'y' with shape (n, outputs).",
            )
        return targets
    label_values = set(y.flatten().tolist())
    if y.ndim != 1:
        raise DataError(
            f"The labels of the samples must be a vector; got an array of shape {tuple(y.shape)}.",
            "Save the labels 'y' with shape (n,).",
        )
    if len(label_values) < 2:
        raise DataError(
            f"The samples must belong to at least two classes; all {len(y)} labels are "
            f"{label_values.pop()}.",
            "Add samples of another class, because a single class has no margin.",
        )
    if task == "binary":
        if not (label_values <= {-1, 1} or label_values <= {0, 1}):
            raise DataError(
                f"For a network with one output, the labels of the samples must be -1 and +1, or 0 and 1; "
                f"got {sorted(label_values)[:6]}.",
                "Change the labels, or pass --task regression.",
            )
        return torch.where(y > 0, 1.0, -1.0).double()
    if not all(v == int(v) and 0 <= v < outputs for v in label_values):
        raise DataError(
            f"The labels of the samples must be class numbers from 0 to {outputs - 1}; got "
            f"{sorted(label_values)[:12]}.",
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
        The share, at most 1. R^2 may be negative.
    """
    if task == "regression":
        total_squares = float((y - y.mean(0)).square().sum())
        residual_squares = float((y - outputs).square().sum())
        return (
            1 - residual_squares / total_squares
            if total_squares > 0
            else float(residual_squares == 0)
        )
    is_correct = outputs.argmax(1) == y if task == "multiclass" else outputs[:, 0] * y > 0
    return float(is_correct.double().mean())


def margins(outputs: Tensor, y: Tensor) -> Tensor:
    """Return how far the outputs are on the right side of each class boundary.

    The margin of a network with one output Phi and a label y of -1/+1 is y Phi. With more outputs, it is the
    output of the sample's class minus the output of each other class.

    Args:
        outputs: (n, C) outputs of the network.
        y: Labels from :func:`normalize_labels`.

    Returns:
        (n, 1) margins for one output, or (n, C) margins, which are infinite at the sample's class.
    """
    if outputs.shape[1] == 1:
        return y[:, None] * outputs
    is_label = torch.nn.functional.one_hot(y, outputs.shape[1]).bool()
    return (outputs[is_label][:, None] - outputs).masked_fill(is_label, torch.inf)


def constraint_rows(outputs: Tensor, y: Tensor, task: str, rivals: str = "tied") -> Rows:
    """Return the constraints of margin maximization, each of which gets a separate multiplier.

    A constraint is a sample and a covector, by which the outputs of the network are weighted. The covector is
    the label of -1/+1 for a binary network, and a unit vector for each output of a regression. With several
    classes, it is the unit vector of the sample's class minus the unit vector of a rival class.

    Args:
        outputs: (n, C) outputs of the network.
        y: Labels from :func:`normalize_labels`.
        task: binary, multiclass or regression.
        rivals: Which rival classes (classes that are not the label) get a constraint. ``tied`` for all rivals
            with nearly the smallest margin, because at a KKT point several margins of a sample can be equal.
            ``best`` for the rival with the smallest margin, as in published attacks.

    Returns:
        The constraints.
    """
    n, classes = outputs.shape
    if task == "binary":
        return Rows(torch.arange(n), y.to(outputs.dtype)[:, None])
    if task == "regression":
        covectors = torch.eye(classes, dtype=outputs.dtype).repeat(n, 1)
        return Rows(torch.arange(n).repeat_interleave(classes), covectors)
    require_known(rivals, RIVALS, "No rivals rule")
    all_margins = margins(outputs, y)
    smallest_margins = all_margins.amin(1, keepdim=True)
    if rivals == "best":
        has_constraint = torch.zeros_like(all_margins, dtype=torch.bool).scatter(
            1, all_margins.argmin(1, keepdim=True), True
        )
    else:
        has_constraint = all_margins <= smallest_margins + TIED_TOLERANCE * smallest_margins.abs()
    index, rival = has_constraint.nonzero(as_tuple=True)
    constraint_numbers = torch.arange(len(index))
    covectors = outputs.new_zeros(len(index), classes)
    covectors[constraint_numbers, y[index]] = 1
    covectors[constraint_numbers, rival] = -1
    return Rows(index, covectors)
