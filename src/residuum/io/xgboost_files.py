r"""Read models of XGBoost: JSON, UBJSON, and the bytes of a model in a pickle of XGBoost.

A pickle holds the settings next to the model, ``{"Config": ..., "Model": {"learner": ...}}``. A file of
``save_model`` holds only ``{"learner": ...}``. For a node with the sum H of second derivatives of the loss,
the sum G of first derivatives and the L2 penalty :math:`\lambda`, the file stores H and the weight
:math:`w = -G / (H + \lambda)`. A leaf stores its value :math:`v = \eta w` with the learning rate
:math:`\eta`. The sums of both children of a node add up to the sums of the node, so :math:`\lambda` and
:math:`\eta` follow from the nodes if the file has no settings (:func:`estimate_settings`).

A record goes to the left child if its value, rounded to float32, is below the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from residuum.errors import CheckpointError
from residuum.io.boosted_trees import (
    MAX_COLUMNS,
    MAX_NODES,
    MAX_OUTPUTS,
    Nodes,
    as_count,
    as_floats,
    as_integers,
    build_tree,
    check_size,
    column_names,
    describe_damage,
    describe_unsupported,
    get_member,
    read_json,
)
from residuum.io.ubjson import read_ubjson
from residuum.trees.forest import AVERAGE, BOOSTING, NO_CHILD, Floats, Forest, Tree

LIBRARY = "xgboost"
# First bytes of models in the older binary formats, which XGBoost used before UBJSON.
OLD_FORMATS = (b"binf", b"bs64", b"CONFIG-offset:")
# Objectives for which XGBoost takes the logarithm, the logit or no function of the base score before it adds
# the trees. For other objectives, we do not know the function.
LOGARITHM = ("count:poisson", "reg:gamma", "reg:tweedie", "survival:cox", "survival:aft")
LOGIT = ("reg:logistic", "binary:logistic")
IDENTITY = (
    "reg:squarederror", "reg:linear", "reg:squaredlogerror", "reg:pseudohubererror",
    "reg:absoluteerror", "reg:quantileerror", "binary:logitraw", "binary:hinge", "multi:softmax",
    "multi:softprob", "rank:pairwise", "rank:ndcg", "rank:map",
)  # fmt: skip
# Largest error of the equations that determine the settings, relative to their terms. Rounding to float32
# causes errors of about 1e-7.
MAX_MISFIT = 1e-5
# A random forest has the learning rate 1 / (number of trees). This is the largest relative error of the rate.
MAX_RATE_ERROR = 1e-3
# A leaf of a random forest stores the mean target of its records if the L2 penalty is at most this number.
MAX_FOREST_PENALTY = 1e-4


@dataclass(frozen=True)
class Settings:
    """Settings of the training.

    Attributes:
        learning_rate: Factor of the leaf values.
        penalty: L2 penalty of the leaf values.
    """

    learning_rate: float
    penalty: float


def is_xgboost_json(head: bytes) -> bool:
    """Return True if the first bytes of a file are those of a JSON model of XGBoost."""
    head_without_spaces = b"".join(head.split())
    return head_without_spaces.startswith(
        (b'{"learner":', b'{"version":', b'{"Config":', b'{"Model":')
    )


def is_xgboost_ubjson(head: bytes) -> bool:
    """Return True if the first bytes of a file are those of a UBJSON model of XGBoost."""
    first_keys = (b"learner{", b"version[", b"Config{", b"Model{")
    return head[:2] == b"{L" and any(
        head[2:10] == (len(first_key) - 1).to_bytes(8, "big") and head[10:].startswith(first_key)
        for first_key in first_keys
    )


@np.errstate(all="ignore")  # numbers of a damaged file may overflow
def read_xgboost(raw: bytes | bytearray) -> Forest:
    """Return the trees of a model of XGBoost. Nothing in the model is executed.

    Args:
        raw: The bytes of a JSON or UBJSON file, or of a booster in a pickle.

    Returns:
        The trees.

    Raises:
        CheckpointError: If the model is damaged, or of a kind that residuum does not read.
    """
    head = bytes(raw[:64])
    if head.startswith(OLD_FORMATS):
        raise CheckpointError(
            "residuum reads models that XGBoost saved as JSON or UBJSON; this model has an older binary "
            "format.",
            "Load the model with XGBoost 1.6 to 3.0 and save it again: model.save_model('model.json').",
        )
    if head[:1] != b"{":
        raise CheckpointError(*describe_damage(LIBRARY, "JSON or UBJSON"))
    is_binary = is_xgboost_ubjson(head)
    content = read_ubjson(raw) if is_binary else read_json(bytes(raw), LIBRARY)
    config = content.get("Config") if isinstance(content, dict) else None
    if isinstance(content, dict) and "Model" in content:
        content = content["Model"]
    return _read_learner(get_member(content, "learner", library=LIBRARY), config)


def _read_learner(learner: Any, config: Any) -> Forest:
    booster = get_member(learner, "gradient_booster", library=LIBRARY)
    booster_kind = booster.get("name") if isinstance(booster, dict) else None
    if booster_kind in ("dart", "gblinear"):
        raise CheckpointError(
            *describe_unsupported(LIBRARY, f"a booster of the kind {booster_kind}")
        )
    model = get_member(booster, "model", library=LIBRARY)
    model_parameters = get_member(learner, "learner_model_param", library=LIBRARY)
    model_sizes = {
        name: as_count(model_parameters.get(name, "0"), f"the number {name}", LIBRARY, limit)
        for name, limit in (
            ("num_feature", MAX_COLUMNS), ("num_class", MAX_OUTPUTS), ("num_target", MAX_OUTPUTS)
        )
    } if isinstance(model_parameters, dict) else {}  # fmt: skip
    column_count = model_sizes.get("num_feature", 0)
    tree_entries = get_member(model, "trees", library=LIBRARY)
    if not isinstance(tree_entries, list):
        raise CheckpointError(*describe_damage(LIBRARY, "a list of trees"))
    nodes_of_trees = [_read_nodes(entry) for entry in tree_entries]
    check_size(len(nodes_of_trees), sum(len(nodes.left_child) for nodes in nodes_of_trees), LIBRARY)
    output_count = max(1, model_sizes.get("num_class", 0), model_sizes.get("num_target", 0))
    tree_outputs = as_integers(
        get_member(model, "tree_info", library=LIBRARY), "tree_info", LIBRARY, len(nodes_of_trees)
    )
    if ((tree_outputs < 0) | (tree_outputs >= output_count)).any():
        raise CheckpointError(*describe_damage(LIBRARY, "trees of outputs that exist"))
    trees = tuple(build_tree(nodes, column_count, LIBRARY) for nodes in nodes_of_trees)
    objective = get_member(learner, "objective", "name", library=LIBRARY)
    objective = objective if isinstance(objective, str) else ""
    settings = _stored_settings(config) or estimate_settings(trees)
    names = learner.get("feature_names")
    forest = Forest(
        trees=trees,
        columns=column_count,
        has_midpoints=False,
        names=column_names(names if isinstance(names, list) else (), column_count),
        kind=BOOSTING,
        library=LIBRARY,
        offset=_read_offset(model_parameters.get("base_score"), objective, output_count),
        outputs=tree_outputs,
        learning_rate=None if settings is None else settings.learning_rate,
        regularization=None if settings is None else settings.penalty,
        objective=objective[:100],
        is_strict=True,
    )
    forest_parameters = model.get("gbtree_model_param", {})
    return _as_random_forest(forest, forest_parameters)


def _read_nodes(entry: Any) -> Nodes:
    def numbers(name: str, length: int | None = None) -> Floats:
        return as_floats(get_member(entry, name, library=LIBRARY), name, LIBRARY, length)

    left_child = as_integers(
        get_member(entry, "left_children", library=LIBRARY), "left_children", LIBRARY
    )
    node_count = len(left_child)
    parameters = get_member(entry, "tree_param", library=LIBRARY)
    if not isinstance(parameters, dict):
        raise CheckpointError(*describe_damage(LIBRARY, "the parameters of trees"))
    if (
        as_count(parameters.get("size_leaf_vector", "0"), "the size of leaves", LIBRARY, node_count)
        > 1
    ):
        raise CheckpointError(
            *describe_unsupported(LIBRARY, "trees with a vector in each leaf (multi_output_tree)")
        )
    if "split_type" in entry and numbers("split_type").any():
        raise CheckpointError(*describe_unsupported(LIBRARY, "categorical splits"))
    left_child, right_child, feature = (
        as_integers(get_member(entry, name, library=LIBRARY), name, LIBRARY, node_count)
        for name in ("left_children", "right_children", "split_indices")
    )
    # The list "split_conditions" holds the thresholds of inner nodes and the values of leaves. They are
    # float32 numbers, which a JSON file states as decimals.
    thresholds_and_values = (
        numbers("split_conditions", node_count).astype(np.float32).astype(np.float64)
    )
    is_leaf = left_child == NO_CHILD
    base_weights = numbers("base_weights", node_count)
    return Nodes(
        left_child,
        right_child,
        feature,
        threshold=thresholds_and_values,
        value=np.where(is_leaf, thresholds_and_values, base_weights),
        missing_left=numbers("default_left", node_count) != 0,
        weight=numbers("sum_hessian", node_count),
        unused=as_count(
            parameters.get("num_deleted", "0"), "the number of deleted nodes", LIBRARY, MAX_NODES
        ),
    )


def _read_offset(base_score: Any, objective: str, outputs: int) -> Floats | None:
    """Return for each output the number that XGBoost adds to the sum of its trees, or None if unknown."""
    score_text = base_score if isinstance(base_score, str) else ""
    scores = as_floats(score_text.strip("[]").split(","), "the base score", LIBRARY)
    if len(scores) not in (1, outputs) or not np.isfinite(scores).all():
        raise CheckpointError(*describe_damage(LIBRARY, "a base score for each output"))
    if objective in LOGARITHM and (scores > 0).all():
        scores = np.log(scores)
    elif objective in LOGIT and ((scores > 0) & (scores < 1)).all():
        scores = np.log(scores / (1 - scores))
    elif objective not in IDENTITY:
        return None
    return np.broadcast_to(scores, outputs).copy()


def _stored_settings(config: Any) -> Settings | None:
    """Return the training settings in the configuration of a pickled model, or None if they are missing."""
    try:
        booster = get_member(config, "learner", "gradient_booster", library=LIBRARY)
        training = get_member(booster, "tree_train_param", library=LIBRARY)
        parallel_trees = get_member(
            booster, "gbtree_model_param", "num_parallel_tree", library=LIBRARY
        )
        settings = as_floats(
            [training.get("eta"), training.get("lambda"), parallel_trees], "settings", LIBRARY, 3
        )
    except (CheckpointError, AttributeError):
        return None
    if not np.isfinite(settings).all() or settings[0] <= 0 or settings[1] < 0 or settings[2] < 1:
        return None
    return Settings(float(settings[0] / settings[2]), float(settings[1]))


@np.errstate(all="ignore")
def estimate_settings(trees: tuple[Tree, ...]) -> Settings | None:
    r"""Return the learning rate and the L2 penalty that the nodes of the trees determine.

    For a node p with the children l and r, :math:`w_p (H_p + \lambda) = w_l (H_l + \lambda) + w_r (H_r +
    \lambda)`. Nodes without leaves as children give :math:`\lambda`. The other nodes then give :math:`\eta`,
    because :math:`w = v / \eta` for a leaf.

    Args:
        trees: Trees whose inner nodes have the value w, and whose leaves have the value v.

    Returns:
        The settings. None if the trees are too small, or contradict the equations, as with an L1 penalty.
    """
    slopes, constants, leaf_sums, other_sums = [], [], [], []
    squared_size = 0.0  # sum of the squares of w_p H_p over all inner nodes p
    for tree in trees:
        assert tree.weight is not None
        w, h = tree.value[:, 0], tree.weight
        inner_nodes = np.flatnonzero(tree.left != NO_CHILD)
        children = np.stack([tree.left[inner_nodes], tree.right[inner_nodes]])
        is_leaf = tree.left[children] == NO_CHILD
        has_no_leaf = ~is_leaf.any(0)
        # The equations have the form a + b * penalty = 0. The first row holds the terms of a, and the second
        # row holds the terms of b.
        node_terms = np.stack([w * h, w])
        squared_size += float(np.square(node_terms[0, inner_nodes]).sum())
        differences = node_terms[:, inner_nodes] - node_terms[:, children].sum(1)
        slopes.append(differences[1, has_no_leaf])
        constants.append(-differences[0, has_no_leaf])
        leaf_sums.append((node_terms[:, children] * is_leaf).sum(1)[:, ~has_no_leaf])
        inner_sums = (node_terms[:, children] * ~is_leaf).sum(1)
        other_sums.append((node_terms[:, inner_nodes] - inner_sums)[:, ~has_no_leaf])
    max_misfit = MAX_MISFIT * np.sqrt(squared_size)
    penalty = _fit_factor(np.concatenate(slopes), np.concatenate(constants), max_misfit)
    if penalty is None or penalty < -MAX_MISFIT:
        return None
    one_and_penalty = np.array([1.0, max(penalty, 0.0)])
    learning_rate = _fit_factor(
        one_and_penalty @ np.concatenate(other_sums, 1),
        one_and_penalty @ np.concatenate(leaf_sums, 1),
        max_misfit,
    )
    if learning_rate is None or learning_rate <= 0:
        return None
    return Settings(learning_rate, max(penalty, 0.0))


def _fit_factor(x: Floats, y: Floats, max_misfit: float) -> float | None:
    """Return the factor f of the line y = f x through points (x, y), or None if the points lie on no line."""
    squared_norm = float(x @ x)
    if len(x) < 2 or squared_norm == 0.0 or not np.isfinite([squared_norm, max_misfit]).all():
        return None
    factor = float(x @ y) / squared_norm
    return factor if np.linalg.norm(y - factor * x) <= max_misfit else None


def _as_random_forest(forest: Forest, parameters: Any) -> Forest:
    """Return a random forest of XGBoost as the mean of its trees, if its leaves store mean targets.

    Other models are returned without changes.

    Args:
        forest: The trees as a boosted model.
        parameters: The parameters of the booster, such as "num_parallel_tree".

    Returns:
        The random forest, or ``forest``.
    """
    tree_count, offset = len(forest.trees), forest.offset
    parallel_trees = parameters.get("num_parallel_tree") if isinstance(parameters, dict) else None
    regularization, rate = forest.regularization, forest.learning_rate
    is_forest = tree_count > 1 and str(parallel_trees) == str(tree_count) and offset is not None
    is_regression = (
        forest.objective == "reg:squarederror" and offset is not None and len(offset) == 1
    )
    if (
        not is_forest
        or not is_regression
        or regularization is None
        or rate is None
        or offset is None
    ):
        return forest
    if regularization > MAX_FOREST_PENALTY or abs(rate * tree_count - 1) > MAX_RATE_ERROR:
        return forest
    return replace(
        forest,
        trees=tuple(_with_means(tree, tree_count, float(offset[0])) for tree in forest.trees),
        kind=AVERAGE,
        offset=None,
        outputs=None,
        learning_rate=None,
    )


def _with_means(tree: Tree, trees: int, offset: float) -> Tree:
    """Return a tree of a random forest, with the mean training target of each node as the node's value."""
    # The weight of a node is the sum of second derivatives. For the squared error, each derivative is 1. So
    # the weight is the number of records, because a tree draws each record at most once.
    assert tree.weight is not None
    record_counts = tree.weight.round()
    has_counts = bool((record_counts == tree.weight).all()) and bool((record_counts > 0).all())
    is_leaf = tree.left[:, None] == NO_CHILD
    return replace(
        tree,
        value=np.where(is_leaf, tree.value * trees, tree.value) + offset,
        count=record_counts.astype(np.int64) if has_counts else None,
    )
