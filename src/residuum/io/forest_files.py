"""Read forests of scikit-learn from a release without running its code.

The nodes of a tree are records of 56 bytes, or of 64 bytes since scikit-learn 1.3. A sample x goes to the
left child of a node if ``x[feature] <= threshold``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from residuum.errors import CheckpointError
from residuum.io.inert import Block, InertObject
from residuum.io.trees import TREE
from residuum.trees.forest import NO_CHILD, Forest, Tree

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
# Classes that residuum reads: ensembles whose trees are fitted to the targets themselves, and single trees.
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
MAX_NODES = 50_000_000  # largest number of nodes of all trees of a forest


def find_forests(content: Any) -> Iterator[tuple[str, Forest]]:
    """Yield the class name and the structure of every forest in a release.

    Args:
        content: The content of a release, or a value in this content.

    Yields:
        The class name and the forest.
    """
    seen: set[int] = set()
    stack = [content]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, InertObject):
            if value.class_name in READABLE and (forest := read_forest(value)) is not None:
                yield value.class_name, forest
            else:
                stack += list(value.attributes.values())
        elif isinstance(value, dict):
            stack += list(value.values())
        elif isinstance(value, list | tuple):
            stack += value


def read_forest(model: InertObject) -> Forest | None:
    """Return the structure of a forest or a single tree of scikit-learn.

    Args:
        model: The estimator.

    Returns:
        The forest, None if the estimator was not fitted.

    Raises:
        CheckpointError: If a tree is damaged.
    """
    attributes = model.attributes
    members = attributes.get("estimators_")
    estimators = members if isinstance(members, list) else [model]
    trees = [_read_tree(e) for e in estimators if isinstance(e, InertObject)]
    if not trees or any(tree is None for tree in trees):
        return None
    is_single = not isinstance(members, list)
    columns, records = attributes.get("n_features_in_"), attributes.get("_n_samples")
    if type(columns) is not int or columns < 1:
        raise CheckpointError(
            f"A forest must state its number of columns; this forest has n_features_in_={columns!r}.",
            "Save the model again with scikit-learn 1.0 or later.",
        )
    forest = Forest(
        trees=tuple(tree for tree in trees if tree is not None),
        columns=columns,
        is_classifier=model.class_name.endswith("Classifier"),
        has_bootstrap=False if is_single else attributes.get("bootstrap") is True,
        records=records if type(records) is int else None,
        has_midpoints=not model.class_name.startswith("Extra"),
        has_sample_weights=attributes.get("_sample_weight") is not None,
        names=_column_names(attributes.get("feature_names_in_")),
    )
    _check_forest(forest)
    return forest


def _column_names(value: Any) -> tuple[str, ...]:
    names = value.objects if isinstance(value, Block) else None
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


def _read_tree(estimator: InertObject) -> Tree | None:
    tree = estimator.attributes.get("tree_")
    if not isinstance(tree, InertObject) or tree.name != TREE:
        return None
    nodes, values = tree.attributes.get("nodes"), tree.attributes.get("values")
    raw = nodes.raw() if isinstance(nodes, Block) else None
    if raw is None or not isinstance(values, Block) or raw.shape[1] not in (56, 64):
        raise CheckpointError(
            "A tree of scikit-learn must hold an array of nodes and an array of values; a tree in this "
            "file does not.",
            "Save the model again with a current version of scikit-learn.",
        )
    kind = NODE_WITH_MISSING if raw.shape[1] == 64 else NODE
    table = np.ascontiguousarray(raw).view(kind)[:, 0]
    value = values.tensor().numpy().astype(np.float64)
    seed = estimator.attributes.get("random_state")
    left, right = table["left"].astype(np.int64), table["right"].astype(np.int64)
    inner = left != NO_CHILD
    # An owner may have overwritten these fields to protect the training records. Such values say nothing.
    has_counts = _adds_up(table["count"], left, right)
    has_weights = _adds_up(table["weight"], left, right)
    has_impurity = bool((table["impurity"][inner] > 0).all()) and has_weights
    return Tree(
        left=left,
        right=right,
        feature=table["feature"].astype(np.int64),
        threshold=table["threshold"].astype(np.float64),
        value=value.reshape(len(table), -1),
        weight=table["weight"].astype(np.float64) if has_weights else None,
        count=table["count"].astype(np.int64) if has_counts else None,
        impurity=table["impurity"].astype(np.float64) if has_impurity else None,
        missing_left=table["missing_left"] != 0 if kind is NODE_WITH_MISSING else None,
        seed=seed if type(seed) is int and 0 <= seed < 2**32 else None,
    )


def _adds_up(amount: Any, left: Any, right: Any) -> bool:
    """Return True if an amount of records is positive and adds up: a node has as many as its children."""
    nodes = len(left)
    inner = np.flatnonzero(
        (left != NO_CHILD) & (left < nodes) & (right < nodes) & (left >= 0) & (right >= 0)
    )
    total = amount[left[inner]].astype(np.float64) + amount[right[inner]]
    return bool((amount > 0).all() and np.allclose(total, amount[inner], rtol=1e-6))


def _check_forest(forest: Forest) -> None:
    """Refuse nodes that do not form a tree, because a hostile file could cause an endless loop."""
    if sum(len(tree.left) for tree in forest.trees) > MAX_NODES:
        raise CheckpointError(
            f"A forest may have at most {MAX_NODES:,} nodes; this forest has more.",
            "Audit some of the trees.",
        )
    for tree in forest.trees:
        nodes = len(tree.left)
        inner = tree.left != NO_CHILD
        children = np.concatenate([tree.left[inner], tree.right[inner]])
        is_tree = (
            nodes > 0
            and len(tree.value) == nodes
            and bool(((children > 0) & (children < nodes)).all())
            and len(np.unique(children)) == len(children) == nodes - 1
            and bool((tree.left[inner] > np.flatnonzero(inner)).all())
            and bool((tree.right[inner] > np.flatnonzero(inner)).all())
            and bool(((tree.feature[inner] >= 0) & (tree.feature[inner] < forest.columns)).all())
            and not np.isnan(tree.threshold[inner]).any()
        )
        if not is_tree:
            raise CheckpointError(
                "The nodes of a decision tree must form one tree; the nodes in this file do not.",
                "Copy or save the file again.",
            )
