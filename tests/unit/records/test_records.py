"""Records on disk: exact round trips, whole files or none, and data files that lie."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

import residuum.records.rundir as files
from residuum.attacks.stationarity.solution import WeightFit
from residuum.attacks.stationarity.solver import Population, SolverState
from residuum.auditing.plan import AttackPlan, Batch
from residuum.auditing.power import ControlSize, PositiveControls
from residuum.auditing.questions import Answer
from residuum.auditing.verdict import Verdict
from residuum.errors import (
    DataError,
    InconclusiveError,
    InputError,
    OutputError,
    ResiduumError,
    UnsafeFileError,
    did_you_mean,
)
from residuum.networks.network import Network
from residuum.records import (
    Certificate,
    Dataset,
    FilledRecords,
    Knowledge,
    LayerResidual,
    Reconstruction,
    Record,
    RecoveredTable,
    Selection,
    Split,
    Sums,
    Uniqueness,
    make_directory,
    read_json,
    read_npz,
    same,
    write_atomic,
    write_json,
)
from residuum.records.attribute_test import AttributeTest, DisclosedCell
from residuum.records.base import METADATA_KEY
from residuum.records.exposure import (
    CanaryBound,
    ExposedRecord,
    Exposure,
    FitFigures,
    GroupExposure,
    KinkFigures,
    Operating,
    OutputFigures,
    PublishedExposure,
    RowSpaceFigures,
)
from residuum.records.identification import Identification
from residuum.records.knowledge import Fact
from residuum.records.published import Tool
from residuum.records.rundir import digest, environment, sha256
from residuum.records.scores import MetricScore, SampleMatch, SampleScore, Scores, ScoreSlice
from residuum.records.tables import Table
from residuum.records.tokens import TokenDataset
from residuum.scanning.findings import Finding
from residuum.scanning.scan import Scan, ScannedFile, Searched, UnreadFile
from residuum.scanning.stripped import Stripped
from residuum.surfaces.inspection import Inspection, ParameterSummary
from residuum.training import TrainingState

MEAN = torch.linspace(0, 1, 3, dtype=torch.float64)


def dataset(name: str = "toy") -> Dataset:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Dataset(x, torch.tensor([1, -1, 1, -1]), MEAN, name, ("even", "odd"))


def certificate() -> Certificate:
    return Certificate(
        task="binary",
        samples=4,
        residual_plain=0.1,
        residual_clarke=1e-17,
        eps=float("nan"),
        delta=None,
        margin=1.0,
        normalized_margin=0.1 + 0.2,
        homogeneity_order=2.0,
        kinks=3,
        kinks_freed=2,
        layers=(LayerResidual("layers.0", 0.25),),
        multipliers=MEAN,
        rows=torch.arange(3),
        balance=None,
        identity=0.0,
        condition=1e300,
        theta_norm=2.0,
        status="near_kkt",
        notes=("one", "two"),
    )


METRIC = MetricScore("ncc", "correlation", True, 0.4, 3, 0.9, 0.95, 0.5, 2, 0.1, (0.1, 0.9), 0.01)
MATCH = SampleMatch(0.9, 3, True, 0.95, 2)
SAMPLE = SampleScore(0, 1, 0.5, None, True, {"ncc": MATCH})
SELECTION = Selection(
    torch.randn(2, 3),
    torch.tensor([1, -1]),
    torch.rand(2),
    torch.ones(2),
    torch.ones(2),
    torch.rand(2),
    torch.rand(2, 3),
    torch.arange(2),
)
SUMS = Sums(3, 2, None, 0.5, "dense")
PART = ScoreSlice("odd", 2, 1, 0.5, None)
POINT = Operating(0.01, 1, 0.5, (0.25, 0.75))
DISCLOSED_CELL = DisclosedCell(
    2, (1, 3), (0.0, 1.0), (1.0, 0.0), (0.5, 0.5), 0.01, ("city_a", "city_b"), "m", "P2"
)
BOUND = CanaryBound(40, 20, 0.7, 0.95, 1e-5, 10, 9, "loss", (POINT,), 0.8, ("a",))
GROUP = GroupExposure("odd", 2, -1.1, 0.5, 0.25, (0.1, 0.4), None)
OUTPUTS = OutputFigures(margin=MEAN, loss=MEAN)
FIT = FitFigures(multiplier=MEAN, own_over_misfit=MEAN, misfit=0.1, gap=1e-9, informed_ncc=MEAN)
ROW_SPACE = RowSpaceFigures(rank=2, heard=MEAN, reach=MEAN, reach_ncc=MEAN, dual=MEAN, dual_p=MEAN)
KINKS = KinkFigures(kinks=torch.arange(3)[:, None], kink_p=MEAN, kink_q=MEAN)

TABLE = torch.zeros(3, 2, dtype=torch.float64)
FLAGS = torch.ones(3, 2, dtype=torch.bool)
RECORDS: dict[str, Callable[[], Record]] = {
    "LayerResidual": lambda: LayerResidual("layers.0", 0.1),
    "Sums": lambda: SUMS,
    "Uniqueness": lambda: Uniqueness(
        "binary",
        2,
        0.1,
        True,
        True,
        torch.arange(1),
        torch.ones(1),
        MEAN[:1],
        torch.ones(1).long(),
        torch.ones(1).bool(),
        torch.zeros(1),
        MEAN[:1],
        MEAN[:1],
        MEAN[:1],
        MEAN[:1],
        MEAN[None],
        MEAN[:1],
        MEAN[:1],
        torch.tensor([math.inf]),
        MEAN[None],
        MEAN[None],
        MEAN[:1],
        SUMS,
        {"layers.0": 0.1},
        0.5,
        {"layers.0": 0.05},
        ("a",),
    ),
    "Certificate": certificate,
    "Network": lambda: Network(
        {"layers.0.weight": torch.randn(1, 3)},
        "mlp:3-1",
        (3,),
        ("größe",),
        "binary",
        ("a",),
        {"layers.0.weight": "fc"},
    ),
    "Dataset": dataset,
    "TokenDataset": lambda: TokenDataset(
        torch.tensor([[4, 7], [5, -1]]), torch.tensor([0, 1]), texts=("a b", "c")
    ),
    "Split": lambda: Split(dataset(), dataset("held-out")),
    "Knowledge": lambda: Knowledge(
        shape=(1, 8, 8),
        value_range=(0.0, 1.0),
        mean=MEAN,
        theta0={"w": torch.ones(2, 2)},
        loss="logistic",
        provenance={"mean": "holdout"},
    ),
    "TrainingState": lambda: TrainingState(
        {"w": torch.ones(2)},
        {"w": torch.zeros(2)},
        7,
        "f" * 64,
        "steps",
        {"eta": 1 / 3},
        {"w": torch.full((2,), 0.5, dtype=torch.float64)},
        ({"step": 7.0, "loss": 1e-300},),
    ),
    "MetricScore": lambda: METRIC,
    "SampleMatch": lambda: MATCH,
    "SampleScore": lambda: SAMPLE,
    "ScoreSlice": lambda: PART,
    "Scores": lambda: Scores(
        4, 8, True, "", "ncc", {"ncc": METRIC}, (SAMPLE,), (PART,), (), 100, 200, 2, 0, ("a",)
    ),
    "Selection": lambda: SELECTION,
    "Reconstruction": lambda: Reconstruction(
        "binary-kkt",
        torch.randn(4, 3),
        torch.ones(4),
        torch.rand(4),
        torch.zeros(4).long(),
        torch.arange(2),
        torch.rand(1, 2),
        torch.rand(1, 2, 1),
        ("layers.0",),
        ("finished",),
        Knowledge(shape=(3,)),
        {"steps": 2, "rates": [0.1, 0.2]},
        SELECTION,
        0.5,
        ("a",),
    ),
    "SolverState": lambda: SolverState(
        torch.randn(2, 4, 3),
        torch.rand(2, 4),
        torch.randn(2, 4, 3),
        torch.rand(2, 4),
        torch.tensor([0.1, math.inf]),
        torch.ones(2),
        torch.tensor([True, False]),
        50,
        "f" * 64,
        {"x/1": torch.zeros(2, 4, 3)},
        (0, 25),
        (torch.rand(2), torch.rand(2)),
        (torch.rand(2, 1), torch.rand(2, 1)),
        "time",
    ),
    "Population": lambda: Population.start(2, torch.tensor([1.0, -1.0])).replace(
        events=({"step": 25, "run": 0, "kind": "split", "parent": 1, "children": [3, 2]},)
    ),
    "Identification": lambda: Identification(
        "polynomial:3-2-1,coefficients=0/0/0/1",
        (3,),
        4,
        2,
        0.0,
        0.0,
        3,
        2,
        1.5,
        1e-17,
        2,
        2,
        0,
        1.0,
        "order",
        torch.randn(2, 3),
        torch.randn(2),
        torch.rand(2),
        torch.tensor([True, False]),
        "growth",
        0.1,
        "unit",
        None,
        torch.rand(2),
        torch.rand(3, 2),
        None,
        ("a",),
    ),
    "WeightFit": lambda: WeightFit({"layers.0": 0.5}, ("layers.0",)),
    "ParameterSummary": lambda: ParameterSummary("w", (2, 3), 6, 0.5),
    "Inspection": lambda: Inspection(
        arch="mlp:3-1",
        input_shape=(3,),
        inputs=3,
        outputs=1,
        layers=(ParameterSummary("w", (1, 3), 3, 1.0),),
        parameters=3,
        bytes=12,
        dtype="float32",
        homogeneity_order=1.0,
        directions=1,
        directions_of="above 1%",
        ranks={"0.1": 1},
        balance=None,
    ),
    "Finding": lambda: Finding(
        "stored", "high", "records", "_fit_X", "its rows are records", "leave it out", 2, 7, (1, 5)
    ),
    "ScannedFile": lambda: ScannedFile("m.pt", "torch", 3, (), None, "no weights"),
    "UnreadFile": lambda: UnreadFile("m.h5", "an HDF5 file", 2),
    "Scan": lambda: Scan("m.pt", (ScannedFile("m.pt", "torch", 3, ()),), notes=("a",)),
    "Searched": lambda: Searched(60, 16, 400, 6000, 3, 1, 12, 40, ("a",)),
    "Table": lambda: Table({"age": MEAN, "city": ("a", "b")}, "city", ("id",), ("age",), ()),
    "TableSummary": lambda: RECORDS["RecoveredTable"]().summary(),
    "RecoveredTable": lambda: RecoveredTable(
        "RandomForestRegressor", 9, TABLE, TABLE, FLAGS, ~FLAGS, ~FLAGS, TABLE[:, :1], True
    ),
    "FilledRecords": lambda: FilledRecords(TABLE, FLAGS, TABLE, TABLE, ("a", "")),
    "Stripped": lambda: Stripped("m.pt", "n.pt", 2, 7, (), ()),
    "Tool": lambda: Tool("residuum", "1.0"),
    "Fact": lambda: Fact("shape", "1, 8, 8", "user"),
    "Operating": lambda: POINT,
    "CanaryBound": lambda: BOUND,
    "DisclosedCell": lambda: DISCLOSED_CELL,
    "AttributeTest": lambda: AttributeTest(
        3, 2, 0.05, 4, 3, 1, (0, 2), (DISCLOSED_CELL,), 6, 1, 5, "a"
    ),
    "GroupExposure": lambda: GROUP,
    "OutputFigures": lambda: OUTPUTS,
    "FitFigures": lambda: FIT,
    "RowSpaceFigures": lambda: ROW_SPACE,
    "KinkFigures": lambda: KINKS,
    "ExposedRecord": lambda: ExposedRecord(**exposure().rows()[0]),
    "ExposureSummary": lambda: exposure().summary(),
    "PublishedExposure": lambda: PublishedExposure(
        **vars(exposure().summary()), per_record=(ExposedRecord(**exposure().rows()[0]),)
    ),
    "Exposure": lambda: exposure(),
}


def exposure() -> Exposure:
    return Exposure(
        **vars(OUTPUTS),
        **vars(FIT),
        **vars(ROW_SPACE),
        **vars(KINKS),
        arch="mlp:3-1",
        surface="weights",
        task="binary",
        holdout=9,
        layers=("layers.0",),
        attacks="unmix",
        level=0.05,
        labels=torch.tensor([1, -1, 1]),
        groups=("odd", "even", "odd"),
        grouped_by="class",
        by_group=(GROUP,),
        score=MEAN,
        probability=MEAN,
        uncalibrated="probabilities were checked elsewhere",
        canaries=BOUND,
        found_ncc=MEAN,
        top=torch.arange(1),
        images=MEAN[None],
        informed=MEAN[None],
        nearest=MEAN[None],
        seconds=0.5,
        notes=("a",),
    )


OF_AUDITS: dict[str, Callable[[], Record]] = {  # a part of the records that an audit keeps
    "AttackPlan": lambda: AttackPlan(4, 2.5, True, "2 of 4 restarts ran", 2),
    "Batch": lambda: Batch("kkt", 2, 400, 1),
    "PositiveControls": lambda: PositiveControls(
        "membership",
        (ControlSize(40, (3,), 0, 0.2), ControlSize(20, (9,) * 10, 10, 0.01)),
        "trained on held-out samples",
        ("membership",),
    ),
    "Verdict": lambda: Verdict(
        "leak",
        ("why",),
        answers=(Answer("stored", "Are records stored?", "yes", "They are.", count=3, n=4),),
        grade="near-copy",
        grades={"near-copy": 3, "membership": 2},
        interval=(1.0, 3.5),
    ),
}


def test_every_record_has_an_example() -> None:
    packages = ("records", "networks", "surfaces", "scanning", "training", "attacks")
    homes = tuple(f"residuum.{package}." for package in packages)
    record_names = {
        name for name, kind in Record.record_types.items() if kind.__module__.startswith(homes)
    }
    assert record_names == set(RECORDS)


@pytest.mark.parametrize("name", [*RECORDS, *OF_AUDITS])
def test_round_trip(name: str, tmp_path: Path) -> None:
    record = {**RECORDS, **OF_AUDITS}[name]()
    assert type(record).__name__ == name
    path = record.save(tmp_path / "deep" / "record.safetensors")
    assert same(type(record).load(path), record)
    assert same(Record.load(path), record)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_equality_sees_every_bit() -> None:
    a = dataset()
    assert same(a, dataset())
    assert not same(a, a.replace(x=a.x.float()))
    assert not same(a, a.replace(y=-a.y))
    assert not same(a, a.replace(mean=None))
    assert not same(a, a.replace(classes=("even", "o")))
    assert not same((1, 2), [1, 2])
    assert not same({"a": 1}, {"a": 1, "b": 2})
    assert same(float("nan"), float("nan"))
    assert not same(1, 1.0)
    assert not same(torch.tensor([0.0]), torch.tensor([[0.0]]))


def test_tensors_of_equal_paths_stay_apart(tmp_path: Path) -> None:
    theta0: Any = {"a": {"b": torch.zeros(2)}, "a/b": torch.ones(2)}
    record = Knowledge(theta0=theta0)
    assert same(Knowledge.load(record.save(tmp_path / "k")), record)
    assert len(load_file(tmp_path / "k")) == 2


def test_a_record_of_another_class_is_refused(tmp_path: Path) -> None:
    path = dataset().save(tmp_path / "d")
    with pytest.raises(
        InputError, match="of the type Knowledge; it holds a record of the type Dataset"
    ):
        Knowledge.load(path)


def hostile(tree: object) -> bytes:
    text = tree if isinstance(tree, str) else json.dumps(tree)
    return save({"w": torch.ones(2)}, {METADATA_KEY: text})


DAMAGED = {
    "empty": b"",
    "noise": b"\x00" * 50,
    "no metadata": save({"w": torch.ones(2)}),
    "not json": hostile("{nonsense"),
    "deep": hostile("[" * 10_000),
    "unknown class": hostile({"$record": "os.system", "fields": {}}),
    "unknown field": hostile({"$record": "LayerResidual", "fields": {"nam": "a"}}),
    "fields a list": hostile({"$record": "LayerResidual", "fields": []}),
    "no tensor": hostile({"$record": "Knowledge", "fields": {"mean": {"$tensor": "gone"}}}),
    "pairs": hostile({"$record": "Knowledge", "fields": {"theta0": {"$dict": [[1, 2, 3]]}}}),
    "unhashable": hostile({"$record": "Knowledge", "fields": {"theta0": {"$dict": [[[], 2]]}}}),
    "truncated": hostile({"$record": "Knowledge", "fields": {}})[:-3],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_records_are_errors(name: str, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(DAMAGED[name])
    with pytest.raises(InputError, match="must hold a record of the type Knowledge"):
        Knowledge.load(tmp_path / "r")


def test_missing_record(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="FileNotFoundError"):
        Knowledge.load(tmp_path / "gone")


def test_what_a_record_cannot_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot hold a set"):
        Knowledge(theta0={"w": {1}}).save(tmp_path / "k")  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


# Files


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_alone(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_atomic(tmp_path / "f", "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(OutputError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_an_interrupt_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "f", b"new")
    assert os.listdir(tmp_path) == []


def test_writing_replaces_and_makes_folders(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "a" / "b" / "f", "one")
    assert write_atomic(path, b"two").read_bytes() == b"two"
    assert os.listdir(path.parent) == ["f"]


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for attempt in (
        lambda: make_directory(tmp_path / "file"),
        lambda: write_atomic(tmp_path / "file" / "f", "x"),
        lambda: dataset().save(tmp_path / "file" / "deep" / "f"),
        lambda: dataset().to_npz(tmp_path / "file" / "f"),
    ):
        with pytest.raises(OutputError, match="writable") as caught:
            attempt()
        assert caught.value.exit_code == 2
        assert "--out" in caught.value.remedy
    assert (tmp_path / "file").read_text() == "here"


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "f", {"a": float("nan")})
    assert os.listdir(tmp_path) == []
    assert json.loads(write_json(tmp_path / "f", {"a": [1, None]}).read_text()) == {"a": [1, None]}


def test_environment_and_hash(tmp_path: Path) -> None:
    versions = environment()
    assert versions["packages"]["torch"] == version("torch")
    assert json.loads(json.dumps(versions)) == versions
    path = write_atomic(tmp_path / "f", "abc")
    assert sha256(path).startswith("ba7816bf8f01cfea")


def test_the_environment_names_extras_only_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(name: str) -> str:
        if name in ("opacus", "ray", "kornia"):
            raise PackageNotFoundError(name)
        return version(name)

    # The packages are installed on the machine of the test.
    monkeypatch.setattr("residuum.records.rundir.version", bare)
    packages = environment()["packages"]
    assert packages["optuna"] == version("optuna")
    assert packages["kornia"] == "not installed"
    assert not {"opacus", "ray"} & packages.keys()


def test_what_is_missing_or_damaged_is_nothing(tmp_path: Path) -> None:
    for content in (None, "no JSON", "[1]"):
        if content is not None:
            (tmp_path / "f").write_text(content)
        assert read_json(tmp_path / "f") == {}
        assert Knowledge.load_or_none(tmp_path / "f") is None
    assert read_json(write_json(tmp_path / "j", {"a": 1})) == {"a": 1}
    knowledge = Knowledge(sample_count=3)
    assert same(Knowledge.load_or_none(knowledge.save(tmp_path / "k")), knowledge)


def test_errors_say_what_to_do_and_survive_pickling() -> None:
    error = DataError("Rule; got this.", "Do that.")
    assert str(error) == "Rule; got this. Do that."
    restored = pickle.loads(pickle.dumps(error))
    assert (type(restored), restored.message, restored.remedy) == (
        DataError,
        error.message,
        error.remedy,
    )
    codes = {ResiduumError: 70, InputError: 2, DataError: 2, OutputError: 2}
    codes |= {InconclusiveError: 3, UnsafeFileError: 4}
    assert {kind: kind.exit_code for kind in codes} == codes
    assert (
        did_you_mean("minst", ["mnist", "digits"]) == "Did you mean 'mnist'? Known: digits, mnist."
    )
    assert did_you_mean("q", ["mnist"]) == "Known: mnist."


# Knowledge


def test_every_known_fact_has_a_provenance() -> None:
    knowledge = Knowledge(shape=(3,), sample_count=4, mean=MEAN, provenance={"mean": "train"})
    assert knowledge.known_names == ("shape", "mean", "sample_count")
    assert knowledge.provenance == {"shape": "user", "mean": "train", "sample_count": "user"}
    assert Knowledge().known_names == ()
    assert Knowledge().provenance == {}
    assert Knowledge(weight_decay=0.0).known_names == ("weight_decay",)


@pytest.mark.parametrize(
    "values",
    [
        {"provenance": {"mean": "user"}},
        {"shape": (3,), "provenance": {"mean": "user"}},
        {"shape": (3,), "provenance": {"shape": "rumour"}},
        {"shape": (3,), "provenance": {"provenance": "user"}},
        {"value_range": (1.0, 0.0)},
        {"value_range": (0.0, 0.0)},
        {"value_range": (0.0, float("nan"))},
    ],
)
def test_knowledge_that_contradicts_itself(values: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Knowledge(**values)


# Data files


def write_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_npz_round_trip(tmp_path: Path) -> None:
    for data in (dataset("d"), dataset("d").replace(mean=None, classes=())):
        loaded = Dataset.from_npz(data.to_npz(tmp_path / "d.npz"))
        assert same(loaded, data)
    assert torch.equal(dataset().images, dataset().x + MEAN)
    assert same(dataset().replace(mean=None).images, dataset().x)
    regression = dataset("d").replace(y=torch.randn(4, 2))
    assert same(Dataset.from_npz(regression.to_npz(tmp_path / "d.npz")), regression)


def test_numbers_of_every_kind(tmp_path: Path) -> None:
    x, y = np.arange(6).reshape(2, 3), np.array([0, 1])
    for dtype in (np.uint8, np.int64, np.bool_, ">i4", ">f8", np.longdouble, np.float16, np.uint64):
        loaded = Dataset.from_npz(write_npz(tmp_path / "d.npz", x=x.astype(dtype), y=y))
        expected = x.astype(dtype).astype(np.float64)
        assert loaded.x.is_floating_point()
        assert np.array_equal(loaded.x.double().numpy(), expected), dtype
    assert Dataset.from_npz(write_npz(tmp_path / "d.npz", x=x, y=y, mean=2.0)).mean == 2


X, Y = np.ones((2, 3)), np.array([0, 1])
BAD_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "no y": ({"x": X}, r"lacks \['y'\]"),
    "empty": ({"x": np.zeros((0, 3)), "y": np.zeros(0)}, "empty"),
    "unequal": ({"x": X, "y": np.zeros(3)}, "same number of rows"),
    "vector": ({"x": np.ones(2), "y": Y}, "must have one row"),
    "scalar y": ({"x": X, "y": np.array(1)}, r"'y' the shape \(\)"),
    "text labels": ({"x": X, "y": np.array(["a", "b"])}, "'y' must hold finite numbers"),
    "text samples": ({"x": np.array([["a"], ["b"]]), "y": Y}, "'x' must hold finite numbers"),
    "nan": ({"x": np.full((2, 3), np.nan), "y": Y}, "'x' must hold finite"),
    "inf": ({"x": np.full((2, 3), np.inf), "y": Y}, "'x' must hold finite"),
    "nan labels": ({"x": X, "y": np.array([np.nan, 1])}, "'y' must hold finite"),
    "nan mean": ({"x": X, "y": Y, "mean": np.full(3, np.nan)}, "'mean' must hold finite"),
    "mean shape": ({"x": X, "y": Y, "mean": np.ones(2)}, "must have the shape of a sample"),
    "complex": ({"x": X * 1j, "y": Y}, "real numbers"),
    "bytes": ({"x": X, "y": np.array([b"a", b"b"])}, "real numbers"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_arrays_that_are_no_dataset(name: str, tmp_path: Path) -> None:
    arrays, words = BAD_ARRAYS[name]
    with pytest.raises(DataError, match=words) as caught:
        Dataset.from_npz(write_npz(tmp_path / "d.npz", **arrays))
    assert caught.value.remedy


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_pickled_arrays_are_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = write_npz(tmp_path / "d.npz", x=np.array([Payload(marker)], dtype=object), y=Y)
    with pytest.raises(DataError, match="'x' has the type object"):
        Dataset.from_npz(path)
    assert not marker.exists()


def test_an_archive_may_not_claim_too_much(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(10**6))
    assert path.stat().st_size < 5000
    with pytest.raises(UnsafeFileError, match="unpacks to 1000000") as caught:
        read_npz(path, max_bytes=10**6 - 1)
    assert caught.value.exit_code == 4


def member(shape: str, data: bytes = b"") -> bytes:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


@pytest.mark.parametrize(
    "content",
    [
        member("(1000000000000,)"),
        member("(4611686018427387904, 4)"),
        member("(2, 3)", bytes(16)),
        member("(-1,)"),
        member("(True,"),
        member("__import__('os')"),
        b"plain text",
        b"",
    ],
)
def test_members_that_are_no_arrays(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", content)
        archive.writestr("y.npy", member("(1,)", bytes(8)))
    with pytest.raises(DataError):
        Dataset.from_npz(path)


def valid_npz() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=np.arange(60.0).reshape(10, 6), y=np.arange(10) % 2, mean=0.5)
    return buffer.getvalue()


VALID = valid_npz()


def test_truncated_archives(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    for end in (0, 1, 30, len(VALID) // 2, len(VALID) - 30, len(VALID) - 1):
        path.write_bytes(VALID[:end])
        with pytest.raises(DataError):
            Dataset.from_npz(path)
    for missing in (tmp_path / "gone.npz", tmp_path):
        with pytest.raises(DataError):
            Dataset.from_npz(missing)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1))
def test_mutated_archives_raise_only_our_errors(
    changes: list[tuple[int, int]], tmp_path: Path
) -> None:
    content = bytearray(VALID)
    for position, byte in changes:
        content[position] = byte
    (tmp_path / "d.npz").write_bytes(content)
    outcome = read_or_error(tmp_path / "d.npz")
    if isinstance(outcome, ResiduumError):
        assert outcome.exit_code in (2, 4)
    else:
        assert len(outcome.x) == len(outcome.y)
        assert torch.isfinite(outcome.x).all()


def read_or_error(path: Path) -> Dataset | ResiduumError:
    try:
        return Dataset.from_npz(path)
    except ResiduumError as problem:
        return problem


def test_the_digest_tells_runs_apart_by_value_and_order() -> None:
    x = torch.tensor([1.0, 2.0])
    same_values = (digest({"a": 1, "b": 2}, x), digest({"b": 2, "a": 1}, x.double()))
    assert same_values[0] == same_values[1]
    other_digests = (
        digest({"a": 1, "b": 3}, x),
        digest({"a": 1, "b": 2}, x.flip(0)),
        digest(x, {"a": 1}),
    )
    assert len({same_values[0], *other_digests}) == 4


def test_knowledge_is_distinguished_by_every_fact_and_its_source() -> None:
    granted = Knowledge(shape=(2,), value_range=(0.0, 1.0), mean=torch.zeros(2))
    changed = (
        granted.replace(mean=torch.ones(2)),
        granted.replace(value_range=(0.0, 2.0)),
        granted.replace(provenance={"mean": "train"}),
        granted.replace(theta0={"w": torch.ones(1)}),
    )
    assert len({granted.digest, *(changed_knowledge.digest for changed_knowledge in changed)}) == 5
    assert granted.replace(mean=torch.zeros(2)).digest == granted.digest
