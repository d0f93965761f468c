"""The result of an identification: what the weights of a polynomial network determine about its samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residuum.records.base import Record, plain, table_rows

# JSON keys that differ from the names of the fields. They have the capital letters of the formulas.
RENAMED = {"n_r": "N_r", "rank_k": "rank_K", "cond_k": "cond_K"}


@dataclass(frozen=True, eq=False)
class Identification(Record):
    """What the weights of a polynomial network f(x) = sum_j a_j <W_j, x>^alpha determine about its samples.

    The weights determine either the samples or an aggregate: a weighted sum of the samples (alpha = 1) or
    their weighted moment matrix (alpha = 2).

    Attributes:
        order: Order of homogeneity, alpha + 1.
        r: Dimension r of the span of the neurons W_j.
        spectral_gap: Ratio s_(r+1) / s_r of singular values of the matrix W of all neurons.
        n_r: Number of coefficients of f as a polynomial on the span of the neurons.
        rank_k: Rank of the kernel matrix K of the neurons. Samples are determined if it equals ``n_r``.
        cond_k: Condition number of the kernel matrix K of the neurons.
        balance_gap: Relative violation of the balance |W_j|^2 = alpha a_j^2, which holds at a KKT point:
            max_j | |W_j|^2 - alpha a_j^2 | / max_j |W_j|^2.
        carrying: Smallest number of neurons that hold nearly all of the squared weight norm |theta|^2.
        x: Recovered samples, (k, d), empty before the recovery.
        weights: Products b = lam y of multiplier and label, (k,).
        residuals: Residual in the direction of the dual vector of each sample, over the neurons, (k,).
        certified: Whether each sample is certified, (k,): the rank condition holds, the neurons are
            balanced, no part of W is omitted, and the residual is small. Any other sample is heuristic.
        method: Method of the recovery, diagonalisation or growth.
        residual: Relative residual over all equations.
        aggregate: The sum over samples that the weights determine if the degree alpha is 1, (d,).
        eigenvalues: Eigenvalues of the moment matrix, which the weights determine if alpha is 2, (r,).
        eigenvectors: Eigenvectors of the moment matrix, which the weights determine if alpha is 2, (d, r).
        min_margin: Smallest margin on samples that were passed, or None without samples.
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
        """Whether the weights determine samples rather than an aggregate of samples."""
        return self.order > 3 and self.rank_k == self.n_r

    @property
    def is_checkable(self) -> bool:
        """Whether a good fit of r samples to the weights is evidence that these samples are right.

        The fit must have more equations (coefficients of f) than unknowns (r entries of each of r samples).
        Otherwise some samples fit any weights. For example, two cubes of linear forms can fit any cubic form
        in two variables, with four equations and four unknowns.
        """
        return math.comb(self.r + self.order - 2, self.order - 1) > self.r**2

    @property
    def moment(self) -> Tensor | None:
        """Moment matrix sum_i b_i x_i x_i^T on the span of the neurons, (d, d), or None unless alpha is 2."""
        if self.eigenvalues is None or self.eigenvectors is None:
            return None
        return (self.eigenvectors * self.eigenvalues) @ self.eigenvectors.T

    def to_json(self) -> dict[str, Any]:
        """Return the identification as the JSON object that ``residuum identify --json`` prints."""
        columns = {
            "x": plain(self.x),
            "weight": plain(self.weights),
            "residual": plain(self.residuals),
            "certified": plain(self.certified),
        }
        eigenvector_rows = None if self.eigenvectors is None else self.eigenvectors.T
        aggregates = {
            "sum": self.aggregate,
            "eigenvalues": self.eigenvalues,
            "eigenvectors": eigenvector_rows,
        }
        return {RENAMED.get(name, name): value for name, value in super().to_json().items()} | {
            "neurons": {"live": self.neurons, "dead": self.dead, "carrying": self.carrying},
            "samples": table_rows(columns),
            "aggregates": {k: v.tolist() for k, v in aggregates.items() if v is not None},
        }

    @property
    def normalized_margin(self) -> float | None:
        """Smallest margin divided by the weight norm to the power ``order``, None without samples."""
        return None if self.min_margin is None else self.min_margin / self.theta_norm**self.order
