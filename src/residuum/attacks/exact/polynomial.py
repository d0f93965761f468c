"""Exact recovery of the samples of a polynomial network of degree >= 3 (Shen et al. 2026, Thm 4.1).

A sample x_i has the weight b_i, the product of its label and its multiplier. The weights of the network
determine the function f(w) = sum_i b_i (x_i.w)^(alpha-1) x_i, where alpha is the degree of the network. The
weight vectors of the neurons span r dimensions. In this span, the matrices M(v) of two random directions v
give the samples:

    M(v) = sum_i b_i (x_i.v)^(alpha-2) x_i x_i^T
    M(v1)^-1 M(v2) = V Lam V^-1                              eigendecomposition
    rows of V^-1                                             samples x_i up to scale
    b_k = <z_k, f(z_k)>,  z_k.x_i = [i = k]                  weights from dual vectors z_k

The paper prints b_k = <x_k, f(x_k)>, which holds only for orthonormal samples. The method needs r independent
samples and distinct ratios of the x_i.v. The method tries several pairs (v1, v2) and uses the pair with the
widest eigenvalue gap. Levenberg-Marquardt steps on the stationarity equations of all neurons follow. If there
are too few neurons to determine f, or if this method fails, residuum.attacks.exact.power searches for the
samples instead.

A checkpoint must contain a network sum_j a_j sigma(W_j.x). The network can be a polynomial network. If the
activation is known, the checkpoint can also contain two tensors W (m, d) and a (m,), or a two-layer network
d-m-1. A first-layer bias counts as a coordinate of the samples that is constantly 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from residuum.attacks.base import OneShotAttack
from residuum.attacks.exact.power import (
    BUDGET,
    GrownFit,
    estimate_refinement_cost,
    grow,
    levenberg_marquardt,
)
from residuum.attacks.random_streams import stream
from residuum.errors import InputError
from residuum.networks import Architecture, Polynomial, PolynomialNetwork
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Reconstruction
from residuum.records.identification import Identification
from residuum.surfaces.surface import Surface
from residuum.theory.polynomial import (
    Interpolant,
    estimate_signal_subspace,
    find_live_neurons,
    interpolate,
    measure_conditions,
    measure_identifiability,
)

# Number of random pairs of matrices that the attack tries to diagonalize.
# The attack uses the pair whose eigenvalues are farthest from each other.
PAIRS = 10
STEPS = 10  # number of Levenberg-Marquardt steps that refine the samples
# A sample is certified (proved to be a training sample) only if the relative residual of its stationarity
# equations is at most this value.
CERTIFIED_RESIDUAL = 1e-3
# If a network of degree alpha is a KKT point (a solution of margin maximization), |W_j|^2 = alpha a_j^2 for
# the input weights W_j and the output weight a_j of each neuron. This is the largest accepted relative
# error.
BALANCE_LIMIT = 1e-2
MIN_EIGENGAP = 1e-10  # minimum relative difference of two eigenvalues that count as distinct
# Names and exponents k of the activations t^k.
POWERS = {"linear": 1, "quadratic": 2, "cubic": 3, "quartic": 4, "quintic": 5}


def recover(
    model: nn.Module,
    *,
    rank: int | None = None,
    norm: float | None = None,
    augmented: bool = False,
    pairs: int = PAIRS,
    steps: int = STEPS,
    seed: int = 0,
) -> Identification:
    """Recover the training samples of a polynomial network, and the weight of each sample.

    The samples lie in the signal subspace, the span of the first-layer weights without small singular
    directions. There is one sample for each dimension of this subspace. If neither ``norm`` nor ``augmented``
    is set, the scale of the samples is not known, and the samples are returned as unit vectors.

    Args:
        model: A polynomial network of degree 3 or more.
        rank: Dimension of the span of the samples (signal subspace). By default, the dimension is estimated
            from the first-layer weights W.
        norm: Common norm of all samples, if this norm is known.
        augmented: Whether the last coordinate of the samples is the constant 1. This coordinate fixes the
            scale and the sign of each sample.
        pairs: Number of random pairs of matrices that are tried for the diagonalization.
        steps: Number of Levenberg-Marquardt steps.
        seed: Seed of the random directions.

    Returns:
        The samples, and the conditions under which the samples are the training samples.
    """
    neurons = find_live_neurons(model)
    _check_arguments(neurons.degree, pairs, norm, augmented)
    signal_subspace = estimate_signal_subspace(neurons, rank)
    interpolant = interpolate(neurons, signal_subspace)
    conditions = measure_conditions(neurons, signal_subspace, interpolant)
    generator = stream("polynomial", seed)
    diagonalized_fit = (
        diagonalize(interpolant, pairs, steps, generator) if conditions.samples else None
    )
    sample_fit, grown_fit = diagonalized_fit, None
    if sample_fit is None or not sample_fit.is_verified:
        grown_fit = grow(interpolant, signal_subspace.rank, generator)
        if sample_fit is None or grown_fit.misfit < sample_fit.residual:
            residuals = compute_stationarity_residuals(interpolant, grown_fit.x, grown_fit.b)
            sample_fit = SampleFit(grown_fit.x, grown_fit.b, *residuals)
    is_trusted = (
        sample_fit is diagonalized_fit
        and sample_fit.is_verified
        and _looks_like_kkt_point(conditions)
    )
    x, b, scale_note = fix_scale(
        sample_fit.x @ signal_subspace.basis.T, sample_fit.b, interpolant.degree, norm, augmented
    )
    return conditions.replace(
        x=x,
        weights=b,
        residuals=sample_fit.residuals,
        certified=(sample_fit.residuals <= CERTIFIED_RESIDUAL) & is_trusted,
        method="diagonalisation" if sample_fit is diagonalized_fit else "growth",
        residual=sample_fit.residual,
        scale=scale_note,
        notes=(*conditions.notes, *_notes(conditions, diagonalized_fit, sample_fit, grown_fit)),
    )


@dataclass(frozen=True)
class SampleFit:
    """Samples that explain the weights of a network: they solve its stationarity equations, at least roughly.

    Attributes:
        x: (k, r) samples, as coordinates in the r-dimensional span of the neurons.
        b: (k,) weight of each sample.
        residuals: (k,) relative residual of the stationarity equations of each sample.
        residual: Relative residual of all stationarity equations.
        eigengap: Smallest relative gap of two eigenvalues in the diagonalization. Without a diagonalization,
            the gap is 0.
        is_real: Whether all eigenvalues in the diagonalization are real.
    """

    x: Tensor
    b: Tensor
    residuals: Tensor
    residual: float
    eigengap: float = 0.0
    is_real: bool = False

    @property
    def is_verified(self) -> bool:
        """Whether the recovery is verified: real, distinct eigenvalues, and samples that fit the weights."""
        is_distinct = self.is_real and self.eigengap > MIN_EIGENGAP
        return is_distinct and bool((self.residuals <= CERTIFIED_RESIDUAL).all())


def diagonalize(f: Interpolant, pairs: int, steps: int, generator: torch.Generator) -> SampleFit:
    """Recover training samples by Theorem 4.1 of Shen et al. 2026 (a diagonalization), and refine them.

    The theorem diagonalizes the matrix M(v1)^-1 M(v2) for two random directions v1 and v2. Here M(v) is
    the symmetric matrix sum_i b_i (x_i.v)^(alpha-2) x_i x_i^T. The function uses the pair (v1, v2) with the
    widest eigenvalue gap. The gap is the smallest distance of two eigenvalues divided by the largest absolute
    eigenvalue. The weight of sample k is <z_k, f(z_k)>, where z_k is orthogonal to all other samples and
    z_k.x_k = 1.

    Args:
        f: The function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i, interpolated from the neurons.
        pairs: Number of random pairs (v1, v2) of directions.
        steps: Number of Levenberg-Marquardt steps.
        generator: Random number generator.

    Returns:
        The samples and weights.
    """
    dimension = f.directions.shape[1]
    best_decomposition: tuple[tuple[bool, float], Tensor] | None = None
    for _ in range(pairs):
        v1, v2 = torch.randn(2, dimension, generator=generator, dtype=torch.float64)
        values, vectors = torch.linalg.eig(torch.linalg.pinv(f.slice(v1)) @ f.slice(v2))
        largest_eigenvalue = float(values.abs().max())
        distance = (values[:, None] - values[None]).abs() + torch.eye(
            dimension
        ) * 2 * largest_eigenvalue
        relative_eigengap = (
            float(distance.min()) / largest_eigenvalue if largest_eigenvalue else 0.0
        )
        score = (bool((values.imag == 0).all()), relative_eigengap)
        if best_decomposition is None or score > best_decomposition[0]:
            best_decomposition = score, vectors
    assert best_decomposition is not None
    (is_real, relative_eigengap), vectors = best_decomposition
    scaled_samples = torch.linalg.pinv(vectors).real
    unit_samples = scaled_samples / scaled_samples.norm(dim=1, keepdim=True)
    dual_vectors = torch.linalg.pinv(unit_samples).T
    unit_samples, b = refine(f, unit_samples, (dual_vectors * f(dual_vectors)).sum(1), steps)
    return SampleFit(
        unit_samples,
        b,
        *compute_stationarity_residuals(f, unit_samples, b),
        relative_eigengap,
        is_real,
    )


def _looks_like_kkt_point(report: Identification) -> bool:
    """Return True if the weights look like a solution of margin maximization (a KKT point).

    The exact recovery of samples needs such weights.
    """
    is_balanced = report.balance_gap <= BALANCE_LIMIT
    return is_balanced and report.outside <= CERTIFIED_RESIDUAL and report.is_checkable


def refine(f: Interpolant, x: Tensor, b: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Refine recovered samples by Levenberg-Marquardt steps on the equations that training solved.

    Args:
        f: The function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i, interpolated from the neurons.
        x: (k, r) samples of length 1.
        b: (k,) weight of each sample.
        steps: Number of Levenberg-Marquardt steps.

    Returns:
        The refined samples and their weights. If the steps would need more than ``BUDGET`` multiplications,
        the samples and weights are returned unchanged.
    """
    if estimate_refinement_cost(f, len(x), steps) > BUDGET:
        return x, b
    alpha, sign = f.degree, torch.where(b < 0, -1.0, 1.0).double()
    scaled_samples = b.abs()[:, None] ** (1 / alpha) * x
    scaled_samples, _ = levenberg_marquardt(f, scaled_samples, sign, steps, damping=1e-12)
    lengths = scaled_samples.norm(dim=1)
    return scaled_samples / lengths[:, None].clamp_min(1e-300), sign * lengths**alpha


