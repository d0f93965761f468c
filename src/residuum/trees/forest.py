"""A forest as a file stores it, whatever library wrote it.

The nodes and leaves of all trees are kept in flat arrays. The leaves of a tree are numbered from left to
right, and the leaves below a node are a contiguous range. So the leaves of the left child of node v are
``first[v]:middle[v]``, and those of the right child ``middle[v]:last[v]``.

A record x goes to the left child of a node if ``x[feature] <= threshold``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

NO_CHILD = -1


@dataclass(frozen=True)
class Tree:
    """One tree. All arrays have one entry per node, and the root is node 0.

    Attributes:
        left: Left child, -1 for a leaf.
        right: Right child, -1 for a leaf.
        feature: Column of the split, any number for a leaf.
        threshold: Threshold of the split, any number for a leaf.
        value: (nodes, k) mean target, or class shares. NaN where the file holds none.
        weight: Sum of the weights of the training records, None if the file holds none. A record that the
            bootstrap drew twice has weight 2.
        count: Number of distinct training records, None if the file holds none.
        impurity: Impurity of the training records, None if the file holds none.
        missing_left: Whether missing values go to the left child, None if the file does not say.
        seed: Seed of the bootstrap sample, None if the file holds none.
    """

    left: Integers
    right: Integers
    feature: Integers
    threshold: Floats
    value: Floats
    weight: Floats | None = None
    count: Integers | None = None
    impurity: Floats | None = None
    missing_left: Booleans | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Forest:
    """Trees that were trained on one table.

    Attributes:
        trees: The trees.
        columns: Number of columns of the table.
        is_classifier: Whether values are shares of classes.
        has_bootstrap: Whether every tree was trained on a bootstrap sample, None if the file does not say.
        records: Number of training records, None if the file does not say.
        has_midpoints: Whether a threshold is the midpoint between two values of the training table. Trees
            with random thresholds have none.
        has_sample_weights: Whether the training had sample weights. They change the bootstrap samples.
        names: Names of the columns, () if the file holds none.
    """

    trees: tuple[Tree, ...]
    columns: int
    is_classifier: bool = False
    has_bootstrap: bool | None = None
    records: int | None = None
    has_midpoints: bool = True
    has_sample_weights: bool = False
    names: tuple[str, ...] = ()

    @cached_property
    def structure(self) -> Structure:
        """Nodes and leaves of all trees in flat arrays."""
        return Structure.build(self.trees)

    def without(self, *fields: str) -> Self:
        """Return a copy whose trees lack these fields, such as "seed" or "impurity"."""
        removed: dict[str, Any] = dict.fromkeys(fields)
        return replace(self, trees=tuple(replace(tree, **removed) for tree in self.trees))


@dataclass(frozen=True)
class Structure:
    """Nodes and leaves of all trees. Leaves are numbered over all trees, from left to right.

    Attributes:
        tree: Tree of each node.
        feature: Column of each node.
        threshold: Threshold of each node.
        missing_left: Whether missing values go left at each node, False where the file does not say.
        first: First leaf below each node.
        middle: First leaf below its right child.
        last: One more than the last leaf below the node.
        leaf_tree: Tree of each leaf.
        leaf_node: Number of each leaf among the nodes of its tree.
        leaf_starts: First leaf of each tree, and the number of all leaves.
    """

    tree: Integers
    feature: Integers
    threshold: Floats
    missing_left: Booleans
    first: Integers
    middle: Integers
    last: Integers
    leaf_tree: Integers
    leaf_node: Integers
    leaf_starts: Integers
    columns: dict[int, Integers] = field(default_factory=dict)

    @classmethod
    def build(cls, trees: Sequence[Tree]) -> Self:
        """Number the leaves of trees and find the range of leaves below every node."""
        ranges = [_number_leaves(tree) for tree in trees]
        leaf_counts = [len(r.leaves) for r in ranges]
        starts = np.concatenate([[0], np.cumsum(leaf_counts)]).astype(np.int64)
        inner = [r.inner for r in ranges]

        def joined(values: list[NDArray]) -> NDArray:
            return np.concatenate(values) if values else np.zeros(0, dtype=np.int64)

        return cls(
            tree=np.repeat(np.arange(len(trees)), [len(nodes) for nodes in inner]),
            feature=joined([t.feature[v] for t, v in zip(trees, inner, strict=True)]),
            threshold=joined([t.threshold[v] for t, v in zip(trees, inner, strict=True)]),
            missing_left=joined([_missing_left(t)[v] for t, v in zip(trees, inner, strict=True)]),
            first=joined([r.first + s for r, s in zip(ranges, starts, strict=False)]),
            middle=joined([r.middle + s for r, s in zip(ranges, starts, strict=False)]),
            last=joined([r.last + s for r, s in zip(ranges, starts, strict=False)]),
            leaf_tree=np.repeat(np.arange(len(trees)), leaf_counts),
            leaf_node=joined([r.leaves for r in ranges]),
            leaf_starts=starts,
        )


@dataclass(frozen=True)
class _LeafRanges:
    """The leaves of one tree from left to right, and the range of leaves below every inner node."""

    inner: Integers
    leaves: Integers
    first: Integers
    middle: Integers
    last: Integers


def _number_leaves(tree: Tree) -> _LeafRanges:
    nodes = len(tree.left)
    is_leaf = tree.left == NO_CHILD
    leaf_count = np.zeros(nodes, dtype=np.int64)
    first = np.zeros(nodes, dtype=np.int64)
    order = _depth_first(tree)
    for node in reversed(order):
        if is_leaf[node]:
            leaf_count[node] = 1
        else:
            leaf_count[node] = leaf_count[tree.left[node]] + leaf_count[tree.right[node]]
    for node in order:
        if not is_leaf[node]:
            first[tree.left[node]] = first[node]
            first[tree.right[node]] = first[node] + leaf_count[tree.left[node]]
    inner = np.flatnonzero(~is_leaf)
    leaves = np.flatnonzero(is_leaf)
    return _LeafRanges(
        inner=inner,
        leaves=leaves[np.argsort(first[leaves], kind="stable")],
        first=first[inner],
        middle=first[tree.right[inner]],
        last=first[inner] + leaf_count[inner],
    )


def _depth_first(tree: Tree) -> list[int]:
    """Return the nodes of a tree, every parent before its children."""
    left, right = tree.left.tolist(), tree.right.tolist()
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        if left[node] != NO_CHILD:
            stack += [right[node], left[node]]
    return order


def _missing_left(tree: Tree) -> Booleans:
    if tree.missing_left is None:
        return np.zeros(len(tree.left), dtype=bool)
    return tree.missing_left
