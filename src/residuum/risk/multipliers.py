"""Multipliers of the owner's records in the layers that training left its trace in.

    lam = argmin_{lam >= 0} || target - sum_r lam_r g_r ||

The exact answer comes from the Gram matrix and active-set NNLS (``theory.multipliers``). Past ``EXACT``
rows, whose Gram matrix would not fit, the same problem is descended without it: accelerated projected
gradients (Beck and Teboulle 2009; restarts: O'Donoghue and Candes 2015) on lam_r |g_r|. From zero, so
that where several multipliers explain the target equally well (more rows than parameters) the answer is
near the smallest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.risk.gradients import Gradients
from residuum.stationarity import Theta
from residuum.theory import multipliers as exact

EXACT = 1500
ITERATIONS, POWER = 400, 20
TOLERANCE = 1e-4  # of the largest projected gradient at zero
Watcher = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Multipliers:
    """lam: (R,); gap: what is left of the optimality conditions, relative; method: how it was found."""

    lam: Tensor
    gap: float
    method: str


def fit(
    gradients: Gradients, target: Theta, rows: int, free: bool, watch: Watcher | None = None
) -> Multipliers:
    """The multipliers that explain ``target`` best, nonnegative unless ``free``."""
    inner = gradients.project(target)
    if rows <= EXACT:
        gram = gradients.gram()
        factor = exact.factor_gram(gram.cpu(), inner.cpu())
        lam = exact.solve(factor, free).to(inner)
        return Multipliers(lam, _gap(lam, inner - gram @ lam, inner, free), "exact")
    lam = descend(gradients, inner, free, watch)
    left = inner - gradients.project(gradients.combine(lam))
    return Multipliers(lam, _gap(lam, left, inner, free), "descent")


def descend(
    gradients: Gradients, inner: Tensor, free: bool, watch: Watcher | None = None
) -> Tensor:
    """Accelerated projected gradients without the Gram matrix, records scaled to equal size."""
    size = gradients.squares().sqrt()
    scale = torch.where(size > 1e-12 * size.max(), 1 / size.clamp(min=1e-300), 0.0)

    def product(z: Tensor) -> Tensor:
        return scale * gradients.project(gradients.combine(scale * z))

    goal = scale * inner
    top = torch.ones_like(goal) / len(goal) ** 0.5
    largest = goal.new_ones(())
    for _ in range(POWER):
        top = product(top)
        largest = top.norm()
        top = top / largest.clamp(min=1e-300)
    step = 1 / (1.1 * largest.clamp(min=1e-300))  # the power method stays below the largest
    z = before = torch.zeros_like(goal)
    momentum, floor = 1.0, TOLERANCE * float(goal.abs().max())
    for k in range(ITERATIONS):
        if watch is not None and k % 10 == 0:
            watch(k, ITERATIONS, "multipliers")
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = z + (momentum - 1) / following * (z - before)
        slope = goal - product(ahead)
        moved = ahead + step * slope
        moved = moved if free else moved.clamp(min=0)
        if float((slope * (moved - z)).sum()) < 0:  # momentum points uphill: begin it anew
            following = 1.0
        before, z, momentum = z, moved, following
        active = slope.abs() if free else torch.where(z > 0, slope.abs(), slope.clamp(min=0))
        if float(active.max()) <= floor:
            break
    return scale * z


def _gap(lam: Tensor, left: Tensor, inner: Tensor, free: bool) -> float:
    """Largest violation of <g_r, r> = 0 on the support and <= 0 off it, over the largest <g_r, target>."""
    off = left.abs() if free else torch.where(lam > 0, left.abs(), left.clamp(min=0))
    return float(off.max() / inner.abs().max().clamp(min=1e-300))
