"""Every command and every line of Python that scan and strip print works on the file it was printed for."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import joblib
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_breast_cancer
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import residuum as rs
from residuum.cli.main import main

X, Y = (array[:60] for array in load_breast_cancer(return_X_y=True))
NETWORK = {"max_iter": 3, "random_state": 0}


MADE_OF_RECORDS = {
    "svc": lambda: SVC().fit(X, Y),
    "neighbors": lambda: KNeighborsClassifier().fit(X, Y),
    "process": lambda: GaussianProcessClassifier().fit(X, Y),
    "grid": lambda: GridSearchCV(SVC(), {"C": [1.0]}, cv=2).fit(X, Y),
}
NOTHING = {
    "logistic": lambda: LogisticRegression(max_iter=20).fit(X, Y),
    "k-means": lambda: KMeans(2).fit(X),
}


def printed_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_commands_that_a_scan_prints_work_on_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Sequential(torch.nn.Linear(30, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 30)).sum().backward()
    adam.step()
    torch.save({"model": net.state_dict(), "optimizer": adam.state_dict()}, "checkpoint.pt")
    torch.save(adam.state_dict(), "optimizer.pt")
    torch.save({"cpu": torch.random.get_rng_state(), "path": "/data/a.csv"}, "rng_state.pth")
    torch.save(argparse.Namespace(train_file="/data/a.csv"), "training_args.bin")
    torch.save({"ema": net.state_dict(), "path": "/data/a.csv"}, "ema.pt")
    for name, make in {**MADE_OF_RECORDS, **NOTHING}.items():
        joblib.dump(make(), f"{name}.joblib")
    commands = []
    for path in sorted(tmp_path.iterdir()):
        _, output = printed_by(capsys, "scan", path.name)
        text = " ".join(output.split())
        for command in {*re.findall(r"residuum (?:strip|audit|scan) FILE[^.;:)]*", text)}:
            command_line = command.replace("FILE", path.name).replace(
                "CLEAN", f"{path.stem}.clean.pt"
            )
            code, _ = printed_by(capsys, *shlex.split(command_line)[1:])
            assert code in (0, 1), (path.name, command_line)
            commands.append(path.name)
    assert commands == ["checkpoint.pt"]
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin"):
        output = " ".join(printed_by(capsys, "scan", name)[1].split())
        assert "Delete this file from the release" in output


def test_the_notes_on_the_scaling_of_a_pipeline_agree(tmp_path: Path) -> None:
    model = make_pipeline(StandardScaler(), MLPClassifier((50,), max_iter=400, random_state=0))
    x, y = load_breast_cancer(return_X_y=True)
    joblib.dump(model.fit(x[:60], y[:60]), tmp_path / "m.joblib")
    data, holdout = (x[:60], y[:60]), (x[60:400], y[60:400])
    result = rs.audit(tmp_path / "m.joblib", data=data, holdout=holdout, budget="1s", steps=2)
    notes = result.html()
    assert "the model file applies StandardScaler to samples before the network" in notes
    assert "the columns of your samples were standardized with the mean and deviation" in notes
    assert "hands them on" not in notes
