"""How far a sample can be split along a direction before its activation pattern changes.

A split replaces a sample x by x + alpha nu and x - beta nu, with a direction nu and lengths alpha and beta
(Refael et al. 2025, Theorems 5 and 8). A switch s_k is a function whose sign belongs to the activation
pattern, for example the input of a ReLU. The budgets of x are the largest lengths alpha and beta with which
both new samples keep the activation pattern of x. As long as the pattern does not change, every switch is
affine in x, so the budgets have exact formulas:

    alpha_max = smallest positive value of -s_k(x) / <grad s_k, nu> over all switches k
    beta_max  = the same with -nu in place of nu

These formulas hold for networks of any depth, and for any samples and weights. ``papers/refael2025.py`` has
the bounds on budgets that the paper prints, and corrected bounds.
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
    """How far n samples can move before their activation patterns change, each along its own direction nu.

    A switch is a function whose sign belongs to the activation pattern, for example the input of a ReLU.

    Attributes:
        alpha: (n,) distance that a sample can move along +nu, infinite if nothing limits the sample.
        beta: (n,) distance that a sample can move along -nu, infinite if nothing limits the sample.
        blocking: (n, K) mask of the K switches. True for those that change sign first if the sample moves
            along +nu or along -nu.
        kinks: (n, K) mask of the K switches. True for those that are zero at the sample and change along nu.
            If a sample has such switches, both distances are 0.
        switches: The values of all switches at the samples.
    """

    alpha: Tensor
    beta: Tensor
    blocking: Tensor
    kinks: Tensor
    switches: Switches

    @property
    def least(self) -> Tensor:
        """For each of n samples: the distance that it can move along the direction nu both ways."""
        return torch.minimum(self.alpha, self.beta)

    def names(self, i: int) -> str:
        """Return the names of the neurons that limit how far sample i can move.

        If the inputs of some neurons are exactly zero at the sample, these neurons limit it. Otherwise the
        limit comes from the neurons whose inputs change sign first if the sample moves to either side.
        """
        return self.switches.names(self.kinks[i] if self.kinks[i].any() else self.blocking[i])


@torch.no_grad()
def compute_exact_budgets(models: Sequence[nn.Module], x: Tensor, direction: Tensor) -> Budgets:
    """Compute how far samples can move along unit directions before their activation patterns change.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (n, *shape) samples.
        direction: (n, *shape) or (*shape) unit directions.

    Returns:
        The largest distances on both sides of each sample.
    """
    switches = compute_switches(models, x)
    value, slope = switches.values, compute_slopes(models, x, direction)
    largest_slopes = estimate_slope_sizes(models, x, switches.layers)
    changes_along_direction = slope.abs() > ROUNDING * largest_slopes
    norms = 1 + x.flatten(1).norm(dim=1, keepdim=True)
    is_kink = changes_along_direction & (value.abs() <= 10 * ROUNDING * largest_slopes * norms)
    signed_distance_to_zero = torch.where(
        changes_along_direction, -value / torch.where(changes_along_direction, slope, 1.0), math.inf
    )
    distances_ahead = torch.where(
        signed_distance_to_zero > 0, signed_distance_to_zero, math.inf
    ).masked_fill(is_kink, 0)
    distances_behind = torch.where(
        signed_distance_to_zero < 0, -signed_distance_to_zero, math.inf
    ).masked_fill(is_kink, 0)
    alpha, beta = (_least(side) for side in (distances_ahead, distances_behind))
    is_blocking = (distances_ahead <= alpha[:, None]) & alpha.isfinite()[:, None]
    is_blocking |= (distances_behind <= beta[:, None]) & beta.isfinite()[:, None]
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
            f"The direction in which a sample is split in two must have a positive finite length; got "
            f"{length}.",
            "Pass a direction that is returned by KKTSet.directions().",
            hypothesis="direction",
        )
    return flat_direction / length


def _least(distances: Tensor) -> Tensor:
    return (
        distances.amin(1) if distances.shape[1] else distances.new_full((len(distances),), math.inf)
    )
