"""Group the leaves of a regression forest by the mean target that they store.

A leaf is pure if all its training records have the same target. A pure leaf stores this target up to
rounding, because the library computes it as a mean. All pure leaves with the same value form a group. All
training records with this target belong to the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from residuum.trees.forest import Floats, Forest, Integers

# Two leaves whose records have equal targets may store means that differ by rounding, at most by this share
# of the largest target.
ROUNDING = 256 * np.finfo(np.float64).eps
# A leaf counts as pure (all of its records have the same target) if its impurity is at most this share of
# the variance of all leaf values.
PURE = 1e-12
# Relative rounding error of the impurity of a leaf. The impurity is computed from sums over many records,
# so the rounding error is multiplied by the squares of the targets and the number of records.
IMPURITY_ROUNDING = 8 * np.finfo(np.float64).eps
MIXED = -1  # group number of a leaf whose records have different targets


@dataclass(frozen=True)
class Leaves:
    """The leaves of all trees of a regression forest, grouped by the target that they store.

    A leaf is pure if all its training records have the same target. Otherwise the leaf is mixed. All pure
    leaves that store the same target form a group. Mixed leaves belong to no group.

    Attributes:
        value: (leaves,) mean target of each leaf.
        tree: (leaves,) number of each leaf's tree.
        values: (groups,) distinct values of pure leaves, ascending. The leaves with one value form a group.
        group: (leaves,) group number of each leaf, -1 for a mixed leaf.
        weight: (leaves,) sum of the weights of each leaf's records, None if the file stores no weights.
        count: (leaves,) number of distinct records of each leaf, None if the file stores no numbers.
        impurity: (leaves,) variance of the targets of each leaf, None if the file stores no impurities. For
            several targets, the mean of their variances.
        targets: (groups, targets) all targets of each group, if the model has several targets. Then ``value``
            and ``values`` hold the first target. None for one target.
    """

    value: Floats
    tree: Integers
    values: Floats
    group: Integers
    weight: Integers | None
    count: Integers | None
    impurity: Floats | None
    targets: Floats | None = None

    @property
    def all_targets(self) -> Floats:
        """All targets of each group of leaves, (groups, targets)."""
        return self.values[:, None] if self.targets is None else self.targets

    @property
    def has_mixed(self) -> bool:
        """Whether at least one leaf is mixed, i.e. has records with different targets."""
        return bool((self.group == MIXED).any())

    @cached_property
    def weights(self) -> Integers:
        """Total weight of the leaves of each group (leaves with one target) in each tree, (groups, trees)."""
        assert self.weight is not None
        return self.sum_by_group(self.weight)

    @cached_property
    def numbers(self) -> Integers:
        """Number of leaves of each group (leaves with one target) in each tree, (groups, trees)."""
        return self.sum_by_group(np.ones(len(self.group), dtype=np.int64))

    def select(self, tree: int, group: int) -> list[int]:
        """Find the leaves of one group (leaves that store one target) in one tree.

        Args:
            tree: Number of the tree.
            group: Number of the group.

        Returns:
            Numbers of the leaves, from left to right.
        """
        return self._by_tree_and_group.get((tree, group), [])

    @cached_property
    def _by_tree_and_group(self) -> dict[tuple[int, int], list[int]]:
        leaves: dict[tuple[int, int], list[int]] = {}
        for leaf, key in enumerate(zip(self.tree.tolist(), self.group.tolist(), strict=True)):
            leaves.setdefault(key, []).append(leaf)
        return leaves

    def sum_by_group(self, amount: Integers) -> Integers:
        """Add up an amount over the leaves of each group in each tree.

        Args:
            amount: (leaves,) number for each leaf.

        Returns:
            (groups, trees) sums.
        """
        group_sums = np.zeros((len(self.values), int(self.tree.max()) + 1), dtype=np.int64)
        pure_leaves = np.flatnonzero(self.group != MIXED)
        np.add.at(
            group_sums, (self.group[pure_leaves], self.tree[pure_leaves]), amount[pure_leaves]
        )
        return group_sums


def group_leaves(forest: Forest) -> Leaves:
    """Group the leaves of a regression forest by the target that they store.

    If the file stores no impurities, every leaf counts as pure, i.e. all its records have the same target.
    This is true for forests with the default settings, whose trees are fully grown. Leaves of a model with
    several targets form a group if all targets are equal.

    Args:
        forest: The forest.

    Returns:
        The leaves of the forest with their groups.
    """
    value = _gather(forest, "value")
    assert value is not None
    impurity, weight, count = (_gather(forest, name) for name in ("impurity", "weight", "count"))
    is_pure = np.ones(len(value), dtype=bool)
    if impurity is not None:
        is_pure = impurity <= PURE * max(float(value.var(0).mean()), np.finfo(float).tiny)
        if weight is not None:
            largest_sum = float(np.square(value).max()) * _largest_root_weight(forest)
            is_pure |= impurity * weight <= IMPURITY_ROUNDING * largest_sum
        if count is not None:
            is_pure |= count == 1
    group_of_leaf = np.full(len(value), MIXED)
    pure_leaves = np.flatnonzero(is_pure)
    group_of_leaf[pure_leaves] = _number_groups(value[pure_leaves], ROUNDING * np.abs(value).max(0))
    leaves_by_group = pure_leaves[np.argsort(group_of_leaf[pure_leaves], kind="stable")]
    group_starts = np.flatnonzero(np.diff(group_of_leaf[leaves_by_group], prepend=MIXED))
    targets = np.stack(
        [_most_common(column, group_starts) for column in value[leaves_by_group].T], 1
    )
    return Leaves(
        value=value[:, 0],
        tree=forest.structure.leaf_tree,
        values=targets[:, 0],
        group=group_of_leaf,
        weight=None if weight is None else np.rint(weight).astype(np.int64),
        count=None if count is None else count.astype(np.int64),
        impurity=impurity,
        targets=targets if targets.shape[1] > 1 else None,
    )


def _number_groups(value: Floats, tolerance: Floats) -> Integers:
    """Give each leaf a group number. Leaves with equal targets have the same number.

    Groups are numbered in the order of their first target.

    Args:
        value: (leaves, targets) values of pure leaves.
        tolerance: (targets,) largest difference of equal values.

    Returns:
        (leaves,) group number of each leaf.
    """
    numbers_by_target = []
    for column, largest_difference in zip(value.T, tolerance, strict=True):
        by_value = np.argsort(column, kind="stable")
        group_numbers = np.zeros(len(column), dtype=np.int64)
        starts_group = np.diff(column[by_value], prepend=-np.inf) > largest_difference
        group_numbers[by_value] = np.cumsum(starts_group) - 1
        numbers_by_target.append(group_numbers)
    if len(numbers_by_target) == 1:
        return numbers_by_target[0]
    return np.unique(np.stack(numbers_by_target, 1), axis=0, return_inverse=True)[1].ravel()


def _largest_root_weight(forest: Forest) -> float:
    return max(float(tree.weight[0]) for tree in forest.trees if tree.weight is not None)


def _gather(forest: Forest, name: str) -> Floats | None:
    """Collect the entries of one array of ``Tree`` for the leaves of all trees, None if a tree lacks it.

    Args:
        forest: The forest.
        name: Name of the attribute of ``Tree`` that holds the array.

    Returns:
        (leaves, ...) entries.
    """
    structure = forest.structure
    arrays = [getattr(tree, name) for tree in forest.trees]
    if any(array is None for array in arrays):
        return None
    leaf_ranges = zip(arrays, structure.leaf_starts[:-1], structure.leaf_starts[1:], strict=True)
    return np.concatenate([array[structure.leaf_node[a:b]] for array, a, b in leaf_ranges])


def _most_common(value: Floats, starts: Integers) -> Floats:
    """Find the most common value in each group of leaf values, which differ only by rounding errors.

    Args:
        value: (leaves,) values of one target in all pure leaves, ordered by group.
        starts: Position of the first value of each group.

    Returns:
        (groups,) values.
    """
    common_values = np.zeros(len(starts))
    for number, members in enumerate(np.split(value, starts[1:]) if len(starts) else []):
        distinct, counts = np.unique(members, return_counts=True)
        common_values[number] = distinct[counts.argmax()]
    return common_values
