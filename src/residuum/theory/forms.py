"""The neurons of a polynomial network, their span, and the form f that they sample.

Symbols as in residuum.theory.polynomial: W_j, a_j, c, f(W_j) = W_j / (alpha c a_j), r, K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.errors import InputError
from residuum.networks import Polynomial, PolynomialNetwork

DEAD = 1e-6
SPECTRAL_TOLERANCE, SINGLE_TOLERANCE = 1e-8, 1e-5  # weights kept in float64, or in less
KERNEL_TOLERANCE = 1e-12
CARRIED = 0.999


@dataclass(frozen=True)
class Neurons:
    """Live neurons in float64. weight W: (m, d); coefficient a: (m,); leading: c; dead: left out.

    balance_gap: max_j | |W_j|^2 - alpha a_j^2 | / max_j |W_j|^2, zero at a KKT point; carrying: the
    fewest neurons that hold CARRIED of |theta|^2.
    """

    weight: Tensor
    coefficient: Tensor
    degree: int
    leading: float
    homogeneous: bool
    tolerance: float
    dead: int
    balance_gap: float
    carrying: int
    theta_norm: float


@dataclass(frozen=True)
class SignalSubspace:
    """Span of the neurons. basis: (d, r); spectrum: singular values of W; gap: s_(r+1) / s_r.

    outside: share of the norm of W that the subspace leaves out.
    """

    basis: Tensor
    spectrum: Tensor
    gap: float
    outside: float
    given: bool

    @property
    def rank(self) -> int:
        """The dimension r."""
        return self.basis.shape[1]


@dataclass(frozen=True)
class Interpolant:
    """f in the signal subspace, from its values at unit neurons.

    directions Z: (m, r) unit rows; values F: (m, r) = f(Z); coefficients: (m, r) = K^+ F;
    rank: of K; condition: ratio of its extreme nonzero eigenvalues; sizes: (m,) of the stationarity
    equations, alpha |c a_j| |W_j|^(alpha-1), so that sizes f(Z) = +-W_j.
    """

    directions: Tensor
    values: Tensor
    coefficients: Tensor
    sizes: Tensor
    degree: int
    rank: int
    condition: float

    def __call__(self, w: Tensor) -> Tensor:
        """(k, r) -> f(w): (k, r)."""
        return (w @ self.directions.T) ** (self.degree - 1) @ self.coefficients

    def slice(self, v: Tensor) -> Tensor:
        """M(v) = Df(v) / (alpha-1) = sum_i b_i (x_i.v)^(alpha-2) x_i x_i^T, symmetrised: (r, r)."""
        weights = (self.directions @ v) ** (self.degree - 2)
        matrix = self.coefficients.T @ (weights[:, None] * self.directions)
        return (matrix + matrix.T) / 2


def live_neurons(model: nn.Module) -> Neurons:
    """Neurons of a polynomial network; a_j = 0 forces W_j = 0, so such neurons carry nothing."""
    if not isinstance(model, PolynomialNetwork) or not isinstance(model.activation, Polynomial):
        raise InputError(
            "Identifiability is stated for sum_j a_j sigma(W_j.x) with a polynomial sigma; this "
            f"network is a {_describe(model)}.",
            "Use `PolynomialNetwork(inputs, width, Polynomial((0, 0, 0, 1)))`.",
        )
    raw, activation = model.weight.detach().cpu(), model.activation
    w, a = raw.double(), model.coefficient.detach().cpu().double()
    if len(a) == 0:
        raise InputError("The network has no neurons.", "Give one of width at least 1.")
    if not (w.isfinite().all() and a.isfinite().all()):
        raise InputError("The weights are not all finite.", "Check the checkpoint.")
    size = w.norm(dim=1)
    live = (a.abs() > DEAD * a.abs().max()) & (size > DEAD * size.max())
    if not live.any():
        raise InputError(
            "Every neuron has a zero output or a zero weight: the network says nothing of its data.",
            "Check the checkpoint.",
        )
    alpha = activation.degree
    gap = (size**2 - alpha * a**2).abs().max() / (size**2).max()
    return Neurons(
        w[live],
        a[live],
        alpha,
        activation.coefficients[-1],
        not any(activation.coefficients[:-1]),
        SPECTRAL_TOLERANCE if raw.dtype == torch.float64 else SINGLE_TOLERANCE,
        int((~live).sum()),
        float(gap),
        _carrying(size**2 + a**2),
        float((size**2 + a**2).sum().sqrt()),
    )


def signal_subspace(neurons: Neurons, rank: int | None = None) -> SignalSubspace:
    """Leading right singular vectors of W: those above rounding, or ``rank`` of them."""
    _, spectrum, rows = torch.linalg.svd(neurons.weight, full_matrices=False)
    most = len(spectrum)
    r = int((spectrum > neurons.tolerance * spectrum[0]).sum()) if rank is None else rank
    if not 1 <= r <= most:
        raise InputError(
            f"The rank must lie between 1 and {most}, the smaller of {len(neurons.weight)} live "
            f"neurons and {neurons.weight.shape[1]} inputs; got {r}.",
            "Leave it out to have it read off the spectrum.",
        )
    if spectrum[r - 1] <= 1e-14 * spectrum[0]:
        raise InputError(
            f"The neurons span fewer than {r} dimensions.",
            "Leave the rank out to have it read off the spectrum.",
        )
    gap = float(spectrum[r] / spectrum[r - 1]) if r < most else 0.0
    outside = float(spectrum[r:].norm() / spectrum.norm())
    return SignalSubspace(rows[:r].T.contiguous(), spectrum, gap, outside, rank is not None)


def interpolate(neurons: Neurons, signal: SignalSubspace) -> Interpolant:
    """f from f(W_j) = W_j / (alpha c a_j); being homogeneous, it is taken at unit neurons."""
    alpha = neurons.degree
    z = neurons.weight @ signal.basis
    size = z.norm(dim=1)
    keep = size > DEAD * size.max()
    z, size, a = z[keep], size[keep, None], neurons.coefficient[keep, None]
    directions = z / size
    sizes = alpha * neurons.leading * a * size ** (alpha - 1)
    values = z / sizes
    eigenvalues, vectors = torch.linalg.eigh((directions @ directions.T) ** (alpha - 1))
    # Odd powers leave K positive semidefinite too: it is a Gram matrix of monomials.
    kept = eigenvalues > KERNEL_TOLERANCE * eigenvalues[-1]
    eigenvalues, vectors = eigenvalues[kept], vectors[:, kept]
    coefficients = vectors @ ((vectors.T @ values) / eigenvalues[:, None])
    condition = float(eigenvalues[-1] / eigenvalues[0])
    return Interpolant(
        directions, values, coefficients, sizes[:, 0].abs(), alpha, len(eigenvalues), condition
    )


def _carrying(energy: Tensor) -> int:
    """The fewest entries that sum to CARRIED of the whole."""
    shares = energy.sort(descending=True).values.cumsum(0) / energy.sum()
    return int((shares < CARRIED).sum()) + 1


def _describe(model: nn.Module) -> str:
    if isinstance(model, PolynomialNetwork):
        return f"PolynomialNetwork with {type(model.activation).__name__}"
    return type(model).__name__
