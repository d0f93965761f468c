"""Priors: penalties on candidates and their multipliers, each a small frozen class.

Shapes: x holds candidates (R, m, *shape) of R runs as the network receives them, and lam holds multipliers
(R, m, ...) as the solver stores them, divided by a scale. A penalty returns one number per run.

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

# A prior is a penalty whose weight can decrease during the search. This is its last weight divided by its
# first weight.
FADE = 1e-3
# Differences of neighboring pixels below 1/20 of the value range count as noise, larger ones as edges.
STEEPNESS = 20.0
# In a penalty, each candidate counts with its multiplier (weight), but at most with this value.
MAX_MULTIPLIER = 2.0


@dataclass(frozen=True)
class Prior:
    """Base class of the penalties on candidates and multipliers. The penalty of the base class is zero.

    Attributes:
        needs: Names of the fields of ``Knowledge`` that the prior requires.
        weight: Weight of the penalty in the loss: a number, or a tensor (R,) if runs differ.
        lam_min: Smallest multiplier without a penalty: a number, or a tensor (R, 1, ...) if runs differ.
        knowledge: What the attacker knows.

    Raises:
        InputError: If the attacker does not know what the prior requires.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    weight: float | Tensor = 1.0
    lam_min: float | Tensor = 0.0
    knowledge: Knowledge | None = None

    def __post_init__(self) -> None:
        missing_fields = [n for n in self.needs if getattr(self.knowledge, n, None) is None]
        if missing_fields:
            raise InputError(
                f"The prior {type(self).__name__}, a penalty on the reconstructed samples, needs values "
                f"that are not known: {', '.join(missing_fields)}.",
                "Pass the missing value (for example --value-range 0,1), or choose another prior.",
            )

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the penalty of every run on its candidates and their multipliers (weights).

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty of every run (R,), before the multiplication by the prior's weight.
        """
        return x.new_zeros(len(x))

    def weight_at(self, share: float | Tensor) -> float | Tensor:
        """Return the weight of the penalty after a share of the optimization steps, from 0 to 1."""
        return self.weight

    def explicit_derivatives(self, x: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the penalty and its derivatives by explicit formulas, if these are faster than autograd.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty (R,) and its derivatives in x and in lam, None if there are no explicit formulas.
        """
        return None


