"""Exact KKT points, built in closed form: no training, no tolerance to argue about.

ReLU networks: groups of samples; the neurons of group g are active on that group alone, and all
labels of a group agree. With z = (x, 1), or x without a bias, Gram matrix K of a group's z,
q = 1' K^-1 1, depth L:

    u = q^(1/2L),   lam = u^(2-2L) K^-1 1,   (w, b) = u^(L-1) sum_i lam_i z_i,
    inner weights u,   output weight y u          -> every sample on margin 1

Two-layer groups may spread over several neurons: (c_j w, c_j b), output c_j y u, sum c_j^2 = 1.

Polynomial networks sum_j a_j c t^alpha on orthonormal samples, b_i = lam_i y_i:

    alpha = 1    W_j = a_j f,  f = sum_i b_i x_i of length 1,  lam_i = 1 / sqrt(n),  sum a_j^2 = sqrt(n)
    alpha = 2    W_j = x_i / (sqrt(2) lam_i),  a_j = 1 / (2 b_i),  lam_i = (k_i / 4)^(1/3), k_i neurons each
    alpha >= 3   with k_i = lam_i^(-1/(alpha-2)), neurons s w for w = sum_{i in I} e_i k_i x_i over subsets
                 I: for odd alpha singletons and pairs with e = y, for even alpha up to three samples of one
                 label with every choice of signs. f(w) = mu w, s = (alpha |w|^2)^(-1/(2 alpha-2)),
                 a = mu / (alpha s^(alpha-2)), and margin 1 reads k_i^alpha sum_{I with i} s_I^2 = alpha,
                 a contraction in k
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.networks import MLP, Polynomial, PolynomialNetwork
from residuum.theory.kkt_sets import KKTSet


@dataclass(frozen=True)
class ExactPoint:
    """A network and samples that satisfy the KKT conditions exactly; lam: one per row."""

    model: Any
    x: Tensor
    y: Tensor
    lam: Tensor
    group: Tensor

    @property
    def b(self) -> Tensor:
        """Signed multipliers lam_i y_i."""
        return self.lam * self.y

    @property
    def set(self) -> KKTSet:
        """The samples with their multipliers."""
        return KKTSet.from_samples(self.model, self.x, self.y, self.lam)


def grouped_samples(
    groups: int, size: int, dim: int, seed: int, radius: float = 2.5, noise: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Samples around the corners of a simplex, in a random rotation. Returns x (n, d), group (n,)."""
    centers = torch.eye(groups, dtype=torch.float64) - 1 / groups
    centers = centers / centers.norm(dim=1, keepdim=True) * radius * math.sqrt(max(1, groups - 1))
    x = torch.zeros(groups * size, dim, dtype=torch.float64)
    group = torch.arange(groups).repeat_interleave(size)
    x[:, :groups] = centers[group]
    for i in range(size):
        x[i::size, groups + i] = noise * (1 + 0.5 * i)
    return x @ _rotation(dim, seed), group


def triangle(radius: float = 2.5, spread: float = 0.5) -> ExactPoint:
    """Three groups of two samples in the plane, at the corners of a triangle; labels +, -, +."""
    angles = torch.tensor([90.0, 210.0, 330.0], dtype=torch.float64).deg2rad()
    out = torch.stack([angles.cos(), angles.sin()], 1)
    side = torch.stack([-angles.sin(), angles.cos()], 1)
    x = torch.cat([radius * out + spread * side, radius * out - 1.4 * spread * side])
    return relu_point_on(x, torch.arange(3).repeat(2))


def relu_point(
    depth: int = 2, groups: int = 2, size: int = 3, dim: int = 12, width: int = 1, seed: int = 0
) -> ExactPoint:
    """Binary exact point of a ``depth``-layer network with a first-layer bias."""
    return relu_point_on(*grouped_samples(groups, size, dim, seed), depth, width, seed)


def steep_point(shrink: float = 1.0) -> ExactPoint:
    """Two groups of three without a bias: samples c times as long need weights 1/sqrt(c) times as large."""
    x, group = grouped_samples(2, 3, 12, 0)
    return relu_point_on(shrink * x, group, bias=False)


