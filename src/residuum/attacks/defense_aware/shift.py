"""Undo a secret shift of the inputs from the weights alone.

Refael et al. 2025, App. D rewrite the biases, b' = b - W u, so that the network answers on x + u what
it answered on x. At a KKT point every hidden neuron is balanced, |w_j|^2 + b_j^2 = v_j^2 (v_j the norm
of its outgoing weights), and b' is not. The attacker looks for the u that balances all neurons again:

    e_j(u) = |w_j|^2 + (b'_j + <w_j, u>)^2 - v_j^2,        u = argmin sum_j e_j(u)^2

For a constant shift u = c 1 the sum is a polynomial of degree four in c, minimized exactly. Heavy
neurons weigh most in it, and they are the ones that training balanced best. With samples z_i = x_i + u
at hand the stationarity of the first layer is another equation for u, linear in it:

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

EXACT = 1e-6  # relative imbalance that only a common root explains
BALANCED = 0.05  # relative imbalance of a network that training left near balance
DRAWS, LEVEL = 199, 0.01  # permutations of the biases (least p 1/200), and the p that is believed
FEW = 8  # different neurons below which biases cannot be permuted in enough ways
SAME = 1e-6  # of the largest: neurons whose probes differ by less are copies of one
RANK = 1e-2  # singular values of W, over the largest, that a vector shift is sought along
STARTS, TIE = 24, 1.5  # choices of signs tried; minima within this factor of the least are rivals
WEIGHT, BIAS = "layers.0.weight", "layers.0.bias"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ShiftInference:
    """A shift read off the weights.

    shift: per pixel, the constant c or (d,) the part of u that the first layer sees.
    imbalance, before: sqrt(sum e_j^2 / sum v_j^4) with and without it.
    uncertainty: standard error of c that the remaining imbalance amounts to.
    p_value: share of permuted biases that are balanced as well (None: too few neurons to permute).
    neurons: different ones.
    consensus: True if the shift is to be believed.
    reason: why (not).
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
        """Return plain values, of a vector its norm and its size per pixel."""
        figures = {k: v for k, v in vars(self).items() if k != "shift"}
        if isinstance(self.shift, Tensor):
            norm = float(self.shift.norm())
            per_pixel = norm / math.sqrt(self.shift.numel())
            return {"kind": "vector", "shift_norm": norm, "shift_per_pixel": per_pixel, **figures}
        return {"kind": "constant", "shift_per_pixel": self.shift, **figures}


def move_biases(checkpoint: Network, shift: float | Tensor) -> Network:
    """Return the network with b + W u; u is one number for every pixel, or a vector. 0 changes no bit."""
    weight, bias = _first(checkpoint)
    u = torch.as_tensor(shift, dtype=torch.float64).flatten().expand(weight.shape[1])
    moved = (bias + weight @ u).to(checkpoint.theta[BIAS])
    return checkpoint.replace(theta={**checkpoint.theta, BIAS: moved})


@dataclass(frozen=True, eq=False)
class Neurons:
    """First hidden layer: W (h, d), b' (h,) and squared norms v^2 (h,) of the outgoing weights.

    offset: neurons may share one offset from balance, because there are deeper layers.
    """

    weight: Array
    bias: Array
    outgoing: Array
    offset: bool

    @classmethod
    def of(cls, network: Network) -> Neurons:
        """Read the first hidden layer of an MLP."""
        weight, bias = _first(network)
        upper = _mlp(network).linears[1:]
        outgoing = upper[0].weight.detach().square().sum(0)
        return cls(weight.numpy(), bias.numpy(), outgoing.numpy(), len(upper) > 1)

    @property
    def deficit(self) -> Array:
        """|w_j|^2 - v_j^2, (h,)."""
        return np.square(self.weight).sum(1) - self.outgoing

    @property
    def scale(self) -> float:
        """sqrt(sum v_j^4)."""
        return math.sqrt(float(np.square(self.outgoing).sum())) or 1.0

    @property
    def different(self) -> int:
        """The number of neurons that are no multiples of one another."""
        v2 = self.outgoing
        live = v2 > 1e-12 * v2.max() if v2.max() > 0 else v2 > 0
        rows = (
            np.concatenate([self.weight, self.bias[:, None]], 1)[live] / np.sqrt(v2[live])[:, None]
        )
        if not len(rows):
            return 0
        probe = np.sort(rows @ np.random.default_rng(0).standard_normal(rows.shape[1]))
        return 1 + int((np.diff(probe) > SAME * np.abs(probe).max()).sum())

    def centered(self, values: Array) -> Array:
        """Values of the neurons (..., h) less their common offset."""
        return values - values.mean(-1, keepdims=True) if self.offset else values

    def minimize(self, bias: Array, seen: Array) -> tuple[Array, Array]:
        """Minimize sum_j (|w_j|^2 - v_j^2 + (b_j + c s_j)^2)^2 over c, for every row b of ``bias`` (P, h).

        If deeper layers hardly left their random initialization, outgoing norms do not match incoming
        ones but lie close to one another: then each square is taken less the common offset.

        Returns:
            The minimizers and the minima, (P,) each.
        """
        square = np.broadcast_to(seen**2, bias.shape)
        a0, a1, a2 = map(self.centered, (self.deficit + bias**2, 2 * bias * seen, square))
        q = np.einsum("aph,bph->pab", np.stack([a0, a1, a2]), np.stack([a0, a1, a2]))
        quartic = np.stack(
            [q[:, 2, 2], 2 * q[:, 1, 2], 2 * q[:, 0, 2] + q[:, 1, 1], 2 * q[:, 0, 1], q[:, 0, 0]], 1
        )
        best, least = np.zeros(len(bias)), quartic[:, 4].copy()
        for i, row in enumerate(quartic):
            roots = np.roots(np.polyder(row))
            for c in roots[np.abs(roots.imag) <= 1e-6 * (1 + np.abs(roots))].real:
                value = float(np.square(a0[i] + c * (a1[i] + c * a2[i])).sum())
                if value < least[i]:
                    best[i], least[i] = c, value
        return best, least