class ValueBox(Prior):
    """Penalty for candidates outside the known value range: their squared distance to this range.

    If the data were centered, the known mean is added to the candidates first.
    """

    needs: ClassVar[tuple[str, ...]] = ("value_range",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the penalty sum relu(low - x)^2 + relu(x - high)^2 for a value range from low to high.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty of every run (R,), before the multiplication by the prior's weight.
        """
        assert self.knowledge is not None
        low, high = box(self.knowledge, x)
        return _sum((low - x).clamp(min=0).square() + (x - high).clamp(min=0).square())


class UnitBox(Prior):
    """Penalty on the squared distance of pixels to [-1, 1], as in the released code of Haim et al. 2022."""

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the penalty sum relu(|x| - 1)^2 over all pixels x.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty of every run (R,), before the multiplication by the prior's weight.
        """
        return _sum((x.abs() - 1).clamp(min=0).square())


class PixelBox(Prior):
    """Penalty on the mean distance of pixels to [0, 1], as in the paper of Haim et al. 2022."""

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the distance of pixels to the range [0, 1], averaged over pixels and summed over candidates.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty of every run (R,), before the multiplication by the prior's weight.
        """
        distance = (-x).clamp(min=0) + (x - 1).clamp(min=0)
        return distance.flatten(2).mean(2).sum(1)


class MeanBox(Prior):
    """Penalty on the squared distance to the known value range, averaged over pixels.

    The penalty is summed over candidates, as in the released code of Loo et al. 2024.
    """

    needs: ClassVar[tuple[str, ...]] = ("value_range",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the squared distance to the value range, divided by the number of pixels of a candidate.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty of every run (R,), before the multiplication by the prior's weight.
        """
        return ValueBox(knowledge=self.knowledge).penalty(x, lam) / x[0, 0].numel()


class MultiplierFloor(Prior):
    """Penalty on multipliers (weights of the candidates) below ``lam_min``, as in Haim et al. 2022."""

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the penalty: the sum of relu(lam_min - lam)^2 over all multipliers lam.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty of every run (R,), before the multiplication by the prior's weight.
        """
        return _sum((self.lam_min - lam).clamp(min=0).square())


class TotalVariation(Prior):
    """Penalty on the sum of absolute differences of neighboring pixels."""

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the total variation of the candidates: the sum of absolute pixel differences.

        Differences below 1e-3 are smoothed, so that the gradient exists.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty of every run (R,), before the multiplication by the prior's weight.
        """
        horizontal, vertical = (
            _sum((d.square() + 1e-6).sqrt()) for d in _differences(x, self.knowledge)
        )
        return horizontal + vertical


class HighFrequency(Prior):
    """Penalty on the sum of squared differences of neighboring pixels."""

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the sum of squared differences of neighboring pixels.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty of every run (R,), before the multiplication by the prior's weight.
        """
        horizontal, vertical = (_sum(d.square()) for d in _differences(x, self.knowledge))
        return horizontal + vertical


class SparseGradients(Prior):
    """Penalty on differences of neighboring pixels, because most images are piecewise flat.

    The penalty of a difference is its log cosh.

    Unlike a quadratic prior, this prior distinguishes an image from a mixture of images. The prior is strong
    at first, so that it decides which local minimum the search approaches. At the last step, only the share
    FADE of its weight is left, because a strong prior would blur the images. Color channels usually change
    together, so a difference is the root mean square over channels.

    The penalty is a mean over pixels, in units of the value range, and a mean over candidates, weighted by
    their multipliers. One weight of the prior therefore suits every image size, value range and number of
    candidates.
    """

    needs: ClassVar[tuple[str, ...]] = ("shape",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the penalty mean_i min(|mu_i|, MAX_MULTIPLIER) sum_axis mean log cosh(k |d|) / k.

        mu_i are stored multipliers, d are differences of neighboring pixels along both axes, and k is
        STEEPNESS.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty of every run (R,), before the multiplication by the prior's weight.
        """
        roughness = x.new_zeros(x.shape[:2])
        for d in self._steps(x):
            steep_length = STEEPNESS * _length(d)
            roughness = (
                roughness
                + (steep_length + torch.log1p(torch.exp(-2 * steep_length)) - math.log(2)).mean(
                    (2, 3)
                )
                / STEEPNESS
            )
        return (_candidate_weights(lam)[0] * roughness).mean(1)

    def weight_at(self, share: float | Tensor) -> float | Tensor:
        """Return the weight of the penalty, which falls geometrically to FADE of its initial value."""
        return self.weight * FADE**share

    def explicit_derivatives(self, x: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the penalty and its derivatives by explicit formulas, three times as fast as autograd.

        The derivative in a pixel is a sum over the differences d to its neighbors. Each difference
        contributes tanh(k |d|) d / (channels |d|), with k = STEEPNESS.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty (R,) and its derivatives in x and in lam.
        """
        weights, weight_derivative = _candidate_weights(lam)
        roughness, grad = x.new_zeros(x.shape[:2]), torch.zeros_like(x)
        grad_images = grad.view(*x.shape[:2], *_image_shape(self.knowledge))
        for axis, d in zip((-1, -2), self._steps(x), strict=True):
            length = _length(d)
            steep_length = STEEPNESS * length
            log_cosh = steep_length + torch.log1p(torch.exp(-2 * steep_length)) - math.log(2)
            roughness += log_cosh.mean((2, 3)) / STEEPNESS
            pixels, channels = length.shape[-1] * length.shape[-2], d.shape[2]
            slope_factor = (
                steep_length.tanh_()
                .div_(length)
                .mul_((weights / pixels / channels)[..., None, None])
            )
            d.mul_(slope_factor[:, :, None] / (self._range() * x.shape[1]))
            grad_images.narrow(axis, 1, d.shape[axis]).add_(d)
            grad_images.narrow(axis, 0, d.shape[axis]).sub_(d)
        candidate_roughness = (roughness / x.shape[1]).view(*x.shape[:2], *[1] * (lam.ndim - 2))
        return (weights * roughness).mean(1), grad, candidate_roughness * weight_derivative

    def _steps(self, x: Tensor) -> list[Tensor]:
        """Return differences of neighboring pixels, in units of the value range.

        The differences have the shape (R, m, channels, height, width).
        """
        return [
            d.reshape(*d.shape[:2], -1, *d.shape[-2:]) / self._range()
            for d in _differences(x, self.knowledge)
        ]

    def _range(self) -> float:
        assert self.knowledge is not None
        low, high = self.knowledge.value_range or (0.0, 1.0)
        return high - low


class TypedColumns(Prior):
    """Penalty on the squared distance of a table row to the nearest row with the known column types.

    Distances are in the units of the columns.

    The types are integers and one-hot codes. Other columns have no penalty. The weight rises from the share
    FADE of its final value to this value, because the nearest row is arbitrary early in the search.
    """

    needs: ClassVar[tuple[str, ...]] = ("columns",)

    def penalty(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return the penalty sum |v - nearest(v)|^2 with v = scale (x + mean).

        v is a row in the units of the table. nearest(v) is the nearest row with integers in integer columns
        and a single 1 in one-hot columns.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

        Returns:
            The penalty of every run (R,), before the multiplication by the prior's weight.
        """
        assert self.knowledge is not None
        mean = 0.0 if self.knowledge.mean is None else self.knowledge.mean.to(x).flatten()
        rows, total_penalty = x.flatten(2) + mean, x.new_zeros(len(x))
        for first, last, kind, scale in self.knowledge.typed_columns:
            table_values = scale * rows[:, :, first : last + 1]
            if kind == "integer":
                nearest_row = table_values.detach().round()
            else:
                nearest_row = torch.zeros_like(table_values).scatter(
                    -1, table_values.argmax(-1, keepdim=True), 1.0
                )
            total_penalty = total_penalty + _sum((table_values - nearest_row).square())
        return total_penalty

    def weight_at(self, share: float | Tensor) -> float | Tensor:
        """Return the weight of the penalty, which rises geometrically from FADE of its final value."""
        return self.weight * FADE ** (1 - share)


def penalty(priors: Sequence[Prior], x: Tensor, lam: Tensor, share: float | Tensor = 1.0) -> Tensor:
    """Return the total penalty of every run: the weighted sum of all priors (penalties on candidates).

    Args:
        priors: The priors, each a penalty on candidates and multipliers.
        x: Candidates for training samples (R, m, *shape), m in each of R runs.
        lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.
        share: Share of the optimization steps that is done, from 0 to 1.

    Returns:
        The penalty of every run (R,).
    """
    return sum((p.weight_at(share) * p.penalty(x, lam) for p in priors), x.new_zeros(len(x)))


def derivatives(
    priors: Sequence[Prior], x: Tensor, lam: Tensor, share: float | Tensor = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total penalty of every run (weighted sum of all priors), and its derivatives.

    Args:
        priors: The priors, each a penalty on candidates and multipliers.
        x: Candidates for training samples (R, m, *shape), m in each of R runs.
        lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.
        share: Share of the optimization steps that is done, from 0 to 1.

    Returns:
        The penalty of every run (R,), and the derivatives of the penalty in x and in lam.
    """
    explicit_terms = [(p, t) for p in priors if (t := p.explicit_derivatives(x, lam)) is not None]
    automatic_priors = [p for p in priors if all(p is not q for q, _ in explicit_terms)]
    with torch.enable_grad():
        xl, ll = x.detach().requires_grad_(), lam.detach().requires_grad_()
        total_penalty = penalty(automatic_priors, xl, ll, share)
        grad_x, grad_lam = torch.zeros_like(x), torch.zeros_like(lam)
        if automatic_priors:
            grad_x, grad_lam = torch.autograd.grad(
                total_penalty.sum(), (xl, ll), allow_unused=True, materialize_grads=True
            )
    total_penalty = total_penalty.detach()
    for p, (value, prior_x, prior_lam) in explicit_terms:
        weight = p.weight_at(share)
        total_penalty = total_penalty + weight * value
        grad_x = grad_x + _expand(weight, grad_x) * prior_x
        grad_lam = grad_lam + _expand(weight, grad_lam) * prior_lam
    return total_penalty, grad_x, grad_lam


def _expand(weight: float | Tensor, like: Tensor) -> float | Tensor:
    """Reshape the weight of a prior, one number or one per run (R,), so that it broadcasts with ``like``."""
    if isinstance(weight, Tensor) and weight.ndim:
        return weight.view(-1, *[1] * (like.ndim - 1))
    return weight


def box(knowledge: Knowledge, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and upper bounds of the values of a sample, in the form that the network receives.

    Args:
        knowledge: What the attacker knows, including the value range of the samples.
        x: Candidates for training samples (R, m, *shape), m in each of R runs.

    Returns:
        The lower and upper bounds, in shapes that broadcast with x.
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
            "A prior (penalty) on neighboring pixels needs images; the samples are vectors.",
            "Choose another prior.",
        )
    return knowledge.shape


def _length(d: Tensor) -> Tensor:
    """Return the root mean square of pixel differences over color channels, made smooth at zero."""
    return (d.square().mean(2) + 1e-8).sqrt()


def _candidate_weights(lam: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight of every candidate (R, m) in a penalty, and its derivative in the multipliers lam.

    The weight is the sum of absolute stored multipliers, at most MAX_MULTIPLIER. Multipliers of some
    objectives can be negative, and a negative weight would reward rough images.

    Args:
        lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.

    Returns:
        The weights (R, m) and their derivatives (R, m, ...).
    """
    multiplier_signs = torch.where(lam < 0, -1.0, 1.0).to(lam.dtype)
    multiplier_sum = (multiplier_signs * lam).reshape(*lam.shape[:2], -1).sum(-1)
    is_not_clamped = (multiplier_sum <= MAX_MULTIPLIER).to(lam.dtype)
    derivative = multiplier_signs * is_not_clamped.view(
        *is_not_clamped.shape, *[1] * (lam.ndim - 2)
    )
    return multiplier_sum.clamp(max=MAX_MULTIPLIER), derivative


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
