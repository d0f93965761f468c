"""Targets and records of leaves with two or three records that have different targets.

The count of a record is how often the bootstrap drew it. A leaf with weight w, mean target m and variance v
may hold two records with counts c and w - c. Then the target of the record with count c is

    y = m + sqrt(v (w - c) / c)   or   y = m - sqrt(v (w - c) / c).

The right target of record i occurs in many trees t, each time with the count ``c_ti`` of this record. A wrong
target hardly occurs twice.

If the targets are known, mean and variance of a leaf tell which records it holds: the only two or three
records whose counts add up to the weight, and whose targets have this mean and variance.
"""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import Floats, Integers
from residuum.trees.leaves import MIXED, Leaves

MIN_TREES = 6  # a target must occur with the counts of its record in at least this many trees
# In at least this share of the leaves with a candidate target, the count must be the count of the record.
MIN_SHARE = 0.9
# Estimates of a target are equal if they differ by at most this share of the spread of all leaf values.
SAME_TARGET = 1e-7
SAME_SUM = 1e-6  # largest error of the mean of a leaf, as a share of the spread of all targets
MAX_FREE = 400  # sets of three records are only searched among at most this many records of a tree


def targets_of_pairs(leaves: Leaves, counts: Integers) -> Floats:
    """Return the targets of records that the leaves with two records determine.

    Args:
        leaves: The leaves of a forest, with weights, counts and impurities.
        counts: (trees, records) how often each tree drew each record.

    Returns:
        (records,) targets, NaN for a record whose target is not determined.
    """
    targets = np.full(counts.shape[1], np.nan)
    if leaves.count is None or leaves.weight is None or leaves.impurity is None:
        return targets
    pair_leaves = np.flatnonzero((leaves.count == 2) & (leaves.group == MIXED))
    if not len(pair_leaves):
        return targets
    value, tree, count = _candidates(leaves, pair_leaves)
    by_value = np.argsort(value, kind="stable")
    value, tree, count = value[by_value], tree[by_value], count[by_value]
    is_gap = np.diff(value) > SAME_TARGET * leaves.value.std()
    for cluster in np.split(np.arange(len(value)), np.flatnonzero(is_gap) + 1):
        if len(cluster) < MIN_TREES:
            continue
        agreements = (counts[tree[cluster]] == count[cluster, None]).sum(0)
        record = int(agreements.argmax())
        is_best_alone = (
            np.partition(agreements, -2)[-2] < agreements[record] if len(agreements) > 1 else True
        )
        min_agreement = max(MIN_TREES, MIN_SHARE * len(cluster))
        if is_best_alone and agreements[record] >= min_agreement and np.isnan(targets[record]):
            targets[record] = np.median(value[cluster])
    return targets


def _candidates(leaves: Leaves, pairs: Integers) -> tuple[Floats, Integers, Integers]:
    """Return every possible target of a record in a leaf with two records.

    Args:
        leaves: The leaves of a forest, with weights and impurities.
        pairs: Numbers of the leaves with two records.

    Returns:
        For each possible target its value, its tree, and the count of its record in this tree.
    """
    assert leaves.weight is not None
    assert leaves.impurity is not None
    values, trees, counts = [], [], []
    weight, deviation = leaves.weight[pairs], np.sqrt(leaves.impurity[pairs])
    for count in range(1, int(weight.max(initial=1))):
        has_room = weight > count
        distances = deviation[has_room] * np.sqrt((weight[has_room] - count) / count)
        for sign in (1.0, -1.0):
            values.append(leaves.value[pairs[has_room]] + sign * distances)
            trees.append(leaves.tree[pairs[has_room]])
            counts.append(np.full(int(has_room.sum()), count))
    return np.concatenate(values), np.concatenate(trees), np.concatenate(counts)


def find_members(
    leaves: Leaves, leaf: int, y: Floats, counts: Integers, spread: float
) -> Integers | None:
    """Return the only two or three records that can be the records of a leaf.

    Args:
        leaves: The leaves of a forest, with weights, counts and impurities.
        leaf: Number of the leaf.
        y: (k,) targets of the k records that may lie in the leaf.
        counts: (k,) how often the tree of the leaf drew each of these records.
        spread: Standard deviation of all targets.

    Returns:
        Positions of the records in ``y``, or None if no set or more than one set of records fits.
    """
    assert leaves.weight is not None
    assert leaves.count is not None
    assert leaves.impurity is not None
    size, weight = int(leaves.count[leaf]), int(leaves.weight[leaf])
    weighted_sum = weight * float(leaves.value[leaf])
    by_target = np.argsort(y, kind="stable")
    if size == 2:
        sets = _pairs(
            y[by_target], counts[by_target], weight, weighted_sum, weight * SAME_SUM * spread
        )
    elif size == 3 and len(y) <= MAX_FREE:
        sets = _triples(
            y[by_target], counts[by_target], weight, weighted_sum, weight * SAME_SUM * spread
        )
    else:
        return None
    if not len(sets):
        return None
    mean = leaves.value[leaf]
    chosen_y, chosen_counts = y[by_target][sets], counts[by_target][sets]
    variances = (chosen_counts * (chosen_y - mean) ** 2).sum(1) / weight
    errors = np.abs(variances - leaves.impurity[leaf])
    fitting_sets = sets[errors <= 1e-4 * leaves.impurity[leaf] + (SAME_SUM * spread) ** 2]
    return by_target[fitting_sets[0]] if len(fitting_sets) == 1 else None


def _pairs(y: Floats, counts: Integers, weight: int, total: float, tolerance: float) -> Integers:
    """Find pairs of records with a given total weight and a given weighted sum of targets.

    Args:
        y: (n,) targets of the records, ascending.
        counts: (n,) weights of the records.
        weight: Total weight of a pair.
        total: Weighted sum of the targets of a pair.
        tolerance: Largest error of the weighted sum.

    Returns:
        (k, 2) positions in ``y``, each row ascending.
    """
    pairs = []
    for count in range(1, weight):
        first_records, second_records = (
            np.flatnonzero(counts == count),
            np.flatnonzero(counts == weight - count),
        )
        if not len(first_records) or not len(second_records):
            continue
        needed_targets = (total - count * y[first_records]) / (weight - count)
        target_tolerance = tolerance / (weight - count)
        begin = np.searchsorted(y[second_records], needed_targets - target_tolerance)
        end = np.searchsorted(y[second_records], needed_targets + target_tolerance, side="right")
        for position in np.flatnonzero(end > begin):
            for k in range(begin[position], end[position]):
                pair = (first_records[position], second_records[k])
                if pair[0] < pair[1]:
                    pairs.append(pair)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _triples(y: Floats, counts: Integers, weight: int, total: float, tolerance: float) -> Integers:
    """Find triples of records with a given total weight and a given weighted sum of targets.

    Args:
        y: (n,) targets of the records, ascending.
        counts: (n,) weights of the records.
        weight: Total weight of a triple.
        total: Weighted sum of the targets of a triple.
        tolerance: Largest error of the weighted sum.

    Returns:
        (k, 3) positions in ``y``, each row ascending.
    """
    triples = []
    for i in range(len(y) - 2):
        remaining_weight = weight - int(counts[i])
        if remaining_weight < 2:
            continue
        later_records = slice(i + 1, None)
        pairs = _pairs(
            y[later_records],
            counts[later_records],
            remaining_weight,
            total - counts[i] * y[i],
            tolerance,
        )
        triples += [(i, i + 1 + int(a), i + 1 + int(b)) for a, b in pairs]
    return np.array(triples, dtype=np.int64).reshape(-1, 3)
