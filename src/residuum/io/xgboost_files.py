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
# First bytes of models in the binary formats before UBJSON.
OLD_FORMATS = (b"binf", b"bs64", b"CONFIG-offset:")
# Functions that XGBoost applies to the base score before it adds the trees. Other objectives are not known.
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
MAX_RATE_ERROR = 1e-3  # largest relative error of the learning rate of a random forest, which is 1
# A leaf of a random forest is the mean target of its records if the penalty is at most this number.
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
    compact = b"".join(head.split())
    return compact.startswith((b'{"learner":', b'{"version":', b'{"Config":', b'{"Model":'))


def is_xgboost_ubjson(head: bytes) -> bool:
    """Return True if the first bytes of a file are those of a UBJSON model of XGBoost."""
    names = (b"learner{", b"version[", b"Config{", b"Model{")
    return head[:2] == b"{L" and any(
        head[2:10] == (len(name) - 1).to_bytes(8, "big") and head[10:].startswith(name)
        for name in names
    )


@np.errstate(all="ignore")  # damaged numbers may be of any size
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
            "residuum reads models that XGBoost saves as JSON or UBJSON; this model has an older binary "
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
    kind = booster.get("name") if isinstance(booster, dict) else None
    if kind in ("dart", "gblinear"):
        raise CheckpointError(*describe_unsupported(LIBRARY, f"a booster of the kind {kind}"))
    model = get_member(booster, "model", library=LIBRARY)
    parameters = get_member(learner, "learner_model_param", library=LIBRARY)
    sizes = {
        name: as_count(parameters.get(name, "0"), f"the number {name}", LIBRARY, limit)
        for name, limit in (
            ("num_feature", MAX_COLUMNS), ("num_class", MAX_OUTPUTS), ("num_target", MAX_OUTPUTS)
        )
    } if isinstance(parameters, dict) else {}  # fmt: skip
    columns = sizes.get("num_feature", 0)
    entries = get_member(model, "trees", library=LIBRARY)
    if not isinstance(entries, list):
        raise CheckpointError(*describe_damage(LIBRARY, "a list of trees"))
    nodes = [_read_nodes(entry) for entry in entries]
    check_size(len(nodes), sum(len(n.left_child) for n in nodes), LIBRARY)
    outputs_of_model = max(1, sizes.get("num_class", 0), sizes.get("num_target", 0))
    outputs = as_integers(
        get_member(model, "tree_info", library=LIBRARY), "tree_info", LIBRARY, len(nodes)
    )
    if ((outputs < 0) | (outputs >= outputs_of_model)).any():
        raise CheckpointError(*describe_damage(LIBRARY, "trees of outputs that exist"))
    trees = tuple(build_tree(n, columns, LIBRARY) for n in nodes)
    objective = get_member(learner, "objective", "name", library=LIBRARY)
    objective = objective if isinstance(objective, str) else ""
    settings = _stored_settings(config) or estimate_settings(trees)
    names = learner.get("feature_names")
    forest = Forest(
        trees=trees,
        columns=columns,
        has_midpoints=False,
        names=column_names(names if isinstance(names, list) else (), columns),
        kind=BOOSTING,
        library=LIBRARY,
        offset=_read_offset(parameters.get("base_score"), objective, outputs_of_model),
        outputs=outputs,
        learning_rate=None if settings is None else settings.learning_rate,
        regularization=None if settings is None else settings.penalty,
        objective=objective[:100],
        is_strict=True,
    )
    parallel_trees = model.get("gbtree_model_param", {})
    return _as_random_forest(forest, parallel_trees)


def _read_nodes(entry: Any) -> Nodes:
    """Return the nodes of a tree."""

    def numbers(name: str, length: int | None = None) -> Floats:
        return as_floats(get_member(entry, name, library=LIBRARY), name, LIBRARY, length)

    left_child = as_integers(
        get_member(entry, "left_children", library=LIBRARY), "left_children", LIBRARY
    )
    count = len(left_child)
    parameters = get_member(entry, "tree_param", library=LIBRARY)
    if not isinstance(parameters, dict):
        raise CheckpointError(*describe_damage(LIBRARY, "the parameters of trees"))
    if as_count(parameters.get("size_leaf_vector", "0"), "the size of leaves", LIBRARY, count) > 1:
        raise CheckpointError(
            *describe_unsupported(LIBRARY, "trees with a vector in each leaf (multi_output_tree)")
        )
    if "split_type" in entry and numbers("split_type").any():
        raise CheckpointError(*describe_unsupported(LIBRARY, "categorical splits"))
    left_child, right_child, feature = (
        as_integers(get_member(entry, name, library=LIBRARY), name, LIBRARY, count)
        for name in ("left_children", "right_children", "split_indices")
    )
    # A file states thresholds and leaf values in the same list, as decimals of float32 numbers.
    conditions = numbers("split_conditions", count).astype(np.float32).astype(np.float64)
    is_leaf = left_child == NO_CHILD
    base_weights = numbers("base_weights", count)
    return Nodes(
        left_child,
        right_child,
        feature,
        threshold=conditions,
        value=np.where(is_leaf, conditions, base_weights),
        missing_left=numbers("default_left", count) != 0,
        weight=numbers("sum_hessian", count),
        unused=as_count(
            parameters.get("num_deleted", "0"), "the number of deleted nodes", LIBRARY, MAX_NODES
        ),
    )


