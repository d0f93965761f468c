"""Damaged files of forests: each is read or refused with an error of residuum, and no code runs."""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skops.io
from onnx import numpy_helper
from skl2onnx import to_onnx
from sklearn.datasets import make_friedman1
from sklearn.ensemble import (
    BaggingRegressor,
    GradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
)

from residuum.errors import ResiduumError
from residuum.io.forests import read_forests
from residuum.io.release import open_release
from residuum.trees.predict import predict

FILES = 200  # damaged files for each reader
HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 10**9, -1, -2, 0, 1]
FLOATS = [np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324, 0.0, -1.0]


def fitted() -> dict[str, Any]:
    x, y = make_friedman1(30, n_features=5, noise=1.0, random_state=0)
    models: dict[str, Any] = {
        "forest": RandomForestRegressor(2, max_depth=3, random_state=0),
        "classifier": RandomForestClassifier(2, max_depth=3, random_state=0),
        "bagging": BaggingRegressor(n_estimators=2, max_features=0.6, random_state=0),
        "isolation": IsolationForest(n_estimators=2, max_samples=10, random_state=0),
        "boosting": GradientBoostingClassifier(n_estimators=2, max_depth=2, random_state=0),
        "histograms": HistGradientBoostingRegressor(
            max_iter=2, min_samples_leaf=2, max_bins=9, random_state=0
        ),
    }
    labels = np.digitize(y, [10, 18])
    return {
        name: model.fit(x, labels if "Classifier" in type(model).__name__ else y)
        for name, model in models.items()
    }


MODELS = fitted()


def check(path: Path, content: bytes) -> bool:
    """Read a file. Return True if it was read, False if it was refused."""
    path.write_bytes(content)
    try:
        forests = read_forests(open_release(path))
        for named in forests:
            assert named.forest.structure.leaf_starts[-1] > 0
            predict(named.forest, np.zeros((2, named.forest.columns), dtype=np.float32))
    except ResiduumError:
        return False
    return True


def damage_bytes(content: bytes, rng: np.random.Generator) -> bytes:
    """Truncate a file, flip bytes, swap two pieces, or overwrite a piece with one number."""
    raw = bytearray(content)
    match rng.integers(5):
        case 0:
            return bytes(raw[: rng.integers(len(raw))])
        case 1:
            for position in rng.integers(len(raw), size=rng.integers(1, 20)):
                raw[position] ^= 1 << int(rng.integers(8))
        case 2:
            size = int(rng.integers(1, 60))
            a, b = (int(p) for p in rng.integers(len(raw) - size, size=2))
            raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]
        case 3:
            a = int(rng.integers(len(raw) - 8))
            raw[a : a + 8] = (int(rng.choice(HUGE)) % 2**64).to_bytes(8, "little")
        case _:
            a = int(rng.integers(len(raw) - 8))
            raw[a : a + 8] = np.array(rng.choice(FLOATS)).tobytes()
    return bytes(raw)


