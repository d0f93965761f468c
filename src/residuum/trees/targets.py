"""The targets of the training records, in the order of the training table.

Let ``c_ti`` be how often tree t drew record i (:mod:`.bootstrap`). A leaf is pure if its impurity is zero. A
pure leaf stores the target of all its records. Let ``w_t(v)`` be the weight of the pure leaves of tree t with
value v. If all leaves are pure, then for every value v

    w_t(v) = sum of c_ti over the records i with target v,   for all t.

If only one record i has the target v, the column c_i equals w(v). If several records have the target v, a set
of columns adds up to w(v). Such a set is called an exact cover. It is accepted if there is no other exact
cover.

If some leaves are mixed, the target of a record is missing in the trees that put the record into a mixed
leaf. Then a value belongs to record i if its weight is c_ti in all trees with this value, if at least six
trees have this value, and if no other record and no other value fit.

At any depth of the trees, the root of tree t stores the mean target, so

    sum_i c_ti y_i = (weight of the root) x (value of the root).

These equations determine all targets if there are as many trees as records.
"""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import Floats, Forest, Integers
from residuum.trees.leaves import Leaves
from residuum.trees.links import UNKNOWN, Records
from residuum.trees.subsets import targets_of_pairs

MAX_STEPS = 20_000  # maximum number of steps in the search for one exact cover
MIN_TREES = 6  # if some leaves are mixed, a value must occur in at least this many trees
# The linear equations have one solution if the ratio of extreme singular values is at least this number.
MIN_RANK_RATIO = 1e-9
MAX_MISFIT = 1e-7  # largest error of the linear equations, as a share of the largest sum


def find_records(forest: Forest, leaves: Leaves, counts: Integers) -> Records:
    """Find the targets of the training records of a regression forest.

    Args:
        forest: The forest.
        leaves: The leaves of the forest, with weights.
        counts: (trees, records) how often each tree drew each record.

    Returns:
        The records in the order of the training table.
    """
    groups = _match_columns(counts, leaves)
    if leaves.has_mixed:
        groups = _match_partly(counts, leaves, groups)
        targets_from_pairs = targets_of_pairs(leaves, counts)
    else:
        groups = _match_sums(counts, leaves, groups)
    targets = targets_from_pairs if leaves.has_mixed else np.full(len(groups), np.nan)
    targets[groups != UNKNOWN] = leaves.values[groups[groups != UNKNOWN]]
    if (groups == UNKNOWN).any() and len(counts) >= len(groups):
        solved_targets = _solve(forest, counts)
        targets = np.where((groups == UNKNOWN) & ~np.isnan(solved_targets), solved_targets, targets)
        groups = np.where(groups == UNKNOWN, _nearest_group(targets, leaves.values), groups)
    return Records(targets, groups, counts, has_row_order=True)


def _match_columns(counts: Integers, leaves: Leaves) -> Integers:
    """Find the targets that only one record has.

    Args:
        counts: (trees, records) how often each tree drew each record.
        leaves: The leaves of the forest, grouped by value.

    Returns:
        (records,) number of the group of leaves that has the record's target, -1 for records whose column of
        ``counts`` differs from the weights of all groups.
    """
    groups = np.full(counts.shape[1], UNKNOWN)
    by_column: dict[bytes, list[int]] = {}
    for i in range(counts.shape[1]):
        by_column.setdefault(counts[:, i].tobytes(), []).append(i)
    for number, weight in enumerate(leaves.weights):
        match by_column.get(weight.tobytes(), []):
            case [record]:
                groups[record] = number
    return groups


def _match_sums(counts: Integers, leaves: Leaves, group: Integers) -> Integers:
    """Find the targets that several records have.

    Args:
        counts: (trees, records) how often each tree drew each record.
        leaves: The leaves of the forest, grouped by value.
        group: (records,) groups of leaves from :func:`_match_columns`.

    Returns:
        (records,) groups, completed for records that are the only set whose columns of ``counts`` add up to
        the weights of a group.
    """
    group = group.copy()
    open_groups = np.setdiff1d(np.arange(len(leaves.values)), group).tolist()
    open_groups.sort(key=lambda number: int(leaves.weights[number].sum()))
    has_progress = True
    while has_progress and open_groups:
        has_progress = False
        for number in list(open_groups):
            unmatched_records = np.flatnonzero(group == UNKNOWN)
            cover = find_cover(counts[:, unmatched_records], leaves.weights[number])
            if cover is not None:
                group[unmatched_records[cover]] = number
                open_groups.remove(number)
                has_progress = True
    return group


