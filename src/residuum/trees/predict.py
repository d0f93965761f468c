"""Predictions of a forest, computed from its nodes."""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import BOOSTING, NO_CHILD, Floats, Forest, Integers, Tree


def find_leaf_nodes(
    tree: Tree, x: Floats, is_strict: bool = False, compares_doubles: bool = False
) -> Integers:
    """Return the node of the leaf that each sample reaches.

    A missing value (NaN) follows the direction that the node states.

    Args:
        tree: The tree.
        x: (samples, columns) values.
        is_strict: Whether a value that equals a threshold goes to the right child.
        compares_doubles: Whether the tree compares float64 values with thresholds, not float32 values.

    Returns:
        (samples,) numbers of nodes.
    """
    x = np.asarray(x, dtype=np.float64 if compares_doubles else np.float32)
    missing_left = (
        tree.missing_left if tree.missing_left is not None else np.zeros(len(tree.left), bool)
    )
    node = np.zeros(len(x), dtype=np.int64)
    active = np.flatnonzero(tree.left[node] != NO_CHILD)
    while len(active):
        current = node[active]
        values = x[active, tree.feature[current]]
        threshold = tree.threshold[current]
        is_below = values < threshold if is_strict else values <= threshold
        goes_left = np.where(np.isnan(values), missing_left[current], is_below)
        node[active] = np.where(goes_left, tree.left[current], tree.right[current])
        active = active[tree.left[node[active]] != NO_CHILD]
    return node


def predict(forest: Forest, x: Floats) -> Floats:
    """Return the predictions of a model: the mean of its trees, or their sum for boosting.

    Args:
        forest: The model.
        x: (samples, columns) values.

    Returns:
        (samples, k) predicted targets, or shares of classes. For boosting, the sum of the trees before any
        link function. For an isolation forest, the mean path length.
    """
    if forest.kind == BOOSTING:
        return _add_trees(forest, x)
    total = np.zeros((len(x), forest.trees[0].value.shape[1]))
    for tree in forest.trees:
        values = tree.value[_find_leaves(forest, tree, x)]
        if forest.is_classifier:
            values = values / values.sum(1, keepdims=True)
        total += values
    return total / len(forest.trees)


def _add_trees(forest: Forest, x: Floats) -> Floats:
    """Return the sum of the trees of boosting for every output."""
    outputs = (
        np.zeros(len(forest.trees), dtype=np.int64) if forest.outputs is None else forest.outputs
    )
    offset = np.zeros(int(outputs.max()) + 1) if forest.offset is None else forest.offset
    total = np.tile(offset.astype(np.float64), (len(x), 1))
    for tree, output in zip(forest.trees, outputs, strict=True):
        total[:, output] += tree.value[_find_leaves(forest, tree, x), 0]
    return total


def _find_leaves(forest: Forest, tree: Tree, x: Floats) -> Integers:
    return find_leaf_nodes(tree, x, forest.is_strict, forest.compares_doubles)
