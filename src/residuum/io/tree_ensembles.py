"""Read bagging ensembles and isolation forests of scikit-learn.

Bagging draws records and columns for every tree. The seeds of the trees are stored in ``_seeds``, so we draw
both again, with the same functions as scikit-learn. We keep the result only if it agrees with the numbers of
records that the roots of the trees store.

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
        model: The estimator.

    Returns:
        The forest, None if the estimator was not fitted or does not consist of trees.

    Raises:
        CheckpointError: If the estimator is damaged.
    """  # noqa: DOC502
    return _read_ensemble(model, AVERAGE)


def read_isolation_forest(model: InertObject) -> Forest | None:
    """Return the structure of an IsolationForest. The values of its nodes are path lengths.

    Args:
        model: The estimator.

    Returns:
        The forest, None if the estimator was not fitted.

    Raises:
        CheckpointError: If the estimator is damaged.
    """  # noqa: DOC502
    return _read_ensemble(model, ISOLATION)


def read_random_embedding(model: InertObject) -> Forest | None:
    """Return the structure of a RandomTreesEmbedding, whose trees are fitted to random numbers.

    Args:
        model: The estimator.

    Returns:
        The forest, None if the estimator was not fitted.

    Raises:
        CheckpointError: If the estimator is damaged.
    """  # noqa: DOC502
    return _read_ensemble(model, ISOLATION)


def _read_ensemble(model: InertObject, kind: str) -> Forest | None:
    attributes = model.attributes
    members = attributes.get("estimators_")
    estimators = (
        [e for e in members if isinstance(e, InertObject)] if isinstance(members, list) else []
    )
    trees = [tree for estimator in estimators if (tree := read_tree(estimator)) is not None]
    if not trees or len(trees) != len(members):  # type: ignore[arg-type]
        return None
    columns = read_columns(model)
    subsets = attributes.get("estimators_features_")
    if subsets is not None:
        if not isinstance(subsets, list) or len(subsets) != len(trees):
            raise CheckpointError(
                "Bagging must store the columns of every tree; this file does not.", COPY_AGAIN
            )
        trees = [
            _map_columns(tree, read_integers(subset, "the columns of a tree", columns))
            for tree, subset in zip(trees, subsets, strict=True)
        ]
    is_classifier = kind == AVERAGE and model.class_name.endswith("Classifier")
    if is_classifier:
        trees = _align_classes(trees, estimators, attributes.get("n_classes_"))
    records = attributes.get("_n_samples")
    forest = Forest(
        trees=tuple(replace(tree, seed=None) for tree in trees),
        columns=columns,
        is_classifier=is_classifier,
        has_bootstrap=attributes.get("bootstrap") is True,
        records=records if type(records) is int else None,
        has_midpoints=has_best_splits(estimators),
        has_sample_weights=attributes.get("_sample_weight") is not None,
        names=read_names(model),
        kind=kind,
    )
    check_forest(forest)
    if kind == ISOLATION:
        forest = replace(forest, trees=tuple(map(_with_path_lengths, forest.trees)))
    return _with_bootstrap(forest, attributes)


def _map_columns(tree: Tree, subset: Integers) -> Tree:
    """Return a tree that was fitted to some columns with the numbers of these columns in the table."""
    inner = tree.left != NO_CHILD
    if not ((tree.feature[inner] >= 0) & (tree.feature[inner] < len(subset))).all():
        raise CheckpointError(
            "A tree of bagging must split its own columns; a tree in this file does not.",
            COPY_AGAIN,
        )
    feature = tree.feature.copy()
    feature[inner] = subset[feature[inner]]
    return replace(tree, feature=feature)


def _align_classes(trees: list[Tree], estimators: list[InertObject], classes: Any) -> list[Tree]:
    """Give every tree one value for each class of the ensemble, 0 for classes that its records lack."""
    aligned_trees = []
    for tree, estimator in zip(trees, estimators, strict=True):
        value = tree.value
        if type(classes) is int and value.shape[1] < classes <= 10_000:
            numbers = read_integers(
                estimator.attributes.get("classes_"), "the classes of a tree", classes
            )
            if len(numbers) != value.shape[1]:
                raise CheckpointError(
                    "A classification tree must store one value for each of its classes; a tree in this "
                    "file does not.",
                    COPY_AGAIN,
                )
            value = np.zeros((len(tree.value), classes))
            value[:, numbers] = tree.value
        aligned_trees.append(replace(tree, value=value))
    if len({tree.value.shape[1] for tree in aligned_trees}) > 1:
        raise CheckpointError(
            "The trees of a classifier must have the same classes; the trees in this file do not.",
            COPY_AGAIN,
        )
    return aligned_trees


def _with_path_lengths(tree: Tree) -> Tree:
    """Return a tree of an isolation forest whose values are path lengths."""
    length = node_depths(tree).astype(np.float64)
    if tree.count is not None:
        length += average_path_length(tree.count)
    return replace(tree, value=length[:, None], impurity=None)


def average_path_length(count: Integers) -> Floats:
    """Return c(n), the mean path length of a random tree with n records, for every n in ``count``."""
    n = np.maximum(count, 3).astype(np.float64)
    length = 2 * (np.log(n - 1) + np.euler_gamma) - 2 * (n - 1) / n
    return np.where(count <= 1, 0.0, np.where(count == 2, 1.0, length))


def _with_bootstrap(forest: Forest, attributes: dict[str, Any]) -> Forest:
    """Return the forest with the records that each tree drew, if the seeds agree with the roots."""
    seeds, draws = attributes.get("_seeds"), attributes.get("_max_samples")
    max_features = attributes.get("_max_features")
    if not isinstance(seeds, Block) or seeds.shape != (len(forest.trees),):
        return forest
    if type(draws) is not int or type(max_features) is not int or forest.records is None:
        return forest
    is_small = (
        1 <= draws <= MAX_RECORDS
        and 1 <= forest.records <= MAX_RECORDS
        and forest.records * len(forest.trees) <= MAX_COUNTS
        and 1 <= max_features <= forest.columns
    )
    if not is_small:
        return forest
    weights = attributes.get("_sample_weight")
    probabilities = None if weights is None else _as_probabilities(weights, forest.records)
    if weights is not None and probabilities is None:
        return forest
    numbers = read_integers(seeds, "the seeds of the trees", MAX_SEED).tolist()
    counts = np.zeros((len(forest.trees), forest.records), dtype=np.int64)
    for t, (seed, tree) in enumerate(zip(numbers, forest.trees, strict=True)):
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
        counts[t] = np.bincount(drawn_records, minlength=forest.records)
        if tree.weight is None or abs(tree.weight[0] - draws) > 1e-6:
            return forest
        if tree.count is None or tree.count[0] != (counts[t] > 0).sum():
            return forest
    trees = (
        replace(tree, seed=read_seed(seed))
        for tree, seed in zip(forest.trees, numbers, strict=True)
    )
    return replace(forest, trees=tuple(trees), bootstrap=counts)


def _as_probabilities(weights: Any, records: int) -> Floats | None:
    """Return the sample weights of bagging as probabilities of the draws."""
    if not isinstance(weights, Block) or weights.shape != (records,):
        return None
    values = read_numbers(weights, "the sample weights")
    is_valid = bool((np.isfinite(values) & (values >= 0) & (values < 1e100)).all())
    return values / values.sum() if is_valid and values.sum() > 0 else None


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
        (draws,) numbers of the drawn records, None if so many records cannot be drawn.
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
