"""Undo a secret shift of the inputs, from the weights alone.

Refael et al. 2025, App. D rewrite the biases, b' = b - W u, so that the network gives on x + u the outputs
that it gave on x. At a KKT point every hidden neuron is balanced: |w_j|^2 + b_j^2 = v_j^2, where v_j is the
norm of its outgoing weights. With b' it is not. The attacker looks for the u that balances all neurons again:

    e_j(u) = |w_j|^2 + (b'_j + <w_j, u>)^2 - v_j^2,        u = argmin sum_j e_j(u)^2

For a constant shift u = c 1 the sum is a polynomial of degree four in c, which is minimized exactly. Heavy
neurons have the largest weight in it, and training balances them best. If samples z_i = x_i + u are known,
the stationarity of the first layer gives another equation, linear in u:

    W = sum_i d_i (z_i - u)^T,    b' + W u = sum_i d_i,      d_i = lam_i y_i dPhi/dpre_1(z_i)

W: (h, d) first layer; b: (h,); u: (d,); z: (m, d); d: (m, h).
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

EXACT_BALANCE = 1e-6  # a smaller relative imbalance can only come from a common root
NEAR_BALANCE = 0.05  # largest relative imbalance of a network that training left near balance
# Number of permutations of the biases (smallest p 1/200), and the significance level.
DRAWS, LEVEL = 199, 0.01
MIN_NEURONS = 8  # fewer distinct neurons have too few permutations of their biases
COPY_TOLERANCE = 1e-6  # relative to the largest probe: neurons that differ by less are copies
# Relative size of the singular values of W along which a vector shift is sought.
RANK_TOLERANCE = 1e-2
# Number of sign choices that are tried. Minima within this factor of the smallest are rivals.
SIGN_CHOICES, TIE_FACTOR = 24, 1.5
WEIGHT, BIAS = "layers.0.weight", "layers.0.bias"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ShiftInference:
    """A shift that was inferred from the weights.

    Attributes:
        shift: Per pixel: the constant c, or the (d,) component of u that the first layer depends on.
        imbalance: sqrt(sum e_j^2 / sum v_j^4) after the shift is undone.
        before: The same before the shift is undone.
        uncertainty: Standard error of c that corresponds to the remaining imbalance.
        p_value: Share of permuted biases that are balanced as well, None if there are too few neurons.
        neurons: Number of distinct neurons.
        consensus: The shift can be trusted.
        reason: Why it can or cannot be trusted.
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
        """Return plain values. A vector is replaced by its norm and its size per pixel."""
        figures = {k: v for k, v in vars(self).items() if k != "shift"}
        if isinstance(self.shift, Tensor):
            norm = float(self.shift.norm())
            per_pixel = norm / math.sqrt(self.shift.numel())
            return {"kind": "vector", "shift_norm": norm, "shift_per_pixel": per_pixel, **figures}
        return {"kind": "constant", "shift_per_pixel": self.shift, **figures}


def move_biases(checkpoint: Network, shift: float | Tensor) -> Network:
    """Return the network with the biases b + W u.

    Args:
        checkpoint: The network.
        shift: u, a number for every pixel or a vector. 0 changes no bit.

    Returns:
        The network with moved biases.
    """
    weight, bias = _read_first_layer(checkpoint)
    u = torch.as_tensor(shift, dtype=torch.float64).flatten().expand(weight.shape[1])
    moved = (bias + weight @ u).to(checkpoint.theta[BIAS])
    return checkpoint.replace(theta={**checkpoint.theta, BIAS: moved})


