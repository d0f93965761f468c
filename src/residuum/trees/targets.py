"""Recover the targets of the training records of a regression forest, in the order of the training table.

Let ``c_ti`` be how often tree t drew record i (:mod:`.bootstrap`). A leaf is pure if all its records have the
same target, which the leaf then stores. All other leaves are mixed. Let ``w_t(v)`` be the total weight of the
pure leaves of tree t with value v. If all leaves are pure, the following equation holds for every value v:

    w_t(v) = sum of c_ti over the records i with target v,   for all t.

Let c_i be the vector of the ``c_ti`` over all trees t, and let w(v) be the vector of the ``w_t(v)``. If only
one record i has the target v, c_i equals w(v). If several records have the target v, their vectors c_i add up
to w(v). A set of records whose vectors add up to w(v) is called an exact cover. These records receive the
target v if there is only one exact cover.

If some leaves are mixed, a tree that puts a record into a mixed leaf does not store its target. Then record i
receives the target v under three conditions. In all trees with the value v, w_t(v) equals c_ti. At least six
trees have the value v. And no other record and no other value meet the first two conditions.

The root of tree t stores the mean target of its records, even if the tree is not fully grown. So

    sum_i c_ti y_i = (weight of the root) x (value of the root).

These equations for the targets y_i determine all of them if there are as many trees as records.

If a model has several targets, a leaf is pure if its records agree in every target. The roots give equations
for each target.
"""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import Floats, Forest, Integers
from residuum.trees.leaves import Leaves
from residuum.trees.links import UNKNOWN, Records
from residuum.trees.subsets import targets_of_pairs

MAX_STEPS = 20_000  # maximum number of steps in the search for the records that have one target
# If some leaves hold records with different targets, a leaf value is taken as a record's target only if at
# least this number of trees have it.
MIN_TREES = 6
# The value at the root of each tree t is a mean of targets, in which record i counts c_ti times. These
# equations are solved only if the smallest singular value of the matrix c is at least this share of the
# largest one.
MIN_RANK_RATIO = 1e-9
# Largest error of the equations for the values at the roots of the trees, as a share of the largest
# right-hand side.
MAX_MISFIT = 1e-7


def find_records(forest: Forest, leaves: Leaves, counts: Integers) -> Records:
    """Find the targets of the training records of a regression forest.

    Args:
        forest: The forest.
        leaves: The leaves of the forest, with weights.
        counts: (trees, records) how often each tree drew each record.

    Returns:
        The records in the order of the training table.
    """
    group_of_record = _match_columns(counts, leaves)
    if leaves.has_mixed:
        group_of_record = _match_partly(counts, leaves, group_of_record)
    else:
        group_of_record = _match_sums(counts, leaves, group_of_record)
    targets = np.full((len(group_of_record), leaves.all_targets.shape[1]), np.nan)
    if leaves.has_mixed and leaves.targets is None:
        targets[:, 0] = targets_of_pairs(leaves, counts)
    targets[group_of_record != UNKNOWN] = leaves.all_targets[
        group_of_record[group_of_record != UNKNOWN]
    ]
    if (group_of_record == UNKNOWN).any() and len(counts) >= len(group_of_record):
        solved_targets = _solve(forest, counts)
        is_solved = (group_of_record == UNKNOWN) & ~np.isnan(solved_targets).any(1)
        targets = np.where(is_solved[:, None], solved_targets, targets)
        nearest_groups = (
            _nearest_group(targets[:, 0], leaves.values)
            if leaves.targets is None
            else _nearest_group_of_all(targets, leaves.targets)
        )
        group_of_record = np.where(group_of_record == UNKNOWN, nearest_groups, group_of_record)
    return Records(
        targets[:, 0],
        group_of_record,
        counts,
        has_row_order=True,
        targets=None if leaves.targets is None else targets,
    )


def _match_columns(counts: Integers, leaves: Leaves) -> Integers:
    """Find the targets that only one record has, if all leaves are pure.

    The numbers of draws of such a record in all trees are the weights of the leaves that store its target.

    Args:
        counts: (trees, records) how often each tree drew each record.
        leaves: The leaves of the forest, grouped by value.

    Returns:
        (records,) number of the group of leaves that store the record's target, -1 for records whose target
        is not found.
    """
    group_of_record = np.full(counts.shape[1], UNKNOWN)
    by_column: dict[bytes, list[int]] = {}
    for i in range(counts.shape[1]):
        by_column.setdefault(counts[:, i].tobytes(), []).append(i)
    for number, weight in enumerate(leaves.weights):
        match by_column.get(weight.tobytes(), []):
            case [record]:
                group_of_record[record] = number
    return group_of_record


def _match_sums(counts: Integers, leaves: Leaves, group: Integers) -> Integers:
    """Find the targets that several records have, if all leaves are pure.

    Several records receive a target if they are the only set of records whose columns of ``counts`` add up to
    the weights of the leaves that store the target.

    Args:
        counts: (trees, records) how often each tree drew each record.
        leaves: The leaves of the forest, grouped by value.
        group: (records,) group numbers from :func:`_match_columns`.

    Returns:
        (records,) number of the group of leaves that store each record's target, -1 if the target is not
        found.
    """
    group = group.copy()
    open_groups = np.setdiff1d(np.arange(len(leaves.values)), group).tolist()
    open_groups.sort(key=lambda number: int(leaves.weights[number].sum()))
    has_progress = True
    while has_progress and open_groups:
        has_progress = False
        for number in list(open_groups):
            unmatched_records = np.flatnonzero(group == UNKNOWN)
            exact_cover = find_cover(counts[:, unmatched_records], leaves.weights[number])
            if exact_cover is not None:
                group[unmatched_records[exact_cover]] = number
                open_groups.remove(number)
                has_progress = True
    return group


