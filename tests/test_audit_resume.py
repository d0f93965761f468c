"""An audit that is interrupted at any stage ends, when it is started again, as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import residuum as rs
from residuum.auditing.budget import Batch
from residuum.auditing.listener import SILENT, AuditListener
from residuum.auditing.run import STAGES
from residuum.cli.main import main
from residuum.errors import InputError
from tests.victims import write

TIMES = ("created", "seconds", "spent", "budget_needed")


class InterruptAt(AuditListener):
    """Interrupts an audit when a stage begins."""

    def __init__(self, stage: str) -> None:
        self.name = stage

    def stage(self, name: str) -> None:
        if name == self.name:
            raise KeyboardInterrupt


def without_times(value: Any) -> Any:
    """The content of ``result.json`` without times, and without hashes of files that hold times."""
    if isinstance(value, dict):
        return {
            key: without_times(item)
            for key, item in value.items()
            if key != "artifacts" and not any(word in key for word in TIMES)
        }
    if isinstance(value, list):
        return [without_times(item) for item in value if " took " not in str(item)]
    return value


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files and settings of an audit that reaches its positive controls."""
    folder = tmp_path_factory.mktemp("inputs")
    write(folder, "tight")
    return {
        "model": folder / "model.safetensors",
        "data": folder / "train.npz",
        "holdout": folder / "test.npz",
        "knowledge": {"value_range": "0,1", "mean": "train"},
        "batches": [Batch("binary-kkt", 4, 400, 0)],
        "steps": 400,
        "budget": "58s",
        "baselines": False,
    }


@pytest.fixture(scope="module")
def uninterrupted(inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of an audit without an interruption."""
    out = tmp_path_factory.mktemp("whole") / "run"
    result = rs.audit(**inputs, out=out)
    assert [*result.seconds] == [stage.name for stage in STAGES if stage.name != "stored records"]
    return without_times(json.loads((out / "result.json").read_text()))


def test_an_audit_interrupted_at_every_stage_ends_with_the_same_result(
    inputs: dict[str, Any], uninterrupted: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for stage in STAGES[1:]:
        with pytest.raises(KeyboardInterrupt):
            rs.audit(**inputs, out=out, listener=InterruptAt(stage.name))
    begun: list[str] = []

    class Names(AuditListener):
        def stage(self, name: str) -> None:
            begun.append(name)

    result = rs.audit(**inputs, out=out, listener=Names())
    assert begun == [*result.seconds]
    assert without_times(json.loads((out / "result.json").read_text())) == uninterrupted
    assert not (out / "work").exists()


def test_the_command_line_continues_an_audit_from_python(
    inputs: dict[str, Any], uninterrupted: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        rs.audit(**inputs, out=out, listener=InterruptAt("scores"))
    kept = sorted(path.name for path in (out / "work").glob("stage-*"))
    assert kept == ["stage-attacks.safetensors", "stage-negative-controls.safetensors"]
    config = tmp_path / "batches.toml"
    config.write_text('[[batches]]\nattack = "binary-kkt"\nrestarts = 4\nsteps = 400\nseed = 0\n')
    code = main(
        [
            *("audit", str(inputs["model"]), "--config", str(config), "--out", str(out), "--quiet"),
            *("--data", str(inputs["data"]), "--holdout", str(inputs["holdout"])),
            *("--value-range", "0,1", "--mean", "train", "--steps", "400", "--budget", "58s"),
            "--no-baselines",
        ]
    )
    result = json.loads((out / "result.json").read_text())
    assert without_times(result) == uninterrupted
    assert code == rs.AuditResult.load(out).exit_code


def test_a_finished_audit_is_returned_and_another_one_refused(
    inputs: dict[str, Any], tmp_path: Path
) -> None:
    quick = {**inputs, "batches": [Batch("binary-kkt", 1, 20, 0)], "twin": False, "subsets": 200}
    first = rs.audit(**quick, out=tmp_path / "run")
    again = rs.audit(**quick, out=tmp_path / "run", listener=InterruptAt("attacks"))
    assert again.created == first.created
    with pytest.raises(InputError, match="other settings or inputs"):
        rs.audit(**{**quick, "seed": 1}, out=tmp_path / "run", listener=SILENT)


def test_samples_in_memory_are_told_apart(inputs: dict[str, Any], tmp_path: Path) -> None:
    """An audit of arrays has no files to hash. Its run directory still refuses other samples."""
    quick = {**inputs, "batches": [Batch("binary-kkt", 1, 20, 0)], "twin": False, "subsets": 200}
    train = rs.Dataset.from_npz(inputs["data"])
    rs.audit(**{**quick, "data": train}, out=tmp_path / "run")
    fewer = train.take(range(len(train) - 1))
    with pytest.raises(InputError, match="data_digest"):
        rs.audit(**{**quick, "data": fewer}, out=tmp_path / "run")