@dataclass(frozen=True, eq=False)
class Neurons:
    """The first hidden layer.

    Attributes:
        weight: W (h, d).
        bias: b' (h,).
        outgoing: (h,) squared norms v^2 of the outgoing weights.
        offset: Neurons may share an offset from balance, because there are deeper layers.
    """

    weight: Array
    bias: Array
    outgoing: Array
    offset: bool

    @classmethod
    def from_network(cls, network: Network) -> Neurons:
        """Read the first hidden layer of an MLP."""
        weight, bias = _read_first_layer(network)
        upper = _require_mlp(network).linears[1:]
        outgoing = upper[0].weight.detach().square().sum(0)
        return cls(weight.numpy(), bias.numpy(), outgoing.numpy(), len(upper) > 1)

    @property
    def deficit(self) -> Array:
        """(h,) differences |w_j|^2 - v_j^2."""
        return np.square(self.weight).sum(1) - self.outgoing

    @property
    def scale(self) -> float:
        """The scale sqrt(sum v_j^4)."""
        return math.sqrt(float(np.square(self.outgoing).sum())) or 1.0

    @property
    def distinct_count(self) -> int:
        """The number of neurons that are no multiples of each other."""
        v2 = self.outgoing
        live = v2 > 1e-12 * v2.max() if v2.max() > 0 else v2 > 0
        rows = (
            np.concatenate([self.weight, self.bias[:, None]], 1)[live] / np.sqrt(v2[live])[:, None]
        )
        if not len(rows):
            return 0
        probe = np.sort(rows @ np.random.default_rng(0).standard_normal(rows.shape[1]))
        return 1 + int((np.diff(probe) > COPY_TOLERANCE * np.abs(probe).max()).sum())

    def centered(self, values: Array) -> Array:
        """Return values of the neurons (..., h) minus their common offset."""
        return values - values.mean(-1, keepdims=True) if self.offset else values

    def minimize(self, bias: Array, sums: Array) -> tuple[Array, Array]:
        """Minimize sum_j (|w_j|^2 - v_j^2 + (b_j + c s_j)^2)^2 over c, for every row b of ``bias``.

        If deeper layers have hardly changed from their random initialization, outgoing norms do not match
        incoming norms, but are close to each other. So the common offset is subtracted from each square.

        Args:
            bias: (P, h) biases.
            sums: (h,) changes s_j of the pre-activations per unit of c.

        Returns:
            The minimizers and the minima, (P,) each.
        """
        square = np.broadcast_to(sums**2, bias.shape)
        a0, a1, a2 = map(self.centered, (self.deficit + bias**2, 2 * bias * sums, square))
        q = np.einsum("aph,bph->pab", np.stack([a0, a1, a2]), np.stack([a0, a1, a2]))
        quartic = np.stack(
            [q[:, 2, 2], 2 * q[:, 1, 2], 2 * q[:, 0, 2] + q[:, 1, 1], 2 * q[:, 0, 1], q[:, 0, 0]], 1
        )
        minimizer, minimum = np.zeros(len(bias)), quartic[:, 4].copy()
        for i, row in enumerate(quartic):
            roots = np.roots(np.polyder(row))
            for c in roots[np.abs(roots.imag) <= 1e-6 * (1 + np.abs(roots))].real:
                value = float(np.square(a0[i] + c * (a1[i] + c * a2[i])).sum())
                if value < minimum[i]:
                    minimizer[i], minimum[i] = c, value
        return minimizer, minimum


def infer_constant_shift(checkpoint: Network, *, seed: int = 0) -> ShiftInference:
    """Infer the c that balances b'_j + c <w_j, 1> over all neurons, or find no consensus.

    Training gives |w_j|^2 + b_j^2 = v_j^2, below deeper layers up to an offset that all neurons share.
    Rewritten biases violate it by e_j(c) = |w_j|^2 + (b'_j + c <w_j, 1>)^2 - v_j^2, a quadratic per
    neuron with a common root. The minimum of sum_j e_j(c)^2, a quartic in c, is exact. Biases that are
    permuted among neurons show whether the root is common or found by chance: p is the share of
    permutations that are balanced as well.

    Args:
        checkpoint: An MLP with biases in its first layer.
        seed: Seed of the permutations.

    Returns:
        The shift. Its ``uncertainty`` is the error of c that corresponds to the remaining imbalance.
    """
    neurons = Neurons.from_network(checkpoint)
    bias, deficit, sums = neurons.bias, neurons.deficit, neurons.weight.sum(1)
    (c,), (minimum,) = neurons.minimize(bias[None], sums)
    error = neurons.centered(deficit + (bias + c * sums) ** 2)
    slope = neurons.centered(2 * (bias + c * sums) * sums)
    power = float(np.square(slope).sum())
    distinct, p_value = neurons.distinct_count, None
    if distinct >= MIN_NEURONS:
        rng = np.random.default_rng(seed)
        permuted = np.stack([rng.permutation(bias) for _ in range(DRAWS)])
        _, minima = neurons.minimize(permuted, sums)
        p_value = (1 + int((minima <= minimum).sum())) / (1 + DRAWS)
    imbalance = math.sqrt(max(minimum, 0.0)) / neurons.scale
    consensus, reason = _judge_consensus(imbalance, p_value, distinct)
    return ShiftInference(
        shift=float(c),
        imbalance=imbalance,
        before=float(np.linalg.norm(neurons.centered(deficit + bias**2))) / neurons.scale,
        uncertainty=float(np.linalg.norm(error * slope)) / power if power > 0 else None,
        p_value=p_value,
        neurons=distinct,
        consensus=consensus,
        reason=reason,
    )


