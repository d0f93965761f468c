"""Mixed leaves with two or three records.

A leaf with weight w, mean m and variance v that holds two records with counts c and w - c stores both
targets:

    y = m +- sqrt(v (w - c) / c)

is the target of the record with count c. The right target of record i occurs in many trees, each time
with the count ``c_ti`` of this record. A wrong one hardly occurs twice.

If the targets are known, the mean of a leaf tells which records it holds: the only two or three free
records whose counts add up to the weight, and whose targets have this mean and variance.
"""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import Floats, Integers
from residuum.trees.leaves import MIXED, Leaves

MIN_TREES = 6  # in which a target must occur with the counts of its record
MIN_SHARE = 0.9  # of the leaves with a value whose counts must be those of the record
SAME_TARGET = 1e-7  # difference of two estimates of a target, times the spread of all
SAME_SUM = 1e-6  # error of the mean of a leaf, times the spread of all targets
MAX_FREE = 400  # records of a tree among which three are searched


def targets_of_pairs(leaves: Leaves, counts: Integers) -> Floats:
    """Return the targets that leaves with two records give.

    Args:
        leaves: The leaves, with weights, counts and impurities.
        counts: (trees, records) how often each tree drew each record.

    Returns:
        (records,) targets, NaN if not found.
    """
    y = np.full(counts.shape[1], np.nan)
    if leaves.count is None or leaves.weight is None or leaves.impurity is None:
        return y
    pairs = np.flatnonzero((leaves.count == 2) & (leaves.group == MIXED))
    if not len(pairs):
        return y
    value, tree, count = _candidates(leaves, pairs)
    order = np.argsort(value, kind="stable")
    value, tree, count = value[order], tree[order], count[order]
    gap = np.diff(value) > SAME_TARGET * leaves.value.std()
    for cluster in np.split(np.arange(len(value)), np.flatnonzero(gap) + 1):
        if len(cluster) < MIN_TREES:
            continue
        agreement = (counts[tree[cluster]] == count[cluster, None]).sum(0)
        record = int(agreement.argmax())
        is_only = (
            np.partition(agreement, -2)[-2] < agreement[record] if len(agreement) > 1 else True
        )
        enough = max(MIN_TREES, MIN_SHARE * len(cluster))
        if is_only and agreement[record] >= enough and np.isnan(y[record]):
            y[record] = np.median(value[cluster])
    return y


def _candidates(leaves: Leaves, pairs: Integers) -> tuple[Floats, Integers, Integers]:
    """Return every target that a leaf with two records may hold, with its tree and its count."""
    assert leaves.weight is not None
    assert leaves.impurity is not None
    values, trees, counts = [], [], []
    weight, deviation = leaves.weight[pairs], np.sqrt(leaves.impurity[pairs])
    for count in range(1, int(weight.max(initial=1))):
        rows = weight > count
        distance = deviation[rows] * np.sqrt((weight[rows] - count) / count)
        for sign in (1.0, -1.0):
            values.append(leaves.value[pairs[rows]] + sign * distance)
            trees.append(leaves.tree[pairs[rows]])
            counts.append(np.full(int(rows.sum()), count))
    return np.concatenate(values), np.concatenate(trees), np.concatenate(counts)


def find_members(
    leaves: Leaves, leaf: int, y: Floats, counts: Integers, spread: float
) -> Integers | None:
    """Return the only two or three records that a leaf can hold.

    Args:
        leaves: The leaves, with weights, counts and impurities.
        leaf: Number of the leaf.
        y: (free,) targets of the free records of its tree.
        counts: (free,) how often the tree drew them.
        spread: Standard deviation of all targets.

    Returns:
        Positions among the free records, None if no set or more than one fits.
    """
    assert leaves.weight is not None
    assert leaves.count is not None
    assert leaves.impurity is not None
    size, weight = int(leaves.count[leaf]), int(leaves.weight[leaf])
    total = weight * float(leaves.value[leaf])
    order = np.argsort(y, kind="stable")
    if size == 2:
        sets = _pairs(y[order], counts[order], weight, total, weight * SAME_SUM * spread)
    elif size == 3 and len(y) <= MAX_FREE:
        sets = _triples(y[order], counts[order], weight, total, weight * SAME_SUM * spread)
    else:
        return None
    if not len(sets):
        return None
    mean = leaves.value[leaf]
    chosen_y, chosen_counts = y[order][sets], counts[order][sets]
    variance = (chosen_counts * (chosen_y - mean) ** 2).sum(1) / weight
    error = np.abs(variance - leaves.impurity[leaf])
    fitting = sets[error <= 1e-4 * leaves.impurity[leaf] + (SAME_SUM * spread) ** 2]
    return order[fitting[0]] if len(fitting) == 1 else None


def _pairs(y: Floats, counts: Integers, weight: int, total: float, tolerance: float) -> Integers:
    """Return (k, 2) positions i < j of an ascending y with the right weight and total."""
    pairs = []
    for count in range(1, weight):
        first, second = np.flatnonzero(counts == count), np.flatnonzero(counts == weight - count)
        if not len(first) or not len(second):
            continue
        target = (total - count * y[first]) / (weight - count)
        slack = tolerance / (weight - count)
        begin = np.searchsorted(y[second], target - slack)
        end = np.searchsorted(y[second], target + slack, side="right")
        for position in np.flatnonzero(end > begin):
            for k in range(begin[position], end[position]):
                pair = (first[position], second[k])
                if pair[0] < pair[1]:
                    pairs.append(pair)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _triples(y: Floats, counts: Integers, weight: int, total: float, tolerance: float) -> Integers:
    """Return (k, 3) positions i < j < k of an ascending y with the right weight and total."""
    triples = []
    for i in range(len(y) - 2):
        remaining = weight - int(counts[i])
        if remaining < 2:
            continue
        behind = slice(i + 1, None)
        pairs = _pairs(y[behind], counts[behind], remaining, total - counts[i] * y[i], tolerance)
        triples += [(i, i + 1 + int(a), i + 1 + int(b)) for a, b in pairs]
    return np.array(triples, dtype=np.int64).reshape(-1, 3)
