"""Damaged and hostile models of boosted trees are read, or refused with an error of residuum.

Every reader gets 200 damaged files. A file that is read must also be usable: its trees end in leaves.
"""

from __future__ import annotations

import json
import re
import resource
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from residuum.errors import CheckpointError, ResiduumError, UnsafeFileError
from residuum.io.catboost_files import read_catboost
from residuum.io.forests import read_forests
from residuum.io.lightgbm_files import read_lightgbm
from residuum.io.release import read_release
from residuum.io.ubjson import read_ubjson
from residuum.io.xgboost_files import read_xgboost
from residuum.trees.predict import predict
from tests.integration.io.boosted_models import (
    CATBOOST,
    fit_lightgbm,
    fit_xgboost,
    saved,
    table,
)

FILES = 200
MAX_SECONDS, MAX_BYTES = 1.0, 500 << 20
NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")
NUMBERS = (
    b"-1",
    b"0",
    b"1",
    b"2147483647",
    b"4294967296",
    b"1e999",
    b"9" * 30,
    b"nan",
    b"-7.5",
    b"",
)
BYTES = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"[",
    b"{",
    b"]",
    b"}",
    b"#",
    b"$",
    b"L",
    b"l",
    b"S",
    b"=",
    b"\n",
)


def cut(raw: bytes, generator: np.random.Generator) -> bytes:
    return raw[: generator.integers(len(raw))]


def flip_bytes(raw: bytes, generator: np.random.Generator) -> bytes:
    damaged = bytearray(raw)
    for position in generator.integers(len(raw), size=generator.integers(1, 20)):
        damaged[position] ^= 1 << generator.integers(8)
    return bytes(damaged)


def replace_bytes(raw: bytes, generator: np.random.Generator) -> bytes:
    position = int(generator.integers(len(raw)))
    value = BYTES[generator.integers(len(BYTES))] * int(generator.integers(1, 9))
    return raw[:position] + value + raw[position + len(value) :]


def swap_numbers(raw: bytes, generator: np.random.Generator) -> bytes:
    matches = [*NUMBER.finditer(raw)]
    first, second = (matches[i] for i in sorted(generator.integers(len(matches), size=2)))
    if first.end() > second.start():
        return raw
    middle = raw[first.end() : second.start()]
    return raw[: first.start()] + second[0] + middle + first[0] + raw[second.end() :]


def replace_number(raw: bytes, generator: np.random.Generator) -> bytes:
    match = [*NUMBER.finditer(raw)][generator.integers(len(NUMBER.findall(raw)))]
    return raw[: match.start()] + NUMBERS[generator.integers(len(NUMBERS))] + raw[match.end() :]


def move_piece(raw: bytes, generator: np.random.Generator) -> bytes:
    a, b, c = np.sort(generator.integers(len(raw), size=3))
    return raw[:a] + raw[b:c] + raw[a:b] + raw[c:]


def claim_a_huge_count(raw: bytes, generator: np.random.Generator) -> bytes:
    position = int(generator.integers(8, len(raw) - 8))
    number = int(generator.choice([2**15, 2**24, 2**31 - 1, 2**31, 2**62]))
    kind = str(generator.choice([">q", "<q", "<I", ">I"]))
    value = struct.pack(kind, number % 2 ** (8 * struct.calcsize(kind) - kind.endswith("q")))
    return raw[:position] + value + raw[position + len(value) :]


DAMAGES = (
    cut, flip_bytes, replace_bytes, swap_numbers, replace_number, move_piece, claim_a_huge_count
)  # fmt: skip


def intact_files(folder: Path) -> dict[str, Path]:
    """Return one intact file for each reader."""
    x, targets = table(missing=0.1)
    boosted = fit_xgboost("classes", x, targets["classes"], n_estimators=2)
    light = fit_lightgbm("binary", x, targets["binary"], n_estimators=2, num_leaves=8)
    files = {}
    for name, model, suffix in (
        ("xgboost json", boosted, ".json"),
        ("xgboost ubjson", boosted, ".ubj"),
        ("xgboost pickle", boosted, ".pkl"),
        ("lightgbm text", light, ".txt"),
        ("lightgbm pickle", light, ".pkl"),
    ):
        files[name] = folder / f"{name.replace(' ', '_')}{suffix}"
        saved(model, folder, suffix).rename(files[name])
    for name in ("classes.json", "classes.cbm", "lossguide.json", "lossguide.cbm"):
        files[f"catboost {name}"] = CATBOOST / name
    return files


READERS = (
    "xgboost json", "xgboost ubjson", "xgboost pickle", "lightgbm text", "lightgbm pickle",
    "catboost classes.json", "catboost classes.cbm", "catboost lossguide.json",
    "catboost lossguide.cbm",
)  # fmt: skip


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return intact_files(tmp_path_factory.mktemp("models"))


