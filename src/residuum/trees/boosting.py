"""Targets of the training records of boosted trees, if the rows of the records are known.

Boosting with squared error fits every tree to the residuals of the trees before. Let ``F_i`` be the
prediction for record i before a tree was added. A leaf L of this tree with n records stores

    v = eta x (sum over L of (y_i - F_i)) / (n + lambda)

with the learning rate eta and the regularization lambda. Whoever knows the rows knows the records of every
leaf and all predictions, because the file stores the values of the earlier trees. So every leaf of every tree
gives a linear equation for the targets:

    sum over L of y_i  =  a n v + c v + sum over L of F_i    with  a = 1 / eta,  c = lambda / eta.

The equation is linear in a and c as well, so a file that does not state eta and lambda determines them
together with the targets. Every equation is divided by the square root of n. Then the matrix of the normal
equations is ``G = sum over trees of P_t``, where the projection ``P_t`` replaces the numbers of all records
by their means in the leaves of tree t.

A target is determined if the equations leave no freedom for it, and if its standard error, computed from the
misfit of all equations, is small. Rows that are not the training rows do not fit the equations, so that the
standard errors are large. A leaf whose stored number of records differs from that of the known rows gives no
equation. So some unknown rows do no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import lsmr

from residuum.errors import InputError
from residuum.trees.forest import BOOSTING, NO_CHILD, Booleans, Floats, Forest, Integers
from residuum.trees.predict import find_leaf_nodes

TOLERANCE = 1e-5  # largest error of a determined target, as a share of the range of the targets
DEVIATIONS = 6.0  # a determined target is right within this number of standard errors
MAX_DENSE = 2000  # the equations of more records than this are solved by iteration
MIN_SPARE = 10  # fewer equations than this beyond the rank do not show that the rows are right
# Directions whose eigenvalue of G is below this share of the largest one count as undetermined.
MIN_EIGENVALUE = 1e-11
MIN_TRACE = 1e-9  # settings are unknown if changing them changes the equations' misfit by less than this share
MAX_FREEDOM = 1e-14  # share of a determined target that may lie in undetermined directions
PROBES = 8  # number of random targets that show which targets an iteration determines
MAX_PROBE_ERROR = 1e-7  # largest error of a determined target in units of the random targets
MAX_STEPS = 3000  # maximum number of steps of an iteration
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
        regularization: Regularization lambda of the leaf values, if known. Otherwise the computed one.
        max_dense: The equations of more records than this are solved by iteration.

    Returns:
        The targets, and which of them the file determines.

    Raises:
        InputError: If the trees are not boosted with squared error, or do not fit the rows.
    """
    _check(forest, x)
    equations = _Equations.build(forest, x)
    learning_rate = forest.learning_rate if learning_rate is None else learning_rate
    solve = _solve_dense if len(x) <= max_dense else _solve_by_iteration
    return _fit(equations, solve(equations), _choices(learning_rate, regularization), tolerance)


def _check(forest: Forest, x: Floats) -> None:
    if forest.kind != BOOSTING:
        raise InputError(
            f'Targets are recovered from boosted trees; these trees have kind "{forest.kind}".',
            "Use the attack forest, which needs no rows.",
        )
    if not is_squared_error(forest):
        loss = forest.objective or "of a classifier"
        raise InputError(
            f"Targets are recovered if the loss is the squared error; this model has the loss {loss}.",
            "Nothing can be done for other losses. Their leaf values are not linear in the targets.",
        )
    if forest.outputs is not None and len(set(forest.outputs.tolist())) > 1:
        raise InputError(
            f"Targets are recovered for one output; this model has {int(forest.outputs.max()) + 1}.",
            "Pass the trees of one output.",
        )
    if forest.has_sample_weights:
        raise InputError(
            "Targets are recovered if all records have the same weight; this model had sample weights.",
            "Nothing can be done if the weights are unknown.",
        )
    if x.ndim != 2 or x.shape[1] != forest.columns:
        raise InputError(
            f"The rows must have {forest.columns} columns as the trees do; got shape {x.shape}.",
            "Pass one row for each record, with the columns in the order of the training table.",
        )


@dataclass(frozen=True)
class _Equations:
    """One equation for each leaf: ``A y = base + a rate + c shrinkage``.

    Attributes:
        A: (equations, records) sparse matrix, 1 / sqrt(n) for the n records of a leaf.
        base: (equations,) sum of the predictions before the tree / sqrt(n).
        rate: (equations,) n v / sqrt(n).
        shrinkage: (equations,) v / sqrt(n).
        leaves: Number of all leaves, with those that give no equation.
    """

    A: csr_array
    base: Floats
    rate: Floats
    shrinkage: Floats
    leaves: int

    @classmethod
    def build(cls, forest: Forest, x: Floats) -> _Equations:
        # XGBoost adds the trees in float32. The same rounding errors make the equations more accurate.
        kind = np.float32 if forest.library.lower() == "xgboost" else np.float64
        prediction = np.full(len(x), first_prediction(forest), dtype=kind)
        entries: list[tuple[Integers, Integers, Floats]] = []
        base, rate, shrinkage = [], [], []
        equations = leaves = 0
        for number, tree in enumerate(forest.trees):
            node = find_leaf_nodes(tree, x, forest.is_strict)
            value = tree.value[:, 0]
            count = np.bincount(node, minlength=len(tree.left))
            sums = np.bincount(node, weights=prediction, minlength=len(tree.left))
            is_used = (count > 0) & np.isfinite(value)
            stored = tree.weight if tree.count is None else tree.count
            if stored is not None:
                is_used &= np.abs(stored - count) < 0.5
            if number == 0 and starts_in_first_tree(forest):
                is_used[:] = False
            n, v = count[is_used], value[is_used]
            row = np.full(len(is_used), -1)
            row[is_used] = equations + np.arange(len(n))
            records = np.flatnonzero(is_used[node])
            entries.append((row[node[records]], records, 1 / np.sqrt(count[node[records]])))
            base.append(sums[is_used] / np.sqrt(n))
            rate.append(n * v / np.sqrt(n))
            shrinkage.append(v / np.sqrt(n))
            equations += len(n)
            leaves += int((tree.left == NO_CHILD).sum())
            prediction += value[node].astype(kind)
        rows, columns, values = (np.concatenate(arrays) for arrays in zip(*entries, strict=True))
        matrix = csr_array((values, (rows, columns)), shape=(equations, len(x)))
        return cls(matrix, *(np.concatenate(side) for side in (base, rate, shrinkage)), leaves)


