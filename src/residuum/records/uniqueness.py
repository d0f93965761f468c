"""Uniqueness certificates: what every other training set must share with a reconstruction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from residuum.records.base import Record, table_rows

# Fields of the certificate and of each sample that the JSON holds unchanged. The last two are computed only
# if the network has margins.
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
    """Whether the weights determine the mass and the moment of every activation pattern.

    Attributes:
        patterns: Number of different pairs of a pattern and a label.
        pinned: Number of pairs whose sums are equal in every set with these patterns.
        free: Dimension of the moves across patterns, None if it was not counted.
        least: Smallest singular value that counts as nonzero, over the largest.
        method: How the numbers were computed.
    """

    patterns: int
    pinned: int
    free: int | None
    least: float | None
    method: str


@dataclass(frozen=True, eq=False)
class Uniqueness(Record):
    """The uniqueness certificate of k of m candidates.

    Consider any other training set with these patterns and labels that fits the weights equally well, and in
    which an image takes over at least ``share`` of the multiplier of a sample. It is proved that this image
    keeps at least ``determined_at_least`` of the energy of the sample, is within ``radius_most`` of it, and
    lies between ``low`` and ``high`` in every pixel. Energies are those of images as the network receives
    them.

    Attributes:
        task: Task of the network.
        samples: Number of candidates, m.
        share: The smallest share of a multiplier.
        box: Whether a value range was known.
        margins: Whether the network has margins.
        index: Indices of the candidates, (k,).
        labels: Labels, (k,).
        lam: Their multipliers, over all rivals, (k,).
        members: Number of candidates with the same pattern and label, (k,).
        pinned: Whether the weights determine the sums of the pattern, (k,). If not, the bound is that of the
            cell, for any share.
        kinks: Number of activation boundaries at zero up to rounding, (k,).
        determined_at_least: Proved lower bound of the energy, (k,).
        determined_energy: Smallest energy that was found, (k,).
        full_at_least: As ``determined_at_least``, over sets that also keep every margin at or above the
            smallest one (full KKT sets). Equal to it if the network has no margins, (k,).
        full_energy: As ``determined_energy``, over full KKT sets, (k,).
        least: Images with the smallest energy that was found, (k, *shape).
        change: Change of the sum of gradients in the set of such an image, over the norm of the target, (k,).
        radius: Distance of such an image from the candidate, (k,).
        radius_most: Proved upper bound of the distance, (k,).
        low: Proved lower bounds of the pixels, (k, *shape).
        high: Proved upper bounds of the pixels, (k, *shape).
        size: Norms of the candidates as the network receives them, (k,).
        sums: What the weights determine about sums over patterns.
        residual: Residual of this set by layer.
        seconds: Run time.
        best_residual: Residual by layer of the set that fits the weights best among all attacks, {} if none
            was compared.
        notes: What limits the certificate.
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
        """The statement that is certified."""
        return (
            "in every other training set with these patterns and labels that fits the weights equally well, "
            f"an image that takes over at least {self.share:.0%} of the multiplier of this sample "
            "keeps at least this much of its energy"
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences about what is proved, for which sets, and how well they fit the weights."""
        pinned, free = int(self.pinned.sum()), self.sums.free
        moves = "not counted" if free is None else f"{free} dimensions"
        return (
            f"proved: {self.claim}",
            f"the weights determine the sums of {self.sums.pinned} of {self.sums.patterns} patterns, with "
            f"{pinned} of {len(self)} samples; moves across patterns: {moves}",
            f"residual by layer of this set: {_by_layer(self.residual)}; of the best set of an attack: "
            f"{_by_layer(self.best_residual)}",
            "these bounds hold for stationary sets; for full KKT sets, which keep every margin, they are at "
            f"least {float(self.full_at_least.mean()):.3g} on average"
            if self.margins
            else "multipliers have no sign here, so only the cell bounds an image",
            "not covered, and may keep less: samples with new patterns, canceling pairs of opposite labels",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the published form. Numbers that are not finite are null."""
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
