"""Exact KKT points in closed form, which need no training and no tolerance.

ReLU networks: Samples form groups. The neurons of group g are active only on that group, and all samples of
a group have the same label. With z = (x, 1), or x without a bias, the Gram matrix K of the z of a group,
q = 1' K^-1 1, and depth L:

    u = q^(1/2L),   lam = u^(2-2L) K^-1 1,   (w, b) = u^(L-1) sum_i lam_i z_i,
    inner weights u,   output weight y u          -> every sample on margin 1

In two-layer networks, a group can have several neurons: (c_j w, c_j b), output c_j y u, sum c_j^2 = 1.

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
    """A network and samples that satisfy the KKT conditions exactly.

    Attributes:
        model: The network.
        x: Samples, (n, d).
        y: Labels -1/+1, (n,).
        lam: Multipliers, (n,).
        group: Group of every sample, (n,).
    """

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
    """Return samples around the corners of a simplex, in a random rotation.

    Args:
        groups: Number of corners.
        size: Number of samples per corner.
        dim: Dimension of the samples.
        seed: Seed of the rotation.
        radius: Size of the simplex.
        noise: Distance of the samples from the corners.

    Returns:
        Samples (n, d) and their groups (n,).
    """
    centers = torch.eye(groups, dtype=torch.float64) - 1 / groups
    centers = centers / centers.norm(dim=1, keepdim=True) * radius * math.sqrt(max(1, groups - 1))
    x = torch.zeros(groups * size, dim, dtype=torch.float64)
    group = torch.arange(groups).repeat_interleave(size)
    x[:, :groups] = centers[group]
    for i in range(size):
        x[i::size, groups + i] = noise * (1 + 0.5 * i)
    return x @ _rotation(dim, seed), group


def triangle(radius: float = 2.5, spread: float = 0.5) -> ExactPoint:
    """Return a point with three groups of two samples at the corners of a triangle, with labels +, -, +.

    Args:
        radius: Distance of the corners from zero.
        spread: Distance of the samples from the corners.

    Returns:
        The point.
    """
    angles = torch.tensor([90.0, 210.0, 330.0], dtype=torch.float64).deg2rad()
    out = torch.stack([angles.cos(), angles.sin()], 1)
    side = torch.stack([-angles.sin(), angles.cos()], 1)
    x = torch.cat([radius * out + spread * side, radius * out - 1.4 * spread * side])
    return relu_point_on(x, torch.arange(3).repeat(2))


def relu_point(
    depth: int = 2, groups: int = 2, size: int = 3, dim: int = 12, width: int = 1, seed: int = 0
) -> ExactPoint:
    """Return an exact point of a binary network with a bias in the first layer.

    Args:
        depth: Number of layers.
        groups: Number of groups.
        size: Number of samples per group.
        dim: Dimension of the samples.
        width: Number of neurons per group.
        seed: Seed of samples and weights.

    Returns:
        The point.
    """
    return relu_point_on(*grouped_samples(groups, size, dim, seed), depth, width, seed)


def steep_point(shrink: float = 1.0) -> ExactPoint:
    """Return a point of two groups without a bias, with samples scaled by c and weights by 1/sqrt(c)."""
    x, group = grouped_samples(2, 3, 12, 0)
    return relu_point_on(shrink * x, group, bias=False)


def relu_point_on(
    x: Tensor, group: Tensor, depth: int = 2, width: int = 1, seed: int = 0, bias: bool = True
) -> ExactPoint:
    """Return the exact point of samples whose groups do not activate the neurons of other groups.

    Args:
        x: Samples, (n, d).
        group: Group of every sample, (n,). The labels of the groups alternate.
        depth: Number of layers.
        width: Number of neurons per group.
        seed: Seed of the weights.
        bias: Whether the first layer has a bias.

    Returns:
        The point.
    """
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
    """Return an exact point of sum_j a_j c t^alpha on orthonormal samples.

    Args:
        n: Number of samples.
        d: Dimension of the samples.
        alpha: The exponent.
        labels: "mixed", or "one" for equal labels.
        seed: Seed of the samples.
        leading: The coefficient c.

    Returns:
        The point.
    """
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
    sample = torch.arange(len(x)).repeat_interleave(copies)
    weight = x[sample] / (math.sqrt(2) * lam[sample])[:, None]
    return weight, y[sample] / (2 * lam[sample]), lam


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
    """Return rows e (m, n) of signed subsets, with singletons ``copies`` times, and their mu (m,)."""
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
    """Return a copy of a network with noise in proportion to the size of every parameter.

    Args:
        model: The network.
        size: Size of the noise over that of the parameter.
        seed: Seed of the noise.

    Returns:
        The copy.
    """
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.data += size * noise * p.data.norm() / p.numel() ** 0.5
    return model


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers in float64.

    Args:
        *shape: Shape of the tensor.
        seed: Seed of the numbers.

    Returns:
        The numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _rotation(dim: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(dim, dim, seed=seed))[0]
