"""Certificates of a network: how close its weights are to a KKT point of given samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residuum.records.base import Record


@dataclass(frozen=True, eq=False)
class LayerResidual(Record):
    """The relative residual ||r_l|| / ||theta_l|| of one layer, with the plain multipliers."""

    name: str
    residual: float


@dataclass(frozen=True, eq=False)
class Certificate(Record):
    """How close the weights of a network are to a KKT point of given samples.

    Residuals are norms divided by ||theta||.

    Attributes:
        residual_plain: Residual with the best multipliers and ReLU'(0) = 0.
        residual_clarke: Residual if the gates at kinks are free. It is never larger.
        eps: ||r||, which depends on the scale of the weights.
        delta: max_i lam_i (m_i - p).
        margin: p = min_i m_i.
        normalized_margin: p / ||theta||^L.
        homogeneity_order: The order L, None if the network is not homogeneous.
        kinks: Number of gates at zero.
        kinks_freed: Number of gates that the Clarke residual could choose.
        layers: Relative residual of every layer.
        multipliers: The multipliers, (R,).
        rows: The sample of each multiplier, (R,).
        balance: Gap between the incoming and the outgoing squared norms of neurons, 0 at a KKT point.
        identity: Relative gap of ||theta||^2 = L sum_i lam_i m_i.
        condition: Condition number of the Gram matrix.
        theta_norm: ||theta||.
        status: The result in one word.
        notes: What limits the figures.
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
        """Return the published form (``residuum certify --json``)."""
        lam = self.multipliers
        active = int((lam.abs() > 1e-9 * lam.abs().max()).sum()) if len(lam) else 0
        largest = float(lam.max()) if len(lam) else 0.0
        multipliers = {"active": active, "sum": float(lam.sum()), "max": largest}
        return super().to_json() | {"multipliers": multipliers}
