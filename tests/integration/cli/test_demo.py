"""The demo: two audits side by side, one of a network that leaks and one that holds nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from residuum.cli import demo
from residuum.cli.main import main
from tests.program import listing

SMALL = {
    "ARCH": "mlp:64-60-60-1",
    "SAMPLES": 30,
    "STEPS": 1500,
    "RESTARTS": 2,
    "ATTACK_STEPS": 500,
    "PHOTO_ARCH": "mlp:3072-40-40-1",
    "PHOTOS": 10,
    "PHOTO_STEPS": 120,
}


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that still leaks, in a tenth of the time. The demo has no options for its sizes."""
    for name, value in SMALL.items():
        monkeypatch.setattr(demo, name, value)


def test_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shrink(monkeypatch)
    out = tmp_path / "new" / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    output = capsys.readouterr().out
    for words in (
        "KKT residual, Clarke",
        "held-out",
        "digits recovered",
        "expected by chance",
        "never trained",
        "mean (train)",
    ):
        assert words in output
    assert output.splitlines()[-1] == f"report: {out / 'trained' / 'report.html'}"
    assert main(["demo", "--out", str(out), "--json"]) == 0  # again: the same audits, shown again
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((out / "demo.json").read_text())
    trained, control = document["trained"], document["untrained"]
    assert trained["verdict"]["outcome"] == "leak"
    assert control["verdict"]["outcome"] == "inconclusive"
    residuals = [section["attacks"][0]["residual"] for section in (trained, control)]
    assert residuals[0] < residuals[1]
    plain = [
        section["residual_plain"]
        for section in (trained["certificate"], document["certificate_holdout"])
    ]
    assert plain[0] < plain[1]
    photos = document["photos"]
    assert photos["trained"]["recovered"] >= 3 > photos["untrained"]["recovered"]
    assert photos["trained"]["p_value"] <= 0.01 < photos["untrained"]["p_value"]
    assert {
        "demo.json",
        "reconstructions.png",
        "photos.png",
        "trained/report.html",
        "untrained/report.html",
    } <= {*listing(out)}
    assert (out / "reconstructions.png").read_bytes().startswith(b"\x89PNG")


def test_a_demo_that_shows_something_else_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shrink(monkeypatch)
    # The demo has no options for its sizes.
    monkeypatch.setattr(demo, "ATTACK_STEPS", 1)
    monkeypatch.setattr(demo, "STEPS", 20)
    assert main(["demo", "--out", str(tmp_path / "d"), "--quiet"]) == 3
    assert (
        "must find a leak in the trained network and no leak in the untrained network"
        in capsys.readouterr().err
    )


def test_demo_refuses_a_place_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shrink(monkeypatch)
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--out" in err