def compute_stationarity_residuals(f: Interpolant, x: Tensor, b: Tensor) -> tuple[Tensor, float]:
    """Compute the relative residuals of the stationarity equations for each sample and in total.

    The residual of sample k is measured along its dual vector, which is orthogonal to all other samples. The
    residual is computed twice, and the larger value counts. The first computation weights all neurons
    equally. The second computation weights every neuron by its norm. The equal weights matter if the recovery
    depends on small neurons, because the equations of small neurons must then hold too.

    Args:
        f: The function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i, interpolated from the neurons.
        x: (k, r) samples.
        b: (k,) weight of each sample.

    Returns:
        The relative residual (k,) of each sample, and the relative residual of all equations.
    """
    dual_vectors = torch.linalg.pinv(x)
    # The shapes are (m, r) for the target and (m, k) for the fitted coefficients.
    target, fitted = f.values, b * (f.directions @ x.T) ** (f.degree - 1)
    target_dual, size = target @ dual_vectors, f.sizes[:, None]
    residual_along_duals = target_dual - fitted
    sample_residuals = torch.maximum(
        _relative_norm(residual_along_duals, target_dual),
        _relative_norm(size * residual_along_duals, size * target_dual),
    )
    total_error, total = size * (target - fitted @ x), size * target
    return sample_residuals, float(total_error.norm() / total.norm())


