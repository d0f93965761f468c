"""The script that strip prints for a pickle: predictions stay equal, and a scan finds what strip says."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.base import is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import DBSCAN, AffinityPropagation, Birch, BisectingKMeans, KMeans, MeanShift
from sklearn.compose import ColumnTransformer
from sklearn.covariance import EllipticEnvelope
from sklearn.cross_decomposition import PLSRegression
from sklearn.decomposition import KernelPCA
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
    StackingClassifier,
    VotingClassifier,
)
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.impute import KNNImputer
from sklearn.isotonic import IsotonicRegression
from sklearn.kernel_approximation import Nystroem
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import HuberRegressor, LogisticRegression, RANSACRegressor, RidgeCV
from sklearn.manifold import Isomap
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KernelDensity, KNeighborsRegressor, LocalOutlierFactor
from sklearn.neural_network import BernoulliRBM, MLPClassifier, MLPRegressor
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import StandardScaler, TargetEncoder
from sklearn.semi_supervised import LabelPropagation, SelfTrainingClassifier
from sklearn.svm import SVC, NuSVC, OneClassSVM
from sklearn.utils import Bunch

import residuum as rs
from residuum.cli.main import main
from residuum.errors import InputError
from tests.program import Capture

RANDOM = np.random.default_rng(0)
X, X_NEW = RANDOM.uniform(size=(40, 5)), RANDOM.uniform(size=(9, 5))
LABELS, TARGETS = (X[:, 0] > 0.5).astype(int), X @ RANDOM.normal(size=5)
METHODS = ("predict", "predict_proba", "decision_function", "transform", "score_samples")
SEEDED = {"random_state": 0}
pytestmark = pytest.mark.filterwarnings("ignore")


def network(**settings: Any) -> MLPClassifier:
    return MLPClassifier((6,), max_iter=3, random_state=0, **settings)


def scaled_network() -> Any:
    scaler = ColumnTransformer(
        [("scale", StandardScaler(), [0, 1, 2]), ("same", "passthrough", [3, 4])]
    )
    return make_pipeline(make_pipeline(scaler), network())


def small_forest() -> RandomForestClassifier:
    return RandomForestClassifier(3, min_samples_leaf=5, oob_score=True, **SEEDED)


STRIPPED: dict[str, Callable[[], Any]] = {
    "network": network,
    "early stopping": lambda: network(early_stopping=True, validation_fraction=0.2),
    "momentum": lambda: MLPRegressor(solver="sgd", max_iter=3, **SEEDED),
    "pipeline": scaled_network,
    "union": lambda: make_pipeline(FeatureUnion([("scale", StandardScaler())]), network()),
    "grid": lambda: GridSearchCV(scaled_network(), {"mlpclassifier__alpha": [0.1]}, cv=2),
    "voting": lambda: VotingClassifier([("net", network()), ("forest", small_forest())]),
    "stacking": lambda: StackingClassifier([("net", network())], network(), cv=2),
    "bagging": lambda: BaggingClassifier(network(), 2, oob_score=True, **SEEDED),
    "calibrated": lambda: CalibratedClassifierCV(network(), cv=2),
    "k-means": lambda: KMeans(3, n_init=1, **SEEDED),
    "bisecting": lambda: BisectingKMeans(3, **SEEDED),
    "mean shift": lambda: MeanShift(bandwidth=2.0),
    "birch": lambda: Birch(n_clusters=2, threshold=0.9),
    "mixture": lambda: GaussianMixture(2, **SEEDED),
    "projection": lambda: PLSRegression(2),
    "envelope": lambda: EllipticEnvelope(**SEEDED),
    "ransac": lambda: RANSACRegressor(**SEEDED),
    "huber": HuberRegressor,
    "ridge": lambda: RidgeCV(store_cv_results=True),
    "self-training": lambda: SelfTrainingClassifier(LogisticRegression()),
    "forest": small_forest,
    "adaboost": lambda: AdaBoostClassifier(n_estimators=3, **SEEDED),
    "boosting": lambda: GradientBoostingClassifier(n_estimators=3, **SEEDED),
    "histogram boosting": lambda: HistGradientBoostingRegressor(max_iter=3, **SEEDED),
    "isolation forest": lambda: IsolationForest(n_estimators=4, **SEEDED),
}
MADE_OF_RECORDS: dict[str, tuple[Callable[[], Any], str]] = {
    # Every value occurs once, so the encoding of a value determines the target of its record.
    "target encoder": (lambda: TargetEncoder(**SEEDED), "TargetEncoder"),
    "svc": (SVC, "the SVC consists"),
    "nu-svc": (NuSVC, "the NuSVC consists"),
    "one-class": (OneClassSVM, "OneClassSVM.support_vectors_"),
    "neighbors": (KNeighborsRegressor, "KNeighborsRegressor._fit_X (40)"),
    "process": (GaussianProcessRegressor, "GaussianProcessRegressor.X_train_"),
    "classifier": (GaussianProcessClassifier, "the GaussianProcessClassifier consists"),
    "ridge": (KernelRidge, "KernelRidge.X_fit_"),
    "density": (KernelDensity, "GaussianMixture with few components"),
    "propagation": (LabelPropagation, "LabelPropagation.X_"),
    "outliers": (LocalOutlierFactor, "LocalOutlierFactor._fit_X"),
    "nystroem": (lambda: Nystroem(n_components=9), "Use RBFSampler"),
    "kernel pca": (lambda: KernelPCA(2, kernel="rbf"), "Use RBFSampler"),
    "isomap": (Isomap, "the Isomap consists"),
    "dbscan": (lambda: DBSCAN(eps=0.9), "DBSCAN.components_"),
    "affinity": (AffinityPropagation, "AffinityPropagation.cluster_centers_"),
    "grid": (lambda: GridSearchCV(SVC(), {"C": [1.0]}, cv=2), "the best estimator of GridSearchCV"),
    "pipeline": (lambda: make_pipeline(StandardScaler(), SVC()), "the step 'svc' of Pipeline"),
    "imputer": (
        lambda: make_pipeline(KNNImputer(), network()),
        "the step 'knnimputer' of Pipeline",
    ),
    "forest": (lambda: RandomForestRegressor(50, **SEEDED), "fewer trees than records"),
}
CLUSTERS_OF_ONE: dict[str, Callable[[], Any]] = {
    "k-means": lambda: KMeans(20, n_init=1, **SEEDED),
    "birch": lambda: Birch(n_clusters=2, threshold=0.1),
}
UNCHANGED: dict[str, Callable[[], Any]] = {
    "logistic": LogisticRegression,
    "isotonic": IsotonicRegression,
    "dummy": lambda: DummyClassifier(strategy="stratified", **SEEDED),  # draws its predictions
    "boltzmann": lambda: BernoulliRBM(2, n_iter=2, **SEEDED),  # draws for its scores
}


def fit(model: Any) -> Any:
    """Fit a model to labels or targets, with a single column for isotonic regression."""
    x = X[:, 0] if isinstance(model, IsotonicRegression) else X
    return model.fit(x, TARGETS if is_regressor(model) else LABELS)


def outputs(model: Any) -> dict[str, np.ndarray]:
    methods = {name: getattr(model, name) for name in METHODS if hasattr(model, name)}
    return {name: np.asarray(method(X_NEW)) for name, method in methods.items()}


def run(script: str) -> None:
    """Run a script in this process, which is faster than a new one."""
    with warnings.catch_warnings(action="ignore"):
        exec(compile(script, "script", "exec"), {})


def summary(findings: tuple[Any, ...]) -> set[tuple[str, str, str]]:
    return {(finding.kind, finding.severity, finding.what) for finding in findings}


@pytest.mark.parametrize("name", STRIPPED)
def test_the_script_keeps_the_predictions(name: str, tmp_path: Path) -> None:
    model = fit(STRIPPED[name]())
    joblib.dump(model, tmp_path / "model.joblib")
    stripped = rs.strip(tmp_path / "model.joblib", tmp_path / "clean.joblib")
    assert stripped.exit_code == 0
    assert not (tmp_path / "clean.joblib").exists()  # only the owner runs a pickle
    run(stripped.script)
    before, after = outputs(model), outputs(joblib.load(tmp_path / "clean.joblib"))
    assert before.keys() == after.keys()
    assert before
    assert all(np.array_equal(before[method], after[method]) for method in before)
    new_findings = rs.scan(tmp_path / "clean.joblib").findings
    assert summary(new_findings) == summary(stripped.remaining)
    assert not summary(new_findings) & summary(stripped.dropped)
    assert not {finding.kind for finding in new_findings} & {"optimizer-state", "start"}


def test_the_script_clears_the_bins_and_the_counts_of_trees(tmp_path: Path) -> None:
    for name in ("forest", "histogram boosting"):
        joblib.dump(fit(STRIPPED[name]()), tmp_path / f"{name}.joblib")
        run(rs.strip(tmp_path / f"{name}.joblib", tmp_path / f"{name}-clean.joblib").script)
    forest = joblib.load(tmp_path / "forest-clean.joblib")
    assert not any(tree.tree_.n_node_samples.any() for tree in forest.estimators_)
    assert not hasattr(forest, "oob_decision_function_")
    boosting = joblib.load(tmp_path / "histogram boosting-clean.joblib")
    assert not any(len(bins) for bins in boosting._bin_mapper.bin_thresholds_)


@pytest.mark.parametrize("name", MADE_OF_RECORDS)
def test_a_model_made_of_records_is_refused(name: str, tmp_path: Path) -> None:
    make, expected = MADE_OF_RECORDS[name]
    joblib.dump(fit(make()), tmp_path / "model.joblib")
    with pytest.raises(InputError, match="cannot be stripped") as refusal:
        rs.strip(tmp_path / "model.joblib", tmp_path / "clean.joblib")
    assert expected.lower() in str(refusal.value).lower()
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("name", CLUSTERS_OF_ONE)
def test_centers_that_are_records_are_not_hidden_by_removing_labels(
    name: str, tmp_path: Path
) -> None:
    joblib.dump(fit(CLUSTERS_OF_ONE[name]()), tmp_path / "model.joblib")
    with pytest.raises(InputError, match="single records as centers"):
        rs.strip(tmp_path / "model.joblib", tmp_path / "clean.joblib")


@pytest.mark.parametrize("name", UNCHANGED)
def test_nothing_to_strip(name: str, tmp_path: Path) -> None:
    joblib.dump(fit(UNCHANGED[name]()), tmp_path / "model.joblib")
    with pytest.raises(InputError, match="nothing to strip"):
        rs.strip(tmp_path / "model.joblib", tmp_path / "clean.joblib")


def test_values_next_to_a_model_are_removed(tmp_path: Path, capsys: Capture) -> None:
    model = fit(scaled_network())
    bundle = {
        "models": [SimpleNamespace(inner=(model, "v1"))],
        "X_train": X,
        "table": pd.DataFrame(X),
        "seed": 3,
        "source": "/data/patients.csv",
        "vocab": {f"word{i}": i for i in range(60)} | {"seed": 60},
        "note": "v1",
        "more": Bunch(x_train=X, note="v2"),
    }
    joblib.dump(bundle, tmp_path / "model.joblib")
    arguments = ["strip", str(tmp_path / "model.joblib"), "--out", str(tmp_path / "clean.joblib")]
    assert main(arguments) == 0
    printed_script = capsys.readouterr().out
    script_option = ["--script", str(tmp_path / "script.py")]
    assert main([*arguments, *script_option]) == 0
    assert (tmp_path / "script.py").read_text() == printed_script
    assert f"python {tmp_path / 'script.py'}" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, *script_option]) == 2  # nothing is overwritten
    subprocess.run([sys.executable, str(tmp_path / "script.py")], check=True)
    clean = joblib.load(tmp_path / "clean.joblib")
    assert {*clean} == {"models", "vocab", "note", "more"}
    assert {*clean["more"]} == {"note"}
    assert clean["vocab"] == bundle["vocab"]
    assert np.array_equal(clean["models"][0].inner[0].predict_proba(X), model.predict_proba(X))
    with pytest.raises(SystemExit, match="exists already"):
        run((tmp_path / "script.py").read_text())


def test_values_that_may_be_needed_are_removed_by_name(tmp_path: Path) -> None:
    model = SimpleNamespace(net=fit(network()), X_train=X)
    joblib.dump(model, tmp_path / "model.joblib")
    with pytest.raises(InputError, match="--drop X_train"):
        rs.strip(tmp_path / "model.joblib", tmp_path / "clean.joblib")
    with pytest.raises(InputError, match="no such value at the place 'x'"):
        rs.strip(tmp_path / "model.joblib", tmp_path / "clean.joblib", drop=["X_train", "x"])
    run(rs.strip(tmp_path / "model.joblib", tmp_path / "clean.joblib", drop=["X_train"]).script)
    clean = joblib.load(tmp_path / "clean.joblib")
    assert clean.X_train is None
    assert np.array_equal(clean.net.predict_proba(X), model.net.predict_proba(X))


def test_a_file_of_skops(tmp_path: Path) -> None:
    skops = pytest.importorskip("skops.io")
    model = fit(VotingClassifier([("pipe", scaled_network()), ("forest", small_forest())]))
    skops.dump(model, tmp_path / "model.skops")
    stripped = rs.strip(tmp_path / "model.skops", tmp_path / "clean.skops")
    run(stripped.script)
    trusted = skops.get_untrusted_types(file=tmp_path / "clean.skops")
    clean = skops.load(tmp_path / "clean.skops", trusted=trusted)
    assert np.array_equal(clean.predict(X_NEW), model.predict(X_NEW))
    assert summary(rs.scan(tmp_path / "clean.skops").findings) == summary(stripped.remaining)
    assert {finding.kind for finding in stripped.dropped} >= {"optimizer-state", "start"}
