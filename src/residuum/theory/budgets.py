"""How far a sample can be split along a direction before its activation pattern changes.

A split replaces a sample x by x + alpha nu and x - beta nu, with a direction nu and lengths alpha and beta
(Refael et al. 2025, Theorems 5 and 8). A switch s_k is a function whose sign belongs to the activation
pattern, for example the input of a ReLU. Inside a pattern every switch is affine in x. So the largest lengths

    alpha_max = min_k { -s_k(x) / <grad s_k, nu> : > 0 },    beta_max: the same along -nu

are exact. They are called the budgets of x, one for each side. Budgets need no hypothesis on the depth of the
network or on how exact a KKT point is. The published bounds on budgets, as printed and corrected, are in
``papers/refael2025.py``.
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
    """How far n samples can move inside their activation patterns, each along a separate direction nu.

    A switch is a function whose sign belongs to the activation pattern, for example the input of a ReLU.

    Attributes:
        alpha: (n,) distance that a sample can move along +nu, infinite if nothing limits the sample.
        beta: (n,) distance that a sample can move along -nu, infinite if nothing limits the sample.
        blocking: (n, K) mask of the switches, of K, that change sign first on either side.
        kinks: (n, K) mask of the switches that are zero at the sample and that the direction would move. If
            a sample has such switches, both distances are 0.
        switches: The values of all switches at the samples.
    """

    alpha: Tensor
    beta: Tensor
    blocking: Tensor
    kinks: Tensor
    switches: Switches

    @property
    def least(self) -> Tensor:
        """(n,) the smaller of both distances, i.e. how far a sample can move in both directions."""
        return torch.minimum(self.alpha, self.beta)

    def names(self, i: int) -> str:
        """Return the names of the neurons that limit sample i.

        These are all neurons that are exactly zero at the sample. If there are none, these are the first
        neurons that change sign on each side.
        """
        return self.switches.names(self.kinks[i] if self.kinks[i].any() else self.blocking[i])


@torch.no_grad()
def compute_exact_budgets(models: Sequence[nn.Module], x: Tensor, direction: Tensor) -> Budgets:
    """Compute how far samples can move along unit directions inside their activation patterns.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (n, *shape) samples.
        direction: (n, *shape) or (*shape) unit directions.

    Returns:
        The largest distances on both sides of each sample.
    """
    switches = compute_switches(models, x)
    value, slope = switches.values, compute_slopes(models, x, direction)
    slope_sizes = estimate_slope_sizes(models, x, switches.layers)
    is_moved = slope.abs() > ROUNDING * slope_sizes
    norms = 1 + x.flatten(1).norm(dim=1, keepdim=True)
    is_kink = is_moved & (value.abs() <= 10 * ROUNDING * slope_sizes * norms)
    steps = torch.where(is_moved, -value / torch.where(is_moved, slope, 1.0), math.inf)
    steps_ahead = torch.where(steps > 0, steps, math.inf).masked_fill(is_kink, 0)
    steps_behind = torch.where(steps < 0, -steps, math.inf).masked_fill(is_kink, 0)
    alpha, beta = (_least(side) for side in (steps_ahead, steps_behind))
    is_blocking = (steps_ahead <= alpha[:, None]) & alpha.isfinite()[:, None]
    is_blocking |= (steps_behind <= beta[:, None]) & beta.isfinite()[:, None]
    return Budgets(alpha, beta, is_blocking, is_kink, switches)


def unit(direction: Tensor) -> Tensor:
    """Return a direction, flattened and scaled to length 1.

    Args:
        direction: A direction of any shape with d entries.

    Returns:
        (d,) unit direction.

    Raises:
        HypothesisError: If the length of the direction is zero or not finite.
    """
    flat_direction = direction.flatten().double()
    length = float(flat_direction.norm())
    if not 0 < length < math.inf:
        raise HypothesisError(
            "direction",
            f"A splitting direction must have a positive finite length; got {length}.",
            "Pass a direction from residuum.theory.directions.",
        )
    return flat_direction / length


def _least(steps: Tensor) -> Tensor:
    return steps.amin(1) if steps.shape[1] else steps.new_full((len(steps),), math.inf)
