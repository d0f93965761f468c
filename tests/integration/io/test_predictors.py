"""Predictions of linear models from files equal those of scikit-learn, and damaged files are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xgboost
from sklearn import linear_model as linear
from sklearn.compose import TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
from sklearn.svm import SVC, LinearSVC, LinearSVR

from residuum.auditing.losses import losses
from residuum.errors import CheckpointError, InputError
from residuum.io.linear_models import LINEAR, read_linear_model
from residuum.io.predictors import (
    NUMBERS,
    SCORES,
    SHARES,
    Predictor,
    is_live_predictor,
    wrap_live_model,
)
from residuum.io.release import pickle_in_memory
from residuum.records import Dataset

RNG = np.random.default_rng(0)
X = RNG.normal(size=(150, 5)) * [1, 2, 3, 0.5, 1] + 1
Z = X @ RNG.normal(size=5)
POSITIVE = np.exp(Z / 20)
TWO = (Z.mean() < Z).astype(int)
THREE = np.digitize(Z, np.quantile(Z, [0.3, 0.6]))

REGRESSORS: dict[str, Callable[[], Any]] = {
    "LinearRegression": linear.LinearRegression,
    "no intercept": lambda: linear.LinearRegression(fit_intercept=False),
    "Ridge": linear.Ridge,
    "Lasso": lambda: linear.Lasso(0.01),
    "ElasticNet": lambda: linear.ElasticNet(0.01),
    "SGDRegressor": lambda: linear.SGDRegressor(random_state=0),
    "LinearSVR": lambda: LinearSVR(random_state=0, max_iter=100),
    "HuberRegressor": lambda: linear.HuberRegressor(max_iter=1000),
    "BayesianRidge": linear.BayesianRidge,
    "PoissonRegressor": linear.PoissonRegressor,
    "GammaRegressor": linear.GammaRegressor,
    "Tweedie": linear.TweedieRegressor,
    "Tweedie 1.5": lambda: linear.TweedieRegressor(power=1.5),
    "Tweedie log": lambda: linear.TweedieRegressor(link="log"),
    "scaled": lambda: make_pipeline(StandardScaler(), linear.Ridge()),
    "search": lambda: GridSearchCV(linear.Ridge(), {"alpha": [0.1, 1.0]}),
}
CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "LogisticRegression": linear.LogisticRegression,
    "LinearDiscriminantAnalysis": LinearDiscriminantAnalysis,
    "LinearSVC": lambda: LinearSVC(random_state=0),
    "RidgeClassifier": linear.RidgeClassifier,
    "SGD hinge": lambda: linear.SGDClassifier(random_state=0),
    "SGD log": lambda: linear.SGDClassifier(loss="log_loss", random_state=0),
    "Perceptron": lambda: linear.Perceptron(random_state=0),
    "scaled": lambda: make_pipeline(MinMaxScaler(), MaxAbsScaler(), linear.LogisticRegression()),
    "not centered": lambda: make_pipeline(
        StandardScaler(with_mean=False), RobustScaler(), linear.LogisticRegression()
    ),
    "pass": lambda: make_pipeline("passthrough", StandardScaler(), linear.LogisticRegression()),
}


def dataset(y: Any = TWO) -> Dataset:
    return Dataset(torch.from_numpy(X), torch.as_tensor(np.asarray(y)))


def read(model: Any) -> Predictor | None:
    return read_linear_model(pickle_in_memory(model))


@pytest.mark.parametrize("name", REGRESSORS)
def test_predictions_of_regressors_equal_those_of_scikit_learn(name: str) -> None:
    model = REGRESSORS[name]().fit(X, POSITIVE)
    predictor = read(model)
    assert predictor is not None
    assert predictor.kind == NUMBERS
    assert np.allclose(predictor.outputs(dataset())[:, 0], model.predict(X), rtol=1e-10)


@pytest.mark.parametrize("y", [TWO, THREE, THREE + 1, np.array(["a", "b", "c"])[THREE]])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_predictions_of_classifiers_equal_those_of_scikit_learn(name: str, y: np.ndarray) -> None:
    model = CLASSIFIERS[name]().fit(X, y)
    predictor = read(model)
    assert predictor is not None
    assert predictor.classes == tuple(model.classes_.tolist())
    outputs = predictor.outputs(dataset())
    if hasattr(model, "predict_proba"):
        assert predictor.kind == SHARES
        assert np.allclose(outputs, model.predict_proba(X), rtol=1e-10)
    else:
        predicted = np.array(predictor.classes)[outputs.argmax(1)]
        assert (predicted == model.predict(X)).all()
        scores = model.decision_function(X).reshape(len(X), -1)
        assert predictor.kind == SCORES
        assert np.allclose(outputs[:, -scores.shape[1] :], scores, rtol=1e-10)


@pytest.mark.parametrize(
    "model",
    [
        make_pipeline(PCA(3), linear.Ridge()),
        make_pipeline(MinMaxScaler(clip=True), linear.Ridge()),
        TransformedTargetRegressor(linear.Ridge(), func=np.log, inverse_func=np.exp),
        SVC(),
    ],
)
def test_models_that_are_more_than_linear_are_not_evaluated(model: Any) -> None:
    y = TWO if isinstance(model, SVC) else POSITIVE
    assert read(model.fit(X, y)) is None


def test_an_unfitted_model_is_not_evaluated() -> None:
    assert read(linear.Ridge()) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"coef_": np.full((1, 5), np.nan)},
        {"coef_": np.zeros((2, 3, 2))},
        {"coef_": np.zeros((1, 0))},
        {"intercept_": np.zeros(7)},
        {"intercept_": np.array([np.inf])},
    ],
)
def test_damaged_coefficients_are_refused(changes: dict[str, Any]) -> None:
    model = linear.Ridge().fit(X, POSITIVE)
    vars(model).update(changes)
    with pytest.raises(CheckpointError, match="one finite intercept"):
        read(model)


@pytest.mark.parametrize("seed", range(200))
def test_damaged_files_never_crash(seed: int, tmp_path: Any) -> None:
    """Change bytes of a pickle at random. It is read, or refused with an error of residuum."""
    from residuum.errors import ResiduumError
    from residuum.io.release import open_release

    rng = np.random.default_rng(seed)
    model = make_pipeline(StandardScaler(), linear.LogisticRegression()).fit(X, THREE)
    data = bytearray(pickle.dumps(model))
    for position in rng.integers(0, len(data), rng.integers(1, 8)):
        data[position] = rng.integers(256)
    path = tmp_path / "m.pkl"
    path.write_bytes(data)
    try:
        predictor = read_linear_model(open_release(path))
        if predictor is not None:
            predictor.outputs(dataset())
    except ResiduumError:
        pass


@pytest.mark.parametrize("attribute", ["coef_", "intercept_", "classes_", "steps", "power", "link"])
@pytest.mark.parametrize("value", [None, "x", {}, [1], ("a",), 10**300, object, np.array(["a"])])
def test_attributes_of_other_types_never_crash(attribute: str, value: Any) -> None:
    for model in (
        linear.LogisticRegression().fit(X, TWO),
        linear.TweedieRegressor().fit(X, POSITIVE),
        make_pipeline(StandardScaler(), linear.Ridge()).fit(X, POSITIVE),
    ):
        vars(model)[attribute] = value
        try:
            predictor = read(model)
            if predictor is not None:
                predictor.outputs(dataset())
        except (CheckpointError, InputError):
            pass


def test_a_live_model_of_xgboost_predicts_like_its_own_methods() -> None:
    model = xgboost.XGBClassifier(n_estimators=5).fit(X, THREE)
    predictor = wrap_live_model(model)
    assert (predictor.kind, predictor.columns) == (SHARES, 5)
    assert np.allclose(predictor.outputs(dataset()), model.predict_proba(X))


def test_a_model_that_was_fitted_to_a_dataframe_receives_one() -> None:
    import pandas as pd

    frame = pd.DataFrame(X, columns=list("abcde"))
    model = linear.Ridge().fit(frame, POSITIVE)
    outputs = wrap_live_model(model).outputs(dataset())
    assert np.allclose(outputs[:, 0], model.predict(frame))
    renamed = dataset().replace(features=tuple("edcba"))
    with pytest.raises(InputError, match=r"Ridge\.predict raised ValueError"):
        wrap_live_model(model).outputs(renamed)


def test_losses_equal_their_definitions() -> None:
    """Exact case: log loss, margin and squared error, computed in plain loops."""
    model = linear.LogisticRegression().fit(X, THREE)
    shares = model.predict_proba(X)
    expected = [-np.log(shares[i, label]) for i, label in enumerate(THREE)]
    assert np.allclose(losses(wrap_live_model(model), dataset(THREE)), expected)
    scorer = LinearSVC(random_state=0).fit(X, THREE)
    scores = scorer.decision_function(X)
    expected = [
        max(scores[i, k] for k in range(3) if k != label) - scores[i, label]
        for i, label in enumerate(THREE)
    ]
    assert np.allclose(losses(wrap_live_model(scorer), dataset(THREE)), expected)
    two_scores = LinearSVC(random_state=0).fit(X, TWO)
    signs = np.where(TWO == 1, -2, 2) * two_scores.decision_function(X)
    assert np.allclose(losses(wrap_live_model(two_scores), dataset(TWO)), signs)
    regressor = linear.Ridge().fit(X, np.stack([Z, POSITIVE], 1))
    errors = np.square(regressor.predict(X) - np.stack([Z, POSITIVE], 1)).mean(1)
    targets = dataset(np.stack([Z, POSITIVE], 1))
    assert np.allclose(losses(wrap_live_model(regressor), targets), errors)
    with pytest.raises(InputError, match="as many target values"):
        losses(wrap_live_model(regressor), dataset(Z))
    with pytest.raises(InputError, match="label must be a class that the model can predict"):
        losses(wrap_live_model(model), dataset(THREE + 5))


def test_what_is_a_live_model() -> None:
    assert is_live_predictor(linear.Ridge())
    assert not is_live_predictor(linear.Ridge)
    assert not is_live_predictor(torch.nn.Linear(2, 2))
    assert not is_live_predictor({"weight": torch.zeros(2)})
    assert not is_live_predictor(3)


def test_every_linear_model_is_a_class_of_scikit_learn() -> None:
    available = {*dir(linear), "LinearSVC", "LinearSVR", "LinearDiscriminantAnalysis"}
    assert available >= LINEAR
