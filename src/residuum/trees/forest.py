"""The structure of an ensemble of decision trees, in the same form for all libraries that write such models.

``Structure`` stores the nodes and leaves of all trees in flat arrays. The leaves of a tree are numbered from
left to right, and the leaves below a node have consecutive numbers. The leaves below the left child of node v
have the numbers ``first[v]:middle[v]``. The leaves below the right child have the numbers
``middle[v]:last[v]``.

A record x goes to the left child of a node if ``x[feature] <= threshold``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

NO_CHILD = -1  # this number replaces the number of a child in leaves, which have no children
# How the trees of a model work together. Trees of a forest are fitted to the targets, and their values are
# averaged. Trees of boosting are fitted to residuals or gradients, and their values are added. Trees of an
# isolation forest split at random, and their values are path lengths, which are averaged.
AVERAGE, BOOSTING, ISOLATION = "average", "boosting", "isolation"


@dataclass(frozen=True)
class Tree:
    """A decision tree. All arrays have one entry for each node, and the root is node 0.

    Attributes:
        left: Number of the left child of each node, -1 for a leaf.
        right: Number of the right child of each node, -1 for a leaf.
        feature: Column that each node splits, any number for a leaf.
        threshold: Threshold of each split, any number for a leaf.
        value: (nodes, k) mean of each of k targets, or shares of k classes, of the training records below
            each node. NaN if the file stores no values. In boosting, the number that a leaf adds to the
            prediction. Files of XGBoost store the values of inner nodes before multiplication by the learning
            rate.
        weight: Sum of the weights of the training records below each node, or None if the file stores no
            weights. A record that the bootstrap drew twice has weight 2.
        count: Number of distinct training records below each node, or None if the file stores no numbers.
        impurity: Impurity of the training records below each node, or None if the file stores no impurities.
        missing_left: Whether missing values go to the left child of each node, or None if the file does not
            say.
        seed: Seed of the tree's bootstrap sample, or None if the file stores no seed.
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
    """Decision trees that were trained on the same table.

    Attributes:
        trees: The trees of the forest.
        columns: Number of columns of the training table.
        is_classifier: Whether the values of nodes are shares of classes, not mean targets.
        has_bootstrap: Whether every tree was trained on a bootstrap sample, None if the file does not say.
        records: Number of training records, None if the file does not say.
        has_midpoints: Whether each threshold is the midpoint between two values of the training table. Trees
            with random thresholds have no midpoints.
        has_sample_weights: Whether training used sample weights, which change the bootstrap samples.
        names: Names of the columns, () if the file stores no names.
        kind: How the trees work together: "average", "boosting" or "isolation".
        library: Name of the library that wrote the file.
        bootstrap: (trees, records) how often each tree drew each record, if the reader can compute it and the
            seeds of the trees do not follow the rule of random forests (:mod:`.bootstrap`).
        offset: (outputs,) number that is added to the sum of the trees of boosting, None if it is unknown.
        outputs: (trees,) number of the output to which each tree of boosting belongs, None for one output.
        learning_rate: Factor that the leaf values of boosting already contain, None if it is unknown.
        objective: Name of the loss function of boosting in the library, "" if it is unknown.
        is_strict: Whether a value goes to the left child if it is below the threshold, not if it is equal.
        compares_doubles: Whether trees compare float64 values with thresholds. Other trees round values to
            float32 first.
        has_rounded_thresholds: Whether the thresholds are rounded, so that they are midpoints only up to the
            distance of neighboring float32 numbers.
        stored_ranges: (columns,) smallest and (columns,) largest values of the columns in the training table,
            None if the file does not store them. NaN for a column without such values.
        bin_edges: For each column, edges of histogram bins that the file stores in addition to the nodes, ()
            if it stores none.
        regularization: L2 penalty of the leaf values of boosting. These are -G / (H + penalty) times the
            learning rate, with the sums G and H of first and second derivatives. None if it is unknown.
    """

    trees: tuple[Tree, ...]
    columns: int
    is_classifier: bool = False
    has_bootstrap: bool | None = None
    records: int | None = None
    has_midpoints: bool = True
    has_sample_weights: bool = False
    names: tuple[str, ...] = ()
    kind: str = AVERAGE
    library: str = "scikit-learn"
    bootstrap: Integers | None = None
    offset: Floats | None = None
    outputs: Integers | None = None
    learning_rate: float | None = None
    objective: str = ""
    is_strict: bool = False
    compares_doubles: bool = False
    has_rounded_thresholds: bool = False
    stored_ranges: tuple[Floats, Floats] | None = None
    bin_edges: tuple[Floats, ...] = ()
    regularization: float | None = None

    @cached_property
    def structure(self) -> Structure:
        """The nodes and leaves of all trees in flat arrays."""
        return Structure.build(self.trees)

    def without(self, *fields: str) -> Self:
        """Return a copy of the forest without some fields of its trees, such as "seed" or "impurity"."""
        removed_fields: dict[str, Any] = dict.fromkeys(fields)
        return replace(
            self,
            trees=tuple(replace(tree, **removed_fields) for tree in self.trees),
            bootstrap=None if "seed" in fields else self.bootstrap,
        )

    def with_leaf_values_only(self) -> Self:
        """Return a copy of the forest whose inner nodes store no values. Files of ONNX store none."""
        trees_without_inner_values = (
            replace(tree, value=np.where(tree.left[:, None] == NO_CHILD, tree.value, np.nan))
            for tree in self.trees
        )
        return replace(self, trees=tuple(trees_without_inner_values))


