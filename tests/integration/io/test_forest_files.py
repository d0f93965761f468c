"""The trees of every model that residuum reads: predictions, bootstrap samples and refusals."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.datasets import make_friedman1
from sklearn.ensemble import (
    AdaBoostRegressor,
    BaggingClassifier,
    BaggingRegressor,
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
    RandomTreesEmbedding,
)
from sklearn.tree import (
    DecisionTreeClassifier,
    DecisionTreeRegressor,
    ExtraTreeClassifier,
    ExtraTreeRegressor,
)

from residuum.attacks.trees.forest import ForestAttack, why_not
from residuum.errors import CheckpointError
from residuum.io.forests import NamedForest, read_forests
from residuum.io.release import open_release
from residuum.trees.bootstrap import bootstrap_counts
from residuum.trees.forest import BOOSTING, ISOLATION, Forest
from residuum.trees.labels import find_labels
from residuum.trees.predict import predict
from residuum.trees.recovery import recover_table

RECORDS = 150
OLD_FILES = Path(__file__).parents[2] / "data" / "sklearn-1.4.2.zip"


def table(
    missing: float = 0.0, seed: int = 0, records: int = RECORDS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random float64 samples, targets and three classes."""
    x, y = make_friedman1(records, n_features=5, noise=1.0, random_state=seed)
    labels = np.digitize(y, np.quantile(y, [0.3, 0.7]))
    x[np.random.default_rng(seed).random(x.shape) < missing] = np.nan
    return x, y, labels


def read(path: Path) -> NamedForest:
    (named,) = read_forests(open_release(path))
    return named


def forest_of(model: Any, folder: Path) -> Forest:
    path = folder / "model.pkl"
    path.write_bytes(pickle.dumps(model))
    named = read(path)
    assert named.name == type(model).__name__
    return named.forest


def margin(model: Any, x: np.ndarray) -> np.ndarray:
    """(samples, outputs) what the model itself predicts before its link function."""
    match model:
        case HistGradientBoostingClassifier() | GradientBoostingClassifier():
            output = model.decision_function(x)
        case IsolationForest():
            draws = model._max_samples
            c = 2 * (np.log(draws - 1) + np.euler_gamma) - 2 * (draws - 1) / draws
            output = -np.log2(-model.score_samples(x)) * c
        case HistGradientBoostingRegressor(loss="gamma"):
            output = np.log(model.predict(x))
        case _ if hasattr(model, "predict_proba"):
            output = model.predict_proba(x)
        case _:
            output = model.predict(x)
    return output.reshape(len(x), -1)


