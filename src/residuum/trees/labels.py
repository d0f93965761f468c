"""The labels of the training records of a classification forest, in the order of the training table.

The root of tree t stores the share of each class among its records. Let ``c_ti`` be how often tree t drew
record i (:mod:`.bootstrap`). Then the number of drawn records of class k is

    s_tk = sum_i c_ti Y_ik,   Y_ik = 1 if record i has class k, else 0.

With as many trees as records these are linear equations with one solution. With fewer trees the solutions
with 0 <= Y <= 1 and sum_k Y_ik = 1 form a polytope, which contains the labels. If a random linear objective
has its minimum and its maximum over the polytope at the same point, this is the only point (with probability
1). On random labels this happens with two classes if there are more trees than half the records, and with ten
classes if there are a fifth as many. With slightly fewer trees an integer program finds labels, and a second
integer program shows that no other labels agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array, eye_array, kron, vstack

from residuum.trees.forest import Floats, Forest, Integers

INFEASIBLE = 2  # status of an integer program without a solution
WHOLE = 1e-4  # numbers that are closer to a whole number than this count as whole
SEED = 0  # seed of the random objectives of the linear programs
PROGRAM_SECONDS = 60.0  # time of each linear or integer program
MAX_SHARES = 50_000  # maximum number of records times classes in a linear program
MIN_LINEAR_SHARE = 0.1  # with fewer trees per record, linear programs do not determine labels
# Integer programs are solved in less than a minute only for tables of this size, and if there are at least
# this number of trees per record.
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
    is_large = class_weights.shape[1] * records > MAX_SHARES
    if is_large or len(counts) < MIN_LINEAR_SHARE * records:
        return undetermined
    equations = Equations.build(draw_counts, np.rint(class_weights))
    objective = np.random.default_rng(SEED).normal(size=equations.shape)
    first, second = (equations.solve_linear_program(sign * objective) for sign in (1.0, -1.0))
    if first is not None and second is not None and np.abs(first - second).max() <= WHOLE:
        return _rounded(first, np.ones(records, dtype=bool))
    is_small = first is not None and equations.matrix.shape[1] <= MAX_INTEGER_SHARES
    if is_small and len(counts) >= MIN_TREE_SHARE * records:
        labels = equations.solve_integer_program(None)
        if labels is not None and equations.is_unique(labels):
            return labels
    return undetermined


@dataclass(frozen=True)
class Equations:
    """The linear equations of the class shares of all records.

    Attributes:
        matrix: (equations, records * classes) coefficients.
        total: (equations,) right sides.
        shape: Number of records and number of classes.
    """

    matrix: csr_array
    total: Floats
    shape: tuple[int, int]

    @classmethod
    def build(cls, draw_counts: Floats, class_weights: Floats) -> Equations:
        """Collect the equations of the trees and of the records.

        Args:
            draw_counts: (trees, records) how often each tree drew each record.
            class_weights: (trees, classes) weight of each class in each tree.

        Returns:
            The equations.
        """
        shape = draw_counts.shape[1], class_weights.shape[1]
        of_trees = kron(csr_array(draw_counts), eye_array(shape[1]))
        of_records = kron(eye_array(shape[0]), np.ones((1, shape[1])))
        total = np.concatenate([class_weights.ravel(), np.ones(shape[0])])
        return cls(csr_array(vstack([of_trees, of_records])), total, shape)

    def solve_linear_program(self, objective: Floats) -> Floats | None:
        """Return (records, classes) shares in [0, 1] that minimize an objective, None if there are none."""
        result = linprog(
            objective.ravel(),
            A_eq=self.matrix,
            b_eq=self.total,
            bounds=(0, 1),
            method="highs",
            options={"time_limit": PROGRAM_SECONDS},
        )
        return result.x.reshape(self.shape) if result.status == 0 else None

    def solve_integer_program(self, excluded: Integers | None) -> Integers | None:
        """Return labels that solve the equations, or None if there are none or the time is over.

        Args:
            excluded: (records,) labels that are not allowed, or None.

        Returns:
            (records,) class numbers.
        """
        result = self._integer_program(excluded)
        if result.x is None:
            return None
        labels = np.asarray(result.x.reshape(self.shape).argmax(1))
        shares = np.eye(self.shape[1])[labels].ravel()
        return labels if np.array_equal(self.matrix @ shares, self.total) else None

    def is_unique(self, labels: Integers) -> bool:
        """Return whether it is certain that no other labels solve the equations."""
        return bool(self._integer_program(labels).status == INFEASIBLE)

    def _integer_program(self, excluded: Integers | None) -> Any:
        constraints = [LinearConstraint(self.matrix, self.total, self.total)]
        if excluded is not None:
            agreement = np.eye(self.shape[1])[excluded].ravel()[None]
            constraints.append(LinearConstraint(agreement, -np.inf, self.shape[0] - 1))
        variables = self.matrix.shape[1]
        return milp(
            np.zeros(variables),
            constraints=constraints,
            integrality=np.ones(variables),
            bounds=Bounds(0, 1),
            options={"time_limit": PROGRAM_SECONDS},
        )


def _rounded(shares: Floats, is_determined: np.ndarray) -> Integers:
    """Return the class of each record, or -1 if its shares are not determined or not whole numbers."""
    is_whole = np.abs(shares - np.rint(shares)).max(1) <= WHOLE
    return np.where(is_whole & is_determined, shares.argmax(1), -1)
