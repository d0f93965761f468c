"""Records are named as in the user's file: its row, counted from 0, and its ID if there is one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import residuum as rs
from residuum.cli.main import main
from residuum.datasets.given import as_dataset, read_samples
from residuum.errors import DataError
from residuum.records import Dataset, Knowledge
from residuum.report.html import items_of, render
from tests.victims import knowledge, leaky

IDS = tuple(f"P-{i:03d}" for i in range(40))


def audited(
    train: Dataset, holdout: Dataset, knowledge: Knowledge, **options: object
) -> rs.AuditResult:
    return rs.audit(
        leaky()[0],
        data=train,
        holdout=holdout,
        knowledge=knowledge,
        effort="quick",
        attacks=({"attack": "kkt", "steps": 400, "restarts": 2}, "unmix"),
        subsets=300,
        **options,
    )


@pytest.fixture(scope="module")
def shifted() -> rs.AuditResult:
    """An audit in which rows 0 and 5 are set aside, because the held-out set holds them too."""
    _, split = leaky()
    copies = split.train.take(torch.tensor([0, 5]))
    holdout = split.holdout.replace(
        x=torch.cat([copies.x, split.holdout.x]), y=torch.cat([copies.y, split.holdout.y])
    )
    return audited(split.train.replace(record_ids=IDS), holdout, knowledge(split))


def test_reports_name_the_row_of_the_users_file(shifted: rs.AuditResult) -> None:
    train = leaky()[1].train
    items = items_of(shifted)
    assert items
    numbers = {item.number for item in items}
    assert not numbers & {0, 5}
    assert max(numbers) > 37  # 38 samples were judged: positions would end at 37
    for item in items:
        sample = train.x[item.number] + train.mean
        assert np.allclose(np.asarray(item.nearest).reshape(-1), sample.reshape(-1).numpy())
        assert item.record_id == IDS[item.number]
    assert shifted.findings is not None
    assert shifted.scores is not None
    recovered = {row.index for row in shifted.scores.per_sample if row.recovered}
    assert set(shifted.findings.samples) >= recovered
    assert {row.id for row in shifted.scores.per_sample} == set(IDS) - {IDS[0], IDS[5]}


def test_cards_show_the_id_and_redacted_reports_do_not(shifted: rs.AuditResult) -> None:
    best = items_of(shifted)[0]
    assert f"sample {best.number} (ID {best.record_id})" in re.sub(r"\s+", " ", render(shifted))
    assert not re.search(r"P-\d{3}", render(shifted, redact=True))


def test_every_artifact_says_how_many_records_were_not_judged(
    shifted: rs.AuditResult, tmp_path: Path
) -> None:
    sentence = "2 of 40 samples were not judged"
    assert sentence in shifted.verdict.headline
    assert sentence.upper() in shifted.summary().upper()
    shifted.save(tmp_path / "run")
    sarif = json.loads((tmp_path / "run" / "report.sarif").read_text())
    assert sentence in sarif["runs"][0]["results"][0]["message"]["text"]
    assert sentence in (tmp_path / "run" / "model_card.md").read_text()
    assert sentence in (tmp_path / "run" / "report.html").read_text()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["checks"]["set_aside"] == [0, 5]
    assert result["verdict"]["not_judged"] == 2


def test_an_id_column_names_records_and_is_no_input(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("patient_id,age,height,label\nA7,30,1.7,0\nB2,40,1.8,1\nC9,50,1.6,1\n")
    data = read_samples(path)[0]
    assert data.record_ids == ("A7", "B2", "C9")
    assert data.features == ("age", "height")
    assert any("holds record IDs" in note for note in data.notes)
    path.write_text("grid,kid,id,label\n1,5,30,0\n2,6,30,1\n")  # not unique, or not an ID's name
    assert read_samples(path)[0].features == ("grid", "kid", "id")
    data.to_npz(tmp_path / "people.npz")
    assert as_dataset(tmp_path / "people.npz", "data").record_ids == ("A7", "B2", "C9")
    assert data.take(torch.tensor([2, 0])).record_ids == ("C9", "A7")
    assert data.take(torch.tensor([2, 0])).take(torch.tensor([1])).rows == [0]
    with pytest.raises(DataError, match="one entry per sample"):
        data.replace(record_ids=("A7",))


def test_ids_of_one_archive_with_both_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.normal(size=(4, 3)), "y_train": np.array([0, 1, 0, 1])}
    arrays |= {"x_test": rng.normal(size=(6, 3)), "y_test": np.array([0, 1] * 3)}
    np.savez(tmp_path / "both.npz", **arrays, id_train=np.array(list("abcd")))
    assert as_dataset(tmp_path / "both.npz", "data").record_ids == tuple("abcd")


def test_the_command_says_it_on_the_first_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, split = leaky()
    rs.save_checkpoint(checkpoint, tmp_path / "m.safetensors")
    copies = split.train.take(torch.tensor([3]))
    split.train.to_npz(tmp_path / "train.npz")
    split.holdout.replace(
        x=torch.cat([split.holdout.x, 0.9 * copies.x]), y=torch.cat([split.holdout.y, copies.y])
    ).to_npz(tmp_path / "test.npz")
    command = ["audit", str(tmp_path / "m.safetensors"), "--data", str(tmp_path / "train.npz")]
    command += ["--holdout", str(tmp_path / "test.npz"), "--out", str(tmp_path / "run")]
    command += ["--effort", "quick", "--attacks", "unmix"]
    main([*command, "--subsets", "200"])
    output = capsys.readouterr().out
    assert "1 OF 40 SAMPLES WAS NOT JUDGED" in output.upper()


@pytest.mark.parametrize("form", ["dictionary", "float32", "public"])
def test_a_mean_of_the_training_samples_is_named_as_such(form: str) -> None:
    """A training mean makes a stronger attacker, also if the user passes it."""
    checkpoint, split = leaky()
    mean = {"float32": split.train.mean.float(), "public": split.holdout.images.mean(0)}
    result = rs.audit(
        checkpoint,
        data=split.train,
        holdout=split.holdout,
        knowledge={"value_range": (0, 1), "mean": mean.get(form, split.train.mean)},
        effort="quick",
        attacks=("unmix",),
        subsets=200,
    )
    source = result.knowledge.provenance.get("mean", "user")
    assert source == ("user" if form == "public" else "train")
    assert ("from the training data" in " ".join(result.summary().split())) == (source == "train")
