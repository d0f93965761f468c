"""Find the targets of records, or the records themselves, from leaves with two or three different records.

The count of a record in a tree is how often the bootstrap sample of the tree contains the record. The weight
of a leaf is the sum of the counts of its records. A leaf with weight w, mean target m and variance v may hold
two records with counts c and w - c. Then the target of the record with count c is

    y = m + sqrt(v (w - c) / c)   or   y = m - sqrt(v (w - c) / c).

Both formulas are applied to all leaves with two records and to all counts c, which gives candidate targets.
The right target of record i is a candidate in many trees t, and its count c is the number of times ``c_ti``
that tree t drew record i. A wrong target rarely occurs twice.

If the targets are known, the mean and the variance of a leaf tell which records it holds. These are the only
two or three records whose counts add up to the weight, and whose targets have this mean and variance.
"""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import Floats, Integers
from residuum.trees.leaves import MIXED, Leaves

# Each tree drew each record a known number of times. A value is accepted as the target of a record only if
# the number of draws agrees in at least this number of trees.
MIN_TREES = 6
# Each tree drew each record a known number of times. A value is accepted as the target of a record only if
# the number of draws agrees in at least this share of the trees in which the value occurs.
MIN_SHARE = 0.9
# Two values that may be targets count as equal if their difference is at most this share of the standard
# deviation of all leaf values.
SAME_TARGET = 1e-7
# The records of a leaf are accepted if the mean of their targets equals the stored mean up to this share of
# the standard deviation of all targets.
SAME_SUM = 1e-6
# To limit the time, leaves with three records are not examined if more than this number of records may lie
# in them.
MAX_FREE = 400


def targets_of_pairs(leaves: Leaves, counts: Integers) -> Floats:
    """Find the targets of records that follow from leaves that hold two records.

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
    is_cluster_end = np.diff(value) > SAME_TARGET * leaves.value.std()
    for cluster in np.split(np.arange(len(value)), np.flatnonzero(is_cluster_end) + 1):
        if len(cluster) < MIN_TREES:
            continue
        matching_counts = (counts[tree[cluster]] == count[cluster, None]).sum(0)
        record = int(matching_counts.argmax())
        has_single_best = (
            np.partition(matching_counts, -2)[-2] < matching_counts[record]
            if len(matching_counts) > 1
            else True
        )
        min_matching = max(MIN_TREES, MIN_SHARE * len(cluster))
        if (
            has_single_best
            and matching_counts[record] >= min_matching
            and np.isnan(targets[record])
        ):
            targets[record] = np.median(value[cluster])
    return targets


def _candidates(leaves: Leaves, pairs: Integers) -> tuple[Floats, Integers, Integers]:
    """Compute every possible target of the records in leaves that hold two records.

    Args:
        leaves: The leaves of a forest, with weights and impurities.
        pairs: Numbers of the leaves with two records.

    Returns:
        (candidates,) value of each possible target, (candidates,) number of the tree, and (candidates,) how
        often this tree must have drawn the record with this target.
    """
    assert leaves.weight is not None
    assert leaves.impurity is not None
    values, trees, counts = [], [], []
    weight, deviation = leaves.weight[pairs], np.sqrt(leaves.impurity[pairs])
    for count in range(1, int(weight.max(initial=1))):
        exceeds_count = weight > count
        distances = deviation[exceeds_count] * np.sqrt((weight[exceeds_count] - count) / count)
        for sign in (1.0, -1.0):
            values.append(leaves.value[pairs[exceeds_count]] + sign * distances)
            trees.append(leaves.tree[pairs[exceeds_count]])
            counts.append(np.full(int(exceeds_count.sum()), count))
    return np.concatenate(values), np.concatenate(trees), np.concatenate(counts)


def find_members(
    leaves: Leaves, leaf: int, y: Floats, counts: Integers, spread: float
) -> Integers | None:
    """Return the two or three records that a leaf holds, if only one set of records is possible.

    The records must have the weight, the mean target and the variance of the leaf.

    Args:
        leaves: The leaves of a forest, with weights, counts and impurities.
        leaf: Number of the leaf.
        y: (k,) targets of the k records that may lie in the leaf.
        counts: (k,) how often the tree of the leaf drew each of these records.
        spread: Standard deviation of the targets of all records.

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
    leaf_mean = leaves.value[leaf]
    chosen_y, chosen_counts = y[by_target][sets], counts[by_target][sets]
    variances = (chosen_counts * (chosen_y - leaf_mean) ** 2).sum(1) / weight
    variance_errors = np.abs(variances - leaves.impurity[leaf])
    fitting_sets = sets[variance_errors <= 1e-4 * leaves.impurity[leaf] + (SAME_SUM * spread) ** 2]
    return by_target[fitting_sets[0]] if len(fitting_sets) == 1 else None


def _pairs(y: Floats, counts: Integers, weight: int, total: float, tolerance: float) -> Integers:
    """Find pairs of records with a given sum of draw counts and a given weighted sum of targets.

    Args:
        y: (n,) targets of the records, ascending.
        counts: (n,) how often a tree drew each record. These counts are the weights of the weighted sum.
        weight: Sum of the counts of a pair.
        total: Weighted sum of the targets of a pair.
        tolerance: Largest error of the weighted sum.

    Returns:
        (k, 2) positions in ``y`` of the k pairs. The first position of a pair is the smaller one.
    """
    pair_arrays = []
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
        last_match = np.searchsorted(
            y[second_records], needed_targets + target_tolerance, side="right"
        )
        for position in np.flatnonzero(last_match > begin):
            for k in range(begin[position], last_match[position]):
                pair = (first_records[position], second_records[k])
                if pair[0] < pair[1]:
                    pair_arrays.append(pair)
    return np.array(pair_arrays, dtype=np.int64).reshape(-1, 2)


def _triples(y: Floats, counts: Integers, weight: int, total: float, tolerance: float) -> Integers:
    """Find triples of records with a given sum of draw counts and a given weighted sum of targets.

    Args:
        y: (n,) targets of the records, ascending.
        counts: (n,) how often a tree drew each record. These counts are the weights of the weighted sum.
        weight: Sum of the counts of a triple.
        total: Weighted sum of the targets of a triple.
        tolerance: Largest error of the weighted sum.

    Returns:
        (k, 3) positions in ``y`` of the k triples. The positions of a triple are ascending.
    """
    triples = []
    for i in range(len(y) - 2):
        remaining_weight = weight - int(counts[i])
        if remaining_weight < 2:
            continue
        later_records = slice(i + 1, None)
        matching_pairs = _pairs(
            y[later_records],
            counts[later_records],
            remaining_weight,
            total - counts[i] * y[i],
            tolerance,
        )
        triples += [(i, i + 1 + int(a), i + 1 + int(b)) for a, b in matching_pairs]
    return np.array(triples, dtype=np.int64).reshape(-1, 3)
