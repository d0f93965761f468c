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


@pytest.fixture(scope="module")
def memorizing(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that audits a network of which members can be named, and nothing reconstructed."""
    folder = tmp_path_factory.mktemp("memorizing")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(350, 6, generator=generator)
    y = torch.randint(0, 2, (350,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 60), nn.ReLU(), nn.Linear(60, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.softplus(-(2.0 * y[:30] - 1) * model(x[:30])[:, 0]).mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), folder / "m.pt")
    for name, rows in (("train", slice(0, 30)), ("test", slice(30, 350))):
        np.savez(folder / f"{name}.npz", x=x[rows], y=y[rows])
    files = [str(folder / name) for name in ("m.pt", "train.npz", "test.npz")]
    options = ["--effort", "quick", "--steps", "2", "--no-baselines", "--subsets", "200", "--quiet"]
    return ["audit", files[0], "--data", files[1], "--holdout", files[2], *options]


@pytest.mark.parametrize(
    ("options", "outcome", "code"),
    [
        ([], "leak", 1),
        (["--fail-on", "near-copy"], "inconclusive", 3),  # the effort quick clears nothing
        (["--fail-on", "near-copy", "--fail-on", "named>=3"], "inconclusive", 1),
        (["--fail-on", "named>=31"], "leak", 0),
        (["--exit-zero"], "leak", 0),
    ],
)
def test_exit_codes_of_an_audit(
    memorizing: list[str], tmp_path: Path, options: list[str], outcome: str, code: int
) -> None:
    assert main([*memorizing, *options, "--out", str(tmp_path / "run")]) == code
    verdict = json.loads((tmp_path / "run" / "result.json").read_text())["verdict"]
    assert (verdict["grade"], verdict["outcome"]) == ("membership", outcome)
