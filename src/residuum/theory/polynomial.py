"""What the weights of a polynomial network determine about its samples (Shen et al. 2026, section 4).

    Phi(x) = sum_j a_j sigma(W_j.x),  sigma(t) = c t^alpha + lower powers,  b_i = lam_i y_i
    f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i
    KKT of the top degree:  W_j = alpha c a_j f(W_j),  a_j = c sum_i b_i (W_j.x_i)^alpha
    hence |W_j|^2 = alpha a_j^2, and f is known at every neuron

All W_j lie in span{x_i}. So all computations use their own span of dimension r, not the input space. A form
of degree alpha-1 in r variables has N_r = C(r+alpha-2, alpha-1) coefficients. f is determined if the kernel
K_pq = (W_p.W_q)^(alpha-1) of the neurons has this rank. K is the Gram matrix of the monomials, weighted by
the roots of their multinomial coefficients. Its interpolant is f(w) = F^T K^+ k(w).

The converse does not hold: samples may have components outside the span of the neurons. f only determines the
projections of the samples on this span. Samples with collinear projections count as one, because they can be
merged, like the samples of one activation pattern of a ReLU network.

    alpha = 1:  f is the constant sum_i b_i x_i;  alpha = 2:  f(w) = (sum_i b_i x_i x_i^T) w

Different samples can have the same aggregates, so samples are not identifiable below degree 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.errors import InputError
from residuum.networks import Polynomial, PolynomialNetwork
from residuum.records.identification import Identification

BALANCE_TOLERANCE = 1e-6  # a larger relative gap of |W_j|^2 = alpha a_j^2 gets a note
DEAD_TOLERANCE = 1e-6  # relative to the largest neuron: smaller neurons are rounding errors
# Relative size of singular values that are rounding errors, if weights are float64 or less precise.
SPECTRAL_TOLERANCE, SINGLE_TOLERANCE = 1e-8, 1e-5
KERNEL_TOLERANCE = 1e-12  # relative to the kernel's largest eigenvalue: smaller is zero
CARRIED_SHARE = 0.999  # share of |theta|^2 that the counted neurons carry


@dataclass(frozen=True)
class Neurons:
    """Live neurons in float64.

    Attributes:
        weight: W (m, d).
        coefficient: a (m,).
        degree: alpha.
        leading: c.
        homogeneous: The activation has no lower powers.
        tolerance: Relative size below which a singular value is a rounding error of the stored numbers.
        dead: Number of neurons that were ignored.
        balance_gap: Relative gap of |W_j|^2 = alpha a_j^2 over all neurons.
        carrying: Smallest number of neurons that have nearly all of the squared norm. After training these
            are one or two, while the theorem needs N_r.
        theta_norm: Norm of all weights.
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
    """Span of the neurons.

    Attributes:
        basis: (d, r) orthonormal basis.
        gap: s_(r+1) / s_r of the singular values of W.
        outside: Share of the norm of W outside the subspace.
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
    """The function f in the signal subspace, from its values at unit neurons.

    Attributes:
        directions: Z (m, r), unit rows.
        values: F = f(Z) (m, r).
        coefficients: K^+ F (m, r).
        sizes: (m,) sizes alpha |c a_j| |W_j|^(alpha-1) of the stationarity equations, so that
            sizes f(Z) = +-W_j.
        degree: alpha.
        rank: Rank of K.
        condition: Ratio of the extreme nonzero eigenvalues of K.
    """

    directions: Tensor
    values: Tensor
    coefficients: Tensor
    sizes: Tensor
    degree: int
    rank: int
    condition: float

    def __call__(self, w: Tensor) -> Tensor:
        """Return f(w) (k, r) for w (k, r)."""
        return (w @ self.directions.T) ** (self.degree - 1) @ self.coefficients

    def slice(self, v: Tensor) -> Tensor:
        """Return M(v) = Df(v) / (alpha-1) = sum_i b_i (x_i.v)^(alpha-2) x_i x_i^T, symmetrized: (r, r)."""
        weights = (self.directions @ v) ** (self.degree - 2)
        matrix = self.coefficients.T @ (weights[:, None] * self.directions)
        return (matrix + matrix.T) / 2


def find_live_neurons(model: nn.Module) -> Neurons:
    """Return the live neurons of a polynomial network. a_j = 0 implies W_j = 0, so such neurons are ignored.

    Args:
        model: A polynomial network.

    Returns:
        The neurons.

    Raises:
        InputError: If the model is no polynomial network, or if it has no live neurons.
    """
    if not isinstance(model, PolynomialNetwork) or not isinstance(model.activation, Polynomial):
        raise InputError(
            "Identifiability needs a network sum_j a_j sigma(W_j.x) with a polynomial sigma; got a "
            f"{_describe(model)}.",
            "Use `PolynomialNetwork(inputs, width, Polynomial((0, 0, 0, 1)))`.",
        )
    raw, activation = model.weight.detach().cpu(), model.activation
    w, a = raw.double(), model.coefficient.detach().cpu().double()
    if len(a) == 0:
        raise InputError("The network has no neurons.", "Pass a network of width 1 or more.")
    if not (w.isfinite().all() and a.isfinite().all()):
        raise InputError("The weights are not all finite.", "Check the checkpoint.")
    size = w.norm(dim=1)
    live = (a.abs() > DEAD_TOLERANCE * a.abs().max()) & (size > DEAD_TOLERANCE * size.max())
    if not live.any():
        raise InputError(
            "Every neuron has a zero output or a zero weight, so the network does not depend on its data.",
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
        carrying=int((shares < CARRIED_SHARE).sum()) + 1,
        theta_norm=float(energy.sum().sqrt()),
    )


def estimate_signal_subspace(neurons: Neurons, rank: int | None = None) -> SignalSubspace:
    """Return the span of the leading right singular vectors of W.

    At a KKT point every neuron is a combination of samples. So the weights only depend on the projections
    of the samples on this span. A trained network is only close to a KKT point. Then the spectrum has no
    edge, and you must pass the rank.

    Args:
        neurons: The live neurons.
        rank: Dimension of the span, by default the number of singular values above rounding.

    Returns:
        The subspace.

    Raises:
        InputError: If the neurons do not span that many dimensions.
    """
    _, spectrum, rows = torch.linalg.svd(neurons.weight, full_matrices=False)
    most = len(spectrum)
    r = int((spectrum > neurons.tolerance * spectrum[0]).sum()) if rank is None else rank
    if not 1 <= r <= most:
        raise InputError(
            f"The rank must lie between 1 and {most}, the smaller of {len(neurons.weight)} live "
            f"neurons and {neurons.weight.shape[1]} inputs; got {r}.",
            "Omit the rank to estimate it from the spectrum.",
        )
    if spectrum[r - 1] <= 1e-14 * spectrum[0]:
        raise InputError(
            f"The neurons span fewer than {r} dimensions.",
            "Omit the rank to estimate it from the spectrum.",
        )
    gap = float(spectrum[r] / spectrum[r - 1]) if r < most else 0.0
    outside = float(spectrum[r:].norm() / spectrum.norm())
    return SignalSubspace(rows[:r].T.contiguous(), gap, outside)


def interpolate(neurons: Neurons, signal: SignalSubspace) -> Interpolant:
    """Determine f from f(W_j) = W_j / (alpha c a_j). It is homogeneous, so unit neurons suffice.

    f is a vector of forms of degree alpha - 1 in r variables, and K_pq = (W_p.W_q)^(alpha-1) is their
    reproducing kernel. So f(w) = sum_p k(w, W_p) coefficient_p wherever the neurons' monomials span all
    forms, i.e. if the rank of K is N_r. Neurons are first scaled to length 1, because otherwise a power
    of their lengths would decide which of them dominate K.

    Args:
        neurons: The live neurons.
        signal: Their span.

    Returns:
        The function f.
    """
    alpha = neurons.degree
    z = neurons.weight @ signal.basis
    size = z.norm(dim=1)
    is_live = size > DEAD_TOLERANCE * size.max()
    z, size, a = z[is_live], size[is_live, None], neurons.coefficient[is_live, None]
    directions = z / size
    sizes = alpha * neurons.leading * a * size ** (alpha - 1)
    values = z / sizes
    eigenvalues, vectors = torch.linalg.eigh((directions @ directions.T) ** (alpha - 1))
    # K is positive semidefinite for odd powers too, because it is a Gram matrix of monomials.
    is_nonzero = eigenvalues > KERNEL_TOLERANCE * eigenvalues[-1]
    eigenvalues, vectors = eigenvalues[is_nonzero], vectors[:, is_nonzero]
    coefficients = vectors @ ((vectors.T @ values) / eigenvalues[:, None])
    condition = float(eigenvalues[-1] / eigenvalues[0])
    return Interpolant(
        directions, values, coefficients, sizes[:, 0].abs(), alpha, len(eigenvalues), condition
    )


def _describe(model: nn.Module) -> str:
    if isinstance(model, PolynomialNetwork):
        return f"PolynomialNetwork with {type(model.activation).__name__}"
    return type(model).__name__


def measure_identifiability(model: nn.Module, rank: int | None = None) -> Identification:
    """Measure the conditions of exact recovery.

    Args:
        model: A polynomial network.
        rank: Dimension of the signal subspace, by default estimated from the spectrum.

    Returns:
        The conditions, without samples.
    """
    neurons = find_live_neurons(model)
    signal = estimate_signal_subspace(neurons, rank)
    return measure_conditions(neurons, signal, interpolate(neurons, signal))


def count_form_coefficients(r: int, alpha: int) -> int:
    """Return N_r = C(r+alpha-2, alpha-1), the number of coefficients of a form.

    Args:
        r: Number of variables.
        alpha: Degree of the form plus 1.

    Returns:
        The number of coefficients.
    """
    return math.comb(r + alpha - 2, alpha - 1)


def measure_conditions(neurons: Neurons, signal: SignalSubspace, f: Interpolant) -> Identification:
    """Measure the conditions of exact recovery, before any sample is recovered.

    Degree 1 determines a sum, and degree 2 a moment matrix. Both are computed here, because nothing else
    can be determined. From degree 3 on, the condition is rank(K) = N_r.

    Args:
        neurons: The live neurons.
        signal: Their span.
        f: The function f.

    Returns:
        The conditions, without samples.
    """
    alpha, r = neurons.degree, signal.rank
    full = count_form_coefficients(r, alpha)
    aggregate = eigenvalues = eigenvectors = None
    if alpha == 1:
        aggregate = signal.basis @ f(torch.zeros(1, r, dtype=torch.float64))[0]
    if alpha == 2:
        eigenvalues, vectors = torch.linalg.eigh(f.slice(torch.ones(r, dtype=torch.float64)))
        eigenvectors = signal.basis @ vectors
    empty = torch.zeros(0, dtype=torch.float64)
    shared_fields = ("balance_gap", "carrying", "dead", "theta_norm")
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
        **{name: getattr(neurons, name) for name in shared_fields},
        symmetry=_symmetry(alpha),
        x=empty.reshape(0, len(signal.basis)),
        weights=empty,
        residuals=empty,
        certified=empty.bool(),
        aggregate=aggregate,
        eigenvalues=eigenvalues,
        eigenvectors=eigenvectors,
        notes=tuple(_describe_notes(neurons, f.rank, full)),
    )


def _symmetry(alpha: int) -> str:
    if alpha < 3:
        return "samples with equal aggregates"
    sign = "(x, b) ~ (-x, -b)" if alpha % 2 else "x ~ -x"
    scale = f"(x, b) ~ (t x, b / t^{alpha})"
    return f"{sign}; {scale}; order; samples collinear in the neurons' span count as one"


def _describe_notes(neurons: Neurons, rank: int, full: int) -> list[str]:
    """Return statements that a reader needs to understand the figures."""
    notes = []
    if neurons.degree == 1:
        notes.append("degree 1: only sum_i lam_i y_i x_i is determined, samples are not")
    elif neurons.degree == 2:
        notes.append("degree 2: only sum_i lam_i y_i x_i x_i^T is determined, samples are not")
    elif rank < full:
        notes.append(
            f"rank deficient: rank K is {rank} of {full}, so f is not determined everywhere"
        )
        notes.append(
            f"{neurons.carrying} of {len(neurons.coefficient) + neurons.dead} neurons hold "
            f"{CARRIED_SHARE:.1%} of |theta|^2; a local minimum has at most one per margin sample"
        )
    if neurons.balance_gap > BALANCE_TOLERANCE:
        gap = f"{neurons.balance_gap:.1e}"
        notes.append(f"not a KKT point of the top degree: |W|^2 and alpha a^2 differ by {gap}")
    if not neurons.homogeneous:
        notes.append(
            "lower powers are ignored: this is accurate if the smallest margin is large for "
            f"|theta| = {neurons.theta_norm:.4g}; margins need the samples"
        )
    if neurons.dead:
        notes.append(f"{neurons.dead} neurons with zero output or zero weight were ignored")
    return notes
