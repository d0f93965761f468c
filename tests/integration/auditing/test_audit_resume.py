"""An audit that is interrupted at any stage ends, when it is started again, as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import residuum as rs
from residuum.auditing.listener import SILENT, AuditListener
from residuum.auditing.run import STAGES
from residuum.cli.main import main
from residuum.errors import InputError

TIMES = ("created", "seconds")
KKT = {"attack": "kkt", "steps": 20, "restarts": 1}
# The file stores no records, and no training sample is named as a member.
SKIPPED = ("stored records", "attributes")
QUICK = {"effort": "quick", "attacks": [KKT]}


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


def save_table(path: Path, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Write samples of six columns, whose sum gives the label, and return them."""
    x = torch.rand(count, 6, generator=torch.Generator().manual_seed(seed))
    y = (x.sum(1) > 3).long()
    np.savez(path, x=x.numpy(), y=y.numpy())
    return x, y


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files of an audit that reaches its positive controls: a network that does not memorize."""
    folder = tmp_path_factory.mktemp("inputs")
    x, y = save_table(folder / "train.npz", 30, 0)
    save_table(folder / "test.npz", 400, 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y.float()).backward()
        optimizer.step()
    torch.save(model.state_dict(), folder / "model.pt")
    return {
        "model": folder / "model.pt",
        "data": folder / "train.npz",
        "holdout": folder / "test.npz",
        "knowledge": {"value_range": "0,1"},
        "baselines": False,
        "subsets": 200,
    }


@pytest.fixture(scope="module")
def uninterrupted(inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of an audit without an interruption."""
    out = tmp_path_factory.mktemp("whole") / "run"
    result = rs.audit(**inputs, out=out)
    assert [*result.seconds] == [stage.name for stage in STAGES if stage.name not in SKIPPED]
    assert len(result.checks.positive_controls) == 2
    return without_times(json.loads((out / "result.json").read_text()))


def test_an_audit_interrupted_at_every_stage_ends_with_the_same_result(
    inputs: dict[str, Any], uninterrupted: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for stage in STAGES:
        if stage.name in SKIPPED:
            continue
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
    stored_files = sorted(path.name for path in (out / "work").glob("stage-*"))
    assert stored_files == [
        f"stage-{name}.safetensors" for name in ("attacks", "membership", "negative-controls")
    ]
    code = main(
        [
            *("audit", str(inputs["model"]), "--out", str(out), "--quiet"),
            *("--data", str(inputs["data"]), "--holdout", str(inputs["holdout"])),
            *("--value-range", "0,1", "--subsets", "200", "--no-baselines"),
        ]
    )
    result = json.loads((out / "result.json").read_text())
    assert without_times(result) == uninterrupted
    assert code == rs.AuditResult.load(out).exit_code


def test_a_finished_audit_is_returned_and_another_one_refused(
    inputs: dict[str, Any], tmp_path: Path
) -> None:
    quick = {**inputs, **QUICK}
    first = rs.audit(**quick, out=tmp_path / "run")
    repeated = rs.audit(**quick, out=tmp_path / "run", listener=InterruptAt("attacks"))
    assert repeated.created == first.created
    with pytest.raises(InputError, match="other settings or inputs"):
        rs.audit(**{**quick, "seed": 1}, out=tmp_path / "run", listener=SILENT)


def test_samples_in_memory_are_distinguished(inputs: dict[str, Any], tmp_path: Path) -> None:
    """An audit of arrays has no files to hash. Its run directory still refuses other samples."""
    quick = {**inputs, **QUICK}
    train = rs.Dataset.from_npz(inputs["data"])
    rs.audit(**{**quick, "data": train}, out=tmp_path / "run")
    fewer = train.take(range(len(train) - 1))
    with pytest.raises(InputError, match="data_digest"):
        rs.audit(**{**quick, "data": fewer}, out=tmp_path / "run")