@dataclass(frozen=True)
class Structure:
    """The inner nodes and the leaves of all trees of a forest in flat arrays.

    Leaves are numbered from left to right, tree after tree.

    Attributes:
        tree: Number of each node's tree.
        feature: Column that each node splits.
        threshold: Threshold of each node.
        missing_left: Whether missing values go to the left child of each node, False if the file does not
            say.
        first: Number of the first leaf below each node.
        middle: Number of the first leaf below the right child of each node.
        last: One more than the number of the last leaf below each node.
        leaf_tree: Number of each leaf's tree.
        leaf_node: Number of each leaf among the nodes of its tree.
        leaf_starts: Number of the first leaf of each tree, then the number of all leaves.
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

    @classmethod
    def build(cls, trees: Sequence[Tree]) -> Self:
        """Number the leaves of all trees, and find the range of leaves below every node."""
        leaf_ranges = [_number_leaves(tree) for tree in trees]
        leaf_counts = [len(r.leaves) for r in leaf_ranges]
        leaf_starts = np.concatenate([[0], np.cumsum(leaf_counts)]).astype(np.int64)
        inner_nodes = [r.inner for r in leaf_ranges]

        def joined(values: list[NDArray]) -> NDArray:
            return np.concatenate(values) if values else np.zeros(0, dtype=np.int64)

        return cls(
            tree=np.repeat(np.arange(len(trees)), [len(nodes) for nodes in inner_nodes]),
            feature=joined([t.feature[v] for t, v in zip(trees, inner_nodes, strict=True)]),
            threshold=joined([t.threshold[v] for t, v in zip(trees, inner_nodes, strict=True)]),
            missing_left=joined(
                [_missing_left(t)[v] for t, v in zip(trees, inner_nodes, strict=True)]
            ),
            first=joined([r.first + s for r, s in zip(leaf_ranges, leaf_starts, strict=False)]),
            middle=joined([r.middle + s for r, s in zip(leaf_ranges, leaf_starts, strict=False)]),
            last=joined([r.last + s for r, s in zip(leaf_ranges, leaf_starts, strict=False)]),
            leaf_tree=np.repeat(np.arange(len(trees)), leaf_counts),
            leaf_node=joined([r.leaves for r in leaf_ranges]),
            leaf_starts=leaf_starts,
        )


@dataclass(frozen=True)
class _LeafRanges:
    """The leaves of one tree from left to right, and the range of leaf numbers below every inner node."""

    inner: Integers
    leaves: Integers
    first: Integers
    middle: Integers
    last: Integers


def _number_leaves(tree: Tree) -> _LeafRanges:
    node_count = len(tree.left)
    is_leaf = tree.left == NO_CHILD
    leaves_below = np.zeros(node_count, dtype=np.int64)
    first_leaf_number = np.zeros(node_count, dtype=np.int64)
    parents_first = _depth_first(tree)
    for node in reversed(parents_first):
        if is_leaf[node]:
            leaves_below[node] = 1
        else:
            leaves_below[node] = leaves_below[tree.left[node]] + leaves_below[tree.right[node]]
    for node in parents_first:
        if not is_leaf[node]:
            first_leaf_number[tree.left[node]] = first_leaf_number[node]
            first_leaf_number[tree.right[node]] = (
                first_leaf_number[node] + leaves_below[tree.left[node]]
            )
    inner_nodes = np.flatnonzero(~is_leaf)
    leaf_nodes = np.flatnonzero(is_leaf)
    return _LeafRanges(
        inner=inner_nodes,
        leaves=leaf_nodes[np.argsort(first_leaf_number[leaf_nodes], kind="stable")],
        first=first_leaf_number[inner_nodes],
        middle=first_leaf_number[tree.right[inner_nodes]],
        last=first_leaf_number[inner_nodes] + leaves_below[inner_nodes],
    )


def _depth_first(tree: Tree) -> list[int]:
    """Return the numbers of the nodes of a tree. Every parent comes before its children."""
    left, right = tree.left.tolist(), tree.right.tolist()
    order, stack = [], [0]
    while stack:
        current_node = stack.pop()
        order.append(current_node)
        if left[current_node] != NO_CHILD:
            stack += [right[current_node], left[current_node]]
    return order


def _missing_left(tree: Tree) -> Booleans:
    if tree.missing_left is None:
        return np.zeros(len(tree.left), dtype=bool)
    return tree.missing_left
