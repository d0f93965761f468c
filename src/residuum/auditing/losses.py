"""Compare the losses of training and held-out samples for any model that predicts.

A model that fits its training samples better than other samples reveals who is in its training set. The loss
of a sample is minus the logarithm of the predicted share of its class, the margin by which the score of
another class exceeds the score of its class, or its squared error (:mod:`residuum.io.predictors`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from residuum.datasets.given import is_one_hot
from residuum.errors import InputError
from residuum.evaluation.matching import Array
from residuum.io.predictors import SHARES, Predictor
from residuum.records import Dataset
from residuum.risk.membership import MembershipTest, separate_by_scores

if TYPE_CHECKING:
    from residuum.auditing.run import Audit

SMALLEST_SHARE = 1e-6  # a predicted share of 0 counts as this share, so that the loss is finite
ONLY_LOSSES = (
    "only networks have activation boundaries that name single samples, so only losses are compared"
)
NO_LABELS = "the losses cannot be compared, because {} have no labels"
OTHER_SHAPE = (
    "the losses cannot be compared, because training and held-out samples have other shapes"
)
NO_HOLDOUT = "the losses cannot be compared, because there are no samples that the model never saw"
NOT_COMPARED = "the losses cannot be compared, because {}"


def measure_losses(audit: Audit) -> Audit:
    """Compare the losses of training and held-out samples."""
    case = audit.case
    assert case.predictor is not None
    assert case.train is not None
    train, holdout, loss, p_value = case.train, case.holdout, None, None
    reason = why_not_compared(case.predictor, train, holdout)
    if not reason and holdout is not None:
        try:
            scores = -np.concatenate([losses(case.predictor, s) for s in (train, holdout)])
        except InputError as problem:
            reason = problem.message.rstrip(".")
        else:
            members = np.arange(len(scores)) < len(train)
            loss = separate_by_scores(scores, members)
            p_value = _rank_p_value(scores, members)
            audit.listener.message(loss.line)
    membership = MembershipTest.by_loss_alone(train, holdout, loss, reason or ONLY_LOSSES)
    return replace(audit, membership=membership, p_value_of_losses=p_value)


def why_not_compared(predictor: Predictor, train: Dataset, holdout: Dataset | None) -> str:
    """Return why losses of training and held-out samples cannot be compared, "" if they can.

    Args:
        predictor: The model.
        train: The training samples.
        holdout: The held-out samples, None if there are none.

    Returns:
        The reason.
    """
    if predictor.why_no_loss:
        return NOT_COMPARED.format(predictor.why_no_loss)
    if holdout is None:
        return NO_HOLDOUT
    if holdout.shape != train.shape or holdout.y.shape[1:] != train.y.shape[1:]:
        return OTHER_SHAPE
    unlabeled = [
        name
        for name, samples in (("the training samples", train), ("the held-out samples", holdout))
        if not has_targets(samples)
    ]
    return NO_LABELS.format(" and ".join(unlabeled)) if unlabeled else ""


def losses(predictor: Predictor, samples: Dataset) -> Array:
    """Return the loss of a model on each sample.

    Args:
        predictor: The model.
        samples: The samples, with targets or classes.

    Returns:
        (n,) losses. A small loss means that the model fits the sample well.

    Raises:
        InputError: If the model does not predict the targets of the samples.
    """
    outputs = predictor.outputs(samples)
    if not predictor.is_classifier:
        targets = samples.y.double().numpy().reshape(len(samples), -1)
        if targets.shape != outputs.shape:
            raise InputError(
                f"Every sample must have as many targets as the model predicts. The {predictor.name} "
                f"predicts {outputs.shape[1]}, and the samples have {targets.shape[1]}.",
                "Pass the targets of the training. If the model predicts shares of classes, give it the "
                "method predict_proba.",
            )
        errors: Array = np.square(outputs - targets).mean(1)
        return errors
    labels = class_numbers(predictor, samples, outputs.shape[1])
    rows = np.arange(len(labels))
    right = outputs[rows, labels]
    if predictor.kind == SHARES:
        shares: Array = -np.log(np.maximum(right, SMALLEST_SHARE))
        return shares
    outputs[rows, labels] = -np.inf
    margins: Array = outputs.max(1) - right
    return margins


def class_numbers(predictor: Predictor, samples: Dataset, outputs: int) -> Array:
    """Return the number of the class of each sample in the order in which the model predicts classes.

    Labels are compared with the classes of the model. If no label is a class of the model, or if the model
    does not state its classes, labels are numbers of classes, counted from 0.

    Args:
        predictor: A classifier.
        samples: The samples.
        outputs: Number of classes of the model.

    Returns:
        (n,) numbers of classes.

    Raises:
        InputError: If the model does not have the class of a sample.
    """
    y = samples.y.argmax(1) if is_one_hot(samples.y) else samples.y
    labels = y.double().numpy().reshape(len(samples), -1)[:, 0]
    numbers = {float(i): i for i in range(outputs)}
    if samples.classes and predictor.classes:
        positions = {str(name): i for i, name in enumerate(predictor.classes)}
        numbers = {
            float(i): positions[name] for i, name in enumerate(samples.classes) if name in positions
        }
    elif all(isinstance(name, int | float) for name in predictor.classes) and predictor.classes:
        numbers = {float(name): i for i, name in enumerate(predictor.classes)}
    unknown = sorted({*labels.tolist()} - {*numbers})
    if unknown:
        class_text = ", ".join(map(str, predictor.classes[:6])) or f"0 to {outputs - 1}"
        raise InputError(
            f"Labels must be classes of the model. The {predictor.name} has the classes {class_text}; a "
            f"label is {unknown[0]:g}.",
            "Pass the labels of the training.",
        )
    return np.array([numbers[label] for label in labels.tolist()], dtype=np.int64)


def has_targets(samples: Dataset) -> bool:
    """Return True if samples have targets. Samples that were passed without targets all have the same."""
    return len(samples.y.unique()) > 1


def _rank_p_value(scores: Array, members: Array) -> float:
    """Return the p-value of the rank test whether the scores of members and non-members differ."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(scores[members], scores[~members]).pvalue)
