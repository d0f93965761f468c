"""What ``residuum audit`` prints at 80 columns, for every kind of release: a screen, no name broken."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from torch import nn

import residuum as rs
from residuum.auditing.result import SUITE, AuditResult
from residuum.auditing.verdict import EXIT_CODES
from residuum.cli.audit import show
from residuum.cli.main import main
from residuum.networks import Architecture
from residuum.stationarity import parameters
from residuum.training import initialize
from tests import pages
from tests.program import Capture
from tests.unit.auditing.test_first_screen import unexplained

WIDTH, LINES = 80, 40
OPENING = 12  # lines at most, before an audit begins
QUICK = ["--budget", "0.2s", "--steps", "3", "--subsets", "200"]
SAMPLES = ["--data", "train.npz", "--holdout", "test.npz"]
MEAN = ["--mean", "0.3", "--mean-provenance", "holdout"]
DIGITS = ["--data", "digits.npz", "--holdout", "digits-test.npz"]
CODE = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(27, 1),
    )
"""
# What is released and how it is audited: every way in which an audit differs.
KINDS = {
    "flat": ["flat.pt", *SAMPLES, "--shape", "1,8,8", "--value-range", "0,1", *MEAN],
    "without samples": ["flat.pt"],
    "not held out": ["flat.pt", "--data", "train.npz", "--holdout", "train.npz"],
    "regression": ["flat.pt", *SAMPLES, "--task", "regression", "--weight-decay", "0.01"],
    "multiclass": ["digits.pt", *DIGITS],
    "convnet": ["convnet.pt", "--arch", "convnet:1x8x8-3-4-1,bias=none", *SAMPLES],
    "polynomial": ["polynomial.safetensors", *SAMPLES],
    "module": ["module.pt", "--model", "my_network:build", "--trust-code", *SAMPLES],
    "optimizer state": ["saved.pt", *SAMPLES],
    "fine-tuned": ["flat.pt", "--base", "base.pt", *SAMPLES],
    "head": ["head.pt", "--base", "base.pt", *SAMPLES],
    "adapter": ["base.pt", "--adapter", "adapter_model.safetensors", *SAMPLES],
    "scikit-learn": ["model.pkl", *DIGITS],
    "stored records": ["neighbors.pkl", *DIGITS],
    "table": ["table.pt", "--data", "train.csv", "--holdout", "test.csv"],
}


