"""Convert samples to the input shape and value scale of a network, and measure how well it fits them.

Samples are stored in several common formats: images with their channels first or last, pixels from 0 to 255
or from 0 to 1, tables with or without standardization. The network fits its samples in one of these formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from residuum.datasets.given import is_one_hot
from residuum.errors import ResiduumError
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Record
from residuum.theory.kkt import evaluate
from residuum.theory.rows import accuracy, choose_task, normalize_labels

# Shapes of common images as text for --shape. The key is the number of values of an image.
IMAGE_SHAPES = {64: "1,8,8", 256: "1,16,16", 784: "1,28,28", 1024: "1,32,32", 3072: "3,32,32"}
BYTES = 255.0  # the largest value of a pixel in an image file
# A network fits its samples if its accuracy or R^2 is at least halfway from a constant prediction to 1.
MIN_FIT = 0.5


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
    mean = (
        {}
        if sets[0].mean is None or sets[0].mean.ndim != 3
        else {"mean": sets[0].mean.movedim(-1, 0)}
    )
    return [dataset.replace(x=dataset.x.movedim(-1, 1).contiguous(), **mean) for dataset in sets]


def _class_indices(dataset: Dataset, outputs: int, notes: list[str]) -> Dataset:
    """Return the samples with class indices instead of one-hot labels, and with labels in one dimension."""
    if is_one_hot(dataset.y) and dataset.y.shape[1] in (outputs, 2):
        notes.append("labels with one column per class are read as class indices")
        return dataset.replace(y=dataset.y.argmax(1))
    has_one_column = dataset.y.ndim == 2 and dataset.y.shape[1] == 1
    return dataset.replace(y=dataset.y[:, 0]) if has_one_column else dataset


def _rescale(
    network: Network, sets: list[Dataset], knowledge: Knowledge, task: str, notes: list[str]
) -> list[Dataset]:
    """Return samples with pixels divided by 255, or a standardized table, if the network fits only these.

    Otherwise the samples are returned unchanged. If a step is applied, a note is added to ``notes``.
    """
    train, value_range = sets[0], knowledge.value_range

    def fits(dataset: Dataset) -> bool | None:
        """Return True if the network fits the samples, None if the network cannot process the samples."""
        try:
            fit = measure_fit(network, dataset, None, task)
        except (ResiduumError, RuntimeError, ValueError):  # a later check reports the error
            return None
        return fit is not None and not fit.is_doubtful

    def pixels(dataset: Dataset) -> Dataset:
        mean = None if dataset.mean is None else dataset.mean / BYTES
        return dataset.replace(x=dataset.x / BYTES, mean=mean)

    if (
        note_on_bytes(train)
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
    # The names of two classes do not say which of them is class 0, so both orders are tried.
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


def note_on_bytes(train: Dataset) -> tuple[str, ...]:
    """Return a warning if samples look like pixels from 0 to 255, because most networks receive 0 to 1."""
    smallest, largest = float(train.x.min()), float(train.x.max())
    if not (smallest >= 0 and BYTES / 2 < largest <= BYTES):
        return ()
    return (
        f"The training samples have values up to {largest:g}: is this what the network receives?",
    )


def resolve_task(network: Network, task: str) -> str:
    """Return the task of a network, which the user or the checkpoint names.

    Args:
        network: The network.
        task: The task that the user names, or "auto".

    Returns:
        The task that the user names, otherwise the task of the checkpoint, or "auto" if neither names a task.
    """
    return network.task if task == "auto" and network.task else task


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
        """Accuracy or R^2 on training and held-out samples, as the line that every audit prints first."""
        holdout = "-" if self.holdout is None else self.figure(self.holdout)
        return (
            f"{self.measure} of the network as read: {self.figure(self.train)} on the training "
            f"samples, {holdout} on the held-out ones"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """A warning if the network hardly fits its training samples."""
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
        """Format the fit of a network as text: an accuracy as a percentage, or an R^2 as a number."""
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
