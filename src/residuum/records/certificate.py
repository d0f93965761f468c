"""Certificates: how exactly given samples explain the weights of a network (KKT equation)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residuum.records.base import Record


@dataclass(frozen=True, eq=False)
class LayerResidual(Record):
    """The relative error (residual) of the KKT equation in one layer.

    The residual is the difference between the weights of the layer and the weighted sum of gradients that
    equals the weights at a KKT point. Its norm is divided by the norm of the weights of the layer.
    """

    name: str
    residual: float


@dataclass(frozen=True, eq=False)
class Certificate(Record):
    """How exactly the weights of a network solve the KKT equation of margin maximization for given samples.

    At a KKT point, the weights theta equal a weighted sum of the network's gradients at the samples. The
    multipliers lam_i >= 0 are the weights of this sum. The vector r is theta minus the sum. A residual is the
    relative norm ||r|| / ||theta||. Sample i has margin m_i.

    Attributes:
        residual_plain: Residual with the best multipliers and ReLU'(0) = 0.
        residual_clarke: Smallest residual if the derivative of ReLU at a kink (an input of exactly zero)
            may be any number in [0, 1]. It never exceeds ``residual_plain``.
        eps: Absolute norm ||r|| of the residual, which depends on the scale of the weights.
        delta: Largest violation of complementary slackness, max_i lam_i (m_i - p).
        margin: Smallest margin, p = min_i m_i.
        normalized_margin: Smallest margin over a power of the weight norm, p / ||theta||^L.
        homogeneity_order: Order of homogeneity L of the network, or None if the network is not homogeneous.
        kinks: Number of pairs of a sample and a ReLU whose input is exactly zero.
        kinks_freed: Number of kinks at which ``residual_clarke`` chooses the derivative.
        layers: Relative residuals by layer.
        multipliers: Multipliers of the R gradients, (R,).
        rows: Index of the sample of each multiplier, (R,).
        balance: Gap between the squared norms of the incoming and outgoing weights of neurons. It is 0 at a
            KKT point.
        identity: Relative gap between ||theta||^2 and L sum_i lam_i m_i, which are equal at a KKT point.
        condition: Condition number of the Gram matrix of the gradients.
        theta_norm: Norm ||theta|| of all weights.
        status: Result of the certificate in one word.
        notes: Remarks on the limits of this certificate.
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
        """Return the certificate (a measure of fit) as the JSON object of ``residuum certify --json``."""
        multipliers = self.multipliers
        active_count = (
            int((multipliers.abs() > 1e-9 * multipliers.abs().max()).sum())
            if len(multipliers)
            else 0
        )
        largest_multiplier = float(multipliers.max()) if len(multipliers) else 0.0
        multiplier_summary = {
            "active": active_count,
            "sum": float(multipliers.sum()),
            "max": largest_multiplier,
        }
        return super().to_json() | {"multipliers": multiplier_summary}
