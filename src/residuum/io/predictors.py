"""Models that predict probabilities of classes, scores of classes or numbers for each sample.

An audit compares the losses of training and held-out samples for every model that predicts. The model is a
live object, or a file that residuum evaluates itself (:mod:`.linear_models`, :mod:`.forests`). A file is
never run.

=====================  ==================================  ==========================================
a live object with     predicts                            the loss of a sample
=====================  ==================================  ==========================================
``predict_proba``      shares of classes                   - log(share of the right class)
``decision_function``  scores of classes                   largest other score - score of the right class
``classes_``           the name of a class                 0 if the class is right, else 1
``predict``            numbers                             squared error
=====================  ==================================  ==========================================

The first row that applies is used. ``decision_function`` is used only if the object also has ``classes_``.
Models whose inputs are token ids are read by :mod:`.token_models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from residuum.errors import InputError
from residuum.io.release import Release
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.records.tables import Column
from residuum.trees.forest import BOOSTING, ISOLATION, Forest
from residuum.trees.predict import predict

SHARES, SCORES, NUMBERS = "class shares", "class scores", "numbers"
NEXT_TOKENS = (
    "the next token"  # of a causal language model, whose predictor returns losses of texts
)
# Largest difference between 1 and the sum of the shares of all classes, as with float16.
ROUNDING = 1e-3
PASS_AS_TRAINED = (
    "Pass samples as the model receives them, with the columns of the training in the same order."
)
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Predictor:
    """A model that predicts something for each sample, as an object in memory or read from a file.

    Attributes:
        name: Class of the model, such as "LogisticRegression".
        kind: What the model predicts: "class shares", "class scores", "numbers" or "the next token".
        function: Function that returns the predictions for the samples of a dataset.
        classes: The classes in the order of the predictions, () if the classes are 0, 1, 2 and so on.
        columns: Number of values of a sample, None if it is unknown.
        column_names: Names of the columns to which the model was fitted, () if they are unknown.
        why_no_loss: Why the predictions cannot be compared with the targets, or "" if this is possible.
        model: The object in memory, None if the model was read from a file.
    """

    name: str
    kind: str
    function: Callable[[Dataset], Any]
    classes: tuple[Any, ...] = ()
    columns: int | None = None
    column_names: tuple[str, ...] = ()
    why_no_loss: str = ""
    model: Any = None

    @property
    def is_classifier(self) -> bool:
        """Whether the model predicts classes."""
        return self.kind in (SHARES, SCORES)

    def outputs(self, samples: Dataset) -> Array:
        """Return the predictions for samples, and check these predictions.

        Args:
            samples: The samples, as the model receives them.

        Returns:
            Class shares, class scores or numbers, as a table with one row for each sample.

        Raises:
            InputError: If the model cannot predict the samples, or returns other values.
        """
        self.check_columns(samples)
        outputs = self._as_table(self.function(samples), len(samples))
        if not self.is_classifier:
            return outputs
        if outputs.shape[1] == 1:
            other_class = 1 - outputs if self.kind == SHARES else -outputs
            outputs = np.concatenate([other_class, outputs], axis=1)
        if self.kind == SHARES and not (
            (outputs >= -ROUNDING).all() and np.allclose(outputs.sum(1), 1, rtol=0, atol=ROUNDING)
        ):
            raise InputError(
                "The probabilities of the classes must be at least 0 and add up to 1; the probabilities "
                f"that the {self.name} predicts do not.",
                "Make predict_proba return a probability for each class.",
            )
        if self.classes and len(self.classes) != outputs.shape[1]:
            raise InputError(
                f"A classifier must predict one value for each class; the {self.name} has "
                f"{len(self.classes)} classes, but predicts {outputs.shape[1]} values for a sample.",
                "Pass a classifier that predicts a single label for each sample.",
            )
        return outputs

    def check_columns(self, samples: Dataset) -> None:
        """Check that samples have as many values as the model has columns.

        Raises:
            InputError: If the samples have another number of values.
        """
        value_count = samples.x[0].numel()
        if self.columns not in (None, value_count):
            raise InputError(
                f"A sample must have one value for each input column of the model; the {self.name} has "
                f"{self.columns} input columns, and the samples have {value_count} values.",
                PASS_AS_TRAINED,
            )

    def _as_table(self, values: Any, n: int) -> Array:
        """Return the predictions of the model as a table with one row for each sample."""
        values = values.detach().cpu() if hasattr(values, "detach") else values
        try:
            table = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError) as problem:
            raise InputError(
                f"Predictions must be numbers; the {self.name} returns {type(values).__name__} "
                f"({type(problem).__name__}).",
                "If the model predicts names of classes, store these names in its attribute classes_.",
            ) from problem
        if table.ndim not in (1, 2) or len(table) != n or not table.size:
            raise InputError(
                f"Predictions must have one row for each of the {n} samples; the predictions of the "
                f"{self.name} have the shape {table.shape}.",
                "Let the model return an array of shape (n,) or (n, k).",
            )
        if not np.isfinite(table).all():
            raise InputError(
                f"Predictions must be finite numbers; the {self.name} predicts NaN or infinite values.",
                PASS_AS_TRAINED,
            )
        return table.reshape(n, -1)


def is_live_predictor(model: Any) -> bool:
    """Return True if an object in memory predicts and is not read as a network.

    Networks are networks of residuum, modules of torch, state dicts, and the MLPs of scikit-learn.
    """
    if isinstance(model, Network | nn.Module | Mapping | Release | type):
        return False
    is_network = _attribute(model, "coefs_") is not None
    return not is_network and any(_method(model, n) for n in ("predict_proba", "predict"))


def wrap_live_model(model: Any) -> Predictor:
    """Return the predictor of an object in memory.

    Exceptions that the object raises become an ``InputError`` when it predicts.

    Args:
        model: An object with the method ``predict_proba`` or ``predict``.

    Returns:
        The predictor.
    """
    name, columns = type(model).__name__, _attribute(model, "n_features_in_")
    columns = int(columns) if isinstance(columns, int | np.integer) else None
    classes = _as_classes(_attribute(model, "classes_"))
    names = _attribute(model, "feature_names_in_")
    inputs = columns, () if names is None else tuple(map(str, names))
    if _method(model, "predict_proba"):
        return Predictor(name, SHARES, _Call(model, "predict_proba"), classes, *inputs, model=model)
    if classes and _method(model, "decision_function"):
        return Predictor(
            name, SCORES, _Call(model, "decision_function"), classes, *inputs, model=model
        )
    predict_samples = _Call(model, "predict")
    if not classes:
        return Predictor(name, NUMBERS, predict_samples, (), *inputs, model=model)

    def mark_predicted_class(samples: Dataset) -> Array:
        predicted = np.asarray(predict_samples(samples)).reshape(len(samples), -1)
        return np.stack([(predicted == name).all(1) for name in classes], axis=1).astype(np.float64)

    return Predictor(name, SCORES, mark_predicted_class, classes, *inputs, model=model)


def wrap_forest(name: str, forest: Forest, classes: Sequence[Any] = ()) -> Predictor:
    """Return the predictor of a forest that was read from a file.

    Args:
        name: Class of the model.
        forest: The trees.
        classes: The classes in the order of the values of leaves, () for 0, 1, 2 and so on.

    Returns:
        The predictor.
    """
    why_no_loss = ""
    if forest.kind == ISOLATION:
        why_no_loss = "an isolation forest predicts no targets"
    elif forest.kind == BOOSTING and not forest.is_classifier and forest.offset is None:
        why_no_loss = (
            "the file does not store the offset, which boosting adds to the sum of its trees"
        )
    kind = NUMBERS
    if forest.is_classifier:
        kind = SCORES if forest.kind == BOOSTING else SHARES

    def evaluate(samples: Dataset) -> Array:
        return predict(forest, samples.x.flatten(1).double().numpy())

    return Predictor(name, kind, evaluate, tuple(classes), forest.columns, why_no_loss=why_no_loss)


@dataclass(frozen=True)
class _Call:
    """Calls a method of an object in memory with samples in the form that the object expects."""

    model: Any
    method: str

    def __call__(self, samples: Dataset) -> Any:
        try:
            return getattr(self.model, self.method)(_as_argument(self.model, samples))
        except Exception as problem:
            raise InputError(
                "The model must make predictions for your samples without an error; calling the method "
                f"{type(self.model).__name__}.{self.method} raised "
                f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}.",
                f"Fit the model first. {PASS_AS_TRAINED}",
            ) from problem


def _as_argument(model: Any, samples: Dataset) -> Any:
    """Return the samples as a DataFrame, a matrix or an array, depending on what the model was fitted to.

    If the model takes columns of texts, they are taken from the table of the samples.
    """
    if (table := samples.table) is not None and any(name in table.texts for name in table.inputs):
        columns = {name: _values(table.columns[name], samples.rows) for name in table.inputs}
        if _attribute(model, "feature_names_in_") is None and len(columns) == 1:
            return ["" if text is None else text for text in columns[table.inputs[0]]]
        import pandas as pd  # type: ignore[import-untyped]

        return pd.DataFrame(columns)
    sample_values = samples.x.numpy().copy()
    if _attribute(model, "n_features_in_") is None:
        return sample_values
    sample_values = sample_values.reshape(len(sample_values), -1)
    names = _attribute(model, "feature_names_in_")
    if names is None or len(names) != sample_values.shape[1]:
        return sample_values
    import pandas as pd

    return pd.DataFrame(sample_values, columns=list(samples.features or names))


def _values(column: Column, rows: list[int]) -> list[Any]:
    """Return the values of a column in some rows, with None for a missing text."""
    values = column.tolist() if isinstance(column, Tensor) else [text or None for text in column]
    return [values[row] for row in rows]


def _attribute(model: Any, name: str) -> Any:
    """Return an attribute of an object, or None if reading the attribute raises an exception."""
    try:
        return getattr(model, name, None)
    except Exception:  # noqa: BLE001  a property of the object of a user may raise anything
        return None


def _method(model: Any, name: str) -> bool:
    return callable(_attribute(model, name))


def _as_classes(classes: Any) -> tuple[Any, ...]:
    """Return the classes of a classifier as Python values, or () for several targets or without classes."""
    if classes is None or (isinstance(classes, list) and classes and np.ndim(classes[0])):
        return ()
    return tuple(np.asarray(classes).ravel().tolist())