def _relative_norm(error: Tensor, target: Tensor) -> Tensor:
    return error.norm(dim=0) / target.norm(dim=0).clamp_min(1e-300)


def fix_scale(
    x: Tensor, b: Tensor, alpha: int, norm: float | None, augmented: bool
) -> tuple[Tensor, Tensor, str]:
    """Choose the scale t of each sample x with weight b.

    All pairs (t x, b / t^alpha) represent the same network, so the network does not determine t.

    Args:
        x: (k, d) samples of length 1.
        b: (k,) weight of each sample.
        alpha: Degree of the network.
        norm: Common norm of all samples, if this norm is known.
        augmented: Whether the last coordinate of the samples is the constant 1.

    Returns:
        The scaled samples, their weights, and a text that says how the scale was chosen.

    Raises:
        InputError: If ``augmented`` is set, but the last coordinate of a sample is zero.
    """
    if augmented:
        if (x[:, -1].abs() < 1e-12).any():
            raise InputError(
                "The option `augmented` says that the last coordinate of each sample is 1; a recovered "
                "sample ends in 0.",
                "Omit `augmented`.",
            )
        scale_factors, scale_note = 1 / x[:, -1], "fixed by the constant coordinate"
    else:
        largest_coordinate = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
        scale_factors = torch.where(
            (b if alpha % 2 else largest_coordinate) < 0, -1.0, 1.0
        ).double() * (norm or 1.0)
        scale_note = "up to scale: unit vectors" if norm is None else f"norm {norm:g} as given"
    return scale_factors[:, None] * x, b / scale_factors**alpha, scale_note