REGRESSORS: dict[str, Callable[[], Any]] = {
    "forest": lambda: RandomForestRegressor(7, random_state=0),
    "depth": lambda: RandomForestRegressor(7, max_depth=3, criterion="poisson", random_state=0),
    "median": lambda: RandomForestRegressor(7, criterion="absolute_error", random_state=0),
    "extra": lambda: ExtraTreesRegressor(7, random_state=0),
    "tree": lambda: DecisionTreeRegressor(random_state=0),
    "random tree": lambda: ExtraTreeRegressor(random_state=0),
    "bagging": lambda: BaggingRegressor(n_estimators=7, random_state=0),
    "subsets": lambda: BaggingRegressor(
        n_estimators=7, max_features=0.5, max_samples=0.4, bootstrap=False, random_state=0
    ),
    "repeated": lambda: BaggingRegressor(
        ExtraTreeRegressor(), n_estimators=7, bootstrap_features=True, random_state=0
    ),
    "hist": lambda: HistGradientBoostingRegressor(max_iter=9, random_state=0),
    "few bins": lambda: HistGradientBoostingRegressor(
        max_iter=9, max_bins=12, loss="gamma", learning_rate=0.3, early_stopping=True
    ),
    "isolation": lambda: IsolationForest(n_estimators=9, random_state=0),
    "small isolation": lambda: IsolationForest(
        n_estimators=9, max_samples=40, max_features=0.6, bootstrap=True, random_state=0
    ),
}
WITHOUT_MISSING: dict[str, Callable[[], Any]] = {
    "boosting": lambda: GradientBoostingRegressor(n_estimators=9, random_state=0),
    "stochastic": lambda: GradientBoostingRegressor(
        n_estimators=9, subsample=0.5, loss="huber", init="zero", random_state=0
    ),
    "quantile": lambda: GradientBoostingRegressor(n_estimators=9, loss="quantile", max_depth=8),
    "absolute": lambda: GradientBoostingRegressor(n_estimators=9, loss="absolute_error"),
}
CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "forest": lambda: RandomForestClassifier(7, random_state=0),
    "weights": lambda: RandomForestClassifier(7, class_weight="balanced", random_state=0),
    "extra": lambda: ExtraTreesClassifier(7, random_state=0),
    "tree": lambda: DecisionTreeClassifier(max_depth=4, random_state=0),
    "random tree": lambda: ExtraTreeClassifier(random_state=0),
    "bagging": lambda: BaggingClassifier(n_estimators=7, max_features=0.6, random_state=0),
    "hist": lambda: HistGradientBoostingClassifier(max_iter=9, random_state=0),
}
CLASSIFIERS_WITHOUT_MISSING: dict[str, Callable[[], Any]] = {
    "boosting": lambda: GradientBoostingClassifier(n_estimators=9, random_state=0),
    "zero": lambda: GradientBoostingClassifier(n_estimators=9, init="zero", random_state=0),
}
CASES = [
    *((make, missing, 1) for make in REGRESSORS.values() for missing in (0.0, 0.1)),
    *((make, 0.0, 1) for make in WITHOUT_MISSING.values()),
    *(
        (make, missing, classes)
        for make in CLASSIFIERS.values()
        for missing in (0.0, 0.1)
        for classes in (2, 3)
    ),
    *((make, 0.0, classes) for make in CLASSIFIERS_WITHOUT_MISSING.values() for classes in (2, 3)),
]


@pytest.mark.parametrize(("make", "missing", "classes"), CASES)
def test_predictions_are_those_of_the_model(
    make: Callable[[], Any], missing: float, classes: int, tmp_path: Path
) -> None:
    x, y, labels = table(missing)
    model = make()
    targets = y if classes == 1 else np.minimum(labels, classes - 1)
    model.fit(x, targets)
    forest = forest_of(model, tmp_path)
    fresh, _, _ = table(missing, seed=1, records=300)
    assert forest.is_classifier == (classes > 1)
    for samples in (x, fresh):
        expected = margin(model, samples)
        assert np.allclose(predict(forest, samples), expected, rtol=1e-9, atol=1e-9)
    assert not np.allclose(predict(forest, fresh[::-1]), margin(model, fresh), rtol=1e-3)


def test_an_exponential_loss_halves_the_offset(tmp_path: Path) -> None:
    x, _, labels = table()
    model = GradientBoostingClassifier(loss="exponential", n_estimators=5).fit(x, labels > 0)
    forest = forest_of(model, tmp_path)
    assert np.allclose(predict(forest, x), margin(model, x))
    assert forest.objective == "exponential"


def test_another_model_as_the_beginning_of_boosting_leaves_the_offset_unknown(
    tmp_path: Path,
) -> None:
    x, y, _ = table()
    first = DecisionTreeRegressor(max_depth=2)
    model = GradientBoostingRegressor(n_estimators=5, init=first).fit(x, y)
    forest = forest_of(model, tmp_path)
    assert forest.offset is None
    assert np.allclose(predict(forest, x)[:, 0], model.predict(x) - model.init_.predict(x))


def test_histogram_boosting_compares_doubles(tmp_path: Path) -> None:
    x, y, _ = table()
    model = HistGradientBoostingRegressor(max_iter=9).fit(x, y)
    forest = forest_of(model, tmp_path)
    threshold = forest.trees[0].threshold[0]
    samples = np.repeat(x[:1], 2, axis=0)
    samples[:, forest.trees[0].feature[0]] = [threshold, np.nextafter(threshold, np.inf)]
    predicted = predict(forest, samples)
    assert np.allclose(predicted[:, 0], model.predict(samples))
    assert predicted[0] != predicted[1]


