"""Audits of models that are no network: live objects that predict, and files of linear models."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, make_classification, make_friedman1
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import Lasso, LogisticRegression, PoissonRegressor
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import residuum as rs
from residuum.auditing.dryrun import dry_run
from residuum.auditing.verdict import INCONCLUSIVE, LEAK, NO_LEAK_FOUND
from residuum.cli.main import main
from residuum.errors import CheckpointError, InputError

Samples = tuple[np.ndarray, np.ndarray]
MEMBERS, HELD_OUT = 100, 300


def noisy_classes(seed: int = 0, columns: int = 60) -> tuple[Samples, Samples]:
    """Samples with many columns and wrong labels, which an unregularized model memorizes."""
    x, y = make_classification(
        MEMBERS + HELD_OUT, columns, n_informative=3, n_redundant=0, flip_y=0.3, random_state=seed
    )
    return (x[:MEMBERS], y[:MEMBERS]), (x[MEMBERS:], y[MEMBERS:])


def cancer() -> tuple[Samples, Samples]:
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    train, holdout = order[:MEMBERS], order[MEMBERS : MEMBERS + HELD_OUT]
    return (x[train], y[train]), (x[holdout], y[holdout])


class NearestLabel:
    """A model of a user, with nothing but the method predict. It stores its records with a little noise."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        noise = 1e-3 * np.random.default_rng(0).normal(size=x.shape)
        self.memory = [tuple(row) for row in x + noise], list(y)

    def predict(self, x: np.ndarray) -> list[float]:
        rows, targets = self.memory
        distances = np.square(x[:, None] - np.array(rows)[None]).sum(2)
        return [targets[i] for i in distances.argmin(1)]


class Failing:
    def predict(self, x: np.ndarray) -> np.ndarray:
        raise RuntimeError("the service is not available")


def audit(model: Any, samples: tuple[Samples, Samples], **options: Any) -> rs.AuditResult:
    return rs.audit(model, data=samples[0], holdout=samples[1], **options)


def auc(result: rs.AuditResult) -> tuple[float, float, float]:
    assert result.membership is not None
    loss = result.membership.loss
    assert loss is not None
    return loss.auc_lower, loss.auc, loss.auc_upper


def overfitted(train: Samples) -> LogisticRegression:
    return LogisticRegression(C=1e6, max_iter=5000).fit(*train)


def test_members_of_an_overfitted_model_have_smaller_losses(tmp_path: Path) -> None:
    samples = noisy_classes(columns=200)
    result = audit(overfitted(samples[0]), samples, out=tmp_path / "audit")
    assert auc(result)[0] > 0.65
    assert (result.verdict.outcome, result.exit_code) == (INCONCLUSIVE, 3)
    first, second = result.verdict.reasons[:2]
    assert first.startswith("the model memorizes its training samples")
    assert f"AUC of {auc(result)[1]:.2f}" in result.verdict.sentence
    no_attack = "residuum has no attack on models of the class LogisticRegression"
    assert second == f"{no_attack}, so finding nothing proves nothing"
    assert "regularization" in result.screen.next.text
    page = (tmp_path / "audit/report.html").read_text()
    assert "Losses of this one model are compared" in page
    assert "activation boundaries of neurons onto" not in page
    published = json.loads((tmp_path / "audit/result.json").read_text())
    assert published["membership"]["loss"]["auc"] == auc(result)[1]
    loaded = rs.AuditResult.load(tmp_path / "audit")
    assert loaded.summary() == result.summary()
    second_result = audit(overfitted(samples[0]), samples, out=tmp_path / "audit")
    assert second_result.created == result.created
    with pytest.raises(InputError, match="other"):
        audit(LogisticRegression().fit(*samples[0]), samples, out=tmp_path / "audit")


