"""Identification: what the weights of a polynomial network determine about its samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residuum.records.base import Record, plain, table_rows

RENAMED = {"n_r": "N_r", "rank_k": "rank_K", "cond_k": "cond_K"}  # symbols of the theory


@dataclass(frozen=True, eq=False)
class Identification(Record):
    """Samples or aggregates of a polynomial network, and the conditions for them.

    Attributes:
        order: alpha + 1.
        r: Dimension of the span of the neurons.
        spectral_gap: s_(r+1) / s_r of W.
        n_r: Number of coefficients of f.
        rank_k: Rank of the kernel of the neurons.
        cond_k: Condition number of the kernel of the neurons.
        balance_gap: max_j | |W_j|^2 - alpha a_j^2 | / max_j |W_j|^2.
        carrying: The smallest number of neurons that hold nearly all of |theta|^2.
        x: Samples (k, d), empty before they are recovered.
        weights: b = lam y, (k,).
        residuals: Residual in the direction of the dual vector of each sample, over the neurons, (k,).
        certified: True for a sample if the rank condition holds, |W|^2 = alpha a^2, no part of W is left out
            and the residual is small, (k,). Any other sample is heuristic.
        method: diagonalisation or growth.
        residual: Relative residual over all equations.
        aggregate: The aggregate for degree 1, (d,).
        eigenvalues: Eigenvalues of the moment matrix for degree 2, (r,).
        eigenvectors: Eigenvectors of the moment matrix for degree 2, (d, r).
        min_margin: Smallest margin on given samples.
    """

    unpublished = (
        *("input_shape", "dead", "carrying", "aggregate", "eigenvalues", "eigenvectors"),
        *("x", "weights", "residuals", "certified"),
    )

    derived = ("normalized_margin",)

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

    @property
    def samples(self) -> bool:
        """Whether samples (rather than an aggregate) are determined."""
        return self.order > 3 and self.rank_k == self.n_r

    @property
    def is_checkable(self) -> bool:
        """Whether there are more equations than r samples have unknowns."""
        # Otherwise a fit proves nothing: two cubes fit any cubic form in two variables, and a single power
        # fits any form in one variable.
        return math.comb(self.r + self.order - 2, self.order - 1) > self.r**2

    @property
    def moment(self) -> Tensor | None:
        """The moment matrix sum_i b_i x_i x_i^T on the signal subspace, (d, d), for degree 2."""
        if self.eigenvalues is None or self.eigenvectors is None:
            return None
        return (self.eigenvectors * self.eigenvalues) @ self.eigenvectors.T

    def to_json(self) -> dict[str, Any]:
        """Return the published form (``residuum identify --json``)."""
        columns = {
            "x": plain(self.x),
            "weight": plain(self.weights),
            "residual": plain(self.residuals),
            "certified": plain(self.certified),
        }
        vectors = None if self.eigenvectors is None else self.eigenvectors.T
        aggregates = {
            "sum": self.aggregate,
            "eigenvalues": self.eigenvalues,
            "eigenvectors": vectors,
        }
        return {RENAMED.get(name, name): value for name, value in super().to_json().items()} | {
            "neurons": {"live": self.neurons, "dead": self.dead, "carrying": self.carrying},
            "samples": table_rows(columns),
            "aggregates": {k: v.tolist() for k, v in aggregates.items() if v is not None},
        }

    @property
    def normalized_margin(self) -> float | None:
        """The smallest margin over ||theta||^order."""
        return None if self.min_margin is None else self.min_margin / self.theta_norm**self.order
