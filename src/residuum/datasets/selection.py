"""Select training samples and held-out samples from a source (a named dataset, a file or a folder).

The n training samples are balanced over the L labels and keep the order of the file. If no seed is passed,
training samples are the first n / L samples of each label. No held-out sample is equal to a training sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from residuum.errors import DataError, require_known
from residuum.records import TASKS, Dataset, Split

DEFAULT_HOLDOUT = 2000  # default number of held-out samples; the scores of attacks do not use more
Names = Sequence[str | int]  # names of classes, such as ("cat", "dog") or (1, 3)


@dataclass(frozen=True)
class Request:
    """The numbers of samples, the seed and the folder that the user requested.

    If an attribute is None, the dataset uses its own default.

    Attributes:
        n: Number of training samples.
        seed: Seed of the random selection of samples.
        root: Folder with the files of the named datasets.
        holdout: Number of held-out samples.
    """

    n: int | None = None
    seed: int | None = None
    root: Path | None = None
    holdout: int | None = None


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a source (a named dataset, a file or a folder), in the order and format of the file.

    Attributes:
        name: Name of the source.
        images: Samples, (N, *shape), as stored in the file. Dividing by ``scale`` gives the values that
            networks receive.
        labels: Indices into ``classes``, (N,).
        classes: Names of the classes.
        positive: The classes with label +1 in binary tasks.
        sides: Names of the labels -1 and +1 in binary tasks, such as ("even", "odd"), or None.
        scale: Number by which ``images`` is divided.
        mean: The mean that was subtracted from the images before they were stored, or None.
        center: Whether the mean may be subtracted from the samples. It is False for synthetic points.
        test: The samples of the source's own test set, or None if the source has no test set.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    positive: tuple[str, ...] = ()
    sides: tuple[str, str] | None = None
    scale: float = 1.0
    mean: Tensor | None = None
    center: bool = True
    test: Pool | None = None

    def __post_init__(self) -> None:
        if self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"Every sample must have one label; the dataset {self.name!r} has samples of shape "
                f"{tuple(self.images.shape)} and labels of shape {tuple(self.labels.shape)}.",
                "Save one label per sample.",
            )
        if self.test is not None and self.test.shape != self.shape:
            raise DataError(
                f"Training and test samples must have the same shape; in the dataset {self.name!r}, the "
                f"training samples have the shape {self.shape}, and the test samples have the shape "
                f"{self.test.shape}.",
                "Resize the training samples or the test samples.",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.images.shape[1:])


Source = Callable[..., Pool]
"""A function ``source(request, **options)``. Users may pass its keyword-only parameters as options."""


def make_generator(seed: int | None) -> torch.Generator:
    """Return a new random generator with this seed, or with seed 0 if ``seed`` is None."""
    if seed is not None and not 0 <= seed < 2**63:
        raise DataError(f"A seed must be between 0 and 2**63; got {seed}.", "Pass seed=0.")
    return torch.Generator().manual_seed(seed or 0)


def split_pool(
    pool: Pool, request: Request, *, task: str, positive: Names, center: bool, dtype: torch.dtype
) -> Split:
    """Select training samples and held-out samples, and preprocess both sets in the same way.

    Training samples are balanced over the labels. Held-out samples come from the test set if the source has a
    test set. Held-out samples are never equal to a training sample, and their order is random. The mean of
    the training samples is subtracted from both sets.

    Args:
        pool: All samples of a source.
        request: Numbers of samples and the seed.
        task: "binary", "multiclass" or "regression".
        positive: Classes with label +1.
        center: Whether to subtract the mean of the training samples.
        dtype: Number format of the samples.

    Returns:
        Training samples and held-out samples.
    """
    label_of_class, label_names = map_classes(pool, task, positive)
    labels = label_of_class[pool.labels]  # for each of the N samples the index of its label, (N,)
    train_size = _choose_train_size(pool, request, labels, label_names)
    generator = None if request.seed is None else make_generator(request.seed)
    train_rows = choose_rows(labels, [train_size // len(label_names)] * len(label_names), generator)

    holdout_pool = pool.test or pool
    holdout_pool_labels = label_of_class[holdout_pool.labels]
    candidate_rows = _find_different(holdout_pool.images, pool.images[train_rows])
    candidate_labels = holdout_pool_labels[candidate_rows]
    holdout_counts = _choose_holdout_counts(
        pool, train_size, request.holdout, candidate_labels, label_names
    )
    generator = make_generator(request.seed)
    chosen_candidates = choose_rows(
        candidate_labels, holdout_counts, None if request.seed is None else generator
    )
    holdout_rows = candidate_rows[chosen_candidates]
    holdout_rows = holdout_rows[torch.randperm(len(holdout_rows), generator=generator)]

    images = (pool.images[train_rows], holdout_pool.images[holdout_rows])
    x, x_holdout = (values.to(dtype) / pool.scale for values in images)
    mean = None if pool.mean is None else pool.mean.to(dtype)
    if mean is None and center and pool.center:
        mean = x.mean(0, dtype=torch.float64).to(dtype)
        x, x_holdout = x - mean, x_holdout - mean
    y = _convert_targets(labels[train_rows], task, dtype)
    y_holdout = _convert_targets(holdout_pool_labels[holdout_rows], task, dtype)
    return Split(
        Dataset(x, y, mean, pool.name, label_names),
        Dataset(x_holdout, y_holdout, mean, f"{pool.name} held-out", label_names),
        available=len(labels),
    )


def map_classes(pool: Pool, task: str, positive: Names = ()) -> tuple[Tensor, tuple[str, ...]]:
    """Map the classes of a source to the labels of a task.

    Args:
        pool: All samples of a source.
        task: "binary", "multiclass" or "regression".
        positive: Classes with label +1. The default is ``pool.positive``.

    Returns:
        For each class of the source the index of its label, and the names of the labels.

    Raises:
        DataError: If there are fewer than two classes or labels.
    """
    require_known(task, TASKS, "No task", DataError)
    present_classes = pool.labels.unique().tolist()
    if len(present_classes) < 2:
        actual_classes_text = (
            f"are of class {pool.classes[present_classes[0]]!r}"
            if present_classes
            else "are missing"
        )
        raise DataError(
            f"Samples must belong to at least two classes; all {len(pool.labels)} samples of the dataset "
            f"{pool.name!r} {actual_classes_text}.",
            "Add samples of another class.",
        )
    if task == "multiclass":
        return torch.arange(len(pool.classes)), pool.classes
    positive_classes = [str(name) for name in positive] or list(pool.positive)
    if not positive_classes and len(pool.classes) == 2:
        positive_classes = [pool.classes[1]]
    for name in positive_classes:
        require_known(name, pool.classes, f"{pool.name!r} has no class", DataError)
    label_of_class = torch.tensor([int(name in positive_classes) for name in pool.classes])
    if len(label_of_class.unique()) < 2:
        raise DataError(
            f"A {task} task needs some classes with label +1, and some with label -1; "
            f"{len(positive_classes)} of the {len(pool.classes)} classes of the dataset {pool.name!r} "
            "have label +1.",
            f"Pass positive=({pool.classes[-1]!r},), or task='multiclass'.",
        )
    if pool.sides is not None and not positive:
        return label_of_class, pool.sides
    negative_classes = [name for name in pool.classes if name not in positive_classes]
    return label_of_class, (
        " or ".join(negative_classes),
        " or ".join(dict.fromkeys(positive_classes)),
    )


def choose_rows(labels: Tensor, quotas: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Choose the rows of a balanced subset: for each label a given number of rows.

    Args:
        labels: Labels of all rows.
        quotas: Number of rows of each label.
        generator: Random generator that selects the rows, or None to choose the first rows of each label.

    Returns:
        Indices of the chosen rows, ascending.
    """
    chosen_by_label = []
    for label, quota in enumerate(quotas):
        label_rows = (labels == label).nonzero().flatten()
        if generator is not None:
            label_rows = label_rows[torch.randperm(len(label_rows), generator=generator)]
        chosen_by_label.append(label_rows[:quota])
    return torch.cat(chosen_by_label).sort().values


