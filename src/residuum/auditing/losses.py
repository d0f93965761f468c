"""Compare the losses of training and held-out samples for any model that predicts.

A model that fits its training samples better than other samples reveals who is in its training set. The loss
of a sample depends on what the model predicts (:mod:`residuum.io.predictors`):

- probabilities of classes: minus the logarithm of the probability of the sample's class.
- scores of classes: the largest score of another class, minus the score of the sample's class.
- numbers: the squared error.
- the next token: the mean of -log p(next token) over the tokens of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from residuum.datasets.given import is_one_hot
from residuum.errors import InputError
from residuum.evaluation.matching import Array
from residuum.io.predictors import NEXT_TOKENS, SHARES, Predictor
from residuum.records import Dataset
from residuum.risk.membership import MembershipTest, separate_by_scores

if TYPE_CHECKING:
    from residuum.auditing.run import Audit

SMALLEST_SHARE = (
    1e-6  # a predicted probability of 0 is replaced by this value, so that the loss is finite
)
LOSS_BLOCK = 256  # samples whose losses are computed between two reports of the progress
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
    """Return the audit with the result of a test whether losses of training and held-out samples differ."""
    assert audit.case.train is not None
    return compare_predicted_losses(audit, audit.case.train, audit.case.holdout)


def compare_predicted_losses(
    audit: Audit,
    train: Dataset,
    holdout: Dataset | None,
    progress: Callable[[int, int], None] | None = None,
    why_only_losses: str = ONLY_LOSSES,
) -> Audit:
    """Return the audit with the result of a test whether losses of training and held-out samples differ.

    Args:
        audit: The audit.
        train: The training samples.
        holdout: The held-out samples, None if there are none.
        progress: Receives the number of samples whose losses were computed, and the number of all samples.
        why_only_losses: Why no test names single samples.

    Returns:
        The audit with the result.
    """
    predictor, loss_test, p_value = audit.case.predictor, None, None
    assert predictor is not None
    reason = why_not_compared(predictor, train, holdout)
    if not reason and holdout is not None:
        try:
            negative_losses = -np.concatenate(
                [losses_in_blocks(predictor, s, progress) for s in (train, holdout)]
            )
        except InputError as problem:
            reason = problem.message.rstrip(".")
        else:
            is_member = np.arange(len(negative_losses)) < len(train)
            loss_test = separate_by_scores(negative_losses, is_member)
            p_value = _rank_p_value(negative_losses, is_member)
            audit.listener.message(loss_test.line)
    membership = MembershipTest.by_loss_alone(train, holdout, loss_test, reason or why_only_losses)
    return replace(audit, membership=membership, p_value_of_losses=p_value)


def losses_in_blocks(
    predictor: Predictor, samples: Dataset, progress: Callable[[int, int], None] | None
) -> Array:
    """Return the losses of samples, and report the progress after each block of samples.

    Args:
        predictor: The model.
        samples: The samples.
        progress: Receives the number of samples whose losses were computed. If it is None, all samples are
            one block.

    Returns:
        (n,) losses.
    """
    if progress is None:
        return losses(predictor, samples)
    blocks = []
    for rows in torch.arange(len(samples)).split(LOSS_BLOCK):
        blocks.append(losses(predictor, samples.take(rows)))
        progress(int(rows[-1]) + 1, len(samples))
    return np.concatenate(blocks)


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
    if predictor.kind == NEXT_TOKENS:
        return ""
    unlabeled = [
        name
        for name, samples in (("the training samples", train), ("the held-out samples", holdout))
        if not has_targets(samples)
    ]
    return NO_LABELS.format(" and ".join(unlabeled)) if unlabeled else ""


def losses(predictor: Predictor, samples: Dataset) -> Array:
    """Return the loss of the model ``predictor`` on each sample.

    Args:
        predictor: The model.
        samples: The samples, with targets or classes.

    Returns:
        (n,) losses. A small loss means that the model fits the sample well.

    Raises:
        InputError: If the model does not predict the targets of the samples.
    """
    outputs = predictor.outputs(samples)
    if predictor.kind == NEXT_TOKENS:
        token_losses: Array = outputs[:, 0]
        return token_losses
    if not predictor.is_classifier:
        targets = samples.y.double().numpy().reshape(len(samples), -1)
        if targets.shape != outputs.shape:
            raise InputError(
                f"A sample must have as many target values as the model has outputs. The {predictor.name} "
                f"has {outputs.shape[1]} outputs, and a sample has {targets.shape[1]} targets.",
                "Pass the targets that the model was trained with. If the model is a classifier that "
                "predicts probabilities, give it a method predict_proba.",
            )
        errors: Array = np.square(outputs - targets).mean(1)
        return errors
    labels = class_numbers(predictor, samples, outputs.shape[1])
    sample_rows = np.arange(len(labels))
    score_of_true_class = outputs[sample_rows, labels]
    if predictor.kind == SHARES:
        shares: Array = -np.log(np.maximum(score_of_true_class, SMALLEST_SHARE))
        return shares
    outputs[sample_rows, labels] = -np.inf
    margins: Array = outputs.max(1) - score_of_true_class
    return margins


def class_numbers(predictor: Predictor, samples: Dataset, outputs: int) -> Array:
    """Return the class of each sample as a column number of the model's outputs.

    If the samples name their classes, or if the classes of the model are numbers, each label is matched with
    a class of the model. Otherwise each label must be a column number, counted from 0.

    Args:
        predictor: A classifier.
        samples: The samples.
        outputs: Number of classes of the model.

    Returns:
        (n,) column numbers.

    Raises:
        InputError: If the model does not have the class of a sample.
    """
    label_values = samples.y.argmax(1) if is_one_hot(samples.y) else samples.y
    labels = label_values.double().numpy().reshape(len(samples), -1)[:, 0]
    number_by_label = {float(i): i for i in range(outputs)}
    if samples.classes and predictor.classes:
        number_by_name = {str(name): i for i, name in enumerate(predictor.classes)}
        number_by_label = {
            float(i): number_by_name[name]
            for i, name in enumerate(samples.classes)
            if name in number_by_name
        }
    elif all(isinstance(name, int | float) for name in predictor.classes) and predictor.classes:
        number_by_label = {float(name): i for i, name in enumerate(predictor.classes)}
    unknown_labels = sorted({*labels.tolist()} - {*number_by_label})
    if unknown_labels:
        class_text = ", ".join(map(str, predictor.classes[:6])) or f"0 to {outputs - 1}"
        raise InputError(
            f"Every label must be a class that the model can predict. The {predictor.name} predicts the "
            f"classes {class_text}, but a sample has the label {unknown_labels[0]:g}.",
            "Pass the labels that the model was trained with.",
        )
    return np.array([number_by_label[label] for label in labels.tolist()], dtype=np.int64)


def has_targets(samples: Dataset) -> bool:
    """Return True if the samples have targets.

    If samples are passed without targets, all their targets are set to 0 when the samples are read.
    """
    return len(samples.y.unique()) > 1


def _rank_p_value(scores: Array, members: Array) -> float:
    """Return the p-value of the Mann-Whitney test whether scores of members and non-members differ.

    ``members`` is a mask, which is True for the scores of members.
    """
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(scores[members], scores[~members]).pvalue)
