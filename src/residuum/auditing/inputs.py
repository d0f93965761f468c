"""Read the inputs of an audit and check that they fit each other.

Are samples and the attacker's facts on the same scale? Attacks keep candidates (reconstructed samples) inside
the known value range. If training samples lie outside this range, attacks cannot reconstruct them, and the
result "no leak found" says nothing about the network. If held-out samples are on another scale than training
samples, the number of matches expected by chance is wrong.

Was the network read correctly? The weights in a file do not determine the whole network. For example, pooling
can be mistaken for stride, an adapter can be mistaken for a network, and labels may be shifted. Such mistakes
lower the accuracy on the training samples, so every audit prints this accuracy first. A wrong activation
function often does not lower the accuracy, because small networks fit their samples with either function.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from residuum.errors import CheckpointError, DataError, require_known
from residuum.evaluation.adapting import note_on_bytes, resolve_task
from residuum.evaluation.matching import prepare_scoring_data
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.records.inputs import add_mean
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task, normalize_labels

# Both limits are multiples of the width of the known value range. Samples may exceed the range by
# MAX_ROUNDING because of rounding. If they exceed it by MAX_EXCESS, the range belongs to other data.
MAX_ROUNDING, MAX_EXCESS = 0.01, 1.0
# Training and held-out samples are on one scale if two conditions hold: The ratio of their standard
# deviations is at most 2. The difference of their means is at most half of the larger standard deviation.
MAX_SPREAD_RATIO, MAX_SHIFT = 2.0, 0.5
MAX_WEIGHT = torch.finfo(torch.float32).max
MAX_VALUE = 1e12  # largest value of a sample, so that squares and sums stay finite in float32


def as_knowledge(knowledge: Knowledge | Mapping[str, Any] | None) -> Knowledge:
    """Return what the attacker knows, as a ``Knowledge`` record.

    A dictionary of facts, whose values are numbers and arrays, is converted to a record.
    """
    if not isinstance(knowledge, Mapping):
        return knowledge or Knowledge()
    fact_names = tuple(f.name for f in fields(Knowledge))
    for name in knowledge:
        require_known(str(name), fact_names, "An attacker cannot know")
    fact_values = dict(knowledge)
    for name in ("mean", "norms", "column_ranges"):
        if fact_values.get(name) is not None:
            fact_values[name] = torch.as_tensor(fact_values[name], dtype=torch.float64)
    for name in ("shape", "value_range", "label_balance"):
        if fact_values.get(name) is not None:
            fact_values[name] = tuple(fact_values[name])
    return Knowledge(**fact_values)


def name_source_of_mean(knowledge: Knowledge, train: Dataset | None) -> Knowledge:
    """Set the source "train" for a mean that is the mean of the training samples.

    Such a mean makes a stronger attacker than a mean of public samples, so reports must name its source.

    Args:
        knowledge: What the attacker knows.
        train: The training samples.

    Returns:
        The knowledge with the source of the mean. The knowledge is unchanged if its mean is not the mean of
        the training samples, or if the source of the mean is already known.
    """
    mean = knowledge.mean
    if mean is None or train is None or knowledge.provenance.get("mean", "user") != "user":
        return knowledge
    train_images = train.images.double()
    train_means = [train_images.mean(0)] + ([] if train.mean is None else [train.mean.double()])
    if not any(_same_values(mean.double(), other) for other in train_means):
        return knowledge
    return knowledge.replace(provenance={**knowledge.provenance, "mean": "train"})


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors hold the same values in the same order, except for rounding errors."""
    if a.numel() != b.numel() or a.numel() < 2:
        return False
    largest_value = float(b.abs().max())
    return bool((a.flatten() - b.flatten()).abs().max() <= 1e-5 * largest_value)


def infer_sample_shape(model: Any, samples: Dataset | None) -> tuple[int, ...] | None:
    """Return the shape of one sample as the model receives it.

    Args:
        model: The model. If it is a torch module, we call it to find out whether it takes images with their
            channels first or last.
        samples: Training or held-out samples.

    Returns:
        The shape of the samples, with the channels first if the module accepts only this shape. None if
        ``samples`` is None.
    """
    if samples is None:
        return None
    shape = samples.shape
    if not isinstance(model, nn.Module) or len(shape) != 3 or shape[-1] not in (1, 3, 4):
        return shape
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    sample = samples.x[:1].to(dtype)
    for x in (sample, sample.movedim(-1, 1)):
        with torch.no_grad(), suppress(RuntimeError):
            model(x)
            return tuple(x.shape[1:])
    return shape