def spread_quotas(available: Sequence[int], total: int) -> list[int]:
    """Decide how many samples of each label to choose, as evenly as possible, if ``total`` are needed.

    Args:
        available: Number of samples of each label.
        total: Sum of the quotas.

    Returns:
        The number of samples of each label.
    """
    quotas = [0] * len(available)
    for rank, label in enumerate(sorted(range(len(available)), key=available.__getitem__)):
        even_share = (total - sum(quotas)) // (len(available) - rank)
        quotas[label] = min(available[label], even_share)
    return quotas


def check_divisible(n: int, labels: int, limit: int | None = None) -> None:
    """Check that ``n`` samples can be balanced, that is, divided evenly over the labels.

    Args:
        n: Number of samples.
        labels: Number of labels.
        limit: Maximum number of samples that the error message recommends.

    Raises:
        DataError: If ``n`` is not a positive multiple of ``labels``.
    """
    if n < labels or n % labels:
        recommended_n = max(labels, min(n - n % labels, limit or n))
        raise DataError(
            f"The number n of samples must be a positive multiple of {labels}, so that each of the "
            f"{labels} labels has equally many samples; got n={n}.",
            f"Use n={recommended_n}.",
        )


def _choose_train_size(
    pool: Pool, request: Request, labels: Tensor, label_names: tuple[str, ...]
) -> int:
    """Return the number of training samples. Raise ``DataError`` if the source has too few samples."""
    n = request.n
    label_counts = torch.bincount(labels, minlength=len(label_names)).tolist()
    max_balanced_n = len(label_names) * min(label_counts)
    if n is None and max_balanced_n:
        # If the source has no test set, one half of the samples is the training set. The other half is the
        # held-out set.
        return (
            max_balanced_n
            if pool.test is not None
            else len(label_names) * max(1, min(label_counts) // 2)
        )
    requested_n = len(label_names) if n is None else n
    largest_n = max_balanced_n
    if pool.test is None:  # the held-out samples come from the samples that training does not use
        left_for_training = len(labels) - (request.holdout or 1)
        largest_n = min(max_balanced_n, left_for_training - left_for_training % len(label_names))
    check_divisible(requested_n, len(label_names), largest_n)
    if requested_n > max_balanced_n:
        counts_text = ", ".join(
            f"{c} of {name!r}" for c, name in zip(label_counts, label_names, strict=True)
        )
        remedy = "Use a smaller holdout." if max_balanced_n else "Add samples of the missing label."
        raise DataError(
            f"Every label must have the same number of training samples, so n={requested_n} needs "
            f"{requested_n // len(label_names)} samples of each label; the dataset {pool.name!r} has "
            f"{counts_text}.",
            f"Use n={largest_n} or fewer." if largest_n > 0 else remedy,
        )
    return requested_n


def _choose_holdout_counts(
    pool: Pool, n: int, holdout_count: int | None, labels: Tensor, label_names: tuple[str, ...]
) -> list[int]:
    """Return how many held-out samples to choose of each label, the same number if possible."""
    label_counts = torch.bincount(labels, minlength=len(label_names)).tolist()
    total, scarcest = sum(label_counts), min(label_counts)
    if holdout_count is None:
        holdout_count = min(DEFAULT_HOLDOUT, scarcest * len(label_names) or total)
        holdout_count -= holdout_count % len(label_names) if scarcest else 0
    if not 0 < holdout_count <= total:
        raise DataError(
            "Held-out samples must differ from all training samples. The number of held-out samples must "
            f"be {holdout_count or 'at least 1'}; only {total} samples of the dataset {pool.name!r} "
            f"differ from the n={n} training samples.",
            f"Use holdout={total} or fewer." if total else "Use a smaller n.",
        )
    return spread_quotas(label_counts, holdout_count)


def _find_different(candidates: Tensor, images: Tensor) -> Tensor:
    """Return the indices of the samples in ``candidates`` that are not equal to any sample in ``images``."""

    def hash_rows(samples: Tensor) -> list[bytes]:
        return [blake2b(row.tobytes(), digest_size=16).digest() for row in samples.numpy()]

    image_hashes = set(hash_rows(images))
    different_rows = [
        row for row, digest in enumerate(hash_rows(candidates)) if digest not in image_hashes
    ]
    return torch.tensor(different_rows, dtype=torch.long)


def _convert_targets(labels: Tensor, task: str, dtype: torch.dtype) -> Tensor:
    """Convert label indices to targets: -1/+1 for binary and regression tasks, else class indices."""
    if task == "multiclass":
        return labels
    return (2 * labels - 1).to(dtype if task == "regression" else torch.int64)
