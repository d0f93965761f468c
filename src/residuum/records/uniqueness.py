"""Uniqueness certificates: proofs that all training sets with the same weights contain similar images.

A certificate covers the training sets that have the same activation patterns and labels as the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from residuum.records.base import Record, table_rows

# Names of the fields that the JSON of a certificate (a proof of how unique reconstructions are) contains
# unchanged. OF_ALL describes the whole certificate, and OF_SAMPLE each certified candidate. OF_FULL_SETS
# are stricter bounds for training sets that also keep the margins of the network. They are None for
# networks without margins.
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
    """Whether the weights determine the sums over all samples with the same activation pattern.

    An activation pattern is the set of ReLUs that a sample activates. Each pattern has two sums: the sum of
    the multipliers of its samples, and the sum of its samples weighted with their multipliers.

    Attributes:
        patterns: Number of different pairs of an activation pattern and a label.
        pinned: Number of such pairs whose sums are equal in every training set with these patterns.
        free: Dimension of the space of changes of the sums that leave the weights unchanged, or None if it
            was not computed.
        least: Smallest singular value that counts as nonzero, over the largest singular value, of the matrix
            by which the numbers were computed (see ``method``).
        method: How the numbers were computed: from the "first layer" or from all layers ("dense"). For
            "multipliers of either sign" (regression), nothing is computed.
    """

    patterns: int
    pinned: int
    free: int | None
    least: float | None
    method: str


@dataclass(frozen=True, eq=False)
class Uniqueness(Record):
    """The uniqueness certificate of k of the m candidates of an attack.

    The certificate is about other training sets that have the activation patterns and labels of the
    candidates and fit the weights equally well. In such a set, other images can take over the multiplier of
    a candidate. The certificate applies to an image that has at least the share ``share`` of this
    multiplier. It proves that the image keeps at least ``determined_at_least`` of the energy (squared norm)
    of the candidate, is within the distance ``radius_most``, and lies between ``low`` and ``high`` in every
    pixel.

    Attributes:
        task: Task of the network.
        samples: Number of candidates, m.
        share: Smallest share of the multiplier of a candidate that an image must take over.
        box: Whether the certificate uses a known value range of pixels.
        margins: Whether the network has margins.
        index: Indices of the k certified candidates, (k,).
        labels: Labels of the candidates, (k,).
        lam: Multipliers (weights) of the candidates, summed over rival classes, (k,).
        members: Number of candidates with the same activation pattern and label, (k,).
        pinned: Whether the weights determine the sums of the activation pattern, (k,). If not, only the
            activation pattern itself bounds an image, for any share.
        kinks: Number of activation boundaries that pass through each candidate, up to rounding, (k,).
        determined_at_least: Proved lower bound of the share of the energy that an image keeps, (k,).
        determined_energy: Smallest share of the energy that a search found, (k,).
        full_at_least: Like ``determined_at_least``, but only for training sets that also keep every margin
            at or above the smallest margin (full KKT sets), (k,). It equals ``determined_at_least`` if the
            network has no margins.
        full_energy: Like ``determined_energy``, but only for full KKT sets, (k,).
        least: Images with the smallest energy that the search found, (k, *shape).
        change: Change of the weighted sum of gradients if the image ``least`` replaces its sample, over the
            norm of the vector that this sum must equal, (k,).
        radius: Distance between the image ``least`` and the candidate, (k,).
        radius_most: Proved upper bound of the distance between an image and the candidate, (k,).
        low: Proved lower bounds of the pixels, (k, *shape).
        high: Proved upper bounds of the pixels, (k, *shape).
        size: Norms of the candidates as the network receives them, (k,).
        sums: Whether the weights determine the sums over the samples of each activation pattern.
        residual: Residual of the m candidates by layer.
        seconds: Run time in seconds.
        best_residual: Residual by layer of the candidates that fit the weights best among all attacks, or
            {} if no attacks were compared.
        notes: Remarks on what limits the certificate.
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
        """The statement that the certificate proves about the reconstructed images, as text."""
        return (
            "in every other training set with these patterns and labels that fits the weights equally well, "
            f"an image that takes over at least {self.share:.0%} of the multiplier of this sample "
            "keeps at least this much of its energy"
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences for the reader: what the certificate proves, its limits, and how well the images fit."""
        pinned, free = int(self.pinned.sum()), self.sums.free
        free_dimension_text = "not computed" if free is None else f"{free}"
        return (
            f"proved: {self.claim}",
            f"the weights determine the sums over the samples of {self.sums.pinned} of {self.sums.patterns} "
            f"activation patterns, with {pinned} of {len(self)} samples; dimension of other changes of the "
            f"sums: {free_dimension_text}",
            f"residual by layer of this set: {_by_layer(self.residual)}; of the candidates that fit best: "
            f"{_by_layer(self.best_residual)}",
            "these bounds hold for stationary sets; for full KKT sets, which keep every margin, they are at "
            f"least {float(self.full_at_least.mean()):.3g} on average"
            if self.margins
            else "multipliers can have any sign here, so only the activation pattern bounds an image",
            "not covered, and may keep less: samples with new patterns, and pairs of opposite labels that "
            "cancel",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as JSON types. NaN and infinity become None."""
        columns = self.plain_values(*OF_SAMPLE) | {"label": self.labels.double().tolist()}
        unknown_columns = dict.fromkeys(OF_FULL_SETS, [None] * len(self))
        columns |= self.plain_values(*OF_FULL_SETS) if self.margins else unknown_columns
        return {
            "claim": self.claim,
            **self.plain_values(*OF_ALL),
            "certified": len(self),
            "per_sample": table_rows(columns),
        }


def _by_layer(residuals: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in residuals.items()) or "not compared"
