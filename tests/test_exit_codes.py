"""Exit code 4 is for files that would run code or exhaust memory. Other formats end in exit code 2."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from torch import nn

from residuum.cli.main import main
from tests.program import Capture

X, Y = np.random.default_rng(0).normal(size=(20, 4)), np.arange(20) % 2


def archive(compression: int, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as members_of:
        for name, content in members.items():
            members_of.writestr(name, content)
    return buffer.getvalue()


def arrays(save: Callable[..., None], **values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **values)
    return buffer.getvalue()


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def script() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(nn.Linear(4, 1), torch.ones(1, 4)), buffer)
    return buffer.getvalue()


def quantized() -> bytes:
    weight = torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8)
    return saved({"0.weight": weight, "0.scale": torch.tensor(0.1), "0.dtype": torch.qint8})


KERAS = {"metadata.json": b"{}", "config.json": b"{}", "model.weights.h5": bytes(50_000)}
SKOPS = {"schema.json": b"{}", "140.npy": bytes(50_000)}
# name of the file -> its content, a word of the refusal, and the exit code of the scan
FILES: dict[str, tuple[Callable[[], bytes], str, int]] = {
    "logistic.pkl": (lambda: pickle.dumps(LogisticRegression().fit(X, Y)), "LogisticRegression", 0),
    "forest.pkl": (lambda: pickle.dumps(RandomForestClassifier(3).fit(X, Y)), "no attack", 0),
    "data.npz": (lambda: arrays(np.savez, x=X), "archive of arrays", 2),
    "packed.npz": (lambda: arrays(np.savez_compressed, x=np.zeros((900, 900))), "--data", 2),
    "tree.npz": (lambda: arrays(np.savez_compressed, **{"layer/weight": X}), "safetensors", 2),
    "m.keras": (lambda: archive(zipfile.ZIP_DEFLATED, **KERAS), "Keras", 2),
    "m.skops": (lambda: archive(zipfile.ZIP_DEFLATED, **SKOPS), "skops", 2),
    "rezipped.pt": (lambda: archive(8, **{"a/data.pkl": b"\x80\x02}." * 20}), "uncompressed", 2),
    "int8.pt": (quantized, "quantized", 0),
    "flax.msgpack": (lambda: b"\x81\xa6params\x81\xa1w\xc4\x04abcd", "safetensors", 2),
    "whole.pt": (lambda: saved(nn.Sequential(nn.Linear(4, 1))), "Sequential", 0),
    "script.pt": (script, "TorchScript", 0),
    "list.pkl": (lambda: pickle.dumps([1, 2]), "torch.save", 0),
    "frame.json": (lambda: json.dumps({"data": {"a": 1}}).replace(" ", "").encode(), "complete", 2),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FILES)
def test_formats_that_are_not_read_end_in_exit_code_2(
    tmp_path: Path, name: str, capsys: Capture
) -> None:
    make, word, scanned = FILES[name]
    (tmp_path / name).write_bytes(make())
    np.savez(tmp_path / "data-of-it.npz", x=X, y=Y)
    data = ["--data", str(tmp_path / "data-of-it.npz"), "--out", str(tmp_path / "run")]
    for command in (["attack", "--dry-run"], ["audit", *data]):
        assert main([command[0], str(tmp_path / name), *command[1:]]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert word in error
        assert "residuum scan" not in error
    assert main(["scan", str(tmp_path / name)]) == scanned


@pytest.mark.parametrize("name", ["m.pt", "m.pkl"])
def test_a_module_with_an_unknown_call_ends_in_exit_code_4(
    tmp_path: Path, name: str, capsys: Capture
) -> None:
    model = nn.Linear(4, 1)
    model.note = io.StringIO  # a class of the standard library that no list names
    (tmp_path / name).write_bytes(saved(model) if name == "m.pt" else pickle.dumps(model))
    for command in (["attack", "--dry-run"], ["scan"]):
        assert main([*command, str(tmp_path / name)]) == 4
        captured = capsys.readouterr()
        assert "_io.StringIO" in captured.err + captured.out
