"""Tree models in a scan: leaves of one record, seeds of bootstrap samples, boosting, old versions."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingRegressor,
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import residuum as rs
from residuum.cli.main import main
from residuum.io.release import open_release
from residuum.io.trees import read_tree_model

RECORDS = 60
HIGH = {
    "forest": RandomForestRegressor(5, random_state=0),
    "large leaves, as many trees as records": RandomForestRegressor(60, min_samples_leaf=10),
    "extra trees": ExtraTreesRegressor(3, random_state=0),
    "bagging": BaggingRegressor(n_estimators=3, random_state=0),
    "single tree": DecisionTreeRegressor(random_state=0),
    "in a pipeline": make_pipeline(StandardScaler(), RandomForestRegressor(3, random_state=0)),
    "classifier, as many trees as records": RandomForestClassifier(60, max_depth=2),
}
MEDIUM = {
    "few trees, large leaves": RandomForestRegressor(20, min_samples_leaf=10),
    "single tree, large leaves": DecisionTreeRegressor(min_samples_leaf=10),
    "classifier, few trees": RandomForestClassifier(20),
    "no bootstrap": ExtraTreesClassifier(60),
    "single classifier": DecisionTreeClassifier(),
    "boosted regressor": GradientBoostingRegressor(n_estimators=3),
    "boosted classifier": GradientBoostingClassifier(n_estimators=3),
    "histogram regressor": HistGradientBoostingRegressor(max_iter=3),
    "histogram classifier": HistGradientBoostingClassifier(max_iter=3),
    "isolation forest": IsolationForest(n_estimators=60),
    "boosted trees of one level": AdaBoostClassifier(n_estimators=3),
}


def fitted(model: Any) -> Any:
    is_classifier = "Classifier" in type(model).__name__
    x, y = (load_breast_cancer if is_classifier else load_diabetes)(return_X_y=True)
    return model.fit(x[::7][:RECORDS], y[::7][:RECORDS])


def findings(path: Path) -> list[Any]:
    return [finding for file in rs.scan(path).files for finding in file.findings]


@pytest.mark.parametrize("container", ["pickle", "joblib"])
@pytest.mark.parametrize("name", HIGH)
def test_trees_that_contain_targets_fail_a_scan(name: str, container: str, tmp_path: Path) -> None:
    path, model = tmp_path / "model.pkl", fitted(HIGH[name])
    path.write_bytes(pickle.dumps(model)) if container == "pickle" else joblib.dump(model, path)
    assert main(["scan", str(path), "--quiet"]) == 1
    stored = [finding for finding in findings(path) if finding.kind == "stored"]
    assert stored
    for stored_finding in stored:
        assert stored_finding.severity == "high"
        assert (
            "Removing seeds, counts, impurities or inner values alone does not help"
            in stored_finding.remedy
        )


@pytest.mark.parametrize("name", MEDIUM)
def test_other_trees_are_medium_and_are_seen(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(fitted(MEDIUM[name])))
    assert main(["scan", str(path), "--quiet"]) == 0
    (finding,) = [item for item in findings(path) if "decision trees" in item.what]
    assert (finding.kind, finding.severity) == ("statistics", "medium")
    assert "use bagging" not in finding.remedy


def test_leaves_are_counted_as_scikit_learn_counts_them(tmp_path: Path) -> None:
    model = fitted(RandomForestRegressor(7, random_state=1))
    trees = [tree.tree_ for tree in model.estimators_]
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(model))
    read = read_tree_model(open_release(path).content, set())
    assert read is not None
    assert read.leaves == sum(int((t.children_left == -1).sum()) for t in trees)
    is_single = [(t.children_left == -1) & (t.n_node_samples == 1) for t in trees]
    assert read.single_leaves == sum(int(single.sum()) for single in is_single)


def test_a_scan_states_what_the_trees_determine(tmp_path: Path) -> None:
    model = fitted(RandomForestRegressor(50, random_state=1))
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(model))
    (finding,) = [finding for finding in findings(path) if finding.kind == "stored"]
    assert finding.count == RECORDS
    assert f"targets of {RECORDS} of {RECORDS} training records in the order of" in finding.reason
    share = float(re.search(r"([\d.]+)% of all cells", finding.reason)[1])
    assert share > 50


def test_seeds_and_roots_do_give_the_targets() -> None:
    """The claim behind the finding: a linear solve, at any depth and leaf size."""
    model = fitted(RandomForestRegressor(90, min_samples_leaf=15, max_depth=2))
    y = load_diabetes(return_X_y=True)[1][::7][:RECORDS]
    samples = model.estimators_samples_  # drawn again from the seeds in the trees
    counts = np.stack([np.bincount(rows, minlength=RECORDS) for rows in samples])
    roots = np.array([tree.tree_.value[0, 0, 0] for tree in model.estimators_])
    solved = np.linalg.lstsq(counts / RECORDS, roots, rcond=None)[0]
    assert np.abs(solved - y).max() < 1e-6
    few = np.linalg.lstsq(counts[:30] / RECORDS, roots[:30], rcond=None)[0]
    assert np.abs(few - y).max() > 1  # fewer trees than records: not determined


@pytest.mark.parametrize(
    ("version", "flagged"), [("1.2.2", True), ("1.3.1", True), ("1.3.2", False)]
)
@pytest.mark.parametrize("memory", [False, True])
def test_files_of_old_versions_may_contain_uninitialized_memory(
    version: str, flagged: bool, memory: bool, tmp_path: Path
) -> None:
    model = fitted(DecisionTreeRegressor(random_state=0))
    state = model.tree_.__getstate__()
    raw = state["nodes"].view(np.uint8).reshape(len(state["nodes"]), -1)
    raw[:, 57:] = 7 if memory else 0
    data = pickle.dumps(model)
    nodes = model.tree_.__getstate__()["nodes"].tobytes()
    written = np.frombuffer(nodes, np.uint8).reshape(len(state["nodes"]), -1).copy()
    written[:, 57:] = 7 if memory else 0
    assert nodes in data
    data = data.replace(nodes, written.tobytes())
    current = model.__getstate__()["_sklearn_version"].encode()
    assert len(current) == len(version)
    path = tmp_path / "model.pkl"
    path.write_bytes(data.replace(current, version.encode()))
    old = [finding for finding in findings(path) if "uninitialized memory" in finding.what]
    assert bool(old) == flagged
    if flagged:
        assert old[0].severity == ("high" if memory else "low")
        assert f"written by scikit-learn {version}" in old[0].reason