def infer_vector_shift(checkpoint: Network, *, seed: int = 0) -> ShiftInference:
    """Infer any vector u from |b'_j + <w_j, u>| = sqrt(v_j^2 - |w_j|^2), by least squares.

    The sign of every neuron is unknown, so many choices of signs are tried. The choice is clear if there
    are more distinct neurons than directions. If several shifts balance the network equally well, there
    is no consensus.

    Args:
        checkpoint: An MLP with biases in its first layer.
        seed: Seed of the choices of signs.

    Returns:
        The shift.
    """
    neurons = Neurons.from_network(checkpoint)
    bias, deficit, scale = neurons.bias, neurons.deficit, neurons.scale
    _, S, Vt = np.linalg.svd(neurons.weight, full_matrices=False)
    basis = Vt[RANK_TOLERANCE * S[0] < S] if S[0] > 0 else Vt[:0]
    projected, root = neurons.weight @ basis.T, np.sqrt(np.maximum(-deficit, 0))

    def balance(sign: Array) -> tuple[float, Array]:
        """Return the imbalance and the balanced biases next to a choice of signs."""
        fit = least_squares(
            lambda a: (deficit + (bias + projected @ a) ** 2) / scale,
            np.linalg.lstsq(projected, sign * root - bias, rcond=None)[0],
            jac=lambda a: 2 * (bias + projected @ a)[:, None] * projected / scale,
            max_nfev=60,
            method="lm",
        )
        return math.sqrt(2 * fit.cost), bias + projected @ fit.x

    rng = np.random.default_rng(seed)
    signs = [np.ones_like(bias), -np.ones_like(bias), np.where(bias < 0, -1.0, 1.0)]
    signs += [
        np.sign(projected @ rng.standard_normal(len(basis)))
        for _ in range(SIGN_CHOICES - len(signs))
    ]
    minima = sorted(map(balance, signs), key=lambda pair: pair[0])
    smallest, restored = minima[0]
    distinct = neurons.distinct_count
    consensus, reason = _judge_consensus(smallest, None, distinct, limit=NEAR_BALANCE)
    size = np.linalg.norm(restored) or 1.0
    rivals = [b for value, b in minima if value <= max(TIE_FACTOR * smallest, EXACT_BALANCE)]
    if consensus and max(np.linalg.norm(b - restored) for b in rivals) > 0.1 * size:
        consensus, reason = False, "no consensus: other signs balance the neurons as well"
    before = np.square(neurons.weight).sum(1) + bias**2 - neurons.outgoing
    return ShiftInference(
        shift=torch.from_numpy(
            basis.T @ np.linalg.lstsq(projected, restored - bias, rcond=None)[0]
        ),
        imbalance=smallest,
        before=float(np.linalg.norm(before)) / scale,
        uncertainty=None,
        p_value=None,
        neurons=distinct,
        consensus=consensus,
        reason=reason,
    )


def fit_shift(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor, basis: Tensor | None = None
) -> tuple[Tensor, float]:
    """Fit the shift u to the first layer's stationarity at samples z.

    The residual of the weights is total u^T, and that of the biases is W u. Both are linear in u, so u is a
    least-squares solution. Balance is not assumed. Unlike the two functions above, this needs samples.

    Args:
        checkpoint: The network with the shift. It has one output.
        z: Samples as the network receives them.
        labels: Their labels, +-1.
        lam: Their multipliers.
        basis: Directions (k, d) of the shift, by default the constant one.

    Returns:
        The shift and its :func:`shift_residual`.
    """
    weight, bias, unexplained, total = _first_layer_sums(checkpoint, z, labels, lam)
    basis = torch.ones(1, weight.shape[1]).to(weight) if basis is None else basis.to(weight)
    # Both residuals, unexplained + total u^T and bias - total + W u, are linear in u.
    columns = [torch.cat([torch.outer(total, v).flatten(), weight @ v]) for v in basis]
    target = torch.cat([unexplained.flatten(), bias - total])
    a = torch.linalg.lstsq(torch.stack(columns, 1), -target[:, None]).solution[:, 0]
    u = a @ basis
    return u, shift_residual(checkpoint, z, labels, lam, u)


