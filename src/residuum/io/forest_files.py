"""Find all models of scikit-learn that consist of decision trees in a release, without running its code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from residuum.io.decision_trees import (
    check_forest,
    has_best_splits,
    read_columns,
    read_names,
    read_tree,
)
from residuum.io.gradient_boosting import read_gradient_boosting, read_histogram_boosting
from residuum.io.inert import Block, InertObject
from residuum.io.tree_ensembles import read_bagging, read_isolation_forest, read_random_embedding
from residuum.trees.forest import Forest

# Classes of scikit-learn that ``read_forest`` reads: random forests and single trees.
READABLE = (
    "RandomForestRegressor",
    "RandomForestClassifier",
    "ExtraTreesRegressor",
    "ExtraTreesClassifier",
    "DecisionTreeRegressor",
    "DecisionTreeClassifier",
    "ExtraTreeRegressor",
    "ExtraTreeClassifier",
)


def find_forests(content: Any) -> Iterator[tuple[str, Forest]]:
    """Yield the class name and the structure of every forest in a model file.

    The trees of an ensemble that residuum does not read, such as AdaBoost, are yielded one by one.

    Args:
        content: The content of a model file, or a value in this content.

    Yields:
        The class name and the forest.
    """
    visited_ids: set[int] = set()
    stack = [content]
    while stack:
        value = stack.pop()
        if id(value) in visited_ids:
            continue
        visited_ids.add(id(value))
        if isinstance(value, InertObject):
            read_model = READERS.get(value.class_name)
            if read_model is not None and (forest := read_model(value)) is not None:
                yield value.class_name, forest
            else:
                stack += [*value.attributes.values(), *value.entries.values(), *value.items]
        elif isinstance(value, dict):
            stack += list(value.values())
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, Block) and isinstance(value.objects, list | Block):
            stack.append(value.objects)


def read_forest(model: InertObject) -> Forest | None:
    """Return the structure of a random forest or a single tree of scikit-learn.

    Args:
        model: The estimator, as it was read from the model file.

    Returns:
        The forest, or None if the estimator was not fitted.

    Raises:
        CheckpointError: If a tree is damaged.
    """  # noqa: DOC502
    attributes = model.attributes
    tree_list = attributes.get("estimators_")
    estimators = [
        e
        for e in (tree_list if isinstance(tree_list, list) else [model])
        if isinstance(e, InertObject)
    ]
    trees = [read_tree(estimator) for estimator in estimators]
    if not trees or any(tree is None for tree in trees):
        return None
    is_single = not isinstance(tree_list, list)
    record_count = attributes.get("_n_samples")
    forest = Forest(
        trees=tuple(tree for tree in trees if tree is not None),
        columns=read_columns(model),
        is_classifier=model.class_name.endswith("Classifier"),
        has_bootstrap=False if is_single else attributes.get("bootstrap") is True,
        records=record_count if type(record_count) is int else None,
        has_midpoints=has_best_splits(estimators),
        has_sample_weights=attributes.get("_sample_weight") is not None,
        names=read_names(model),
    )
    check_forest(forest)
    return forest


# For each class of scikit-learn, the function that reads its trees.
READERS: dict[str, Callable[[InertObject], Forest | None]] = {
    **dict.fromkeys(READABLE, read_forest),
    "BaggingRegressor": read_bagging,
    "BaggingClassifier": read_bagging,
    "IsolationForest": read_isolation_forest,
    "RandomTreesEmbedding": read_random_embedding,
    "GradientBoostingRegressor": read_gradient_boosting,
    "GradientBoostingClassifier": read_gradient_boosting,
    "HistGradientBoostingRegressor": read_histogram_boosting,
    "HistGradientBoostingClassifier": read_histogram_boosting,
}
