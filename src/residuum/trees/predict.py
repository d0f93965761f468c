"""Predictions of a forest, computed from its nodes."""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import BOOSTING, NO_CHILD, Floats, Forest, Integers, Tree


def find_leaf_nodes(
    tree: Tree, x: Floats, is_strict: bool = False, compares_doubles: bool = False
) -> Integers:
    """Find the leaf of a tree that each sample reaches.

    A missing value (NaN) goes to the child that the node states for missing values.

    Args:
        tree: The tree.
        x: (samples, columns) values.
        is_strict: Whether a value that equals a threshold goes to the right child.
        compares_doubles: Whether the tree compares float64 values with thresholds, not float32 values.

    Returns:
        (samples,) number of the leaf's node for each sample.
    """
    x = np.asarray(x, dtype=np.float64 if compares_doubles else np.float32)
    missing_left = (
        tree.missing_left if tree.missing_left is not None else np.zeros(len(tree.left), bool)
    )
    node = np.zeros(len(x), dtype=np.int64)
    moving_samples = np.flatnonzero(tree.left[node] != NO_CHILD)
    while len(moving_samples):
        current_nodes = node[moving_samples]
        values = x[moving_samples, tree.feature[current_nodes]]
        threshold = tree.threshold[current_nodes]
        is_below = values < threshold if is_strict else values <= threshold
        goes_left = np.where(np.isnan(values), missing_left[current_nodes], is_below)
        node[moving_samples] = np.where(
            goes_left, tree.left[current_nodes], tree.right[current_nodes]
        )
        moving_samples = moving_samples[tree.left[node[moving_samples]] != NO_CHILD]
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
    """Add up the predictions of a boosted model's trees for every output, (samples, outputs)."""
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
