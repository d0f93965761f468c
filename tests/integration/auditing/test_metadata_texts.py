"""Sentences out of a file's metadata are marked as the file's own wherever they appear."""

from __future__ import annotations

import html
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from residuum.cli.main import main
from residuum.io.checkpoints import load_checkpoint, save_checkpoint
from residuum.networks import Architecture
from tests.program import Capture

ARCH = "mlp:4-6-1"
CLAIM = "Trained with DP-SGD, epsilon 0.1"
PREFIX = "The file's metadata says (not checked): "


def release(path: Path, texts: list[str]) -> Path:
    theta = {
        name: t.contiguous() for name, t in Architecture.parse(ARCH).build().state_dict().items()
    }
    metadata = {"residuum_format": "1", "architecture": ARCH, "assumptions": json.dumps(texts)}
    save_file(theta, path, metadata)
    return path


def unattributed(text: str) -> list[str]:
    """The text before each claim that does not follow the prefix."""
    segments = " ".join(html.unescape(text).replace("\\", "").split()).split(CLAIM)
    return [segment[-80:] for segment in segments[:-1] if not segment.endswith(PREFIX)]


def test_every_part_of_an_audit_says_whose_sentence_it_is(tmp_path: Path, capsys: Capture) -> None:
    path, out = release(tmp_path / "m.safetensors", [CLAIM]), tmp_path / "run"
    random = np.random.default_rng(0)
    for name, count in (("train", 8), ("hold", 120)):
        x = random.normal(size=(count, 4))
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.where(x[:, 0] > 0, 1.0, -1.0))
    data = ["--data", str(tmp_path / "train.npz"), "--holdout", str(tmp_path / "hold.npz")]
    limits = ["--steps", "2", "--effort", "quick"]
    assert main(["audit", str(path), *data, *limits, "--out", str(out), "--explain"]) in (0, 1, 3)
    captured = capsys.readouterr()
    texts = {"terminal": captured.out + captured.err}
    texts |= {
        file.name: file.read_text("utf-8")
        for file in out.rglob("*")
        if file.suffix in (".json", ".md", ".html", ".toml", ".sarif", ".txt")
    }
    assert main(["scan", str(path)]) == 0
    texts["scan"] = capsys.readouterr().out
    assert sum(CLAIM in " ".join(text.split()) for text in texts.values()) >= 4
    assert {name: lines for name, text in texts.items() if (lines := unattributed(text))} == {}


def test_ten_sentences_are_kept_and_the_rest_is_counted(tmp_path: Path) -> None:
    path = release(tmp_path / "m.safetensors", [f"{CLAIM} {i}" for i in range(500)])
    assumptions = load_checkpoint(path).assumptions
    assert assumptions[:10] == tuple(f"{PREFIX}{CLAIM} {i}" for i in range(10))
    assert len(assumptions) == 11
    assert "490 more sentences, which are omitted" in assumptions[10]


def test_a_sentence_is_attributed_once_however_often_it_is_saved(tmp_path: Path) -> None:
    path = release(tmp_path / "m.safetensors", [CLAIM])
    for _ in range(3):
        path = save_checkpoint(load_checkpoint(path), tmp_path / "again.safetensors")
    assert load_checkpoint(path).assumptions == (PREFIX + CLAIM,)


@pytest.mark.parametrize("activation", ["", ",activation=relu"])
def test_what_residuum_itself_assumed_is_not_attributed(tmp_path: Path, activation: str) -> None:
    torch.save(Architecture.parse(ARCH).build().state_dict(), tmp_path / "m.pt")
    assumed = load_checkpoint(tmp_path / "m.pt")
    path = save_checkpoint(assumed, tmp_path / "m.safetensors")
    expected = () if activation else assumed.assumptions
    assert load_checkpoint(path, ARCH + activation).assumptions == expected