def damage_array(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Change an array of numbers or nodes: other numbers, swapped entries, or another length."""
    array = array.copy()
    if not array.size:
        return array
    flat = array.reshape(-1)
    field: Any = slice(None)
    if array.dtype.names:
        field = rng.choice([name for name in array.dtype.names if name])
    values = flat[field] if isinstance(field, str) else flat
    match rng.integers(4):
        case 0:
            i, k = rng.integers(len(values), size=2)
            values[i] = values[k]
        case 1:
            values[:] = values[rng.permutation(len(values))]
        case 2:
            pool = FLOATS if values.dtype.kind == "f" else HUGE
            with np.errstate(all="ignore"):
                number = np.array(rng.choice(pool)).astype(values.dtype)
            values[rng.integers(len(values), size=rng.integers(1, 4))] = number
        case _:
            size = int(rng.integers(0, 2 * len(array)))
            return np.resize(array, (size, *array.shape[1:]))
    return array


def damage_value(value: Any, rng: np.random.Generator) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return damage_array(value, rng)
    if isinstance(value, list | tuple) and rng.integers(2):
        entries = list(value)[: int(rng.integers(len(value) + 1))]
        return entries if isinstance(value, list) else tuple(entries)
    return [None, "text", [], {}, -1, 2**40, 0.5, float("nan"), np.zeros(3), np.ones((2, 2))][
        int(rng.integers(10))
    ]


class State:
    """A stand-in that pickles as another class with another state."""

    def __init__(self, original: Any, state: Any) -> None:
        self.original, self.state = original, state

    def __reduce__(self) -> Any:
        function, arguments, *_ = self.original.__reduce_ex__(2)
        return function, arguments, self.state


def damage_model(model: Any, rng: np.random.Generator) -> Any:
    """Return a model in which one attribute, or one array of one tree, is damaged."""
    model = copy.deepcopy(model)
    members = getattr(model, "estimators_", getattr(model, "_predictors", None))
    flat = [t for row in members for t in (row if np.ndim(row) else [row])]
    tree = flat[int(rng.integers(len(flat)))]
    holder = model
    match rng.integers(3):
        case 0 if hasattr(tree, "tree_"):
            state = tree.tree_.__getstate__()
            name = rng.choice(["nodes", "values", "nodes", "nodes", "node_count"])
            state[name] = damage_value(state[name], rng)
            tree.tree_ = State(tree.tree_, state)
            return model
        case 0 | 1:
            holder = tree
        case _:
            pass
    names = sorted(name for name in vars(holder) if name.endswith("_") or name.startswith("_"))
    names = names or sorted(vars(holder))
    name = names[int(rng.integers(len(names)))]
    setattr(holder, name, damage_value(getattr(holder, name), rng))
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("error::RuntimeWarning:residuum.*")
def test_damaged_pickles_are_read_or_refused(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(list(MODELS).index(name))
    content = pickle.dumps(MODELS[name])
    path = tmp_path / "model.pkl"
    assert check(path, content)
    results = [check(path, damage_bytes(content, rng)) for _ in range(FILES // 2)]
    results += [
        check(path, pickle.dumps(damage_model(MODELS[name], rng))) for _ in range(FILES // 2)
    ]
    assert 0 < sum(results) < FILES


def skops_members(model: Any) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(skops.io.dumps(model))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def damage_schema(node: Any, rng: np.random.Generator) -> None:
    """Change one value somewhere in a schema."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = keys[int(rng.integers(len(keys)))]
        child = node[key]
        if isinstance(child, dict | list) and child and rng.random() < 0.85:
            node = child
            continue
        node[key] = ["ObjectNode", "DictNode", "-1", "null", None, 7, [], {}, "[1]", "nan"][
            int(rng.integers(10))
        ]
        return


@pytest.mark.parametrize("name", ["forest", "bagging"])
def test_damaged_files_of_skops_are_read_or_refused(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    members = skops_members(MODELS[name])
    path = tmp_path / "model.skops"
    content = pack(members)
    assert check(path, content)
    schema = json.loads(members["schema.json"])
    arrays = [file for file in members if file.endswith(".npy")]
    results = []
    for number in range(FILES):
        if number % 3 == 0:
            results.append(check(path, damage_bytes(content, rng)))
            continue
        changed = dict(members)
        if number % 3 == 1:
            other = copy.deepcopy(schema)
            damage_schema(other["content"]["content"], rng)
            changed["schema.json"] = json.dumps(other).encode()
        else:
            file = arrays[int(rng.integers(len(arrays)))]
            if rng.integers(2):
                changed[file] = damage_bytes(members[file], rng)
            else:
                stream = io.BytesIO()
                np.save(stream, damage_array(np.load(io.BytesIO(members[file])), rng))
                changed[file] = stream.getvalue()
        results.append(check(path, pack(changed)))
    assert 0 < sum(results) < FILES


def damage_attribute(attribute: Any, rng: np.random.Generator) -> None:
    """Change one attribute of an operator of ONNX."""
    kinds: dict[str, Callable[[Any], Any]] = {"ints": int, "floats": float, "strings": bytes}
    for kind in kinds:
        values = getattr(attribute, kind)
        if not values:
            continue
        if kind == "strings":
            words = [b"LEAF", b"BRANCH_GT", b"BRANCH_EQ", b"BRANCH_LT", b"x\xff"]
            values[int(rng.integers(len(values)))] = words[int(rng.integers(len(words)))]
            return
        dtype = np.int64 if kind == "ints" else np.float32
        changed = damage_array(np.array(values, dtype=dtype), rng).tolist()
        del values[:]
        values.extend(changed)
        return
    if attribute.HasField("t"):
        changed = damage_array(numpy_helper.to_array(attribute.t), rng)
        attribute.t.CopyFrom(numpy_helper.from_array(changed))
    elif attribute.HasField("i"):
        attribute.i = int(rng.choice(HUGE))
    else:
        attribute.s = b"SOFTMAX"


@pytest.mark.parametrize("name", ["forest", "classifier", "bagging", "boosting", "new"])
def test_damaged_onnx_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    if name == "new":
        from tests.integration.io.test_onnx_forests import new_operator

        model, _ = new_operator(0, missing_true=True, is_average=True)
    else:
        model = to_onnx(MODELS[name], np.zeros((1, 5), dtype=np.float32))
    content = model.SerializeToString()
    path = tmp_path / "model.onnx"
    assert check(path, content)
    nodes = [i for i, node in enumerate(model.graph.node) if "TreeEnsemble" in node.op_type]
    results = []
    for number in range(FILES):
        if number % 2:
            results.append(check(path, damage_bytes(content, rng)))
            continue
        changed = copy.deepcopy(model)
        node = changed.graph.node[nodes[int(rng.integers(len(nodes)))]]
        if rng.integers(12) == 0:
            del node.attribute[int(rng.integers(len(node.attribute)))]
        else:
            damage_attribute(node.attribute[int(rng.integers(len(node.attribute)))], rng)
        results.append(check(path, changed.SerializeToString()))
    assert 0 < sum(results) < FILES


def test_a_pickle_that_runs_code_beside_a_forest_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "evidence"

    class Attack:
        def __reduce__(self) -> Any:
            return (exec, (f"open({str(target)!r}, 'w')",))

    model = copy.deepcopy(MODELS["bagging"])
    model.estimators_features_ = Attack()
    assert not check(tmp_path / "model.pkl", pickle.dumps(model))
    assert not target.exists()


@pytest.mark.parametrize("name", ["forest", "bagging", "histograms", "boosting"])
def test_cycles_of_nodes_are_refused(name: str, tmp_path: Path) -> None:
    model = copy.deepcopy(MODELS[name])
    if name == "histograms":
        nodes = model._predictors[0][0].nodes
        nodes["left"][0] = 0
    else:
        tree = model.estimators_[0] if name != "boosting" else model.estimators_[0][0]
        state = tree.tree_.__getstate__()
        state["nodes"]["left_child"][0] = 0
        tree.tree_ = State(tree.tree_, state)
    assert not check(tmp_path / "model.pkl", pickle.dumps(model))
