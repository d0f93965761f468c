"""Read decision trees of scikit-learn, and check that the nodes of any tree form a tree.

The nodes of a tree are records of 56 bytes, or of 64 bytes since scikit-learn 1.3. A sample x goes to the
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
MAX_VALUE = 1e150  # largest value of a node
MAX_COLUMNS = 1_000_000  # largest number of columns of a training table
# Criteria of regression trees whose impurity is the variance of the targets below a node.
VARIANCES = ("squared_error", "friedman_mse", "mse")
# Criteria of regression trees that store the median of the targets below a node instead of their mean.
MEDIANS = ("absolute_error", "mae")
ROUNDING = 1e-12  # impurities below this share of the largest one are zero
SAVE_AGAIN = "Save the model again with a current version of scikit-learn."
COPY_AGAIN = "Copy or save the file again."


def read_tree(estimator: Any) -> Tree | None:
    """Return the structure of a decision tree of scikit-learn.

    Args:
        estimator: The estimator in a release.

    Returns:
        The tree, None if the estimator is not a fitted tree.

    Raises:
        CheckpointError: If the tree is damaged, or if it classifies several targets.
    """
    tree = estimator.attributes.get("tree_") if isinstance(estimator, InertObject) else None
    if not isinstance(tree, InertObject) or tree.name != TREE:
        return None
    nodes, values = tree.attributes.get("nodes"), tree.attributes.get("values")
    raw = nodes.raw() if isinstance(nodes, Block) else None
    if raw is None or not isinstance(values, Block) or raw.shape[1] not in (56, 64):
        raise CheckpointError(
            "A tree of scikit-learn must hold an array of nodes and an array of values; a tree in this "
            "file does not.",
            SAVE_AGAIN,
        )
    kind = NODE_WITH_MISSING if raw.shape[1] == 64 else NODE
    table = np.ascontiguousarray(raw).view(kind)[:, 0]
    value = read_numbers(values, "the values of a tree")
    if value.ndim != 3 or len(value) != len(table) or 0 in value.shape:
        raise CheckpointError(
            "The values of a tree must have the shape (nodes, targets, classes), with as many nodes as the "
            f"tree; a tree in this file has {len(table)} nodes and values of shape {value.shape}.",
            COPY_AGAIN,
        )
    is_classifier = "Classifier" in estimator.class_name
    if is_classifier and value.shape[1] > 1:
        raise CheckpointError(
            "residuum reads classification trees with one target; a tree in this file has "
            f"{value.shape[1]} targets.",
            "Train one classifier for each target.",
        )
    left_child, right_child = table["left"].astype(np.int64), table["right"].astype(np.int64)
    inner = left_child != NO_CHILD
    # An owner may have overwritten these fields to protect the training records. Such values say nothing.
    has_counts = _adds_up(table["count"], left_child, right_child)
    has_weights = _adds_up(table["weight"], left_child, right_child)
    has_impurity = bool((table["impurity"][inner] > 0).all()) and has_weights
    impurity = table["impurity"].astype(np.float64)
    value = value.reshape(len(table), -1)
    criterion = estimator.attributes.get("criterion")
    if not is_classifier and criterion not in (None, *VARIANCES):
        # Other criteria only show which leaves are pure.
        is_zero = np.abs(impurity) <= ROUNDING * np.abs(impurity).max(initial=0.0)
        impurity = np.where(is_zero, 0.0, np.nan)
    if not is_classifier and criterion in MEDIANS:
        value = np.where(inner[:, None], np.nan, value)  # a median is not a linear equation
    seed = estimator.attributes.get("random_state")
    return Tree(
        left=left_child,
        right=right_child,
        feature=table["feature"].astype(np.int64),
        threshold=table["threshold"].astype(np.float64),
        value=value,
        weight=table["weight"].astype(np.float64) if has_weights else None,
        count=table["count"].astype(np.int64) if has_counts else None,
        impurity=impurity if has_impurity else None,
        missing_left=table["missing_left"] != 0 if kind is NODE_WITH_MISSING else None,
        seed=read_seed(seed),
    )


def _adds_up(amount: Any, left_child: Any, right_child: Any) -> bool:
    """Return True if an amount of records is positive and adds up: a node has as many as its children."""
    nodes = len(left_child)
    inner = np.flatnonzero(
        (left_child >= 0) & (left_child < nodes) & (right_child >= 0) & (right_child < nodes)
    )
    amount = amount.astype(np.float64)
    if not (np.isfinite(amount) & (amount > 0) & (amount < 1e100)).all():
        return False
    return bool(
        np.allclose(
            amount[left_child[inner]] + amount[right_child[inner]], amount[inner], rtol=1e-6
        )
    )


def read_seed(value: Any) -> int | None:
    """Return the seed of a tree, None if the value is no seed."""
    return value if type(value) is int and 0 <= value < 2**32 else None


def read_numbers(value: Any, what: str) -> Floats:
    """Return an array of numbers of a file as float64.

    Args:
        value: The array in the release, or a number.
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
            f"A forest must store {what} as an array of numbers; this file does not.", COPY_AGAIN
        )
    return array.astype(np.float64)


