"""What the weights of a polynomial network determine about its samples (Shen et al. 2026, section 4).

    Phi(x) = sum_j a_j sigma(W_j.x),  sigma(t) = c t^alpha + lower powers,  b_i = lam_i y_i
    f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i
    KKT of the top degree:  W_j = alpha c a_j f(W_j),  a_j = c sum_i b_i (W_j.x_i)^alpha
    hence |W_j|^2 = alpha a_j^2, and the weights give the value of f at every W_j

Here x_i are the samples with labels y_i and multipliers lam_i. W_j has the input weights of neuron j, and a_j
is its output weight. All W_j lie in the span of the samples. So all computations use the span of the W_j, of
dimension r, instead of the input space. The function f consists of homogeneous polynomials (forms) of degree
alpha-1 in r variables, which have N_r = C(r+alpha-2, alpha-1) coefficients each. The weights determine f if
the kernel matrix K_pq = (W_p.W_q)^(alpha-1) of the neurons has rank N_r. K is the Gram matrix of the
monomials of degree alpha-1 at the W_j, weighted by the roots of their multinomial coefficients. With the
matrix F of the known values of f, the interpolant is f(w) = F^T K^+ k(w).

Samples may have components outside the span of the W_j, but f only determines the projections of the samples
onto this span. Samples with collinear projections count as one sample, because one sample can replace them
without a change of f.

    alpha = 1:  f is the constant sum_i b_i x_i;  alpha = 2:  f(w) = (sum_i b_i x_i x_i^T) w

Different samples can have equal sums of this form, so samples are not identifiable if alpha is 1 or 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.errors import InputError
from residuum.networks import Polynomial, PolynomialNetwork
from residuum.records.identification import Identification

# At a KKT point (a solution of margin maximization), |W_j|^2 = alpha a_j^2 for the input weights W_j and
# the output weight a_j of each neuron. If the relative difference exceeds this limit, a note says so.
BALANCE_TOLERANCE = 1e-6
# A neuron is ignored if its weights are smaller than this share of the largest neuron's weights, because they
# are then rounding errors.
DEAD_TOLERANCE = 1e-6
# Singular values below this share of the largest are rounding errors, if the weights are stored as float64.
SPECTRAL_TOLERANCE = 1e-8
# Singular values below this share of the largest are rounding errors, if the weights are less precise.
SINGLE_TOLERANCE = 1e-5
# The kernel matrix of the neurons has the entries (W_p.W_q)^(alpha-1), with the neurons' input weights W_p.
# Its eigenvalues below this share of the largest eigenvalue count as zero.
KERNEL_TOLERANCE = 1e-12
# The property ``Neurons.carrying`` counts the largest neurons that together have this share of the squared
# norm of all weights.
CARRIED_SHARE = 0.999


@dataclass(frozen=True)
class Neurons:
    """The neurons of a polynomial network that depend on the data, in float64.

    The network is sum_j a_j sigma(W_j.x) with sigma(t) = c t^alpha + lower powers.

    Attributes:
        weight: W (m, d), the input weights of m neurons.
        coefficient: a (m,), the output weights of the neurons.
        degree: alpha, the highest power of the activation.
        leading: c, the coefficient of the highest power.
        homogeneous: Whether the activation has no lower powers.
        tolerance: Relative size below which a singular value is a rounding error of the stored numbers.
        dead: Number of neurons that were ignored because their weights are zero.
        balance_gap: Largest difference between |W_j|^2 and alpha a_j^2 (equal at a KKT point), relative to
            the largest |W_j|^2.
        carrying: Smallest number of neurons that together have nearly all of the squared norm of the weights.
            After training one or two neurons suffice, while exact recovery of the samples needs many more.
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
    """The signal subspace of a network: the span of the input weights of all neurons.

    The weights only depend on the projections of the samples onto this span.

    Attributes:
        basis: (d, r) orthonormal basis of the span.
        gap: Ratio of two successive singular values of the weight matrix, number r + 1 divided by number r.
        outside: Share of the norm of the weight matrix outside the span.
    """

    basis: Tensor
    gap: float
    outside: float

    @property
    def rank(self) -> int:
        """The dimension r of the span of the neurons' input weights."""
        return self.basis.shape[1]


