"""Predictions of a forest, computed from its nodes."""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import NO_CHILD, Floats, Forest, Integers, Tree


def find_leaf_nodes(tree: Tree, x: Floats) -> Integers:
    """Return the node of the leaf that each sample reaches.

    Trees compare float32 values with thresholds. A missing value (NaN) follows the direction that the node
    states.

    Args:
        tree: The tree.
        x: (samples, columns) values.

    Returns:
        (samples,) numbers of nodes.
    """
    x = np.asarray(x, dtype=np.float32)
    missing_left = (
        tree.missing_left if tree.missing_left is not None else np.zeros(len(tree.left), bool)
    )
    node = np.zeros(len(x), dtype=np.int64)
    active = np.flatnonzero(tree.left[node] != NO_CHILD)
    while len(active):
        current = node[active]
        values = x[active, tree.feature[current]]
        goes_left = np.where(
            np.isnan(values), missing_left[current], values <= tree.threshold[current]
        )
        node[active] = np.where(goes_left, tree.left[current], tree.right[current])
        active = active[tree.left[node[active]] != NO_CHILD]
    return node


def predict(forest: Forest, x: Floats) -> Floats:
    """Return the mean of the leaf values over all trees.

    Args:
        forest: A random forest or a single tree.
        x: (samples, columns) values.

    Returns:
        (samples, k) predicted targets, or shares of classes.
    """
    total = np.zeros((len(x), forest.trees[0].value.shape[1]))
    for tree in forest.trees:
        values = tree.value[find_leaf_nodes(tree, x)]
        if forest.is_classifier:
            values = values / values.sum(1, keepdims=True)
        total += values
    return total / len(forest.trees)
