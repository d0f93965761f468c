"""Read bagging ensembles and isolation forests of scikit-learn.

Bagging draws records and columns at random for every tree. The file stores the seeds of the trees in
``_seeds``. So we draw the records and columns again, with the same functions as scikit-learn. We keep the
drawn records only if their number agrees with the number of records in the root of each tree.

An isolation forest is bagging of trees that split at random. Its score for a sample depends on the mean path
length over all trees, where the path length of a leaf is

    depth of the leaf + c(number of records in the leaf),
    c(n) = 2 (log(n - 1) + gamma) - 2 (n - 1) / n   for n > 2,   c(2) = 1,   c(1) = 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from residuum.errors import CheckpointError
from residuum.io.decision_trees import (
    COPY_AGAIN,
    check_forest,
    has_best_splits,
    read_columns,
    read_integers,
    read_names,
    read_numbers,
    read_seed,
    read_tree,
)
from residuum.io.inert import Block, InertObject
from residuum.trees.bootstrap import MAX_COUNTS, MAX_RECORDS
from residuum.trees.forest import AVERAGE, ISOLATION, NO_CHILD, Floats, Forest, Integers, Tree
from residuum.trees.nodes import node_depths

MAX_SEED = 2**32


def read_bagging(model: InertObject) -> Forest | None:
    """Return the structure of a BaggingRegressor or BaggingClassifier of trees.

    Args:
        model: The estimator, as it was read from the model file.

    Returns:
        The forest, None if the estimator was not fitted or does not consist of trees.

    Raises:
        CheckpointError: If the estimator is damaged.
    """  # noqa: DOC502
    return _read_ensemble(model, AVERAGE)


def read_isolation_forest(model: InertObject) -> Forest | None:
    """Return the structure of an IsolationForest. The values of its nodes are path lengths.

    Args:
        model: The estimator, as it was read from the model file.

    Returns:
        The forest, None if the estimator was not fitted.

    Raises:
        CheckpointError: If the estimator is damaged.
    """  # noqa: DOC502
    return _read_ensemble(model, ISOLATION)


def read_random_embedding(model: InertObject) -> Forest | None:
    """Return the structure of a RandomTreesEmbedding, whose trees are fitted to random numbers.

    Args:
        model: The estimator, as it was read from the model file.

    Returns:
        The forest, None if the estimator was not fitted.

    Raises:
        CheckpointError: If the estimator is damaged.
    """  # noqa: DOC502
    return _read_ensemble(model, ISOLATION)


def _read_ensemble(model: InertObject, kind: str) -> Forest | None:
    attributes = model.attributes
    estimator_list = attributes.get("estimators_")
    estimators = (
        [e for e in estimator_list if isinstance(e, InertObject)]
        if isinstance(estimator_list, list)
        else []
    )
    trees = [tree for estimator in estimators if (tree := read_tree(estimator)) is not None]
    if not trees or len(trees) != len(estimator_list):  # type: ignore[arg-type]
        return None
    column_count = read_columns(model)
    column_subsets = attributes.get("estimators_features_")
    if column_subsets is not None:
        if not isinstance(column_subsets, list) or len(column_subsets) != len(trees):
            raise CheckpointError(
                "A bagging model must store which columns were selected for every tree; this file does not.",
                COPY_AGAIN,
            )
        trees = [
            _map_columns(tree, read_integers(subset, "the columns of a tree", column_count))
            for tree, subset in zip(trees, column_subsets, strict=True)
        ]
    is_classifier = kind == AVERAGE and model.class_name.endswith("Classifier")
    if is_classifier:
        trees = _align_classes(trees, estimators, attributes.get("n_classes_"))
    record_count = attributes.get("_n_samples")
    forest = Forest(
        trees=tuple(replace(tree, seed=None) for tree in trees),
        columns=column_count,
        is_classifier=is_classifier,
        has_bootstrap=attributes.get("bootstrap") is True,
        records=record_count if type(record_count) is int else None,
        has_midpoints=has_best_splits(estimators),
        has_sample_weights=attributes.get("_sample_weight") is not None,
        names=read_names(model),
        kind=kind,
    )
    check_forest(forest)
    if kind == ISOLATION:
        forest = replace(forest, trees=tuple(map(_with_path_lengths, forest.trees)))
    return _with_bootstrap(forest, attributes)


def _map_columns(tree: Tree, column_subset: Integers) -> Tree:
    """Return a tree that was trained on some columns, with the column indices of the whole table."""
    is_inner = tree.left != NO_CHILD
    if not ((tree.feature[is_inner] >= 0) & (tree.feature[is_inner] < len(column_subset))).all():
        raise CheckpointError(
            "A tree of a bagging model may only split the columns that were selected for this tree; a "
            "tree in this file splits another column.",
            COPY_AGAIN,
        )
    feature = tree.feature.copy()
    feature[is_inner] = column_subset[feature[is_inner]]
    return replace(tree, feature=feature)


def _align_classes(
    trees: list[Tree], estimators: list[InertObject], class_count: Any
) -> list[Tree]:
    """Return trees whose nodes have a value for each class of the ensemble, 0 for a class without records."""
    aligned_trees = []
    for tree, estimator in zip(trees, estimators, strict=True):
        node_values = tree.value
        if type(class_count) is int and node_values.shape[1] < class_count <= 10_000:
            class_indices = read_integers(
                estimator.attributes.get("classes_"), "the classes of a tree", class_count
            )
            if len(class_indices) != node_values.shape[1]:
                raise CheckpointError(
                    "A classification tree must store one value for each of its classes; a tree in this "
                    "file does not.",
                    COPY_AGAIN,
                )
            node_values = np.zeros((len(tree.value), class_count))
            node_values[:, class_indices] = tree.value
        aligned_trees.append(replace(tree, value=node_values))
    if len({tree.value.shape[1] for tree in aligned_trees}) > 1:
        raise CheckpointError(
            "The trees of a classifier must have the same classes; the trees in this file do not.",
            COPY_AGAIN,
        )
    return aligned_trees


def _with_path_lengths(tree: Tree) -> Tree:
    """Return a tree of an isolation forest with the path length of each node as its value."""
    path_lengths = node_depths(tree).astype(np.float64)
    if tree.count is not None:
        path_lengths += average_path_length(tree.count)
    return replace(tree, value=path_lengths[:, None], impurity=None)


def average_path_length(count: Integers) -> Floats:
    """Return c(n), the mean path length of a random tree with n records, for each number n in ``count``."""
    n = np.maximum(count, 3).astype(np.float64)
    mean_length = 2 * (np.log(n - 1) + np.euler_gamma) - 2 * (n - 1) / n
    return np.where(count <= 1, 0.0, np.where(count == 2, 1.0, mean_length))


def _with_bootstrap(forest: Forest, attributes: dict[str, Any]) -> Forest:
    """Draw the records of each tree again from its seed, and add them to the forest.

    The forest is not changed if the drawn records do not agree with the record counts in the tree roots.

    Args:
        forest: The forest.
        attributes: The attributes of the estimator, which hold the seeds.

    Returns:
        The forest with or without the drawn records.
    """
    seeds, draws = attributes.get("_seeds"), attributes.get("_max_samples")
    max_features = attributes.get("_max_features")
    if not isinstance(seeds, Block) or seeds.shape != (len(forest.trees),):
        return forest
    if type(draws) is not int or type(max_features) is not int or forest.records is None:
        return forest
    can_draw = (
        1 <= draws <= MAX_RECORDS
        and 1 <= forest.records <= MAX_RECORDS
        and forest.records * len(forest.trees) <= MAX_COUNTS
        and 1 <= max_features <= forest.columns
    )
    if not can_draw:
        return forest
    weights = attributes.get("_sample_weight")
    probabilities = None if weights is None else _as_probabilities(weights, forest.records)
    if weights is not None and probabilities is None:
        return forest
    seed_list = read_integers(seeds, "the seeds of the trees", MAX_SEED).tolist()
    draw_counts = np.zeros((len(forest.trees), forest.records), dtype=np.int64)
    for tree_index, (seed, tree) in enumerate(zip(seed_list, forest.trees, strict=True)):
        drawn_records = _draw_records(
            seed=seed,
            columns=forest.columns,
            drawn_columns=max_features,
            repeats_columns=attributes.get("bootstrap_features") is True,
            records=forest.records,
            draws=draws,
            repeats_records=attributes.get("bootstrap") is True,
            probabilities=probabilities,
        )
        if drawn_records is None:
            return forest
        draw_counts[tree_index] = np.bincount(drawn_records, minlength=forest.records)
        if tree.weight is None or abs(tree.weight[0] - draws) > 1e-6:
            return forest
        if tree.count is None or tree.count[0] != (draw_counts[tree_index] > 0).sum():
            return forest
    trees = (
        replace(tree, seed=read_seed(seed))
        for tree, seed in zip(forest.trees, seed_list, strict=True)
    )
    return replace(forest, trees=tuple(trees), bootstrap=draw_counts)


def _as_probabilities(weights: Any, record_count: int) -> Floats | None:
    """Return the probability that a draw of bagging selects each record, from the sample weights."""
    if not isinstance(weights, Block) or weights.shape != (record_count,):
        return None
    weight_values = read_numbers(weights, "the sample weights")
    is_valid = bool(
        (np.isfinite(weight_values) & (weight_values >= 0) & (weight_values < 1e100)).all()
    )
    return weight_values / weight_values.sum() if is_valid and weight_values.sum() > 0 else None


def _draw_records(
    *,
    seed: int,
    columns: int,
    drawn_columns: int,
    repeats_columns: bool,
    records: int,
    draws: int,
    repeats_records: bool,
    probabilities: Floats | None,
) -> Integers | None:
    """Draw the records of one tree as scikit-learn does, which draws the columns of the tree first.

    Args:
        seed: Seed of the tree.
        columns: Number of columns of the table.
        drawn_columns: Number of columns that the tree drew.
        repeats_columns: Whether the tree could draw a column twice.
        records: Number of training records.
        draws: Number of records that the tree drew.
        repeats_records: Whether the tree could draw a record twice.
        probabilities: (records,) probabilities of the draws, None if they are equal.

    Returns:
        (draws,) indices of the drawn records, or None if so many records cannot be drawn.
    """
    from sklearn.utils.random import sample_without_replacement

    if draws > records and not repeats_records:
        return None
    generator = np.random.RandomState(seed)
    if repeats_columns:
        generator.randint(0, columns, drawn_columns)
    else:
        sample_without_replacement(columns, drawn_columns, random_state=generator)
    if probabilities is not None:
        if not repeats_records and (probabilities > 0).sum() < draws:
            return None
        return generator.choice(records, draws, replace=repeats_records, p=probabilities)
    if repeats_records:
        return generator.randint(0, records, draws)
    return sample_without_replacement(records, draws, random_state=generator)
