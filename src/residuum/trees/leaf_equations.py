"""Linear equations for the targets of boosted trees, one for each leaf, and their least-squares solution.

The equations are derived in :mod:`.boosting`. Each one is divided by the square root of the number n of
records in its leaf. Then the matrix of the normal equations is ``G = A^T A = sum over trees of P_t``, where
the projection ``P_t`` replaces the numbers of all records by their means in the leaves of tree t.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import lsmr

from residuum.trees.forest import NO_CHILD, Booleans, Floats, Forest
from residuum.trees.predict import find_leaf_nodes

# Directions whose eigenvalue of G is below this share of the largest one count as undetermined.
MIN_EIGENVALUE = 1e-11
MAX_FREEDOM = 1e-14  # share of a determined target that may lie in undetermined directions
PROBES = 4  # number of random targets that show which targets an iteration determines
MAX_PROBE_ERROR = 1e-7  # largest error of a determined target in units of the random targets
MAX_STEPS = 1000  # maximum number of steps of an iteration


def starts_in_first_tree(forest: Forest) -> bool:
    """Return whether the leaves of the first tree contain the first prediction, as in files of LightGBM."""
    is_zero = forest.offset is None or not np.any(forest.offset)
    return forest.library.lower() == "lightgbm" and is_zero


def first_prediction(forest: Forest) -> float:
    """Return the prediction before the first tree, 0 if the file does not state it."""
    return 0.0 if forest.offset is None else float(np.ravel(forest.offset)[0])


@dataclass(frozen=True)
class Equations:
    """One equation for each leaf: ``A y = base + a rate + c shrinkage``.

    Attributes:
        A: (equations, records) sparse matrix, 1 / sqrt(n) for the n records of a leaf.
        sides: (equations, 3) right sides. base is the sum of the predictions before the tree, rate is n v,
            shrinkage is v, all divided by sqrt(n).
        leaves: Number of all leaves, with those that give no equation.
    """

    A: csr_array
    sides: Floats
    leaves: int


def build_equations(forest: Forest, x: Floats) -> Equations:
    """Return the equations of all leaves whose stored number of records is that of the known rows.

    Args:
        forest: Boosted trees.
        x: (records, columns) rows.

    Returns:
        The equations.
    """
    # XGBoost adds the trees in float32. The same rounding errors make the equations more accurate.
    kind = np.float32 if forest.library.lower() == "xgboost" else np.float64
    prediction = np.full(len(x), first_prediction(forest), dtype=kind)
    rows, columns, entries, sides = [], [], [], []
    equations = leaves = 0
    for number, tree in enumerate(forest.trees):
        node = find_leaf_nodes(tree, x, forest.is_strict, forest.compares_doubles)
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
        rows.append(row[node[records]])
        columns.append(records)
        entries.append(1 / np.sqrt(count[node[records]]))
        sides.append(np.stack([sums[is_used], n * v, v], 1) / np.sqrt(n)[:, None])
        equations += len(n)
        leaves += int((tree.left == NO_CHILD).sum())
        prediction = prediction + value[node].astype(kind)
    positions = np.concatenate(rows), np.concatenate(columns)
    A = csr_array((np.concatenate(entries), positions), shape=(equations, len(x)))
    return Equations(A, np.concatenate(sides), leaves)


@dataclass(frozen=True)
class Solution:
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


def solve_dense(equations: Equations) -> Solution:
    """Solve the equations with the eigenvectors of G.

    Args:
        equations: The equations.

    Returns:
        The solution of least norm.
    """
    A = equations.A
    eigenvalue, vector = np.linalg.eigh((A.T @ A).toarray())
    is_fixed = eigenvalue > MIN_EIGENVALUE * max(float(eigenvalue[-1]), 1.0)
    basis, fixed_eigenvalue = vector[:, is_fixed], eigenvalue[is_fixed]
    y = np.zeros((A.shape[1], 3))
    for _ in range(3):  # the second and the third step remove rounding errors of the first
        unexplained = equations.sides - A @ y
        y += basis @ ((basis.T @ (A.T @ unexplained)) / fixed_eigenvalue[:, None])
    freedom: Floats = (vector[:, ~is_fixed] ** 2).sum(1)
    return Solution(
        y=y,
        residual=equations.sides - A @ y,
        has_freedom=np.greater(freedom, MAX_FREEDOM),
        deviation=np.sqrt((basis**2 / fixed_eigenvalue).sum(1)),
        rank=int(is_fixed.sum()),
    )


def solve_by_iteration(equations: Equations) -> Solution:
    """Solve the equations of many records with LSMR, which needs products with the sparse matrix only.

    Random targets show which targets are determined: the solution of least norm equals them there and, with
    probability one, nowhere else. Random errors of the equations show how large the errors of the targets
    are.

    Args:
        equations: The equations.

    Returns:
        The solution of least norm. Its rank and deviations are estimates.
    """
    A, sides = equations.A, equations.sides
    generator = np.random.default_rng(0)
    planted = generator.standard_normal((A.shape[1], PROBES))
    errors = generator.standard_normal((A.shape[0], PROBES))
    y = _least_norm(A, sides)
    y += _least_norm(A, sides - A @ y)
    copies, effects = _least_norm(A, A @ planted), _least_norm(A, errors)
    rank = A.shape[1] * float((copies * planted).sum() / (planted**2).sum())
    return Solution(
        y=y,
        residual=sides - A @ y,
        has_freedom=np.greater(np.abs(copies - planted).max(1), MAX_PROBE_ERROR),
        deviation=np.sqrt((effects**2).mean(1)),
        rank=round(rank),
    )


def _least_norm(A: csr_array, sides: Floats) -> Floats:
    """Return the least-squares solution of least norm for each column of ``sides``."""
    solutions = [
        lsmr(A, side, atol=1e-14, btol=1e-14, conlim=0, maxiter=MAX_STEPS)[0] for side in sides.T
    ]
    return np.stack(solutions, 1)
