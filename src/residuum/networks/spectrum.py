"""Count the directions of a layer that stand out of the noise of its initialization.

Gradient descent adds combinations of the training samples to the first layer, W1 = W0 + C X. If W0 is iid
noise of scale s, the rest of the spectrum is that of noise. Its squares lie between
s^2 (sqrt h - sqrt d)^2 and s^2 (sqrt h + sqrt d)^2 and follow the law of Marchenko and Pastur. The upper
end is the noise edge. The scale is estimated from the spectrum itself: after r directions are removed,
s^2 = sum_{i>r} sigma_i^2 / ((h - r)(d - r)), and r is the smallest number for which the largest remaining
value does not exceed the edge of this scale.

Any decreasing spectrum has such an r, so the remaining values must also have the shape of noise. The count
is the number of directions that training left in W1. It does not bound the number of samples: two inputs can
reveal twenty samples, because gates separate samples too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

VISIBLE = 1e-2  # share of the largest singular value
MIN_NOISE_VALUES = 20  # fewer singular values show no shape
MAX_MISFIT = 0.05  # relative distance of the remaining values from the quantiles of noise
TRACY_WIDOM = 3.2724  # 99.9% quantile of the law of the largest eigenvalue of real noise


def count_directions(values: Tensor, h: int, d: int) -> tuple[int | None, str]:
    """Count the singular values of an (h, d) layer that come from training.

    They cannot be counted if the initialization is visible: no singular value exceeds its noise edge, or the
    noise edge exceeds 1% of the largest singular value, or all singular values exceed 1% of the largest.

    Args:
        values: Singular values, largest first.
        h: Number of rows.
        d: Number of columns.

    Returns:
        The number with the threshold in words, or None with the reason.
    """
    r, edge = noise_edge(values, h, d)
    if r == 0:
        return None, "the initialization is visible: no direction exceeds its noise"
    if is_noise(values[r:], h - r, d - r):
        if edge > VISIBLE:
            return None, (
                f"the initialization is visible: its noise reaches {100 * edge:.2g}% of the largest "
                "singular value"
            )
        return r, f"above the noise edge, {100 * edge:.2g}% of the largest singular value"
    rank = rank_above(values, VISIBLE)
    if rank == min(h, d):
        return None, (
            f"all {rank} exceed {VISIBLE:.0%} of the largest singular value: some may come from the "
            "initialization"
        )
    return rank, f"above {VISIBLE:.0%} of the largest singular value; no noise edge"


def singular_values(weight: Tensor) -> Tensor:
    """Return the singular values of a weight up to a common factor, largest first.

    For a convolution they are those of its (out, in * k * k) filters.

    Args:
        weight: Weight, (h, ...).

    Returns:
        Singular values in float64.
    """
    # The small triangle R of W = QR has the same singular values. This is three times as fast.
    matrix = weight.detach().double().flatten(1)
    largest = matrix.abs().max()
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    return torch.linalg.svdvals(torch.linalg.qr(tall / (largest if largest > 0 else 1), mode="r").R)


def rank_above(values: Tensor, tolerance: float) -> int:
    """Return the number of singular values above ``tolerance`` times the largest.

    Args:
        values: Singular values.
        tolerance: Share of the largest value.

    Returns:
        The number.
    """
    return int((values > tolerance * values.max()).sum())


def noise_edge(values: Tensor, h: int, d: int) -> tuple[int, float]:
    """Estimate the noise edge of a layer and the number of singular values above it.

    The largest square of (h, d) noise varies about (sqrt h + sqrt d)^2 by Tracy and Widom's law in
    units of (sqrt h + sqrt d)(1/sqrt h + 1/sqrt d)^(1/3) (Johnstone 2001). One matrix of noise in a
    thousand exceeds the edge.

    Args:
        values: Singular values, largest first.
        h: Number of rows.
        d: Number of columns.

    Returns:
        The number r of values above the edge, and the edge as a share of the largest value.
    """
    squares = values.square()
    removed = torch.arange(len(values), dtype=torch.float64)
    rows, columns = (h - removed).sqrt(), (d - removed).sqrt()
    remaining = squares.flip(0).cumsum(0).flip(0)
    ends, unit = rows + columns, (rows + columns) * (1 / rows + 1 / columns) ** (1 / 3)
    edges = remaining / (rows * columns).square() * (ends.square() + TRACY_WIDOM * unit)
    r = int((squares <= edges).nonzero()[0])  # the last value is always below its edge
    return r, math.sqrt(float(edges[r] / squares[0])) if squares[0] > 0 else 0.0


def is_noise(values: Tensor, h: int, d: int) -> bool:
    """Return True if values are distributed like the singular values of (h, d) noise of some scale.

    The singular values of noise hardly vary: those of a k by k matrix are closer than 2/k to the
    quantiles in 999 of 1000 draws.

    Args:
        values: Singular values, largest first.
        h: Number of rows.
        d: Number of columns.

    Returns:
        False also if there are fewer than 20 values.
    """
    if len(values) < MIN_NOISE_VALUES:
        return False
    expected = noise_quantiles(h, d)
    scale = values.norm() / math.sqrt(h * d)
    misfit = (values - scale * expected).norm() / values.norm()
    return float(misfit) <= max(MAX_MISFIT, 2 / len(values))


def noise_quantiles(h: int, d: int, grid: int = 20_000) -> Tensor:
    """Return the expected singular values of (h, d) noise of scale 1 by the law of Marchenko and Pastur.

    Squares t have the density sqrt((b - t)(t - a))/t on [a, b], up to a factor. With
    t = (a + b)/2 + (b - a)/2 cos u, the density in u is sin(u)^2/t.

    Args:
        h: Number of rows.
        d: Number of columns.
        grid: Number of points of the numerical integration.

    Returns:
        Quantiles (min(h, d),), largest first.
    """
    a, b = (math.sqrt(h) - math.sqrt(d)) ** 2, (math.sqrt(h) + math.sqrt(d)) ** 2
    u = (torch.arange(grid, dtype=torch.float64) + 0.5) * (math.pi / grid)
    t = (a + b) / 2 + (b - a) / 2 * u.cos()
    share = (u.sin().square() / t).cumsum(0)
    count = min(h, d)
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return t[torch.searchsorted(share, levels * share[-1])].sqrt()
