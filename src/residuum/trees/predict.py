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
    current_node = np.zeros(len(x), dtype=np.int64)
    moving_samples = np.flatnonzero(tree.left[current_node] != NO_CHILD)
    while len(moving_samples):
        current_nodes = current_node[moving_samples]
        split_values = x[moving_samples, tree.feature[current_nodes]]
        threshold = tree.threshold[current_nodes]
        is_below = split_values < threshold if is_strict else split_values <= threshold
        goes_left = np.where(np.isnan(split_values), missing_left[current_nodes], is_below)
        current_node[moving_samples] = np.where(
            goes_left, tree.left[current_nodes], tree.right[current_nodes]
        )
        moving_samples = moving_samples[tree.left[current_node[moving_samples]] != NO_CHILD]
    return current_node


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
    sum_of_trees = np.zeros((len(x), forest.trees[0].value.shape[1]))
    for tree in forest.trees:
        leaf_values = tree.value[_find_leaves(forest, tree, x)]
        if forest.is_classifier:
            leaf_values = leaf_values / leaf_values.sum(1, keepdims=True)
        sum_of_trees += leaf_values
    return sum_of_trees / len(forest.trees)


def _add_trees(forest: Forest, x: Floats) -> Floats:
    """Add up the predictions of a boosted model's trees for every output, (samples, outputs)."""
    outputs = (
        np.zeros(len(forest.trees), dtype=np.int64) if forest.outputs is None else forest.outputs
    )
    first_prediction = np.zeros(int(outputs.max()) + 1) if forest.offset is None else forest.offset
    sum_of_trees = np.tile(first_prediction.astype(np.float64), (len(x), 1))
    for tree, output in zip(forest.trees, outputs, strict=True):
        sum_of_trees[:, output] += tree.value[_find_leaves(forest, tree, x), 0]
    return sum_of_trees


def _find_leaves(forest: Forest, tree: Tree, x: Floats) -> Integers:
    return find_leaf_nodes(tree, x, forest.is_strict, forest.compares_doubles)
