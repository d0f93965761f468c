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
    assert names == {"any_network", "audit_digits", "other_training_sets", "own_network"}


READ = {  # of every kind, as what; a word of the refusal where it is refused
    "a": ["mlp:64-48-24-10,bias=all", "mlp:64-48-24-10,bias=all", "which residuum does not read"],
    "b": ["module:1x8x8-10,class=CNN", "--model package.module:factory"],
    "b'": ["convnet:1x8x8-6-12-10,bias=all"],
    "c": ["module:1x8x8-10,class=CNN"],
    "d": ["module:1x8x8-10,class=Sequential"],
    "e": ["mlp:30-32-2,bias=all", "mlp:10-32-1,bias=all"],
    "f": ["mlp:64-48-10,bias=all"],
    "g": ["mlp:64-48-24-10,bias=all", "mlp:64-48-24-10,bias=all"],
    "h": ["an adapter"],
    "i": ["mlp:64-48-24-10,bias=all"],
    "j": ["mlp:64-48-24-10,bias=all"],
    "k": ["takes whole numbers", "module:16x12-10,class=Behind"],
    "l": [
        f"mlp:64-48-24-10,bias=all,activation={name}"
        for name in ("gelu", "silu", "leaky_relu", "tanh")
        for _ in range(2)
    ],
    "m": ["mlp:64-48-24-10,bias=all"],
    "n": ["TorchScript"],
}


@pytest.mark.filterwarnings(
    "ignore"
)  # scikit-learn's, of too few epochs; TorchScript's, of its age
def test_every_kind_of_network_is_attacked_or_refused_with_the_reason_and_none_is_another() -> None:
    rows = example("any_network").main(["--quick", "--epochs", "2"])
    rows_of_kind = {kind: [row for row in rows if row[0] == kind] for kind in READ}
    assert sum(map(len, rows_of_kind.values())) == len(rows)
    for kind, expected in READ.items():
        for (_, _, read, ended), word in zip(rows_of_kind[kind], expected, strict=True):
            if ":" in word and not word.startswith("--"):
                assert read == word
                assert "loss" in ended
            else:
                assert word in read
                assert ended.startswith("refused")
                # The advice works.
                assert "as advised" in ended or kind == "k"
    assert rows_of_kind["e"][1][3].startswith("weight-decay")


@pytest.mark.filterwarnings("ignore")
def test_a_network_with_batch_norm_is_audited_to_a_verdict() -> None:
    short = ["--only", "c", "--epochs", "3", "--steps", "2"]
    ((_, _, read, ended),) = example("any_network").main(short)
    assert read == "module:1x8x8-10,class=CNN"
    assert ended.startswith("inconclusive, AUC of the losses 0.")


def test_a_trained_network_leaks_and_one_never_trained_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_the_clock(monkeypatch)
    result = example("audit_digits").main(["--out", str(tmp_path)])
    assert result["trained"].verdict.outcome == "leak"
    assert result["never trained"].verdict.outcome == "inconclusive"
    for name in ("trained", "never-trained"):
        assert (tmp_path / name / "report.html").stat().st_size > 10_000


def test_a_network_of_ones_own_is_recognized_and_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_the_clock(monkeypatch)
    result = example("own_network").main(["--training-steps", "1500", "--out", str(tmp_path)])
    assert result.checkpoint.arch == "mlp:64-100-1"
    assert result.inspection.directions is None
    assert "initialization is visible" in result.inspection.directions_of  # PyTorch's own
    assert result.knowledge.known_names == ("shape", "value_range", "mean")
    published = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["verdict"]
    assert (published["n"], published["outcome"]) == (30, result.verdict.outcome)


def test_other_training_sets_explain_the_weights_and_random_ones_do_not() -> None:
    result = example("other_training_sets").main(["--steps", "300"])
    assert result.other == pytest.approx(result.true, rel=1e-6)
    assert result.distance > 10
    assert result.beyond > 1.5 * result.true
    assert result.sizes[1] == 2 * result.sizes[0]