def _check_arguments(degree: int, pairs: int, norm: float | None, augmented: bool) -> None:
    if degree < 3:
        raise InputError(
            f"The samples of a polynomial network of degree {degree} cannot be recovered from its "
            f"weights; the degree must be at least 3.",
            "Call `measure_identifiability(model)` to compute the sums over samples that the weights "
            "determine.",
        )
    if pairs < 1:
        raise InputError(
            f"The recovery of samples needs at least one random pair of matrices; got `pairs={pairs}`.",
            "Pass `pairs=10`.",
        )
    if norm is not None and not (0 < norm < float("inf")):
        raise InputError(
            f"The norm of the samples, `norm`, must be positive and finite; got {norm}.",
            "Omit `norm` if it is not known.",
        )
    if norm is not None and augmented:
        raise InputError(
            "The options `norm` (the samples have a known norm) and `augmented` (the samples end in a "
            "constant 1) cannot be combined, because each of them fixes the scale of the samples; got "
            "both.",
            "Pass only one of the two.",
        )


def _notes(
    report: Identification, exact: SampleFit | None, fit: SampleFit, grown: GrownFit | None
) -> list[str]:
    notes = []
    if exact is not None and not exact.is_real:
        notes.append(
            "no random pair of matrices had only real eigenvalues, so the samples may be wrong"
        )
    elif exact is not None and exact.eigengap <= MIN_EIGENGAP:
        notes.append("two eigenvalues in the diagonalization coincide, so the samples may be wrong")
    if exact is not None and not report.is_checkable:
        notes.append(
            f"the signal subspace has only {report.r} dimensions. In so few dimensions, some samples fit any "
            "network, so a small residual does not confirm the samples"
        )
    if report.outside > CERTIFIED_RESIDUAL:
        notes.append(
            f"{report.outside:.1e} of the norm of W lies outside the signal subspace of {report.r} dimensions"
        )
    large_residual_count = int((~(fit.residuals <= CERTIFIED_RESIDUAL)).sum())
    if large_residual_count:
        notes.append(
            f"{large_residual_count} of {len(fit.residuals)} samples have residuals above "
            f"{CERTIFIED_RESIDUAL}"
        )
    if grown is not None and grown.equations is not None and grown.equations <= grown.unknowns:
        notes.append(
            f"{grown.equations} independent equations cannot determine {grown.unknowns} unknowns, so a small "
            "residual proves nothing"
        )
    if grown is not None and not grown.is_complete:
        notes.append(
            "the search for samples exhausted its budget. Pass a lower rank to find more samples"
        )
    return notes


