"""From a pool, every sample that a source has, to a split: labels of the task, samples that are taken.

Training samples are balanced over the labels and keep the order of the file; without a seed they
are the first n / L of each of the L labels. Held-out samples never repeat a training image.
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

DEFAULT_HOLDOUT = 2000  # as many as scoring uses
Names = Sequence[str | int]  # of classes


@dataclass(frozen=True)
class Request:
    """What the user asked for, as far as a source may care.

    n: training samples.
    seed: of the random choice.
    root: folder with the files of named datasets.
    holdout: held-out samples.
    None means the source's own choice.
    """

    n: int | None = None
    seed: int | None = None
    root: Path | None = None
    holdout: int | None = None


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a source, in file order and as stored.

    images: (N, *shape), of which images / scale are the values.
    labels: (N,) indices into classes.
    positive: the classes that binary tasks call +1.
    sides: names of -1 and +1.
    mean: what the stored images already lack.
    center: whether subtracting a mean makes sense.
    test: the source's own held-out part.
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
                f"Every sample needs one label; {self.name!r} has images of shape "
                f"{tuple(self.images.shape)} and labels of shape {tuple(self.labels.shape)}.",
                "Save them from the same arrays.",
            )
        if self.test is not None and self.test.shape != self.shape:
            raise DataError(
                f"Training and test samples must have one shape; {self.name!r} has "
                f"{self.shape} and {self.test.shape}.",
                "Resize one of them.",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.images.shape[1:])


Source = Callable[..., Pool]
"""``source(request, **options)``: its keyword-only parameters are the options a user may give."""


def seeded(seed: int | None) -> torch.Generator:
    """A generator of its own, so that no choice depends on the global one; None means seed 0."""
    if seed is not None and not 0 <= seed < 2**63:
        raise DataError(f"A seed lies between 0 and 2**63; got {seed}.", "Use seed=0.")
    return torch.Generator().manual_seed(seed or 0)


def split_pool(
    pool: Pool, request: Request, *, task: str, positive: Names, center: bool, dtype: torch.dtype
) -> Split:
    """Choose the samples of ``request`` from ``pool`` and preprocess both sets alike.

    Equally many of each label for training; held-out samples from the test part where there is one,
    none equal to a training image, in an order of their own. The mean that is subtracted from both is
    that of the training samples: it is what the network was given.
    """
    lookup, names = task_labels(pool, task, positive)
    labels = lookup[pool.labels]  # (N,) in 0..L-1
    n = _count(pool, request, labels, names)
    generator = None if request.seed is None else seeded(request.seed)
    rows = take(labels, [n // len(names)] * len(names), generator)

    rest = pool.test or pool
    rest_labels = lookup[rest.labels]
    kept = _unlike(rest.images, pool.images[rows])
    quotas = _holdout_quotas(pool, n, request.holdout, rest_labels[kept], names)
    generator = seeded(request.seed)
    held = kept[take(rest_labels[kept], quotas, None if request.seed is None else generator)]
    held = held[torch.randperm(len(held), generator=generator)]

    x, x_held = (images.to(dtype) / pool.scale for images in (pool.images[rows], rest.images[held]))
    mean = None if pool.mean is None else pool.mean.to(dtype)
    if mean is None and center and pool.center:
        mean = x.mean(0, dtype=torch.float64).to(dtype)
        x, x_held = x - mean, x_held - mean
    y, y_held = (_targets(part, task, dtype) for part in (labels[rows], rest_labels[held]))
    return Split(
        Dataset(x, y, mean, pool.name, names),
        Dataset(x_held, y_held, mean, f"{pool.name} held-out", names),
        available=len(labels),
    )


def task_labels(pool: Pool, task: str, positive: Names = ()) -> tuple[Tensor, tuple[str, ...]]:
    """For each class of ``pool`` the label it has in ``task``, and the names of the labels."""
    require_known(task, TASKS, "No task", DataError)
    present = pool.labels.unique().tolist()
    if len(present) < 2:
        got = f"are of class {pool.classes[present[0]]!r}" if present else "are missing"
        raise DataError(
            f"At least two classes are needed; all {len(pool.labels)} samples of {pool.name!r} {got}.",
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
            f"Task {task} needs some classes against the others; got {len(chosen)} of "
            f"{len(pool.classes)} on the side of +1 in {pool.name!r}.",
            f"Say positive=({pool.classes[-1]!r},), or task='multiclass'.",
        )
    if pool.sides is not None and not positive:
        return lookup, pool.sides
    negatives = [name for name in pool.classes if name not in chosen]
    return lookup, (" or ".join(negatives), " or ".join(dict.fromkeys(chosen)))


def take(labels: Tensor, quotas: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Rows holding ``quotas[l]`` of each label l, ascending: the first ones, or random ones."""
    chosen = []
    for label, quota in enumerate(quotas):
        rows = (labels == label).nonzero().flatten()
        if generator is not None:
            rows = rows[torch.randperm(len(rows), generator=generator)]
        chosen.append(rows[:quota])
    return torch.cat(chosen).sort().values


