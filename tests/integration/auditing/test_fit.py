"""The first line of every audit: how well the network, as read, does on the samples it was given."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import residuum as rs
from residuum.auditing.verdict import INCONCLUSIVE
from residuum.cli.main import main
from residuum.evaluation.adapting import measure_fit
from residuum.io.checkpoints import as_network
from residuum.networks.kinds import ASSUMED_RELU
from residuum.records import Dataset
from tests.victims import knowledge, leaky, write

QUICK = ["--effort", "quick", "--steps", "25", "--no-baselines", "--subsets", "200"]


def test_accuracy_is_counted_on_both_sets() -> None:
    checkpoint, split = leaky()
    model = checkpoint.copy_module(torch.float64)
    fit = measure_fit(checkpoint, split.train, split.holdout, "auto")
    assert fit is not None
    for value, data in ((fit.train, split.train), (fit.holdout, split.holdout)):
        right = [
            float(model(x[None].double()).detach()) * float(y) > 0
            for x, y in zip(data.x, data.y, strict=True)
        ]
        assert value == pytest.approx(sum(right) / len(right))
    assert fit.train == 1.0
    assert not fit.notes


def test_shifted_labels_are_noticed() -> None:
    checkpoint, split = leaky()
    wrong = split.train.replace(y=-split.train.y)
    fit = measure_fit(checkpoint, wrong, None, "auto")
    assert fit is not None
    assert (fit.train, fit.holdout) == (0.0, None)
    assert any("may not have been read correctly" in note for note in fit.notes)
    result = rs.audit(
        checkpoint,
        data=wrong,
        holdout=split.holdout,
        knowledge=knowledge(split),
        effort="quick",
        attacks=[{"attack": "kkt", "steps": 25, "restarts": 1}],
        baselines=False,
        subsets=200,
    )
    assert fit.notes[0] in result.warnings
    assert (result.verdict.outcome, result.exit_code) == (INCONCLUSIVE, 3)
    assert result.fit is not None
    reason = f"the network as read hardly fits these samples ({result.fit.line})"
    assert result.verdict.reasons[0] == reason


def test_held_out_samples_without_labels_have_no_accuracy() -> None:
    checkpoint, split = leaky()
    bare = Dataset(split.holdout.x, torch.zeros(len(split.holdout)))
    fit = measure_fit(checkpoint, split.train, bare, "auto")
    assert fit is not None
    assert fit.holdout is None
    assert "- on the held-out ones" in fit.line


def test_it_is_the_first_line_and_in_the_result(tmp_path: Path, capsys) -> None:
    main([*write(tmp_path, "leaky"), *QUICK, "--out", str(tmp_path / "o")])
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith("accuracy of the network as read: 100.0% on the training samples, ")
    written = json.loads((tmp_path / "o" / "result.json").read_text())["fit"]
    assert output.startswith(written["line"])
    assert output.count(written["line"]) == 1
    assert (written["measure"], written["train"]) == ("accuracy", 1.0)


def regressor(folder: Path) -> list[str]:
    """A network trained on the diabetes table, and the arguments that audit it."""
    torch.manual_seed(0)
    table = load_diabetes()
    x = torch.tensor(table.data, dtype=torch.float32) * 20
    y = torch.tensor((table.target - table.target.mean()) / table.target.std()).float()
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        (net(x[:60])[:, 0] - y[:60]).square().mean().backward()
        optimizer.step()
    torch.save(net.state_dict(), folder / "reg.pt")
    np.savez(folder / "train.npz", x=x[:60], y=y[:60])
    np.savez(folder / "test.npz", x=x[60:], y=y[60:])
    return [
        str(folder / "reg.pt"),
        "--data",
        str(folder / "train.npz"),
        "--holdout",
        str(folder / "test.npz"),
        "--task",
        "regression",
    ]


def test_a_regression_is_attacked_as_one(tmp_path: Path, capsys) -> None:
    main(["audit", *regressor(tmp_path), *QUICK, "--out", str(tmp_path / "o")])
    assert capsys.readouterr().out.startswith("R^2 of the network as read: 0.")
    result = json.loads((tmp_path / "o" / "result.json").read_text())
    ran = {row["name"] for row in result["attacks"] if row["ran"]}
    assert "weight-decay" in ran
    assert not ran & {"binary-kkt", "multiclass-kkt"}


def test_an_assumed_activation_is_shown_on_the_terminal_and_in_the_verdict(
    tmp_path: Path, capsys
) -> None:
    checkpoint = leaky()[0]
    layers = nn.Sequential(
        nn.Linear(64, 100),
        nn.ReLU(),
        nn.Linear(100, 100, bias=False),
        nn.ReLU(),
        nn.Linear(100, 1, bias=False),
    )
    state = dict(zip(layers.state_dict(), checkpoint.theta.values(), strict=True))
    torch.save(state, tmp_path / "bare.pt")
    files = write(tmp_path, "leaky")
    main(["audit", str(tmp_path / "bare.pt"), *files[2:], *QUICK, "--out", str(tmp_path / "o")])
    out = capsys.readouterr().out.splitlines()
    assert ASSUMED_RELU in " ".join(" ".join(out[:6]).split())
    reasons = json.loads((tmp_path / "o" / "result.json").read_text())["verdict"]["reasons"]
    assert ASSUMED_RELU in reasons


@pytest.mark.parametrize("which", ["--data", "--holdout"])
def test_absurd_values_are_refused_before_anything_is_written(
    tmp_path: Path, which: str, capsys
) -> None:
    arguments = write(tmp_path, "leaky")
    position = arguments.index(which) + 1
    stored = dict(np.load(arguments[position]))
    stored["x"] = stored["x"] * 1e20
    np.savez(tmp_path / "huge.npz", **stored)
    arguments[position] = str(tmp_path / "huge.npz")
    assert main([*arguments, *QUICK, "--out", str(tmp_path / "o")]) == 2
    assert "must lie between" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("granted", [[], ["--value-range", "0,255"]])
def test_pixels_up_to_255_are_asked_about(tmp_path: Path, granted: list[str]) -> None:
    checkpoint, split = leaky()
    raw = (split.train.x + split.train.mean) * 255
    held = (split.holdout.x + split.train.mean) * 255
    torch.save(dict(checkpoint.theta), tmp_path / "m.pt")
    np.savez(tmp_path / "a.npz", x=raw, y=split.train.y)
    np.savez(tmp_path / "b.npz", x=held, y=split.holdout.y)
    main(
        [
            "audit",
            str(tmp_path / "m.pt"),
            "--data",
            str(tmp_path / "a.npz"),
            "--holdout",
            str(tmp_path / "b.npz"),
            *granted,
            *QUICK,
            "--out",
            str(tmp_path / "o"),
        ]
    )
    notes = json.loads((tmp_path / "o" / "result.json").read_text())["warnings"]
    question = (
        "values up to 255: is this what the network receives?" if granted else "divided by 255"
    )
    assert any(question in note for note in notes)


def test_a_live_module_is_measured_as_it_was_given() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    fit = measure_fit(as_network(net), Dataset(x, y), None, "auto")
    assert fit is not None
    assert fit.train == pytest.approx(float((net(x).argmax(1) == y).double().mean()))
    assert fit.base == pytest.approx(1 / 3)
