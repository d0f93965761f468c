"""Count the directions of a layer that stand out of the noise of its initialization.

Gradient descent adds combinations of the training samples to the first layer, W1 = W0 + C X. If W0 is iid
noise of scale s, the rest of the spectrum is that of noise. Its squares lie between
s^2 (sqrt h - sqrt d)^2 and s^2 (sqrt h + sqrt d)^2 and follow the law of Marchenko and Pastur. The upper
end is the noise edge. The scale is estimated from the spectrum itself: after r directions are removed,
s^2 = sum_{i>r} sigma_i^2 / ((h - r)(d - r)), and r is the smallest number for which the largest remaining
value does not exceed the edge of this scale.

Any decreasing spectrum has such an r, so the rest must also have the shape of noise. The count says how many
directions training left in W1. It does not bound the number of samples: two inputs can reveal twenty
samples, because gates separate samples too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

VISIBLE = 1e-2  # of the largest singular value
FEWEST_OF_NOISE = 20  # singular values that show a shape
MISFIT = 0.05  # relative distance of what is left from the quantiles of noise
TRACY_WIDOM = 3.2724  # 99.9% of the largest eigenvalue of real noise lie below


def directions(values: Tensor, h: int, d: int) -> tuple[int | None, str]:
    """How many singular values of an (h, d) layer stand out, and above what; or None and why.

    None where the initialization is visible: nothing stands out of it, or its edge lies above 1% of
    the largest singular value, or the rank at 1% is full.
    """
    r, edge = noise_edge(values, h, d)
    if r == 0:
        return None, "the initialization is visible: no direction stands out of it"
    if is_noise(values[r:], h - r, d - r):
        if edge > VISIBLE:
            return None, f"the initialization is visible: its noise reaches {100 * edge:.2g}%"
        return r, f"above the noise edge, {100 * edge:.2g}% of the largest singular value"
    rank = rank_above(values, VISIBLE)
    if rank == min(h, d):
        return None, f"all {rank} lie above {VISIBLE:.0%}: the initialization may fill them"
    return rank, f"above {VISIBLE:.0%} of the largest singular value; no noise edge"


def singular_values(weight: Tensor) -> Tensor:
    """Largest first, up to a common factor; a convolution's of its (out, in * k * k) filters.

    Those of the small triangle R of W = QR, three times as fast.
    """
    matrix = weight.detach().double().flatten(1)
    largest = matrix.abs().max()
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    return torch.linalg.svdvals(torch.linalg.qr(tall / (largest if largest > 0 else 1), mode="r").R)


def rank_above(values: Tensor, tolerance: float) -> int:
    """Number of singular values above ``tolerance`` times the largest."""
    return int((values > tolerance * values.max()).sum())


def noise_edge(values: Tensor, h: int, d: int) -> tuple[int, float]:
    """(r, edge): r of the ``values`` stand out; the edge as a share of the largest value.

    The largest square of (h, d) noise varies about (sqrt h + sqrt d)^2 by Tracy and Widom's law in
    units of (sqrt h + sqrt d)(1/sqrt h + 1/sqrt d)^(1/3) (Johnstone 2001): one matrix of noise in a
    thousand exceeds the edge.
    """
    squares = values.square()
    taken = torch.arange(len(values), dtype=torch.float64)
    rows, columns = (h - taken).sqrt(), (d - taken).sqrt()
    left = squares.flip(0).cumsum(0).flip(0)
    ends, unit = rows + columns, (rows + columns) * (1 / rows + 1 / columns) ** (1 / 3)
    edges = left / (rows * columns).square() * (ends.square() + TRACY_WIDOM * unit)
    r = int((squares <= edges).nonzero()[0])  # the last value is always below its own edge
    return r, math.sqrt(float(edges[r] / squares[0])) if squares[0] > 0 else 0.0


def is_noise(values: Tensor, h: int, d: int) -> bool:
    """Whether ``values`` are distributed as the singular values of (h, d) noise of some scale.

    Those of noise hardly vary: a square matrix of k comes closer than 2/k in 999 of 1000 draws.
    """
    if len(values) < FEWEST_OF_NOISE:
        return False
    expected = noise_quantiles(h, d)
    scale = values.norm() / math.sqrt(h * d)
    misfit = (values - scale * expected).norm() / values.norm()
    return float(misfit) <= max(MISFIT, 2 / len(values))


def noise_quantiles(h: int, d: int, grid: int = 20_000) -> Tensor:
    """(min(h, d),) singular values of (h, d) noise of scale 1, by Marchenko and Pastur, largest first.

    Squares t have the density sqrt((b - t)(t - a))/t on [a, b], up to a factor; with
    t = (a + b)/2 + (b - a)/2 cos u it is sin(u)^2/t in u.
    """
    a, b = (math.sqrt(h) - math.sqrt(d)) ** 2, (math.sqrt(h) + math.sqrt(d)) ** 2
    u = (torch.arange(grid, dtype=torch.float64) + 0.5) * (math.pi / grid)
    t = (a + b) / 2 + (b - a) / 2 * u.cos()
    share = (u.sin().square() / t).cumsum(0)
    count = min(h, d)
    wanted = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return t[torch.searchsorted(share, wanted * share[-1])].sqrt()
