"""Recover the labels of the training records of a classification forest, in the order of the training table.

The root of tree t stores the share s_tk / n of each class k among the n records that the tree drew. Let
``c_ti`` be how often tree t drew record i (:mod:`.bootstrap`). Then the number of drawn records of class k is

    s_tk = sum_i c_ti Y_ik,   Y_ik = 1 if record i has class k, else 0.

With as many trees as records, these linear equations for Y have one solution. With fewer trees, the solutions
with 0 <= Y <= 1 and sum_k Y_ik = 1 form a polytope, which contains the labels. If a random linear objective
has its minimum and its maximum over the polytope at the same point, the polytope is this point with
probability
1. For random labels of two classes, this happens if the number of trees is more than half the number of
records. For ten classes, a fifth of the number of records is enough. With slightly fewer trees, an integer
program finds labels, and a second integer program shows that no other labels solve the equations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array, eye_array, kron, vstack

from residuum.trees.forest import Floats, Forest, Integers

INFEASIBLE = 2  # status that scipy.optimize.milp returns if an integer program has no solution
WHOLE = 1e-4  # a number counts as an integer if its distance to the nearest integer is at most this
SEED = 0  # seed of the random objectives of the linear programs
PROGRAM_SECONDS = 60.0  # time limit of each linear or integer program
# If the number of records times the number of classes is larger than this, no linear program is solved.
MAX_SHARES = 50_000
# If the number of trees divided by the number of records is smaller than this, no linear program is solved,
# because its solution would not be unique.
MIN_LINEAR_SHARE = 0.1
# An integer program takes less than a minute only under two conditions: the number of records times the
# number of classes is at most the first number, and the number of trees per record is at least the second
# number.
MAX_INTEGER_SHARES, MIN_TREE_SHARE = 2000, 0.45


def find_labels(forest: Forest, counts: Integers) -> Integers:
    """Find the labels of the training records of a classification forest.

    Args:
        forest: The forest.
        counts: (trees, records) how often each tree drew each record.

    Returns:
        (records,) class numbers, -1 for a record whose class the file does not determine.
    """
    records = counts.shape[1]
    undetermined = np.full(records, -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        class_weights = np.stack([tree.value[0] / tree.value[0].sum() for tree in forest.trees])
    class_weights *= counts.sum(1)[:, None]
    if not np.isfinite(class_weights).all():
        return undetermined
    draw_counts = counts.astype(np.float64)
    if len(counts) >= records:
        shares, _, rank, _ = np.linalg.lstsq(draw_counts, class_weights, rcond=None)
        if rank == records:
            return _rounded(shares, np.ones(len(shares), dtype=bool))
    exceeds_linear_program = class_weights.shape[1] * records > MAX_SHARES
    if exceeds_linear_program or len(counts) < MIN_LINEAR_SHARE * records:
        return undetermined
    equations = Equations.build(draw_counts, np.rint(class_weights))
    random_objective = np.random.default_rng(SEED).normal(size=equations.shape)
    first, second = (
        equations.solve_linear_program(sign * random_objective) for sign in (1.0, -1.0)
    )
    if first is not None and second is not None and np.abs(first - second).max() <= WHOLE:
        return _rounded(first, np.ones(records, dtype=bool))
    can_solve_integer_program = (
        first is not None and equations.matrix.shape[1] <= MAX_INTEGER_SHARES
    )
    if can_solve_integer_program and len(counts) >= MIN_TREE_SHARE * records:
        labels = equations.solve_integer_program(None)
        if labels is not None and equations.is_unique(labels):
            return labels
    return undetermined


@dataclass(frozen=True)
class Equations:
    """Linear equations for the labels of all records.

    The unknowns are Y_ik, which is 1 if record i has class k, and 0 otherwise. They are called shares,
    because linear programs allow all numbers from 0 to 1.

    Attributes:
        matrix: (equations, records * classes) coefficients of the shares.
        total: (equations,) right-hand sides.
        shape: Number of records and number of classes.
    """

    matrix: csr_array
    total: Floats
    shape: tuple[int, int]

    @classmethod
    def build(cls, draw_counts: Floats, class_weights: Floats) -> Equations:
        """Build the linear equations for the labels of all records.

        For each tree and class, the shares of the drawn records add up to the weight of the class. For each
        record, its shares add up to 1.

        Args:
            draw_counts: (trees, records) how often each tree drew each record.
            class_weights: (trees, classes) number of records of each class that each tree drew.

        Returns:
            The equations.
        """
        shape = draw_counts.shape[1], class_weights.shape[1]
        tree_rows = kron(csr_array(draw_counts), eye_array(shape[1]))
        record_rows = kron(eye_array(shape[0]), np.ones((1, shape[1])))
        right_sides = np.concatenate([class_weights.ravel(), np.ones(shape[0])])
        return cls(csr_array(vstack([tree_rows, record_rows])), right_sides, shape)

    def solve_linear_program(self, objective: Floats) -> Floats | None:
        """Minimize a linear objective over the class shares in [0, 1] that solve the equations.

        Args:
            objective: (records, classes) coefficients of the objective.

        Returns:
            (records, classes) shares, or None if no minimum was found in time.
        """
        solution = linprog(
            objective.ravel(),
            A_eq=self.matrix,
            b_eq=self.total,
            bounds=(0, 1),
            method="highs",
            options={"time_limit": PROGRAM_SECONDS},
        )
        return solution.x.reshape(self.shape) if solution.status == 0 else None

    def solve_integer_program(self, excluded: Integers | None) -> Integers | None:
        """Find labels of all records that solve the equations.

        Args:
            excluded: (records,) labels of all records. At least one label of the solution must be different.
                None excludes no solution.

        Returns:
            (records,) class numbers, or None if there is no solution or if none was found in time.
        """
        solution = self._integer_program(excluded)
        if solution.x is None:
            return None
        labels = np.asarray(solution.x.reshape(self.shape).argmax(1))
        shares = np.eye(self.shape[1])[labels].ravel()
        return labels if np.array_equal(self.matrix @ shares, self.total) else None

    def is_unique(self, labels: Integers) -> bool:
        """Return True if the solver proves that no labels other than ``labels`` solve the equations."""
        return bool(self._integer_program(labels).status == INFEASIBLE)

    def _integer_program(self, excluded: Integers | None) -> Any:
        constraints = [LinearConstraint(self.matrix, self.total, self.total)]
        if excluded is not None:
            excluded_shares = np.eye(self.shape[1])[excluded].ravel()[None]
            constraints.append(LinearConstraint(excluded_shares, -np.inf, self.shape[0] - 1))
        variable_count = self.matrix.shape[1]
        return milp(
            np.zeros(variable_count),
            constraints=constraints,
            integrality=np.ones(variable_count),
            bounds=Bounds(0, 1),
            options={"time_limit": PROGRAM_SECONDS},
        )


def _rounded(shares: Floats, is_determined: np.ndarray) -> Integers:
    """Convert class shares to the class of each record, -1 if its shares are unknown or not whole numbers."""
    is_whole = np.abs(shares - np.rint(shares)).max(1) <= WHOLE
    return np.where(is_whole & is_determined, shares.argmax(1), -1)
