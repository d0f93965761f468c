"""Select training samples and held-out samples from all samples of a source.

Training samples are balanced over the labels and keep the order of the file. Without a seed, training samples
are the first n / L samples of each of the L labels. Held-out samples never repeat a training sample.
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

DEFAULT_HOLDOUT = 2000  # default number of held-out samples, the maximum that scoring uses
Names = Sequence[str | int]  # type of a list of class names


@dataclass(frozen=True)
class Request:
    """Requests of the user for the samples of a source. If a request is None, the source chooses.

    Attributes:
        n: Number of training samples.
        seed: Seed of the random choice.
        root: Folder with the files of named datasets.
        holdout: Number of held-out samples.
    """

    n: int | None = None
    seed: int | None = None
    root: Path | None = None
    holdout: int | None = None


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a source, in the order and the format of the file.

    Attributes:
        name: Name of the source.
        images: Samples, (N, *shape), as stored in the file. The values of the samples are images / scale.
        labels: Indices into ``classes``, (N,).
        classes: Names of the classes.
        positive: The classes with label +1 in binary tasks.
        sides: Names of the labels -1 and +1.
        scale: Divisor of the images.
        mean: The mean that was subtracted from the images, or None.
        center: Whether subtracting a mean from the samples makes sense.
        test: The test set of the source, or None.
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
                f"Every sample must have one label; {self.name!r} has images of shape "
                f"{tuple(self.images.shape)} and labels of shape {tuple(self.labels.shape)}.",
                "Save one label per sample.",
            )
        if self.test is not None and self.test.shape != self.shape:
            raise DataError(
                f"Training and test samples must have the same shape; {self.name!r} has "
                f"{self.shape} and {self.test.shape}.",
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

    Training samples are balanced. Held-out samples come from the test set if the source has one. They are
    never equal to a training sample, and their order is random. The mean of the training samples is
    subtracted from training and held-out samples, so that both have the preprocessing of the training.

    Args:
        pool: All samples of a source.
        request: Numbers of samples and the seed.
        task: "binary", "multiclass" or "regression".
        positive: Classes with label +1.
        center: Whether to subtract the mean.
        dtype: Number format of the samples.

    Returns:
        Training samples and held-out samples.
    """
    lookup, names = map_classes(pool, task, positive)
    labels = lookup[pool.labels]  # (N,) label indices 0..L-1
    n = _count(pool, request, labels, names)
    generator = None if request.seed is None else make_generator(request.seed)
    rows = choose_rows(labels, [n // len(names)] * len(names), generator)

    source = pool.test or pool
    source_labels = lookup[source.labels]
    usable = _find_different(source.images, pool.images[rows])
    usable_labels = source_labels[usable]
    quotas = _holdout_quotas(pool, n, request.holdout, usable_labels, names)
    generator = make_generator(request.seed)
    chosen = choose_rows(usable_labels, quotas, None if request.seed is None else generator)
    held_out = usable[chosen]
    held_out = held_out[torch.randperm(len(held_out), generator=generator)]

    images = (pool.images[rows], source.images[held_out])
    x, x_held = (values.to(dtype) / pool.scale for values in images)
    mean = None if pool.mean is None else pool.mean.to(dtype)
    if mean is None and center and pool.center:
        mean = x.mean(0, dtype=torch.float64).to(dtype)
        x, x_held = x - mean, x_held - mean
    y = _targets(labels[rows], task, dtype)
    y_held = _targets(source_labels[held_out], task, dtype)
    return Split(
        Dataset(x, y, mean, pool.name, names),
        Dataset(x_held, y_held, mean, f"{pool.name} held-out", names),
        available=len(labels),
    )


def map_classes(pool: Pool, task: str, positive: Names = ()) -> tuple[Tensor, tuple[str, ...]]:
    """Map the classes of a source to the labels of a task.

    Args:
        pool: All samples of a source.
        task: "binary", "multiclass" or "regression".
        positive: Classes with label +1. The default is ``pool.positive``.

    Returns:
        A tensor with the label index of each class, and the names of the labels.

    Raises:
        DataError: If there are fewer than two classes or labels.
    """
    require_known(task, TASKS, "No task", DataError)
    present = pool.labels.unique().tolist()
    if len(present) < 2:
        got = f"are of class {pool.classes[present[0]]!r}" if present else "are missing"
        raise DataError(
            f"Samples must have at least two classes; all {len(pool.labels)} samples of {pool.name!r} {got}.",
            "Add samples of another class.",
        )
    if task == "multiclass":
        return torch.arange(len(pool.classes)), pool.classes
    chosen = [str(name) for name in positive] or list(pool.positive)
    if not chosen and len(pool.classes) == 2:
        chosen = [pool.classes[1]]
    for name in chosen:
        require_known(name, pool.classes, f"{pool.name!r} has no class", DataError)
    lookup = torch.tensor([int(name in chosen) for name in pool.classes])
    if len(lookup.unique()) < 2:
        raise DataError(
            f"A {task} task must have classes with label +1 and classes with label -1; got "
            f"{len(chosen)} of {len(pool.classes)} classes with label +1 in {pool.name!r}.",
            f"Pass positive=({pool.classes[-1]!r},), or task='multiclass'.",
        )
    if pool.sides is not None and not positive:
        return lookup, pool.sides
    negatives = [name for name in pool.classes if name not in chosen]
    return lookup, (" or ".join(negatives), " or ".join(dict.fromkeys(chosen)))


def choose_rows(labels: Tensor, quotas: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Choose a number of rows of each label.

    Args:
        labels: Labels of all rows.
        quotas: Number of rows of each label.
        generator: Random generator of the choice, or None to choose the first rows.

    Returns:
        Indices of the chosen rows, ascending.
    """
    chosen = []
    for label, quota in enumerate(quotas):
        rows = (labels == label).nonzero().flatten()
        if generator is not None:
            rows = rows[torch.randperm(len(rows), generator=generator)]
        chosen.append(rows[:quota])
    return torch.cat(chosen).sort().values


def spread_quotas(available: Sequence[int], total: int) -> list[int]:
    """Divide a total number of samples over labels as evenly as possible.

    Args:
        available: Number of samples of each label.
        total: Sum of the quotas.

    Returns:
        The number of samples of each label.
    """
    quotas = [0] * len(available)
    for rank, label in enumerate(sorted(range(len(available)), key=available.__getitem__)):
        share = (total - sum(quotas)) // (len(available) - rank)
        quotas[label] = min(available[label], share)
    return quotas


def check_divisible(n: int, labels: int, limit: int | None = None) -> None:
    """Check that a set of ``n`` samples can be balanced.

    Args:
        n: Number of samples.
        labels: Number of labels.
        limit: Maximum number of samples that the error message recommends.

    Raises:
        DataError: If ``n`` is not a positive multiple of ``labels``.
    """
    if n < labels or n % labels:
        nearest = max(labels, min(n - n % labels, limit or n))
        raise DataError(
            f"For a balanced set over {labels} labels, n must be a positive multiple of {labels}; "
            f"got n={n}.",
            f"Use n={nearest}.",
        )


def _count(pool: Pool, request: Request, labels: Tensor, names: tuple[str, ...]) -> int:
    """Return the number of training samples. Raise ``DataError`` if the source has too few samples."""
    n = request.n
    counts = torch.bincount(labels, minlength=len(names)).tolist()
    maximum = len(names) * min(counts)
    if n is None and maximum:
        # If the source has no test set, the other half of its samples is the held-out set.
        return maximum if pool.test is not None else len(names) * max(1, min(counts) // 2)
    requested = len(names) if n is None else n
    best = maximum
    if pool.test is None:  # some samples must remain for the held-out set
        remaining = len(labels) - (request.holdout or 1)
        best = min(maximum, remaining - remaining % len(names))
    check_divisible(requested, len(names), best)
    if requested > maximum:
        available = ", ".join(f"{c} of {name!r}" for c, name in zip(counts, names, strict=True))
        remedy = "Use a smaller holdout." if maximum else "Add samples of the missing label."
        raise DataError(
            f"n={requested} needs {requested // len(names)} samples of each label; {pool.name!r} has "
            f"{available}.",
            f"Use n={best} or fewer." if best > 0 else remedy,
        )
    return requested


def _holdout_quotas(
    pool: Pool, n: int, holdout: int | None, labels: Tensor, names: tuple[str, ...]
) -> list[int]:
    """Return the number of held-out samples of each label, balanced if possible."""
    available = torch.bincount(labels, minlength=len(names)).tolist()
    total, scarcest = sum(available), min(available)
    if holdout is None:
        holdout = min(DEFAULT_HOLDOUT, scarcest * len(names) or total)
        holdout -= holdout % len(names) if scarcest else 0
    if not 0 < holdout <= total:
        raise DataError(
            f"Held-out samples must differ from every training image; {pool.name!r} has {total} such "
            f"samples in addition to n={n} for training, and {holdout or 'at least 1'} are needed.",
            f"Use holdout={total} or fewer." if total else "Use a smaller n.",
        )
    return spread_quotas(available, holdout)


def _find_different(candidates: Tensor, images: Tensor) -> Tensor:
    """Return the indices of the rows of ``candidates`` that are not equal to any of ``images``."""

    def hash_rows(samples: Tensor) -> list[bytes]:
        return [blake2b(row.tobytes(), digest_size=16).digest() for row in samples.numpy()]

    seen = set(hash_rows(images))
    rows = [row for row, digest in enumerate(hash_rows(candidates)) if digest not in seen]
    return torch.tensor(rows, dtype=torch.long)


def _targets(labels: Tensor, task: str, dtype: torch.dtype) -> Tensor:
    """Convert label indices to targets: -1/+1 for binary and regression tasks, else class indices."""
    if task == "multiclass":
        return labels
    return (2 * labels - 1).to(dtype if task == "regression" else torch.int64)