class PolynomialAttack(OneShotAttack):
    """The attack that recovers all training samples of a polynomial network exactly.

    It runs :func:`recover`.
    """

    name: ClassVar[str] = "polynomial"
    has_residual: ClassVar[bool] = True
    pace: ClassVar[str] = "formula"

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply to a network.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The reason, or "" if the attack applies.
        """
        architecture_kind = surface.checkpoint.architecture.kind
        return (
            ""
            if architecture_kind == "polynomial"
            else f"needs a polynomial network, not {architecture_kind}"
        )

    def why_applies(self, surface: Surface) -> str:
        """Return a short reason why the attack applies to a network."""
        return "the attack is exact if a rank condition holds; `residuum identify` checks this condition"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Recover the training samples with the function :func:`recover`.

        The reconstruction counts as one restart (run) with zero steps.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The samples, with the residual of all stationarity equations together.
        """
        identification = recover(surface.copy_module(), seed=self.seed)
        x, weights = identification.x, identification.weights
        shape = knowledge.shape or surface.checkpoint.input_shape or x.shape[1:]
        squared_residual = torch.tensor([[(identification.residual or 0.0) ** 2]])
        labels, lam = torch.where(weights < 0, -1.0, 1.0), weights.abs()
        reconstruction = Reconstruction.from_candidates(
            self.name, x.reshape(-1, *shape), labels, lam, knowledge, notes=identification.notes
        )
        return reconstruction.replace(
            steps=torch.zeros(1, dtype=torch.long),
            layer_names=("all equations",),
            loss=squared_residual,
            layers=squared_residual[None],
        )


def identify(
    released: Network,
    activation: str | None = None,
    *,
    rank: int | None = None,
    norm: float | None = None,
    augmented: bool = False,
    data: Dataset | None = None,
    seed: int = 0,
) -> Identification:
    """Identify the training samples of a polynomial network.

    If the degree of the network is at least 3, the function identifies the samples. If the degree is lower,
    the function identifies only sums over the samples, such as sum_i b_i x_i.

    Args:
        released: The network.
        activation: Name such as "cubic", or poly:c0,c1,... The default is the activation of the network.
        rank: Dimension of the span of the samples (signal subspace). By default, the dimension is estimated
            from the first-layer weights W.
        norm: Common norm of all samples, if this norm is known.
        augmented: Whether the last coordinate of the samples is the constant 1. If the first layer has a
            bias and ``norm`` is not set, the coordinate is always 1.
        data: Samples whose minimum margin is reported. The recovery does not use these samples.
        seed: Seed of the random directions.

    Returns:
        The samples or the sums over samples, and the conditions under which the network determines them.
    """
    model, has_bias = build_polynomial_network(released, activation)
    margin = None if data is None else _min_margin(model, data, has_bias)
    augmented = augmented or (has_bias and norm is None)
    identification = (
        measure_identifiability(model, rank)
        if model.activation.degree < 3  # type: ignore[operator]
        else recover(model, rank=rank, norm=norm, augmented=augmented, seed=seed)
    )
    return identification.replace(
        arch=released.arch, input_shape=released.input_shape, min_margin=margin
    )


