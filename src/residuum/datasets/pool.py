"""What a source of data hands over: every sample it has, before any is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from residuum.errors import DataError


@dataclass(frozen=True)
class Request:
    """What the user asked for, as far as a source may care.

    n: training samples; seed: of the random choice; root: folder with the files of named datasets;
    holdout: held-out samples. None means the source's own choice.
    """

    n: int | None = None
    seed: int | None = None
    root: Path | None = None
    holdout: int | None = None


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a source, in file order and as stored.

    images: (N, *shape), of which images / scale are the values; labels: (N,) indices into classes;
    positive: the classes that binary tasks call +1; sides: names of -1 and +1;
    mean: what the stored images already lack; center: whether subtracting a mean makes sense;
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