def infer_constant_shift(checkpoint: Network, *, seed: int = 0) -> ShiftInference:
    """Infer the c that balances b'_j + c <w_j, 1> over all neurons, or find no consensus.

    Training leaves |w_j|^2 + b_j^2 = v_j^2, below deeper layers up to an offset common to the neurons.
    Rewritten biases break it by e_j(c) = |w_j|^2 + (b'_j + c <w_j, 1>)^2 - v_j^2, a quadratic per neuron
    with one common root. The minimum of sum_j e_j(c)^2, a quartic in c, is exact. Biases permuted among
    neurons show whether the root is common or the best of chance: p is the share of permutations that
    are balanced as well. ``uncertainty`` is the error of c that the remaining imbalance amounts to.

    Raises:
        InputError: If the network is no MLP with biases in its first layer.
    """
    neurons = Neurons.of(checkpoint)
    bias, deficit, seen = neurons.bias, neurons.deficit, neurons.weight.sum(1)
    (c,), (least,) = neurons.minimize(bias[None], seen)
    error = neurons.centered(deficit + (bias + c * seen) ** 2)
    slope = neurons.centered(2 * (bias + c * seen) * seen)
    power = float(np.square(slope).sum())
    different, p_value = neurons.different, None
    if different >= FEW:
        rng = np.random.default_rng(seed)
        permuted = np.stack([rng.permutation(bias) for _ in range(DRAWS)])
        _, minima = neurons.minimize(permuted, seen)
        p_value = (1 + int((minima <= least).sum())) / (1 + DRAWS)
    imbalance = math.sqrt(max(least, 0.0)) / neurons.scale
    consensus, reason = _verdict(imbalance, p_value, different)
    return ShiftInference(
        shift=float(c),
        imbalance=imbalance,
        before=float(np.linalg.norm(neurons.centered(deficit + bias**2))) / neurons.scale,
        uncertainty=float(np.linalg.norm(error * slope)) / power if power > 0 else None,
        p_value=p_value,
        neurons=different,
        consensus=consensus,
        reason=reason,
    )


def infer_vector_shift(checkpoint: Network, *, seed: int = 0) -> ShiftInference:
    """Infer any vector u from |b'_j + <w_j, u>| = sqrt(v_j^2 - |w_j|^2), by least squares.

    The sign of every neuron is unknown, so many choices of signs are tried. More different neurons than
    directions settle it. If several shifts balance the network equally well, there is no consensus.

    Raises:
        InputError: If the network is no MLP with biases in its first layer.
    """
    neurons = Neurons.of(checkpoint)
    bias, deficit, scale = neurons.bias, neurons.deficit, neurons.scale
    _, S, Vt = np.linalg.svd(neurons.weight, full_matrices=False)
    basis = Vt[RANK * S[0] < S] if S[0] > 0 else Vt[:0]
    seen, root = neurons.weight @ basis.T, np.sqrt(np.maximum(-deficit, 0))

    def balance(sign: Array) -> tuple[float, Array]:
        """Return the imbalance and the balanced biases next to a choice of signs."""
        fit = least_squares(
            lambda a: (deficit + (bias + seen @ a) ** 2) / scale,
            np.linalg.lstsq(seen, sign * root - bias, rcond=None)[0],
            jac=lambda a: 2 * (bias + seen @ a)[:, None] * seen / scale,
            max_nfev=60,
            method="lm",
        )
        return math.sqrt(2 * fit.cost), bias + seen @ fit.x

    rng = np.random.default_rng(seed)
    signs = [np.ones_like(bias), -np.ones_like(bias), np.where(bias < 0, -1.0, 1.0)]
    signs += [np.sign(seen @ rng.standard_normal(len(basis))) for _ in range(STARTS - len(signs))]
    minima = sorted(map(balance, signs), key=lambda pair: pair[0])
    least, restored = minima[0]
    different = neurons.different
    consensus, reason = _verdict(least, None, different, limit=BALANCED)
    size = np.linalg.norm(restored) or 1.0
    rivals = [b for value, b in minima if value <= max(TIE * least, EXACT)]
    if consensus and max(np.linalg.norm(b - restored) for b in rivals) > 0.1 * size:
        consensus, reason = False, "no consensus: other signs balance the neurons as well"
    before = np.square(neurons.weight).sum(1) + bias**2 - neurons.outgoing
    return ShiftInference(
        shift=torch.from_numpy(basis.T @ np.linalg.lstsq(seen, restored - bias, rcond=None)[0]),
        imbalance=least,
        before=float(np.linalg.norm(before)) / scale,
        uncertainty=None,
        p_value=None,
        neurons=different,
        consensus=consensus,
        reason=reason,
    )


