"""A scan names every estimator that stores records or values, and is silent about others."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.base import BaseEstimator
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import Birch, BisectingKMeans, KMeans, MeanShift
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA, FastICA
from sklearn.ensemble import (
    BaggingClassifier,
    RandomTreesEmbedding,
    StackingClassifier,
    VotingClassifier,
)
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    KBinsDiscretizer,
    LabelEncoder,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    QuantileTransformer,
    RobustScaler,
    SplineTransformer,
    StandardScaler,
    TargetEncoder,
)
from sklearn.svm import LinearSVC

from residuum.io.release import open_release, pickle_in_memory
from residuum.scanning.findings import Finding, findings, records_in

ROWS = 60
random = np.random.default_rng(0)
X = random.normal(size=(ROWS, 4))
Y = np.arange(ROWS) % 3
TARGETS = X[:, 0] + 0.1 * random.normal(size=ROWS)
SURNAMES = np.array([f"surname {i}" for i in range(12)], dtype=object)[np.arange(ROWS) % 12, None]
KNN = KNeighborsClassifier(3)


def stored_in(model: Any) -> list[Finding]:
    return [finding for finding in findings(pickle_in_memory(model)) if finding.kind == "stored"]


def fit(model: BaseEstimator, x: Any = X, y: Any = Y) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.fit(x, y)


STORES: dict[str, tuple[Callable[[], Any], str, int, str]] = {
    "bagging": (lambda: fit(BaggingClassifier(KNN, 2, random_state=0)), "_fit_X", 120, "high"),
    "grid search": (
        lambda: fit(GridSearchCV(KNN, {"n_neighbors": [3]}, cv=2)),
        "_fit_X",
        60,
        "high",
    ),
    "voting": (lambda: fit(VotingClassifier([("k", KNN)])), "_fit_X", 60, "high"),
    "stacking": (lambda: fit(StackingClassifier([("k", KNN)], cv=2)), "_fit_X", 60, "high"),
    "calibrated": (lambda: fit(CalibratedClassifierCV(KNN, cv=2)), "_fit_X", 60, "high"),
    "quantiles": (lambda: fit(QuantileTransformer()), "quantiles_", 240, "high"),
    "measured quantiles": (
        lambda: fit(QuantileTransformer(n_quantiles=ROWS), X.round(3)),
        "quantiles_",
        200,
        "high",
    ),
    "numbers, one-hot": (lambda: fit(OneHotEncoder()), "categories_", 240, "high"),
    "numbers, ordinal": (lambda: fit(OrdinalEncoder()), "categories_", 240, "high"),
    "surnames": (lambda: fit(OneHotEncoder(), SURNAMES), "categories_", 12, "medium"),
    "surnames in columns": (
        lambda: fit(
            make_pipeline(ColumnTransformer([("c", OneHotEncoder(), [0])]), Ridge()), SURNAMES
        ),
        "categories_",
        12,
        "medium",
    ),
    "targets": (lambda: fit(TargetEncoder(), SURNAMES, TARGETS), "encodings_", 12, "medium"),
    "isotonic": (lambda: fit(IsotonicRegression(), X[:, 0], TARGETS), "X_thresholds_", 1, "medium"),
    "many bins": (
        lambda: fit(KBinsDiscretizer(55, quantile_method="linear"), X[:, :1]),
        "bin_edges_",
        56,
        "medium",
    ),
    "many knots": (
        lambda: fit(SplineTransformer(55, knots="quantile"), X[:, :1]),
        "bsplines_",
        55,
        "medium",
    ),
    "labels": (
        lambda: LabelEncoder().fit([f"name {i}" for i in range(60)]),
        "classes_",
        60,
        "medium",
    ),
}


@pytest.mark.parametrize("name", STORES)
def test_an_estimator_that_stores_values_is_reported_with_their_number(name: str) -> None:
    make, place, count, severity = STORES[name]
    matching = [finding for finding in stored_in(make()) if place in finding.what]
    assert [finding.severity for finding in matching] == [severity]
    assert (matching[0].count or 0) >= count


CLEAN: dict[str, Callable[[], Any]] = {
    "logistic": lambda: fit(make_pipeline(StandardScaler(), LogisticRegression())),
    "linear SVM": lambda: fit(make_pipeline(PolynomialFeatures(2), LinearSVC())),
    "network": lambda: fit(MLPClassifier((4, 4), max_iter=2)),  # layers as wide as the input
    "components": lambda: fit(make_pipeline(PCA(4), FastICA(3, random_state=0), Ridge())),
    "scalers": lambda: fit(make_pipeline(MinMaxScaler(), RobustScaler(), NearestCentroid())),
    "clusters": lambda: fit(KMeans(2, n_init=1, random_state=0)),
    "mixture": lambda: fit(GaussianMixture(2, random_state=0)),
    "Bayes": lambda: fit(GaussianNB()),
    "leaves": lambda: fit(RandomTreesEmbedding(3, random_state=0)),  # encodes numbers of leaves
    "few categories": lambda: fit(OneHotEncoder(), np.array(["f", "m"])[Y % 2, None]),
    "ages": lambda: fit(OneHotEncoder(), np.arange(18, 78)[:, None]),
    "few bins": lambda: fit(KBinsDiscretizer(5, quantile_method="linear")),
    "quantiles of many": lambda: fit(QuantileTransformer(n_quantiles=10)),
    "quantiles of many ages": lambda: fit(
        QuantileTransformer(n_quantiles=100), random.integers(18, 60, (500, 1)), None
    ),
    "quantiles between measured values": lambda: fit(
        QuantileTransformer(n_quantiles=100), random.normal(size=(500, 2)).round(3), None
    ),
    "calibration": lambda: fit(
        CalibratedClassifierCV(LogisticRegression(), method="isotonic", cv=2)
    ),
    "classes": lambda: fit(
        LogisticRegression(max_iter=5), y=[f"class {i % 20}" for i in range(ROWS)]
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_an_estimator_without_records_raises_no_alarm(name: str) -> None:
    assert stored_in(CLEAN[name]()) == []


def test_categories_that_many_records_share_are_statistics() -> None:
    columns = ColumnTransformer([("c", OneHotEncoder(), [0]), ("n", StandardScaler(), [1])])
    for repeats, is_stored in ((1, True), (10, False)):
        table = np.hstack([SURNAMES, X[:, :1].astype(object)])[:20].repeat(repeats, axis=0)
        assert bool(stored_in(fit(columns, table, None))) == is_stored


@pytest.mark.parametrize(
    ("model", "severity"),
    [
        (KMeans(30, n_init=1, random_state=0), "high"),
        (BisectingKMeans(30, random_state=0), "high"),
        (GaussianMixture(30, random_state=0), "high"),
        (Birch(threshold=0.5), "high"),
        (MeanShift(bandwidth=1.0), "medium"),
    ],
    ids=["KMeans", "BisectingKMeans", "GaussianMixture", "Birch", "MeanShift"],
)
def test_centers_of_single_records_are_counted(
    tmp_path: Path, model: BaseEstimator, severity: str
) -> None:
    fit(model)
    joblib.dump(model, tmp_path / "model.joblib")
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    for name in ("model.joblib", "model.pkl"):
        release = open_release(tmp_path / name)
        (finding,) = (finding for finding in findings(release) if finding.kind == "stored")
        assert finding.severity == severity
        arrays = records_in(release)
        assert len(arrays) == (severity == "high")
        for array in arrays:
            assert array.records is not None
            assert array.certain
            assert len(array.records) == finding.count
            # Each of these centers is a training row.
            distances = np.abs(array.records.numpy()[:, None] - X[None]).max(2).min(1)
            assert distances.max() < 1e-9


def test_a_class_of_a_single_record_is_reported() -> None:
    labels = np.where(np.arange(ROWS) == 7, 3, Y)
    model = fit(GaussianNB(), X, labels)
    (array,) = records_in(pickle_in_memory(model))
    assert array.records is not None
    assert np.allclose(array.records.numpy(), X[7:8])