def is_squared_error(forest: Forest) -> bool:
    """Return whether the trees were trained with squared error. True if the file names no loss."""
    return not forest.is_classifier and forest.objective.lower() in SQUARED_ERROR


def starts_in_first_tree(forest: Forest) -> bool:
    """Return whether the leaves of the first tree contain the first prediction, as in files of LightGBM."""
    is_zero = forest.offset is None or not np.any(forest.offset)
    return forest.library.lower() == "lightgbm" and is_zero


def first_prediction(forest: Forest) -> float:
    """Return the prediction before the first tree, 0 if the file does not state it."""
    return 0.0 if forest.offset is None else float(np.ravel(forest.offset)[0])


@dataclass(frozen=True)
class _Solution:
    """Least-squares solutions for the three right sides, and how well they are determined.

    Attributes:
        y: (records, 3) solutions for the right sides base, rate and shrinkage.
        residual: (equations, 3) right sides minus the fitted ones.
        has_freedom: (records,) whether the equations leave freedom for the target.
        deviation: (records,) standard error of each target if every equation has errors of size 1.
        rank: Number of independent equations.
    """

    y: Floats
    residual: Floats
    has_freedom: Booleans
    deviation: Floats
    rank: int


def _solve_dense(equations: _Equations) -> _Solution:
    """Solve the equations with the eigenvectors of G."""
    A = equations.A
    right = np.stack([equations.base, equations.rate, equations.shrinkage], 1)
    eigenvalue, vector = np.linalg.eigh((A.T @ A).toarray())
    is_fixed = eigenvalue > MIN_EIGENVALUE * max(float(eigenvalue[-1]), 1e-300)
    basis, eigenvalue = vector[:, is_fixed], eigenvalue[is_fixed]
    y = np.zeros((A.shape[1], 3))
    for _ in range(3):  # the second and the third step remove rounding errors of the first
        y += basis @ ((basis.T @ (A.T @ (right - A @ y))) / eigenvalue[:, None])
    return _Solution(
        y,
        right - A @ y,
        (vector[:, ~is_fixed] ** 2).sum(1) > MAX_FREEDOM,
        np.sqrt((basis**2 / eigenvalue).sum(1)),
        int(is_fixed.sum()),
    )


def _solve_by_iteration(equations: _Equations) -> _Solution:
    """Solve the equations of many records with LSMR, which needs products with the sparse matrix only.

    Random targets show which targets are determined: the solution of least norm equals them there and, with
    probability one, nowhere else. Random errors of the equations show how large the errors of the targets
    are.
    """
    A = equations.A
    right = np.stack([equations.base, equations.rate, equations.shrinkage], 1)
    generator = np.random.default_rng(0)
    planted = generator.standard_normal((A.shape[1], PROBES))
    y = np.stack([_least_norm(A, side) for side in right.T], 1)
    y += np.stack([_least_norm(A, side) for side in (right - A @ y).T], 1)
    copies = np.stack([_least_norm(A, A @ targets) for targets in planted.T], 1)
    errors = generator.standard_normal((A.shape[0], PROBES))
    effects = np.stack([_least_norm(A, side) for side in errors.T], 1)
    rank = A.shape[1] * float((copies * planted).sum() / (planted**2).sum())
    return _Solution(
        y,
        right - A @ y,
        (np.abs(copies - planted) > MAX_PROBE_ERROR).any(1),
        np.sqrt((effects**2).mean(1)),
        round(rank),
    )


def _least_norm(A: csr_array, side: Floats) -> Floats:
    return lsmr(A, side, atol=1e-14, btol=1e-14, conlim=0, maxiter=MAX_STEPS)[0]


def _fit(
    equations: _Equations, solution: _Solution, choices: Floats, tolerance: float
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
    size = np.linalg.norm(equations.rate) / max(len(solution.y), 1)
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
        (3, 1 + k) coefficients. Column 0 has the known settings. Each other column is multiplied by one of the
        k unknown settings.
    """
    if learning_rate is None:
        if regularization is None:
            return np.eye(3)
        return np.array([[1.0, 0.0], [0.0, 1.0], [0.0, regularization]])
    if regularization is None:
        return np.array([[1.0, 0.0], [1 / learning_rate, 0.0], [0.0, 1.0]])
    return np.array([[1.0], [1 / learning_rate], [regularization / learning_rate]])