def fit_shift(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor, basis: Tensor | None = None
) -> tuple[Tensor, float]:
    """Fit the shift u to the first layer's stationarity at samples z.

    The weights miss total u^T and the biases W u. Both are linear in u, so u is a least-squares solution.
    Balance is not assumed; samples are needed, which the two functions above do without.

    Args:
        checkpoint: The network with the shift.
        z: Samples as the network receives them.
        labels: Their labels, +-1.
        lam: Their multipliers.
        basis: Directions (k, d) of the shift, by default the constant one.

    Returns:
        The shift and its :func:`shift_residual`.

    Raises:
        InputError: If the network has several outputs.
    """
    weight, bias, rest, total = _first_layer_sums(checkpoint, z, labels, lam)
    basis = torch.ones(1, weight.shape[1]).to(weight) if basis is None else basis.to(weight)
    # Both residuals, rest + total u^T and bias - total + W u, are linear in u.
    columns = [torch.cat([torch.outer(total, v).flatten(), weight @ v]) for v in basis]
    target = torch.cat([rest.flatten(), bias - total])
    a = torch.linalg.lstsq(torch.stack(columns, 1), -target[:, None]).solution[:, 0]
    u = a @ basis
    return u, shift_residual(checkpoint, z, labels, lam, u)


def shift_residual(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor, shift: float | Tensor
) -> float:
    """Return the relative first-layer KKT residual of samples z - u in the network with b' + W u."""
    weight, bias, rest, total = _first_layer_sums(checkpoint, z, labels, lam)
    u = torch.as_tensor(shift, dtype=weight.dtype).flatten().expand(weight.shape[1])
    restored = bias + weight @ u
    residual = (rest + torch.outer(total, u)).square().sum() + (
        bias - total + weight @ u
    ).square().sum()
    return float((residual / (weight.square().sum() + restored.square().sum())).sqrt())


def infer_mean(checkpoint: Network) -> Tensor:
    """Infer the mean of the inputs as the network received them: W^T b / |b|^2, (d,).

    W = sum_i c_i x_i^T and b = sum_i c_i, so this is the m that minimizes |W - b m^T|. A shift that was
    there during training is part of it.

    Raises:
        InputError: If the bias is zero.
    """
    weight, bias = _first(checkpoint)
    power = bias.square().sum()
    if power == 0:
        raise InputError(
            "A mean is read off the first layer's bias; this one is zero.", "Grant the mean."
        )
    return weight.T @ bias / power


def _verdict(
    imbalance: float, p_value: float | None, neurons: int, limit: float | None = None
) -> tuple[bool, str]:
    if neurons < 2:
        return False, "no consensus: one neuron alone has a root whatever the shift was"
    if imbalance <= EXACT:
        return True, f"a common root of {neurons} different neurons"
    if p_value is None and limit is None:
        return False, f"no consensus: no common root of {neurons} neurons, too few to test"
    if imbalance > BALANCED:
        return False, f"no consensus: the neurons stay unbalanced by {imbalance:.2g} at best"
    if p_value is not None and p_value > LEVEL:
        return False, f"no consensus: permuted biases are balanced as well, p = {p_value:.2g}"
    return True, f"{neurons} neurons balanced to {imbalance:.2g} by the same shift"


def _first_layer_sums(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return W, b', W - sum_i d_i z_i^T and sum_i d_i."""
    weight, bias = _first(checkpoint)
    model = _mlp(checkpoint)
    if model.linears[-1].out_features != 1 or lam.ndim != 1:
        raise InputError(
            "A shift is fitted to candidates of a network with one output.",
            "Use infer_constant_shift for others.",
        )
    z = z.double().flatten(1)
    with torch.no_grad():
        d = model.signals(model.trace(z), (lam.double() * labels.double())[:, None])[0]
    return weight, bias, weight - d.T @ z, d.sum(0)


def _mlp(checkpoint: Network) -> MLP:
    model = dense_chain(checkpoint.double_module)
    if model is None or len(model.linears) < 2:
        raise InputError(
            f"Balance is a property of hidden neurons of an MLP; this network is {checkpoint.arch}.",
            "Leave shift inference out.",
        )
    return model


def _first(checkpoint: Network) -> tuple[Tensor, Tensor]:
    """Return W and b' in float64."""
    if not {WEIGHT, BIAS} <= checkpoint.theta.keys():
        raise InputError(
            f"A shift lives in the first layer's bias of an MLP; {checkpoint.arch} has none.",
            "Choose an MLP with a first-layer bias.",
        )
    return checkpoint.theta[WEIGHT].double().flatten(1), checkpoint.theta[BIAS].double()
