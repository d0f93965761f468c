"""Targets of the training records of boosted trees, if the rows of the records are known.

Boosting with squared error fits every tree to the residuals of the trees before. Let ``F_i`` be the
prediction for record i before a tree was added. A leaf L of this tree with n records stores

    v = eta x (sum over L of (y_i - F_i)) / (n + lambda)

with the learning rate eta and the regularization lambda. Whoever knows the rows knows the records of every
leaf and all predictions, because the file stores the values of the earlier trees. So every leaf of every tree
gives a linear equation for the targets:

    sum over L of y_i  =  a n v + c v + sum over L of F_i    with  a = 1 / eta,  c = lambda / eta.

The equation is linear in a and c as well, so a file that does not state eta and lambda determines them
together with the targets. The equations are solved in :mod:`.leaf_equations`.

A target is determined if the equations leave no freedom for it, and if its standard error, computed from the
misfit of all equations, is small. Rows that are not the training rows do not fit the equations, so that the
standard errors are large. A leaf whose stored number of records differs from that of the known rows gives no
equation. So an attacker who does not know all rows still recovers targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from residuum.errors import InputError
from residuum.trees.forest import BOOSTING, Booleans, Floats, Forest
from residuum.trees.leaf_equations import (
    Equations,
    Solution,
    build_equations,
    solve_by_iteration,
    solve_dense,
)

TOLERANCE = 1e-5  # largest error of a determined target, as a share of the range of the targets
DEVIATIONS = 6.0  # a determined target is right within this number of standard errors
MAX_DENSE = 2000  # the equations of more records than this are solved by iteration
MIN_SPARE = 10  # fewer equations than this beyond the rank do not show that the rows are right
MIN_TRACE = 1e-9  # settings are unknown if they change the misfit by less than this share
# Names of squared error in scikit-learn, XGBoost, LightGBM and CatBoost, "" if the file names no loss.
SQUARED_ERROR = (
    "",
    *("squared_error", "ls", "least_squares", "halfsquarederror"),
    *("reg:squarederror", "reg:linear"),
    *("regression", "regression_l2", "l2", "mse", "mean_squared_error"),
    "rmse",
)


@dataclass(frozen=True)
class RecoveredTargets:
    """The targets of known rows.

    Attributes:
        y: (records,) targets. NaN for all records if there is no solution at all.
        is_determined: (records,) whether the file determines the target within the tolerance.
        error: (records,) standard error of each target. inf if the equations leave freedom for the target.
        learning_rate: Learning rate of the training, as stored in the file or computed. None if unknown.
        regularization: Regularization of the leaf values, as given or computed. None if unknown.
        equations: Number of leaves that give an equation.
        leaves: Number of all leaves.
        rank: Number of independent equations, estimated if there are many records.
        misfit: Standard deviation of one leaf's sum of targets from its equation, per square root of n.
    """

    y: Floats
    is_determined: Booleans
    error: Floats
    learning_rate: float | None
    regularization: float | None
    equations: int
    leaves: int
    rank: int
    misfit: float

    @property
    def lines(self) -> tuple[str, ...]:
        """What was recovered, in sentences."""
        count, records = int(self.is_determined.sum()), len(self.y)
        sentences = [
            f"Someone who knows the rows learns the targets of {count} of {records} records from the file."
        ]
        if self.equations < self.leaves:
            sentences.append(
                f"{self.leaves - self.equations} of {self.leaves} leaves store another number of records "
                "than the known rows put there, so these leaves were left out."
            )
        return tuple(sentences)


def recover_targets(
    forest: Forest,
    x: Floats,
    *,
    tolerance: float = TOLERANCE,
    learning_rate: float | None = None,
    regularization: float | None = None,
    max_dense: int = MAX_DENSE,
) -> RecoveredTargets:
    """Compute the targets of training records whose rows are known.

    Args:
        forest: Boosted trees that were trained with squared error.
        x: (records, columns) rows of the training table. The targets have the same order.
        tolerance: Largest error of a determined target, as a share of the range of the targets.
        learning_rate: Learning rate, if known. Otherwise the one in the file, or the computed one.
        regularization: Regularization lambda of the leaf values, if known. Otherwise the one in the file, or
            the computed one.
        max_dense: The equations of more records than this are solved by iteration.

    Returns:
        The targets, and which of them the file determines.

    Raises:
        InputError: If the model was not boosted with squared error, or if the rows have other columns.
    """
    if reason := why_not(forest):
        raise InputError(
            f"Targets cannot be recovered from known rows: {reason}.",
            "Pass a regressor that was boosted with squared error.",
        )
    if x.ndim != 2 or not len(x) or x.shape[1] != forest.columns:
        raise InputError(
            f"The rows must have {forest.columns} columns as the trees do; got shape {x.shape}.",
            "Pass one row for each record, with the columns in the order of the training table.",
        )
    equations = build_equations(forest, x)
    solution = _no_solution(len(x))
    if len(equations.sides):
        solve = solve_dense if len(x) <= max_dense else solve_by_iteration
        solution = solve(equations)
    learning_rate = forest.learning_rate if learning_rate is None else learning_rate
    regularization = forest.regularization if regularization is None else regularization
    return _fit(equations, solution, _choices(learning_rate, regularization), tolerance)


def why_not(forest: Forest) -> str:
    """Return why targets cannot be recovered from known rows, "" if they can."""
    if forest.kind != BOOSTING:
        return f'the trees must be boosted; these trees have the kind "{forest.kind}"'
    if not is_squared_error(forest):
        loss = forest.objective or "that of a classifier"
        return (
            f"the loss must be the squared error, and the loss of this model is {loss}, for which "
            "leaf values are not linear in the targets"
        )
    if forest.outputs is not None and len(set(forest.outputs.tolist())) > 1:
        return "the model must have one output; this model has several"
    if forest.has_sample_weights:
        return (
            "all records must have the same weight, and this model was trained with sample weights"
        )
    return ""


def is_squared_error(forest: Forest) -> bool:
    """Return whether the trees were trained with squared error. True if the file names no loss."""
    return not forest.is_classifier and forest.objective.lower() in SQUARED_ERROR


def _no_solution(records: int) -> Solution:
    return Solution(
        y=np.zeros((records, 3)),
        residual=np.zeros((0, 3)),
        has_freedom=np.ones(records, dtype=bool),
        deviation=np.zeros(records),
        rank=0,
    )


def _fit(
    equations: Equations, solution: Solution, choices: Floats, tolerance: float
) -> RecoveredTargets:
    """Choose the unknown settings with the smallest misfit, and return the targets with their errors.

    Args:
        equations: The equations.
        solution: Solutions for the three right sides.
        choices: (3, 1 + k) coefficients of the right sides from :func:`_choices`.
        tolerance: Largest error of a determined target, as a share of the range of the targets.

    Returns:
        The targets.
    """
    y, effects = np.split(solution.y @ choices, [1], axis=1)
    residual, traces = np.split(solution.residual @ choices, [1], axis=1)
    scales = np.linalg.norm(traces, axis=0)
    unknown_settings = traces.shape[1]
    spare = len(residual) - solution.rank - unknown_settings
    size = np.linalg.norm(equations.sides[:, 1]) / max(len(solution.y), 1)
    settings = np.zeros(unknown_settings)
    variance = solution.deviation**2
    is_solved = spare >= MIN_SPARE and bool((scales > MIN_TRACE * size).all())
    if is_solved and unknown_settings:
        q, r = np.linalg.qr(traces / scales)
        is_solved = bool(np.abs(np.diag(r)).min() > MIN_TRACE)
    if is_solved and unknown_settings:
        settings = -np.linalg.solve(r, q.T @ residual[:, 0]) / scales
        variance = variance + (np.linalg.solve(r.T, (effects / scales).T) ** 2).sum(0)
    targets = y[:, 0] + effects @ settings
    error = np.full(len(targets), np.inf)
    misfit = np.inf
    if is_solved:
        misfit = float(np.linalg.norm(residual[:, 0] + traces @ settings) / np.sqrt(spare))
        error = np.where(solution.has_freedom, np.inf, misfit * np.sqrt(variance))
    fixed_targets = targets[~solution.has_freedom]
    spread = float(np.ptp(fixed_targets)) if len(fixed_targets) else 0.0
    a, c = choices[1:, 0] + choices[1:, 1:] @ settings
    return RecoveredTargets(
        y=targets if is_solved else np.full(len(targets), np.nan),
        is_determined=DEVIATIONS * error <= tolerance * spread,
        error=error,
        learning_rate=float(1 / a) if is_solved and a else None,
        regularization=float(c / a) if is_solved and a else None,
        equations=len(residual),
        leaves=equations.leaves,
        rank=solution.rank,
        misfit=misfit,
    )


def _choices(learning_rate: float | None, regularization: float | None) -> Floats:
    """Return the coefficients of the right sides base, rate and shrinkage.

    Args:
        learning_rate: Learning rate eta, None if unknown.
        regularization: Regularization lambda, None if unknown.

    Returns:
        (3, 1 + k) coefficients. Column 0 has the known settings. Each other column is multiplied by one of
        the k unknown settings.
    """
    if learning_rate is None:
        if regularization is None:
            return np.eye(3)
        return np.array([[1.0, 0.0], [0.0, 1.0], [0.0, regularization]])
    if regularization is None:
        return np.array([[1.0, 0.0], [1 / learning_rate, 0.0], [0.0, 1.0]])
    return np.array([[1.0], [1 / learning_rate], [regularization / learning_rate]])