def build_polynomial_network(
    released: Network, activation: str | None = None
) -> tuple[PolynomialNetwork, bool]:
    """Convert a network to a polynomial network with the same weights.

    Args:
        released: The network.
        activation: Name such as "cubic", or poly:c0,c1,... The default is the activation of the network.

    Returns:
        The polynomial network, and whether its last input is a constant 1 that represents the bias of the
        first layer.

    Raises:
        InputError: If the network is not of the form sum_j a_j sigma(W_j.x), or if sigma is not known.
    """
    arch = released.architecture
    coefficients = None if activation is None else parse_activation(activation)
    layer_tensors = _read_tensors(arch, released.theta)
    if layer_tensors is None or (coefficients is None and arch.kind != "polynomial"):
        raise InputError(
            "Samples can be recovered exactly only from a network of the form sum_j a_j sigma(W_j.x) with "
            "a "
            f"polynomial sigma; this network is {arch}.",
            "Pass --activation with the activation of the network, for example --activation cubic."
            if layer_tensors is not None
            else "Pass a polynomial network, or a network d-m-1 with --activation.",
        )
    weight, coefficient, has_bias = layer_tensors
    model = (
        PolynomialNetwork(weight.shape[1], len(weight), Polynomial(coefficients))
        if coefficients is not None
        else cast(PolynomialNetwork, arch.build())
    ).to(weight.dtype)
    model.load_state_dict({"weight": weight, "coefficient": coefficient})
    return model.eval(), has_bias


def parse_activation(text: str) -> tuple[float, ...]:
    """Read the coefficients of a polynomial activation, constant coefficient first.

    Args:
        text: Name such as "cubic", or poly:c0,c1,... with the coefficients.

    Returns:
        The coefficients (c0, c1, ...).

    Raises:
        InputError: If the text does not describe a polynomial activation.
    """
    if text in POWERS:
        return (*[0.0] * POWERS[text], 1.0)
    kind, _, numbers = text.partition(":")
    try:
        coefficients = tuple(map(float, numbers.split(",")))
    except ValueError:
        coefficients = ()
    is_finite = all(abs(c) < float("inf") for c in coefficients)
    if kind != "poly" or len(coefficients) < 2 or not is_finite or coefficients[-1] == 0:
        raise InputError(
            f"An activation must be {', '.join(POWERS)} or poly:c0,c1,... with finite numbers and a "
            f"nonzero last number; got {text[:40]!r}.",
            "For the activation t + t^3, pass poly:0,1,0,1.",
        )
    return coefficients


def _read_tensors(
    arch: Architecture, theta: dict[str, Tensor]
) -> tuple[Tensor, Tensor, bool] | None:
    """Read the first-layer weights W (m, d) and the output weights a (m,) of sum_j a_j sigma(W_j.x).

    Returns:
        W, a, and whether the last column of W is a bias. The result is None for a network of another form.
    """
    if arch.kind == "polynomial":
        return theta["weight"], theta["coefficient"], False
    if arch.kind != "mlp":
        return None
    weight, bias = theta["layers.0.weight"], theta.get("layers.0.bias")
    # If a file holds only the tensors W (m, d) and a (m,), the file counts as a network d-m with the weight W
    # and the bias a. The tensor ``bias`` is then a.
    if len(arch.widths) == 2 and bias is not None:
        return weight, bias, False
    if len(arch.widths) == 3 and arch.outputs == 1 and "layers.1.bias" not in theta:
        output_weights = theta["layers.1.weight"][0]
        if bias is None:
            return weight, output_weights, False
        return torch.cat([weight, bias[:, None]], 1), output_weights, True
    return None


def _min_margin(model: PolynomialNetwork, data: Dataset, has_bias: bool) -> float:
    """Return the minimum margin min_i y_i Phi(x_i) of a network Phi on samples x_i with labels y_i."""
    extended_samples, y = data.x.flatten(1).to(model.weight.dtype), data.y.flatten()
    if has_bias:
        extended_samples = torch.cat(
            [extended_samples, torch.ones_like(extended_samples[:, :1])], 1
        )
    if (
        extended_samples.shape[1] != model.weight.shape[1]
        or len(y) != len(extended_samples)
        or not (y.abs() == 1).all()
    ):
        raise InputError(
            f"The smallest margin is computed from samples of {model.weight.shape[1] - has_bias} values, "
            f"with one "
            f"label -1 or +1 for each sample; got samples of {extended_samples.shape[1] - has_bias} values.",
            "Correct --data, or omit --data.",
        )
    with torch.no_grad():
        return float((y * model(extended_samples)[:, 0]).min())