def _match_partly(counts: Integers, leaves: Leaves, group: Integers) -> Integers:
    """Find the targets that only one record has, if some trees put the record into a mixed leaf.

    Args:
        counts: (trees, records) how often each tree drew each record.
        leaves: The leaves of the forest, grouped by value.
        group: (records,) groups of leaves from :func:`_match_columns`.

    Returns:
        (records,) completed groups, -1 for records whose target is unknown.
    """
    group = group.copy()
    record_by_group: dict[int, int] = {}
    unmatched_records = np.flatnonzero(group == UNKNOWN)
    for number in np.setdiff1d(np.arange(len(leaves.values)), group).tolist():
        trees_with_value = np.flatnonzero(leaves.weights[number])
        if len(trees_with_value) < MIN_TREES:
            continue
        candidates = unmatched_records
        for row in trees_with_value:
            candidates = candidates[counts[row, candidates] == leaves.weights[number, row]]
        if len(candidates) == 1:
            record_by_group[number] = int(candidates[0])
    candidates, match_counts = np.unique(list(record_by_group.values()), return_counts=True)
    unique_records = set(candidates[match_counts == 1].tolist())
    for number, record in record_by_group.items():
        if record in unique_records:
            group[record] = number
    return group


def find_cover(counts: Integers, weight: Integers) -> Integers | None:
    """Return the only set of columns of ``counts`` that adds up to ``weight``.

    Args:
        counts: (trees, records) non-negative integers.
        weight: (trees,) non-negative integers.

    Returns:
        The numbers of the columns, or None if there is no such set, if there are several, or if the search
        takes too long.
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
            allowed = allowed[allowed != k]  # this branch finds all covers with this column
            if not search(remaining - columns[:, k], [*chosen, int(k)], allowed):
                return False
        return True

    if not len(candidates) or not search(weight, [], np.arange(len(candidates))):
        return None
    return candidates[covers[0]] if len(covers) == 1 else None


def _solve(forest: Forest, counts: Integers) -> Floats:
    """Return the targets that the mean targets in the roots determine, NaN if they are ambiguous."""
    sums = np.array([tree.value[0, 0] * tree.weight[0] for tree in forest.trees])  # type: ignore[index]
    matrix, unknown = counts.astype(np.float64), np.full(counts.shape[1], np.nan)
    solution, _, _, singular = np.linalg.lstsq(matrix, sums, rcond=None)
    if singular.min(initial=np.inf) < MIN_RANK_RATIO * singular.max(initial=0.0):
        return unknown
    # Wrong seeds give wrong counts. Then the solution contradicts the sums, if there are more trees than
    # records. Otherwise only the stored numbers of distinct records show that the seeds are right.
    is_verified = forest.trees[0].count is not None or len(counts) > counts.shape[1]
    if not is_verified or np.abs(matrix @ solution - sums).max() > MAX_MISFIT * np.abs(sums).max():
        return unknown
    return solution


def _nearest_group(y: Floats, values: Floats) -> Integers:
    """Return the number of the leaf value that equals each target, or -1 if no value does.

    Values count as equal if they differ by no more than the rounding error of a linear solver.
    """
    if not len(values):
        return np.full(len(y), -1)
    next_above = (
        np.searchsorted(values, y).clip(1, max(len(values) - 1, 1)).clip(max=len(values) - 1)
    )
    next_below = np.maximum(next_above - 1, 0)
    nearest = np.where(
        np.abs(values[next_below] - y) <= np.abs(values[next_above] - y), next_below, next_above
    )
    tolerance = 1e-9 * max(np.abs(values).max(), np.ptp(values))
    return np.where(np.abs(values[nearest] - y) <= tolerance, nearest, -1)