@dataclass(frozen=True)
class Interpolant:
    """An interpolant of the function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i of the samples.

    The values of f are known at the input weights of m neurons, scaled to length 1. In between, f is
    interpolated with the kernel (w.v)^(alpha-1). All vectors have r coordinates in the span of these weights.

    Attributes:
        directions: (m, r) neurons, scaled to length 1.
        values: (m, r) values of f at these neurons.
        coefficients: (m, r) coefficients of the interpolant, K^+ times the values, with the kernel matrix K.
        sizes: (m,) factors alpha |c a_j| |W_j|^(alpha-1) by which f at neuron j must be multiplied to give
            its weights up to sign.
        degree: alpha, the highest power of the activation.
        rank: Rank of the kernel matrix K of the neurons.
        condition: Largest eigenvalue of K over its smallest nonzero eigenvalue.
    """

    directions: Tensor
    values: Tensor
    coefficients: Tensor
    sizes: Tensor
    degree: int
    rank: int
    condition: float

    def __call__(self, w: Tensor) -> Tensor:
        """Evaluate the interpolated function f at k points ``w`` (k, r). Return its values (k, r)."""
        return (w @ self.directions.T) ** (self.degree - 1) @ self.coefficients

    def slice(self, v: Tensor) -> Tensor:
        """Return the symmetrized derivative (r, r) of the interpolated function f at ``v``, over alpha - 1.

        f is the interpolated function. For samples x_i with signed multipliers b_i, the result is sum_i b_i
        (x_i.v)^(alpha-2) x_i x_i^T.
        """
        kernel_values = (self.directions @ v) ** (self.degree - 2)
        derivative = self.coefficients.T @ (kernel_values[:, None] * self.directions)
        return (derivative + derivative.T) / 2


def find_live_neurons(model: nn.Module) -> Neurons:
    """Find the neurons of a polynomial network whose weights are not zero.

    Neurons with zero weights contain nothing about the data. At a KKT point, a neuron with a zero output
    weight has zero input weights, so it is ignored too.

    Args:
        model: A polynomial network.

    Returns:
        The neurons with nonzero weights.

    Raises:
        InputError: If the model is no polynomial network, or if no neuron depends on the data.
    """
    if not isinstance(model, PolynomialNetwork) or not isinstance(model.activation, Polynomial):
        raise InputError(
            "The network must have one hidden layer, the form sum_j a_j sigma(W_j.x), and a polynomial "
            "sigma; got a "
            f"{_describe(model)}.",
            "Use `PolynomialNetwork(inputs, width, Polynomial((0, 0, 0, 1)))`.",
        )
    raw, activation = model.weight.detach().cpu(), model.activation
    w, a = raw.double(), model.coefficient.detach().cpu().double()
    if len(a) == 0:
        raise InputError(
            "The network must have at least one neuron; got a network of width 0.",
            "Pass a network of width 1 or more.",
        )
    if not (w.isfinite().all() and a.isfinite().all()):
        raise InputError(
            "The weights of the network must be finite; got infinite or NaN weights.",
            "Check the file that contains the weights.",
        )
    norms = w.norm(dim=1)
    is_live = (a.abs() > DEAD_TOLERANCE * a.abs().max()) & (norms > DEAD_TOLERANCE * norms.max())
    if not is_live.any():
        raise InputError(
            "At least one neuron must have nonzero weights; got a network in which every neuron has zero "
            "input weights or a zero output weight.",
            "Check the file that contains the weights.",
        )
    alpha = activation.degree
    balance_gap = (norms**2 - alpha * a**2).abs().max() / (norms**2).max()
    squared_norms = norms**2 + a**2
    cumulative_shares = squared_norms.sort(descending=True).values.cumsum(0) / squared_norms.sum()
    return Neurons(
        weight=w[is_live],
        coefficient=a[is_live],
        degree=alpha,
        leading=activation.coefficients[-1],
        homogeneous=not any(activation.coefficients[:-1]),
        tolerance=SPECTRAL_TOLERANCE if raw.dtype == torch.float64 else SINGLE_TOLERANCE,
        dead=int((~is_live).sum()),
        balance_gap=float(balance_gap),
        carrying=int((cumulative_shares < CARRIED_SHARE).sum()) + 1,
        theta_norm=float(squared_norms.sum().sqrt()),
    )


