"""Certificates of a network: how close its weights are to a KKT point of given samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residuum.records.base import Record


@dataclass(frozen=True, eq=False)
class LayerResidual(Record):
    """||r_l|| / ||theta_l|| for the parameters of one layer (plain residual)."""

    name: str
    residual: float


@dataclass(frozen=True, eq=False)
class Certificate(Record):
    """Approximate-KKT levels of a network on given samples. Residuals are norms over ||theta||.

    residual_plain: best multipliers with ReLU'(0) = 0.
    residual_clarke: gates at kinks free, never larger.
    eps: ||r||, not scale free.
    delta: max_i lam_i (m_i - p).
    margin: p = min_i m_i.
    normalized_margin: p / ||theta||^L.
    balance: gap between the neurons' incoming and outgoing squared norms, 0 at a KKT point.
    identity: relative gap of ||theta||^2 = L sum_i lam_i m_i.
    condition: of the Gram matrix.
    status: one word.
    notes: what limits the figures.
    layers: relative residual of each.
    rows: (R,) the sample that each multiplier belongs to.
    kinks_freed: gates that the Clarke residual was allowed to choose.
    homogeneity_order: L, None where the network is not homogeneous.
    theta_norm: ||theta||.
    """

    unpublished = ("rows",)

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
        multipliers = {"active": active, "sum": float(lam.sum()), "max": largest}
        return super().to_json() | {"multipliers": multipliers}
