"""Every command that an audit prints as a next step runs on the audited file and changes something."""

from __future__ import annotations

import pickle
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC
from torch import nn

import residuum as rs
from residuum.auditing.next_steps import TABLE, NextStep, next_step
from residuum.auditing.verdict import LEAK, NO_LEAK_FOUND
from residuum.cli.main import main
from tests.integration.auditing.test_dryrun_agrees import Artifact, dense

TRAIN, HOLDOUT = 12, 120
ENDINGS = (0, 1, 3)  # exit codes of a command that did its work
SHORT = {"steps": 5, "subsets": 200, "baselines": False, "effort": "quick"}


@dataclass
class Audited:
    """A file to audit, its samples, and the settings of the audit.

    Attributes:
        file: The released file.
        data: Arguments of ``rs.audit`` that name the samples.
        options: Settings and knowledge.
    """

    file: Path
    data: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def audit(self, out: Path, **changes: Any) -> rs.AuditResult:
        return rs.audit(self.file, **self.data, **{**SHORT, **self.options, **changes}, out=out)


def samples(
    folder: Path, shape: tuple[int, ...], classes: int = 2, holdout: int = HOLDOUT
) -> dict[str, Any]:
    """Write training and held-out samples, and return their paths."""
    maker = Artifact(None, shape, classes)
    for name, count, seed in (("train", TRAIN, 0), ("test", holdout, 1)):
        x, y = maker.samples(count, seed)
        np.savez(folder / f"{name}.npz", x=x.numpy(), y=y.numpy())
    return {"data": folder / "train.npz", "holdout": folder / "test.npz"}


def fitted(model: nn.Module, data: dict[str, Any], classes: int, steps: int) -> dict[str, Any]:
    """Train a network until it fits its samples, and return its weights."""
    arrays = np.load(data["data"])
    x, y = torch.from_numpy(arrays["x"]).float(), torch.from_numpy(arrays["y"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(x)
        if classes == 0:
            loss = (outputs[:, 0] - y.float()).square().mean()
        elif classes == 2:
            loss = nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], y.float())
        else:
            loss = nn.functional.cross_entropy(outputs, y.long())
        loss.backward()
        optimizer.step()
    return model.state_dict()


def dense_file(
    folder: Path, *, outputs: int = 1, classes: int = 2, holdout: int = HOLDOUT, **options: Any
) -> Audited:
    """A small network in a .pt file, which fits its samples."""
    data = samples(folder, (6,), classes, holdout)
    torch.save(fitted(dense(6, 8, outputs), data, classes, 400), folder / "m.pt")
    return Audited(folder / "m.pt", data, options)


