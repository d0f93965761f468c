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
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from residuum.datasets.given import is_one_hot
from residuum.errors import CheckpointError, DataError, ResiduumError, require_known
from residuum.evaluation.matching import prepare_scoring_data
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Record
from residuum.records.inputs import add_mean
from residuum.theory.kkt import evaluate
from residuum.theory.rows import accuracy, choose_task, normalize_labels

# Samples may exceed the known value range by rounding errors, at most by MAX_ROUNDING times the width of the
# range. If samples exceed the range by more than MAX_EXCESS times its width, the range was meant for other
# data.
MAX_ROUNDING, MAX_EXCESS = 0.01, 1.0
# Shapes of common images as text for --shape. The key is the number of values of an image.
IMAGE_SHAPES = {64: "1,8,8", 256: "1,16,16", 784: "1,28,28", 1024: "1,32,32", 3072: "3,32,32"}
BYTES = 255.0  # the largest value of a pixel in an image file
# Training and held-out samples are on one scale if two conditions hold: The ratio of their standard
# deviations is at most 2. The difference of their means is at most half of the larger standard deviation.
MAX_SPREAD_RATIO, MAX_SHIFT = 2.0, 0.5
# A network fits its samples if its accuracy or R^2 is at least halfway from a constant prediction to 1.
MIN_FIT = 0.5
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
    """Record that a known mean comes from the training samples, if it equals their mean.

    Such a mean makes a stronger attacker than a mean of public samples, so reports must name its source.

    Args:
        knowledge: What the attacker knows.
        train: The training samples.

    Returns:
        The knowledge with the source of the mean. The knowledge is unchanged if its mean is not the mean of
        the training samples, or if the source of the mean is already known.
    """
    known_mean = knowledge.mean
    if known_mean is None or train is None or knowledge.provenance.get("mean", "user") != "user":
        return knowledge
    train_images = train.images.double()
    train_means = [train_images.mean(0)] + ([] if train.mean is None else [train.mean.double()])
    if not any(_same_values(known_mean.double(), other) for other in train_means):
        return knowledge
    return knowledge.replace(provenance={**knowledge.provenance, "mean": "train"})


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors hold the same values in the same order, except for rounding errors."""
    if a.numel() != b.numel() or a.numel() < 2:
        return False
    largest_value = float(b.abs().max())
    return bool((a.flatten() - b.flatten()).abs().max() <= 1e-5 * largest_value)


def adapt_samples(
    network: Network,
    train: Dataset | None,
    holdout: Dataset | None,
    knowledge: Knowledge,
    task: str = "auto",
) -> tuple[Dataset | None, Dataset | None]:
    """Convert samples from other common formats to the input shape and value scale of the network.

    The recognized formats are one-hot labels, images with their channels last, pixels from 0 to 255, and a
    table that was not standardized. Each conversion is added to the notes of the training samples. Samples
    that already fit stay as they are.

    Args:
        network: The network.
        train: The training samples.
        holdout: The held-out samples.
        knowledge: What the attacker knows.
        task: Task of the network.

    Returns:
        The training and the held-out samples.
    """
    if train is None or (holdout is not None and holdout.shape != train.shape):
        return train, holdout
    notes: list[str] = []
    datasets = [train] if holdout is None else [train, holdout]
    datasets = _move_channels_first(network, datasets, notes)
    output_count = network.architecture.outputs
    if resolve_task(network, task) != "regression":
        datasets = [_class_indices(dataset, output_count, notes) for dataset in datasets]
    datasets = _rescale(network, datasets, knowledge, resolve_task(network, task), notes)
    is_flat_table = datasets[0].x.ndim == 2 and not datasets[0].features and knowledge.shape is None
    if is_flat_table and (image_shape := IMAGE_SHAPES.get(datasets[0].shape[0])):
        row_text = f"rows of {datasets[0].shape[0]} values"
        notes.append(f"{row_text} may be images. Pass --shape {image_shape} to show them as images")
    adapted_train = datasets[0].replace(notes=tuple(dict.fromkeys((*datasets[0].notes, *notes))))
    return adapted_train, None if holdout is None else datasets[1]


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


def _move_channels_first(network: Network, sets: list[Dataset], notes: list[str]) -> list[Dataset]:
    """Move the channels of images from the last to the first dimension, if the network expects this order."""
    # If the images have a single channel, it is always moved to the first dimension. Three or four channels
    # are moved only if the network expects images with the channels first.
    architecture, sample_shape = network.architecture, sets[0].shape
    image_shape = (
        architecture.image_shape
        if architecture.image_shape and len(architecture.image_shape) == 3
        else None
    )
    are_channels_last = (
        len(sample_shape) == 3
        and sample_shape[-1] in (1, 3, 4)
        and sample_shape[0] not in (1, 3, 4)
    )
    channels_first = (sample_shape[-1], *sample_shape[:-1])
    # Moving a single channel does not change the order of the values, so it is always safe. Moving several
    # channels changes the order of the values, so the network must expect this order.
    if not are_channels_last or not (
        sample_shape[-1] == 1
        or channels_first == image_shape
        or channels_first == network.input_shape
    ):
        return sets
    notes.append(
        f"images of shape {sample_shape} have their channels last. They are read as {channels_first}"
    )
    mean_field = (
        {}
        if sets[0].mean is None or sets[0].mean.ndim != 3
        else {"mean": sets[0].mean.movedim(-1, 0)}
    )
    return [
        dataset.replace(x=dataset.x.movedim(-1, 1).contiguous(), **mean_field) for dataset in sets
    ]


def _class_indices(dataset: Dataset, outputs: int, notes: list[str]) -> Dataset:
    """Convert one-hot labels to class indices, and other labels to one dimension."""
    if is_one_hot(dataset.y) and dataset.y.shape[1] in (outputs, 2):
        notes.append("labels with one column per class are read as class indices")
        return dataset.replace(y=dataset.y.argmax(1))
    has_one_column = dataset.y.ndim == 2 and dataset.y.shape[1] == 1
    return dataset.replace(y=dataset.y[:, 0]) if has_one_column else dataset


def _rescale(
    network: Network, sets: list[Dataset], knowledge: Knowledge, task: str, notes: list[str]
) -> list[Dataset]:
    """Return samples with pixels divided by 255, or a standardized table, if the network needs this.

    Otherwise the samples are returned unchanged. If a step is applied, a note is added to ``notes``.
    """
    train, value_range = sets[0], knowledge.value_range

    def fits(dataset: Dataset) -> bool | None:
        """Return whether the network predicts the samples well, None if it cannot process them."""
        try:
            fit_of_network = measure_fit(network, dataset, None, task)
        # The function ``check_inputs`` reports this error later.
        except (ResiduumError, RuntimeError, ValueError):
            return None
        return fit_of_network is not None and not fit_of_network.is_doubtful

    def pixels(dataset: Dataset) -> Dataset:
        scaled_mean = None if dataset.mean is None else dataset.mean / BYTES
        return dataset.replace(x=dataset.x / BYTES, mean=scaled_mean)

    if (
        _note_on_bytes(train)
        and (value_range is None or value_range[1] <= 2)
        and fits(pixels(train))
    ):
        notes.append(
            f"values up to {float(train.x.max()):g} are read as pixels and divided by 255, because most "
            "networks receive them in this form. Pass --value-range 0,255 if this network does not"
        )
        return [pixels(dataset) for dataset in sets]
    if train.x.ndim != 2 or train.scale is not None or train.mean is not None:
        return sets
    if fits(train) is not False:  # the samples fit already (True), or cannot be evaluated (None)
        return sets
    offset, deviation = train.x.mean(0), torch.std(train.x, dim=0, correction=0)
    deviation = torch.where(deviation > 0, deviation, 1.0)

    def standardized(dataset: Dataset) -> Dataset:
        return dataset.replace(x=(dataset.x - offset) / deviation, scale=deviation, offset=offset)

    def swapped(dataset: Dataset) -> Dataset:
        return dataset.replace(y=1 - dataset.y, classes=dataset.classes[::-1])

    standardize_text = (
        "the columns of your samples were standardized with the mean and deviation of your "
        "training samples"
    )
    steps_by_text = {standardize_text: [standardized]}
    # If there are two classes, it is unknown which of them is class 0, so both orders are tried.
    if len(train.classes) == 2 and set(train.y.unique().tolist()) == {0, 1}:
        swap_text = f"{train.classes[1]!r} is read as class 0 and {train.classes[0]!r} as class 1"
        steps_by_text |= {
            swap_text: [swapped],
            f"{standardize_text}, and {swap_text}": [standardized, swapped],
        }
    for description, steps in steps_by_text.items():
        converted_sets = sets
        for step in steps:
            converted_sets = [step(dataset) for dataset in converted_sets]
        if fits(converted_sets[0]):
            notes.append(f"{description}, because the network predicts their labels only then")
            return converted_sets
    return sets


def resolve_task(network: Network, task: str) -> str:
    """Return the task of a network, which the user or the checkpoint names.

    Args:
        network: The network.
        task: The task that the user names, or "auto".

    Returns:
        The task that the user names, otherwise the task of the checkpoint, or "auto" if neither names a task.
    """
    return network.task if task == "auto" and network.task else task


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
                f"Weights must be representable in float32, because attacks compute in float32. The "
                f"weight tensor {name} reaches {largest:.3g}.",
                "Check that the file holds the trained weights.",
            )
    for name, data in (("data", train), ("holdout", holdout)):
        if data is not None and (largest := float(data.x.abs().max())) > MAX_VALUE:
            raise DataError(
                f"The absolute values of samples must not exceed {MAX_VALUE:g}. The array '{name}' "
                f"reaches {largest:.3g}.",
                "Pass the samples as the network receives them.",
            )
    if train is None:
        return
    model = network.module
    output_count = evaluate(model, train.x[:1].to(next(model.parameters()).dtype)).shape[1]
    if choose_task(resolve_task(network, task), output_count) != "regression" and not train.y.any():
        raise DataError(
            f"Training samples need the labels they were trained with. All {len(train)} labels are 0, so "
            f"no labels seem to have been passed.",
            "Pass audit(model, data=(x, y)), or save 'y' in the same file as 'x'.",
        )
    normalize_labels(train.y, choose_task(resolve_task(network, task), output_count), output_count)
    prepare_scoring_data(torch.zeros_like(train.x[:1]), train, holdout, [])


def check_scales(
    train: Dataset | None, holdout: Dataset | None, knowledge: Knowledge
) -> tuple[str, ...]:
    """Return warnings if the samples and the facts that the attacker knows contradict each other.

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
        *_note_on_bytes(train),
        *_note_on_range(train, knowledge),
        *_note_on_scale(train, holdout),
    )


