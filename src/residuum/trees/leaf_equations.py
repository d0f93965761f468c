"""Linear equations for the targets of boosted trees, one for each leaf, and their least-squares solution.

The equations are derived in :mod:`.boosting`. The equation of a leaf with n records is divided by sqrt(n).
Let A be the matrix of the equations. The matrix of the normal equations is ``G = A^T A = sum over trees of
P_t``. The matrix ``P_t`` is a projection. It replaces the target of each record by the mean target of the
leaf in which tree t puts the record.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import lsmr

from residuum.trees.forest import NO_CHILD, Booleans, Floats, Forest
from residuum.trees.predict import find_leaf_nodes

# An eigenvalue of G = A^T A counts as zero if it is at most this share of the largest eigenvalue.
MIN_EIGENVALUE = 1e-11
# Let N be the projection onto the null space of the matrix G of the equations. The equations determine
# target i if the entry N_ii is at most this number.
MAX_FREEDOM = 1e-14
# To find which targets the equations determine, the iterative solver is tested on this number of vectors of
# random targets.
PROBES = 4
# The equations determine a target if the iterative solver recovers random values of this target with at
# most this error.
MAX_PROBE_ERROR = 1e-7
MAX_STEPS = 1000  # maximum number of steps of the iterative solver LSMR


def starts_in_first_tree(forest: Forest) -> bool:
    """Return True if the leaf values of the first tree include the first prediction, as in LightGBM."""
    has_no_offset = forest.offset is None or not np.any(forest.offset)
    return forest.library.lower() == "lightgbm" and has_no_offset


def first_prediction(forest: Forest) -> float:
    """Return the prediction to which the trees are added, 0 if the file does not state it."""
    return 0.0 if forest.offset is None else float(np.ravel(forest.offset)[0])


@dataclass(frozen=True)
class Equations:
    """Equations ``A y = base + a rate + c shrinkage`` for the targets y, one for each leaf.

    The scalars are a = 1 / learning rate and c = regularization / learning rate. A leaf with n records and
    the value v has the entries rate = n v and shrinkage = v. Its entry base is the sum of the predictions for
    these records before the tree of the leaf was added. Each equation is divided by sqrt(n).

    Attributes:
        A: (equations, records) sparse matrix with the entries 1 / sqrt(n) for the n records of a leaf.
        sides: (equations, 3) columns base, rate and shrinkage.
        leaves: Number of all leaves, including leaves that give no equation.
    """

    A: csr_array
    sides: Floats
    leaves: int


def build_equations(forest: Forest, x: Floats) -> Equations:
    """Build one equation for each leaf that the right number of known rows reaches.

    Args:
        forest: Boosted trees.
        x: (records, columns) known rows.

    Returns:
        The equations.
    """
    # XGBoost adds the values of its trees in float32, so this function repeats the same rounding errors.
    dtype = np.float32 if forest.library.lower() == "xgboost" else np.float64
    prediction = np.full(len(x), first_prediction(forest), dtype=dtype)
    rows, columns, matrix_entries, sides = [], [], [], []
    equation_count = leaf_count = 0
    for number, tree in enumerate(forest.trees):
        leaf_nodes = find_leaf_nodes(tree, x, forest.is_strict, forest.compares_doubles)
        value = tree.value[:, 0]
        records_per_node = np.bincount(leaf_nodes, minlength=len(tree.left))
        prediction_sums = np.bincount(leaf_nodes, weights=prediction, minlength=len(tree.left))
        is_used = (records_per_node > 0) & np.isfinite(value)
        stored_count = tree.weight if tree.count is None else tree.count
        if stored_count is not None:
            is_used &= np.abs(stored_count - records_per_node) < 0.5
        if number == 0 and starts_in_first_tree(forest):
            is_used[:] = False
        n, v = records_per_node[is_used], value[is_used]
        equation_of_node = np.full(len(is_used), -1)
        equation_of_node[is_used] = equation_count + np.arange(len(n))
        used_records = np.flatnonzero(is_used[leaf_nodes])
        rows.append(equation_of_node[leaf_nodes[used_records]])
        columns.append(used_records)
        matrix_entries.append(1 / np.sqrt(records_per_node[leaf_nodes[used_records]]))
        sides.append(np.stack([prediction_sums[is_used], n * v, v], 1) / np.sqrt(n)[:, None])
        equation_count += len(n)
        leaf_count += int((tree.left == NO_CHILD).sum())
        prediction = prediction + value[leaf_nodes].astype(dtype)
    entry_positions = np.concatenate(rows), np.concatenate(columns)
    equation_matrix = csr_array(
        (np.concatenate(matrix_entries), entry_positions), shape=(equation_count, len(x))
    )
    return Equations(equation_matrix, np.concatenate(sides), leaf_count)


@dataclass(frozen=True)
class Solution:
    """Least-squares solutions of A y = side for the sides base, rate and shrinkage of ``Equations``.

    Attributes:
        y: (records, 3) solutions for the sides base, rate and shrinkage.
        residual: (equations, 3) the three sides minus A y.
        has_freedom: (records,) whether different values of the target solve the equations equally well.
        deviation: (records,) standard error of each target if the errors of the equations have the standard
            deviation 1.
        rank: Rank of the matrix A, i.e. number of independent equations.
    """

    y: Floats
    residual: Floats
    has_freedom: Booleans
    deviation: Floats
    rank: int


def solve_dense(equations: Equations) -> Solution:
    """Solve the equations for the targets with the eigenvectors of the matrix G = A^T A.

    Args:
        equations: The equations.

    Returns:
        The least-squares solutions of least norm.
    """
    equation_matrix = equations.A
    eigenvalues, eigenvectors = np.linalg.eigh((equation_matrix.T @ equation_matrix).toarray())
    is_nonzero = eigenvalues > MIN_EIGENVALUE * max(float(eigenvalues[-1]), 1.0)
    basis, nonzero_eigenvalue = eigenvectors[:, is_nonzero], eigenvalues[is_nonzero]
    solutions = np.zeros((equation_matrix.shape[1], 3))
    # The first step solves the equations. The other two steps reduce its rounding errors.
    for _ in range(3):
        unexplained = equations.sides - equation_matrix @ solutions
        solutions += basis @ (
            (basis.T @ (equation_matrix.T @ unexplained)) / nonzero_eigenvalue[:, None]
        )
    freedom: Floats = (eigenvectors[:, ~is_nonzero] ** 2).sum(1)
    return Solution(
        y=solutions,
        residual=equations.sides - equation_matrix @ solutions,
        has_freedom=np.greater(freedom, MAX_FREEDOM),
        deviation=np.sqrt((basis**2 / nonzero_eigenvalue).sum(1)),
        rank=int(is_nonzero.sum()),
    )


def solve_by_iteration(equations: Equations) -> Solution:
    """Solve the equations of many records with LSMR, which computes only products with the sparse matrix A.

    To find which targets are determined, the function solves equations A y = A z with random targets z. With
    probability 1, the solution of least norm equals z at the determined targets and differs from z at all
    others. To find how large the errors of the targets are, the function solves equations with random
    right-hand sides.

    Args:
        equations: The equations.

    Returns:
        The least-squares solutions of least norm. Their rank and their deviations are estimates.
    """
    A, sides = equations.A, equations.sides
    generator = np.random.default_rng(0)
    random_targets = generator.standard_normal((A.shape[1], PROBES))
    random_errors = generator.standard_normal((A.shape[0], PROBES))
    solutions = _least_norm(A, sides)
    solutions += _least_norm(A, sides - A @ solutions)
    recovered_targets, target_errors = (
        _least_norm(A, A @ random_targets),
        _least_norm(A, random_errors),
    )
    estimated_rank = A.shape[1] * float(
        (recovered_targets * random_targets).sum() / (random_targets**2).sum()
    )
    return Solution(
        y=solutions,
        residual=sides - A @ solutions,
        has_freedom=np.greater(np.abs(recovered_targets - random_targets).max(1), MAX_PROBE_ERROR),
        deviation=np.sqrt((target_errors**2).mean(1)),
        rank=round(estimated_rank),
    )


def _least_norm(A: csr_array, sides: Floats) -> Floats:
    """Solve A y = side by least squares (with the smallest norm of y) for each column of ``sides``."""
    solutions = [
        lsmr(A, side, atol=1e-14, btol=1e-14, conlim=0, maxiter=MAX_STEPS)[0] for side in sides.T
    ]
    return np.stack(solutions, 1)
