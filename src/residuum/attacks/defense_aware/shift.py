"""Undoing a secret shift of the inputs from the weights alone.

Refael et al. 2025, App. D rewrite the biases, b' = b - W u, so that the network answers on x + u what
it answered on x. At a KKT point every hidden neuron is balanced, |w_j|^2 + b_j^2 = v_j^2 (v_j the norm
of its outgoing weights), and b' is not. The attacker looks for the u that balances all neurons again:

    e_j(u) = |w_j|^2 + (b'_j + <w_j, u>)^2 - v_j^2,        u = argmin sum_j e_j(u)^2

For a constant shift u = c 1 the sum is a polynomial of degree four in c, minimised exactly. Heavy
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
    uncertainty: standard error of c that the left imbalance amounts to.
    p_value: share of permuted biases that are balanced as well (None: too few neurons to permute).
    neurons: different ones.
    consensus: whether to believe it.
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
        """Plain values; a vector by its norm and its size per pixel."""
        part = {k: v for k, v in vars(self).items() if k != "shift"}
        if isinstance(self.shift, Tensor):
            norm = float(self.shift.norm())
            per_pixel = norm / math.sqrt(self.shift.numel())
            return {"kind": "vector", "shift_norm": norm, "shift_per_pixel": per_pixel, **part}
        return {"kind": "constant", "shift_per_pixel": self.shift, **part}


def move_biases(checkpoint: Network, shift: float | Tensor) -> Network:
    """The checkpoint with b + W u; u one number for every pixel, or a vector. u = 0 changes no bit."""
    weight, bias = _first(checkpoint)
    u = torch.as_tensor(shift, dtype=torch.float64).flatten().expand(weight.shape[1])
    moved = (bias + weight @ u).to(checkpoint.theta[BIAS])
    return checkpoint.replace(theta={**checkpoint.theta, BIAS: moved})


def infer_constant_shift(checkpoint: Network, *, seed: int = 0) -> ShiftInference:
    """c with b'_j + c <w_j, 1> balanced over all neurons, or no consensus.

    Training leaves |w_j|^2 + b_j^2 = v_j^2, below deeper layers up to an offset common to the neurons;
    rewritten biases break it by e_j(c) = |w_j|^2 + (b'_j + c <w_j, 1>)^2 - v_j^2, a quadratic per
    neuron with one root in common. The minimum of sum_j e_j(c)^2, a quartic in c, is exact. Whether
    that root is common or the best of chance is asked of biases permuted among neurons: p is the share
    of permutations that are balanced as well. ``uncertainty`` is what the errors left amount to in c.
    """
    weight, bias, out = _neurons(checkpoint)
    seen = weight.sum(1)
    size = np.square(weight).sum(1) - out
    scale = math.sqrt(float(np.square(out).sum())) or 1.0
    common = len(_mlp(checkpoint).linears) > 2
    (c,), (least,) = _minimise(size, bias[None], seen, common)
    error = _centred(size + (bias + c * seen) ** 2, common)
    start = _centred(size + bias**2, common)
    slope = _centred(2 * (bias + c * seen) * seen, common)
    neurons = _different(weight, bias, out)
    p_value = None
    if neurons >= FEW:
        rng = np.random.default_rng(seed)
        permuted = np.stack([rng.permutation(bias) for _ in range(DRAWS)])
        _, values = _minimise(size, permuted, seen, common)
        p_value = (1 + int((values <= least).sum())) / (1 + DRAWS)
    imbalance = math.sqrt(max(least, 0.0)) / scale
    verdict, power = _verdict(imbalance, p_value, neurons), float(np.square(slope).sum())
    uncertainty = float(np.linalg.norm(error * slope)) / power if power > 0 else None
    before = float(np.linalg.norm(start)) / scale
    return ShiftInference(float(c), imbalance, before, uncertainty, p_value, neurons, *verdict)


def infer_vector_shift(checkpoint: Network, *, seed: int = 0) -> ShiftInference:
    """u, any vector, from |b'_j + <w_j, u>| = sqrt(v_j^2 - |w_j|^2): least squares from many signs.

    A sign per neuron is unknown. More different neurons than directions settle it; where several
    shifts balance the network equally well there is no consensus.
    """
    weight, bias, out = _neurons(checkpoint)
    scale = math.sqrt(float(np.square(out).sum())) or 1.0
    size, before = np.square(weight).sum(1) - out, np.square(weight).sum(1) + bias**2 - out
    _, values, rows = np.linalg.svd(weight, full_matrices=False)
    basis = rows[values > RANK * values[0]] if values[0] > 0 else rows[:0]
    seen, root = weight @ basis.T, np.sqrt(np.maximum(-size, 0))
    rng = np.random.default_rng(seed)
    signs = [np.ones_like(bias), -np.ones_like(bias), np.where(bias < 0, -1.0, 1.0)]
    signs += [np.sign(seen @ rng.standard_normal(len(basis))) for _ in range(STARTS - len(signs))]
    found: list[tuple[float, Array]] = []
    for sign in signs:
        start = np.linalg.lstsq(seen, sign * root - bias, rcond=None)[0]
        fit = least_squares(
            lambda a: (size + (bias + seen @ a) ** 2) / scale,
            start,
            jac=lambda a: 2 * (bias + seen @ a)[:, None] * seen / scale,
            max_nfev=60,
            method="lm",
        )
        found.append((math.sqrt(2 * fit.cost), bias + seen @ fit.x))
    found.sort(key=lambda pair: pair[0])
    least, restored = found[0]
    shift = basis.T @ np.linalg.lstsq(seen, restored - bias, rcond=None)[0]
    neurons = _different(weight, bias, out)
    consensus, reason = _verdict(least, None, neurons, limit=BALANCED)
    size_b = np.linalg.norm(restored) or 1.0
    rivals = [b for value, b in found if value <= max(TIE * least, EXACT)]
    if consensus and max(np.linalg.norm(b - restored) for b in rivals) > 0.1 * size_b:
        consensus, reason = False, "no consensus: other signs balance the neurons as well"
    solution = torch.from_numpy(shift), least, float(np.linalg.norm(before)) / scale
    return ShiftInference(*solution, None, None, neurons, consensus, reason)


def fit_shift(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor, basis: Tensor | None = None
) -> tuple[Tensor, float]:
    """The shift u = basis^T a that the first layer's stationarity asks for at samples z; its residual.

    Both parts of the residual are linear in u: weights miss total u^T, biases W u. So u is a
    least-squares solution, and no balance is assumed; it needs samples, where the two functions above
    need none.

    basis: (k, d) directions of the shift, by default the constant one. The residual is that of
        :func:`shift_residual` at the u returned.
    """
    weight, bias, rest, total = _first_layer_sums(checkpoint, z, labels, lam)
    basis = torch.ones(1, weight.shape[1]).to(weight) if basis is None else basis.to(weight)
    # r_W = rest + total u^T and r_b = bias - total + W u, both linear in u.
    columns = [torch.cat([torch.outer(total, v).flatten(), weight @ v]) for v in basis]
    against = torch.cat([rest.flatten(), bias - total])
    a = torch.linalg.lstsq(torch.stack(columns, 1), -against[:, None]).solution[:, 0]
    u = a @ basis
    return u, shift_residual(checkpoint, z, labels, lam, u)


def shift_residual(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor, shift: float | Tensor
) -> float:
    """First-layer KKT residual, over its norm, of samples z - u in the network with b' + W u."""
    weight, bias, rest, total = _first_layer_sums(checkpoint, z, labels, lam)
    u = torch.as_tensor(shift, dtype=weight.dtype).flatten().expand(weight.shape[1])
    rows, rest_b = rest + torch.outer(total, u), bias - total + weight @ u
    left = rows.square().sum() + rest_b.square().sum()
    size = weight.square().sum() + (bias + weight @ u).square().sum()
    return float((left / size).sqrt())


def infer_mean(checkpoint: Network) -> Tensor:
    """(d,) W^T b / |b|^2: the mean of the inputs as the network received them, weighted by its sums.

    W = sum_i c_i x_i^T and b = sum_i c_i, so this is the m that leaves least of W - b m^T. A shift
    that was there during training is part of it.
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


def _minimise(size: Array, bias: Array, seen: Array, common: bool) -> tuple[Array, Array]:
    """Per row of bias (P, h): argmin and minimum over c of sum_j (size + (bias + c seen)^2)^2.

    common: neurons may share one offset from balance. Where deeper layers hardly left their random
    start, outgoing norms do not match incoming ones but lie close to one another.
    """
    square = np.broadcast_to(seen**2, bias.shape)
    parts = [_centred(part, common) for part in (size + bias**2, 2 * bias * seen, square)]
    q = np.einsum("aph,bph->pab", np.stack(parts), np.stack(parts))
    quartic = np.stack(
        [q[:, 2, 2], 2 * q[:, 1, 2], 2 * q[:, 0, 2] + q[:, 1, 1], 2 * q[:, 0, 1], q[:, 0, 0]], 1
    )
    best = np.zeros(len(bias)), quartic[:, 4].copy()
    for i, row in enumerate(quartic):
        roots = np.roots(np.polyder(row))
        for c in roots[np.abs(roots.imag) <= 1e-6 * (1 + np.abs(roots))].real:
            value = float(np.square(parts[0][i] + c * (parts[1][i] + c * parts[2][i])).sum())
            if value < best[1][i]:
                best[0][i], best[1][i] = c, value
    return best


def _centred(values: Array, common: bool) -> Array:
    return values - values.mean(-1, keepdims=True) if common else values


def _different(weight: Array, bias: Array, out: Array) -> int:
    """Neurons that are no multiples of one another."""
    live = out > 1e-12 * out.max() if out.max() > 0 else out > 0
    rows = np.concatenate([weight, bias[:, None]], 1)[live] / np.sqrt(out[live])[:, None]
    if not len(rows):
        return 0
    probe = rows @ np.random.default_rng(0).standard_normal(rows.shape[1])
    probe = np.sort(probe)
    return 1 + int((np.diff(probe) > SAME * np.abs(probe).max()).sum())


def _first_layer_sums(
    checkpoint: Network, z: Tensor, labels: Tensor, lam: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W, b', W - sum_i d_i z_i^T and sum_i d_i."""
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


def _neurons(checkpoint: Network) -> tuple[Array, Array, Array]:
    """W (h, d), b' (h,) and the squared outgoing norms (h,)."""
    weight, bias = _first(checkpoint)
    upper = _mlp(checkpoint).linears[1].weight.detach()
    return weight.numpy(), bias.numpy(), upper.square().sum(0).numpy()


def _mlp(checkpoint: Network) -> MLP:
    model = dense_chain(checkpoint.double_module)
    if model is None or len(model.linears) < 2:
        raise InputError(
            f"Balance is a property of hidden neurons of an MLP; this network is {checkpoint.arch}.",
            "Leave shift inference out.",
        )
    return model


def _first(checkpoint: Network) -> tuple[Tensor, Tensor]:
    """W and b' in float64."""
    if not {WEIGHT, BIAS} <= checkpoint.theta.keys():
        raise InputError(
            f"A shift lives in the first layer's bias of an MLP; {checkpoint.arch} has none.",
            "Choose an MLP with a first-layer bias.",
        )
    return checkpoint.theta[WEIGHT].double().flatten(1), checkpoint.theta[BIAS].double()
