"""Uniqueness certificates: what every other training set must share with a reconstruction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from residuum.records.base import Record, table_rows

# Fields that the JSON holds as they are: of the certificate, and of each sample. The last two are known
# only if the network has margins.
OF_ALL = (
    "task",
    "samples",
    "share",
    "box",
    "sums",
    "residual",
    "best_residual",
    "seconds",
    "notes",
)
OF_SAMPLE = (
    *("index", "lam", "size", "determined_at_least", "determined_energy", "change", "radius"),
    *("radius_most", "members", "pinned", "kinks"),
)
OF_FULL_SETS = ("full_at_least", "full_energy")


@dataclass(frozen=True, eq=False)
class Sums(Record):
    """Whether the weights fix mass and moment of every activation pattern, by the linear system.

    patterns: different patterns and labels of the candidates.
    pinned: those whose sums every set with these patterns shares.
    free: dimension of the moves across patterns, None where it was not counted.
    least: smallest singular value that counts as none of them, over the largest.
    method: how it is known.
    """

    patterns: int
    pinned: int
    free: int | None
    least: float | None
    method: str


@dataclass(frozen=True, eq=False)
class Uniqueness(Record):
    """The uniqueness certificate of k of m candidates, for a least share t of their multipliers.

    Every other training set with these patterns and labels that explains the weights as well, and in
    which an image takes over at least ``share`` of a sample's weight, keeps at least
    ``determined_at_least`` of the sample's energy in that image, and that image lies within
    ``radius_most`` and, pixel by pixel, between ``low`` and ``high``: proved. ``determined_energy``:
    the least found, attained by ``least`` (k, *shape) at distance ``radius``, in a set that changes the
    sum of gradients by ``change`` of the target's norm. full_at_least, full_energy: the same over sets
    that also keep every margin at or above the least (full KKT sets; equal where there are no margins).

    index: (k,) which candidates.
    lam: (k,) their multipliers, over all rivals.
    members: (k,) candidates of the same pattern and label.
    pinned: (k,) whether the weights fix the sums of that pattern: where they do not, the bound is
        that of the cell, whatever the share.
    kinks: (k,) switches at zero to rounding.
    residual, best_residual: of every layer, of this set and of the set that any attack explains the
        weights best with, {} where none was compared.

    Energies are of images as the network receives them.
    box: whether a value range was known.
    size: (k,) norms of the candidates as the network receives them.
    """

    task: str
    samples: int
    share: float
    box: bool
    margins: bool
    index: Tensor
    labels: Tensor
    lam: Tensor
    members: Tensor
    pinned: Tensor
    kinks: Tensor
    determined_at_least: Tensor
    determined_energy: Tensor
    full_at_least: Tensor
    full_energy: Tensor
    least: Tensor
    change: Tensor
    radius: Tensor
    radius_most: Tensor
    low: Tensor
    high: Tensor
    size: Tensor
    sums: Sums
    residual: dict[str, float]
    seconds: float
    best_residual: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def claim(self) -> str:
        """What is certified, in one sentence."""
        return (
            "every other training set with these patterns and labels that explains the weights as well, "
            f"and in which an image takes over at least {self.share:.0%} of this sample's weight, "
            "keeps at least this much energy in that image"
        )

    @property
    def standing(self) -> tuple[str, ...]:
        """What a reader needs beside the figures: what is proved, for which sets, how well they explain."""
        pinned, free = int(self.pinned.sum()), self.sums.free
        moves = "not counted" if free is None else f"{free} dimensions"
        return (
            f"proved: {self.claim}",
            f"sums of {self.sums.pinned} of {self.sums.patterns} patterns are fixed by the weights, those of "
            f"{pinned} of {len(self)} samples; moves across patterns: {moves}",
            f"residual by layer of this set: {_by_layer(self.residual)}; of the best set an attack found: "
            f"{_by_layer(self.best_residual)}",
            "stationary sets; of full KKT sets, which keep every margin, at least "
            f"{float(self.full_at_least.mean()):.3g} on average"
            if self.margins
            else "multipliers have no sign here: nothing but the cell bounds an image",
            "not covered, and may keep less: samples with new patterns, canceling pairs of opposite labels",
        )

    def to_json(self) -> dict[str, Any]:
        """The published form; what is unbounded is null."""
        columns = self.plain_values(*OF_SAMPLE) | {"label": self.labels.double().tolist()}
        unknown = dict.fromkeys(OF_FULL_SETS, [None] * len(self))
        columns |= self.plain_values(*OF_FULL_SETS) if self.margins else unknown
        return {
            "claim": self.claim,
            **self.plain_values(*OF_ALL),
            "certified": len(self),
            "per_sample": table_rows(columns),
        }


def _by_layer(residuals: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in residuals.items()) or "not compared"
