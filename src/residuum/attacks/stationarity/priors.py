"""Priors: penalties on candidates and stored multipliers, each a small frozen class.

Shapes: x holds candidates (R, m, *shape) as the network receives them, and lam holds stored multipliers
(R, m, ...). A penalty returns one number per run.

To add a prior, write one class and add one line to ``PRIORS``. A prior in this repository also needs its name
in ``settings.PRIOR_NAMES`` and a naive reference implementation in ``tests/unit/attacks/test_priors.py``.
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

FADE = 1e-3  # share of its weight that a sparse prior has at the last step
STEEPNESS = 20.0  # differences below 1/20 of the value range count as noise, larger ones as edges
MAX_MULTIPLIER = 2.0  # larger stored multipliers do not increase the weight of a candidate


@dataclass(frozen=True)
class Prior:
    """Base class without a penalty.

    Attributes:
        needs: Fields of ``Knowledge`` that the prior requires.
        weight: Weight of the penalty in the loss, a number or (R,) if runs differ.
        lam_min: Smallest multiplier without a penalty, a number or (R, 1, ...) if runs differ.
        knowledge: What the attacker knows.

    Raises:
        InputError: If the attacker does not know what the prior requires.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    weight: float | Tensor = 1.0
    lam_min: float | Tensor = 0.0
    knowledge: Knowledge | None = None

    def __post_init__(self) -> None:
        missing = [n for n in self.needs if getattr(self.knowledge, n, None) is None]
        if missing:
            raise InputError(
                f"Prior {type(self).__name__} needs to know {', '.join(missing)}.",
                "Pass it (for example --value-range 0,1), or choose another prior.",
            )

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the penalty of every run.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            The penalties (R,), before the multiplication by the weight.
        """
        return x.new_zeros(len(x))

    def weight_at(self, share: float | Tensor) -> float | Tensor:
        """Return the weight after this share of the steps."""
        return self.weight

    def explicit_derivatives(self, x: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the penalty and its derivatives, if there is a method faster than autograd.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            Penalty (R,) and its derivatives in x and in lam, None to use automatic differentiation.
        """
        return None


