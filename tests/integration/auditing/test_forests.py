"""Audits of forests: a leak, a pass, an inconclusive audit, and a table that was not trained on."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, make_friedman1
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

import residuum as rs
from residuum.cli.main import main

RECORDS, HELD_OUT = 100, 220
SAFE = {"min_samples_leaf": 20, "max_depth": 3, "n_estimators": 30}


def friedman(seed: int = 0) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    x, y = make_friedman1(RECORDS + HELD_OUT, n_features=5, noise=1.0, random_state=seed)
    x = x.astype(np.float32).astype(np.float64)
    return (x[:RECORDS], y[:RECORDS]), (x[RECORDS:], y[RECORDS:])


def saved(model: Any, folder: Path) -> Path:
    path = folder / "forest.pkl"
    path.write_bytes(pickle.dumps(model))
    return path


def test_a_default_forest_leaks_its_table(tmp_path: Path) -> None:
    train, holdout = friedman()
    path = saved(RandomForestRegressor(60, random_state=0).fit(*train), tmp_path)
    result = rs.audit(
        path,
        data=train,
        holdout=holdout,
        knowledge={"column_ranges": "train"},
        out=tmp_path / "audit",
    )
    assert result.exit_code == 1
    assert result.verdict.grade == "near-copy"
    assert result.verdict.grades["near-copy"] > 0.9 * RECORDS
    assert result.verdict.grades["attribute"] == RECORDS
    assert result.findings is not None
    assert result.findings.expected_by_chance < 5
    assert result.table is not None
    assert result.table.has_row_order
    loaded = rs.AuditResult.load(tmp_path / "audit")
    assert loaded.verdict.headline == result.verdict.headline
    assert rs.same(loaded.table, result.table)


def test_a_table_that_was_not_trained_on_is_no_leak(tmp_path: Path) -> None:
    train, holdout = friedman()
    (x, y), _ = friedman(seed=1)
    path = saved(RandomForestRegressor(60, random_state=0).fit(x, y), tmp_path)
    result = rs.audit(path, data=train, holdout=holdout, knowledge={"column_ranges": "train"})
    assert result.exit_code == 3 or result.exit_code == 0
    assert not result.verdict.grades


def test_a_forest_with_large_leaves_passes(tmp_path: Path) -> None:
    train, holdout = friedman()
    path = saved(RandomForestRegressor(random_state=0, **SAFE).fit(*train), tmp_path)
    result = rs.audit(path, data=train, holdout=holdout)
    assert result.exit_code == 0, result.summary()
    (controls,) = result.checks.positive_controls
    assert controls.samples >= RECORDS / 2
    assert controls.sentence in result.summary().replace("\n", " ")


def test_more_trees_than_records_reveal_targets_at_any_depth(tmp_path: Path) -> None:
    train, holdout = friedman()
    settings = {**SAFE, "n_estimators": RECORDS + 20}
    path = saved(RandomForestRegressor(random_state=0, **settings).fit(*train), tmp_path)
    result = rs.audit(path, data=train, holdout=holdout)
    assert result.exit_code == 1
    assert result.verdict.grades == {"attribute": RECORDS}


def test_a_classifier_reveals_its_labels_in_row_order(tmp_path: Path) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    train, holdout = ((x[rows], y[rows]) for rows in (order[:60], order[60:300]))
    path = saved(RandomForestClassifier(80, max_depth=2, random_state=0).fit(*train), tmp_path)
    result = rs.audit(path, data=train, holdout=holdout)
    assert result.exit_code == 1
    assert result.targets is not None
    assert (result.targets.what, result.targets.recovered) == ("labels", 60)


def test_without_samples_the_audit_is_inconclusive_and_says_what_it_recovered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, _ = friedman()
    path = saved(RandomForestRegressor(60, random_state=0).fit(*train), tmp_path)
    assert main(["audit", str(path), "--out", str(tmp_path / "audit")]) == 3
    assert f"targets of {RECORDS} of {RECORDS}" in capsys.readouterr().out.replace("\n", " ")


def test_the_attack_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, _ = friedman()
    path = saved(RandomForestRegressor(60, random_state=0).fit(*train), tmp_path)
    out = tmp_path / "attack"
    assert main(["attack", "forest", str(path), "--value-range", "0,1", "--out", str(out)]) == 0
    lines = (out / "table.csv").read_text().splitlines()
    assert len(lines) == RECORDS + 1
    assert lines[0] == "column 0,column 1,column 2,column 3,column 4,target"
    assert float(lines[1].split(",")[-1]) == pytest.approx(train[1][0])
    summary = json.loads((out / "attack.json").read_text())
    assert summary["targets"] == RECORDS
    assert f"targets of {RECORDS} of {RECORDS}" in capsys.readouterr().out
    network = tmp_path / "model.pkl"
    network.write_bytes(pickle.dumps({"weights": [1.0]}))
    assert main(["attack", "forest", str(network), "--out", str(tmp_path / "b")]) == 2


def test_exposure_ranks_records_by_what_the_trees_determine(tmp_path: Path) -> None:
    train, other = friedman()
    path = saved(RandomForestRegressor(60, random_state=0).fit(*train), tmp_path)
    names = "a,b,c,d,e,target"
    files = {"train": train, "other": (other[0][:RECORDS], other[1][:RECORDS])}
    summaries = {}
    for name, (x, y) in files.items():
        data, out = tmp_path / f"{name}.csv", tmp_path / f"exposure-{name}"
        rows = np.column_stack([x, y])
        np.savetxt(data, rows, delimiter=",", header=names, comments="", fmt="%.17g")
        assert main(["exposure", str(path), "--data", str(data), "--out", str(out), "-q"]) == 0
        summaries[name] = json.loads((out / "exposure.json").read_text())
        assert len((out / "exposure.csv").read_text().splitlines()) == RECORDS + 1
    train_records, other_records = (summary["per_record"] for summary in summaries.values())
    assert sum(record["exact_columns"] == 5 for record in train_records) > 0.95 * RECORDS
    assert all(record["target"] for record in train_records)
    assert not any(record["exact_columns"] == 5 or record["target"] for record in other_records)
