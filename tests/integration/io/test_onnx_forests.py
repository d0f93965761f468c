"""Forests in ONNX files: leaf values are targets again, and rounded thresholds make no false cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from skl2onnx import to_onnx
from sklearn.datasets import make_friedman1
from sklearn.ensemble import (
    BaggingRegressor,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from residuum.attacks.trees.forest import ForestAttack
from residuum.errors import CheckpointError
from residuum.io.forests import NamedForest, read_forests
from residuum.io.release import open_release
from residuum.scanning.findings import findings
from residuum.trees.forest import AVERAGE, BOOSTING, NO_CHILD, Forest
from residuum.trees.predict import predict
from residuum.trees.recovery import RecoveredTable, recover_table


def table(records: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = make_friedman1(records, noise=1.0, random_state=seed)
    labels = np.digitize(y, np.quantile(y, [0.3, 0.7]))
    return x.astype(np.float32).astype(np.float64), y, labels


def export(model: Any, x: np.ndarray, path: Path, **options: Any) -> Any:
    graph = to_onnx(model, x[:1].astype(np.float32), **options)
    path.write_bytes(graph.SerializeToString())
    return graph


def read(path: Path) -> NamedForest:
    (named,) = read_forests(open_release(path))
    return named


def onnx_forest(model: Any, x: np.ndarray, folder: Path) -> Forest:
    export(model, x, folder / "model.onnx")
    return read(folder / "model.onnx").forest


def right_cells(recovered: RecoveredTable, x: np.ndarray, order: np.ndarray) -> np.ndarray:
    return np.abs(recovered.x - x[order]) <= 1e-5 * np.ptp(x, 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_table_of_an_export_is_recovered(seed: int, tmp_path: Path) -> None:
    x, y, _ = table(300, seed)
    model = RandomForestRegressor(random_state=seed).fit(x, y)
    forest = onnx_forest(model, x, tmp_path)
    recovered = recover_table(forest, (x.min(0), x.max(0)))
    assert not recovered.is_exact.any()
    order = np.abs(recovered.y[:, None] - y).argmin(1)
    assert np.allclose(recovered.y, y[order], rtol=3e-7)
    assert len(set(order)) == len(order)
    assert recovered.is_likely.sum() >= 0.95 * x.size
    wrong = recovered.is_likely & ~right_cells(recovered, x, order)
    assert wrong.sum() <= 0.001 * recovered.is_likely.sum()
    other, _, _ = table(300, seed + 10)
    held_out = right_cells(recovered, other, order) & recovered.is_likely
    assert held_out.mean() < 0.001


def test_values_that_are_large_compared_with_their_range_are_not_stated(tmp_path: Path) -> None:
    x, y, _ = table(200)
    x[:, 0] += 1000
    x[:, 1] = np.round(x[:, 1] * 10) + 2000  # a lattice is not rounded
    x = x.astype(np.float32).astype(np.float64)
    model = RandomForestRegressor(60, random_state=0).fit(x, y)
    recovered = recover_table(onnx_forest(model, x, tmp_path), (x.min(0), x.max(0)))
    order = np.abs(recovered.y[:, None] - y).argmin(1)
    assert not recovered.is_likely[:, 0].any()
    assert (recovered.low[:, 0] <= x[order, 0]).all()
    assert (recovered.high[:, 0] >= x[order, 0]).all()
    assert np.median(recovered.high[:, 0] - recovered.low[:, 0]) < 0.01
    assert recovered.is_likely[:, 1:].mean() > 0.8
    assert (right_cells(recovered, x, order) | ~recovered.is_likely).all()


MODELS: list[tuple[Any, bool]] = [
    (RandomForestRegressor(6, random_state=0), False),
    (RandomForestRegressor(6, max_depth=3, random_state=0), False),
    (ExtraTreesRegressor(6, random_state=0), False),
    (DecisionTreeRegressor(random_state=0), False),
    (GradientBoostingRegressor(n_estimators=6, random_state=0), False),
    (GradientBoostingRegressor(n_estimators=30, init="zero", random_state=0), False),
    (BaggingRegressor(n_estimators=6, max_features=0.5, random_state=0), False),
    (RandomForestClassifier(6, random_state=0), True),
    (DecisionTreeClassifier(max_depth=3, random_state=0), True),
    (GradientBoostingClassifier(n_estimators=6, random_state=0), True),
]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(("model", "is_classifier"), MODELS, ids=lambda value: str(value)[:40])
def test_predictions_are_those_of_the_model(
    model: Any, is_classifier: bool, classes: int, tmp_path: Path
) -> None:
    x, y, labels = table()
    model.fit(x, np.minimum(labels, classes - 1) if is_classifier else y)
    forest = onnx_forest(model, x, tmp_path)
    fresh, _, _ = table(60, seed=5)
    is_boosting = isinstance(model, GradientBoostingClassifier | GradientBoostingRegressor)
    assert forest.kind == (BOOSTING if is_boosting else AVERAGE)
    assert forest.is_classifier == is_classifier
    expected = model.predict(fresh)
    if is_classifier:
        expected = model.decision_function(fresh) if is_boosting else model.predict_proba(fresh)
    assert np.allclose(predict(forest, fresh), expected.reshape(len(fresh), -1), atol=1e-5)


def test_several_targets_are_read(tmp_path: Path) -> None:
    x, y, _ = table()
    targets = np.stack([y, np.sin(y)], 1)
    model = RandomForestRegressor(60, random_state=0).fit(x, targets)
    forest = onnx_forest(model, x, tmp_path)
    assert np.allclose(predict(forest, x), model.predict(x), atol=1e-5)
    recovered = recover_table(forest, (x.min(0), x.max(0)))
    order = np.abs(recovered.y[:, None] - y).argmin(1)
    assert len(set(order)) >= 0.95 * len(y)
    assert np.allclose(recovered.targets, targets[order], atol=1e-5)


def test_boosting_without_base_values_is_not_taken_for_a_forest(tmp_path: Path) -> None:
    x, y, _ = table()
    for learning_rate in (0.1, 0.5):
        model = GradientBoostingRegressor(
            init="zero", learning_rate=learning_rate, n_estimators=40, max_depth=6
        )
        forest = onnx_forest(model.fit(x, y), x, tmp_path)
        assert forest.kind == BOOSTING


def test_isolation_forests_are_not_taken_for_regression(tmp_path: Path) -> None:
    x, _, _ = table()
    path = tmp_path / "model.onnx"
    export(IsolationForest(n_estimators=3).fit(x), x, path, target_opset={"": 15, "ai.onnx.ml": 3})
    assert read_forests(open_release(path)) == ()


def test_the_attack_reads_an_export(tmp_path: Path) -> None:
    x, y, _ = table()
    path = tmp_path / "model.onnx"
    export(RandomForestRegressor(60, random_state=0).fit(x, y), x, path)
    recovered = ForestAttack().run(path)
    assert recovered.known_targets >= 0.95 * len(y)
    assert recovered.certainty == "likely"


def test_a_scan_finds_the_targets_of_an_export(tmp_path: Path) -> None:
    x, y, _ = table()
    path = tmp_path / "model.onnx"
    for leaf, is_reported in ((1, True), (20, False)):
        model = RandomForestRegressor(60, min_samples_leaf=leaf, random_state=0).fit(x, y)
        export(model, x, path)
        high_findings = [f for f in findings(open_release(path)) if f.severity == "high"]
        assert bool(high_findings) == is_reported
        assert all((f.count or 0) >= 0.95 * len(y) for f in high_findings)


def new_operator(
    mode: int, *, missing_true: bool, is_average: bool, swap: bool = False
) -> tuple[onnx.ModelProto, np.ndarray]:
    """A graph with a TreeEnsemble of two trees, and samples on and near its thresholds."""
    rng = np.random.default_rng(0)
    # Tree 0 has the inner nodes 0, 1 and 2; tree 1 has the inner node 3.
    true_ids, true_leafs = [1, 0, 2, 4], [0, 1, 1, 1]
    false_ids, false_leafs = [2, 1, 3, 5], [0, 1, 1, 1]
    splits = np.array([0.5, 0.25, 0.75, 0.5], dtype=np.float32)
    sides = ((true_ids, true_leafs), (false_ids, false_leafs))
    true_side, false_side = reversed(sides) if swap else sides
    node = helper.make_node(
        "TreeEnsemble",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=2,
        aggregate_function=0 if is_average else 1,
        post_transform=0,
        tree_roots=[0, 3],
        nodes_modes=numpy_helper.from_array(np.full(4, mode, dtype=np.uint8)),
        nodes_featureids=[0, 1, 2, 1],
        nodes_splits=numpy_helper.from_array(splits),
        nodes_truenodeids=true_side[0],
        nodes_trueleafs=true_side[1],
        nodes_falsenodeids=false_side[0],
        nodes_falseleafs=false_side[1],
        nodes_missing_value_tracks_true=[int(missing_true)] * 4,
        leaf_targetids=[0, 1, 0, 0, 1, 1] if is_average else [0] * 6,
        leaf_weights=numpy_helper.from_array(np.array([1, 2, 3, 4, 5, 6], dtype=np.float32)),
    )
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 3])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 2])]
    graph = helper.make_graph([node], "trees", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 5)]
    values = np.array([0.2, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, np.nan], dtype=np.float32)
    return helper.make_model(graph, opset_imports=opsets), rng.choice(values, (200, 3))


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("missing_true", [False, True])
@pytest.mark.parametrize("is_average", [False, True])
def test_the_new_operator_is_read(
    mode: int, missing_true: bool, is_average: bool, tmp_path: Path
) -> None:
    model, x = new_operator(mode, missing_true=missing_true, is_average=is_average)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    named = read(path)
    assert named.name == "TreeEnsemble"
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    if is_average:
        assert named.forest.kind == AVERAGE
        assert np.allclose(predict(named.forest, x), expected)
    else:
        assert named.forest.kind == BOOSTING
        assert np.allclose(predict(named.forest, x), expected)
        total = sum(
            tree.value[reached(named.forest, t, x)] for t, tree in enumerate(named.forest.trees)
        )
        assert np.allclose(total, expected[:, :1])


def reached(forest: Forest, t: int, x: np.ndarray) -> np.ndarray:
    """Leaves that samples reach, one sample and one node after the other."""
    tree = forest.trees[t]
    leaves = []
    for row in x:
        node = 0
        while tree.left[node] != NO_CHILD:
            value = row[tree.feature[node]]
            assert tree.missing_left is not None
            below = value < tree.threshold[node] or (
                value == tree.threshold[node] and not forest.is_strict
            )
            goes_left = tree.missing_left[node] if np.isnan(value) else below
            node = tree.left[node] if goes_left else tree.right[node]
        leaves.append(node)
    return np.array(leaves)


@pytest.mark.parametrize("mode", [4, 5, 6])
def test_comparisons_with_categories_are_refused(mode: int, tmp_path: Path) -> None:
    model, _ = new_operator(mode, missing_true=False, is_average=True)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match="compare"):
        read(tmp_path / "model.onnx")


def test_numbers_in_other_files_are_not_read(tmp_path: Path) -> None:
    model, _ = new_operator(0, missing_true=False, is_average=True)
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(16))
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "nodes_splits":
            attribute.t.ClearField("raw_data")
            attribute.t.data_location = TensorProto.EXTERNAL
            attribute.t.external_data.add(key="location", value=str(secret))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match="another file"):
        read(tmp_path / "model.onnx")
