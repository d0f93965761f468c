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

from residuum.errors import InputError
from residuum.networks import Polynomial, PolynomialNetwork
from residuum.records.identification import Identification

BALANCED = 1e-6  # relative gap of |W_j|^2 = alpha a_j^2: above, a note says that it does not hold
DEAD = 1e-6  # of the largest neuron: a smaller one carries nothing but rounding
SPECTRAL_TOLERANCE, SINGLE_TOLERANCE = 1e-8, 1e-5  # weights kept in float64, or in less
KERNEL_TOLERANCE = 1e-12  # of the kernel's largest eigenvalue: what is smaller counts as zero
CARRIED = 0.999  # share of |theta|^2 by which neurons are counted


@dataclass(frozen=True)
class Neurons:
    """Live neurons in float64. weight W: (m, d); coefficient a: (m,); degree: alpha; leading: c.

    dead: left out.
    balance_gap, carrying, theta_norm: of all, see ``Identification``.
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
    """Span of the neurons. basis: (d, r); gap: s_(r+1) / s_r of the singular values of W.

    outside: share of the norm of W that the subspace leaves out.
    """

    basis: Tensor
    gap: float
    outside: float

    @property
    def rank(self) -> int:
        """The dimension r."""
        return self.basis.shape[1]


@dataclass(frozen=True)
class Interpolant:
    """f in the signal subspace, from its values at unit neurons.

    directions Z: (m, r) unit rows; values F: (m, r) = f(Z).
    coefficients: (m, r) = K^+ F.
    rank: of K.
    condition: ratio of its extreme nonzero eigenvalues.
    sizes: (m,) of the stationarity equations, alpha |c a_j| |W_j|^(alpha-1), so that sizes f(Z) =
        +-W_j.
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
        """M(v) = Df(v) / (alpha-1) = sum_i b_i (x_i.v)^(alpha-2) x_i x_i^T, symmetrized: (r, r)."""
        weights = (self.directions @ v) ** (self.degree - 2)
        matrix = self.coefficients.T @ (weights[:, None] * self.directions)
        return (matrix + matrix.T) / 2


def live_neurons(model: nn.Module) -> Neurons:
    """Neurons of a polynomial network; a_j = 0 forces W_j = 0, so such neurons carry nothing.

    carrying: how few neurons hold nearly all of the squared norm: after training one or two, where the
        theorem needs N_r. tolerance: below which a singular value is rounding of the file's own
        numbers.
    """
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
    energy = size**2 + a**2
    shares = energy.sort(descending=True).values.cumsum(0) / energy.sum()
    return Neurons(
        weight=w[live],
        coefficient=a[live],
        degree=alpha,
        leading=activation.coefficients[-1],
        homogeneous=not any(activation.coefficients[:-1]),
        tolerance=SPECTRAL_TOLERANCE if raw.dtype == torch.float64 else SINGLE_TOLERANCE,
        dead=int((~live).sum()),
        balance_gap=float(gap),
        carrying=int((shares < CARRIED).sum()) + 1,
        theta_norm=float(energy.sum().sqrt()),
    )


def signal_subspace(neurons: Neurons, rank: int | None = None) -> SignalSubspace:
    """Leading right singular vectors of W: those above rounding, or ``rank`` of them.

    At a KKT point every neuron is a combination of samples, so the samples' projections on this span are
    all that the weights know. A trained network is only near one: then the spectrum has no edge, and the
    rank must be said.
    """
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
    return SignalSubspace(rows[:r].T.contiguous(), gap, outside)


def interpolate(neurons: Neurons, signal: SignalSubspace) -> Interpolant:
    """f from f(W_j) = W_j / (alpha c a_j); being homogeneous, it is taken at unit neurons.

    f is a vector of forms of degree alpha - 1 in r variables, and K_pq = (W_p.W_q)^(alpha-1) their
    reproducing kernel: f(w) = sum_p k(w, W_p) coefficient_p wherever the neurons' monomials span
    all forms, i.e. where the rank of K is N_r. Neurons are brought to length 1 first, since a power of
    their lengths would otherwise decide which of them K hears.
    """
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


def _describe(model: nn.Module) -> str:
    if isinstance(model, PolynomialNetwork):
        return f"PolynomialNetwork with {type(model.activation).__name__}"
    return type(model).__name__


def identifiability(model: nn.Module, rank: int | None = None) -> Identification:
    """The conditions of exact recovery from ``model``; ``rank`` overrides the subspace dimension."""
    neurons = live_neurons(model)
    signal = signal_subspace(neurons, rank)
    return conditions(neurons, signal, interpolate(neurons, signal))


def form_coefficients(r: int, alpha: int) -> int:
    """N_r = C(r+alpha-2, alpha-1): coefficients of a form of degree alpha-1 in r variables."""
    return math.comb(r + alpha - 2, alpha - 1)


def conditions(neurons: Neurons, signal: SignalSubspace, f: Interpolant) -> Identification:
    """The figures on which a statement rests, and what they mean, before any sample is recovered.

    Degree 1 determines a sum, degree 2 a moment matrix; both are computed here, since there is no more
    to find. From degree 3 on rank(K) = N_r decides.
    """
    alpha, r = neurons.degree, signal.rank
    full = form_coefficients(r, alpha)
    aggregate = eigenvalues = eigenvectors = None
    if alpha == 1:
        aggregate = signal.basis @ f(torch.zeros(1, r, dtype=torch.float64))[0]
    if alpha == 2:
        eigenvalues, vectors = torch.linalg.eigh(f.slice(torch.ones(r, dtype=torch.float64)))
        eigenvectors = signal.basis @ vectors
    none = torch.zeros(0, dtype=torch.float64)
    kept = ("balance_gap", "carrying", "dead", "theta_norm")
    return Identification(
        arch="",
        input_shape=(),
        order=alpha + 1,
        r=r,
        spectral_gap=signal.gap,
        outside=signal.outside,
        n_r=full,
        rank_k=f.rank,
        cond_k=f.condition,
        neurons=len(neurons.coefficient),
        **{name: getattr(neurons, name) for name in kept},
        symmetry=_symmetry(alpha),
        x=none.reshape(0, len(signal.basis)),
        weights=none,
        residuals=none,
        certified=none.bool(),
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
