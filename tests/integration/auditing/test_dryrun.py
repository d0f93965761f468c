"""What applies, and an audit before it is run: every obstacle at once, and how it can end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import residuum as rs
from residuum.auditing.verdict import INCONCLUSIVE, LEAK, NO_LEAK_FOUND
from residuum.cli.main import main
from residuum.io.checkpoints import save_checkpoint
from tests import schemas, victims
from tests.victims import tight


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dry")
    checkpoint, split = victims.VICTIMS["leaky"]()
    save_checkpoint(checkpoint, place / "m.safetensors")
    split.train.to_npz(place / "train.npz")
    split.holdout.to_npz(place / "rest.npz")
    few = split.holdout.replace(x=split.holdout.x[:30], y=split.holdout.y[:30])
    few.to_npz(place / "few.npz")
    few.replace(x=few.x[:, :, :4]).to_npz(place / "small.npz")
    torch.save(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).state_dict(), place / "norm.pt")
    (place / "bad.npz").write_bytes(b"no archive")
    return place


def dry(
    folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0
) -> dict[str, object]:
    capsys.readouterr()
    command = ["audit", *(str(folder / s) if (folder / s).exists() else s for s in arguments)]
    assert main([*command, "--dry-run", "--json"]) == code
    output = json.loads(capsys.readouterr().out)
    schemas.check("dry-run", output)
    return output


def test_all_obstacles_are_listed_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = dry(folder, capsys, "norm.pt", "--data", "bad.npz", "--holdout", "nope.npz", code=2)
    obstacles = "\n".join(output["obstacles"])
    assert len(output["obstacles"]) == 3
    assert "batch norm" in obstacles
    assert "bad.npz" in obstacles
    assert "A data file must exist" in obstacles
    assert {*output["verdicts"].values()} == {"the audit would stop at an obstacle"}
    unsafe = dry(folder, capsys, "norm.pt", "--model", "json:loads", "--data", "bad.npz", code=4)
    assert any("--trust-code" in line for line in unsafe["obstacles"])


def test_a_run_that_can_go_says_what_it_would_try_what_it_costs_and_how_it_can_end(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.iterdir())
    arguments = (
        "m.safetensors",
        "--data",
        "train.npz",
        "--holdout",
        "rest.npz",
        "--value-range",
        "0,1",
    )
    output = dry(folder, capsys, *arguments, "--mean", "train")
    assert sorted(folder.iterdir()) == before
    rows = {row["what"]: row for row in output["applies"]}
    assert rows["binary-kkt"]["status"] == "to be tried"
    assert rows["ntk"]["status"] == "not tried"
    assert "--init" in rows["ntk"]["reason"]
    assert rows["homogeneity"]["reason"].startswith("order 3")
    assert rows["layer on the input"]["reason"].startswith("layers.0, dense")
    assert "accuracy of the network as read: 100.0%" in rows["outputs"]["reason"]
    assert output["cost"].startswith("Effort standard, at most 10m of reference time. Attacks: ")
    assert "binary-kkt, " in output["cost"]
    assert "Left out" not in output["cost"]
    assert all(reason.startswith("can be reached") for reason in output["verdicts"].values())


def test_a_dry_run_names_what_a_budget_leaves_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "m.safetensors",
        "--data",
        "train.npz",
        "--holdout",
        "rest.npz",
        "--value-range",
        "0,1",
    )
    output = dry(folder, capsys, *arguments, "--budget", "1s")
    assert "Left out, because the budget is too small: binary-kkt: a single" in output["cost"]
    assert output["cost"].endswith("This audit can show a leak and cannot rule one out.")
    assert output["verdicts"][LEAK].startswith("can be reached")
    assert output["verdicts"][NO_LEAK_FOUND].startswith("binary-kkt: a single restart takes about")


@pytest.mark.parametrize(
    ("arguments", "leak", "passed"),
    [
        (["--data", "train.npz"], "that the network never saw", "that the network never saw"),
        (
            ["--data", "train.npz", "--holdout", "few.npz"],
            "at least 100 samples",
            "at least 100 samples",
        ),
        ([], "no training samples", "no training samples"),
        (
            ["--data", "train.npz", "--holdout", "rest.npz", "--no-positive-controls"],
            "can be",
            "--no-positive-controls",
        ),
        (
            ["--data", "train.npz", "--holdout", "rest.npz", "--effort", "quick"],
            "can be",
            "the effort quick can show a leak and cannot rule one out",
        ),
        (
            ["--data", "train.npz", "--holdout", "rest.npz", "--attacks", "unmix"],
            "can be",
            "only the standard plan can rule out a leak, and these settings changed the plan: attacks",
        ),
        (["--data", "few.npz", "--holdout", "rest.npz"], "also occur in", "also occur in"),
    ],
)
def test_verdicts_that_cannot_be_reached_say_why(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], leak: str, passed: str
) -> None:
    verdicts = dry(folder, capsys, "m.safetensors", *arguments)["verdicts"]
    assert leak in verdicts[LEAK]
    assert passed in verdicts[NO_LEAK_FOUND]
    assert verdicts[INCONCLUSIVE].startswith("can be reached")


def test_the_table_of_what_applies_is_the_same_in_result_report_and_terminal(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    arguments = [
        "audit",
        str(folder / "m.safetensors"),
        "--data",
        str(folder / "train.npz"),
        "--holdout",
        str(folder / "rest.npz"),
        "--steps",
        "5",
        "--effort",
        "quick",
        "--subsets",
        "200",
        "--exit-zero",
        "--explain",
        "--out",
        str(tmp_path / "a"),
    ]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    rows = json.loads((tmp_path / "a/result.json").read_text())["applies"]
    page = (tmp_path / "a/report.html").read_text().replace("&#39;", "'")
    assert {row["status"] for row in rows} == {"measured", "tried", "not tried"}
    for row in rows:
        assert row["reason"] in output
        assert row["reason"] in page, row
    assert rs.AuditResult.load(tmp_path / "a").applies[0].what == "network"


def test_moved_layers_are_counted_if_initial_weights_are_known(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = rs.load_checkpoint(folder / "m.safetensors")
    theta = {name: t + (name == "layers.1.weight") for name, t in checkpoint.theta.items()}
    save_checkpoint(checkpoint.replace(theta=theta), folder / "init.safetensors")
    output = dry(folder, capsys, "m.safetensors", "--init", "init.safetensors")
    rows = {row["what"]: row["reason"] for row in output["applies"]}
    assert rows["layers that moved"] == "1 of 3: layers.1"


def test_an_obstacle_of_one_file_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.npz").write_bytes(b"no archive")
    rs.save_checkpoint(tight()[0], tmp_path / "m.safetensors")
    command = ["audit", str(tmp_path / "m.safetensors"), "--data", str(tmp_path / "train.npz")]
    assert main([*command, "--dry-run"]) == 2
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("must be an .npz archive") == 1
