"""The audit and the exposure of a table: missing values of training records that the weights disclose."""

from __future__ import annotations

import json
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.neural_network import MLPClassifier

import residuum as rs
from residuum.auditing import stages
from residuum.auditing.attribute_stage import (
    NOT_MEMBERS,
    infer_attributes,
    is_table,
    one_hot_groups,
    skip_without_members,
)
from residuum.auditing.case import load_case
from residuum.auditing.plan import NO_DEADLINE
from residuum.auditing.request import AuditRequest
from residuum.auditing.run import Audit, Stage, run_stages
from residuum.cli.main import main
from residuum.errors import InputError
from residuum.records import Dataset, Knowledge

MEMBERS, HELD_OUT = 60, 400
STAGES = (
    Stage("membership", stages.test_membership, stages.skip_without_weights),
    Stage("attributes", infer_attributes, skip_without_members),
)
KKT = {"attack": "kkt", "steps": 5, "restarts": 1}
SMALL_AUDIT = {"effort": "quick", "attacks": [KKT], "baselines": False, "subsets": 200}


@dataclass
class Victim:
    """A network, the table that it was trained on, other records, and the same as files."""

    model: MLPClassifier
    train: Dataset
    holdout: Dataset
    non_members: Dataset
    folder: Path

    @property
    def files(self) -> list[str]:
        return [
            str(self.folder / "m.pkl"),
            *("--data", str(self.folder / "train.csv")),
            *("--holdout", str(self.folder / "test.csv")),
        ]


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    table = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(table.data))
    rows = {
        "train": order[:MEMBERS],
        "test": order[MEMBERS : MEMBERS + HELD_OUT],
        "non_members": order[-MEMBERS:],
    }
    offset, scale = table.data[rows["train"]].mean(0), table.data[rows["train"]].std(0)
    x = (table.data - offset) / scale
    names = tuple(map(str, table.feature_names))
    folder = tmp_path_factory.mktemp("table")
    samples = {}
    for name, index in rows.items():
        samples[name] = Dataset(
            torch.tensor(x[index]),
            torch.tensor(table.target[index]),
            features=names,
            units=tuple("mm²" if "area" in column else "" for column in names),
            scale=torch.tensor(scale),
            offset=torch.tensor(offset),
            record_ids=tuple(f"P{i:03d}" for i in index),
        )
        frame = pandas.DataFrame(x[index], columns=names).assign(y=table.target[index])
        frame.insert(0, "patient_id", samples[name].record_ids)
        frame.to_csv(folder / f"{name}.csv", index=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MLPClassifier(random_state=0, max_iter=400, tol=0, n_iter_no_change=400)
        model.fit(x[rows["train"]], table.target[rows["train"]])
    (folder / "m.pkl").write_bytes(pickle.dumps(model))
    return Victim(model, samples["train"], samples["test"], samples["non_members"], folder)


def audit_of(
    victim: Victim, train: Dataset, knowledge: Knowledge | None = None, **options: Any
) -> Audit:
    """An audit of which only the tests of membership and of attributes ran."""
    request = AuditRequest(**options)
    case = load_case(victim.model, train, victim.holdout, knowledge, request)
    assert case is not None
    return run_stages(Audit(case, request, NO_DEADLINE), STAGES)


@pytest.fixture(scope="module")
def result(victim: Victim, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("audit") / "run"
    return rs.audit(victim.model, data=victim.train, holdout=victim.holdout, out=out, **SMALL_AUDIT)


def test_an_audit_of_a_table_finds_inferable_values(victim: Victim, result: Any) -> None:
    test, verdict = result.attributes, result.verdict
    assert (verdict.outcome, verdict.grade) == ("leak", "attribute")
    assert verdict.inferred == verdict.grades["attribute"] == len(test.rows) >= 6
    assert test.right >= 0.9 * test.reported
    assert test.holdout_reported == 0
    original = load_breast_cancer()
    names = [*map(str, original.feature_names)]
    for cell in test.disclosed:
        index, column = int(cell.record_id[1:]), names.index(cell.column)
        assert victim.train.record_ids[cell.row] == cell.record_id
        true = original.data[index, column]
        assert cell.original[0] == pytest.approx(true, rel=1e-6)
        assert abs(cell.inferred[0] - true) <= 0.03 * original.data[:, column].std()
    assert "an attacker who knows the other columns can infer a missing value" in " ".join(
        result.summary().split()
    )
    assert "10% of the rms of each weight matrix" in " ".join(result.summary().split())
    published = json.loads((Path(result.files["out"]) / "result.json").read_text())
    assert published["attributes"]["disclosed_count"] == test.disclosed_count
    assert published["attributes"]["disclosed"][0]["names"] == [test.disclosed[0].column]
    assert rs.AuditResult.load(result.files["out"]).attributes.rows == test.rows


def test_the_report_shows_values_unless_it_is_redacted(result: Any) -> None:
    cell = next(c for c in result.attributes.disclosed[:20] if c.unit)
    page, redacted = result.html(), result.html(redact=True)
    for text in (*cell.texts, f"ID <bdi>{cell.record_id}"):
        assert f"{text}</bdi>" in page
        assert f"{text}</bdi>" not in redacted
    for text in (cell.column, "Missing values of training records", "error rate"):
        assert text in page
        assert text in redacted
    assert "mm²" in page


def test_records_that_were_never_trained_on_are_not_tested(victim: Victim) -> None:
    audit = audit_of(victim, victim.non_members)
    assert audit.attributes is None
    assert audit.skipped["attributes"] == NOT_MEMBERS
    assert audit.verdict().inferred is None


def test_only_sensitive_columns_and_typed_groups_are_tested(victim: Victim) -> None:
    audit = audit_of(victim, victim.train, sensitive=["mean area", 1])
    assert audit.attributes is not None
    assert audit.attributes.variables == 2
    assert {cell.columns for cell in audit.attributes.disclosed} == {(1,), (3,)}
    with pytest.raises(InputError, match="mean aera"):
        audit_of(victim, victim.train, sensitive="mean aera")
    assert one_hot_groups(Knowledge(), 30) is None
    typed = Knowledge(columns="0-2:onehot,3:integer/9")
    assert one_hot_groups(typed, 4) == [[0, 1, 2]]
    with pytest.raises(InputError, match="the number 2; got column 3"):
        one_hot_groups(typed, 3)


def test_images_and_texts_are_no_tables(victim: Victim) -> None:
    assert is_table(victim.train, Knowledge())
    assert not is_table(victim.train, Knowledge(shape=(1, 5, 6)))
    assert not is_table(Dataset(torch.zeros(2, 1, 3, 3), torch.zeros(2)), Knowledge())
    assert not is_table(Dataset(torch.zeros(2, 300), torch.zeros(2)), Knowledge())
    embeddings = victim.train.replace(texts=("a sentence",) * MEMBERS)
    assert not is_table(embeddings, Knowledge())
    audit = audit_of(victim, victim.train, Knowledge(shape=(1, 5, 6)))
    assert "no rows of a table" in audit.skipped["attributes"]


def test_an_exposure_lists_inferable_values(victim: Victim, tmp_path: Path, capsys: Any) -> None:
    options = ["--attributes", "--sensitive", "mean area", "--sensitive", "1", "--top", "2"]
    assert main(["exposure", *victim.files, *options, "--out", str(tmp_path / "a")]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "missing values that can be inferred" in output
    assert "As a control, 0 of 120 values of held-out records are reported." in output
    saved = json.loads((tmp_path / "a" / "exposure.json").read_text())["attributes"]
    assert saved["is_finding"]
    assert {tuple(cell["names"]) for cell in saved["disclosed"]} == {
        ("mean area",),
        ("mean texture",),
    }
    non_members = rs.exposure(
        victim.model, victim.non_members, victim.holdout, attributes=True, top=0
    )
    assert non_members.attributes is not None
    assert (non_members.attributes.reported, non_members.attributes.is_finding) == (0, False)
    assert rs.exposure(victim.model, victim.train, victim.holdout, top=0).attributes is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sensitive", "1"], "Pass --attributes"),
        (["--attributes", "--sensitive", "mean aera"], "Did you mean 'mean area'"),
    ],
)
def test_wrong_options_of_an_exposure_are_refused(
    victim: Victim, options: list[str], message: str, capsys: Any
) -> None:
    assert main(["exposure", *victim.files, *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_exposure_with_attributes_needs_held_out_records(victim: Victim) -> None:
    with pytest.raises(InputError, match="records that the network never saw"):
        rs.exposure(victim.model, victim.train, attributes=True)
