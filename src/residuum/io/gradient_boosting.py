"""Read boosted trees of scikit-learn: GradientBoosting and HistGradientBoosting.

The margin of a sample (its prediction before the sigmoid, softmax or exponential function) is

    offset + sum over all trees of the value of the sample's leaf.

GradientBoosting multiplies the leaf values by the learning rate during prediction. Its offset is the
prediction of ``init_``. By default this is the mean target. For classifiers, it follows from the share p of
class 1, or from the share p_k of each class k, in the training records:

    log(p / (1 - p))                          for two classes,
    log(p_k) - mean of log(p) over classes    for more classes.

The leaf values of HistGradientBoosting contain the learning rate. Its thresholds are edges of histogram bins,
which are stored in ``_bin_mapper``. If a column has at most ``max_bins`` distinct values, the edges are the
midpoints of all neighboring values. Otherwise they are quantiles, most of which are values of the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from residuum.errors import CheckpointError
from residuum.io.decision_trees import (
    COPY_AGAIN,
    MAX_VALUE,
    check_forest,
    has_best_splits,
    read_columns,
    read_names,
    read_numbers,
    read_tree,
)
from residuum.io.inert import Block, InertObject
from residuum.trees.forest import BOOSTING, NO_CHILD, Floats, Forest, Tree

# Fields of a node of HistGradientBoosting. Before version 1.2, scikit-learn stores the feature in 4 bytes.
BIN_NODE_FIELDS = [
    ("value", "<f8"),
    ("count", "<u4"),
    ("feature", "<i8"),
    ("threshold", "<f8"),
    ("missing_left", "u1"),
    ("left", "<u4"),
    ("right", "<u4"),
    ("gain", "<f8"),
    ("depth", "<u4"),
    ("is_leaf", "u1"),
    ("bin", "u1"),
    ("is_categorical", "u1"),
    ("bitset", "<u4"),
]
BIN_NODE = np.dtype(BIN_NODE_FIELDS)
OLD_BIN_NODE = np.dtype([(n, "<u4" if n == "feature" else kind) for n, kind in BIN_NODE_FIELDS])
NODES = {kind.itemsize: kind for kind in (BIN_NODE, OLD_BIN_NODE)}


def read_gradient_boosting(model: InertObject) -> Forest | None:
    """Return the structure of a GradientBoostingRegressor or GradientBoostingClassifier.

    Args:
        model: The estimator, as it was read from the model file.

    Returns:
        The forest, None if the estimator was not fitted.

    Raises:
        CheckpointError: If the estimator is damaged.
    """
    attributes = model.attributes
    stage_array = attributes.get("estimators_")
    estimators = _flatten(stage_array)
    trees = [tree for estimator in estimators if (tree := read_tree(estimator)) is not None]
    if not trees or len(trees) != len(estimators) or not isinstance(stage_array, Block):
        return None
    if len(stage_array.shape) != 2 or stage_array.shape[0] * stage_array.shape[1] != len(trees):
        raise CheckpointError(
            "A GradientBoosting model must store its trees as an array with one row for each boosting "
            "stage; this file does not.",
            COPY_AGAIN,
        )
    learning_rate = _learning_rate(attributes)
    if any(tree.value.shape[1] != 1 for tree in trees):
        raise CheckpointError(
            "A tree of GradientBoosting must store one value for each node; a tree in this file stores more.",
            COPY_AGAIN,
        )
    output_count = stage_array.shape[1]
    node_counts = trees[0].count
    is_classifier = model.class_name.endswith("Classifier")
    objective = attributes.get("loss")
    forest = Forest(
        trees=tuple(_scale(tree, learning_rate) for tree in trees),
        columns=read_columns(model),
        is_classifier=is_classifier,
        has_bootstrap=False,
        records=(
            int(node_counts[0])
            if node_counts is not None and attributes.get("subsample") == 1.0
            else None
        ),
        has_midpoints=has_best_splits([e for e in estimators if isinstance(e, InertObject)]),
        names=read_names(model),
        kind=BOOSTING,
        offset=_offset(attributes, output_count, is_classifier),
        outputs=np.tile(np.arange(output_count), stage_array.shape[0]),
        learning_rate=learning_rate,
        objective=objective if isinstance(objective, str) else "",
    )
    check_forest(forest)
    return forest


def read_histogram_boosting(model: InertObject) -> Forest | None:
    """Return the structure of a HistGradientBoostingRegressor or HistGradientBoostingClassifier.

    Args:
        model: The estimator, as it was read from the model file.

    Returns:
        The forest, None if the estimator was not fitted.

    Raises:
        CheckpointError: If the estimator is damaged, or if it has categorical columns.
    """
    attributes = model.attributes
    iterations = attributes.get("_predictors")
    if not isinstance(iterations, list) or not iterations:
        return None
    trees_per_iteration = {len(row) if isinstance(row, list) else 0 for row in iterations}
    if len(trees_per_iteration) != 1 or 0 in trees_per_iteration:
        raise CheckpointError(
            "A HistGradientBoosting model must store the same number of trees for every iteration; this "
            "file does not.",
            COPY_AGAIN,
        )
    _refuse_categories(attributes)
    (output_count,) = trees_per_iteration
    offset = read_numbers(attributes.get("_baseline_prediction"), "the baseline prediction").ravel()
    if len(offset) != output_count:
        raise CheckpointError(
            "A HistGradientBoosting model must store one baseline prediction for each of its "
            f"{output_count} outputs; this file stores {len(offset)} baseline predictions.",
            COPY_AGAIN,
        )
    trees = [_read_bin_tree(tree) for row in iterations for tree in row]
    column_count = read_columns(model)
    edges, max_edges = _bin_edges(attributes, column_count)
    node_counts, objective = trees[0].count, attributes.get("loss")
    forest = Forest(
        trees=tuple(trees),
        columns=column_count,
        is_classifier=model.class_name.endswith("Classifier"),
        has_bootstrap=False,
        records=None if node_counts is None else int(node_counts[0]),
        has_midpoints=bool(edges) and all(len(column) < max_edges for column in edges),
        names=read_names(model),
        kind=BOOSTING,
        offset=offset,
        outputs=np.tile(np.arange(output_count), len(iterations)),
        learning_rate=_learning_rate(attributes),
        objective=objective if isinstance(objective, str) else "",
        compares_doubles=True,
        bin_edges=edges,
    )
    check_forest(forest)
    return forest


def _flatten(entries: Any) -> list[Any]:
    """Return the entries of an array of objects, which joblib stores inside another array, as a list."""
    for _ in range(2):
        if isinstance(entries, Block):
            entries = entries.objects
    return entries if isinstance(entries, list) else []


def _learning_rate(attributes: dict[str, Any]) -> float:
    rate = attributes.get("learning_rate")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1e100:
        raise CheckpointError(
            "A model of gradient boosting must store a learning rate of at least 0; the learning rate in "
            f"this file is {rate!r:.60}.",
            COPY_AGAIN,
        )
    return float(rate)


def _scale(tree: Tree, factor: float) -> Tree:
    """Return a tree whose node values are multiplied by a factor, and whose impurities do not change."""
    return Tree(
        left=tree.left,
        right=tree.right,
        feature=tree.feature,
        threshold=tree.threshold,
        value=np.clip(tree.value, -MAX_VALUE, MAX_VALUE) * factor,
        weight=tree.weight,
        count=tree.count,
        impurity=tree.impurity,
        missing_left=tree.missing_left,
    )


def _offset(attributes: dict[str, Any], outputs: int, is_classifier: bool) -> Floats | None:
    """Return the offset (the prediction before the first tree), or None if it depends on the sample."""
    initial_model, loss = attributes.get("init_"), attributes.get("_loss")
    if initial_model == "zero":
        return np.zeros(outputs)
    if not isinstance(initial_model, InertObject) or not isinstance(loss, InertObject):
        return None  # in scikit-learn before 1.4, the offset was computed in another way
    if initial_model.class_name == "DummyRegressor" and not is_classifier:
        constant = read_numbers(
            initial_model.attributes.get("constant_"), "its first prediction"
        ).ravel()
        return constant if len(constant) == outputs == 1 else None
    is_prior = initial_model.attributes.get("strategy") == "prior"
    if initial_model.class_name != "DummyClassifier" or not is_prior or not is_classifier:
        return None
    shares = read_numbers(initial_model.attributes.get("class_prior_"), "the shares of classes")
    if shares.ndim != 1 or not ((shares >= 0) & (shares <= 1)).all():
        return None
    epsilon = np.finfo(np.float64).eps
    log_shares = np.log(np.clip(shares, epsilon, 1 - epsilon))
    if outputs > 1:
        return log_shares - log_shares.mean() if len(log_shares) == outputs else None
    if len(shares) != 2:
        return None
    share = float(np.clip(shares[1], epsilon, 1 - epsilon))
    margin = np.log(share / (1 - share))
    return np.array([margin / 2 if attributes.get("loss") == "exponential" else margin])


def _refuse_categories(attributes: dict[str, Any]) -> None:
    categorical_flags = attributes.get("is_categorical_")
    if categorical_flags is not None and (
        not isinstance(categorical_flags, Block) or categorical_flags.tensor().any()
    ):
        raise CheckpointError(
            "residuum cannot read HistGradientBoosting models with categorical columns; this model has "
            "such columns.",
            "Encode the categories as numbers and train with categorical_features=None.",
        )


def _read_bin_tree(predictor: Any) -> Tree:
    nodes = predictor.attributes.get("nodes") if isinstance(predictor, InertObject) else None
    node_bytes = nodes.raw() if isinstance(nodes, Block) else None
    if node_bytes is None or node_bytes.shape[1] not in NODES:
        raise CheckpointError(
            "A tree of HistGradientBoosting must hold an array of nodes; a tree in this file does not.",
            "Save the model again with a current version of scikit-learn.",
        )
    node_table = np.ascontiguousarray(node_bytes).view(NODES[node_bytes.shape[1]])[:, 0]
    is_leaf = node_table["is_leaf"] != 0
    if (node_table["is_categorical"][~is_leaf] != 0).any():
        raise CheckpointError(
            "residuum cannot read HistGradientBoosting models that split categorical columns; a tree in "
            "this file does.",
            "Encode the categories as numbers and train with categorical_features=None.",
        )
    count = node_table["count"].astype(np.int64)
    return Tree(
        left=np.where(is_leaf, NO_CHILD, node_table["left"].astype(np.int64)),
        right=np.where(is_leaf, NO_CHILD, node_table["right"].astype(np.int64)),
        feature=node_table["feature"].astype(np.int64),
        threshold=node_table["threshold"].astype(np.float64),
        value=node_table["value"].astype(np.float64)[:, None],
        count=count if (count > 0).all() else None,
        missing_left=node_table["missing_left"] != 0,
    )


def _bin_edges(attributes: dict[str, Any], columns: int) -> tuple[tuple[Floats, ...], int]:
    """Return the edges of the histogram bins of each column, and the largest number of edges of a column."""
    bin_mapper = attributes.get("_bin_mapper")
    if not isinstance(bin_mapper, InertObject):
        return (), 0
    edges, bins = bin_mapper.attributes.get("bin_thresholds_"), bin_mapper.attributes.get("n_bins")
    if not isinstance(edges, list) or len(edges) != columns or type(bins) is not int:
        raise CheckpointError(
            "A HistGradientBoosting model must store the edges of the histogram bins of every column; "
            "this file does not.",
            COPY_AGAIN,
        )
    columns_of_edges = tuple(read_numbers(column, "the edges of bins").ravel() for column in edges)
    # One bin is for missing values. Between the other ``bins - 1`` bins lie ``bins - 2`` edges.
    return columns_of_edges, bins - 2
