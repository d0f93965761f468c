"""How far a sample can be split along a direction before its activation pattern changes.

Refael et al. 2025, Theorems 5 and 8. Inside a pattern every switch is affine in x, so the budgets

    alpha_max = min_k { -s_k(x) / <grad s_k, nu> : > 0 },    beta_max: the same along -nu

are exact, one-sided, and need no hypothesis on depth or on how good a KKT point is. The published
bounds on them, printed and corrected, are in ``papers/refael2025.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.theory.patterns import ROUNDING, HypothesisError, Switches, sizes, slopes, switches


@dataclass(frozen=True)
class Budgets:
    """Exact one-sided budgets of n samples, each along its own direction.

    alpha, beta: (n,) how far along +nu and -nu, infinite where nothing is in the way.
    blocking: (n, K) the switches that stop a sample first on either side.
    kinks: (n, K) switches the sample sits on and that the direction would move: both budgets are 0
        then.
    """

    alpha: Tensor
    beta: Tensor
    blocking: Tensor
    kinks: Tensor
    switches: Switches

    @property
    def least(self) -> Tensor:
        """(n,) the smaller side: how far a symmetric split can go."""
        return torch.minimum(self.alpha, self.beta)

    def names(self, i: int) -> str:
        """The neurons that stop sample i: all kinks it sits on, otherwise the first on each side."""
        return self.switches.names(self.kinks[i] if self.kinks[i].any() else self.blocking[i])


@torch.no_grad()
def exact_budgets(models: Sequence[nn.Module], x: Tensor, direction: Tensor) -> Budgets:
    """Budgets of x: (n, *shape) along unit directions (n, *shape) or (*shape)."""
    found = switches(models, x)
    value, slope = found.values, slopes(models, x, direction)
    size = sizes(models, x, found.layers)
    moves = slope.abs() > ROUNDING * size
    reach = 1 + x.flatten(1).norm(dim=1, keepdim=True)
    kinks = moves & (value.abs() <= 10 * ROUNDING * size * reach)
    step = torch.where(moves, -value / torch.where(moves, slope, 1.0), math.inf)
    ahead = torch.where(step > 0, step, math.inf).masked_fill(kinks, 0)
    behind = torch.where(step < 0, -step, math.inf).masked_fill(kinks, 0)
    alpha, beta = (_least(side) for side in (ahead, behind))
    stopped = (ahead <= alpha[:, None]) & alpha.isfinite()[:, None]
    stopped |= (behind <= beta[:, None]) & beta.isfinite()[:, None]
    return Budgets(alpha, beta, stopped, kinks, found)


def unit(direction: Tensor) -> Tensor:
    """(d,) the direction with length 1; one of zero length is refused."""
    flat = direction.flatten().double()
    length = float(flat.norm())
    if not 0 < length < math.inf:
        raise HypothesisError(
            "direction",
            f"A splitting direction must have a positive finite length; got {length}.",
            "Take one from residuum.theory.directions.",
        )
    return flat / length


def _least(steps: Tensor) -> Tensor:
    return steps.amin(1) if steps.shape[1] else steps.new_full((len(steps),), math.inf)