def spread(available: Sequence[int], total: int) -> list[int]:
    """Quotas summing to ``total``, as even as ``available`` allows: the scarcest label first."""
    quotas = [0] * len(available)
    for rank, label in enumerate(sorted(range(len(available)), key=available.__getitem__)):
        share = (total - sum(quotas)) // (len(available) - rank)
        quotas[label] = min(available[label], share)
    return quotas


def check_divisible(n: int, labels: int, most: int | None = None) -> None:
    """Refuse an ``n`` that cannot be balanced over so many labels; ``most`` there are of all."""
    if n < labels or n % labels:
        near = max(labels, min(n - n % labels, most or n))
        raise DataError(
            f"A balanced set over {labels} labels needs n to be a positive multiple of {labels}; "
            f"got n={n}.",
            f"Use n={near}.",
        )


def _count(pool: Pool, request: Request, labels: Tensor, names: tuple[str, ...]) -> int:
    """Number of training samples, checked against what there is."""
    n = request.n
    counts = torch.bincount(labels, minlength=len(names)).tolist()
    most = len(names) * min(counts)
    if n is None and most:
        # Without a test part the other half is the only held-out control there can be.
        return most if pool.test is not None else len(names) * max(1, min(counts) // 2)
    wanted = len(names) if n is None else n
    best = most
    if pool.test is None:  # some must be left for the control
        left = len(labels) - (request.holdout or 1)
        best = min(most, left - left % len(names))
    check_divisible(wanted, len(names), best)
    if wanted > most:
        there = ", ".join(f"{c} of {name!r}" for c, name in zip(counts, names, strict=True))
        remedy = "Use a smaller holdout." if most else "Add samples of the missing label."
        raise DataError(
            f"n={wanted} needs {wanted // len(names)} samples of each label; {pool.name!r} has "
            f"{there}.",
            f"Use n={best} or fewer." if best > 0 else remedy,
        )
    return wanted


def _holdout_quotas(
    pool: Pool, n: int, holdout: int | None, labels: Tensor, names: tuple[str, ...]
) -> list[int]:
    """How many held-out samples of each label: as asked, else as many as balance allows, spread evenly."""
    available = torch.bincount(labels, minlength=len(names)).tolist()
    total, scarcest = sum(available), min(available)
    if holdout is None:
        holdout = min(DEFAULT_HOLDOUT, scarcest * len(names) or total)
        holdout -= holdout % len(names) if scarcest else 0
    if not 0 < holdout <= total:
        raise DataError(
            f"A held-out control needs samples unlike every training image; after n={n} for "
            f"training {pool.name!r} has {total}, wanted: {holdout or 'at least 1'}.",
            f"Use holdout={total} or fewer." if total else "Use a smaller n.",
        )
    return spread(available, holdout)


def _unlike(candidates: Tensor, images: Tensor) -> Tensor:
    """Rows of ``candidates`` that equal none of ``images`` byte for byte."""

    def digests(part: Tensor) -> list[bytes]:
        return [blake2b(row.tobytes(), digest_size=16).digest() for row in part.numpy()]

    seen = set(digests(images))
    fresh = [row for row, digest in enumerate(digests(candidates)) if digest not in seen]
    return torch.tensor(fresh, dtype=torch.long)


def _targets(labels: Tensor, task: str, dtype: torch.dtype) -> Tensor:
    """-1/+1 as integers (binary) or floats (regression), or class indices."""
    if task == "multiclass":
        return labels
    return (2 * labels - 1).to(dtype if task == "regression" else torch.int64)
