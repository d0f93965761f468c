"""Undo a secret shift of the inputs, from the weights alone.

The defense of Refael et al. 2025, App. D, rewrites the biases, b' = b - W u, so that the outputs of the
network on x + u equal its former outputs on x. At a KKT point every hidden neuron is balanced:
|w_j|^2 + b_j^2 = v_j^2, where v_j is the norm of the outgoing weights of neuron j. With the rewritten bias
b'_j, the neuron is not balanced. The attacker looks for the shift u that balances all neurons again:

    e_j(u) = |w_j|^2 + (b'_j + <w_j, u>)^2 - v_j^2,        u = argmin sum_j e_j(u)^2

For a constant shift u = c 1, the sum of squares is a polynomial of degree four in c, which is minimized
exactly. Neurons with large weights dominate this sum, and training balances these neurons best. If samples
z_i = x_i + u are known, the stationarity of the first layer gives another equation, linear in u:

    W = sum_i d_i (z_i - u)^T,    b' + W u = sum_i d_i,      d_i = lam_i y_i dPhi/dpre_1(z_i)

The shapes are (h, d) for the first-layer weights W, (h,) for b, (d,) for u, (m, d) for z and (m, h) for d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from residuum.errors import InputError
from residuum.networks import MLP, dense_chain
from residuum.networks.network import Network

# The imbalance of neurons is the relative difference between the norms of their incoming and outgoing
# weights. Below this value, the neurons count as exactly balanced.
EXACT_BALANCE = 1e-6
# Largest relative difference of incoming and outgoing norms at which neurons count as balanced.
NEAR_BALANCE = 0.05
# Number of random permutations of the biases in a permutation test (so the smallest p-value is 1/200), and
# the significance level of the test.
DRAWS, LEVEL = 199, 0.01
MIN_NEURONS = 8  # minimum number of distinct neurons for the permutation test
# Two neurons are copies of each other if random projections of their weights are almost equal.
# The maximum difference is this share of the largest projection.
COPY_TOLERANCE = 1e-6
# The shift of the inputs is searched in the span of right singular vectors of the first layer's weights. A
# singular vector is used if its singular value exceeds this share of the largest one.
RANK_TOLERANCE = 1e-2
# The search for the shift of the inputs is repeated with SIGN_CHOICES random choices of the signs of
# biases. Two results count as equally good if their errors differ by at most the factor TIE_FACTOR.
SIGN_CHOICES, TIE_FACTOR = 24, 1.5
WEIGHT, BIAS = "layers.0.weight", "layers.0.bias"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ShiftInference:
    """A shift (constant offset) of the training inputs that was inferred from the weights.

    Attributes:
        shift: The constant c that was added to every input value, or the vector (d,) that was added to every
            sample, projected onto the span of the first-layer weights.
        imbalance: Relative imbalance sqrt(sum e_j^2 / sum v_j^4) of the neurons after the shift is undone.
            Here e_j is the imbalance of neuron j, and v_j the norm of its outgoing weights.
        before: Relative imbalance before the shift is undone.
        uncertainty: Standard error of c that corresponds to the remaining imbalance.
        p_value: Share of random permutations of the biases that can be balanced equally well, None if there
            are too few neurons.
        neurons: Number of distinct neurons.
        consensus: Whether the neurons agree on the shift. Only then can the shift be trusted.
        reason: Why the shift can or cannot be trusted.
    """

    shift: float | Tensor
    imbalance: float
    before: float
    uncertainty: float | None
    p_value: float | None
    neurons: int
    consensus: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain values.

        A shift that is a vector is replaced by its norm and its mean size per pixel.
        """
        plain_values = {k: v for k, v in vars(self).items() if k != "shift"}
        if isinstance(self.shift, Tensor):
            norm = float(self.shift.norm())
            per_pixel = norm / math.sqrt(self.shift.numel())
            return {
                "kind": "vector",
                "shift_norm": norm,
                "shift_per_pixel": per_pixel,
                **plain_values,
            }
        return {"kind": "constant", "shift_per_pixel": self.shift, **plain_values}