def checkpoint_file(folder: Path) -> Audited:
    """A checkpoint of a training, with the state of its optimizer, that holds a sample."""
    data = samples(folder, (6,))
    model = dense(6, 8, 1)
    weights = fitted(model, data, 2, 400)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.from_numpy(np.load(data["data"])["x"]).float()
    model(x).square().sum().backward()
    optimizer.step()
    state = {"model": weights, "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "training.pt")
    return Audited(folder / "training.pt", data, {"effort": "standard", "steps": None})


def estimator_file(folder: Path, estimator: Any) -> Audited:
    """A pickled estimator of scikit-learn."""
    data = samples(folder, (6,))
    arrays = np.load(data["data"])
    (folder / "m.pkl").write_bytes(pickle.dumps(estimator.fit(arrays["x"], arrays["y"])))
    return Audited(folder / "m.pkl", data)


def network_file(folder: Path, arch: str, shape: tuple[int, ...]) -> Audited:
    """A network in a safetensors file."""
    data = samples(folder, shape)
    model = rs.Architecture.parse(arch).build()
    network = rs.Network(fitted(model, data, 2, 200), arch, input_shape=shape, task="binary")
    return Audited(rs.save_checkpoint(network, folder / "m.safetensors"), data)


def convnet_file(folder: Path) -> Audited:
    return network_file(folder, "convnet:1x4x4-2-1", (1, 4, 4))


def with_records(folder: Path) -> Audited:
    """A checkpoint that stores its training samples next to the weights."""
    audited = dense_file(folder)
    arrays = np.load(audited.data["data"])
    records = {"x_train": torch.from_numpy(arrays["x"]), "y_train": torch.from_numpy(arrays["y"])}
    torch.save({"model": torch.load(audited.file, weights_only=True), **records}, audited.file)
    return audited


def overlapping(folder: Path) -> Audited:
    """Held-out samples among which all training samples are."""
    audited = dense_file(folder)
    train, test = (np.load(audited.data[name]) for name in ("data", "holdout"))
    overlap = {name: np.concatenate([test[name], train[name]]) for name in ("x", "y")}
    np.savez(audited.data["holdout"], **overlap)
    return audited


def without(audited: Audited, *names: str) -> Audited:
    data = {name: path for name, path in audited.data.items() if name not in names}
    return Audited(audited.file, data, audited.options)


STANDARD = {"steps": None, "effort": "standard"}
MEAN = {"value_range": (0, 1), "mean": np.full(6, 0.5)}
NEAREST, SUPPORT = KNeighborsClassifier(3), SVC()
MLP = MLPClassifier(hidden_layer_sizes=(8,), max_iter=2000, random_state=0)
# Each file with the beginning of the next step that its audit must print.
ARTIFACTS: dict[str, tuple[Callable[[Path], Audited], str]] = {
    "dense .pt": (dense_file, "Run the standard plan"),
    "safetensors": (lambda f: network_file(f, "mlp:6-8-1", (6,)), "Run the standard plan"),
    "training checkpoint": (checkpoint_file, "Strip the optimizer state"),
    "scikit-learn network": (lambda f: estimator_file(f, MLP), "Do not release this file if"),
    "nearest neighbors": (lambda f: estimator_file(f, NEAREST), "Do not release this file"),
    "support vectors": (lambda f: estimator_file(f, SUPPORT), "Do not release this file"),
    "convnet": (lambda f: without(convnet_file(f), "holdout"), "Pass samples that"),
    "regression": (lambda f: dense_file(f, classes=0, task="regression"), "Run the standard plan"),
    "three classes": (lambda f: dense_file(f, outputs=3, classes=3), "Run the standard plan"),
    "stored records": (with_records, "Do not release this file"),
    "no samples": (
        lambda f: without(dense_file(f), "data", "holdout"),
        "Pass the training samples",
    ),
    "no held-out samples": (lambda f: without(dense_file(f), "holdout"), "Pass samples that"),
    "few held-out samples": (lambda f: dense_file(f, holdout=40), "Pass more held-out samples"),
    "overlapping samples": (overlapping, "Pass other held-out samples"),
    "chosen attacks": (
        lambda f: dense_file(f, attacks=["kkt"], effort="standard"),
        "Run the standard plan",
    ),
    "knowledge in a file": (lambda f: dense_file(f, knowledge=MEAN), "Run the standard plan"),
    "tiny budget": (lambda f: dense_file(f, **STANDARD, budget=0.001), "Raise the budget"),
    "no positive controls": (
        lambda f: dense_file(f, **STANDARD, positive_controls=False),
        "Let the audit train its positive controls",
    ),
}


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], rs.AuditResult]:
    """Return the audit of an artifact. It runs once."""

    @cache
    def audit(name: str) -> rs.AuditResult:
        folder = tmp_path_factory.mktemp("artifact")
        return ARTIFACTS[name][0](folder).audit(folder / "run")

    return audit


