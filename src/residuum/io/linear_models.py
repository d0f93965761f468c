"""Read linear models of scikit-learn from a model file without running its code.

A linear model computes the scores x W' + b from the coefficients W (``coef_``) and the intercepts b
(``intercept_``) in the file. A model behind a search (``GridSearchCV``) or a ``Pipeline`` is read too, if the
steps before it are scalers that residuum evaluates (:func:`.estimators.read_scaling`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit, softmax
from torch import Tensor

from residuum.errors import CheckpointError, InputError
from residuum.io.estimators import read_scaling
from residuum.io.inert import Block, InertObject
from residuum.io.predictors import NUMBERS, PASS_AS_TRAINED, SCORES, SHARES, Predictor
from residuum.io.release import Release
from residuum.records import Dataset

Array = NDArray[np.float64]
SEARCHES = ("GridSearchCV", "RandomizedSearchCV", "HalvingGridSearchCV", "HalvingRandomSearchCV")
MAX_WRAPPERS = 8  # largest nesting depth of grid searches and pipelines around a model
REGRESSORS = {
    "LinearRegression", "Ridge", "RidgeCV", "Lasso", "LassoCV", "ElasticNet", "ElasticNetCV", "Lars",
    "LarsCV", "LassoLars", "LassoLarsCV", "LassoLarsIC", "OrthogonalMatchingPursuit",
    "OrthogonalMatchingPursuitCV", "BayesianRidge", "ARDRegression", "HuberRegressor", "QuantileRegressor",
    "TheilSenRegressor", "SGDRegressor", "PassiveAggressiveRegressor", "LinearSVR", "MultiTaskLasso",
    "MultiTaskLassoCV", "MultiTaskElasticNet", "MultiTaskElasticNetCV",
}  # fmt: skip
# Regressors that predict exp(x W' + b) instead of x W' + b.
LOG_LINK = {"PoissonRegressor", "GammaRegressor", "TweedieRegressor"}
SCORERS = {
    "LinearSVC", "RidgeClassifier", "RidgeClassifierCV", "SGDClassifier", "Perceptron",
    "PassiveAggressiveClassifier",
}  # fmt: skip
# Classifiers that compute the share (probability) of each class from their scores.
LOGISTIC = {"LogisticRegression", "LogisticRegressionCV", "LinearDiscriminantAnalysis"}
LINEAR = REGRESSORS | LOG_LINK | SCORERS | LOGISTIC


@dataclass(frozen=True)
class Wrapped:
    """The estimator in a model file, without the searches and pipelines around it.

    Attributes:
        estimator: The estimator.
        scalings: Factor and shift of each scaler before the estimator, first scaler first.
        is_readable: Whether all steps before the estimator are scalers that residuum evaluates.
    """

    estimator: InertObject
    scalings: tuple[tuple[Tensor, Tensor], ...] = ()
    is_readable: bool = True

    def scale(self, samples: Dataset) -> Dataset:
        """Return the samples as the estimator receives them, after the scalers of its pipeline.

        Raises:
            InputError: If a sample does not have one value for each column of the scalers.
        """
        if not self.scalings:
            return samples
        x = samples.x.flatten(1).double()
        total_factor, total_shift = (
            torch.ones(x.shape[1]).double(),
            torch.zeros(x.shape[1]).double(),
        )
        for factor, shift in self.scalings:
            if {factor.numel(), shift.numel()} - {1, x.shape[1]}:
                raise InputError(
                    "A sample must have one value for each input column of the scalers in the model "
                    f"file; the samples have {x.shape[1]} values.",
                    PASS_AS_TRAINED,
                )
            x, total_factor, total_shift = (
                x * factor + shift,
                total_factor * factor,
                total_shift * factor + shift,
            )
        note = "the samples were scaled by the scalers in the model file"
        scale_and_offset: dict[str, Any] = {}
        if samples.scale is None and samples.mean is None:
            scale_and_offset = {"scale": 1 / total_factor, "offset": -total_shift / total_factor}
        return samples.replace(x=x, notes=(*samples.notes, note), **scale_and_offset)


def find_estimator(content: Any) -> Wrapped | None:
    """Return the estimator in a model file, which may be inside of searches and pipelines.

    Args:
        content: The content of the model file. If the content is a dict, it must hold a single estimator.

    Returns:
        The estimator, or None if the release holds no estimator or several estimators.
    """
    if isinstance(content, dict):
        class_names = {"Pipeline", *SEARCHES, *LINEAR}
        values = [value for value in content.values() if isinstance(value, InertObject)]
        models = [value for value in values if value.class_name in class_names]
        content = models[0] if len(models) == 1 else None
    earlier_steps: list[Any] = []
    for _ in range(MAX_WRAPPERS):
        if not isinstance(content, InertObject):
            return None
        if content.class_name in SEARCHES:
            content = content.attributes.get("best_estimator_")
        elif content.class_name == "Pipeline":
            steps = content.attributes.get("steps")
            names_and_steps = steps if isinstance(steps, list) else []
            pipeline_steps = [
                pair[1]
                for pair in names_and_steps
                if isinstance(pair, tuple | list) and len(pair) == 2
            ]
            if not pipeline_steps:
                return None
            earlier_steps += [
                step for step in pipeline_steps[:-1] if step not in (None, "passthrough")
            ]
            content = pipeline_steps[-1]
        else:
            scalings = [
                read_scaling(step)
                if isinstance(step, InertObject) and step.attributes.get("clip") is not True
                else None
                for step in earlier_steps
            ]
            known_scalings = tuple(scaling for scaling in scalings if scaling is not None)
            return Wrapped(content, known_scalings, len(known_scalings) == len(earlier_steps))
    return None


def read_classes(estimator: InertObject) -> tuple[Any, ...]:
    """Return the classes of a classifier in a file, or () if the file does not store the classes.

    Args:
        estimator: The classifier.

    Returns:
        The classes, as numbers or texts.
    """
    attributes = estimator.attributes
    binarizer = attributes.get("_label_binarizer")  # holds the classes of a RidgeClassifier
    if "classes_" not in attributes and isinstance(binarizer, InertObject):
        attributes = binarizer.attributes
    classes = attributes.get("classes_")
    if not isinstance(classes, Block) or len(classes.shape) != 1:
        return ()
    if classes.read is not None:
        return tuple(classes.tensor().tolist())
    return tuple(classes.objects or ())


def read_linear_model(release: Release) -> Predictor | None:
    """Return the linear model of scikit-learn in a model file. Nothing in the file is executed.

    Args:
        release: The model file that was opened.

    Returns:
        The model, None if the release holds no linear model that residuum evaluates.

    Raises:
        CheckpointError: If the coefficients are damaged.
    """
    wrapped_estimator = find_estimator(release.content)
    if (
        wrapped_estimator is None
        or not wrapped_estimator.is_readable
        or wrapped_estimator.estimator.class_name not in LINEAR
    ):
        return None
    name, attributes = (
        wrapped_estimator.estimator.class_name,
        wrapped_estimator.estimator.attributes,
    )
    weights, intercepts = _numbers(attributes.get("coef_")), _numbers(attributes.get("intercept_"))
    if weights is None or intercepts is None:
        return None
    weights, intercepts = np.atleast_2d(weights), intercepts.ravel()
    is_complete = weights.ndim == 2 and weights.size > 0 and len(intercepts) in (1, len(weights))
    if not is_complete or not (np.isfinite(weights).all() and np.isfinite(intercepts).all()):
        raise CheckpointError(
            "A linear model must have finite coefficients and one finite intercept for each row of "
            f"coefficients; the {name} in the file {release.path.name[:80]!r} does not.",
            "Save the model again.",
        )
    class_labels = (
        () if name in REGRESSORS | LOG_LINK else read_classes(wrapped_estimator.estimator)
    )
    if name not in REGRESSORS | LOG_LINK and len(weights) != (
        len(class_labels) if len(class_labels) > 2 else 1
    ):
        return None  # the classifier predicts several targets, which residuum does not evaluate
    has_shares = name in LOGISTIC or attributes.get("loss") in ("log_loss", "log")
    prediction_kind = NUMBERS if name in REGRESSORS | LOG_LINK else SHARES if has_shares else SCORES
    link = _choose_link(name, attributes, len(class_labels)) if prediction_kind != SCORES else None

    def evaluate(samples: Dataset) -> Array:
        scaled_samples = wrapped_estimator.scale(samples).x.flatten(1).double().numpy()
        scores: Array = scaled_samples @ weights.T + intercepts
        return scores if link is None else link(scores)

    return Predictor(name, prediction_kind, evaluate, class_labels, weights.shape[1])


def _choose_link(name: str, attributes: dict[str, Any], classes: int) -> Any:
    """Return the function that turns scores into predictions, such as softmax. None if none is needed."""
    if name in LOG_LINK:
        power = attributes.get("power", 0)
        is_automatic = attributes.get("link", "auto") == "auto"
        is_positive = type(power) in (int, float) and power > 0
        is_log = is_positive if is_automatic else attributes["link"] == "log"
        return np.exp if name != "TweedieRegressor" or is_log else None
    if name in REGRESSORS:
        return None
    multi_class = attributes.get("multi_class")
    if classes <= 2:
        # For two classes and a score s, older versions of scikit-learn can use the softmax of (-s, s).
        return _double_sigmoid if multi_class == "multinomial" else expit
    is_one_against_rest = name == "SGDClassifier" or (
        multi_class in ("ovr", "warn") or attributes.get("solver") == "liblinear"
    )
    return _normalized_sigmoid if is_one_against_rest else _softmax


def _double_sigmoid(scores: Array) -> Array:
    return expit(2 * scores)


def _normalized_sigmoid(scores: Array) -> Array:
    shares = expit(scores)
    return shares / shares.sum(1, keepdims=True)


def _softmax(scores: Array) -> Array:
    return softmax(scores, axis=1)


def _numbers(value: Any) -> Array | None:
    """Return an array or a number of a file as a float64 array, or None for any other value."""
    if isinstance(value, Block) and value.read is not None:
        return value.tensor().double().numpy()
    return np.array([value], dtype=np.float64) if type(value) in (int, float) else None
