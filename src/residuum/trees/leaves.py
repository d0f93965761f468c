"""The leaves of a regression forest, grouped by the mean target that they store.

A leaf is pure if all its training records have the same target. A pure leaf stores this target, up to the
rounding of a mean. Pure leaves with the same value form a group, to which all records with this target
belong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from residuum.trees.forest import Floats, Forest, Integers

# Means of equal targets may differ by this share of the largest target because of rounding.
ROUNDING = 256 * np.finfo(np.float64).eps
# A leaf is pure if its impurity is at most this share of the variance of all leaf values.
PURE = 1e-12
# The impurity of a pure leaf is the difference of two sums over the records of its parent, divided by the
# weight of the leaf. So its rounding error grows with the squares of the targets and the number of records.
IMPURITY_ROUNDING = 8 * np.finfo(np.float64).eps
MIXED = -1  # group number of a leaf whose records have different targets


@dataclass(frozen=True)
class Leaves:
    """The leaves of all trees of a regression forest, grouped by the target that they store.

    A leaf is pure if all its training records have the same target. Otherwise it is mixed.

    Attributes:
        value: (leaves,) mean target of each leaf.
        tree: (leaves,) number of each leaf's tree.
        values: (groups,) distinct values of pure leaves, ascending. Each value is a group of leaves.
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
        """(groups, targets) all targets of each group."""
        return self.values[:, None] if self.targets is None else self.targets

    @property
    def has_mixed(self) -> bool:
        """Whether a leaf has records with different targets."""
        return bool((self.group == MIXED).any())

    @cached_property
    def weights(self) -> Integers:
        """(groups, trees) total weight of the leaves of each group in each tree."""
        assert self.weight is not None
        return self.sum_by_group(self.weight)

    @cached_property
    def numbers(self) -> Integers:
        """(groups, trees) number of leaves of each group in each tree."""
        return self.sum_by_group(np.ones(len(self.group), dtype=np.int64))

    def select(self, tree: int, group: int) -> list[int]:
        """Return the leaves of one group in one tree.

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
        """Return (groups, trees) sums of (leaves,) amounts over the leaves of each group in each tree."""
        sums = np.zeros((len(self.values), int(self.tree.max()) + 1), dtype=np.int64)
        pure_leaves = np.flatnonzero(self.group != MIXED)
        np.add.at(sums, (self.group[pure_leaves], self.tree[pure_leaves]), amount[pure_leaves])
        return sums


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
    group = np.full(len(value), MIXED)
    pure_leaves = np.flatnonzero(is_pure)
    group[pure_leaves] = _number_groups(value[pure_leaves], ROUNDING * np.abs(value).max(0))
    by_group = pure_leaves[np.argsort(group[pure_leaves], kind="stable")]
    starts = np.flatnonzero(np.diff(group[by_group], prepend=MIXED))
    targets = np.stack([_most_common(column, starts) for column in value[by_group].T], 1)
    return Leaves(
        value=value[:, 0],
        tree=forest.structure.leaf_tree,
        values=targets[:, 0],
        group=group,
        weight=None if weight is None else np.rint(weight).astype(np.int64),
        count=None if count is None else count.astype(np.int64),
        impurity=impurity,
        targets=targets if targets.shape[1] > 1 else None,
    )


def _number_groups(value: Floats, tolerance: Floats) -> Integers:
    """Number the groups of leaves with equal targets, in the order of the first target.

    Args:
        value: (leaves, targets) values of pure leaves.
        tolerance: (targets,) largest difference of equal values.

    Returns:
        (leaves,) numbers of groups.
    """
    columns = []
    for column, largest_difference in zip(value.T, tolerance, strict=True):
        order = np.argsort(column, kind="stable")
        number = np.zeros(len(column), dtype=np.int64)
        is_first = np.diff(column[order], prepend=-np.inf) > largest_difference
        number[order] = np.cumsum(is_first) - 1
        columns.append(number)
    if len(columns) == 1:
        return columns[0]
    return np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1].ravel()


def _largest_root_weight(forest: Forest) -> float:
    return max(float(tree.weight[0]) for tree in forest.trees if tree.weight is not None)


def _gather(forest: Forest, name: str) -> Floats | None:
    """Return an array field of all trees at their leaves, None if a tree does not have the field."""
    structure = forest.structure
    arrays = [getattr(tree, name) for tree in forest.trees]
    if any(array is None for array in arrays):
        return None
    leaf_ranges = zip(arrays, structure.leaf_starts[:-1], structure.leaf_starts[1:], strict=True)
    return np.concatenate([array[structure.leaf_node[a:b]] for array, a, b in leaf_ranges])


def _most_common(value: Floats, starts: Integers) -> Floats:
    """Return the most common value of each group. The values of a group differ by rounding errors.

    Args:
        value: A target of all pure leaves, group after group.
        starts: Position of the first value of each group.

    Returns:
        (groups,) values.
    """
    common_values = np.zeros(len(starts))
    for number, members in enumerate(np.split(value, starts[1:]) if len(starts) else []):
        distinct, counts = np.unique(members, return_counts=True)
        common_values[number] = distinct[counts.argmax()]
    return common_values
