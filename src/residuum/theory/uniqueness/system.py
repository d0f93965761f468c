"""The system whose null space says what is ambiguous, and the change that a pair makes.

    r(x, lam) = target - sum_i grad_theta <u_i, Phi(x_i)>,      u_i = sum_{rows r of i} lam_r c_r

Every layer's part of r is divided by that layer's norm. Inside an activation pattern grad Phi is
affine in x, so r depends on the candidates of one pattern through their moments sum u_i and
sum u_i x_i^T alone: not only to first order. Two halves of a candidate that move against each other
with equal gates leave both moments as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp

from residuum.networks import MLP, dense_chain
from residuum.stationarity import Rows, Theta, by_layer, norm, parameters, weighted_gradient
from residuum.theory.rows import constraint_rows

TIED = 0.1  # rivals within this share of the best one count, as in the attack on several classes


@dataclass(frozen=True)
class System:
    """Candidates x (m, *shape), rows with multipliers lam (R,), scales 1/||theta_l|| by parameter."""

    model: nn.Module
    x: Tensor
    rows: Rows
    lam: Tensor
    scales: dict[str, float]

    @property
    def u(self) -> Tensor:
        """(m, C) covectors, multipliers included."""
        return self.rows.combine(self.lam, len(self.x))

    @property
    def weight(self) -> Tensor:
        """(m,) sum of the absolute multipliers of each candidate."""
        return self.lam.new_zeros(len(self.x)).index_add(0, self.rows.index, self.lam.abs())

    @property
    def unknowns(self) -> int:
        """Pixels and multipliers."""
        return self.x.numel() + len(self.lam)

    def change(self, i: int, a: Tensor) -> float:
        """Change of the residual when the halves of candidate i go to x + a and x - a."""
        x, u = self.x[i], self.u[i]
        if (chain := dense_chain(self.model)) is not None:
            return _mlp_change(chain, self.scales, x, a, u)
        points, weights = torch.stack([x + a, x - a, x]), torch.stack([u / 2, u / 2, -u])
        return self._norm(weighted_gradient(self.model, points, weights))

    def products(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """v -> J v and w -> J^T w for the Jacobian of r in (x, lam), multipliers in relative units.

        A multiplier's unit is lam_r / ||(x_i, 1)||: its direction then compares with that of pixels.
        """
        theta, shape, n = parameters(self.model), self.x.shape, self.x.numel()
        size = (1 + self.x.flatten(1).square().sum(1)).sqrt()
        unit = self.lam / size[self.rows.index]

        def r(x: Tensor, lam: Tensor) -> Tensor:
            u = self.rows.combine(lam, len(x))

            def inner(t: Theta) -> Tensor:
                return (u * functional_call(self.model, t, (x,))).sum()

            parts = grad(inner)(theta)
            return torch.cat([-self.scales[k] * parts[k].flatten() for k in theta])

        def forward(v: Tensor) -> Tensor:
            tangents = (v[:n].reshape(shape), unit * v[n:])
            return jvp(r, (self.x, self.lam), tangents)[1]

        def backward(w: Tensor) -> Tensor:
            x, lam = vjp(r, self.x, self.lam)[1](w)
            return torch.cat([x.flatten(), unit * lam])

        return forward, backward

    def _norm(self, r: Theta) -> float:
        return norm({name: self.scales[name] * t for name, t in r.items()})


def build_system(
    model: nn.Module, x: Tensor, labels: Tensor, lam: Tensor, task: str, outputs: Tensor
) -> System:
    """Rows of the candidates for one multiplier each, or (m, C): per rival, per output."""
    theta = parameters(model)
    scales: dict[str, float] = {}
    for names in by_layer(theta).values():
        size = norm({name: theta[name] for name in names})
        scales |= dict.fromkeys(names, 1 / size if size > 0 else 1.0)
    if task == "binary":
        rows = Rows(
            torch.arange(len(x), device=x.device), torch.where(labels > 0, 1.0, -1.0)[:, None].to(x)
        )
        return System(model, x, rows, lam.reshape(len(x)), scales)
    lam = lam.reshape(len(x), -1)
    rule = "best" if lam.shape[1] == 1 else "tied"
    rows = constraint_rows(outputs.cpu(), labels.cpu().long() if task == "multiclass" else labels,
                           task, rule, TIED)  # fmt: skip
    rows = Rows(rows.index.to(x.device), rows.covectors.to(x))
    if task == "multiclass":
        column = (rows.covectors < 0).double().argmax(1) if rule == "tied" else 0 * rows.index
    else:
        column = rows.covectors.argmax(1)
    return System(model, x, rows, lam[rows.index, column], scales)


@torch.no_grad()
def _mlp_change(model: MLP, scales: dict[str, float], x: Tensor, a: Tensor, u: Tensor) -> float:
    """By differences: with d+- = d + e+-, z+- = z + g+- (signals d, inputs z of a layer) the change is

        1/2 [(e+ + e-) z^T + d (g+ + g-)^T + e+ g+^T + e- g-^T],

    exactly 0 but for rounding where no gate changes; its norm by inner products of these vectors.
    """
    points = torch.stack([x, x + a, x - a]).flatten(1)
    trace = model.trace(points)
    signals = model.signals(trace, u.expand(3, -1))
    total = 0.0
    for i, layer in enumerate(model.linears):
        d, z = signals[i], trace.inputs[i]
        if layer.bias is not None:
            z = torch.cat([z, z.new_ones(3, 1)], 1)
        e, g = d[1:] - d[0], z[1:] - z[0]
        left = torch.stack([e[0] + e[1], d[0], e[0], e[1]])
        right = torch.stack([z[0], g[0] + g[1], g[0], g[1]])
        square = float(((left @ left.T) * (right @ right.T)).sum()) / 4
        total += max(square, 0.0) * scales[f"layers.{i}.weight"] ** 2
    return math.sqrt(total)
