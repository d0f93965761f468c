"""The labels of the training records of a classification forest, in the order of the training table.

The root of tree t stores the share of each class among its records. Let ``c_ti`` be how often tree t drew
record i (:mod:`.bootstrap`). Then the number of drawn records of class k is

    s_tk = sum_i c_ti Y_ik,   Y_ik = 1 if record i has class k, else 0.

With as many trees as records these are linear equations with one solution. With fewer trees the solutions
with 0 <= Y <= 1 and sum_k Y_ik = 1 form a polytope, which contains the labels. If a random linear objective
has its minimum and its maximum over the polytope at the same point, this is the only point (with probability
1).
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, eye_array, hstack, kron, vstack

from residuum.trees.forest import Floats, Forest, Integers

WHOLE = 1e-4  # numbers that are closer to a whole number than this count as whole
SEED = 0  # seed of the random objectives of the linear programs


def find_labels(forest: Forest, counts: Integers) -> Integers:
    """Find the labels of the training records of a classification forest.

    Args:
        forest: The forest.
        counts: (trees, records) how often each tree drew each record.

    Returns:
        (records,) class numbers, -1 for a record whose class the file does not determine.
    """
    class_weights = np.stack([tree.value[0] / tree.value[0].sum() for tree in forest.trees])
    class_weights *= counts.sum(1)[:, None]
    draw_counts = counts.astype(np.float64)
    if len(counts) >= counts.shape[1]:
        shares, _, rank, _ = np.linalg.lstsq(draw_counts, class_weights, rcond=None)
        if rank == counts.shape[1]:
            return _rounded(shares, np.ones(len(shares), dtype=bool))
    objective = np.random.default_rng(SEED).normal(size=(counts.shape[1], class_weights.shape[1]))
    solutions = [
        _solve_program(draw_counts, class_weights, sign * objective) for sign in (1.0, -1.0)
    ]
    if any(solution is None for solution in solutions):
        return np.full(counts.shape[1], -1)
    first, second = (np.asarray(solution) for solution in solutions)
    is_point = bool(np.abs(first - second).max() <= WHOLE)
    return _rounded(first, np.full(len(first), is_point))


def _solve_program(matrix: Floats, sums: Floats, objective: Floats) -> Floats | None:
    """Return class shares of the records that agree with the class weights in the roots of all trees.

    Args:
        matrix: (trees, records) how often each tree drew each record.
        sums: (trees, classes) weight of each class in each tree.
        objective: (records, classes) linear objective that the shares minimize.

    Returns:
        (records, classes) shares between 0 and 1, or None if no shares agree.
    """
    records, classes = objective.shape
    of_trees = kron(csr_array(matrix), eye_array(classes))
    of_records = kron(eye_array(records), np.ones((1, classes)))
    result = linprog(
        objective.ravel(),
        A_eq=vstack([hstack([of_trees]), hstack([of_records])]),
        b_eq=np.concatenate([np.rint(sums).ravel(), np.ones(records)]),
        bounds=(0, 1),
        method="highs",
    )
    return result.x.reshape(records, classes) if result.status == 0 else None


def _rounded(shares: Floats, is_determined: np.ndarray) -> Integers:
    """Return the class of each record, or -1 if its shares are not determined or not whole numbers."""
    is_whole = np.abs(shares - np.rint(shares)).max(1) <= WHOLE
    return np.where(is_whole & is_determined, shares.argmax(1), -1)
