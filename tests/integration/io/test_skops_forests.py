"""Forests in files of skops, read without skops and without importing what the file names."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skops.io
import torch
from sklearn.datasets import make_friedman1
from sklearn.ensemble import (
    BaggingRegressor,
    ExtraTreesClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.checkpoints import load_checkpoint
from residuum.io.forests import NamedForest, read_forests
from residuum.io.release import open_release, read_release
from residuum.trees.forest import Forest
from residuum.trees.recovery import recover_table


def table() -> tuple[np.ndarray, np.ndarray]:
    x, y = make_friedman1(80, n_features=5, noise=1.0, random_state=0)
    return x.astype(np.float32).astype(np.float64), y


def read(path: Path) -> NamedForest:
    (named,) = read_forests(open_release(path))
    return named


def assert_equal(first: Forest, second: Forest) -> None:
    assert len(first.trees) == len(second.trees)
    for a, b in zip(first.trees, second.trees, strict=True):
        for name in ("left", "right", "feature", "threshold", "value", "weight", "count"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert a.seed == b.seed
    assert (first.columns, first.names, first.records) == (
        second.columns,
        second.names,
        second.records,
    )


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    "model",
    [
        RandomForestRegressor(3, random_state=0),
        RandomForestClassifier(3),
        ExtraTreesClassifier(3),
        DecisionTreeRegressor(),
        BaggingRegressor(n_estimators=3),
        GradientBoostingRegressor(n_estimators=3),
        HistGradientBoostingClassifier(max_iter=3),
        make_pipeline(StandardScaler(), RandomForestRegressor(3)),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_file_of_skops_holds_what_the_pickle_holds(
    model: Any, compression: int, tmp_path: Path
) -> None:
    x, y = table()
    model.fit(x, (y > 15).astype(int) if "Classifier" in type(model).__name__ else y)
    if not hasattr(model, "steps"):
        model.feature_names_in_ = np.array(list("abcde"), dtype=object)
    skops.io.dump(model, tmp_path / "model.skops", compression=compression)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    named, expected = read(tmp_path / "model.skops"), read(tmp_path / "model.pkl")
    assert named.name == expected.name
    assert_equal(named.forest, expected.forest)
    assert open_release(tmp_path / "model.skops").kind == "skops"


def test_the_table_of_a_file_of_skops_is_recovered(tmp_path: Path) -> None:
    x, y = table()
    model = RandomForestRegressor(60, random_state=0).fit(x, y)
    skops.io.dump(model, tmp_path / "model.skops")
    recovered = recover_table(read(tmp_path / "model.skops").forest, (x.min(0), x.max(0)))
    assert recovered.has_row_order
    assert np.allclose(recovered.y, y)


def change_schema(path: Path, change: Any) -> None:
    """Write a file of skops again with another schema."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    schema = json.loads(members["schema.json"])
    members["schema.json"] = json.dumps(change(schema)).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def function(module: str, name: str) -> dict[str, Any]:
    content = {"module_path": module, "function": name}
    return {
        "__class__": name,
        "__module__": module,
        "__loader__": "FunctionNode",
        "content": content,
    }


@pytest.mark.parametrize(
    "node",
    [
        function("os", "system"),
        {**function("builtins", "str"), "content": {"module_path": "os", "function": "system"}},
        {
            "__class__": "partial",
            "__module__": "functools",
            "__loader__": "PartialNode",
            "content": {"func": function("os", "system")},
        },
    ],
    ids=["function", "other name", "partial"],
)
def test_functions_that_run_code_are_refused(node: Any, tmp_path: Path) -> None:
    x, y = table()
    path = tmp_path / "model.skops"
    skops.io.dump(RandomForestRegressor(2).fit(x, y), path)

    def add(schema: Any) -> Any:
        schema["content"]["content"]["hook"] = node
        return schema

    change_schema(path, add)
    assert any("os.system" in action for action in read_release(path).unsafe)
    with pytest.raises(UnsafeFileError, match=r"os\.system|functools"):
        open_release(path)


@pytest.mark.parametrize("damage", ["nested", "list", "missing", "long", "shape"])
def test_damaged_schemas_are_refused(damage: str, tmp_path: Path) -> None:
    x, y = table()
    path = tmp_path / "model.skops"
    skops.io.dump(RandomForestRegressor(2).fit(x, y), path)

    def change(schema: Any) -> Any:
        attributes = schema["content"]["content"]
        empty = {"__class__": "list", "__module__": "builtins", "__loader__": "ListNode"}
        match damage:
            case "nested":
                node: Any = {**empty, "content": []}
                for _ in range(300):
                    node = {**empty, "content": [node]}
                attributes["deep"] = node
            case "list":
                return [schema]
            case "missing":
                attributes["array"] = {
                    "__class__": "ndarray",
                    "__module__": "numpy",
                    "__loader__": "NdArrayNode",
                    "type": "numpy",
                    "file": "none.npy",
                }
            case "long":
                attributes["name"] = {**empty, "__class__": "a" * 1000, "content": []}
            case "shape":
                shape = {**empty, "content": [{**empty, "__loader__": "JsonNode", "content": "9"}]}
                attributes["array"] = {
                    "__class__": "ndarray",
                    "__module__": "numpy",
                    "__loader__": "NdArrayNode",
                    "type": "json",
                    "content": [],
                    "shape": shape,
                }
        return schema

    change_schema(path, change)
    with pytest.raises(CheckpointError, match="complete file of skops"):
        open_release(path)


def test_an_archive_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.skops"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", b" " * (65 << 20))
    with pytest.raises(UnsafeFileError, match="unpack"):
        open_release(path)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_networks_are_read_from_files_of_skops(tmp_path: Path) -> None:
    x, y = table()
    model = MLPRegressor(hidden_layer_sizes=(5,), max_iter=20, random_state=0).fit(x, y)
    skops.io.dump(model, tmp_path / "model.skops")
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    network, expected = (load_checkpoint(tmp_path / f"model.{end}") for end in ("skops", "pkl"))
    assert network.arch == expected.arch
    assert all(torch.equal(network.theta[name], expected.theta[name]) for name in expected.theta)
