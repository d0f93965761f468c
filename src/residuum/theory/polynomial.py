"""What a polynomial network's weights determine of its samples (Shen et al. 2026, section 4).

    Phi(x) = sum_j a_j sigma(W_j.x),  sigma(t) = c t^alpha + lower powers,  b_i = lam_i y_i
    f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i
    KKT of the top degree:  W_j = alpha c a_j f(W_j),  a_j = c sum_i b_i (W_j.x_i)^alpha
    hence |W_j|^2 = alpha a_j^2, and f is known at every neuron

All W_j lie in span{x_i}, so everything happens in their own span of dimension r, not in the input
space: a degree alpha-1 form in r variables has N_r = C(r+alpha-2, alpha-1) coefficients, and f is
determined when the neurons' kernel K_pq = (W_p.W_q)^(alpha-1) has that rank. K is the Gram matrix of
the monomials weighted by the roots of their multinomials; its interpolant is f(w) = F^T K^+ k(w).

The converse does not hold: samples may leave the neurons' span. What f determines are the samples'
projections on it, and samples whose projections are collinear count as one: they can be merged, as
the samples of one activation pattern of a ReLU network can.

    alpha = 1:  f is the constant sum_i b_i x_i;  alpha = 2:  f(w) = (sum_i b_i x_i x_i^T) w

Different samples share these aggregates: below degree 3 samples are not identifiable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.theory.forms import (
    CARRIED,
    Interpolant,
    Neurons,
    SignalSubspace,
    interpolate,
    live_neurons,
    signal_subspace,
)

BALANCED = 1e-6


@dataclass(frozen=True)
class Identifiability:
    """What can be recovered, and the figures it rests on.

    aggregate: (d,) for alpha=1; eigenvalues (r,), eigenvectors (d, r) of the moment matrix for
    alpha=2; samples: whether samples (rather than an aggregate) are determined.
    """

    degree: int
    leading: float
    r: int
    spectral_gap: float
    outside: float
    coefficients: int
    rank: int
    condition: float
    balance_gap: float
    neurons: int
    carrying: int
    dead: int
    theta_norm: float
    homogeneous: bool
    samples: bool
    symmetry: str
    aggregate: Tensor | None
    eigenvalues: Tensor | None
    eigenvectors: Tensor | None
    notes: tuple[str, ...]

    @property
    def order(self) -> int:
        """Order of homogeneity alpha+1 of the top-degree part in all parameters."""
        return self.degree + 1

    @property
    def checkable(self) -> bool:
        """Whether r samples leave equations over: most forms are then no sum of r powers.

        Two cubes fit any cubic form in two variables, one power any form in one.
        """
        return math.comb(self.r + self.degree - 1, self.degree) > self.r**2

    @property
    def moment(self) -> Tensor | None:
        """sum_i b_i x_i x_i^T on the signal subspace: (d, d), for alpha=2."""
        if self.eigenvalues is None or self.eigenvectors is None:
            return None
        return (self.eigenvectors * self.eigenvalues) @ self.eigenvectors.T


def identifiability(model: nn.Module, rank: int | None = None) -> Identifiability:
    """The conditions of exact recovery from ``model``; ``rank`` overrides the subspace dimension."""
    neurons = live_neurons(model)
    signal = signal_subspace(neurons, rank)
    return conditions(neurons, signal, interpolate(neurons, signal))


def form_coefficients(r: int, alpha: int) -> int:
    """N_r = C(r+alpha-2, alpha-1): coefficients of a form of degree alpha-1 in r variables."""
    return math.comb(r + alpha - 2, alpha - 1)


def conditions(neurons: Neurons, signal: SignalSubspace, f: Interpolant) -> Identifiability:
    """Collect the figures and say what they mean."""
    alpha, r = neurons.degree, signal.rank
    full = form_coefficients(r, alpha)
    aggregate = eigenvalues = eigenvectors = None
    if alpha == 1:
        aggregate = signal.basis @ f(torch.zeros(1, r, dtype=torch.float64))[0]
    if alpha == 2:
        eigenvalues, vectors = torch.linalg.eigh(f.slice(torch.ones(r, dtype=torch.float64)))
        eigenvectors = signal.basis @ vectors
    return Identifiability(
        degree=alpha,
        leading=neurons.leading,
        r=r,
        spectral_gap=signal.gap,
        outside=signal.outside,
        coefficients=full,
        rank=f.rank,
        condition=f.condition,
        balance_gap=neurons.balance_gap,
        neurons=len(neurons.coefficient),
        carrying=neurons.carrying,
        dead=neurons.dead,
        theta_norm=neurons.theta_norm,
        homogeneous=neurons.homogeneous,
        samples=alpha >= 3 and f.rank == full,
        symmetry=_symmetry(alpha),
        aggregate=aggregate,
        eigenvalues=eigenvalues,
        eigenvectors=eigenvectors,
        notes=tuple(_notes(neurons, f.rank, full)),
    )


def _symmetry(alpha: int) -> str:
    if alpha < 3:
        return "samples with equal aggregates"
    sign = "(x, b) ~ (-x, -b)" if alpha % 2 else "x ~ -x"
    scale = f"(x, b) ~ (t x, b / t^{alpha})"
    return f"{sign}; {scale}; order; samples collinear in the neurons' span count as one"


def _notes(neurons: Neurons, rank: int, full: int) -> list[str]:
    """Statements a reader needs beside the figures."""
    notes = []
    if neurons.degree == 1:
        notes.append("degree 1: only sum_i lam_i y_i x_i is determined, samples are not")
    elif neurons.degree == 2:
        notes.append("degree 2: only sum_i lam_i y_i x_i x_i^T is determined, samples are not")
    elif rank < full:
        notes.append(f"rank deficient: rank K is {rank} of {full}, f is not determined everywhere")
        notes.append(
            f"{neurons.carrying} of {len(neurons.coefficient) + neurons.dead} neurons hold "
            f"{CARRIED:.1%} of |theta|^2; a local minimum has at most one per margin sample"
        )
    if neurons.balance_gap > BALANCED:
        gap = f"{neurons.balance_gap:.1e}"
        notes.append(f"not a KKT point of the top degree: |W|^2 and alpha a^2 differ by {gap}")
    if not neurons.homogeneous:
        notes.append(
            "lower powers are left out: this holds where min margin is large for "
            f"|theta| = {neurons.theta_norm:.4g}; margins need the samples"
        )
    if neurons.dead:
        notes.append(f"{neurons.dead} neurons with no output or no weight were left out")
    return notes