def estimate_signal_subspace(neurons: Neurons, rank: int | None = None) -> SignalSubspace:
    """Estimate the span of the training samples from the singular vectors of the weight matrix.

    At a KKT point the input weights of every neuron are a combination of samples. So the weights only
    depend on the projections of the samples onto this span. A trained network is only close to a KKT point.
    Then no singular value is zero up to rounding, and you must pass the rank.

    Args:
        neurons: The neurons of the network that depend on the training data.
        rank: Dimension of the span, by default the number of singular values above rounding.

    Returns:
        The subspace.

    Raises:
        InputError: If the rank is larger than the dimension of the span.
    """
    _, singular_values, rows = torch.linalg.svd(neurons.weight, full_matrices=False)
    max_rank = len(singular_values)
    dimension = (
        int((singular_values > neurons.tolerance * singular_values[0]).sum())
        if rank is None
        else rank
    )
    if not 1 <= dimension <= max_rank:
        raise InputError(
            f"The option 'rank' (dimension of the span of the training samples) must lie between 1 and "
            f"{max_rank}, because the network has {len(neurons.weight)} neurons with nonzero weights and "
            f"{neurons.weight.shape[1]} inputs; got {dimension}.",
            "Omit 'rank' to estimate it from the singular values.",
        )
    if singular_values[dimension - 1] <= 1e-14 * singular_values[0]:
        raise InputError(
            f"The option 'rank' (dimension of the span of the training samples) must not exceed the rank "
            f"of the neurons' input weights; got {dimension}, and their rank is lower.",
            "Omit 'rank' to estimate it from the singular values.",
        )
    singular_value_ratio = (
        float(singular_values[dimension] / singular_values[dimension - 1])
        if dimension < max_rank
        else 0.0
    )
    outside_share = float(singular_values[dimension:].norm() / singular_values.norm())
    return SignalSubspace(rows[:dimension].T.contiguous(), singular_value_ratio, outside_share)


def interpolate(neurons: Neurons, signal: SignalSubspace) -> Interpolant:
    """Determine the function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i from its values at the neurons.

    At a KKT point f(W_j) = W_j / (alpha c a_j) for every neuron j. f is a vector of homogeneous polynomials
    (forms) of degree alpha - 1 in r variables, and k(w, v) = (w.v)^(alpha-1) is their reproducing kernel.
    So f(w) = sum_p k(w, W_p) coefficient_p if the monomials at the W_p span all forms. The W_p are first
    scaled to length 1, because otherwise neurons with large weights would dominate the fit.

    Args:
        neurons: The neurons of the network that depend on the training data.
        signal: The span of the neurons.

    Returns:
        The interpolant of f.
    """
    alpha = neurons.degree
    projections = neurons.weight @ signal.basis
    norms = projections.norm(dim=1)
    is_live = norms > DEAD_TOLERANCE * norms.max()
    projections, norms, output_weights = (
        projections[is_live],
        norms[is_live, None],
        neurons.coefficient[is_live, None],
    )
    directions = projections / norms
    # At a KKT point (a solution of margin maximization), the input weights of neuron j are this factor
    # times the value of f.
    weight_per_value = alpha * neurons.leading * output_weights * norms ** (alpha - 1)
    values_at_neurons = projections / weight_per_value
    eigenvalues, vectors = torch.linalg.eigh((directions @ directions.T) ** (alpha - 1))
    # The kernel matrix has inner products of monomials as entries, so it has no negative eigenvalues.
    is_nonzero = eigenvalues > KERNEL_TOLERANCE * eigenvalues[-1]
    eigenvalues, vectors = eigenvalues[is_nonzero], vectors[:, is_nonzero]
    interpolant_coefficients = vectors @ ((vectors.T @ values_at_neurons) / eigenvalues[:, None])
    condition_number = float(eigenvalues[-1] / eigenvalues[0])
    return Interpolant(
        directions,
        values_at_neurons,
        interpolant_coefficients,
        weight_per_value[:, 0].abs(),
        alpha,
        len(eigenvalues),
        condition_number,
    )


def _describe(model: nn.Module) -> str:
    if isinstance(model, PolynomialNetwork):
        return f"PolynomialNetwork with {type(model.activation).__name__}"
    return type(model).__name__


def measure_identifiability(model: nn.Module, rank: int | None = None) -> Identification:
    """Check the conditions under which the weights of a polynomial network determine its samples.

    Args:
        model: A polynomial network.
        rank: Dimension of the span of the neurons, by default estimated from the singular values.

    Returns:
        The conditions. The fields of the record for recovered samples are empty, because none are recovered.
    """
    neurons = find_live_neurons(model)
    signal_subspace = estimate_signal_subspace(neurons, rank)
    return measure_conditions(neurons, signal_subspace, interpolate(neurons, signal_subspace))