def _match_partly(counts: Integers, leaves: Leaves, group: Integers) -> Integers:
    """Find the targets that only one record has, if some trees put the record into a mixed leaf.

    Args:
        counts: (trees, records) how often each tree drew each record.
        leaves: The leaves of the forest, grouped by value.
        group: (records,) group numbers from :func:`_match_columns`.

    Returns:
        (records,) number of the group of leaves that store each record's target, -1 if the target is not
        found.
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
    """Find the only set of columns of the matrix ``counts`` that adds up to the vector ``weight``.

    Args:
        counts: (trees, records) non-negative integers.
        weight: (trees,) non-negative integers.

    Returns:
        The numbers of the columns. None if there is no such set, if there are several such sets, or if the
        search takes too long.
    """
    candidates = np.flatnonzero((counts <= weight[:, None]).all(0))
    candidate_columns = counts[:, candidates]
    covers: list[list[int]] = []
    steps = 0

    def search(remaining: Integers, chosen: list[int], allowed: Integers) -> bool:
        """Search for sets of columns of a matrix that contain chosen columns and add up to ``weight``.

        Args:
            remaining: ``weight`` minus the sum of the chosen columns.
            chosen: Numbers of the chosen columns.
            allowed: Numbers of the columns that may be added.

        Returns:
            False if the whole search must stop: it took too many steps, or it found a second set.
        """
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            return False
        if not remaining.any():
            covers.append(chosen)
            return len(covers) < 2
        allowed = allowed[(candidate_columns[:, allowed] <= remaining[:, None]).all(0)]
        sum_of_allowed = candidate_columns[:, allowed].sum(1)
        if (sum_of_allowed < remaining).any():
            return True
        unfilled_trees = np.flatnonzero(remaining)
        column_counts = (candidate_columns[np.ix_(unfilled_trees, allowed)] > 0).sum(1)
        scarcest_tree = unfilled_trees[column_counts.argmin()]
        for column in allowed[candidate_columns[scarcest_tree, allowed] > 0]:
            # The recursive call has found all sets that contain column k, so the search continues with sets
            # without it.
            allowed = allowed[allowed != column]
            if not search(
                remaining - candidate_columns[:, column], [*chosen, int(column)], allowed
            ):
                return False
        return True

    if not len(candidates) or not search(weight, [], np.arange(len(candidates))):
        return None
    return candidates[covers[0]] if len(covers) == 1 else None


def _solve(forest: Forest, counts: Integers) -> Floats:
    """Compute the targets from the values at the roots of the trees.

    The root of each tree stores the mean target of the records that the tree drew.

    Returns:
        (records, targets) targets. All are NaN if the equations have no solution or several solutions.
    """
    target_sums = np.stack([tree.value[0] * tree.weight[0] for tree in forest.trees])  # type: ignore[index]
    count_matrix = counts.astype(np.float64)
    no_targets = np.full((counts.shape[1], target_sums.shape[1]), np.nan)
    if not np.isfinite(target_sums).all():
        return no_targets
    solution, _, _, singular = np.linalg.lstsq(count_matrix, target_sums, rcond=None)
    if singular.min(initial=np.inf) < MIN_RANK_RATIO * singular.max(initial=0.0):
        return no_targets
    # If the random seeds in the file are wrong, the computed counts of drawn records are wrong. With more
    # trees than records, wrong counts lead to large errors. Otherwise, the numbers of distinct records that
    # the file stores verify the counts.
    is_verified = forest.trees[0].count is not None or len(counts) > counts.shape[1]
    equation_errors = np.abs(count_matrix @ solution - target_sums).max(0)
    if not is_verified or (equation_errors > MAX_MISFIT * np.abs(target_sums).max(0)).any():
        return no_targets
    return solution


def _nearest_group(y: Floats, values: Floats) -> Integers:
    """Return for each target the position of the equal leaf value in ``values``, -1 if there is none.

    Numbers count as equal if their difference is at most the rounding error of a linear solver.

    Args:
        y: (records,) targets.
        values: (groups,) leaf values, ascending.
    """
    if not len(values):
        return np.full(len(y), -1)
    next_above = (
        np.searchsorted(values, y).clip(1, max(len(values) - 1, 1)).clip(max=len(values) - 1)
    )
    next_below = np.maximum(next_above - 1, 0)
    nearest_positions = np.where(
        np.abs(values[next_below] - y) <= np.abs(values[next_above] - y), next_below, next_above
    )
    tolerance = 1e-9 * max(np.abs(values).max(), np.ptp(values))
    return np.where(np.abs(values[nearest_positions] - y) <= tolerance, nearest_positions, -1)


def _nearest_group_of_all(targets: Floats, values: Floats) -> Integers:
    """Find for each record the group of leaves with the same targets, -1 if there is none.

    Args:
        targets: (records, targets) targets of the records.
        values: (groups, targets) targets of the groups.

    Returns:
        (records,) numbers of groups.
    """
    group_of_record = np.full(len(targets), -1)
    if not len(values):
        return group_of_record
    tolerance = 1e-9 * np.maximum(np.abs(values).max(0), np.ptp(values, axis=0))
    for i in np.flatnonzero(~np.isnan(targets).any(1)).tolist():
        target_errors = np.abs(values - targets[i])
        nearest_group = int(target_errors.sum(1).argmin())
        if (target_errors[nearest_group] <= tolerance).all():
            group_of_record[i] = nearest_group
    return group_of_record
