"""Recover the targets of the training records of boosted trees, if the rows of the records are known.

Boosting with squared error fits every tree to the residuals of the earlier trees. Let ``y_i`` be the target
of record i, and let ``F_i`` be its prediction before a tree was added. A leaf L of this tree with n records
stores

    v = eta x (sum over L of (y_i - F_i)) / (n + lambda)

with the learning rate eta and the regularization lambda. An attacker who knows the rows knows which records
reach each leaf. The attacker also knows all ``F_i``, because the file stores the values of the earlier trees.
So every leaf of every tree gives a linear equation for the targets:

    sum over L of y_i  =  a n v + c v + sum over L of F_i    with  a = 1 / eta,  c = lambda / eta.

The equation is linear in a and c as well. So if the file does not state eta and lambda, the equations
determine them together with the targets. The equations are solved in :mod:`.leaf_equations`.

The file determines a target if two conditions hold. All solutions of the equations have the same value of
this target, and its standard error is small. The standard error is computed from the residuals of all
equations. If the rows are not the training rows, they do not fit the equations, so the standard errors are
large. If the stored number of records of a leaf is not the number of known rows in this leaf, the leaf gives
no equation. So an attacker who does not know all rows can still recover targets.
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

# A target counts as determined if its error is at most this share of the range of all targets.
TOLERANCE = 1e-5
DEVIATIONS = 6.0  # assumed upper limit for the error of a recovered target, in standard errors
MAX_DENSE = 2000  # with more records than this, the equations are solved by iteration
# Targets are computed only if there are at least this many more equations than unknowns. With fewer
# equations, wrong rows would also fit.
MIN_SPARE = 10
# An unknown learning rate or regularization is not computed if it changes the errors of the equations by
# less than this share.
MIN_TRACE = 1e-9
# Names of the squared error as a training loss in scikit-learn, XGBoost, LightGBM and CatBoost. "" means
# that the file does not name the loss.
SQUARED_ERROR = (
    "",
    *("squared_error", "ls", "least_squares", "halfsquarederror"),
    *("reg:squarederror", "reg:linear"),
    *("regression", "regression_l2", "l2", "mse", "mean_squared_error"),
    "rmse",
)


@dataclass(frozen=True)
class RecoveredTargets:
    """The targets of training records whose rows are known.

    Attributes:
        y: (records,) targets. NaN for all records if no target can be computed.
        is_determined: (records,) whether the file determines the target up to the tolerance.
        error: (records,) standard error of each target. inf if several values of the target solve the
            equations.
        learning_rate: Learning rate of the training: passed by the caller, stored in the file, or computed.
            None if unknown.
        regularization: Regularization lambda of the leaf values: passed by the caller, stored in the file, or
            computed. None if unknown.
        equations: Number of leaves that give an equation.
        leaves: Number of all leaves, including leaves that give no equation.
        rank: Number of independent equations. An estimate if there are many records.
        misfit: Standard deviation of the residuals of the equations. The equation of a leaf with n records is
            divided by sqrt(n).
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
        """Sentences that say how many targets were recovered."""
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
        tolerance: A target counts as recovered if its error is at most this share of the range of all
            targets.
        learning_rate: Learning rate, if known. If None, the function uses the learning rate in the file, or
            computes it if the file does not state it.
        regularization: Regularization lambda of the leaf values, if known. If None, the function uses the
            regularization in the file, or computes it if the file does not state it.
        max_dense: If there are more records than this, the equations are solved by iteration.

    Returns:
        The targets, and which of them the file determines.

    Raises:
        InputError: If the model was not boosted with squared error, or if the number of columns of ``x`` is
            not that of the forest.
    """
    if reason := why_not(forest):
        raise InputError(
            f"These trees must determine the target of each row of a table; they do not: {reason}.",
            "Pass a regressor that was boosted with squared error.",
        )
    if x.ndim != 2 or not len(x) or x.shape[1] != forest.columns:
        raise InputError(
            f"The rows of the table must have {forest.columns} columns, as many as the trees were trained "
            f"on; got an array of shape {x.shape}.",
            "Pass one row for each record, with the columns in the order of the training table.",
        )
    equations = build_equations(forest, x)
    solution = _no_solution(len(x))
    if len(equations.sides):
        solve_equations = solve_dense if len(x) <= max_dense else solve_by_iteration
        solution = solve_equations(equations)
    learning_rate = forest.learning_rate if learning_rate is None else learning_rate
    regularization = forest.regularization if regularization is None else regularization
    return _fit(equations, solution, _choices(learning_rate, regularization), tolerance)


def why_not(forest: Forest) -> str:
    """Return why targets cannot be recovered from known rows, "" if they can."""
    if forest.kind != BOOSTING:
        return f'the trees must be boosted; these trees have the kind "{forest.kind}"'
    if not is_squared_error(forest):
        loss_name = forest.objective or "that of a classifier"
        return (
            f"the loss must be the squared error, and the loss of this model is {loss_name}, for which "
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
    """Return True if the trees were trained with squared error, or if the file does not name the loss."""
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
    """Compute the targets of the records. Also compute the learning rate and the regularization if unknown.

    The unknown settings are those with the smallest residuals of the equations.

    Args:
        equations: The equations ``A y = base + a rate + c shrinkage`` of the leaves.
        solution: Least-squares solutions y for each of the right-hand sides base, rate and shrinkage.
        choices: (3, 1 + k) coefficients of these right-hand sides from :func:`_choices`, with k unknown
            settings.
        tolerance: A target counts as recovered if its error is at most this share of the range of all
            targets.

    Returns:
        The targets with their standard errors.
    """
    y, effects_of_settings = np.split(solution.y @ choices, [1], axis=1)
    residual, setting_residuals = np.split(solution.residual @ choices, [1], axis=1)
    setting_norms = np.linalg.norm(setting_residuals, axis=0)
    unknown_settings = setting_residuals.shape[1]
    spare_equations = len(residual) - solution.rank - unknown_settings
    rate_size = np.linalg.norm(equations.sides[:, 1]) / max(len(solution.y), 1)
    fitted_settings = np.zeros(unknown_settings)
    variance = solution.deviation**2
    can_be_solved = spare_equations >= MIN_SPARE and bool(
        (setting_norms > MIN_TRACE * rate_size).all()
    )
    if can_be_solved and unknown_settings:
        q, r = np.linalg.qr(setting_residuals / setting_norms)
        can_be_solved = bool(np.abs(np.diag(r)).min() > MIN_TRACE)
    if can_be_solved and unknown_settings:
        fitted_settings = -np.linalg.solve(r, q.T @ residual[:, 0]) / setting_norms
        variance = variance + (
            np.linalg.solve(r.T, (effects_of_settings / setting_norms).T) ** 2
        ).sum(0)
    targets = y[:, 0] + effects_of_settings @ fitted_settings
    standard_errors = np.full(len(targets), np.inf)
    misfit = np.inf
    if can_be_solved:
        misfit = float(
            np.linalg.norm(residual[:, 0] + setting_residuals @ fitted_settings)
            / np.sqrt(spare_equations)
        )
        standard_errors = np.where(solution.has_freedom, np.inf, misfit * np.sqrt(variance))
    unique_targets = targets[~solution.has_freedom]
    target_range = float(np.ptp(unique_targets)) if len(unique_targets) else 0.0
    a, c = choices[1:, 0] + choices[1:, 1:] @ fitted_settings
    return RecoveredTargets(
        y=targets if can_be_solved else np.full(len(targets), np.nan),
        is_determined=DEVIATIONS * standard_errors <= tolerance * target_range,
        error=standard_errors,
        learning_rate=float(1 / a) if can_be_solved and a else None,
        regularization=float(c / a) if can_be_solved and a else None,
        equations=len(residual),
        leaves=equations.leaves,
        rank=solution.rank,
        misfit=misfit,
    )


def _choices(learning_rate: float | None, regularization: float | None) -> Floats:
    """Return the coefficients 1, a and c of the equations' right-hand side ``base + a rate + c shrinkage``.

    The coefficients are a = 1 / eta and c = lambda / eta.

    Args:
        learning_rate: Learning rate eta, None if unknown.
        regularization: Regularization lambda, None if unknown.

    Returns:
        (3, 1 + k) matrix. The coefficients are its product with the vector (1, s_1, ..., s_k), where s_1 to
        s_k are the unknown settings.
    """
    if learning_rate is None:
        if regularization is None:
            return np.eye(3)
        return np.array([[1.0, 0.0], [0.0, 1.0], [0.0, regularization]])
    if regularization is None:
        return np.array([[1.0, 0.0], [1 / learning_rate, 0.0], [0.0, 1.0]])
    return np.array([[1.0], [1 / learning_rate], [regularization / learning_rate]])