def count_form_coefficients(r: int, alpha: int) -> int:
    """Return the number of coefficients of a homogeneous polynomial of degree alpha-1 in r variables.

    Args:
        r: Number of variables.
        alpha: Degree of the polynomial plus 1.

    Returns:
        The number C(r+alpha-2, alpha-1).
    """
    return math.comb(r + alpha - 2, alpha - 1)


def measure_conditions(neurons: Neurons, signal: SignalSubspace, f: Interpolant) -> Identification:
    """Check the conditions under which the weights of a polynomial network determine its samples.

    If the activation has degree 1, the weights determine only the weighted sum of the samples. If it has
    degree 2, they determine only the weighted sum of x x^T over the samples x. The sum is then part of the
    result. If the degree is 3 or larger, the weights determine the samples if the kernel matrix of the
    neurons has full rank.

    Args:
        neurons: The neurons of the network that depend on the training data.
        signal: The span of the neurons.
        f: The interpolant from :func:`interpolate`.

    Returns:
        The conditions. The fields of the record for recovered samples are empty, because none are
        recovered.
    """
    alpha, r = neurons.degree, signal.rank
    coefficient_count = count_form_coefficients(r, alpha)
    sum_over_samples = eigenvalues = eigenvectors = None
    if alpha == 1:
        sum_over_samples = signal.basis @ f(torch.zeros(1, r, dtype=torch.float64))[0]
    if alpha == 2:
        eigenvalues, vectors = torch.linalg.eigh(f.slice(torch.ones(r, dtype=torch.float64)))
        eigenvectors = signal.basis @ vectors
    no_samples = torch.zeros(0, dtype=torch.float64)
    shared_fields = ("balance_gap", "carrying", "dead", "theta_norm")
    return Identification(
        arch="",
        input_shape=(),
        order=alpha + 1,
        r=r,
        spectral_gap=signal.gap,
        outside=signal.outside,
        n_r=coefficient_count,
        rank_k=f.rank,
        cond_k=f.condition,
        neurons=len(neurons.coefficient),
        **{name: getattr(neurons, name) for name in shared_fields},
        symmetry=_symmetry(alpha),
        x=no_samples.reshape(0, len(signal.basis)),
        weights=no_samples,
        residuals=no_samples,
        certified=no_samples.bool(),
        aggregate=sum_over_samples,
        eigenvalues=eigenvalues,
        eigenvectors=eigenvectors,
        notes=tuple(_describe_notes(neurons, f.rank, coefficient_count)),
    )


def _symmetry(alpha: int) -> str:
    if alpha < 3:
        return "samples with equal weighted sums"
    sign_symmetry = "(x, b) ~ (-x, -b)" if alpha % 2 else "x ~ -x"
    scale_symmetry = f"(x, b) ~ (t x, b / t^{alpha})"
    return f"{sign_symmetry}; {scale_symmetry}; order; samples collinear in the neurons' span count as one"


def _describe_notes(neurons: Neurons, rank: int, full: int) -> list[str]:
    """Return notes for users: whether the weights determine the samples, and how reliable the answer is."""
    notes = []
    if neurons.degree == 1:
        notes.append(
            "degree 1: the weights determine only sum_i lam_i y_i x_i and not the samples x_i"
        )
    elif neurons.degree == 2:
        notes.append(
            "degree 2: the weights determine only sum_i lam_i y_i x_i x_i^T and not the samples x_i"
        )
    elif rank < full:
        notes.append(
            f"rank deficient: the kernel matrix K of the neurons has rank {rank} of {full}, so the weights "
            "do not determine all samples"
        )
        notes.append(
            f"{neurons.carrying} of {len(neurons.coefficient) + neurons.dead} neurons hold "
            f"{CARRIED_SHARE:.1%} of the squared norm of the weights; a local minimum has at most one neuron "
            "for each sample on the margin"
        )
    if neurons.balance_gap > BALANCE_TOLERANCE:
        balance_gap_text = f"{neurons.balance_gap:.1e}"
        notes.append(
            "the weights are not a KKT point of the highest power: |W|^2 and alpha a^2 differ by "
            f"{balance_gap_text}"
        )
    if not neurons.homogeneous:
        notes.append(
            "lower powers of the activation are ignored: the result is accurate if all margins are large; "
            f"the norm |theta| of the weights is {neurons.theta_norm:.4g}, and margins need the samples"
        )
    if neurons.dead:
        notes.append(
            f"{neurons.dead} neurons with zero input weights or zero output weight were ignored"
        )
    return notes
