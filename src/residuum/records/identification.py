"""What the weights of a polynomial network determine of its samples, as published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residuum.records.base import Record

RENAMED = {"n_r": "N_r", "rank_k": "rank_K", "cond_k": "cond_K"}
APART = ("input_shape", "dead", "carrying", "aggregate", "eigenvalues", "eigenvectors")


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
        said = super().to_json()
        columns = [said.pop(name) for name in ("x", "weights", "residuals", "certified")]
        names = ("x", "weight", "residual", "certified")
        vectors = None if self.eigenvectors is None else self.eigenvectors.T
        known = {"sum": self.aggregate, "eigenvalues": self.eigenvalues, "eigenvectors": vectors}
        return {RENAMED.get(k, k): value for k, value in said.items() if k not in APART} | {
            "neurons": {"live": self.neurons, "dead": self.dead, "carrying": self.carrying},
            "normalized_margin": self.normalized_margin,
            "samples": [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)],
            "aggregates": {k: part.tolist() for k, part in known.items() if part is not None},
        }

    @property
    def normalized_margin(self) -> float | None:
        """min margin / ||theta||^order."""
        return None if self.min_margin is None else self.min_margin / self.theta_norm**self.order