def test_histogram_boosting_stores_the_edges_of_its_bins(tmp_path: Path) -> None:
    x, y, _ = table()
    x[:, 0] = np.round(x[:, 0] * 20)
    forest = forest_of(HistGradientBoostingRegressor(max_iter=3).fit(x, y), tmp_path)
    assert forest.has_midpoints
    for column, edges in zip(x.T, forest.bin_edges, strict=True):
        values = np.unique(column)
        assert np.allclose(edges, (values[1:] + values[:-1]) / 2)
    model = HistGradientBoostingRegressor(max_iter=3, max_bins=40).fit(x, y)
    assert not forest_of(model, tmp_path).has_midpoints


@pytest.mark.parametrize(
    "model",
    [
        BaggingRegressor(n_estimators=6),
        BaggingRegressor(n_estimators=6, max_samples=0.3, bootstrap=False, max_features=0.4),
        BaggingRegressor(n_estimators=6, max_samples=1, bootstrap_features=True),
        BaggingRegressor(n_estimators=6, max_samples=149, bootstrap=False, max_features=0.2),
        IsolationForest(n_estimators=6, max_samples=64),
        IsolationForest(n_estimators=6, bootstrap=True, max_features=3),
    ],
)
@pytest.mark.parametrize("has_weights", [False, True])
def test_the_seeds_of_bagging_give_its_bootstrap_samples(
    model: Any, has_weights: bool, tmp_path: Path
) -> None:
    x, y, _ = table()
    weights = np.random.default_rng(0).random(len(x)) + 0.5 if has_weights else None
    model.fit(x, y, sample_weight=weights)
    forest = forest_of(model, tmp_path)
    counts = bootstrap_counts(forest)
    assert counts is not None
    for row, draws in zip(counts, model.estimators_samples_, strict=True):
        assert np.array_equal(row, np.bincount(draws, minlength=len(x)))
    assert forest.without("seed").bootstrap is None


def test_seeds_that_do_not_fit_the_trees_give_no_bootstrap_samples(tmp_path: Path) -> None:
    x, y, _ = table()
    model = BaggingRegressor(n_estimators=6, random_state=0).fit(x, y)
    model._seeds = model._seeds[::-1].copy()
    forest = forest_of(model, tmp_path)
    assert bootstrap_counts(forest) is None


def test_bagging_gives_its_table_in_row_order(tmp_path: Path) -> None:
    x, y, labels = table()
    x = x.astype(np.float32).astype(np.float64)
    model = BaggingRegressor(n_estimators=100, max_features=0.6, random_state=0).fit(x, y)
    recovered = recover_table(forest_of(model, tmp_path), (x.min(0), x.max(0)))
    assert recovered.has_row_order
    assert np.allclose(recovered.y, y, rtol=1e-12)
    right = np.abs(recovered.x - x) <= 1e-5 * np.ptp(x, 0)
    assert recovered.is_exact.mean() > 0.9
    assert right[recovered.is_exact].all()
    classifier = BaggingClassifier(n_estimators=RECORDS + 10, random_state=0).fit(x, labels)
    forest = forest_of(classifier, tmp_path)
    counts = bootstrap_counts(forest)
    assert counts is not None
    assert np.array_equal(find_labels(forest, counts), labels)


def test_boosting_and_isolation_forests_are_not_taken_for_forests(tmp_path: Path) -> None:
    x, y, _ = table()
    boosting = forest_of(GradientBoostingRegressor(n_estimators=3).fit(x, y), tmp_path)
    isolation = forest_of(IsolationForest(n_estimators=3).fit(x), tmp_path)
    embedding = forest_of(RandomTreesEmbedding(n_estimators=3).fit(x), tmp_path)
    assert boosting.kind == BOOSTING
    assert boosting.records == RECORDS
    assert isolation.kind == embedding.kind == ISOLATION
    assert all(why_not(forest) for forest in (boosting, isolation, embedding))