def trained(
    model: nn.Module, x: Any, y: Any, model_parts: nn.Module | None = None
) -> dict[str, Any]:
    """The state of the optimizer, after a few steps of ``parts`` on labels +-1."""
    optimizer = torch.optim.SGD((model_parts or model).parameters(), 0.1, 0.9)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.softplus(-y * model(x)[:, 0]).mean().backward()
        optimizer.step()
    return optimizer.state_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every kind of release with its samples, the working folder while they are audited."""
    here, before = tmp_path_factory.mktemp("kinds"), Path.cwd()
    os.chdir(here)
    torch.manual_seed(0)
    images, digit = load_digits(return_X_y=True)
    images, sign = images.astype(np.float32) / 16, np.where(digit % 2, 1.0, -1.0)
    slices = {"": slice(0, 20), "-test": slice(20, 170)}
    for name, rows in slices.items():
        np.savez(f"digits{name}.npz", x=images[rows], y=digit[rows])
        np.savez(f"{name[1:] or 'train'}.npz", x=images[rows], y=sign[rows])
        lines = [",".join([*(f"column {i}" for i in range(8)), "label"])]
        lines += [",".join(map(str, [*images[i, 24:32], digit[i] % 2])) for i in range(170)[rows]]
        Path(f"{name[1:] or 'train'}.csv").write_text("\n".join(lines) + "\n")
    x, y = torch.from_numpy(images[:20]), torch.from_numpy(sign[:20])
    base = nn.Sequential(
        nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 1)
    )
    flat, head = copy.deepcopy(base), copy.deepcopy(base)
    state = trained(flat, x, y)
    trained(head, x, y, head[2:])
    torch.save({"model": flat.state_dict(), "optimizer": state}, "saved.pt")
    lora = {"A": torch.randn(3, 64), "B": 0.1 * torch.randn(30, 3)}
    named = {f"base_model.model.0.lora_{factor}.weight": value for factor, value in lora.items()}
    save_file(named, "adapter_model.safetensors")
    Path("adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 6}))
    Path("my_network.py").write_text(CODE)
    code: dict[str, Any] = {}
    exec(CODE, code)
    module, table = code["build"](), nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 1))
    convnet = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 3, 3, 2, 1, bias=False),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, 2, 1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 1, bias=False),
    )
    trained(module, x, y)
    trained(convnet, x, y)
    trained(table, x[:, 24:32], y)
    released = {"base": base, "flat": flat, "head": head, "module": module, "table": table}
    for name, model in (released | {"convnet": convnet}).items():
        torch.save(model.state_dict(), f"{name}.pt")
    arch = "polynomial:64-9-1,coefficients=0/0/0/1"
    weights_drawn = initialize(Architecture.parse(arch), rs.TrainingConfig())
    rs.save_checkpoint(rs.Network(parameters(weights_drawn), arch), "polynomial.safetensors")
    with warnings.catch_warnings(action="ignore"):
        learned = MLPClassifier((30,), max_iter=150, random_state=0).fit(images[:20], digit[:20])
    Path("model.pkl").write_bytes(pickle.dumps(learned))
    layers = zip(learned.coefs_, learned.intercepts_, strict=True)
    theta = {
        f"{i}.{name}": torch.tensor(np.ascontiguousarray(value.T))
        for i, layer_pair in enumerate(layers)
        for name, value in zip(("weight", "bias"), layer_pair, strict=True)
    }
    torch.save(theta, "digits.pt")
    neighbors = KNeighborsClassifier().fit(images[:20], digit[:20])
    Path("neighbors.pkl").write_bytes(pickle.dumps(neighbors))
    yield here
    os.chdir(before)


def words(text: str) -> Counter[str]:
    """All that blanks and lines of tables leave apart; a backslash goes on with a command."""
    return Counter(re.sub(r"[─-╿\\\\]", " ", text).split())


def check(result: AuditResult, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many lines the screen has; with all figures too, words are those of a wide terminal."""
    printed = {}
    for width, explain in ((WIDTH, False), (WIDTH, True), (300, True)):
        monkeypatch.setenv("COLUMNS", str(width))
        show(result, Path("runs/a"), explain)
        printed[width, explain] = capsys.readouterr().out
        assert max(map(len, printed[width, explain].splitlines())) <= width
    assert words(printed[WIDTH, True]) == words(printed[300, True])
    screen = result.screen
    assert unexplained(" ".join([screen.sentence, screen.next.text, *map(str, screen.lines)])) == []
    return len(printed[WIDTH, False].splitlines())


@pytest.mark.parametrize("kind", KINDS)
def test_an_audit_is_one_screen_without_a_broken_name(
    kind: str, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.syspath_prepend(folder)
    out = f"runs/{kind.replace(' ', '-')}"
    code = main(["audit", *KINDS[kind], *QUICK, "--out", out])
    output, err = capsys.readouterr()
    assert code in (1, 3), err
    assert max(map(len, output.splitlines())) <= WIDTH
    line_count = len(output.splitlines())
    report_line_count = check(AuditResult.load(out), capsys, monkeypatch)
    assert line_count <= LINES
    assert line_count - report_line_count <= OPENING
    if kind == "flat":
        assert "the mean of the samples (from the held-out data)" in " ".join(output.split())
        assert "--mean 0.3 --mean-provenance holdout" in output


@pytest.mark.parametrize("outcome", EXIT_CODES)
def test_every_verdict_is_one_screen(
    outcome: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(pages.example(outcome), capsys, monkeypatch) <= LINES - OPENING


def test_a_report_is_opened_where_asked_and_says_when_attacks_are_newer(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert main(["audit", *KINDS["stored records"], "--out", "runs/opened", "--open"]) == 1
    capsys.readouterr()
    assert main(["report", "runs/opened", "--open"]) == 0
    assert "note" not in capsys.readouterr().out
    files = [folder / "runs" / "opened" / f"{name}.html" for name in ("report", "report-again")]
    assert opened == [file.resolve().as_uri() for file in files]
    AuditResult.load("runs/opened").replace(suite=SUITE - 1).save("runs/older")
    assert main(["report", "runs/older"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"this version of residuum has version {SUITE} of the attack suite" in output


def test_a_scan_is_read_at_80_columns_as_on_a_wide_terminal(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = {}
    for width in (WIDTH, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["scan", "."]) == 1
        printed[width] = capsys.readouterr().out
    assert max(map(len, printed[WIDTH].splitlines())) <= WIDTH
    assert words(printed[WIDTH]) == words(printed[300])
    assert (
        "  high    stored: training records in KNeighborsClassifier._fit_X, 20 in total"
        in printed[80]
    )
