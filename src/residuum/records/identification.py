"""What the weights of a polynomial network determine of its samples, as published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residuum.records.base import Record


@dataclass(frozen=True, eq=False)
class Identification(Record):
    """Samples or aggregates of a polynomial network, and the conditions they rest on.

    order: alpha+1; r: dimension of the neurons' span, spectral_gap: s_(r+1) / s_r of W; n_r, rank_k,
    cond_k: coefficients of f, rank and condition of the neurons' kernel; x: (k, d), weights: (k,)
    lam y, residuals: (k,), certified: (k,) bool; aggregate: (d,) for degree 1; eigenvalues (r,) and
    eigenvectors (d, r) of the moment matrix for degree 2; min_margin: on given samples.
    """

    arch: str
    input_shape: tuple[int, ...]
    order: int
    r: int
    spectral_gap: float
    outside: float
    n_r: int
    rank_k: int
    cond_k: float
    balance_gap: float
    neurons: int
    carrying: int
    dead: int
    theta_norm: float
    symmetry: str
    x: Tensor
    weights: Tensor
    residuals: Tensor
    certified: Tensor
    method: str = "none"
    residual: float | None = None
    scale: str = ""
    aggregate: Tensor | None = None
    eigenvalues: Tensor | None = None
    eigenvectors: Tensor | None = None
    min_margin: float | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The published form (``residuum identify --json``)."""
        rows = zip(self.x, self.weights, self.residuals, self.certified, strict=True)
        return {
            "arch": self.arch,
            "order": self.order,
            "r": self.r,
            "spectral_gap": self.spectral_gap,
            "N_r": self.n_r,
            "rank_K": self.rank_k,
            "cond_K": self.cond_k,
            "outside": self.outside,
            "balance_gap": self.balance_gap,
            "neurons": {"live": self.neurons, "dead": self.dead, "carrying": self.carrying},
            "theta_norm": self.theta_norm,
            "min_margin": self.min_margin,
            "normalized_margin": self.normalized_margin,
            "method": self.method,
            "residual": self.residual,
            "scale": self.scale,
            "symmetry": self.symmetry,
            "samples": [
                {
                    "x": x.tolist(),
                    "weight": float(b),
                    "residual": float(residual),
                    "certified": bool(certified),
                }
                for x, b, residual, certified in rows
            ],
            "aggregates": self._aggregates(),
            "notes": list(self.notes),
        }

    @property
    def normalized_margin(self) -> float | None:
        """min margin / ||theta||^order."""
        return None if self.min_margin is None else self.min_margin / self.theta_norm**self.order

    def _aggregates(self) -> dict[str, Any]:
        if self.aggregate is not None:
            return {"sum": self.aggregate.tolist()}
        if self.eigenvalues is not None and self.eigenvectors is not None:
            return {
                "eigenvalues": self.eigenvalues.tolist(),
                "eigenvectors": self.eigenvectors.T.tolist(),
            }
        return {}
