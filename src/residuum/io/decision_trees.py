"""Read decision trees of scikit-learn, and check the nodes of decision trees of any library.

A node of scikit-learn is stored in 56 bytes, or in 64 bytes since scikit-learn 1.3. A sample x goes to the
left child of a node if ``x[feature] <= threshold``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from residuum.errors import CheckpointError
from residuum.io.inert import Block, InertObject
from residuum.io.trees import TREE
from residuum.trees.forest import AVERAGE, NO_CHILD, Floats, Forest, Integers, Tree
from residuum.trees.nodes import forms_tree

NODE_FIELDS = [
    ("left", "<i8"),
    ("right", "<i8"),
    ("feature", "<i8"),
    ("threshold", "<f8"),
    ("impurity", "<f8"),
    ("count", "<i8"),
    ("weight", "<f8"),
]
NODE = np.dtype(NODE_FIELDS)
NODE_WITH_MISSING = np.dtype([*NODE_FIELDS, ("missing_left", "u1"), ("padding", "V7")])
MAX_NODES = 50_000_000  # largest number of nodes of all trees of a forest
MAX_VALUE = 1e150  # largest absolute value that a node may store
MAX_COLUMNS = 1_000_000  # largest number of columns of a training table
# Criteria of regression trees whose impurity is the variance of the targets below a node.
VARIANCES = ("squared_error", "friedman_mse", "mse")
# Criteria of regression trees that store the median of the targets below a node instead of their mean.
MEDIANS = ("absolute_error", "mae")
# An impurity below this fraction of the largest impurity of the tree counts as zero.
ROUNDING = 1e-12
SAVE_AGAIN = "Save the model again with a current version of scikit-learn."
COPY_AGAIN = "Copy or save the file again."


def read_tree(estimator: Any) -> Tree | None:
    """Return the structure of a decision tree of scikit-learn.

    Args:
        estimator: The estimator, as it was read from the model file.

    Returns:
        The tree, None if the estimator is not a fitted tree.

    Raises:
        CheckpointError: If the tree is damaged, or if it classifies several targets.
    """
    tree = estimator.attributes.get("tree_") if isinstance(estimator, InertObject) else None
    if not isinstance(tree, InertObject) or tree.name != TREE:
        return None
    nodes, values = tree.attributes.get("nodes"), tree.attributes.get("values")
    node_bytes = nodes.raw() if isinstance(nodes, Block) else None
    if node_bytes is None or not isinstance(values, Block) or node_bytes.shape[1] not in (56, 64):
        raise CheckpointError(
            "A tree of scikit-learn must hold an array of nodes and an array of values; a tree in this "
            "file does not.",
            SAVE_AGAIN,
        )
    node_dtype = NODE_WITH_MISSING if node_bytes.shape[1] == 64 else NODE
    node_table = np.ascontiguousarray(node_bytes).view(node_dtype)[:, 0]
    node_values = read_numbers(values, "the values of a tree")
    if node_values.ndim != 3 or len(node_values) != len(node_table) or 0 in node_values.shape:
        raise CheckpointError(
            "The values of a tree must have the shape (nodes, targets, classes), with as many nodes as the "
            f"tree; a tree in this file has {len(node_table)} nodes and values of shape {node_values.shape}.",
            COPY_AGAIN,
        )
    is_classifier = "Classifier" in estimator.class_name
    if is_classifier and node_values.shape[1] > 1:
        raise CheckpointError(
            "residuum reads classification trees with a single target (column of labels); a tree in this "
            f"file has {node_values.shape[1]} targets.",
            "Train one classifier for each target.",
        )
    left_child, right_child = (
        node_table["left"].astype(np.int64),
        node_table["right"].astype(np.int64),
    )
    is_inner = left_child != NO_CHILD
    # The owner of a model can overwrite the counts and weights of nodes to protect the training records.
    # We ignore counts or weights of nodes that are not the sums of those of their children.
    has_counts = _adds_up(node_table["count"], left_child, right_child)
    has_weights = _adds_up(node_table["weight"], left_child, right_child)
    has_impurity = bool((node_table["impurity"][is_inner] > 0).all()) and has_weights
    impurity = node_table["impurity"].astype(np.float64)
    node_values = node_values.reshape(len(node_table), -1)
    criterion = estimator.attributes.get("criterion")
    if not is_classifier and criterion not in (None, *VARIANCES):
        # For other criteria, the impurity is not a variance. It is 0 if all targets of a node are equal.
        # We keep only these zeros.
        is_zero = np.abs(impurity) <= ROUNDING * np.abs(impurity).max(initial=0.0)
        impurity = np.where(is_zero, 0.0, np.nan)
    if not is_classifier and criterion in MEDIANS:
        # We ignore medians of inner nodes. Unlike a mean, a median is not a linear equation for the targets.
        node_values = np.where(is_inner[:, None], np.nan, node_values)
    seed = estimator.attributes.get("random_state")
    return Tree(
        left=left_child,
        right=right_child,
        feature=node_table["feature"].astype(np.int64),
        threshold=node_table["threshold"].astype(np.float64),
        value=node_values,
        weight=node_table["weight"].astype(np.float64) if has_weights else None,
        count=node_table["count"].astype(np.int64) if has_counts else None,
        impurity=impurity if has_impurity else None,
        missing_left=node_table["missing_left"] != 0 if node_dtype is NODE_WITH_MISSING else None,
        seed=read_seed(seed),
    )


def _adds_up(weights: Any, left_child: Any, right_child: Any) -> bool:
    """Return True if all weights are positive and the weight of each node is the sum over its children."""
    node_count = len(left_child)
    inner_nodes = np.flatnonzero(
        (left_child >= 0)
        & (left_child < node_count)
        & (right_child >= 0)
        & (right_child < node_count)
    )
    weights = weights.astype(np.float64)
    if not (np.isfinite(weights) & (weights > 0) & (weights < 1e100)).all():
        return False
    return bool(
        np.allclose(
            weights[left_child[inner_nodes]] + weights[right_child[inner_nodes]],
            weights[inner_nodes],
            rtol=1e-6,
        )
    )


def read_seed(value: Any) -> int | None:
    """Return the value if it is a seed of a tree (an integer from 0 to 2^32 - 1), otherwise None."""
    return value if type(value) is int and 0 <= value < 2**32 else None


def read_numbers(value: Any, what: str) -> Floats:
    """Return an array of numbers in a model file as a float64 array.

    Args:
        value: The array, or a single number, as the release holds it.
        what: Name of the array for the error message.

    Returns:
        The array.

    Raises:
        CheckpointError: If the value is not an array of real numbers.
    """
    if type(value) in (int, float) and abs(value) < 1e300:
        return np.array(float(value))
    array = value.tensor().numpy() if isinstance(value, Block) else np.zeros(0, dtype=complex)
    if array.dtype.kind not in "fiub":
        raise CheckpointError(
            f"A file with a forest must store {what} as an array of numbers; this file does not.",
            COPY_AGAIN,
        )
    return array.astype(np.float64)


def read_integers(value: Any, what: str, end: int) -> Integers:
    """Return an array of integers in a model file.

    Args:
        value: The array, as the release holds it.
        what: Name of the array for the error message.
        end: Integers must be at least 0 and smaller than this number.

    Returns:
        The integers.

    Raises:
        CheckpointError: If the value is not an array of such integers.
    """
    array = read_numbers(value, what)
    if array.ndim != 1 or not ((array >= 0) & (array < end) & (array == np.rint(array))).all():
        raise CheckpointError(
            f"A file with a forest must store {what} as integers from 0 to {end - 1}; this file does not.",
            COPY_AGAIN,
        )
    return array.astype(np.int64)


def read_columns(model: InertObject) -> int:
    """Return the number of columns of the training table of an estimator.

    Args:
        model: The estimator, as it was read from the model file.

    Returns:
        The number of columns.

    Raises:
        CheckpointError: If the estimator does not store the number of columns.
    """
    # Versions of scikit-learn before 1.0 store the number of columns as ``n_features_``.
    attributes = model.attributes
    column_count = attributes.get("n_features_in_", attributes.get("n_features_"))
    if type(column_count) is not int or not 1 <= column_count <= MAX_COLUMNS:
        raise CheckpointError(
            f"A forest of scikit-learn must store its number of input columns, at most {MAX_COLUMNS:,}, "
            f"as n_features_in_; this forest has n_features_in_={column_count!r:.60}.",
            "Save the model again with scikit-learn 1.0 or later.",
        )
    return column_count


def read_names(model: InertObject) -> tuple[str, ...]:
    """Return the names of the columns of an estimator, or () if the file stores no names."""
    stored_names = model.attributes.get("feature_names_in_")
    names = stored_names.objects if isinstance(stored_names, Block) else None
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


def has_best_splits(estimators: list[InertObject]) -> bool:
    """Return True if every tree uses best splits, whose thresholds are midpoints of two column values."""
    return all(
        estimator.attributes.get("splitter") == "best"
        if "splitter" in estimator.attributes
        else not estimator.class_name.startswith("Extra")
        for estimator in estimators
    )


def check_forest(forest: Forest) -> None:
    """Raise an error if the nodes of a tree do not form a tree. Such nodes could cause an endless loop.

    Args:
        forest: The forest.

    Raises:
        CheckpointError: If the nodes of a tree do not form a tree, or if a forest is too large.
    """
    if sum(len(tree.left) for tree in forest.trees) > MAX_NODES or forest.columns > MAX_COLUMNS:
        raise CheckpointError(
            f"A forest may have at most {MAX_NODES:,} nodes and {MAX_COLUMNS:,} columns; this forest has "
            "more.",
            "Train a model with fewer trees, and audit the smaller model.",
        )
    for tree in forest.trees:
        node_count = len(tree.left)
        is_inner = tree.left != NO_CHILD
        is_tree = (
            node_count > 0
            and len(tree.value) == node_count
            and forms_tree(tree.left, tree.right)
            and bool((tree.left[is_inner] > np.flatnonzero(is_inner)).all())
            and bool((tree.right[is_inner] > np.flatnonzero(is_inner)).all())
            and bool(
                ((tree.feature[is_inner] >= 0) & (tree.feature[is_inner] < forest.columns)).all()
            )
            and not np.isnan(tree.threshold[is_inner]).any()
        )
        if not is_tree:
            raise CheckpointError(
                "The nodes of a decision tree must form one connected tree, and every split must use an "
                "existing column; this is not so in this file.",
                COPY_AGAIN,
            )
        has_shares = forest.is_classifier and forest.kind == AVERAGE
        has_same_width = tree.value.shape[1] == forest.trees[0].value.shape[1]
        if not has_same_width or not _has_values(tree, has_shares):
            raise CheckpointError(
                "Every leaf of a decision tree must store a finite target, or the shares of the classes; "
                "a leaf in this file does not.",
                COPY_AGAIN,
            )


def _has_values(tree: Tree, has_shares: bool) -> bool:
    """Check the values of all nodes of a tree.

    Args:
        tree: The tree.
        has_shares: Whether the values must be class shares or class counts, which are not negative.

    Returns:
        True if every leaf has a value and no value is too large. Inner nodes may lack values (NaN).
    """
    leaf_values = tree.value[tree.left == NO_CHILD]
    known_values = tree.value[~np.isnan(tree.value).any(1)]
    if np.isnan(leaf_values).any() or not (np.abs(known_values) < MAX_VALUE).all():
        return False
    return not has_shares or bool((known_values >= 0).all() and (known_values.sum(1) > 0).all())