def relu_point_on(
    x: Tensor, group: Tensor, depth: int = 2, width: int = 1, seed: int = 0, bias: bool = True
) -> ExactPoint:
    """The point on samples whose groups do not activate each other's neurons; labels alternate."""
    y = torch.where(group % 2 == 0, 1.0, -1.0).double()
    z = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) if bias else x
    generator = torch.Generator().manual_seed(seed)
    lam, first, inner, last = torch.zeros(len(x), dtype=x.dtype), [], [], []
    for g in range(int(group.max()) + 1):
        members = (group == g).nonzero()[:, 0]
        gram = z[members] @ z[members].T
        solved = torch.linalg.solve(gram, torch.ones(len(members), dtype=x.dtype))
        u = solved.sum() ** (1 / (2 * depth))
        lam[members] = u ** (2 - 2 * depth) * solved
        total = lam[members] @ z[members]
        spread = torch.rand(width if depth == 2 else 1, generator=generator).double() + 0.3
        for c in spread / spread.norm():
            first.append(c * u ** (depth - 1) * total)
            inner.append(u)
            last.append(c * y[members[0]] * u)
    assert (lam > 0).all()
    rows, dim = torch.stack(first), x.shape[1]
    model = MLP((dim, *[len(rows)] * (depth - 1), 1), "first" if bias else "none").double()
    middle = [torch.diag(torch.stack(inner))] * (depth - 2)
    weights = [rows[:, :dim], *middle, torch.stack(last)[None]]
    state = {f"layers.{i}.weight": weight for i, weight in enumerate(weights)}
    model.load_state_dict(state | ({"layers.0.bias": rows[:, dim]} if bias else {}))
    return ExactPoint(model, x, y, lam, group)


def polynomial_point(
    n: int, d: int, alpha: int, labels: str = "mixed", seed: int = 0, leading: float = 1.0
) -> ExactPoint:
    """Exact point of sum_j a_j c t^alpha on n of d orthonormal directions; labels mixed or one."""
    x = _rotation(d, seed)[:n]
    y = torch.ones(n, dtype=torch.float64)
    if labels == "mixed":
        y[::2] = -1
    weight, a, lam = {1: _linear, 2: _quadratic}.get(alpha, _higher)(x, y, alpha)
    scale = leading ** (-1 / (alpha + 1))
    model = PolynomialNetwork(d, len(a), Polynomial((*[0.0] * alpha, leading))).double()
    model.load_state_dict({"weight": scale * weight, "coefficient": scale * a})
    return ExactPoint(model, x, y, lam / (leading * scale ** (alpha - 1)), torch.arange(n))


def _linear(x: Tensor, y: Tensor, alpha: int) -> tuple[Tensor, Tensor, Tensor]:
    n = len(x)
    lam = torch.full((n,), n**-0.5, dtype=torch.float64)
    a = torch.tensor([0.8, -0.5, 0.3]).double()
    a = a / a.norm() * n**0.25
    return a[:, None] * ((y * lam) @ x), a, lam


def _quadratic(x: Tensor, y: Tensor, alpha: int) -> tuple[Tensor, Tensor, Tensor]:
    copies = 1 + torch.arange(len(x)) % 2
    lam = (copies / 4).double() ** (1 / 3)
    of = torch.arange(len(x)).repeat_interleave(copies)
    return x[of] / (math.sqrt(2) * lam[of])[:, None], y[of] / (2 * lam[of]), lam


def _higher(x: Tensor, y: Tensor, alpha: int) -> tuple[Tensor, Tensor, Tensor]:
    n = len(x)
    signs, mu = _neuron_signs(alpha, y, 1 + torch.arange(n) % 3)
    member, k = signs.abs(), torch.ones(n, dtype=torch.float64)
    for _ in range(2000):
        s = (alpha * (member @ k**2)) ** (-1 / (2 * alpha - 2))
        k, before = ((alpha / (s**2 @ member)) ** (1 / alpha) * k).sqrt(), k
        if (k / before - 1).abs().max() < 1e-16:
            break
    return s[:, None] * (signs * k) @ x, mu / (alpha * s ** (alpha - 2)), k ** (2 - alpha)


def _neuron_signs(alpha: int, y: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """Rows e (m, n) of signed subsets, singletons ``copies`` times, and their mu (m,)."""
    n, rows, mu = len(y), [], []
    for size in (1, 2) if alpha % 2 else (1, 2, 3):
        for subset in map(list, itertools.combinations(range(n), size)):
            chosen = y[subset]
            if alpha % 2 == 0 and (chosen != chosen[0]).any():
                continue
            flips = itertools.product((1.0, -1.0), repeat=size - 1) if alpha % 2 == 0 else [()]
            for flip in flips:
                row = torch.zeros(n, dtype=torch.float64)
                row[subset] = chosen if alpha % 2 else torch.tensor((1.0, *flip)).double()
                repeat = int(copies[subset[0]]) if size == 1 else 1
                rows += [row] * repeat
                mu += [1.0 if alpha % 2 else float(chosen[0])] * repeat
    return torch.stack(rows), torch.tensor(mu, dtype=torch.float64)


def noisy(model: Any, size: float, seed: int) -> Any:
    """A copy with noise of this share of every parameter's own size."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.data += size * noise * p.data.norm() / p.numel() ** 0.5
    return model


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _rotation(dim: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(dim, dim, seed=seed))[0]
