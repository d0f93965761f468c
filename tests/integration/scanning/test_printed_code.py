"""Every command and every line of Python that scan and strip print works on the file it was printed for."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier
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


def pipeline() -> Any:
    scaler = ColumnTransformer([("scale", StandardScaler(), list(range(30)))])
    return make_pipeline(make_pipeline(scaler), MLPClassifier(**NETWORK))


CHANGED = {  # models from which something can be left out
    "network": lambda: MLPClassifier(**NETWORK).fit(X, Y),
    "early stopping": lambda: MLPClassifier(early_stopping=True, **NETWORK).fit(X, Y),
    "pipeline": lambda: pipeline().fit(X, Y),
    "grid": lambda: GridSearchCV(MLPClassifier(**NETWORK), {"alpha": [1e-3]}, cv=2).fit(X, Y),
    "bundle": lambda: {"net": pipeline().fit(X, Y), "X_train": pd.DataFrame(X), "note": "v1"},
}
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


def test_the_script_for_trees_keeps_the_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = RandomForestClassifier(3, random_state=0).fit(X, Y)
    path, clean = tmp_path / "model.pkl", tmp_path / "clean.pkl"
    path.write_bytes(pickle.dumps(model))
    assert main(["strip", str(path), "--out", str(clean)]) == 2
    output = capsys.readouterr()
    assert "removing seeds, counts and impurities does not help" in " ".join(output.err.split())
    exec(compile(output.out, "script", "exec"), {})
    stripped = pickle.loads(clean.read_bytes())
    assert np.array_equal(stripped.predict_proba(X), model.predict_proba(X))
    assert stripped.estimators_[0].random_state is None
    assert not stripped.estimators_[0].tree_.n_node_samples.any()


def printed_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def code_in(text: str) -> list[str]:
    """The lines of Python that strip prints."""
    return [
        line for line in text.splitlines() if re.match(r"(import|model|del|joblib|pickle)\b", line)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGED)
def test_the_code_that_strip_prints_leaves_out_what_it_says(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "model.joblib", tmp_path / "clean.joblib"
    joblib.dump(CHANGED[name](), path)
    code, output = printed_by(capsys, "strip", str(path), "--out", str(out))
    assert code == 2
    lines = code_in(output)
    assert lines
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, env=environment)
    kinds = {finding.kind for finding in rs.scan(out).findings}
    assert not kinds & {"optimizer-state", "start", "stored"}
    clean = joblib.load(out)
    clean = clean["net"] if name == "bundle" else clean
    before = joblib.load(path)
    before = before["net"] if name == "bundle" else before
    assert np.array_equal(clean.predict(X), before.predict(X))


@pytest.mark.parametrize("name", [*MADE_OF_RECORDS, *NOTHING])
def test_if_nothing_can_be_left_out_strip_says_so_in_words(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.joblib"
    joblib.dump({**MADE_OF_RECORDS, **NOTHING}[name](), path)
    code, output = printed_by(capsys, "strip", str(path), "--out", str(tmp_path / "clean"))
    assert code == 2
    assert not code_in(output)
    expected = "consists of its training records" if name in MADE_OF_RECORDS else "nothing to strip"
    assert expected in " ".join(output.split())


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
    output = " ".join(printed_by(capsys, "scan", "optimizer.pt")[1].split())
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