def shift_residual(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor, shift: float | Tensor
) -> float:
    """Return the relative first-layer KKT residual of samples z - u in the network with b' + W u.

    Args:
        checkpoint: The network with the shift.
        z: Samples as the network receives them.
        labels: Their labels, +-1.
        lam: Their multipliers.
        shift: u, a number for every pixel or a vector.

    Returns:
        The relative residual.
    """
    weight, bias, unexplained, total = _first_layer_sums(checkpoint, z, labels, lam)
    u = torch.as_tensor(shift, dtype=weight.dtype).flatten().expand(weight.shape[1])
    restored = bias + weight @ u
    residual = (unexplained + torch.outer(total, u)).square().sum() + (
        bias - total + weight @ u
    ).square().sum()
    return float((residual / (weight.square().sum() + restored.square().sum())).sqrt())


def infer_mean(checkpoint: Network) -> Tensor:
    """Infer the mean of the inputs as the network received them: W^T b / |b|^2, (d,).

    W = sum_i c_i x_i^T and b = sum_i c_i, so this is the m that minimizes |W - b m^T|. If there was a
    shift during training, the mean includes it.

    Args:
        checkpoint: The network.

    Returns:
        (d,) mean.

    Raises:
        InputError: If the bias is zero.
    """
    weight, bias = _read_first_layer(checkpoint)
    power = bias.square().sum()
    if power == 0:
        raise InputError(
            "The mean is inferred from the first layer's bias, which is zero here.",
            "Pass the mean with --mean.",
        )
    return weight.T @ bias / power


def _judge_consensus(
    imbalance: float, p_value: float | None, neurons: int, limit: float | None = None
) -> tuple[bool, str]:
    if neurons < 2:
        return False, "no consensus: a single neuron has a root for any shift"
    if imbalance <= EXACT_BALANCE:
        return True, f"a common root of {neurons} distinct neurons"
    if p_value is None and limit is None:
        return False, f"no consensus: no common root of {neurons} neurons, too few to test"
    if imbalance > NEAR_BALANCE:
        return False, f"no consensus: the neurons stay unbalanced by {imbalance:.2g} at best"
    if p_value is not None and p_value > LEVEL:
        return False, f"no consensus: permuted biases are balanced as well, p = {p_value:.2g}"
    return True, f"{neurons} neurons balanced to {imbalance:.2g} by the same shift"


def _first_layer_sums(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return W, b', W - sum_i d_i z_i^T and sum_i d_i."""
    weight, bias = _read_first_layer(checkpoint)
    model = _require_mlp(checkpoint)
    if model.linears[-1].out_features != 1 or lam.ndim != 1:
        raise InputError(
            "A shift can only be fitted to candidates of a network with one output.",
            "Call infer_constant_shift for other networks.",
        )
    z = z.double().flatten(1)
    with torch.no_grad():
        d = model.signals(model.trace(z), (lam.double() * labels.double())[:, None])[0]
    return weight, bias, weight - d.T @ z, d.sum(0)


def _require_mlp(checkpoint: Network) -> MLP:
    model = dense_chain(checkpoint.double_module)
    if model is None or len(model.linears) < 2:
        raise InputError(
            f"Shift inference needs an MLP with hidden neurons; this network is {checkpoint.arch}.",
            "Use an attack without shift inference.",
        )
    return model


def _read_first_layer(checkpoint: Network) -> tuple[Tensor, Tensor]:
    """Return W and b' in float64."""
    if not {WEIGHT, BIAS} <= checkpoint.theta.keys():
        raise InputError(
            f"A shift changes the first layer's bias of an MLP; {checkpoint.arch} has no such bias.",
            "Use an MLP with a first-layer bias.",
        )
    return checkpoint.theta[WEIGHT].double().flatten(1), checkpoint.theta[BIAS].double()
