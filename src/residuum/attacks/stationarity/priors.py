"""Priors: penalties on candidates and stored multipliers, each a small frozen class.

x: (R, m, *shape) candidates as the network receives them; lam: (R, m, ...) STORED multipliers.
A penalty returns one number per run. A new prior is one class and one line in ``PRIORS``; one of this
repository also has its name in ``settings.PRIOR_NAMES`` and a naive twin in ``tests/test_priors.py``.
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
    """Base: no penalty.

    needs: facts of ``Knowledge`` without which it refuses.
    weight: of the penalty in the loss; a number, or (R,) where runs differ.
    lam_min: the least multiplier that is wanted.
    knowledge: what the attacker was told.
    """

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

    def by_hand(self, x: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The penalty, and its derivatives in x and in lam, of a prior that is faster so."""
        return None


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
    """Sum of absolute differences of neighboring pixels."""

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Anisotropic; smoothed at 1e-3 so that its gradient exists."""
        parts = [_sum((d.square() + 1e-6).sqrt()) for d in _differences(x, self.knowledge)]
        return parts[0] + parts[1]


class HighFrequency(Prior):
    """Sum of squared differences of neighboring pixels: a quadratic smoothness prior."""

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Quadratic in x."""
        parts = [_sum(d.square()) for d in _differences(x, self.knowledge)]
        return parts[0] + parts[1]