def move_biases(checkpoint: Network, shift: float | Tensor) -> Network:
    """Return the network with the first-layer biases b + W u, where u is a shift of the inputs.

    Args:
        checkpoint: The network with first-layer weights W and biases b.
        shift: The shift u: one number for all pixels, or a vector. The shift 0 leaves the biases unchanged.

    Returns:
        The network with moved biases.
    """
    weight, bias = _read_first_layer(checkpoint)
    shift_vector = torch.as_tensor(shift, dtype=torch.float64).flatten().expand(weight.shape[1])
    moved_bias = (bias + weight @ shift_vector).to(checkpoint.theta[BIAS])
    return checkpoint.replace(theta={**checkpoint.theta, BIAS: moved_bias})


@dataclass(frozen=True, eq=False)
class Neurons:
    """The neurons of the first hidden layer, with the norms of their incoming and outgoing weights.

    A neuron is balanced if its incoming weights and bias have the same norm as its outgoing weights.

    Attributes:
        weight: (h, d) incoming weights.
        bias: (h,) released biases.
        squared_outgoing: (h,) squared norms of the outgoing weights.
        offset: Whether the squared norms of incoming and outgoing weights may differ by a constant that all
            neurons share. This is the case in networks with deeper layers.
    """

    weight: Array
    bias: Array
    squared_outgoing: Array
    offset: bool

    @classmethod
    def from_network(cls, network: Network) -> Neurons:
        """Read the first hidden layer of an MLP."""
        weight, bias = _read_first_layer(network)
        upper_layers = _require_mlp(network).linears[1:]
        squared_outgoing = upper_layers[0].weight.detach().square().sum(0)
        return cls(weight.numpy(), bias.numpy(), squared_outgoing.numpy(), len(upper_layers) > 1)

    @property
    def deficit(self) -> Array:
        """For each of h neurons: squared norm of its incoming weights minus that of its outgoing weights."""
        return np.square(self.weight).sum(1) - self.squared_outgoing

    @property
    def scale(self) -> float:
        """The number sqrt(sum_j v_j^4), where v_j is the norm of neuron j's outgoing weights.

        The imbalance of the neurons is divided by this number.
        """
        return math.sqrt(float(np.square(self.squared_outgoing).sum())) or 1.0

    @property
    def distinct_count(self) -> int:
        """Number of neurons with nonzero outgoing weights. Neurons with proportional weights count once."""
        largest_square = self.squared_outgoing.max()
        is_live = self.squared_outgoing > (1e-12 * largest_square if largest_square > 0 else 0)
        scaled_weights = (
            np.concatenate([self.weight, self.bias[:, None]], 1)[is_live]
            / np.sqrt(self.squared_outgoing[is_live])[:, None]
        )
        if not len(scaled_weights):
            return 0
        random_direction = np.random.default_rng(0).standard_normal(scaled_weights.shape[1])
        projections = np.sort(scaled_weights @ random_direction)
        tolerance = COPY_TOLERANCE * np.abs(projections).max()
        return 1 + int((np.diff(projections) > tolerance).sum())

    def centered(self, values: Array) -> Array:
        """Return values (..., h) of h neurons, minus their mean over neurons if ``offset`` is set."""
        return values - values.mean(-1, keepdims=True) if self.offset else values

    def minimize(self, bias: Array, sums: Array) -> tuple[Array, Array]:
        """Find the constant shift c that balances the neurons best, for every row b of ``bias``.

        The function minimizes sum_j (|w_j|^2 - v_j^2 + (b_j + c s_j)^2)^2 over c, with incoming weights w_j
        and norms v_j of the outgoing weights. If deeper layers have hardly changed from their random
        initialization, incoming and outgoing norms differ by about the same offset in all neurons. The
        function therefore subtracts the mean over neurons before it squares.

        Args:
            bias: (P, h) biases, one choice in each row.
            sums: (h,) sums s_j of the incoming weights, which multiply c.

        Returns:
            The minimizers c (P,), and the minima (P,).
        """
        squared_sums = np.broadcast_to(sums**2, bias.shape)
        a0, a1, a2 = map(self.centered, (self.deficit + bias**2, 2 * bias * sums, squared_sums))
        # The sum of (a0 + a1 c + a2 c^2)^2 over neurons is a polynomial of degree 4 in c.
        # Its coefficients follow from the inner products of a0, a1 and a2.
        polynomial_terms = np.stack([a0, a1, a2])
        products_of_terms = np.moveaxis(
            np.einsum("aph,bph->pab", polynomial_terms, polynomial_terms), 0, -1
        )
        polynomials = np.stack(
            [
                products_of_terms[2, 2],
                2 * products_of_terms[1, 2],
                2 * products_of_terms[0, 2] + products_of_terms[1, 1],
                2 * products_of_terms[0, 1],
                products_of_terms[0, 0],
            ],
            1,
        )
        minimizer, minimum = np.zeros(len(bias)), polynomials[:, 4].copy()
        for i, coefficients in enumerate(polynomials):
            critical_points = np.roots(np.polyder(coefficients))
            is_real = np.abs(critical_points.imag) <= 1e-6 * (1 + np.abs(critical_points))
            for c in critical_points[is_real].real:
                squared_imbalance = float(np.square(a0[i] + c * (a1[i] + c * a2[i])).sum())
                if squared_imbalance < minimum[i]:
                    minimizer[i], minimum[i] = c, squared_imbalance
        return minimizer, minimum