def _read_offset(base_score: Any, objective: str, outputs: int) -> Floats | None:
    """Return the number that is added to the trees of each output, None if it is unknown."""
    text = base_score if isinstance(base_score, str) else ""
    scores = as_floats(text.strip("[]").split(","), "the base score", LIBRARY)
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
    """Return the settings in a pickle, None if it holds none."""
    try:
        booster = get_member(config, "learner", "gradient_booster", library=LIBRARY)
        training = get_member(booster, "tree_train_param", library=LIBRARY)
        trees = get_member(booster, "gbtree_model_param", "num_parallel_tree", library=LIBRARY)
        numbers = as_floats(
            [training.get("eta"), training.get("lambda"), trees], "settings", LIBRARY, 3
        )
    except (CheckpointError, AttributeError):
        return None
    if not np.isfinite(numbers).all() or numbers[0] <= 0 or numbers[1] < 0 or numbers[2] < 1:
        return None
    return Settings(float(numbers[0] / numbers[2]), float(numbers[1]))


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
    size = 0.0  # of the terms of all equations
    for tree in trees:
        assert tree.weight is not None
        w, h = tree.value[:, 0], tree.weight
        inner = np.flatnonzero(tree.left != NO_CHILD)
        children = np.stack([tree.left[inner], tree.right[inner]])
        is_leaf = tree.left[children] == NO_CHILD
        has_no_leaf = ~is_leaf.any(0)
        terms = np.stack([w * h, w])  # without and with the penalty
        size += float(np.square(terms[0, inner]).sum())
        differences = terms[:, inner] - terms[:, children].sum(1)
        slopes.append(differences[1, has_no_leaf])
        constants.append(-differences[0, has_no_leaf])
        leaf_sums.append((terms[:, children] * is_leaf).sum(1)[:, ~has_no_leaf])
        inner_sums = (terms[:, children] * ~is_leaf).sum(1)
        other_sums.append((terms[:, inner] - inner_sums)[:, ~has_no_leaf])
    misfit = MAX_MISFIT * np.sqrt(size)
    penalty = _fit_factor(np.concatenate(slopes), np.concatenate(constants), misfit)
    if penalty is None or penalty < -MAX_MISFIT:
        return None
    factors = np.array([1.0, max(penalty, 0.0)])
    learning_rate = _fit_factor(
        factors @ np.concatenate(other_sums, 1), factors @ np.concatenate(leaf_sums, 1), misfit
    )
    if learning_rate is None or learning_rate <= 0:
        return None
    return Settings(learning_rate, max(penalty, 0.0))


def _fit_factor(x: Floats, y: Floats, misfit: float) -> float | None:
    """Return the factor of the line y = factor * x; None if the points do not lie on a line."""
    norm = float(x @ x)
    if len(x) < 2 or norm == 0.0 or not np.isfinite([norm, misfit]).all():
        return None
    factor = float(x @ y) / norm
    return factor if np.linalg.norm(y - factor * x) <= misfit else None


def _as_random_forest(forest: Forest, parameters: Any) -> Forest:
    """Return a random forest as the mean of its trees if its leaves store mean targets."""
    count, offset = len(forest.trees), forest.offset
    parallel_trees = parameters.get("num_parallel_tree") if isinstance(parameters, dict) else None
    regularization, rate = forest.regularization, forest.learning_rate
    is_forest = count > 1 and str(parallel_trees) == str(count) and offset is not None
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
    if regularization > MAX_FOREST_PENALTY or abs(rate * count - 1) > MAX_RATE_ERROR:
        return forest
    return replace(
        forest,
        trees=tuple(_with_means(tree, count, float(offset[0])) for tree in forest.trees),
        kind=AVERAGE,
        offset=None,
        outputs=None,
        learning_rate=None,
    )


def _with_means(tree: Tree, trees: int, offset: float) -> Tree:
    """Return a tree with mean targets as values, and numbers of records if its weights are integers.

    The second derivative of the squared error is 1 for each record, and the trees of a random forest draw
    records without replacement.
    """
    assert tree.weight is not None
    counts = tree.weight.round()
    has_counts = bool((counts == tree.weight).all()) and bool((counts > 0).all())
    is_leaf = tree.left[:, None] == NO_CHILD
    return replace(
        tree,
        value=np.where(is_leaf, tree.value * trees, tree.value) + offset,
        count=counts.astype(np.int64) if has_counts else None,
    )
