"""Find the training records of a forest whose bootstrap seeds are unknown, by the targets of the records.

Without seeds the bootstrap samples are not known, and neither is the order of the training table. But a
record lies in one leaf of each tree that drew the record. If the tree is fully grown, this leaf stores the
target of the record. So a target that only one record has identifies the leaf of this record in every tree.

Several records may have the same target. If the leaves store their numbers of records, the number of records
with this target is the largest total that the leaves of one tree with this target have. If the leaves store
no numbers, a target belongs to one record if two conditions hold. No tree has two leaves with this value, and
this value occurs in no more trees than expected for one record. Several records with the same target can be
told apart if one tree puts each of them into a separate leaf. A leaf of another tree belongs to one of these
records if the boxes of the two leaves overlap (:mod:`.links`). The box of a leaf is the set of rows that the
thresholds of the tree lead to this leaf.

If a file stores no impurities, a leaf value may also be the mean of several targets. A target occurs in every
tree that drew the record with this target, so the number of these trees has a binomial distribution. The mean
of two targets occurs in a second tree only if this tree also puts the two records into one leaf, and if their
numbers of draws have the same ratio in both trees. So most means occur in one tree only.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import binom, poisson

from residuum.trees.forest import Booleans, Integers
from residuum.trees.leaves import Leaves
from residuum.trees.links import UNKNOWN, Records

IN_BAG = 1 - np.exp(-1)  # probability that a bootstrap sample contains a given record
# A leaf value is taken as the target of exactly one record if "two records have this target" is at most
# this number of times as probable as "one record has it".
MAX_DOUBT = 0.01
# Largest probability that a leaf value counts as a target although it is the mean of two targets.
FALSE_TARGET = 1e-4
# Leaf values count as targets only if the most frequent values occur in at least this share of the trees.
MIN_IN_BAG = 0.3
MAX_SAME_TARGET = 6  # targets that more records than this have in common are left out


def records_without_seeds(leaves: Leaves) -> Records:
    """Find the records of a forest whose bootstrap samples are not known.

    Args:
        leaves: The leaves of the forest.

    Returns:
        Records in the order of their targets.
    """
    tree_count = leaves.numbers.shape[1]
    group_sizes = _group_sizes(leaves)
    if leaves.impurity is None:
        is_target = _are_targets((leaves.numbers > 0).sum(1), tree_count)
        group_sizes = np.where(is_target, group_sizes, 0)
    targets, groups, counts = [], [], []
    links: list[tuple[int, int, int]] = []
    leaf_counts = leaves.numbers if leaves.weight is None else leaves.weights
    for group, size in enumerate(group_sizes.tolist()):
        if size == 1:
            targets.append(leaves.values[group])
            groups.append(group)
            counts.append(leaf_counts[group])
        elif 1 < size <= MAX_SAME_TARGET:
            tree = int(leaves.numbers[group].argmax())
            separating_leaves = leaves.select(tree, group)
            if len(separating_leaves) < size:
                continue
            links += [(tree, len(targets) + k, leaf) for k, leaf in enumerate(separating_leaves)]
            targets += [leaves.values[group]] * size
            groups += [group] * size
            counts += [np.where(leaf_counts[group] > 0, UNKNOWN, 0)] * size
    count_columns = np.stack(counts, 1) if counts else np.zeros((tree_count, 0), dtype=np.int64)
    return Records(
        y=np.array(targets),
        group=np.array(groups, dtype=np.int64),
        targets=None if leaves.targets is None else leaves.targets[groups],
        counts=count_columns,
        has_row_order=False,
        links=tuple(links),
    )


def _group_sizes(leaves: Leaves) -> Integers:
    """Count for each distinct leaf value the records with this target, 0 if the number is unknown."""
    leaf_counts = leaves.numbers
    if leaves.count is not None:
        record_counts = leaves.sum_by_group(leaves.count)
        return record_counts.max(1)
    tree_count = leaf_counts.shape[1]
    if leaves.weight is not None and (leaves.weights == 1).all():
        return leaf_counts.max(1)
    most_leaves = leaf_counts.max(1)
    occurrences = (leaf_counts > 0).sum(1)
    if (occurrences == tree_count).mean() > 0.9:  # without a bootstrap, every tree has every target
        return most_leaves
    # Apply Bayes' rule to two hypotheses: one record has the target, or two records have it. The prior
    # probability of two records is the share of values that occur in two leaves of the same tree.
    pair_prior = max((most_leaves > 1).mean(), 0.5 / len(most_leaves))
    single_joint = (1 - pair_prior) * binom.pmf(occurrences, tree_count, IN_BAG)
    pair_joint = pair_prior * binom.pmf(occurrences, tree_count, 1 - (1 - IN_BAG) ** 2)
    return np.where((most_leaves == 1) & (pair_joint > MAX_DOUBT * single_joint), 0, most_leaves)


def _are_targets(occurrences: Integers, trees: int) -> Booleans:
    """Decide for each distinct leaf value whether it is the target of records, not a mean of targets.

    If most values occur in every tree, the numbers of trees do not tell targets from means. This happens if
    the forest has one tree, or if its trees were trained without a bootstrap. Then the trees are assumed to
    be fully grown, so that every leaf value is a target.

    Args:
        occurrences: (values,) number of trees in which each distinct leaf value occurs, at least 1.
        trees: Number of trees.

    Returns:
        (values,) whether each leaf value is a target.
    """
    if not len(occurrences) or (occurrences == trees).mean() > 0.9:
        return np.ones(len(occurrences), dtype=bool)
    draw_probability = _share_of_trees(float(occurrences.mean()), trees)
    # Compute the share of values that occur in one tree only, as expected if all values are targets.
    one_tree_probability = trees * draw_probability * (1 - draw_probability) ** (trees - 1)
    expected_share = min(one_tree_probability / (1 - (1 - draw_probability) ** trees), 1.0)
    share_error = 4 * np.sqrt(expected_share * (1 - expected_share) / len(occurrences)) + 0.02
    if expected_share <= 0.5 and (occurrences == 1).mean() <= expected_share + share_error:
        return np.ones(len(occurrences), dtype=bool)
    # Find how often a frequent value occurs: only 10% of the leaves have values that occur in more trees.
    sorted_occurrences = np.sort(occurrences)
    large_occurrence = sorted_occurrences[
        np.searchsorted(np.cumsum(sorted_occurrences), 0.9 * sorted_occurrences.sum())
    ]
    if large_occurrence < MIN_IN_BAG * trees:
        return np.zeros(len(occurrences), dtype=bool)
    # Compute how often a tree draws a record on average, from the probability that the tree draws the record.
    mean_draws = -np.log1p(-min(large_occurrence / trees, IN_BAG))
    draw_numbers = np.arange(1, 20)
    equal_draws_probability = float((poisson.pmf(draw_numbers, mean_draws) ** 2).sum())
    return occurrences > binom.isf(FALSE_TARGET, trees, equal_draws_probability)


def _share_of_trees(mean: float, trees: int) -> float:
    """Estimate the probability p with which the bootstrap of a tree draws a given record.

    Args:
        mean: Mean number of trees that drew a record, over the records that at least one tree drew. It equals
            T p / (1 - (1 - p)^T), and the function solves this equation for p.
        trees: Number of trees T.

    Returns:
        The probability p.
    """
    smallest, largest = 0.0, 1.0
    for _ in range(60):
        middle_probability = (smallest + largest) / 2
        if trees * middle_probability < mean * (1 - (1 - middle_probability) ** trees):
            smallest = middle_probability
        else:
            largest = middle_probability
    return max(largest, 1e-9)
