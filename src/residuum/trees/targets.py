"""The targets of the training records, in the order of the training table.

Let ``c_ti`` be how often tree t drew record i (:mod:`.bootstrap`), and let a leaf be pure if its impurity
is zero. A pure leaf stores the target of all its records. Let ``w_t(v)`` be the weight of the pure leaves
of tree t with value v. If all leaves are pure, then for every value v

    w_t(v) = sum of c_ti over the records i with target v,   for all t.

A value that one record has is found by comparing the columns of c with w(v). Equal targets need an exact
cover: a set of columns that adds up to w(v). It is accepted only if it is the only one.

If some leaves are mixed, the target of a record is missing in the trees that put the record into a mixed
leaf. Then a value belongs to record i if its weight is c_ti wherever the value occurs, if it occurs in at
least six trees, and if no other record and no other value fit.

At any depth the root of tree t stores the mean target, so

    sum_i c_ti y_i = (weight of the root) x (value of the root),

which determines all targets if there are as many trees as records.
"""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import Floats, Forest, Integers
from residuum.trees.leaves import Leaves
from residuum.trees.links import UNKNOWN, Records
from residuum.trees.subsets import targets_of_pairs

MAX_STEPS = 20_000  # of the search for one exact cover
MIN_TREES = 6  # in which a value must occur if some leaves are mixed
MIN_RANK_RATIO = 1e-9  # smallest singular value of the counts over the largest


def find_records(forest: Forest, leaves: Leaves, counts: Integers) -> Records:
    """Find the targets of the training records of a regression forest.

    Args:
        forest: The forest.
        leaves: Its leaves, with weights.
        counts: (trees, records) how often each tree drew each record.

    Returns:
        The records in the order of the training table.
    """
    group = _match_columns(counts, leaves)
    if leaves.has_mixed:
        group = _match_partly(counts, leaves, group)
        of_pairs = targets_of_pairs(leaves, counts)
    else:
        group = _match_sums(counts, leaves, group)
    y = of_pairs if leaves.has_mixed else np.full(len(group), np.nan)
    y[group != UNKNOWN] = leaves.values[group[group != UNKNOWN]]
    if (group == UNKNOWN).any() and len(counts) >= len(group):
        solution = _solve(forest, counts)
        y = np.where((group == UNKNOWN) & ~np.isnan(solution), solution, y)
        group = np.where(group == UNKNOWN, _nearest_group(y, leaves.values), group)
    return Records(y, group, counts, has_row_order=True)


def _match_columns(counts: Integers, leaves: Leaves) -> Integers:
    """Return the group of each record whose column of the counts equals the weights of one group."""
    group = np.full(counts.shape[1], UNKNOWN)
    by_column: dict[bytes, list[int]] = {}
    for i in range(counts.shape[1]):
        by_column.setdefault(counts[:, i].tobytes(), []).append(i)
    for number, weight in enumerate(leaves.weights):
        match by_column.get(weight.tobytes(), []):
            case [record]:
                group[record] = number
    return group


def _match_sums(counts: Integers, leaves: Leaves, group: Integers) -> Integers:
    """Add the records of the groups with several records: the only set of columns with the right sum."""
    group = group.copy()
    remaining = np.setdiff1d(np.arange(len(leaves.values)), group).tolist()
    remaining.sort(key=lambda number: int(leaves.weights[number].sum()))
    progress = True
    while progress and remaining:
        progress = False
        for number in list(remaining):
            free = np.flatnonzero(group == UNKNOWN)
            cover = find_cover(counts[:, free], leaves.weights[number])
            if cover is not None:
                group[free[cover]] = number
                remaining.remove(number)
                progress = True
    return group


def _match_partly(counts: Integers, leaves: Leaves, group: Integers) -> Integers:
    """Add groups with one record that lies in a mixed leaf of some trees."""
    group = group.copy()
    fitting: dict[int, int] = {}
    free = np.flatnonzero(group == UNKNOWN)
    for number in np.setdiff1d(np.arange(len(leaves.values)), group).tolist():
        rows = np.flatnonzero(leaves.weights[number])
        if len(rows) < MIN_TREES:
            continue
        candidates = free
        for row in rows:
            candidates = candidates[counts[row, candidates] == leaves.weights[number, row]]
        if len(candidates) == 1:
            fitting[number] = int(candidates[0])
    candidates, times = np.unique(list(fitting.values()), return_counts=True)
    unique = set(candidates[times == 1].tolist())
    for number, record in fitting.items():
        if record in unique:
            group[record] = number
    return group


def find_cover(counts: Integers, weight: Integers) -> Integers | None:
    """Return the only set of columns of ``counts`` that adds up to ``weight``.

    Args:
        counts: (trees, records) non-negative integers.
        weight: (trees,) non-negative integers.

    Returns:
        The columns, or None if there is no such set, more than one, or if the search takes too long.
    """
    candidates = np.flatnonzero((counts <= weight[:, None]).all(0))
    columns = counts[:, candidates]
    covers: list[list[int]] = []
    steps = 0

    def search(remaining: Integers, chosen: list[int], allowed: Integers) -> bool:
        """Extend the chosen columns. Return False if the search must stop."""
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            return False
        if not remaining.any():
            covers.append(chosen)
            return len(covers) < 2
        allowed = allowed[(columns[:, allowed] <= remaining[:, None]).all(0)]
        reachable = columns[:, allowed].sum(1)
        if (reachable < remaining).any():
            return True
        open_rows = np.flatnonzero(remaining)
        choices = (columns[np.ix_(open_rows, allowed)] > 0).sum(1)
        row = open_rows[choices.argmin()]
        for k in allowed[columns[row, allowed] > 0]:
            allowed = allowed[allowed != k]  # covers with this column are all found in this branch
            if not search(remaining - columns[:, k], [*chosen, int(k)], allowed):
                return False
        return True

    if not len(candidates) or not search(weight, [], np.arange(len(candidates))):
        return None
    return candidates[covers[0]] if len(covers) == 1 else None


def _solve(forest: Forest, counts: Integers) -> Floats:
    """Return the targets that the means in the roots determine, NaN if they do not."""
    sums = np.array([tree.value[0, 0] * tree.weight[0] for tree in forest.trees])  # type: ignore[index]
    solution, _, _, singular = np.linalg.lstsq(counts.astype(np.float64), sums, rcond=None)
    if singular.min(initial=np.inf) < MIN_RANK_RATIO * singular.max(initial=0.0):
        return np.full(counts.shape[1], np.nan)
    return solution


def _nearest_group(y: Floats, values: Floats) -> Integers:
    """Return the leaf value that equals each target up to the error of a linear solve, else -1."""
    if not len(values):
        return np.full(len(y), -1)
    above = np.searchsorted(values, y).clip(1, max(len(values) - 1, 1)).clip(max=len(values) - 1)
    below = np.maximum(above - 1, 0)
    nearest = np.where(np.abs(values[below] - y) <= np.abs(values[above] - y), below, above)
    tolerance = 1e-9 * max(np.abs(values).max(), np.ptp(values))
    return np.where(np.abs(values[nearest] - y) <= tolerance, nearest, -1)