def try_to_read(path: Path) -> ResiduumError | None:
    """Read a file and use its trees. Return the error of residuum, None if the file is read."""
    x = np.random.default_rng(0).normal(size=(4, 8))
    try:
        for named in read_forests(read_release(path)):
            if named.forest.columns <= x.shape[1]:
                assert len(predict(named.forest, x)) == len(x)
    except ResiduumError as problem:
        return problem
    return None


def peak_memory() -> int:
    """Return the largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("reader", READERS)
def test_damaged_files_are_read_or_refused(
    intact: dict[str, Path], reader: str, tmp_path: Path
) -> None:
    source = intact[reader]
    raw = source.read_bytes()
    assert try_to_read(source) is None
    memory = peak_memory()
    generator = np.random.default_rng(20261119)
    path = tmp_path / source.name
    errors, times = [], []
    for number in range(FILES):
        path.write_bytes(DAMAGES[number % len(DAMAGES)](raw, generator))
        start = time.process_time()
        errors.append(try_to_read(path))
        times.append(time.process_time() - start)
    assert max(times) < MAX_SECONDS
    assert peak_memory() < memory + MAX_BYTES
    refusals = [error for error in errors if error is not None]
    assert 0 < len(refusals) < FILES  # some damages are harmless, and most are not
    assert all(error.exit_code in (2, 4) and error.remedy for error in refusals)


def edit_json(raw: bytes, change: Callable[[Any], None]) -> bytes:
    content = json.loads(raw)
    change(content)
    return json.dumps(content).encode()


def first_tree(content: Any) -> Any:
    return content["learner"]["gradient_booster"]["model"]["trees"][0]


def set_entry(name: str, node: int, value: Any) -> Callable[[Any], None]:
    return lambda content: first_tree(content)[name].__setitem__(node, value)


def set_size(name: str, value: str) -> Callable[[Any], None]:
    return lambda content: content["learner"]["learner_model_param"].__setitem__(name, value)


HOSTILE_XGBOOST: dict[str, Callable[[Any], None]] = {
    "a child that is its parent": set_entry("left_children", 1, 1),
    "a child that is the root": set_entry("left_children", 1, 0),
    "a child of two parents": set_entry("left_children", 0, 2),
    "a child that does not exist": set_entry("right_children", 0, 10**6),
    "a negative child": set_entry("right_children", 0, -5),
    "a single child": set_entry("right_children", 0, -1),
    "a column that does not exist": set_entry("split_indices", 0, 99),
    "a fraction as a child": set_entry("left_children", 0, 1.5),
    "a missing threshold": set_entry("split_conditions", 0, float("nan")),
    "a text as a number": set_entry("sum_hessian", 0, "many"),
    "an object as a number": set_entry("sum_hessian", 0, {}),
    "an infinite weight": set_entry("sum_hessian", 0, float("inf")),
    "a longer list": lambda content: first_tree(content)["split_indices"].append(0),
    "no nodes": lambda content: first_tree(content).update(left_children=[]),
    "too many columns": set_size("num_feature", "99999999999"),
    "too many classes": set_size("num_class", "999999999"),
    "a negative number of columns": set_size("num_feature", "-3"),
    "two base scores for three classes": set_size("base_score", "[0.1,0.2]"),
    "no base score": set_size("base_score", ""),
    "an output that does not exist": lambda content: content["learner"]["gradient_booster"][
        "model"
    ].update(tree_info=[9] * 6),
    "no trees": lambda content: content["learner"]["gradient_booster"]["model"].update(
        trees=[], tree_info=[]
    ),
    "a list of parameters": lambda content: content["learner"].update(learner_model_param=[]),
    "a number as the booster": lambda content: content["learner"].update(gradient_booster=3),
}


@pytest.mark.parametrize("name", HOSTILE_XGBOOST)
def test_hostile_models_of_xgboost_are_refused(intact: dict[str, Path], name: str) -> None:
    raw = intact["xgboost json"].read_bytes()
    assert read_xgboost(edit_json(raw, lambda content: None)).trees
    with pytest.raises((CheckpointError, UnsafeFileError)):
        read_xgboost(edit_json(raw, HOSTILE_XGBOOST[name]))


HOSTILE_LIGHTGBM = {
    "a child that is its parent": (r"left_child=\S+", "left_child=0"),
    "a child that does not exist": (r"right_child=\S+", "right_child=500"),
    "a leaf that does not exist": (r"left_child=\S+", "left_child=-500"),
    "a huge number of leaves": (r"num_leaves=\d+", "num_leaves=40000000"),
    "more leaves than allowed": (r"num_leaves=\d+", "num_leaves=99999999999"),
    "no leaves": (r"num_leaves=\d+", "num_leaves=0"),
    "too many columns": (r"max_feature_idx=\d+", "max_feature_idx=2000000000"),
    "no classes": (r"num_tree_per_iteration=\d+", "num_tree_per_iteration=0"),
    "fewer trees than stated": (r"tree_sizes=\d+", "tree_sizes=1 2 3 4 5 6"),
    "a range whose ends are swapped": (r"feature_infos=\S+", "feature_infos=[3:-3]"),
    "no end": ("\nend of trees", "\n"),
}


@pytest.mark.parametrize("name", HOSTILE_LIGHTGBM)
def test_hostile_models_of_lightgbm_are_refused(intact: dict[str, Path], name: str) -> None:
    text = intact["lightgbm text"].read_text()
    assert read_lightgbm(text).trees
    damaged = re.sub(*HOSTILE_LIGHTGBM[name], text, count=1)
    assert damaged != text
    with pytest.raises((CheckpointError, UnsafeFileError)):
        read_lightgbm(damaged)


def test_deep_nesting_is_refused(intact: dict[str, Path]) -> None:
    deep = b"[" * 100_000
    with pytest.raises(CheckpointError, match="JSON"):
        read_xgboost(b'{"learner":' + deep)
    with pytest.raises(CheckpointError, match="JSON"):
        read_catboost(b'{"features_info":' + deep)
    with pytest.raises(UnsafeFileError, match="nested"):
        read_ubjson(deep)
    with pytest.raises(UnsafeFileError, match="lists"):
        read_xgboost(b'{"learner":[' + b"[]," * 2_000_001 + b"0]}")
    node = '{"split": {"float_feature_index": 0, "border": 1}, "right": {"value": 1}, "left": '
    nested = node * 100_000 + '{"value": 1}' + "}" * 100_000
    content = intact["catboost lossguide.json"].read_text()
    start = content.index('"trees": [') + len('"trees": [')
    with pytest.raises(CheckpointError, match="JSON"):
        read_catboost((content[:start] + nested + "]}").encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"[$d#L" + struct.pack(">q", 2**60),
        b"[$d#L" + struct.pack(">q", -1),
        b"[#L" + struct.pack(">q", 2**40) + b"Z",
        b"[$T#L" + struct.pack(">q", 2**40),
        b"{#L" + struct.pack(">q", 2**40) + b"U\x01aZ",
        b"SL" + struct.pack(">q", 2**40) + b"a",
        b"{L" + struct.pack(">q", 2**40),
        b"[$[#U\xff",
        b"H",
        b"",
        b"NNNN",
        b"[" * 60,
    ],
)
def test_claimed_lengths_of_ubjson_are_checked(raw: bytes) -> None:
    with pytest.raises(CheckpointError, match="UBJSON"):
        read_ubjson(raw)


@pytest.mark.parametrize("bits", [0x7FA00000, 0x7F800001, 0xFFC00000])
def test_thresholds_that_are_no_numbers_are_refused_without_warnings(
    intact: dict[str, Path], bits: int
) -> None:
    raw = intact["xgboost ubjson"].read_bytes()
    head = b"split_conditions[$d#L"
    start = raw.index(head) + len(head) + 8
    damaged = raw[:start] + struct.pack(">I", bits) + raw[start + 4 :]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match="numbers as thresholds"):
            read_xgboost(damaged)


def test_numbers_of_ubjson() -> None:
    raw = (
        b"{U\x01a[i\xffU\xffI\xff\x00l\x00\x00\x01\x00L" + struct.pack(">q", -(2**40)) + b"]"
        b"U\x01bd" + struct.pack(">f", 0.5) + b"U\x01cD" + struct.pack(">d", 0.1) + b"U\x01dN[TFZ]"
        b"U\x01e[$d#U\x02" + struct.pack(">2f", 1.5, -2.5) + b"U\x01fSU\x02hiU\x01gCx}"
    )
    content = read_ubjson(raw)
    assert content.pop("e").tolist() == [1.5, -2.5]
    assert content == {
        "a": [-1, 255, -256, 256, -(2**40)],
        "b": 0.5,
        "c": 0.1,
        "d": [True, False, None],
        "f": "hi",
        "g": "x",
    }


def test_reading_a_model_imports_and_runs_nothing(intact: dict[str, Path]) -> None:
    """Read every file in a new process, in which importing a library of boosted trees fails."""
    code = (
        "import sys\n"
        "for name in ('xgboost', 'lightgbm', 'catboost'):\n"
        "    sys.modules[name] = None\n"
        "from residuum.io.forests import read_forests\n"
        "from residuum.io.release import read_release\n"
        "for path in sys.argv[1:]:\n"
        "    assert read_forests(read_release(path))\n"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, intact.values())], check=True, timeout=60)
