"""Describe fitted boosted trees as forests, without a file. The readers of files replace this helper."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from residuum.trees.forest import BOOSTING, NO_CHILD, Forest, Tree


def describe(model: Any) -> Forest:
    """Return the trees of a fitted regressor of scikit-learn, XGBoost or LightGBM."""
    readers = {
        "GradientBoostingRegressor": _gradient_boosting,
        "HistGradientBoostingRegressor": _histogram_boosting,
        "XGBRegressor": _xgboost,
        "LGBMRegressor": _lightgbm,
    }
    return readers[type(model).__name__](model)


def _gradient_boosting(model: Any) -> Forest:
    trees = []
    for (estimator,) in model.estimators_:
        tree = estimator.tree_
        value = model.learning_rate * tree.value[:, 0]
        trees.append(
            Tree(
                left=tree.children_left.astype(np.int64),
                right=tree.children_right.astype(np.int64),
                feature=tree.feature.astype(np.int64),
                threshold=tree.threshold,
                value=value,
                weight=tree.weighted_n_node_samples,
                count=tree.n_node_samples.astype(np.int64),
                impurity=tree.impurity,
            )
        )
    return Forest(
        tuple(trees),
        model.n_features_in_,
        kind=BOOSTING,
        offset=np.ravel(model.init_.constant_),
        learning_rate=model.learning_rate,
        objective=model.loss,
    )


def _histogram_boosting(model: Any) -> Forest:
    trees = []
    for ((predictor,),) in zip(model._predictors, strict=True):
        nodes = predictor.nodes
        is_leaf = nodes["is_leaf"] != 0
        children = [
            np.where(is_leaf, NO_CHILD, nodes[side].astype(np.int64)) for side in ("left", "right")
        ]
        trees.append(
            Tree(
                left=children[0],
                right=children[1],
                feature=nodes["feature_idx"].astype(np.int64),
                threshold=nodes["num_threshold"].astype(np.float64),
                value=nodes["value"][:, None].astype(np.float64),
                count=nodes["count"].astype(np.int64),
                missing_left=nodes["missing_go_to_left"] != 0,
            )
        )
    return Forest(
        tuple(trees),
        model.n_features_in_,
        kind=BOOSTING,
        offset=np.ravel(model._baseline_prediction),
        learning_rate=model.learning_rate,
        objective=model.loss,
        compares_doubles=True,
        bin_edges=tuple(np.asarray(edges) for edges in model._bin_mapper.bin_thresholds_),
    )


def _xgboost(model: Any) -> Forest:
    learner = json.loads(bytes(model.get_booster().save_raw("json")))["learner"]
    trees = []
    for tree in learner["gradient_booster"]["model"]["trees"]:
        left = np.array(tree["left_children"], dtype=np.int64)
        # The text has the digits of float32 numbers, and float64 numbers with these digits differ.
        threshold = np.array(tree["split_conditions"], dtype=np.float32).astype(np.float64)
        trees.append(
            Tree(
                left=left,
                right=np.array(tree["right_children"], dtype=np.int64),
                feature=np.array(tree["split_indices"], dtype=np.int64),
                threshold=threshold,
                value=np.where(left == NO_CHILD, threshold, tree["base_weights"])[:, None],
                weight=np.array(tree["sum_hessian"]),
                missing_left=np.array(tree["default_left"]) != 0,
            )
        )
    return Forest(
        tuple(trees),
        int(learner["learner_model_param"]["num_feature"]),
        has_midpoints=False,
        kind=BOOSTING,
        library="xgboost",
        offset=np.array(json.loads(learner["learner_model_param"]["base_score"])),
        objective=learner["objective"]["name"],
        is_strict=True,
    )


def _lightgbm(model: Any) -> Forest:
    content = model.booster_.dump_model()
    ranges = list(content["feature_infos"].values())
    return Forest(
        tuple(_lightgbm_tree(tree["tree_structure"]) for tree in content["tree_info"]),
        content["max_feature_idx"] + 1,
        kind=BOOSTING,
        library="lightgbm",
        offset=np.zeros(1),
        learning_rate=model.learning_rate,
        objective=content["objective"],
        compares_doubles=True,
        stored_ranges=(
            np.array([column["min_value"] for column in ranges]),
            np.array([column["max_value"] for column in ranges]),
        ),
    )


def _lightgbm_tree(root: dict[str, Any]) -> Tree:
    nodes: list[dict[str, Any]] = []

    def visit(node: dict[str, Any]) -> int:
        number = len(nodes)
        row = {"left": NO_CHILD, "right": NO_CHILD, "feature": 0, "threshold": 0.0, "missing": True}
        nodes.append(row)
        if "left_child" in node:
            row.update(
                feature=node["split_feature"],
                threshold=node["threshold"],
                missing=node["default_left"],
                count=node["internal_count"],
                value=node["internal_value"],
                left=visit(node["left_child"]),
                right=visit(node["right_child"]),
            )
        else:
            row.update(count=node.get("leaf_count", 0), value=node["leaf_value"])
        return number

    visit(root)
    columns = {name: np.array([node[name] for node in nodes]) for name in nodes[0]}
    return Tree(
        left=columns["left"],
        right=columns["right"],
        feature=columns["feature"],
        threshold=columns["threshold"],
        value=columns["value"][:, None],
        count=columns["count"],
        missing_left=columns["missing"],
    )