@pytest.mark.parametrize("seed", range(3))
def test_a_table_that_was_not_trained_on_has_losses_like_held_out_samples(seed: int) -> None:
    """Negative control: a model of another table of the same kind, and its audited table never trained on."""
    x, y = make_classification(
        2 * MEMBERS + HELD_OUT, 60, n_informative=3, n_redundant=0, flip_y=0.3, random_state=seed
    )
    model = overfitted((x[:MEMBERS], y[:MEMBERS]))
    outsiders = slice(2 * MEMBERS, None)
    other = (x[MEMBERS : 2 * MEMBERS], y[MEMBERS : 2 * MEMBERS])
    lower, _, upper = auc(audit(model, (other, (x[outsiders], y[outsiders]))))
    assert lower < 0.5 < upper
    trained_on = ((x[:MEMBERS], y[:MEMBERS]), (x[outsiders], y[outsiders]))
    assert auc(audit(model, trained_on))[0] > 0.5


def test_a_reason_without_memorization_names_the_class_of_the_model() -> None:
    samples = cancer()
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01)).fit(*samples[0])
    result = audit(model, samples)
    assert result.exit_code == 3
    sentence = (
        "residuum has no attack on models of the class Pipeline, so finding nothing proves nothing."
    )
    assert result.verdict.sentence.endswith(sentence)
    summary = " ".join(result.summary().split())
    assert "members are separated from non-members with an AUC of" in summary
    assert "No audit by residuum can rule out a leak" in summary


def test_an_object_with_predict_only_is_audited() -> None:
    (x, y), (other_x, other_y) = noisy_classes(columns=5)
    samples = (x, y + 0.5), (other_x, other_y + 0.5)
    result = audit(NearestLabel(*samples[0]), samples)
    assert auc(result)[0] > 0.5
    assert result.membership is not None
    assert not result.membership.is_finding
    assert result.exit_code == 3


def test_an_object_whose_predict_raises_is_refused_with_its_message() -> None:
    samples = noisy_classes(columns=5)
    with pytest.raises(
        InputError, match=r"Failing\.predict raised RuntimeError: the service is not"
    ):
        audit(Failing(), samples)
    plan = dry_run(Failing(), data=samples[0], holdout=samples[1])
    assert "the service is not available" in plan.obstacles[0]
    assert plan.exit_code == 2


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda n: np.full((n, 2), 0.7), "add up to 1"),
        (lambda n: np.full((n, 2), np.nan), "finite"),
        (lambda n: np.full((n, 2, 2), 0.25), "one row for each"),
        (lambda n: np.full((n + 1, 2), 0.5), "one row for each"),
        (lambda n: ["yes"] * n, "must be numbers"),
    ],
)
def test_predictions_that_are_no_class_shares_are_refused(outputs: Any, message: str) -> None:
    class Model:
        def predict_proba(self, x: np.ndarray) -> Any:
            return outputs(len(x))

    with pytest.raises(InputError, match=message):
        audit(Model(), noisy_classes(columns=5))


def test_a_search_and_its_file_give_the_same_losses(tmp_path: Path) -> None:
    samples = noisy_classes()
    grid = {"logisticregression__C": [1.0, 1e4]}
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000))
    search = GridSearchCV(pipeline, grid).fit(*samples[0])
    path = tmp_path / "search.pkl"
    path.write_bytes(pickle.dumps(search))
    live, stored = audit(search, samples), audit(path, samples)
    assert auc(live) == pytest.approx(auc(stored), abs=1e-12)
    assert auc(live)[0] > 0.5


@pytest.mark.parametrize("classes", [(0, 1), (1, 2), (-1, 1)])
def test_labels_are_compared_with_the_classes_of_the_model(classes: tuple[int, int]) -> None:
    (x, y), (other_x, other_y) = noisy_classes()
    expected = auc(audit(overfitted((x, y)), ((x, y), (other_x, other_y))))
    names = np.array(classes)
    samples = (x, names[y]), (other_x, names[other_y])
    assert auc(audit(overfitted(samples[0]), samples)) == pytest.approx(expected, abs=1e-6)


