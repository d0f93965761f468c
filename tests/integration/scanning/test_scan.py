"""What a release reveals before any attack, in every usual file. Nothing in a file is run."""

from __future__ import annotations

import argparse
import io
import json
import os
import pathlib
import pickle
import random
import shutil
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import jsonschema
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

import residuum as rs
from residuum.cli.main import main
from residuum.errors import CheckpointError, InputError, MissingExtraError, UnsafeFileError
from residuum.io.adapters import find_adapter_pairs
from residuum.io.folders import MAX_DEPTH
from residuum.io.inert import Block, InertObject
from residuum.io.release import open_release
from residuum.scanning.findings import KINDS, findings
from residuum.scanning.folder_files import MAX_FILES
from tests import estimators, schemas
from tests.confined import confined
from tests.program import Capture, one_line, printed

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def pickles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of pickled estimators, by the release of scikit-learn that wrote them."""
    here = tmp_path_factory.mktemp("sklearn")
    (here / "newest").mkdir()
    estimators.write(here / "newest")
    with zipfile.ZipFile(DATA / "sklearn-1.4.2.zip") as archive:
        archive.extractall(here / "1.4.2")
    return {"newest": here / "newest", "1.4.2": here / "1.4.2"}


def found_in(path: Path) -> set[tuple[str, str]]:
    return {(finding.kind, finding.what) for finding in findings(open_release(path))}


# scikit-learn


@pytest.mark.parametrize("release", ["newest", "1.4.2"])
@pytest.mark.parametrize("name", estimators.SURFACES)
def test_every_estimator_shows_its_surfaces(
    pickles: dict[str, Path], release: str, name: str
) -> None:
    expected = estimators.SURFACES[name]
    for suffix in (".pkl", ".joblib"):
        surfaces = found_in(pickles[release] / f"{name}{suffix}")
        for kind, word in expected:
            unseeded = name in ("adam-32", "scaled") and word == "the initial weights"
            if not (unseeded and release == "1.4.2"):  # newer releases keep a copy of the start
                assert any(kind == k and word in what for k, what in surfaces), (
                    kind,
                    word,
                    surfaces,
                )
        stored = {what for kind, what in surfaces if kind == "stored"}
        assert len(stored) == sum(kind == "stored" for kind, _ in expected)


def test_stored_records_are_counted_and_equal_the_training_records(
    pickles: dict[str, Path],
) -> None:
    release = open_release(pickles["newest"] / "knn.pkl")
    (finding,) = (f for f in findings(release) if f.kind == "stored")
    assert (finding.count, finding.where, finding.severity) == (
        estimators.RECORDS,
        "_fit_X",
        "high",
    )
    held = release.content.attributes["_fit_X"].tensor().numpy()
    assert np.array_equal(held, estimators.fitted()["knn"]._fit_X)


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_of_pickle_is_read(tmp_path: Path, protocol: int) -> None:
    model = estimators.fitted()["knn"]
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(model, protocol=protocol))
    release = open_release(tmp_path / "m.pkl")
    held = release.content.attributes["_fit_X"].tensor().numpy()
    assert np.array_equal(held, model._fit_X)


@pytest.mark.parametrize("packer", ["zlib", "gzip", "bz2", "lzma", "xz"])
def test_packed_files_of_joblib_are_read(tmp_path: Path, packer: str) -> None:
    joblib.dump(estimators.fitted()["svc"], tmp_path / "m.joblib", compress=(packer, 3))
    assert ("stored", "training records in SVC.support_vectors_") in found_in(tmp_path / "m.joblib")


def test_a_start_is_believed_only_when_the_weights_bear_it_out(tmp_path: Path) -> None:
    model = estimators.fitted()["sgd"]

    def starts() -> list[str]:
        (tmp_path / "m.pkl").write_bytes(pickle.dumps(model))
        surfaces = findings(open_release(tmp_path / "m.pkl"))
        return [
            finding.where for finding in surfaces if finding.what.startswith("the initial weights")
        ]

    assert starts() == ["random_state"]
    model.random_state = 8  # not the seed that it was trained with
    assert starts() == ["_best_coefs"]  # but scikit-learn keeps a copy
    del model._best_coefs
    assert starts() == []


def test_the_start_drawn_again_is_the_one_that_was_trained_from() -> None:
    from sklearn.neural_network import MLPClassifier

    from residuum.io.estimators import draw_initial_weights

    x, y = np.random.default_rng(1).normal(size=(20, 6)), np.arange(20) % 3
    for activation in ("relu", "logistic"):
        model = MLPClassifier((7, 5), activation=activation, random_state=3, max_iter=1)
        model.learning_rate_init = 1e-300  # the first epoch leaves it where it was
        with pytest.warns(UserWarning, match="iterations"):
            model.fit(x, y)
        ours = draw_initial_weights([(7, 6), (5, 7), (3, 5)], 3, activation)
        for l in range(3):
            assert np.allclose(ours[f"layers.{l}.weight"].numpy().T, model.coefs_[l], atol=1e-12)
            assert np.allclose(ours[f"layers.{l}.bias"].numpy(), model.intercepts_[l], atol=1e-12)


# torch, safetensors, TorchScript, ONNX


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    return optimizer.state_dict()


def checkpoints() -> dict[str, Any]:
    model = network()
    adam = stepped(model, torch.optim.Adam(model.parameters()))
    momentum = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    weights = model.state_dict()
    return {
        "plain": {"model_state_dict": weights, "optimizer_state_dict": adam, "epoch": 3},
        "lightning": {
            "state_dict": weights,
            "optimizer_states": [momentum],
            "hyper_parameters": {"seed": 42, "csv": "clinic/train.csv"},
        },
        "arguments": {
            "model": weights,
            "optimizer": adam,
            "ema": {k: t.clone() for k, t in weights.items()},
            "args": argparse.Namespace(data=pathlib.PurePosixPath("/data/patients"), seed=1),
        },
        "optimizer": adam,
        "bare": weights,
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_training_checkpoints_show_their_optimizer_and_other_contents(
    tmp_path: Path, zipped: bool
) -> None:
    expected = {
        "plain": {("optimizer-state", "exp_avg)"), ("optimizer-state", "exp_avg_sq")},
        "lightning": {("optimizer-state", "momentum"), ("paths", "names"), ("start", "seed")},
        "arguments": {("optimizer-state", "averaged"), ("paths", "names"), ("start", "seed")},
        "optimizer": {("optimizer-state", "exp_avg)")},
        "bare": set(),
    }
    for name, content in checkpoints().items():
        path = tmp_path / f"{name}.pt"
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        surfaces = found_in(path)
        for kind, word in expected[name]:
            assert any(kind == k and word in what for k, what in surfaces), (
                name,
                kind,
                word,
                surfaces,
            )
        if name != "optimizer":
            assert ("statistics", "moments of the data in normalization layers") in surfaces
        if name == "bare":
            assert {kind for kind, _ in surfaces} == {"statistics"}


def test_tensors_read_over_inert_values_are_those_that_torch_loads(tmp_path: Path) -> None:
    matrix = torch.randn(5, 4)
    content = {
        "transposed": matrix.T,
        "part": matrix[1:3, ::2],
        "bf16": matrix.bfloat16(),
        "count": torch.tensor(3),
        "none": torch.zeros(0, 2),
        "mask": matrix > 0,
    }
    for zipped in (True, False):
        torch.save(content, tmp_path / "t.pt", _use_new_zipfile_serialization=zipped)
        tree = open_release(tmp_path / "t.pt").content
        for name, tensor in content.items():
            assert torch.equal(tree[name].tensor(), tensor), name
            assert tree[name].tensor().dtype == tensor.dtype


def test_a_whole_module_and_a_torchscript_archive_are_read_by_their_tensors(
    tmp_path: Path,
) -> None:
    model = network()
    torch.save(model, tmp_path / "whole.pt")
    torch.jit.script(model).save(str(tmp_path / "script.pt"))
    for name, kind in (("whole.pt", "torch"), ("script.pt", "torchscript")):
        release = open_release(tmp_path / name)
        assert release.kind == kind
        assert ("statistics", "moments of the data in normalization layers") in found_in(
            tmp_path / name
        )


def test_an_adapter_is_recognized_by_its_names(tmp_path: Path) -> None:
    a, b = torch.randn(2, 8), torch.randn(6, 2)
    prefix = "base_model.model.fc1.lora_"
    save_file({f"{prefix}A.weight": a, f"{prefix}B.weight": b}, tmp_path / "adapter.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "train_file": "/data/notes.jsonl"}')
    release = open_release(tmp_path / "adapter.safetensors")
    assert {finding.kind for finding in findings(release)} == {"adapter", "paths"}
    ((name, (found_a, found_b)),) = find_adapter_pairs(release.content).items()
    assert name == "base_model.model.fc1"
    assert torch.equal(found_a.tensor(), a)
    assert torch.equal(found_b.tensor(), b)


def test_metadata_of_safetensors_are_searched(tmp_path: Path) -> None:
    metadata = {"dataset": "/home/me/records.csv", "note": "a network", "seed": "1"}
    save_file({"w": torch.zeros(2)}, tmp_path / "m.safetensors", metadata=metadata)
    assert {kind for kind, _ in found_in(tmp_path / "m.safetensors")} == {"paths"}


def test_onnx_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    (tmp_path / "m.onnx").write_bytes(b"\x08\x07")
    with pytest.raises(MissingExtraError, match=r'clone of residuum, run pip install "\.\[onnx\]"'):
        open_release(tmp_path / "m.onnx")


def test_initializers_of_onnx_are_read(tmp_path: Path) -> None:
    import onnx

    helper, weight = onnx.helper, np.arange(6, dtype=np.float32).reshape(2, 3)
    initial = [onnx.numpy_helper.from_array(weight, "bn.running_mean")]
    graph = helper.make_graph([], "g", [], [], initializer=initial)
    model = helper.make_model(graph)
    helper.set_model_props(model, {"dataset": "/data/patients.csv"})
    onnx.save(model, tmp_path / "m.onnx")
    release = open_release(tmp_path / "m.onnx")
    assert np.array_equal(release.content["bn.running_mean"].tensor().numpy(), weight)
    assert {finding.kind for finding in findings(release)} == {"statistics", "paths"}


# Folders, exit codes, what is printed


def test_a_folder_is_walked_and_links_in_it_are_left_alone(
    pickles: dict[str, Path], tmp_path: Path
) -> None:
    inner = tmp_path / "release" / "a"
    inner.mkdir(parents=True)
    (inner / "knn.pkl").write_bytes((pickles["newest"] / "knn.pkl").read_bytes())
    (inner / "broken.pt").write_bytes(b"PK\x03\x04" + b"0" * 50)
    (inner / "notes.txt").write_text("hello")
    (inner / "LICENSE").write_text("hello")
    (inner / "out.pkl").symlink_to(pickles["newest"] / "svc.pkl")
    (inner / "up").symlink_to(tmp_path, target_is_directory=True)
    seen: list[str] = []
    result = rs.scan(tmp_path / "release", watch=lambda position, total, name: seen.append(name))
    assert [file.file for file in result.files] == ["a/knn.pkl", "a/notes.txt"]
    assert [(unread.file, unread.exit_code) for unread in result.unread] == [("a/broken.pt", 2)]
    assert seen == ["a/broken.pt", "a/knn.pkl", "a/notes.txt"]
    assert any("2 links" in note for note in result.notes)
    assert "1 other file was skipped: a/LICENSE" in result.notes
    assert result.exit_code == 1  # what is stored weighs more than what cannot be read


def test_limits_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for i in range(MAX_FILES + 1):
        (tmp_path / "many" / f"{i}.pt").touch()
    with pytest.raises(InputError, match=f"{MAX_FILES} model files"):
        rs.scan(tmp_path / "many")
    shutil.rmtree(tmp_path / "many")
    deep = tmp_path.joinpath(*map(str, range(1, MAX_DEPTH + 2)))
    deep.mkdir(parents=True)
    torch.save({"w": torch.zeros(2)}, tmp_path / "w.pt")
    torch.save({"w": torch.zeros(2)}, deep / "w.pt")
    result = rs.scan(tmp_path)
    assert len(result.files) == 1
    assert any("deeper" in note for note in result.notes)
    with pytest.raises(CheckpointError, match="must contain a model"):
        rs.scan(tmp_path / "1")


@pytest.mark.parametrize(
    ("name", "fail_on", "code"),
    [
        ("knn", "stored", 1),
        ("knn", "none", 0),
        ("adam", "stored", 0),
        ("adam", "stored,optimizer-state", 1),
        ("adam", "start", 1),
        ("logistic", "paths,start", 0),
        ("adam", "high", 1),
        ("logistic", "high", 0),
        ("logistic", "low", 1),
        ("scaled", "medium", 1),
        ("adam", "optimizer-stat", 2),
    ],
)
def test_exit_codes(
    pickles: dict[str, Path], name: str, fail_on: str, code: int, capsys: Capture
) -> None:
    assert main(["scan", str(pickles["newest"] / f"{name}.pkl"), "--fail-on", fail_on]) == code
    if code == 2:
        assert "Did you mean 'optimizer-state'" in one_line(capsys)


def test_json_fits_its_schema_and_sarif_its_own(
    pickles: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    log = tmp_path / "scan.sarif"
    (tmp_path / "r").mkdir()
    for name in ("knn.pkl", "adam.joblib"):
        (tmp_path / "r" / name).write_bytes((pickles["newest"] / name).read_bytes())
    (tmp_path / "r" / "bad.pkl").write_bytes(b"\x80\x04.")
    code = main(["scan", str(tmp_path / "r"), "--json", "--sarif", str(log)])
    output = printed(capsys)
    assert code == output["exit_code"] == 1
    schemas.check("scan", output)
    assert output["fail_on"] == ["high"]
    assert output["failed"] == ["stored", "optimizer-state", "start"]
    sarif = json.loads(log.read_text())
    jsonschema.validate(sarif, json.loads((DATA / "sarif-2.1.0-rtm.5.json").read_text()))
    (run,) = sarif["runs"]
    assert len(run["results"]) == sum(len(file["findings"]) for file in output["files"])
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[r["ruleIndex"]]["id"] == r["ruleId"] for r in run["results"])


def test_the_table_fits_80_columns_and_names_remedies(
    pickles: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["scan", str(pickles["newest"] / "scaled.pkl")]) == 1
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    assert "delete the attribute _optimizer" in " ".join(output.split())


def test_kinds_are_those_of_the_schema_and_of_the_help(capsys: Capture) -> None:
    kinds = schemas.schema("scan")["$defs"]["Finding"]["properties"]["kind"]["enum"]
    assert sorted(kinds) == sorted(KINDS)
    assert main(["scan", "--help"]) == 0
    output = capsys.readouterr().out
    assert all(kind in output for kind in KINDS)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("m.h5", b"\x89HDF\r\n\x1a\n" + b"0" * 50, "Keras"),
        ("m.gguf", b"GGUF" + b"0" * 50, "GGUF"),
        ("m.joblib", b"\x04\x22\x4d\x18" + b"0" * 50, "lz4"),
        ("m.txt", b"hello, world, hello", "has another format"),
        ("m.pt", b"", "empty"),
    ],
)
def test_other_files_are_refused_with_advice(
    tmp_path: Path, name: str, content: bytes, word: str, capsys: Capture
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["scan", str(tmp_path / name)]) == 2
    assert word in one_line(capsys)


# Hostile files


class Writes:
    """An object that writes a file as soon as it is loaded."""

    def __init__(self, path: Path, function: Callable[..., Any] = os.system) -> None:
        self.path, self.how = path, function

    def __reduce__(self) -> tuple[Any, ...]:
        return self.how, (f"touch {self.path}",)


def test_a_pickle_that_would_write_a_file_leaves_none(tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "written"
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(Writes(target)))
    torch.save({"w": torch.zeros(2), "x": Writes(target)}, tmp_path / "m.pt")
    joblib.dump([Writes(target), np.zeros(3)], tmp_path / "m.joblib", compress=3)
    for name in ("m.pkl", "m.pt", "m.joblib"):
        assert main(["scan", str(tmp_path / name)]) == 4
        assert "loading this file would call posix.system" in capsys.readouterr().out
        assert not target.exists()
    pickle.loads((tmp_path / "m.pkl").read_bytes())
    assert target.exists(), "the test would notice"


def nest(count: int) -> bytes:
    return b"\x80\x04" + b"]" * count + b"a" * (count - 1) + b"."


def laughs() -> bytes:
    """A list of ten times a list of ten times..., a hundred deep."""
    levels = (b"](" + (b"h" + bytes([i])) * 10 + b"eq" + bytes([i + 1]) for i in range(100))
    return b"\x80\x04]q\x00" + b"".join(levels) + b"."


def joblib_inside(depth: int) -> bytes:
    """Arrays of objects, each of which is a pickle with an array of objects."""
    kind = b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R"
    array_pickle = (
        b"\x80\x04cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81}X\x05\x00\x00\x00shapeK\x01\x85s}("
        b"X\x05\x00\x00\x00shapeK\x01\x85X\x05\x00\x00\x00dtype" + kind + b"ub"
    )
    return array_pickle * depth


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def word(name: str, argument: str) -> bytes:
    module, _, function = name.rpartition(".")
    return f"\x80\x02c{module}\n{function}\n".encode("latin1") + text(argument) + b"\x85R."


HOSTILE: dict[str, Callable[[], bytes]] = {
    "os.system": lambda: word("os.system", "id"),
    "eval": lambda: word("builtins.eval", "1"),
    "old eval": lambda: word("__builtin__.eval", "1"),
    "runpy": lambda: word("runpy._run_code", "1"),
    "a method of a result": lambda: (
        b"\x80\x02cbuiltins\ngetattr\ncposix\nsystem\nX\x01\x00\x00\x00a\x86R)R."
    ),
    "a terabyte claimed": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 10**12) + b"x.",
    "a gigabyte of text claimed": lambda: b"\x80\x04X" + struct.pack("<I", 10**9) + b"x.",
    "an array of a terabyte": lambda: pickle.dumps(np.zeros(3)).replace(
        b"K\x03\x85", b"J\xff\xff\xff\x7f\x85"
    ),
    "lists without end": lambda: b"\x80\x04" + b"]" * 3_000_000,
    "nested lists": lambda: nest(150_000),
    "a list of a list of a list": laughs,
    "memo without end": lambda: b"\x80\x04N" + b"\x94" * 3_000_000 + b".",
    "a bomb of zeros": lambda: zlib.compress(
        b"\x80\x04\x8e" + struct.pack("<Q", 3 * 10**8) + bytes(3 * 10**8), 1
    ),
    "texts copied": lambda: (
        b"\x80\x02X" + struct.pack("<I", 10**6) + b"a" * 10**6 + b"X\x06\x00\x00\x00latin1\x86q\x00"
        b"c_codecs\nencode\nq\x01(" + b"h\x01h\x00R" * 5000 + b"t."
    ),
    "a long number": lambda: (
        b"\x80\x02}X\x04\x00\x00\x00seed\x8b" + struct.pack("<i", 10**6) + b"\x7f" * 10**6 + b"s."
    ),
    "arrays inside of each other": lambda: joblib_inside(5000),
    "calls": lambda: b"\x80\x02ca\nb\nq\x00(" + b"h\x00)\x81}b" * 400_000 + b"t.",
    "seeds in dicts": lambda: (
        b"\x80\x02}("
        + b"".join(b"M%b}X\x04\x00\x00\x00seedK\x01s" % struct.pack("<H", i) for i in range(60_000))
        + b"u."
    ),
    "letters of four bytes": lambda: (
        b"\x80\x04(" + text("a" * 1000 + "\U0001f600") * 30_000 + b"t."
    ),
    "a long text with one of them": lambda: (
        b"\x80\x04" + text("a" * 30_000_000 + "\U0001f600") + b"."
    ),
    "pairs copied": lambda: (
        b"\x80\x02ccollections\nOrderedDict\nq\x00]("
        + b"".join(b"](J%bNe" % struct.pack("<i", i) for i in range(60_000))
        + b"e\x85q\x01("
        + b"h\x00h\x01R" * 9
        + b"t."
    ),
    "tensors": lambda: (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + 2 * text("0")
        + b"K\x01tQq\x01("
        + b"h\x00(h\x01K\x00))\x89)tR" * 200_000
        + b"t."
    ),
    "packed lists": lambda: zlib.compress(b"\x80\x02" + b"]" * 3_000_000),
    "its own part": lambda: b"\x80\x04]q\x00h\x00a.",
}


def test_hostile_and_large_pickles_run_nothing_and_take_little(tmp_path: Path) -> None:
    sizes: dict[Path, int] = {}
    for name, make in HOSTILE.items():
        path, raw = tmp_path / f"{name}.pkl", make()
        path.write_bytes(raw)
        sizes[path] = len(zlib.decompress(raw) if raw.startswith(b"\x78") else raw)
    x = np.random.default_rng(0).normal(size=(8_000, 200))
    model = KNeighborsClassifier(algorithm="brute").fit(x, x[:, 0] > 0)
    large = {tmp_path / name: x.nbytes for name in ("knn.pkl", "knn.joblib", "packed.joblib")}
    (tmp_path / "knn.pkl").write_bytes(pickle.dumps(model))
    joblib.dump(model, tmp_path / "knn.joblib")
    joblib.dump(model, tmp_path / "packed.joblib", compress=1)
    sizes |= large
    (tmp_path / "ok.pkl").write_bytes(pickle.dumps([1.0]))
    scans = [["scan", str(path)] for path in sizes]
    outcomes = dict(zip(sizes, confined([["scan", str(tmp_path / "ok.pkl")]], scans), strict=True))
    for path, outcome in outcomes.items():
        assert outcome.code in ((1,) if path in large else (0, 2, 4)), (path.stem, outcome)
        assert outcome.seconds < 3, (path.stem, outcome)
        assert outcome.bytes < 2 * sizes[path] + 50_000_000, (path.stem, outcome)
    commands = ("os.system", "eval", "old eval", "runpy")
    assert all(outcomes[tmp_path / f"{name}.pkl"].code == 4 for name in commands)


def test_fuzzed_files_end_in_an_error_or_a_scan(
    pickles: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    chance = random.Random(0)
    torch.save(checkpoints()["plain"], tmp_path / "seed.pt")
    seeds = [
        tmp_path / "seed.pt",
        *(
            pickles["newest"] / f"{n}"
            for n in ("knn.pkl", "adam.joblib", "scaled.pkl", "words-packed.joblib", "forest.pkl")
        ),
    ]
    for i in range(60):
        seed = seeds[i % len(seeds)]
        content = bytearray(seed.read_bytes())
        if i % 5 == 0:
            content = content[: chance.randrange(len(content))]
        for _ in range(chance.choice((1, 3, 20))):
            if content:
                content[chance.randrange(len(content))] = chance.randrange(256)
        path = tmp_path / f"fuzzed-{i}{seed.suffix}"
        path.write_bytes(bytes(content))
        assert main(["scan", str(path)]) in (0, 1, 2, 4), path
    capsys.readouterr()


def test_an_archive_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        members = {m.filename: archive.read(m) for m in archive.infolist()}
    short = io.BytesIO()
    with zipfile.ZipFile(short, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content[:100] if name.endswith("data/0") else content)
    (tmp_path / "short.pt").write_bytes(short.getvalue())
    with pytest.raises(UnsafeFileError, match="must contain all numbers of a tensor storage"):
        open_release(tmp_path / "short.pt")


def test_stand_ins_hold_what_the_file_says_and_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(argparse.Namespace(a=1, b=[np.float64(2.5)])))
    thing = open_release(tmp_path / "m.pkl").content
    assert isinstance(thing, InertObject)
    assert thing.name == "argparse.Namespace"
    assert thing.attributes == {"a": 1, "b": [2.5]}
    assert not isinstance(thing, Block)