def _note_on_bytes(train: Dataset) -> tuple[str, ...]:
    """Return a warning if samples look like pixels from 0 to 255, because most networks receive 0 to 1."""
    smallest, largest = float(train.x.min()), float(train.x.max())
    if not (smallest >= 0 and BYTES / 2 < largest <= BYTES):
        return ()
    return (
        f"The training samples have values up to {largest:g}: is this what the network receives?",
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
                f"The mean of the training samples must be one number or have {train_values[0].numel()} "
                f"values; got {mean.numel()}.",
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
            f"Training samples must not exceed the known value range (the smallest and largest possible "
            f"value) by more than its width. {range_sentence}.",
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


@dataclass(frozen=True, eq=False)
class Fit(Record):
    """How well the network fits the samples.

    Attributes:
        measure: How the fit is measured: "accuracy" or "R^2".
        train: Accuracy or R^2 on the training samples.
        holdout: Accuracy or R^2 on the held-out samples, None if they have no labels.
        base: Accuracy or R^2 of a constant prediction on the training samples. The constant is the most
            frequent class, or the mean.
    """

    derived = ("line",)

    measure: str
    train: float
    holdout: float | None
    base: float

    @property
    def is_doubtful(self) -> bool:
        """Whether the accuracy or R^2 on the training samples is too low for a trained network."""
        return self.train - self.base < MIN_FIT * (1 - self.base)

    @property
    def line(self) -> str:
        """The first line that an audit prints: accuracy or R^2 on training and held-out samples."""
        holdout = "-" if self.holdout is None else self.figure(self.holdout)
        return (
            f"{self.measure} of the network as read: {self.figure(self.train)} on the training "
            f"samples, {holdout} on the held-out ones"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """A warning, if the network predicts its training samples badly."""
        if not self.is_doubtful:
            return ()
        constant = "the mean" if self.measure == "R^2" else "the most frequent class"
        return (
            f"The network as read reaches an {self.measure} of {self.figure(self.train)} on its training "
            f"samples. Always predicting {constant} reaches {self.figure(self.base)}. The network may not "
            "have been read correctly, or these are not its training samples or labels. Check "
            "architecture, preprocessing and labels.",
        )

    def figure(self, value: float) -> str:
        """Format an accuracy as a percentage, or an R^2 as a number."""
        return f"{value:.3g}" if self.measure == "R^2" else f"{value:.1%}"


def measure_fit(
    network: Network, train: Dataset | None, holdout: Dataset | None, task: str
) -> Fit | None:
    """Measure how well a network fits the samples.

    Args:
        network: The network.
        train: Training samples that passed :func:`check_inputs`.
        holdout: Held-out samples.
        task: Task of the network.

    Returns:
        The fit, None if there are no training samples.
    """
    if train is None:
        return None
    model = network.double_module
    outputs = evaluate(model, train.x.double())
    task = choose_task(task, outputs.shape[1])
    train_targets = normalize_labels(train.y, task, outputs.shape[1])
    holdout_fit = None
    # If held-out samples have no labels, all their labels were set to 0 when the samples were read. The
    # accuracy on these samples says nothing.
    if holdout is not None and (len(holdout.y.unique()) > 1 or task == "regression"):
        has_known_labels = task == "regression" or set(holdout.y.tolist()) <= set(train.y.tolist())
        if has_known_labels and holdout.y.shape[1:] == train.y.shape[1:]:
            holdout_targets = normalize_labels(holdout.y, task, outputs.shape[1])
            holdout_fit = accuracy(evaluate(model, holdout.x.double()), holdout_targets, task)
    if task == "regression":
        return Fit("R^2", accuracy(outputs, train_targets, task), holdout_fit, 0.0)
    constant_accuracy = float(train_targets.unique(return_counts=True)[1].max()) / len(
        train_targets
    )
    return Fit("accuracy", accuracy(outputs, train_targets, task), holdout_fit, constant_accuracy)