def read_integers(value: Any, what: str, end: int) -> Integers:
    """Return an array of integers of a file.

    Args:
        value: The array in the release.
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
            f"A forest must store {what} as integers from 0 to {end - 1}; this file does not.",
            COPY_AGAIN,
        )
    return array.astype(np.int64)


def read_columns(model: InertObject) -> int:
    """Return the number of columns of the training table of an estimator.

    Args:
        model: The estimator.

    Returns:
        The number of columns.

    Raises:
        CheckpointError: If the estimator does not state it.
    """
    # Versions of scikit-learn before 1.0 store the number as n_features_.
    attributes = model.attributes
    columns = attributes.get("n_features_in_", attributes.get("n_features_"))
    if type(columns) is not int or not 1 <= columns <= MAX_COLUMNS:
        raise CheckpointError(
            f"A forest must state its number of columns, at most {MAX_COLUMNS:,}; this forest has "
            f"n_features_in_={columns!r:.60}.",
            "Save the model again with scikit-learn 1.0 or later.",
        )
    return columns


def read_names(model: InertObject) -> tuple[str, ...]:
    """Return the names of the columns of an estimator, () if the file stores no names."""
    value = model.attributes.get("feature_names_in_")
    names = value.objects if isinstance(value, Block) else None
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


def has_best_splits(estimators: list[InertObject]) -> bool:
    """Return True if all trees search for the best threshold, which is the midpoint of two values."""
    return all(
        estimator.attributes.get("splitter") == "best"
        if "splitter" in estimator.attributes
        else not estimator.class_name.startswith("Extra")
        for estimator in estimators
    )


def check_forest(forest: Forest) -> None:
    """Refuse nodes that do not form a tree, because a hostile file could cause an endless loop.

    Args:
        forest: The forest.

    Raises:
        CheckpointError: If the nodes of a tree do not form a tree, or if a forest is too large.
    """
    if sum(len(tree.left) for tree in forest.trees) > MAX_NODES or forest.columns > MAX_COLUMNS:
        raise CheckpointError(
            f"A forest may have at most {MAX_NODES:,} nodes and {MAX_COLUMNS:,} columns; this forest has "
            "more.",
            "Audit some of the trees.",
        )
    for tree in forest.trees:
        nodes = len(tree.left)
        inner = tree.left != NO_CHILD
        is_tree = (
            nodes > 0
            and len(tree.value) == nodes
            and forms_tree(tree.left, tree.right)
            and bool((tree.left[inner] > np.flatnonzero(inner)).all())
            and bool((tree.right[inner] > np.flatnonzero(inner)).all())
            and bool(((tree.feature[inner] >= 0) & (tree.feature[inner] < forest.columns)).all())
            and not np.isnan(tree.threshold[inner]).any()
        )
        if not is_tree:
            raise CheckpointError(
                "The nodes of a decision tree must form one tree; the nodes in this file do not.",
                COPY_AGAIN,
            )
        has_shares = forest.is_classifier and forest.kind == AVERAGE
        same_width = tree.value.shape[1] == forest.trees[0].value.shape[1]
        if not same_width or not _has_values(tree, has_shares):
            raise CheckpointError(
                "The leaves of decision trees must store finite targets, or shares of the same classes; a "
                "leaf in this file does not.",
                COPY_AGAIN,
            )


def _has_values(tree: Tree, has_shares: bool) -> bool:
    """Return True if the values of all nodes are numbers of a moderate size. Inner nodes may lack values.

    Args:
        tree: The tree.
        has_shares: Whether the values must be shares or numbers of classes.

    Returns:
        Whether this is the case.
    """
    leaf_values = tree.value[tree.left == NO_CHILD]
    values = tree.value[~np.isnan(tree.value).any(1)]
    if np.isnan(leaf_values).any() or not (np.abs(values) < MAX_VALUE).all():
        return False
    return not has_shares or bool((values >= 0).all() and (values.sum(1) > 0).all())
