"""How far a sample can be split along a direction before its activation pattern changes.

Refael et al. 2025, Theorems 5 and 8. Inside a pattern every switch is affine in x. So the budgets

    alpha_max = min_k { -s_k(x) / <grad s_k, nu> : > 0 },    beta_max: the same along -nu

are exact and one-sided. They need no hypothesis on the depth or on how exact a KKT point is. The published
bounds on them, as printed and corrected, are in ``papers/refael2025.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.theory.patterns import (
    ROUNDING,
    HypothesisError,
    Switches,
    compute_slopes,
    compute_switches,
    estimate_slope_sizes,
)


@dataclass(frozen=True)
class Budgets:
    """Exact one-sided budgets of n samples, each along its own direction.

    Attributes:
        alpha: (n,) how far a sample can move along +nu, infinite if nothing limits it.
        beta: (n,) how far a sample can move along -nu.
        blocking: (n, K) switches that limit a sample first on either side.
        kinks: (n, K) switches that are zero at the sample and that the direction would move. If there are
            any, both budgets are 0.
        switches: The switches at the samples.
    """

    alpha: Tensor
    beta: Tensor
    blocking: Tensor
    kinks: Tensor
    switches: Switches

    @property
    def least(self) -> Tensor:
        """(n,) the smaller side, i.e. how far a symmetric split can go."""
        return torch.minimum(self.alpha, self.beta)

    def names(self, i: int) -> str:
        """Return the neurons that limit sample i: all its kinks, or else the first on each side."""
        return self.switches.names(self.kinks[i] if self.kinks[i].any() else self.blocking[i])


@torch.no_grad()
def compute_exact_budgets(models: Sequence[nn.Module], x: Tensor, direction: Tensor) -> Budgets:
    """Compute the budgets of samples along unit directions.

    Args:
        models: The network at every gradient point.
        x: (n, *shape) samples.
        direction: (n, *shape) or (*shape) unit directions.

    Returns:
        The budgets.
    """
    switches = compute_switches(models, x)
    value, slope = switches.values, compute_slopes(models, x, direction)
    size = estimate_slope_sizes(models, x, switches.layers)
    moves = slope.abs() > ROUNDING * size
    reach = 1 + x.flatten(1).norm(dim=1, keepdim=True)
    kinks = moves & (value.abs() <= 10 * ROUNDING * size * reach)
    step = torch.where(moves, -value / torch.where(moves, slope, 1.0), math.inf)
    ahead = torch.where(step > 0, step, math.inf).masked_fill(kinks, 0)
    behind = torch.where(step < 0, -step, math.inf).masked_fill(kinks, 0)
    alpha, beta = (_least(side) for side in (ahead, behind))
    stopped = (ahead <= alpha[:, None]) & alpha.isfinite()[:, None]
    stopped |= (behind <= beta[:, None]) & beta.isfinite()[:, None]
    return Budgets(alpha, beta, stopped, kinks, switches)


def unit(direction: Tensor) -> Tensor:
    """Return the (d,) direction with length 1.

    Args:
        direction: A direction.

    Returns:
        The unit direction.

    Raises:
        HypothesisError: If its length is zero or not finite.
    """
    flat = direction.flatten().double()
    length = float(flat.norm())
    if not 0 < length < math.inf:
        raise HypothesisError(
            "direction",
            f"A splitting direction must have a positive finite length; got {length}.",
            "Pass a direction from residuum.theory.directions.",
        )
    return flat / length


def _least(steps: Tensor) -> Tensor:
    return steps.amin(1) if steps.shape[1] else steps.new_full((len(steps),), math.inf)