def run_all(step: NextStep, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of a next step in a folder. Each must end its work and change something."""
    monkeypatch.chdir(folder)
    for command in step.commands:
        program, verb, *arguments = shlex.split(command)
        assert program == "residuum"
        out = Path(arguments[arguments.index("--out") + 1]) if "--out" in arguments else None
        assert out is None or not out.exists()
        code = main([verb, *arguments, "--quiet"])
        assert code in ENDINGS, f"{command} ended with {code}"
        EFFECTS[verb](step, Path(arguments[0]), out)


def audit_has_another_next_step(step: NextStep, _: Path, out: Path | None) -> None:
    assert out is not None
    result = rs.AuditResult.load(out)
    assert (out / "report.html").stat().st_size
    assert len(result.verdict.answers) == 3
    assert any(row.ran for row in result.attacks)
    assert result.screen.next.text != step.text


def strip_leaves_the_weights(_: NextStep, file: Path, out: Path | None) -> None:
    assert out is not None
    assert rs.load_checkpoint(out).theta.keys() == rs.load_checkpoint(file).theta.keys()
    assert out.stat().st_size < file.stat().st_size


def report_shows_no_sample(_: NextStep, folder: Path, out: Path | None) -> None:
    text = (folder / "report-redacted.html").read_text()
    assert "</html>" in text
    assert "data:image" not in text


def scan_reads_the_file(_: NextStep, file: Path, out: Path | None) -> None:
    assert file.is_file()


EFFECTS = {
    "audit": audit_has_another_next_step,
    "strip": strip_leaves_the_weights,
    "report": report_shows_no_sample,
    "scan": scan_reads_the_file,
}


@pytest.mark.parametrize("name", ARTIFACTS)
def test_every_command_works_on_the_audited_file(
    name: str,
    audits: Callable[[str], rs.AuditResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = audits(name).screen.next
    assert step.text.startswith(ARTIFACTS[name][1])
    run_all(step, tmp_path, monkeypatch)


def stopped(result: rs.AuditResult) -> rs.AuditResult:
    return result.replace(checks=result.checks.replace(stopped="the clock", restricted=""))


def cleared(result: rs.AuditResult) -> rs.AuditResult:
    return result.replace(verdict=result.verdict.replace(outcome=NO_LEAK_FOUND))


def leaking(grade: str, surface: str = "weights", **changes: Any) -> Any:
    """Return a function that makes the first attack of an audit find samples."""

    def change(result: rs.AuditResult) -> rs.AuditResult:
        row = next(row for row in result.attacks if row.ran).replace(
            decides=True, surface=surface, adjusted=0.001, recovered=3
        )
        verdict = result.verdict.replace(outcome=LEAK, grade=grade, grades={grade: 3}, **changes)
        return result.replace(attacks=(row,), verdict=verdict)

    return change


# Rows that no small audit reaches by itself: the audit of an artifact is changed.
CHANGES: dict[str, tuple[Callable[[Path], Audited], Any, str]] = {
    "stopped by the clock": (convnet_file, stopped, "Run the audit again on an idle machine"),
    "no leak found": (dense_file, cleared, "These tests give no reason"),
    "leak": (dense_file, leaking("near-copy"), "Do not release this file. The weights"),
    "leak below the limit": (
        dense_file,
        leaking("class-level", limit="near-copy"),
        "The findings are weaker than your limit",
    ),
    "leak of optimizer state": (
        checkpoint_file,
        leaking("near-copy", "moment"),
        "Do not release this file as it is",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_commands_of_rows_that_small_audits_do_not_reach(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, change, text = CHANGES[name]
    result = change(make(tmp_path).audit(tmp_path / "run"))
    step = next_step(result)
    assert step.text.startswith(text)
    assert step.commands
    run_all(step, tmp_path, monkeypatch)


def test_every_kind_of_command_is_run() -> None:
    """Every function of the table that makes a command belongs to a row that is reached above."""
    commands = {command for rows in TABLE.values() for row in rows for command in row.commands}
    texts = [text for _, text in ARTIFACTS.values()] + [text for *_, text in CHANGES.values()]
    assert len(ARTIFACTS) >= 15
    reached = {
        command
        for rows in TABLE.values()
        for row in rows
        if any(row.text.startswith(text) for text in texts)
        for command in row.commands
    }
    assert reached == commands
