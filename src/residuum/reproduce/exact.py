"""Exact KKT points in closed form, for tables and figures that compare a statement with the truth.

Two-layer ReLU networks: groups of samples of one label, one neuron per group, active on its group
alone. With z = (x, 1), or x where there is no bias, Gram matrix K of a group's z, q = 1' K^-1 1:

    u = q^(1/4),   lam = K^-1 1 / u^2,   (w, b) = u sum_i lam_i z_i,   v = y u      (margin 1)

Polynomial networks sum_j a_j t^alpha on orthonormal samples, b_i = lam_i y_i:

    alpha = 1   W_j = a_j f,  f = sum_i b_i x_i of length 1,  b_i = y_i / sqrt(n),  sum a_j^2 = sqrt(n)
    alpha = 2   W_j = x_i / (sqrt(2) |b_i|),  a_j = 1 / (2 b_i),  |b_i| = (k_i / 4)^(1/3), k_i neurons each
    alpha = 3   neurons s w, w = sum_{i in I} y_i k_i x_i over single samples and pairs I, k_i = 1/lam_i,
                s = (3 |w|^2)^(-1/4), a = 1 / (3 s), and k_i^3 sum_{I with i} s_I^2 = 3
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.networks import MLP, Polynomial, PolynomialNetwork
from residuum.theory.kkt_sets import KKTSet


@dataclass(frozen=True)
class ReluPoint:
    """A two-layer network that is an exact KKT point of these samples, all on margin 1."""

    model: MLP
    x: Tensor
    y: Tensor
    lam: Tensor

    @property
    def set(self) -> KKTSet:
        """The samples with their multipliers."""
        return KKTSet.of(self.model, self.x, self.y, self.lam)


def relu_point(x: Tensor, y: Tensor, group: Tensor, bias: bool = True) -> ReluPoint:
    """The point on samples x (n, d) whose groups do not activate each other's neuron."""
    ones = torch.ones(len(x), 1, dtype=x.dtype)
    z = torch.cat([x, ones], 1) if bias else x
    groups = int(group.max()) + 1
    model = MLP((x.shape[1], groups, 1), "first" if bias else "none").double()
    lam = torch.zeros(len(x), dtype=x.dtype)
    with torch.no_grad():
        for g in range(groups):
            own = group == g
            solved = torch.linalg.solve(z[own] @ z[own].T, ones[own])[:, 0]
            u = solved.sum() ** 0.25
            lam[own] = solved / u**2
            row = u * lam[own] @ z[own]
            model.linears[0].weight[g] = row[: x.shape[1]]
            if bias:
                model.linears[0].bias[g] = row[-1]
            model.linears[1].weight[0, g] = u * y[own][0]
    return ReluPoint(model.requires_grad_(False), x, y, lam)


def triangle(radius: float = 2.5, spread: float = 0.5) -> ReluPoint:
    """Three groups of two samples in the plane, at the corners of a triangle; labels +, -, +."""
    angles = torch.tensor([90.0, 210.0, 330.0], dtype=torch.float64).deg2rad()
    out = torch.stack([angles.cos(), angles.sin()], 1)
    side = torch.stack([-angles.sin(), angles.cos()], 1)
    x = torch.cat([radius * out + spread * side, radius * out - 1.4 * spread * side])
    group = torch.arange(3).repeat(2)
    return relu_point(x, torch.tensor([1.0, -1.0, 1.0]).double().repeat(2), group)


def simplex(
    groups: int = 2, size: int = 3, dim: int = 12, *, bias: bool = True, scale: float = 1.0
) -> ReluPoint:
    """Groups around the corners of a simplex in a random rotation, labels alternating by group."""
    centres = torch.eye(groups, dtype=torch.float64) - 1 / groups
    centres = centres / centres.norm(dim=1, keepdim=True) * 2.5 * math.sqrt(max(1, groups - 1))
    group = torch.arange(groups).repeat_interleave(size)
    x = torch.zeros(groups * size, dim, dtype=torch.float64)
    x[:, :groups] = centres[group]
    for i in range(size):
        x[i::size, groups + i] = 0.3 * (1 + 0.5 * i)
    turn = torch.linalg.qr(_normal(dim, dim))[0]
    y = torch.where(group % 2 == 0, 1.0, -1.0).double()
    return relu_point(scale * x @ turn, y, group, bias)


@dataclass(frozen=True)
class PolynomialPoint:
    """A polynomial network that is an exact KKT point of these orthonormal samples."""

    model: PolynomialNetwork
    x: Tensor
    y: Tensor
    b: Tensor


def polynomial_point(n: int, d: int, alpha: int, seed: int = 0) -> PolynomialPoint:
    """The point of degree 1, 2 or 3 on n of d directions, labels alternating."""
    x = torch.linalg.qr(_normal(d, d, seed))[0][:n]
    y = torch.where(torch.arange(n) % 2 == 0, -1.0, 1.0).double()
    weight, a, b = {1: _linear, 2: _quadratic, 3: _cubic}[alpha](x, y)
    activation = Polynomial((*[0.0] * alpha, 1.0))
    model = PolynomialNetwork(d, len(a), activation).double()
    model.load_state_dict({"weight": weight, "coefficient": a})
    return PolynomialPoint(model.requires_grad_(False), x, y, b)


def as_mlp(point: PolynomialPoint) -> MLP:
    """The same function as an MLP without bias, which attacks step through fastest."""
    weight, a = point.model.weight.detach(), point.model.coefficient.detach()
    model = MLP((weight.shape[1], len(weight), 1), "none", point.model.activation).double()
    model.load_state_dict({"layers.0.weight": weight.clone(), "layers.1.weight": a[None].clone()})
    return model


def _linear(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = len(x)
    b = y / math.sqrt(n)
    a = torch.tensor([0.8, -0.5, 0.3]).double()
    a = a / a.norm() * n**0.25
    return a[:, None] * (b @ x), a, b


def _quadratic(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    copies = 1 + torch.arange(len(x)) % 2
    b = y * (copies / 4).double() ** (1 / 3)
    of = torch.arange(len(x)).repeat_interleave(copies)
    return x[of] / (math.sqrt(2) * b[of].abs())[:, None], 1 / (2 * b[of]), b


def _cubic(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = len(x)
    sets = [c for size in (1, 2) for c in itertools.combinations(range(n), size)]
    sets += [(i,) for i in range(n) for _ in range(i % 3)]  # multipliers then differ
    member = torch.zeros(len(sets), n, dtype=torch.float64)
    for row, chosen in zip(member, sets, strict=True):
        row[list(chosen)] = 1
    k = torch.ones(n, dtype=torch.float64)
    for _ in range(2000):
        s = (3 * (member @ k**2)) ** -0.25
        k, before = ((3 / (s**2 @ member)) ** (1 / 3) * k).sqrt(), k
        if float((k / before - 1).abs().max()) < 1e-16:
            break
    return s[:, None] * (member * y * k) @ x, 1 / (3 * s), y / k


def _normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)