def check_inputs(
    network: Network, train: Dataset | None, holdout: Dataset | None, task: str = "auto"
) -> None:
    """Raise an error for inputs that the audit could not score or certify after the attacks have run.

    Attacks take minutes. If an audit failed after the attacks, its folder would hold no result.

    Args:
        network: The network.
        train: The training samples.
        holdout: The held-out samples.
        task: Task of the network.

    Raises:
        CheckpointError: If a weight is too large for float32.
        DataError: If a value of a sample is too large, or if the training samples have no labels.
    """
    for name, weight in network.theta.items():
        if weight.numel() and (largest := float(weight.abs().max())) > MAX_WEIGHT:
            raise CheckpointError(
                "Attacks compute in float32, so weights must not be too large for float32. The largest "
                f"absolute value in {name} is {largest:.3g}.",
                "Check that the file holds the trained weights.",
            )
    for name, data in (("data", train), ("holdout", holdout)):
        if data is not None and (largest := float(data.x.abs().max())) > MAX_VALUE:
            raise DataError(
                f"Values of samples must lie between -{MAX_VALUE:g} and +{MAX_VALUE:g}. The largest "
                f"absolute value in {name} is {largest:.3g}.",
                "Pass x as the network receives it.",
            )
    if train is None:
        return
    model = network.module
    output_count = evaluate(model, train.x[:1].to(next(model.parameters()).dtype)).shape[1]
    if choose_task(resolve_task(network, task), output_count) != "regression" and not train.y.any():
        raise DataError(
            f"Training samples need the labels they were trained with. All {len(train)} labels are 0, "
            "as if none were passed.",
            "Pass audit(model, data=(x, y)), or save 'y' in the same file as 'x'.",
        )
    normalize_labels(train.y, choose_task(resolve_task(network, task), output_count), output_count)
    prepare_scoring_data(torch.zeros_like(train.x[:1]), train, holdout, [])


def check_scales(
    train: Dataset | None, holdout: Dataset | None, knowledge: Knowledge
) -> tuple[str, ...]:
    """Return warnings about samples and known facts that contradict each other.

    A known value range that cannot belong to these samples raises a ``DataError``.

    Args:
        train: The training samples.
        holdout: The held-out samples.
        knowledge: What the attacker knows.

    Returns:
        One warning for each contradiction.
    """
    if train is None:
        return ()
    return (
        *note_on_bytes(train),
        *_note_on_range(train, knowledge),
        *_note_on_scale(train, holdout),
    )


def _note_on_range(train: Dataset, knowledge: Knowledge) -> tuple[str, ...]:
    """Return a warning if samples lie outside the known value range.

    Attacks keep candidates inside the range, so they cannot reconstruct samples outside the range. An audit
    would then find nothing, even if the network leaks.

    Args:
        train: The training samples.
        knowledge: What the attacker knows.

    Returns:
        A tuple with the warning, () if the samples lie inside the range.

    Raises:
        DataError: If the samples exceed the range by more than its width, or if the known mean has a
            wrong number of values.
    """
    if knowledge.value_range is None:
        return ()
    train_values = train.x.double()
    if (mean := knowledge.mean) is not None:
        if mean.numel() not in (1, train_values[0].numel()):
            raise DataError(
                "The mean must be a single number, or have as many values as a sample "
                f"({train_values[0].numel()}); got {mean.numel()} values.",
                "Pass the mean image of the data.",
            )
        train_values = add_mean(train_values, mean)
    low, high = knowledge.value_range
    smallest, largest = float(train_values.min()), float(train_values.max())
    excess = max(low - smallest, largest - high) / (high - low)
    if excess <= MAX_ROUNDING:
        return ()
    mean_text = "with the known mean added" if mean is not None else "without a known mean"
    range_sentence = (
        f"The training samples run from {smallest:.3g} to {largest:.3g}, {mean_text}, outside the known "
        f"value range {low:g} to {high:g}"
    )
    remedy = "Pass the range of the data before a mean was subtracted, and that mean (--mean)."
    if excess > MAX_EXCESS:
        raise DataError(
            "Training samples must lie in or near the known value range; these samples lie outside of "
            f"the range by more than its width. {range_sentence}.",
            remedy,
        )
    outside_share = float(((train_values < low) | (train_values > high)).double().mean())
    return (
        f"{range_sentence} ({outside_share:.0%} of the values). Attacks cannot reconstruct such values. "
        f"{remedy}",
    )


def _note_on_scale(train: Dataset, holdout: Dataset | None) -> tuple[str, ...]:
    """Return a warning if held-out samples are on another scale than training samples.

    The number of matches expected by chance is measured on held-out samples, so the number would be wrong.
    """
    if holdout is None:
        return ()
    mean, holdout_mean = (float(data.x.double().mean()) for data in (train, holdout))
    spread, holdout_spread = (float(data.x.double().std(correction=0)) for data in (train, holdout))
    larger, smaller = max(spread, holdout_spread), min(spread, holdout_spread)
    if larger <= MAX_SPREAD_RATIO * smaller and abs(mean - holdout_mean) <= MAX_SHIFT * larger:
        return ()
    return (
        "Held-out samples seem to be on another scale than training samples (mean and standard "
        f"deviation {holdout_mean:.2g} and {holdout_spread:.2g} against {mean:.2g} and {spread:.2g}). "
        "The comparison is valid only if both were prepared in the same way.",
    )