class ValueBox(Prior):
    """Squared distance of x plus the known mean to the known value range."""

    needs: ClassVar[tuple[str, ...]] = ("value_range",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return sum relu(low - x)^2 + relu(x - high)^2.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            The penalties (R,), before the multiplication by the weight.
        """
        assert self.knowledge is not None
        low, high = box(self.knowledge, x)
        return _sum((low - x).clamp(min=0).square() + (x - high).clamp(min=0).square())


class UnitBox(Prior):
    """Squared distance to [-1, 1], as in the released code of Haim et al. 2022."""

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return sum relu(|x| - 1)^2.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            The penalties (R,), before the multiplication by the weight.
        """
        return _sum((x.abs() - 1).clamp(min=0).square())


class PixelBox(Prior):
    """Mean distance to [0, 1], as in the text of Haim et al. 2022."""

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the distance, averaged over pixels and summed over candidates.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            The penalties (R,), before the multiplication by the weight.
        """
        hinge = (-x).clamp(min=0) + (x - 1).clamp(min=0)
        return hinge.flatten(2).mean(2).sum(1)


class MeanBox(Prior):
    """m times the mean squared distance to the known range, as in the released code of Loo et al. 2024."""

    needs: ClassVar[tuple[str, ...]] = ("value_range",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the penalty of ``ValueBox`` over the number of pixels.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            The penalties (R,), before the multiplication by the weight.
        """
        return ValueBox(knowledge=self.knowledge).penalty(x, lam) / x[0, 0].numel()


class MultiplierFloor(Prior):
    """Penalty for stored multipliers below ``lam_min`` (Haim et al. 2022, weight 5)."""

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return sum relu(lam_min - lam)^2.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            The penalties (R,), before the multiplication by the weight.
        """
        return _sum((self.lam_min - lam).clamp(min=0).square())


class TotalVariation(Prior):
    """Sum of absolute differences of neighboring pixels."""

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the anisotropic total variation, smoothed at 1e-3 so that its gradient exists.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            The penalties (R,), before the multiplication by the weight.
        """
        horizontal, vertical = (
            _sum((d.square() + 1e-6).sqrt()) for d in _differences(x, self.knowledge)
        )
        return horizontal + vertical


class HighFrequency(Prior):
    """Sum of squared differences of neighboring pixels, a quadratic smoothness prior."""

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the sum of squared differences.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            The penalties (R,), before the multiplication by the weight.
        """
        horizontal, vertical = (_sum(d.square()) for d in _differences(x, self.knowledge))
        return horizontal + vertical


class SparseGradients(Prior):
    """log cosh of the differences of neighboring pixels, because most images are piecewise flat.

    Unlike a quadratic prior, this prior distinguishes an image from a mixture of images. It is strong at
    first, so that it decides the basin of the search. At the last step, FADE of its weight is left, so that
    it does not blur the images. Channels change together, so a difference is a length over channels.

    The penalty is a mean over pixels, in units of the value range, and a mean over candidates, weighted by
    their multipliers. The same weight therefore suits every image size, value range and number of candidates.
    The loss without candidates is about 1.
    """

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return mean_i min(|mu_i|, MAX_MULTIPLIER) sum_axis mean log cosh(k |d|) / k, k = STEEPNESS.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            The penalties (R,), before the multiplication by the weight.
        """
        rough = x.new_zeros(x.shape[:2])
        for d in self._steps(x):
            u = STEEPNESS * _length(d)
            rough = (
                rough + (u + torch.log1p(torch.exp(-2 * u)) - math.log(2)).mean((2, 3)) / STEEPNESS
            )
        return (_candidate_weights(lam)[0] * rough).mean(1)

    def weight_at(self, share: float | Tensor) -> float | Tensor:
        """Return the weight, which falls geometrically to FADE of its initial value."""
        return self.weight * FADE**share

    def explicit_derivatives(self, x: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return penalty and derivatives from tanh(k |d|) d / (channels |d|), 3 times as fast as autograd.

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            Penalty (R,) and its derivatives in x and in lam.
        """
        weights, slope = _candidate_weights(lam)
        rough, grad = x.new_zeros(x.shape[:2]), torch.zeros_like(x)
        images = grad.view(*x.shape[:2], *_image_shape(self.knowledge))
        for axis, d in zip((-1, -2), self._steps(x), strict=True):
            length = _length(d)
            u = STEEPNESS * length
            rough += (u + torch.log1p(torch.exp(-2 * u)) - math.log(2)).mean((2, 3)) / STEEPNESS
            pixels, channels = length.shape[-1] * length.shape[-2], d.shape[2]
            pull = u.tanh_().div_(length).mul_((weights / pixels / channels)[..., None, None])
            d.mul_(pull[:, :, None] / (self._range() * x.shape[1]))
            images.narrow(axis, 1, d.shape[axis]).add_(d)
            images.narrow(axis, 0, d.shape[axis]).sub_(d)
        candidate_rough = (rough / x.shape[1]).view(*x.shape[:2], *[1] * (lam.ndim - 2))
        return (weights * rough).mean(1), grad, candidate_rough * slope

    def _steps(self, x: Tensor) -> list[Tensor]:
        """Return differences (R, m, channels, height, width) in units of the value range."""
        return [
            d.reshape(*d.shape[:2], -1, *d.shape[-2:]) / self._range()
            for d in _differences(x, self.knowledge)
        ]

    def _range(self) -> float:
        assert self.knowledge is not None
        low, high = self.knowledge.value_range or (0.0, 1.0)
        return high - low


class TypedColumns(Prior):
    """Squared distance to the nearest row with the known column types, in the units of the columns.

    Types are integers and one-hot codes. Other columns have no penalty. The weight rises from FADE of its
    final value, because the nearest row is arbitrary early in the search.
    """

    needs: ClassVar[tuple[str, ...]] = ("columns",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return sum |v - nearest(v)|^2 with v = scale (x + mean).

        Args:
            x: Candidates (R, m, *shape).
            lam: Stored multipliers (R, m, ...).

        Returns:
            The penalties (R,), before the multiplication by the weight.
        """
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
        """Return the weight, which rises geometrically from FADE of its final value."""
        return self.weight * FADE ** (1 - share)


def penalty(priors: Sequence[Prior], x: Tensor, lam: Tensor, share: float | Tensor = 1.0) -> Tensor:
    """Return the weighted sum of all priors.

    Args:
        priors: The priors.
        x: Candidates (R, m, *shape).
        lam: Stored multipliers (R, m, ...).
        share: Share of the steps that is done.

    Returns:
        The penalty of every run (R,).
    """
    return sum((p.weight_at(share) * p.penalty(x, lam) for p in priors), x.new_zeros(len(x)))


def derivatives(
    priors: Sequence[Prior], x: Tensor, lam: Tensor, share: float | Tensor = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`penalty` and its derivatives.

    Args:
        priors: The priors.
        x: Candidates (R, m, *shape).
        lam: Stored multipliers (R, m, ...).
        share: Share of the steps that is done.

    Returns:
        The penalty of every run (R,), and its derivatives in x and in lam.
    """
    explicit = [(p, t) for p in priors if (t := p.explicit_derivatives(x, lam)) is not None]
    automatic = [p for p in priors if all(p is not q for q, _ in explicit)]
    with torch.enable_grad():
        xl, ll = x.detach().requires_grad_(), lam.detach().requires_grad_()
        total = penalty(automatic, xl, ll, share)
        gx, gl = torch.zeros_like(x), torch.zeros_like(lam)
        if automatic:
            gx, gl = torch.autograd.grad(
                total.sum(), (xl, ll), allow_unused=True, materialize_grads=True
            )
    total = total.detach()
    for p, (value, prior_x, prior_lam) in explicit:
        weight = p.weight_at(share)
        total = total + weight * value
        gx = gx + _expand(weight, gx) * prior_x
        gl = gl + _expand(weight, gl) * prior_lam
    return total, gx, gl


def _expand(weight: float | Tensor, like: Tensor) -> float | Tensor:
    """Return a weight, or the weights of runs (R,), so that it broadcasts against (R, m, ...)."""
    if isinstance(weight, Tensor) and weight.ndim:
        return weight.view(-1, *[1] * (like.ndim - 1))
    return weight


def box(knowledge: Knowledge, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds of a candidate as the network receives it.

    Args:
        knowledge: What the attacker knows, with a value range.
        x: Candidates (R, m, *shape).

    Returns:
        Lower and upper bounds that broadcast against x.
    """
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
            "Smoothness priors need images; these samples are vectors.", "Choose another prior."
        )
    return knowledge.shape


def _length(d: Tensor) -> Tensor:
    """Return the root mean square over channels (R, m, height, width), smooth at zero."""
    return (d.square().mean(2) + 1e-8).sqrt()


def _candidate_weights(lam: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight of every candidate (R, m), and its derivative in lam (R, m, ...).

    The weight is the sum of absolute stored multipliers, at most MAX_MULTIPLIER. Multipliers of some
    objectives can be negative, and a negative weight would reward rough images.

    Args:
        lam: Stored multipliers (R, m, ...).

    Returns:
        The weights and their derivatives.
    """
    sign = torch.where(lam < 0, -1.0, 1.0).to(lam.dtype)
    total = (sign * lam).reshape(*lam.shape[:2], -1).sum(-1)
    is_below = (total <= MAX_MULTIPLIER).to(lam.dtype)
    slope = sign * is_below.view(*is_below.shape, *[1] * (lam.ndim - 2))
    return total.clamp(max=MAX_MULTIPLIER), slope


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
