"""Certificates: how close a network is to a KKT point of its margin problem, and what a reconstruction
could have been instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residuum.records.base import Record, plain

WHOLE = ["task", "samples", "tolerance", "box", "null_space", "seconds", "notes"]
PER_SAMPLE = ["index", "lam", "size", "radius", "radius_inside", "radius_most", "outside"]
PER_SAMPLE += ["determined_energy", "determined_at_least", "blocked_by", "kinks"]


@dataclass(frozen=True, eq=False)
class LayerResidual(Record):
    """||r_l|| / ||theta_l|| for the parameters of one layer (plain residual)."""

    name: str
    residual: float


@dataclass(frozen=True, eq=False)
class Certificate(Record):
    """Approximate-KKT levels of a network on given samples. Residuals are norms over ||theta||.

    residual_plain: best multipliers with ReLU'(0) = 0; residual_clarke: gates at kinks free, never
    larger; eps = ||r||, not scale free; delta = max_i lam_i (m_i - p); margin p = min_i m_i;
    normalized_margin = p / ||theta||^L; balance: gap between the neurons' incoming and
    outgoing squared norms, 0 at a KKT point; identity: relative gap of ||theta||^2 = L sum_i lam_i m_i;
    condition: of the Gram matrix; status: one word; notes: what limits the figures.
    """

    task: str
    samples: int
    residual_plain: float
    residual_clarke: float
    eps: float
    delta: float | None
    margin: float | None
    normalized_margin: float | None
    homogeneity_order: float | None
    kinks: int
    kinks_freed: int
    layers: tuple[LayerResidual, ...]
    multipliers: Tensor
    rows: Tensor
    balance: float | None
    identity: float | None
    condition: float
    theta_norm: float
    status: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The published form (``residuum certify --json``)."""
        lam = self.multipliers
        active = int((lam.abs() > 1e-9 * lam.abs().max()).sum()) if len(lam) else 0
        largest = float(lam.max()) if len(lam) else 0.0
        said = {name: value for name, value in super().to_json().items() if name != "rows"}
        return said | {"multipliers": {"active": active, "sum": float(lam.sum()), "max": largest}}


@dataclass(frozen=True, eq=False)
class NullSpace(Record):
    """Directions in which the linearised residual of all candidates does not change, gates fixed.

    unknowns: m d + R, every pixel and every multiplier. undoubled, undoubled_most: bounds on the
    null space of the candidates as they are, equal where the count is exact; doubled,
    doubled_most: of the system in which every candidate stands twice with half its multiplier. Of
    the doubled null space, twins: R directions that only move multiplier between two equal copies;
    pairs_inside, pairs_outside: m rank(W1) and m (d - rank(W1)) directions in which two copies move
    against each other, inside and outside row(W1) (the slopes of all switches for a network that is
    no MLP); what is left is the undoubled one. patterns: different activation patterns. method: dense,
    block or layers; change: the largest ||J v|| / ||J|| over the unit vectors counted, verified.
    """

    unknowns: int
    undoubled: int
    undoubled_most: int
    doubled: int
    doubled_most: int
    twins: int
    pairs_inside: int
    pairs_outside: int
    patterns: int
    method: str
    change: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        said = super().to_json()
        places = ("inside", "outside")
        return said | {f"pairs_{at}_row_space": said.pop(f"pairs_{at}") for at in places}


@dataclass(frozen=True, eq=False)
class Uniqueness(Record):
    """The uniqueness certificate of k of m candidates, over equal pairs x + a, x - a in their place.

    index: (k,) which candidates; labels: (k,); lam: (k,) sum of absolute multipliers.
    radius: (k,) how far both halves of the candidate move along direction, one each way, before the
    residual changes by more than ``tolerance`` or the box ends: distance to an equally good
    pair, inf where nothing is in the way; radius_inside: the same along directions inside
    row(W1); radius_most: (k,) no pair that keeps its pattern moves further than this;
    blocked_by: what is in the way; kinks: (k,) switches that sit at zero.
    direction: (k, *shape) unit; outside: (k,) share of its energy outside row(W1).
    determined_energy: (k,) share of the image's energy that the least image among all equally good
    pairs keeps, attained by least: (k, *shape); determined_at_least: (k,) lower bound by duality. Both
    hold for equal pairs: unequal splits and exchanges between candidates may keep less.
    pixels: (k, *shape) how far each pixel moves, attained.
    tolerance: of the residual's change, each layer over its own norm, roots of squares summed.
    """

    task: str
    samples: int
    tolerance: float
    box: bool
    index: Tensor
    labels: Tensor
    lam: Tensor
    radius: Tensor
    radius_inside: Tensor
    radius_most: Tensor
    blocked_by: tuple[str, ...]
    kinks: Tensor
    direction: Tensor
    outside: Tensor
    determined_energy: Tensor
    determined_at_least: Tensor
    least: Tensor
    pixels: Tensor
    size: Tensor
    null_space: NullSpace
    seconds: float
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.index)

    def to_json(self) -> dict[str, Any]:
        """The published form; what is unbounded is null."""
        rows = {name: plain(getattr(self, name)) for name in PER_SAMPLE}
        rows |= {"label": self.labels.double().tolist(), "unbounded": self.radius.isinf().tolist()}
        per_sample = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        said = {name: plain(getattr(self, name)) for name in WHOLE}
        return said | {"certified": len(self), "per_sample": per_sample}