def infer_constant_shift(checkpoint: Network, *, seed: int = 0) -> ShiftInference:
    """Infer a constant shift c of the inputs from the balance of the first-layer neurons.

    Training balances each neuron: |w_j|^2 + b_j^2 = v_j^2, with incoming weights w_j, bias b_j and norm v_j
    of the outgoing weights. If there are deeper layers, the two sides may differ by a constant that all
    neurons share. A shift rewrites the biases to b'_j. The imbalance e_j(c) = |w_j|^2 + (b'_j + c <w_j, 1>)^2
    - v_j^2 is a quadratic in c for each neuron, and all neurons have a common root c. The function minimizes
    sum_j e_j(c)^2 exactly.

    A permutation test shows whether the neurons agree on c by chance: p is the share of permutations of the
    biases among neurons that can be balanced equally well.

    Args:
        checkpoint: An MLP with biases in its first layer.
        seed: Seed of the permutations.

    Returns:
        The shift, with consensus if the neurons agree on it. Its ``uncertainty`` is the error of c that
        corresponds to the remaining imbalance.
    """
    neurons = Neurons.from_network(checkpoint)
    bias, deficit, sums = neurons.bias, neurons.deficit, neurons.weight.sum(1)
    (c,), (minimum,) = neurons.minimize(bias[None], sums)
    imbalances = neurons.centered(deficit + (bias + c * sums) ** 2)
    slope = neurons.centered(2 * (bias + c * sums) * sums)
    squared_slope = float(np.square(slope).sum())
    distinct_count, p_value = neurons.distinct_count, None
    if distinct_count >= MIN_NEURONS:
        rng = np.random.default_rng(seed)
        permuted_biases = np.stack([rng.permutation(bias) for _ in range(DRAWS)])
        _, minima = neurons.minimize(permuted_biases, sums)
        p_value = (1 + int((minima <= minimum).sum())) / (1 + DRAWS)
    imbalance = math.sqrt(max(minimum, 0.0)) / neurons.scale
    consensus, reason = _judge_consensus(imbalance, p_value, distinct_count)
    return ShiftInference(
        shift=float(c),
        imbalance=imbalance,
        before=float(np.linalg.norm(neurons.centered(deficit + bias**2))) / neurons.scale,
        uncertainty=float(np.linalg.norm(imbalances * slope)) / squared_slope
        if squared_slope > 0
        else None,
        p_value=p_value,
        neurons=distinct_count,
        consensus=consensus,
        reason=reason,
    )