def test_adaboost_is_read_tree_by_tree(tmp_path: Path) -> None:
    x, y, _ = table()
    model = AdaBoostRegressor(DecisionTreeRegressor(), n_estimators=3).fit(x, y)
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(model))
    forests = read_forests(open_release(path))
    assert [named.name for named in forests] == ["DecisionTreeRegressor"] * len(model.estimators_)


@pytest.mark.parametrize("model", [DecisionTreeRegressor(splitter="random"), ExtraTreeRegressor()])
def test_random_splits_are_not_taken_for_midpoints(model: Any, tmp_path: Path) -> None:
    x, y, _ = table()
    assert not forest_of(BaggingRegressor(model, n_estimators=3).fit(x, y), tmp_path).has_midpoints
    assert not forest_of(model.fit(x, y), tmp_path).has_midpoints


def test_medians_are_not_taken_for_means(tmp_path: Path) -> None:
    x, y, _ = table(records=40)
    options = {"n_estimators": 40, "min_samples_leaf": 4, "random_state": 0}
    for criterion in ("absolute_error", "squared_error"):
        model = RandomForestRegressor(criterion=criterion, **options).fit(x, y)
        recovered = recover_table(forest_of(model, tmp_path))
        if criterion == "squared_error":
            assert np.allclose(recovered.y, y, atol=1e-6)
        else:
            is_known = ~np.isnan(recovered.y)
            assert not is_known.any()


@pytest.mark.parametrize("name", ["forest.pkl", "forest.joblib"])
def test_files_of_older_versions_are_read(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(OLD_FILES) as archive:
        path = Path(archive.extract(name, tmp_path))
    named = read(path)
    assert named.name == "RandomForestClassifier"
    assert len(named.forest.trees) == 3
    counts = bootstrap_counts(named.forest)
    assert counts is not None
    assert counts.shape == (3, 12)
    shares = predict(named.forest, np.zeros((2, named.forest.columns)))
    assert np.allclose(shares.sum(1), 1)


@pytest.mark.parametrize(
    "model",
    [
        GradientBoostingClassifier(n_estimators=3),
        HistGradientBoostingClassifier(max_iter=3),
        BaggingClassifier(n_estimators=3),
    ],
)
@pytest.mark.parametrize("compress", [0, 3])
def test_files_of_joblib_are_read(model: Any, compress: int, tmp_path: Path) -> None:
    x, _, labels = table()
    path = tmp_path / "model.joblib"
    joblib.dump(model.fit(x, labels), path, compress=compress)
    assert np.allclose(predict(read(path).forest, x), margin(model, x))


def test_several_targets_of_a_classifier_are_refused(tmp_path: Path) -> None:
    x, _, labels = table()
    model = RandomForestClassifier(3).fit(x, np.stack([labels, labels > 0], 1))
    with pytest.raises(CheckpointError, match="2 targets"):
        forest_of(model, tmp_path)


def test_categorical_columns_are_refused(tmp_path: Path) -> None:
    x, y, labels = table()
    x[:, 0] = labels
    model = HistGradientBoostingRegressor(max_iter=3, categorical_features=[0]).fit(x, y)
    model._preprocessor = None  # versions of scikit-learn before 1.4 have none
    with pytest.raises(CheckpointError, match="categorical columns"):
        forest_of(model, tmp_path)
    model.is_categorical_ = None
    with pytest.raises(CheckpointError, match="split categorical columns"):
        forest_of(model, tmp_path)


def test_unfitted_models_hold_no_forest(tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    models = [BaggingRegressor(), HistGradientBoostingRegressor(), GradientBoostingRegressor()]
    path.write_bytes(pickle.dumps([*models, IsolationForest(), RandomForestRegressor()]))
    assert read_forests(open_release(path)) == ()


def test_the_attack_names_the_reason_for_boosting(tmp_path: Path) -> None:
    x, y, _ = table()
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(HistGradientBoostingRegressor(max_iter=3).fit(x, y)))
    with pytest.raises(Exception, match="residuals"):
        ForestAttack().run(path)
