"""Tables with texts, record IDs and row numbers are audited as they are."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import nn

import residuum as rs
from residuum.auditing.commands import setting_options
from residuum.cli.main import main
from residuum.errors import DataError, InputError

NUMBERS = ["age", "height", "weight"]


def people(n: int, seed: int) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    return pandas.DataFrame(
        {
            "patient_id": [f"P{seed}-{i:03d}" for i in range(n)],
            "row": np.arange(n),
            "age": rng.uniform(18, 90, n).round(2),
            "height": rng.normal(170, 10, n).round(2),
            "weight": rng.normal(70, 12, n).round(2),
            "city": rng.choice(["Porto", "Lyon", "Graz", "Turku"], n),
            "note": [f"seen by Dr. {word}" for word in rng.integers(0, 10**6, n)],
            "diagnosis": rng.choice(["ill", "well"], n),
        }
    )


TRAIN, HOLDOUT = people(30, 1), people(120, 2)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    TRAIN.to_csv(tmp_path / "train.csv", sep=";", index=False)
    HOLDOUT.to_json(tmp_path / "test.jsonl", orient="records", lines=True)
    return tmp_path


def command(files: Path, model: str, *more: str) -> list[str]:
    samples = ["--data", str(files / "train.csv"), "--holdout", str(files / "test.jsonl")]
    return ["audit", str(files / model), *samples, "--out", str(files / "out"), *more]


def network(inputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, 1))


def encode(frame: pandas.DataFrame) -> ColumnTransformer:
    columns = [("n", StandardScaler(), NUMBERS), ("c", OneHotEncoder(), ["city"])]
    return ColumnTransformer(columns).fit(frame)


def save(model: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(model))


def result_of(files: Path) -> Any:
    return json.loads((files / "out" / "result.json").read_text())


def test_stored_records_are_found_in_a_table_with_texts(files: Path) -> None:
    """The number of stored values leaves out the row numbers; the held-out rows are not stored."""
    knn = KNeighborsClassifier().fit(TRAIN[NUMBERS].to_numpy(), TRAIN["diagnosis"])
    save(make_pipeline(knn), files / "knn.pkl")
    assert main(command(files, "knn.pkl", "--quiet")) == 1
    (row,) = result_of(files)["attacks"]
    assert row["recovered"] == len(TRAIN)
    assert row["expected_by_chance"] == 0


def test_stored_records_are_searched_before_a_table_is_refused(files: Path, capsys: Any) -> None:
    weights = network(9).state_dict()
    torch.save(weights, files / "plain.pt")
    assert main(command(files, "plain.pt")) == 2
    message = capsys.readouterr().err
    assert "the 9 inputs of the model" in message
    assert "'city', 'note' hold text" in message
    assert "Encode" in message
    torch.save(
        {"model": weights, "x_train": torch.tensor(TRAIN[NUMBERS].to_numpy())}, files / "rows.pt"
    )
    assert main(command(files, "rows.pt", "--quiet")) == 1
    stored = result_of(files)
    assert stored["attacks"][0]["recovered"] == len(TRAIN)
    assert any("the 9 inputs of the model" in note for note in stored["notes"])
    other_rows = torch.tensor(people(30, 5)[NUMBERS].to_numpy())
    torch.save({"model": weights, "x_train": other_rows}, files / "others.pt")
    arguments = command(files, "others.pt", "--out", str(files / "other"))
    assert main(arguments) == 3
    output = " ".join(capsys.readouterr().out.split())
    assert "only stored records were searched" in output
    assert "Pass samples that the model can receive" in output


def test_label_and_drop_are_settings(files: Path, capsys: Any) -> None:
    torch.save(network(2).state_dict(), files / "m.pt")
    assert main(command(files, "m.pt", "--dry-run")) == 2
    assert "--drop row --drop age" in " ".join(capsys.readouterr().out.split())
    assert main(command(files, "m.pt", "--dry-run", "--drop", "row", "--drop", "age")) == 0
    assert main(command(files, "m.pt", "--drop", "hieght")) == 2
    assert "Did you mean 'height'" in capsys.readouterr().err
    save(KNeighborsClassifier().fit(TRAIN[NUMBERS[:2]].to_numpy(), TRAIN["row"]), files / "knn.pkl")
    roles = {"label": "row", "drop": ["weight", "diagnosis"]}
    words = ["--label", "row", "--drop", "weight", "--drop", "diagnosis"]
    assert main(command(files, "knn.pkl", *words, "--quiet")) == 1
    repeat = ["--config", str(files / "out" / "config.toml"), "--out", str(files / "again")]
    assert main(["audit", *repeat, "--quiet"]) == 1
    for folder in ("out", "again"):
        result = json.loads((files / folder / "result.json").read_text())
        assert result["settings"]["requested"] == roles
        assert result["attacks"][0]["recovered"] == len(TRAIN)
    assert setting_options(roles) == words


def test_a_pipeline_in_memory_receives_the_columns_that_it_was_fitted_to() -> None:
    """The row numbers say which set a sample is from, so they must not enter the comparison."""
    columns = ["city", *NUMBERS]
    model = make_pipeline(encode(TRAIN[columns]), LogisticRegression())
    model.fit(TRAIN[columns], TRAIN["diagnosis"])
    result = rs.audit(model, data=TRAIN, holdout=HOLDOUT, label="diagnosis")
    assert (result.verdict.outcome, result.controls.failures) == ("inconclusive", ())
    probabilities = model.predict_proba(TRAIN[columns])
    right = (TRAIN["diagnosis"] == "well").to_numpy().astype(int)
    assert result.membership is not None
    losses = -np.log(probabilities[np.arange(len(TRAIN)), right])
    held_out = model.predict_proba(HOLDOUT[columns])
    held_out_right = (HOLDOUT["diagnosis"] == "well").to_numpy().astype(int)
    held_out_losses = -np.log(held_out[np.arange(len(HOLDOUT)), held_out_right])
    auc = (losses[:, None] < held_out_losses).mean()
    assert result.membership.loss.auc == pytest.approx(auc, abs=1e-9)


def test_a_pipeline_of_one_text_receives_the_texts() -> None:
    texts = TRAIN[["note", "diagnosis"]], HOLDOUT[["note", "diagnosis"]]
    model = make_pipeline(TfidfVectorizer(), LogisticRegression())
    model.fit(TRAIN["note"], TRAIN["diagnosis"])
    result = rs.audit(model, data=texts[0], holdout=texts[1])
    assert result.membership is not None
    assert result.membership.loss.auc > 0.5


def test_exposure_takes_the_same_tables(files: Path, capsys: Any) -> None:
    torch.save(network(3).state_dict(), files / "m.pt")
    arguments = ["exposure", str(files / "m.pt"), "--data", str(files / "train.csv")]
    more = ["--holdout", str(files / "test.jsonl"), "--group-by", "city", "--json"]
    assert main([*arguments, *more]) == 0
    ranking = json.loads(capsys.readouterr().out)
    assert {group["name"] for group in ranking["groups"]} == set(TRAIN["city"])
    live = rs.exposure(network(3), TRAIN, HOLDOUT, grouped_by="city")
    x = TRAIN[NUMBERS].to_numpy()
    y = (TRAIN["diagnosis"] == "well").to_numpy().astype(int)
    same = rs.exposure(network(3), (x, y))
    assert torch.equal(live.score, same.score)
    with pytest.raises(DataError, match="Did you mean 'city'"):
        rs.exposure(network(3), TRAIN, grouped_by="citty")
    with pytest.raises(InputError, match="named columns"):
        rs.exposure(network(3), (x, y), drop=("a",))
