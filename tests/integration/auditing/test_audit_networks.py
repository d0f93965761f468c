"""Audits of networks that are no binary MLP, through the commands: every stage runs on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from residuum.cli.main import main
from residuum.records import Dataset

# Architecture, task, the attack that applies, baselines, exit code. Ten digits are one of each class,
# which a network of ten outputs gives away at once. Forty steps recover nothing from a convnet.
NETWORKS = {
    "convnet": ("convnet:1x8x8-3-4-1", "binary", "binary-kkt", {"model-inversion"}, 3),
    "multiclass": (
        "mlp:64-20-10",
        "multiclass",
        "multiclass-kkt",
        {"model-inversion", "first-layer-weights"},
        1,
    ),
}


def train(name: str, folder: Path) -> list[str]:
    """A victim of ten digits, and how to audit it with two short restarts."""
    arch, task, attack, baselines, _ = NETWORKS[name]
    assert (
        main(
            [
                "train",
                "--data",
                "digits",
                "--n",
                "10",
                "--holdout",
                "150",
                "--task",
                task,
                "--arch",
                arch,
                "--steps",
                "100",
                "--out",
                str(folder / "victim"),
                "--quiet",
            ]
        )
        == 0
    )
    config = folder / "short.toml"
    config.write_text(
        f'effort = "quick"\nsubsets = 200\n[[attacks]]\nattack = "{attack}"\nrestarts = 2\nsteps = 40\n'
        + "".join(f'[[attacks]]\nattack = "{name}"\n' for name in sorted(baselines))
        + "steps = 20\n"  # of model-inversion, the last one
    )
    return [
        "audit",
        str(folder / "victim"),
        "--value-range",
        "0,1",
        "--sample-count",
        "5",
        "--config",
        str(config),
        "--quiet",
    ]


def result(run: Path) -> dict[str, Any]:
    document = json.loads((run / "result.json").read_text())
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("name", NETWORKS)
def test_every_stage_runs(name: str, tmp_path: Path) -> None:
    arch, task, attack, baselines, code = NETWORKS[name]
    own_run, run = str(tmp_path / "victim"), tmp_path / "run"
    output = train(name, tmp_path)
    assert (
        main(
            [*output, "--data", own_run, "--holdout", own_run, "--mean", "train", "--out", str(run)]
        )
        == code
    )
    document = result(run)
    assert document["network"]["arch"] == arch
    assert {row["name"] for row in document["attacks"] if row["ran"]} == {attack, *baselines}
    assert document["scores"]["calibrated"]
    assert document["scores"]["n"] == 10
    assert document["certificate_of"] == "training samples"
    assert 0 < document["certificate"]["residual_plain"] < 1
    assert document["uniqueness"] is not None, document["uniqueness_reason"]
    assert document["uniqueness"]["task"] == task
    assert {row["label"] for row in document["candidates"]} <= (
        {-1.0, 1.0} if task == "binary" else set(map(float, range(10)))
    )
    page = (run / "report.html").read_text()
    assert page.count('class="card"') == document["scores"]["recovered"]
    assert page.count("<figcaption>training</figcaption>") >= 3  # the best, beyond chance or not
    repeat_folder = tmp_path / "again"
    config = str(run / "config.toml")
    assert main(["audit", "--config", config, "--out", str(repeat_folder), "--quiet"]) == code
    assert result(repeat_folder)["scores"] == document["scores"]
    assert result(repeat_folder)["settings"] == document["settings"]


def test_samples_that_a_multiclass_network_never_saw_do_not_leak(tmp_path: Path) -> None:
    output = train("multiclass", tmp_path)
    unseen = Dataset.from_npz(tmp_path / "victim/private/holdout.npz")
    for name, rows in (("claimed", slice(0, 10)), ("rest", slice(10, None))):
        unseen.replace(x=unseen.x[rows], y=unseen.y[rows]).to_npz(tmp_path / f"{name}.npz")
    files = ["--data", str(tmp_path / "claimed.npz"), "--holdout", str(tmp_path / "rest.npz")]
    assert main([*output, *files, "--out", str(tmp_path / "run")]) == 3
    assert result(tmp_path / "run")["scores"]["recovered"] <= 1
