"""The examples run, and show what they say they show."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT, ignore_the_clock


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def test_every_example_is_tried() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names == {"audit_digits", "other_training_sets", "own_network"}


def test_a_trained_network_leaks_and_one_never_trained_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_the_clock(monkeypatch)
    found = example("audit_digits").main(["--out", str(tmp_path)])
    assert found["trained"].verdict.outcome == "leak"
    assert found["never trained"].verdict.outcome == "inconclusive"
    for name in ("trained", "never-trained"):
        assert (tmp_path / name / "report.html").stat().st_size > 10_000


def test_a_network_of_ones_own_is_recognised_and_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_the_clock(monkeypatch)
    found = example("own_network").main(["--training-steps", "1500", "--out", str(tmp_path)])
    assert found.checkpoint.arch == "mlp:64-100-1"
    assert found.inspection.directions is None
    assert "initialisation is visible" in found.inspection.directions_of  # PyTorch's own
    assert found.knowledge.granted == ("shape", "value_range", "mean")
    published = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["verdict"]
    assert (published["n"], published["outcome"]) == (30, found.verdict.outcome)


def test_other_training_sets_explain_the_weights_and_random_ones_do_not() -> None:
    found = example("other_training_sets").main(["--steps", "300"])
    assert found.other == pytest.approx(found.true, rel=1e-6)
    assert found.distance > 10
    assert found.beyond > 1.5 * found.true
    assert found.sizes[1] == 2 * found.sizes[0]
