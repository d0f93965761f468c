"""Priors: penalties on candidates and stored multipliers, each a small frozen class.

x: (R, m, *shape) candidates as the network receives them; lam: (R, m, ...) STORED multipliers.
A penalty returns one number per run. A new prior is one class and one line in ``PRIORS``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from residuum.errors import InputError
from residuum.plugins import Table
from residuum.records import Knowledge

FADE = 1e-3  # of a sparse prior's weight left at the last step
STEEP = 20.0  # differences below 1/20 of the value range count as noise, those above as edges
CARRIES = 2.0  # stored multiplier from which a candidate counts no further


@dataclass(frozen=True)
class Prior:
    """Base: no penalty."""

    needs: ClassVar[tuple[str, ...]] = ()
    weight: float | Tensor = 1.0  # a number, or (R,) where runs differ
    lam_min: float | Tensor = 0.0
    knowledge: Knowledge | None = None

    def __post_init__(self) -> None:
        missing = [n for n in self.needs if getattr(self.knowledge, n, None) is None]
        if missing:
            raise InputError(
                f"Prior {type(self).__name__} needs to know {', '.join(missing)}.",
                "Grant it (--value-range 0,1 for instance), or choose another prior.",
            )

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """(R,) zeros."""
        return x.new_zeros(len(x))

    def weight_at(self, share: float | Tensor) -> float | Tensor:
        """The weight when this share of the steps is done."""
        return self.weight


class ValueBox(Prior):
    """Squared distance to the known value range, the known mean added back."""

    needs: ClassVar[tuple[str, ...]] = ("value_range",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """sum relu(low - x)^2 + relu(x - high)^2."""
        assert self.knowledge is not None
        low, high = box(self.knowledge, x)
        return _sum((low - x).clamp(min=0).square() + (x - high).clamp(min=0).square())


class UnitBox(Prior):
    """sum relu(|x| - 1)^2, as released with Haim et al. 2022."""

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Zero inside [-1, 1]."""
        return _sum((x.abs() - 1).clamp(min=0).square())


class PixelBox(Prior):
    """mean of the linear hinge outside [0, 1], as in the text of Haim et al. 2022."""

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Averaged over pixels, summed over candidates."""
        hinge = (-x).clamp(min=0) + (x - 1).clamp(min=0)
        return hinge.flatten(2).mean(2).sum(1)


class MeanBox(Prior):
    """m times the mean squared hinge outside the known range, as released with Loo et al. 2024."""

    needs: ClassVar[tuple[str, ...]] = ("value_range",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """ValueBox over the number of pixels."""
        return ValueBox(knowledge=self.knowledge).penalty(x, lam) / x[0, 0].numel()


class MultiplierFloor(Prior):
    """sum relu(lam_min - lam)^2 on stored multipliers (Haim et al. 2022, weight 5)."""

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Zero above lam_min."""
        return _sum((self.lam_min - lam).clamp(min=0).square())


class TotalVariation(Prior):
    """Sum of absolute differences of neighbouring pixels."""

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Anisotropic; smoothed at 1e-3 so that its gradient exists."""
        parts = [_sum((d.square() + 1e-6).sqrt()) for d in _differences(x, self.knowledge)]
        return parts[0] + parts[1]


class HighFrequency(Prior):
    """Sum of squared differences of neighbouring pixels: a quadratic smoothness prior."""

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Quadratic in x."""
        parts = [_sum(d.square()) for d in _differences(x, self.knowledge)]
        return parts[0] + parts[1]


class SparseGradients(Prior):
    """Images are flat almost everywhere: log cosh of neighbouring pixels' differences, fading.

    A quadratic prior cannot tell a mixture of images from its parts, this one can; strong at first it
    chooses the basin, and with FADE of its weight left at the end it blurs nothing. Mean over pixels,
    in units of the value range, and over candidates, each as far as it carries weight: it means the
    same for every image size, range and number of candidates, beside a loss that is 1 at the start.
    """

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """mean_i min(mu_i, CARRIES) mean log cosh(STEEP d) / STEEP over differences d."""
        assert self.knowledge is not None
        low, high = self.knowledge.value_range or (0.0, 1.0)
        rough = x.new_zeros(x.shape[:2])
        for d in _differences(x, self.knowledge):
            u = (d.flatten(2) * (STEEP / (high - low))).abs()
            rough = rough + (u + torch.log1p(torch.exp(-2 * u)) - math.log(2)).mean(-1) / STEEP
        carried = lam.reshape(*lam.shape[:2], -1).sum(-1).clamp(max=CARRIES)
        return (carried * rough).mean(1)

    def weight_at(self, share: float | Tensor) -> float | Tensor:
        """Geometric from the weight to FADE of it."""
        return self.weight * FADE**share


def penalty(
    priors: Sequence[Prior], x: Tensor, lam: Tensor, share: float | Tensor = 1.0
) -> Tensor:
    """(R,) of all priors; every prior is a sum over candidates. share: of the steps done."""
    return sum((p.weight_at(share) * p.penalty(x, lam) for p in priors), x.new_zeros(len(x)))


def box(knowledge: Knowledge, x: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of a candidate as the network receives it, broadcastable to x."""
    bounds = knowledge.box(x[0, 0])
    assert bounds is not None
    return bounds


def _differences(x: Tensor, knowledge: Knowledge | None) -> list[Tensor]:
    assert knowledge is not None
    assert knowledge.shape is not None
    images = x.reshape(*x.shape[:2], *knowledge.shape)
    if len(knowledge.shape) < 2:
        raise InputError(
            "Smoothness needs images; samples here are vectors.", "Choose another prior."
        )
    return [torch.diff(images, dim=-1), torch.diff(images, dim=-2)]


def _sum(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1)


PRIORS: dict[str, type[Prior]] = {
    "none": Prior,
    "value-box": ValueBox,
    "haim2022-box": UnitBox,
    "haim2022-text-box": PixelBox,
    "loo2024-box": MeanBox,
    "multiplier-floor": MultiplierFloor,
    "total-variation": TotalVariation,
    "high-frequency": HighFrequency,
    "sparse-gradients": SparseGradients,
}
PRIORS = Table("prior", PRIORS)