def test_names_of_classes_in_a_table_are_those_of_the_model(tmp_path: Path) -> None:
    train, holdout = noisy_classes(columns=5)
    names = np.array(["zebra", "ant"])
    for name, (x, y) in (("train", train), ("test", holdout)):
        lines = [
            ",".join([*map(repr, row.tolist()), label])
            for row, label in zip(x, names[y], strict=True)
        ]
        header = ",".join([*"abcde", "label"])
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *lines]) + "\n")
    model = KNeighborsClassifier(1).fit(train[0], names[train[1]])
    result = rs.audit(model, data=tmp_path / "train.csv", holdout=tmp_path / "test.csv")
    assert auc(result)[0] > 0.5
    assert result.exit_code == 1  # the pickle of a nearest-neighbor model stores its samples
    assert result.verdict.grades == {"verbatim": MEMBERS}


@pytest.mark.parametrize("model", [LogisticRegression(), Lasso(0.1), PoissonRegressor()])
def test_files_of_linear_models_are_audited(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, holdout = noisy_classes(columns=20)
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(model.fit(*train)))
    for name, (x, y) in (("train", train), ("test", holdout)):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    command = ["audit", str(path), "--data", str(tmp_path / "train.npz")]
    command += ["--holdout", str(tmp_path / "test.npz"), "--out", str(tmp_path / "a")]
    assert main(command) == 3
    output = " ".join(capsys.readouterr().out.split())
    assert "By their losses, members are separated" in output
    assert f"models of the class {type(model).__name__}" in output
    result, live = rs.AuditResult.load(tmp_path / "a"), audit(model, (train, holdout))
    assert auc(result) == pytest.approx(auc(live), abs=1e-12)


def test_a_live_forest_gives_the_findings_of_its_pickle(tmp_path: Path) -> None:
    x, y = make_friedman1(320, n_features=5, noise=1.0, random_state=0)
    samples = (x[:100], y[:100]), (x[100:], y[100:])
    model = RandomForestRegressor(60, random_state=0).fit(*samples[0])
    path = tmp_path / "forest.pkl"
    path.write_bytes(pickle.dumps(model))
    knowledge = {"column_ranges": "train"}
    live, stored = (audit(m, samples, knowledge=knowledge) for m in (model, path))
    assert live.exit_code == stored.exit_code == 1
    assert live.verdict.grades == stored.verdict.grades
    assert rs.same(live.findings, stored.findings)
    assert auc(live) == auc(stored)
    assert live.table is not None
    assert rs.same(live.table.replace(seconds=0.0), stored.table.replace(seconds=0.0))  # type: ignore[union-attr]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_forest_behind_scalers_is_compared_in_the_units_of_its_table(tmp_path: Path) -> None:
    x, y = make_friedman1(320, n_features=5, noise=1.0, random_state=0)
    x = x * [1, 10, 100, 0.1, 5] + 3
    samples = (x[:100], y[:100]), (x[100:], y[100:])
    model = make_pipeline(StandardScaler(), RandomForestRegressor(60, random_state=0))
    path = tmp_path / "forest.pkl"
    path.write_bytes(pickle.dumps(model.fit(*samples[0])))
    for knowledge in (
        {"column_ranges": "train"},
        {"column_ranges": np.array([x.min(0), x.max(0)])},
    ):
        result = audit(path, samples, knowledge=knowledge)
        assert result.verdict.grades["near-copy"] > 80
        assert auc(result)[0] > 0.7
        assert result.evidence is not None
        assert result.evidence.offset is not None
        displayed = result.evidence.x * result.evidence.scale + result.evidence.offset
        assert np.allclose(displayed.numpy(), x[:100][result.evidence.index.numpy()])


def test_a_live_pipeline_with_an_mlp_is_read_as_a_network() -> None:
    samples = noisy_classes(columns=5)
    model = make_pipeline(StandardScaler(), MLPClassifier((4,), max_iter=5)).fit(*samples[0])
    plan = dry_run(model, data=samples[0], holdout=samples[1])
    assert any(row.what == "network" for row in plan.applies)


def test_a_file_that_residuum_cannot_evaluate_names_the_live_model_as_remedy(
    tmp_path: Path,
) -> None:
    samples = cancer()
    model = GaussianNB().fit(*samples[0])
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(model))
    with pytest.raises(CheckpointError, match="pass the model object"):
        audit(path, samples)
    assert auc(audit(model, samples))[1] > 0