def infer_vector_shift(checkpoint: Network, *, seed: int = 0) -> ShiftInference:
    """Infer a vector shift u of the inputs from the balance of the first-layer neurons.

    At a balanced neuron, |b'_j + <w_j, u>| = sqrt(v_j^2 - |w_j|^2), with incoming weights w_j, rewritten bias
    b'_j and norm v_j of the outgoing weights. The function solves these equations by least squares. The sign
    of the left side is unknown for every neuron, so the function tries many choices of signs. If several
    shifts balance the network equally well, there is no consensus.

    Args:
        checkpoint: An MLP with biases in its first layer.
        seed: Seed of the random choices of signs.

    Returns:
        The shift, with consensus if only one shift balances the neurons.
    """
    neurons = Neurons.from_network(checkpoint)
    bias, deficit, scale = neurons.bias, neurons.deficit, neurons.scale
    _, S, Vt = np.linalg.svd(neurons.weight, full_matrices=False)
    row_space_basis = Vt[RANK_TOLERANCE * S[0] < S] if S[0] > 0 else Vt[:0]
    projected, root = neurons.weight @ row_space_basis.T, np.sqrt(np.maximum(-deficit, 0))

    def balance(sign: Array) -> tuple[float, Array]:
        """Search for the vector shift that balances the neurons best.

        Args:
            sign: (h,) sign of the moved bias of each neuron, from which the search starts.

        Returns:
            The relative imbalance, and the moved biases (h,).
        """
        least_squares_fit = least_squares(
            lambda a: (deficit + (bias + projected @ a) ** 2) / scale,
            np.linalg.lstsq(projected, sign * root - bias, rcond=None)[0],
            jac=lambda a: 2 * (bias + projected @ a)[:, None] * projected / scale,
            max_nfev=60,
            method="lm",
        )
        return math.sqrt(2 * least_squares_fit.cost), bias + projected @ least_squares_fit.x

    rng = np.random.default_rng(seed)
    signs = [np.ones_like(bias), -np.ones_like(bias), np.where(bias < 0, -1.0, 1.0)]
    signs += [
        np.sign(projected @ rng.standard_normal(len(row_space_basis)))
        for _ in range(SIGN_CHOICES - len(signs))
    ]
    solutions = sorted(map(balance, signs), key=lambda pair: pair[0])
    smallest_imbalance, moved_bias = solutions[0]
    distinct_count = neurons.distinct_count
    consensus, reason = _judge_consensus(
        smallest_imbalance, None, distinct_count, limit=NEAR_BALANCE
    )
    moved_bias_norm = np.linalg.norm(moved_bias) or 1.0
    tied_biases = [
        b for value, b in solutions if value <= max(TIE_FACTOR * smallest_imbalance, EXACT_BALANCE)
    ]
    if (
        consensus
        and max(np.linalg.norm(b - moved_bias) for b in tied_biases) > 0.1 * moved_bias_norm
    ):
        consensus, reason = False, "no consensus: several shifts balance the neurons equally well"
    imbalance_before = np.square(neurons.weight).sum(1) + bias**2 - neurons.squared_outgoing
    return ShiftInference(
        shift=torch.from_numpy(
            row_space_basis.T @ np.linalg.lstsq(projected, moved_bias - bias, rcond=None)[0]
        ),
        imbalance=smallest_imbalance,
        before=float(np.linalg.norm(imbalance_before)) / scale,
        uncertainty=None,
        p_value=None,
        neurons=distinct_count,
        consensus=consensus,
        reason=reason,
    )


def fit_shift(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor, basis: Tensor | None = None
) -> tuple[Tensor, float]:
    """Fit a shift u of the inputs, so that known samples solve the stationarity equations of the first layer.

    The stationarity equations of the weights and of the biases are linear in u, so u is a least-squares
    solution. The fit does not assume that neurons are balanced.

    Args:
        checkpoint: The network with the shift and with one output.
        z: Samples as the network receives them, which include the shift.
        labels: Labels of the samples, -1 or +1.
        lam: Multipliers (weights) of the samples.
        basis: Directions (k, d) that span the possible shifts. The default is the constant direction.

    Returns:
        The shift u, and the relative residual of the first layer with this shift (:func:`shift_residual`).
    """
    weight, bias, unexplained, total = _first_layer_sums(checkpoint, z, labels, lam)
    basis = torch.ones(1, weight.shape[1]).to(weight) if basis is None else basis.to(weight)
    # If the shift u is subtracted from the samples, the equation of the weights leaves the error
    # unexplained + total u^T, and the equation of the biases leaves the error bias - total + W u. Both are
    # linear in u.
    columns = [torch.cat([torch.outer(total, v).flatten(), weight @ v]) for v in basis]
    right_side = torch.cat([unexplained.flatten(), bias - total])
    coefficients = torch.linalg.lstsq(torch.stack(columns, 1), -right_side[:, None]).solution[:, 0]
    shift_vector = coefficients @ basis
    return shift_vector, shift_residual(checkpoint, z, labels, lam, shift_vector)


def shift_residual(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor, shift: float | Tensor
) -> float:
    """Return the relative residual of the first layer's stationarity equations after a shift u is undone.

    The residual is that of the samples z - u in the network with first-layer biases b' + W u.

    Args:
        checkpoint: The network with the shift, with first-layer weights W and biases b'.
        z: Samples as the network receives them, which include the shift.
        labels: Labels of the samples, -1 or +1.
        lam: Multipliers (weights) of the samples.
        shift: The shift u: one number for all pixels, or a vector.

    Returns:
        The relative residual.
    """
    weight, bias, unexplained, total = _first_layer_sums(checkpoint, z, labels, lam)
    shift_vector = torch.as_tensor(shift, dtype=weight.dtype).flatten().expand(weight.shape[1])
    moved_bias = bias + weight @ shift_vector
    residual = (unexplained + torch.outer(total, shift_vector)).square().sum() + (
        bias - total + weight @ shift_vector
    ).square().sum()
    return float((residual / (weight.square().sum() + moved_bias.square().sum())).sqrt())


