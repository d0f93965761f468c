"""``residuum attack fill``: a pickled pipeline, tables in their own units, and what the command refuses."""

from __future__ import annotations

import csv
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from residuum.cli.main import main
from tests.program import arguments_of, one_line

MEMBERS = 60
NAMES = ("age", "bmi", "bp", "s1", "s2", "s3", "s5", "s6")
TABLE = load_diabetes(scaled=False)
X = TABLE.data[:, [TABLE.feature_names.index(name) for name in NAMES]]
Y = (TABLE.target - TABLE.target.mean()) / TABLE.target.std()


def write_model(path: Path, *steps: Any, **settings: Any) -> Path:
    """Write a pipeline that is trained on the first MEMBERS rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = make_pipeline(*steps, MLPRegressor(random_state=0, **settings))
        path.write_bytes(pickle.dumps(model.fit(X[:MEMBERS], Y[:MEMBERS])))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.pkl", StandardScaler())


def write_table(path: Path, rows: np.ndarray, missing: Any = None, empty: str = "") -> Path:
    """Write rows with a patient number and a name. One value of each row is left out."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["patient_id", "name", *NAMES])
        for i, row in enumerate(rows.tolist()):
            cells = [
                empty if missing is not None and j == missing[i] else v for j, v in enumerate(row)
            ]
            writer.writerow([f"{i + 100}", f"person {i}", *cells])
    return path


def test_the_command_fills_a_table_in_its_own_units(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = np.random.default_rng(0).integers(0, len(NAMES), MEMBERS)
    partial = write_table(tmp_path / "partial.csv", X[:MEMBERS], missing, "?")
    out = tmp_path / "filled.csv"
    command = ["attack", "fill", str(model), "--partial", str(partial), "--out", str(out)]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["missing"] == result["tested"] == MEMBERS
    assert result["filled"] >= 10
    assert result["notes"] == []
    right = 0
    with out.open() as stream:
        rows = list(csv.DictReader(stream))
    for cell in result["cells"]:
        truth = X[cell["row"], NAMES.index(cell["column"])]
        text = rows[cell["row"]][cell["column"]]
        assert (text == "") == (cell["value"] is None)
        if cell["value"] is not None:
            assert float(text) == cell["value"]
            assert cell["q"] <= 0.05
            tolerance = 0.02 * X[:, NAMES.index(cell["column"])].std()
            right += abs(cell["value"] - truth) <= tolerance
    assert right >= 0.8 * result["filled"]
    # Known cells and columns that are no inputs do not change.
    assert [row["name"] for row in rows] == [f"person {i}" for i in range(MEMBERS)]
    for i, row in enumerate(rows):
        assert row["patient_id"] == str(i + 100)
        assert all(float(row[n]) == X[i, j] for j, n in enumerate(NAMES) if j != missing[i])
    with out.with_suffix(".cells.csv").open() as stream:
        listed = list(csv.DictReader(stream))
    assert [float(c["p"]) for c in listed] == [c["p"] for c in result["cells"]]
    # Records that were never trained on stay empty.
    write_table(tmp_path / "holdout.csv", X[MEMBERS : 2 * MEMBERS], missing)
    command[4] = str(tmp_path / "holdout.csv")
    assert main([*command, "--reference", str(partial)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "0 of 60 missing cells were filled (60 were tested)." in text


def test_what_the_command_refuses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = np.arange(MEMBERS) % len(NAMES)
    partial = write_table(tmp_path / "partial.csv", X[:MEMBERS], missing)
    few = write_table(tmp_path / "few.csv", X[:3], missing)
    complete = write_table(tmp_path / "complete.csv", X[:MEMBERS])
    empty = tmp_path / "empty.csv"
    empty.write_text(",".join(NAMES) + "\n")
    narrow = tmp_path / "narrow.csv"
    narrow.write_text("age,bmi,sex\n1,2,male\n")
    smooth = write_model(tmp_path / "smooth.pkl", StandardScaler(), activation="tanh", max_iter=3)
    steps = write_model(tmp_path / "steps.pkl", PolynomialFeatures(), max_iter=3)
    out = tmp_path / "filled.csv"
    for release, table, target, text in (
        (model, complete, out, "no value is missing"),
        (model, empty, out, "at least one row"),
        (model, few, out, "30 known values of every column"),
        (model, narrow, out, "one column of numbers for each of the 8 inputs"),
        (model, tmp_path / "no.csv", out, "no.csv"),
        (model, model, out, "must be a table"),
        (smooth, partial, out, "ReLU or LeakyReLU"),
        (steps, partial, out, "only scalers before the network"),
        (model, partial, partial, "new .csv file"),
        (model, partial, tmp_path / "filled.txt", "new .csv file"),
    ):
        command = ["attack", "fill", str(release), "--partial", str(table), "--out", str(target)]
        assert main(command) == 2, text
        assert text in one_line(capsys)
    assert not out.exists()
    command = ["attack", "fill", str(model), "--partial", str(partial), "--out", str(out)]
    assert main([*command, "--reference", str(narrow)]) == 2
    assert "must have the columns of the partial records" in one_line(capsys)
    assert main([*command, "--drop", "weight"]) == 2
    assert "no column 'weight'" in one_line(capsys)


def test_every_option_has_help_and_a_group() -> None:
    groups = {"Basic", "Attacker knowledge", "Expert"}
    for argument in arguments_of("attack", "fill"):
        if argument.show and argument.name.startswith("-"):
            assert (argument.parameter.help or "").endswith("."), argument.name
            assert {group.name for group in argument.parameter.group or ()} <= groups