def test_an_object_that_cannot_be_pickled_is_audited_with_a_warning() -> None:
    class Local:
        def predict(self, x: np.ndarray) -> np.ndarray:
            return x.sum(1)

    samples = noisy_classes(columns=5)
    result = audit(Local(), samples)
    assert result.exit_code == 3
    assert any("pickling the Local raised" in warning for warning in result.warnings)


def test_without_labels_or_held_out_samples_the_reason_is_said() -> None:
    (x, y), holdout = noisy_classes(columns=5)
    model = LogisticRegression().fit(x, y)
    without_labels = rs.audit(model, data=x, holdout=holdout)
    assert without_labels.membership is not None
    assert "the training samples have no labels" in without_labels.membership.reason
    without_holdout = rs.audit(model, data=(x, y))
    assert without_holdout.exit_code == 3
    summary = " ".join(without_holdout.summary().split())
    assert "samples that the network never saw (--holdout), at least 100" in summary
    with pytest.raises(InputError, match="has 5 input columns, and the samples have 4 values"):
        rs.audit(model, data=(x[:, :4], y), holdout=(holdout[0][:, :4], holdout[1]))


FORESTS = {
    "default": {"n_estimators": 30},
    "large leaves": {"n_estimators": 30, "min_samples_leaf": 20},
}


@pytest.mark.parametrize("kind", FORESTS)
def test_a_dry_run_of_a_forest_says_what_an_audit_reaches(kind: str, tmp_path: Path) -> None:
    x, y = make_friedman1(320, n_features=5, noise=1.0, random_state=0)
    samples = {"data": (x[:100], y[:100]), "holdout": (x[100:], y[100:])}
    path = tmp_path / "forest.pkl"
    model = RandomForestRegressor(random_state=0, **FORESTS[kind]).fit(*samples["data"])
    path.write_bytes(pickle.dumps(model))
    plan = dry_run(path, **samples)
    rows = {row.what: row for row in plan.applies}
    assert rows["forest"].status == rows["losses"].status == "to be tried"
    assert "30 trees" in rows["trees"].reason
    assert all(text.startswith("can be reached") for text in plan.verdicts.values())
    result = rs.audit(path, **samples)
    assert plan.verdicts[result.verdict.outcome].startswith("can be reached")
    done = {row.what: row.status for row in result.applies}
    assert {
        what: status.replace("to be tried", "tried")
        for what, status in ((row.what, row.status) for row in plan.applies)
    } == done


@pytest.mark.parametrize(
    ("change", "leak", "passed"),
    [
        ({"holdout": 50}, "at least 100 samples", "at least 100 samples"),
        ({"holdout": 110}, "can be reached", "a control needs 20 held-out samples and 100 others"),
        ({"positive_controls": False}, "can be reached", "--no-positive-controls"),
        ({"effort": "quick"}, "can be reached", "cannot rule one out"),
    ],
)
def test_a_dry_run_of_a_forest_says_which_verdicts_it_cannot_reach(
    change: dict[str, Any], leak: str, passed: str
) -> None:
    x, y = make_friedman1(320, n_features=5, noise=1.0, random_state=0)
    options = dict(change)
    end = 100 + options.pop("holdout", 220)
    model = RandomForestRegressor(5, random_state=0, min_samples_leaf=20).fit(x[:100], y[:100])
    samples = {"data": (x[:100], y[:100]), "holdout": (x[100:end], y[100:end])}
    plan = dry_run(model, **samples, **options)
    assert leak in plan.verdicts[LEAK]
    assert passed in plan.verdicts[NO_LEAK_FOUND]
    assert rs.audit(model, **samples, **options).verdict.outcome == INCONCLUSIVE


def test_the_command_previews_a_forest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = make_friedman1(50, n_features=5, random_state=0)
    path = tmp_path / "forest.pkl"
    path.write_bytes(pickle.dumps(RandomForestClassifier(5).fit(x, y > y.mean())))
    assert main(["audit", str(path), "--dry-run"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "forest" in output
    assert "no training samples (--data)" in output