def infer_mean(checkpoint: Network) -> Tensor:
    """Infer the mean of the training inputs from the first-layer weights W and biases b.

    Training gives W = sum_i c_i x_i^T and b = sum_i c_i for samples x_i with coefficients c_i. The mean
    m = W^T b / |b|^2 minimizes |W - b m^T|. If the inputs were shifted during training, the mean includes the
    shift.

    Args:
        checkpoint: The network.

    Returns:
        (d,) mean of the inputs.

    Raises:
        InputError: If the first-layer biases are zero.
    """
    weight, bias = _read_first_layer(checkpoint)
    squared_norm = bias.square().sum()
    if squared_norm == 0:
        raise InputError(
            "The mean of the inputs can be inferred only from a nonzero bias of the first layer; the bias "
            "is zero.",
            "Pass the mean with --mean.",
        )
    return weight.T @ bias / squared_norm


def _judge_consensus(
    imbalance: float, p_value: float | None, neurons: int, limit: float | None = None
) -> tuple[bool, str]:
    if neurons < 2:
        return False, "no consensus: a single neuron can be balanced by any shift"
    if imbalance <= EXACT_BALANCE:
        return True, f"one shift balances all {neurons} distinct neurons exactly"
    if p_value is None and limit is None:
        return (
            False,
            f"no consensus: no shift balances all {neurons} neurons, which are too few for a test",
        )
    if imbalance > NEAR_BALANCE:
        return False, f"no consensus: the neurons stay unbalanced by {imbalance:.2g} at best"
    if p_value is not None and p_value > LEVEL:
        return (
            False,
            f"no consensus: permuted biases can be balanced equally well, p = {p_value:.2g}",
        )
    return True, f"one shift balances {neurons} neurons up to {imbalance:.2g}"


def _first_layer_sums(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the terms of the equations that express the first layer's weights by samples z_i.

    Args:
        checkpoint: The network with the shift.
        z: Samples z_i as the network receives them.
        labels: Labels of the samples, -1 or +1.
        lam: Multipliers (weights) of the samples.

    Returns:
        The weights W, the biases b', the unexplained weights W - sum_i d_i z_i^T, and the sum of d_i. The
        vector d_i is lam_i y_i times the derivative of the output in the pre-activations of the first
        layer.

    Raises:
        InputError: If the network has several outputs.
    """
    weight, bias = _read_first_layer(checkpoint)
    model = _require_mlp(checkpoint)
    if model.linears[-1].out_features != 1 or lam.ndim != 1:
        raise InputError(
            "A shift (a constant that was added to all inputs) can be fitted only if the network has one "
            "output.",
            "Call infer_constant_shift for networks with several outputs.",
        )
    z = z.double().flatten(1)
    with torch.no_grad():
        backward_signals = model.signals(model.trace(z), (lam.double() * labels.double())[:, None])[
            0
        ]
    return weight, bias, weight - backward_signals.T @ z, backward_signals.sum(0)


def _require_mlp(checkpoint: Network) -> MLP:
    model = dense_chain(checkpoint.double_module)
    if model is None or len(model.linears) < 2:
        raise InputError(
            f"Shift inference (estimating a constant that was added to all inputs) needs an MLP with "
            f"hidden neurons; this network is {checkpoint.arch}.",
            "Use an attack without shift inference.",
        )
    return model


def _read_first_layer(checkpoint: Network) -> tuple[Tensor, Tensor]:
    """Return the weights and the biases of the first layer as float64 tensors."""
    if not {WEIGHT, BIAS} <= checkpoint.theta.keys():
        raise InputError(
            "To apply or undo a shift (a constant that is added to all inputs), the network must be an "
            f"MLP with a bias in the first layer; this network is {checkpoint.arch}.",
            "Use an MLP with a bias in the first layer.",
        )
    return checkpoint.theta[WEIGHT].double().flatten(1), checkpoint.theta[BIAS].double()
