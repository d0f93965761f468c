"""Training records of a forest whose bootstrap seeds are unknown, distinguished by their targets.

Without seeds the bootstrap samples are not known, and neither is the order of the training table. But a
record lies in one leaf of each tree that drew it, and fully grown trees store its target there. So a
target that only one record has identifies the leaf of this record in every tree.

Several records may have the same target. If the leaves store their numbers of records, we know how many: the
largest number of records with this target in one tree. Otherwise a target belongs to one record if no tree
has two leaves with this value, and if this value occurs in no more trees than expected for one record.
Several records with the same target are distinguished in a tree that puts each of them into a separate leaf.
Leaves of other trees are linked with these records if their boxes overlap (:mod:`.links`).

If a file stores no impurities, a leaf value may also be the mean of several targets. A target occurs in every
tree that drew its record, so the number of its trees has a binomial distribution. The mean of two targets
only occurs again in a tree that drew both records equally often and left them together. So most means occur
in one tree.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import binom, poisson

from residuum.trees.forest import Booleans, Integers
from residuum.trees.leaves import Leaves
from residuum.trees.links import UNKNOWN, Records

IN_BAG = 1 - np.exp(-1)  # probability that a bootstrap sample contains a given record
# A leaf value counts as the target of one record if the odds of two records are at most this number.
MAX_DOUBT = 0.01
# Probability that the mean of two targets occurs in so many trees that it counts as a target.
FALSE_TARGET = 1e-4
MIN_IN_BAG = 0.3  # smallest share of trees with a target, if leaves with several targets exist
MAX_ANCHORS = 6  # more records with the same target than this are not distinguished


def records_without_seeds(leaves: Leaves) -> Records:
    """Return the records of a forest whose bootstrap samples are not known.

    Args:
        leaves: The leaves of the forest.

    Returns:
        Records in the order of their targets.
    """
    trees = leaves.numbers.shape[1]
    group_sizes = _group_sizes(leaves)
    if leaves.impurity is None:
        group_sizes = np.where(_are_targets((leaves.numbers > 0).sum(1), trees), group_sizes, 0)
    targets, groups, counts = [], [], []
    links: list[tuple[int, int, int]] = []
    leaf_counts = leaves.numbers if leaves.weight is None else leaves.weights
    for number, size in enumerate(group_sizes.tolist()):
        if size == 1:
            targets.append(leaves.values[number])
            groups.append(number)
            counts.append(leaf_counts[number])
        elif 1 < size <= MAX_ANCHORS:
            tree = int(leaves.numbers[number].argmax())
            anchors = leaves.select(tree, number)
            if len(anchors) < size:
                continue
            links += [(tree, len(targets) + k, leaf) for k, leaf in enumerate(anchors)]
            targets += [leaves.values[number]] * size
            groups += [number] * size
            counts += [np.where(leaf_counts[number] > 0, UNKNOWN, 0)] * size
    count_columns = np.stack(counts, 1) if counts else np.zeros((trees, 0), dtype=np.int64)
    return Records(
        y=np.array(targets),
        group=np.array(groups, dtype=np.int64),
        targets=None if leaves.targets is None else leaves.targets[groups],
        counts=count_columns,
        has_row_order=False,
        links=tuple(links),
    )


def _group_sizes(leaves: Leaves) -> Integers:
    """Return how many records have each leaf value as their target, 0 if this is unknown."""
    leaf_counts = leaves.numbers
    if leaves.count is not None:
        totals = leaves.sum_by_group(leaves.count)
        return totals.max(1)
    trees = leaf_counts.shape[1]
    if leaves.weight is not None and (leaves.weights == 1).all():
        return leaf_counts.max(1)
    most_leaves = leaf_counts.max(1)
    occurrences = (leaf_counts > 0).sum(1)
    if (occurrences == trees).mean() > 0.9:  # no bootstrap: every tree has every record
        return most_leaves
    # Bayes' rule compares one record with two. Only neighboring records can share a leaf in every tree.
    pair_share = max((most_leaves > 1).mean(), 0.5 / len(most_leaves))
    single_likelihood = (1 - pair_share) * binom.pmf(occurrences, trees, IN_BAG)
    pair_likelihood = pair_share * binom.pmf(occurrences, trees, 1 - (1 - IN_BAG) ** 2)
    return np.where(
        (most_leaves == 1) & (pair_likelihood > MAX_DOUBT * single_likelihood), 0, most_leaves
    )


def _are_targets(occurrences: Integers, trees: int) -> Booleans:
    """Return which leaf values are targets, not means of several targets.

    Args:
        occurrences: (groups,) number of trees in which each leaf value occurs, at least 1.
        trees: Number of trees.

    Returns:
        (groups,) flags. One tree, or trees without a bootstrap, do not show this. They count as fully grown.
    """
    if not len(occurrences) or (occurrences == trees).mean() > 0.9:
        return np.ones(len(occurrences), dtype=bool)
    in_bag = _share_of_trees(float(occurrences.mean()), trees)
    # If all values are targets, so many of them occur in one tree only.
    single = trees * in_bag * (1 - in_bag) ** (trees - 1)
    expected = min(single / (1 - (1 - in_bag) ** trees), 1.0)
    error = 4 * np.sqrt(expected * (1 - expected) / len(occurrences)) + 0.02
    if expected <= 0.5 and (occurrences == 1).mean() <= expected + error:
        return np.ones(len(occurrences), dtype=bool)
    by_size = np.sort(occurrences)
    upper = by_size[np.searchsorted(np.cumsum(by_size), 0.9 * by_size.sum())]
    if upper < MIN_IN_BAG * trees:
        return np.zeros(len(occurrences), dtype=bool)
    draws = -np.log1p(-min(upper / trees, IN_BAG))  # mean number of draws of a record for one tree
    number = np.arange(1, 20)
    equally_often = float((poisson.pmf(number, draws) ** 2).sum())
    return occurrences > binom.isf(FALSE_TARGET, trees, equally_often)


def _share_of_trees(mean: float, trees: int) -> float:
    """Return the probability p with which a tree draws a record.

    Args:
        mean: Mean number of trees of the records that at least one tree drew, i.e. T p / (1 - (1 - p)^T).
        trees: Number of trees T.

    Returns:
        The probability.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if trees * middle < mean * (1 - (1 - middle) ** trees):
            low = middle
        else:
            high = middle
    return max(high, 1e-9)