class SparseGradients(Prior):
    """Images are flat almost everywhere: log cosh of neighboring pixels' differences, fading.

    A quadratic prior cannot tell a mixture of images from its parts, this one can; strong at first it
    chooses the basin, and with FADE of its weight left at the end it blurs nothing. Colors change
    together, so a difference is the length over channels. Mean over pixels, in units of the value
    range, and over candidates, each as far as it carries weight: it means the same for every image
    size, range and number of candidates, beside a loss that is 1 where nothing is explained.
    """

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """mean_i min(|mu_i|, CARRIES) sum_axis mean log cosh(STEEP |d|) / STEEP."""
        rough = x.new_zeros(x.shape[:2])
        for d in self._steps(x):
            u = STEEP * _length(d)
            rough = rough + (u + torch.log1p(torch.exp(-2 * u)) - math.log(2)).mean((2, 3)) / STEEP
        return (_carried(lam)[0] * rough).mean(1)

    def weight_at(self, share: float | Tensor) -> float | Tensor:
        """Geometric from the weight to FADE of it."""
        return self.weight * FADE**share

    def by_hand(self, x: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """A third of the time of automatic differentiation: tanh(STEEP |d|) d / (channels |d|)."""
        carried, slope = _carried(lam)
        rough, grad = x.new_zeros(x.shape[:2]), torch.zeros_like(x)
        images = grad.view(*x.shape[:2], *_image_shape(self.knowledge))
        for axis, d in zip((-1, -2), self._steps(x), strict=True):
            length = _length(d)
            u = STEEP * length
            rough += (u + torch.log1p(torch.exp(-2 * u)) - math.log(2)).mean((2, 3)) / STEEP
            pixels, channels = length.shape[-1] * length.shape[-2], d.shape[2]
            pull = u.tanh_().div_(length).mul_((carried / pixels / channels)[..., None, None])
            d.mul_(pull[:, :, None] / (self._range() * x.shape[1]))
            images.narrow(axis, 1, d.shape[axis]).add_(d)
            images.narrow(axis, 0, d.shape[axis]).sub_(d)
        each = (rough / x.shape[1]).view(*x.shape[:2], *[1] * (lam.ndim - 2))
        return (carried * rough).mean(1), grad, each * slope

    def _steps(self, x: Tensor) -> list[Tensor]:
        """(R, m, channels, height, width) differences in units of the value range."""
        return [
            d.reshape(*d.shape[:2], -1, *d.shape[-2:]) / self._range()
            for d in _differences(x, self.knowledge)
        ]

    def _range(self) -> float:
        assert self.knowledge is not None
        low, high = self.knowledge.value_range or (0.0, 1.0)
        return high - low


class TypedColumns(Prior):
    """Squared distance to the nearest row that the granted types of columns allow, in their own units.

    Whole numbers, and one 1 among zeros; other columns cost nothing. From FADE of its weight it rises:
    early on the nearest row is chance, at the end candidates are to be rows.
    """

    needs: ClassVar[tuple[str, ...]] = ("columns",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """sum |v - nearest(v)|^2, v = scale (x + mean)."""
        assert self.knowledge is not None
        mean = 0.0 if self.knowledge.mean is None else self.knowledge.mean.to(x).flatten()
        rows, total = x.flatten(2) + mean, x.new_zeros(len(x))
        for first, last, kind, scale in self.knowledge.typed_columns:
            v = scale * rows[:, :, first : last + 1]
            if kind == "integer":
                nearest = v.detach().round()
            else:
                nearest = torch.zeros_like(v).scatter(-1, v.argmax(-1, keepdim=True), 1.0)
            total = total + _sum((v - nearest).square())
        return total

    def weight_at(self, share: float | Tensor) -> float | Tensor:
        """Geometric from FADE of the weight to all of it."""
        return self.weight * FADE ** (1 - share)


def penalty(priors: Sequence[Prior], x: Tensor, lam: Tensor, share: float | Tensor = 1.0) -> Tensor:
    """(R,) of all priors; every prior is a sum over candidates. share: of the steps done."""
    return sum((p.weight_at(share) * p.penalty(x, lam) for p in priors), x.new_zeros(len(x)))


def derivatives(
    priors: Sequence[Prior], x: Tensor, lam: Tensor, share: float | Tensor = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`penalty` (R,), and its derivatives in x and in lam."""
    own = [(p, found) for p in priors if (found := p.by_hand(x, lam)) is not None]
    rest = [p for p in priors if all(p is not q for q, _ in own)]
    with torch.enable_grad():
        xl, ll = x.detach().requires_grad_(), lam.detach().requires_grad_()
        total = penalty(rest, xl, ll, share)
        gx, gl = torch.zeros_like(x), torch.zeros_like(lam)
        if rest:
            gx, gl = torch.autograd.grad(
                total.sum(), (xl, ll), allow_unused=True, materialize_grads=True
            )
    total = total.detach()
    for p, (value, own_x, own_lam) in own:
        weight = p.weight_at(share)
        total = total + weight * value
        gx, gl = (g + _each(weight, g) * part for g, part in ((gx, own_x), (gl, own_lam)))
    return total, gx, gl


def _each(weight: float | Tensor, like: Tensor) -> float | Tensor:
    """A weight, or weights of runs (R,), against (R, m, ...)."""
    if isinstance(weight, Tensor) and weight.ndim:
        return weight.view(-1, *[1] * (like.ndim - 1))
    return weight


def box(knowledge: Knowledge, x: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of a candidate as the network receives it, broadcastable to x."""
    bounds = knowledge.box(x[0, 0])
    assert bounds is not None
    return bounds


def _differences(x: Tensor, knowledge: Knowledge | None) -> list[Tensor]:
    images = x.reshape(*x.shape[:2], *_image_shape(knowledge))
    return [torch.diff(images, dim=-1), torch.diff(images, dim=-2)]


def _image_shape(knowledge: Knowledge | None) -> tuple[int, ...]:
    assert knowledge is not None
    assert knowledge.shape is not None
    if len(knowledge.shape) < 2:
        raise InputError(
            "Smoothness needs images; samples here are vectors.", "Choose another prior."
        )
    return knowledge.shape


def _length(d: Tensor) -> Tensor:
    """(R, m, height, width) root mean square over channels, smooth at zero."""
    return (d.square().mean(2) + 1e-8).sqrt()


def _carried(lam: Tensor) -> tuple[Tensor, Tensor]:
    """(R, m) sizes of stored multipliers up to CARRIES, and (R, m, ...) their derivatives in lam.

    Sizes: some objectives leave the sign free, and a negative weight would reward what is penalized.
    """
    sign = torch.where(lam < 0, -1.0, 1.0).to(lam.dtype)
    total = (sign * lam).reshape(*lam.shape[:2], -1).sum(-1)
    free = (total <= CARRIES).to(lam.dtype)
    return total.clamp(max=CARRIES), sign * free.view(*free.shape, *[1] * (lam.ndim - 2))


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
    "columns": TypedColumns,
}
PRIORS = Table("prior", PRIORS)
