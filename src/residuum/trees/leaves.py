"""The leaves of a regression forest, grouped by their value.

A leaf is pure if all its records have the same target. It then stores this target, up to the rounding of
a mean. Pure leaves with the same value form a group. The records of a group are the records with this
target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from residuum.trees.forest import Floats, Forest, Integers

ROUNDING = 256 * np.finfo(np.float64).eps  # of a mean of equal targets, times their size
PURE = 1e-12  # impurity of a pure leaf, times the variance of the leaf values
MIXED = -1  # group of a leaf that is not pure


@dataclass(frozen=True)
class Leaves:
    """The leaves of all trees of a forest.

    Attributes:
        value: (leaves,) mean target.
        tree: (leaves,) tree of each leaf.
        values: (groups,) distinct values of pure leaves, ascending.
        group: (leaves,) group of each leaf, -1 for a mixed leaf.
        weight: (leaves,) sum of the weights of the records, None if the file does not hold it.
        count: (leaves,) number of distinct records, None if the file does not hold it.
        impurity: (leaves,) variance of the targets, None if the file does not hold it.
    """

    value: Floats
    tree: Integers
    values: Floats
    group: Integers
    weight: Integers | None
    count: Integers | None
    impurity: Floats | None

    @property
    def has_mixed(self) -> bool:
        """Whether some leaves are not pure."""
        return bool((self.group == MIXED).any())

    @cached_property
    def weights(self) -> Integers:
        """(groups, trees) weight of the leaves of each group in each tree."""
        assert self.weight is not None
        return self.sum_by_group(self.weight)

    @cached_property
    def numbers(self) -> Integers:
        """(groups, trees) number of leaves of each group in each tree."""
        return self.sum_by_group(np.ones(len(self.group), dtype=np.int64))

    def select(self, tree: int, group: int) -> list[int]:
        """Return the leaves of a group in a tree.

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
        """Return (groups, trees) sums over the leaves of each group in each tree."""
        sums = np.zeros((len(self.values), int(self.tree.max()) + 1), dtype=np.int64)
        pure = np.flatnonzero(self.group != MIXED)
        np.add.at(sums, (self.group[pure], self.tree[pure]), amount[pure])
        return sums


def group_leaves(forest: Forest) -> Leaves:
    """Group the leaves of a regression forest by their value.

    Without impurities every leaf counts as pure. That is so in a forest with the default settings, whose
    trees are fully grown.

    Args:
        forest: The forest.

    Returns:
        Its leaves.
    """
    value = _gather(forest, "value")
    assert value is not None
    value = value[:, 0]
    impurity, weight, count = (_gather(forest, name) for name in ("impurity", "weight", "count"))
    is_pure = np.ones(len(value), dtype=bool)
    if impurity is not None:
        is_pure = impurity <= PURE * max(float(value.var()), np.finfo(float).tiny)
    group = np.full(len(value), MIXED)
    pure = np.flatnonzero(is_pure)
    order = pure[np.argsort(value[pure], kind="stable")]
    starts_group = np.diff(value[order], prepend=-np.inf) > ROUNDING * np.abs(value).max(
        initial=0.0
    )
    group[order] = np.cumsum(starts_group) - 1
    return Leaves(
        value=value,
        tree=forest.structure.leaf_tree,
        values=_most_common(value[order], np.flatnonzero(starts_group)),
        group=group,
        weight=None if weight is None else np.rint(weight).astype(np.int64),
        count=None if count is None else count.astype(np.int64),
        impurity=impurity,
    )


def _gather(forest: Forest, name: str) -> Floats | None:
    """Return an array of all trees at their leaves, None if a tree lacks it."""
    structure = forest.structure
    arrays = [getattr(tree, name) for tree in forest.trees]
    if any(array is None for array in arrays):
        return None
    ends = zip(arrays, structure.leaf_starts[:-1], structure.leaf_starts[1:], strict=True)
    return np.concatenate([array[structure.leaf_node[a:b]] for array, a, b in ends])


def _most_common(value: Floats, starts: Integers) -> Floats:
    """Return the most common value of each group: means of equal targets differ by their rounding."""
    result = np.zeros(len(starts))
    for number, members in enumerate(np.split(value, starts[1:]) if len(starts) else []):
        distinct, counts = np.unique(members, return_counts=True)
        result[number] = distinct[counts.argmax()]
    return result
