"""Count the singular directions of a layer that come from training and not from its random initialization.

Gradient descent adds combinations of the training samples X to the initial weights W0 of the first layer. The
trained weights are W1 = W0 + C X with coefficients C. If the entries of the (h, d) matrix W0 are iid noise of
scale s, most squared singular values of W1 follow the Marchenko-Pastur distribution between
s^2 (sqrt h - sqrt d)^2 and s^2 (sqrt h + sqrt d)^2. The upper end of this interval is the noise edge. The
scale is estimated from the singular values sigma_i: after r directions are removed,
s^2 = sum_{i>r} sigma_i^2 / ((h - r)(d - r)), and r is the smallest number for which the largest remaining
singular value does not exceed the noise edge of this scale.

Any decreasing spectrum has such an r, so the remaining singular values must also be distributed like those of
noise. The result is the number of directions that training left in W1. This number is no limit for the number
of samples that can leak: a layer with two inputs can reveal twenty samples, because samples also differ in
the neurons that are active.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The random initial weights of a layer cause singular values up to a limit, the noise edge. If this edge
# exceeds this share of the largest singular value, the directions from training cannot be separated from
# the noise.
VISIBLE = 1e-2
# With fewer singular values, one cannot tell whether they are distributed like singular values of noise.
MIN_NOISE_VALUES = 20
# Singular values count as those of noise if their relative distance from the expected singular values of a
# noise matrix is at most this limit. For fewer than 40 singular values, ``is_noise`` uses a larger limit.
MAX_MISFIT = 0.05
TRACY_WIDOM = 3.2724  # 99.9% quantile of the Tracy-Widom distribution for real matrices (beta = 1)


def count_directions(values: Tensor, h: int, d: int) -> tuple[int | None, str]:
    """Count the singular values of a layer's (h, d) weights that come from training samples.

    The noise edge is the largest singular value that the random initialization explains. The count is not
    possible in three cases: no singular value exceeds the noise edge, the noise edge exceeds 1% of the
    largest singular value, or all singular values exceed 1% of the largest singular value.

    Args:
        values: Singular values of the weights, largest first.
        h: Number of rows of the weights.
        d: Number of columns of the weights.

    Returns:
        The number, and a text that states the threshold. If the values cannot be counted, None and a text
        that states the reason.
    """
    direction_count, edge = noise_edge(values, h, d)
    if direction_count == 0:
        return None, "the initialization is visible: no direction exceeds its noise"
    if is_noise(values[direction_count:], h - direction_count, d - direction_count):
        if edge > VISIBLE:
            return None, (
                f"the initialization is visible: its noise reaches {100 * edge:.2g}% of the largest "
                "singular value"
            )
        threshold = f"above the noise edge, {100 * edge:.2g}% of the largest singular value"
        return direction_count, threshold
    values_above_threshold = rank_above(values, VISIBLE)
    if values_above_threshold == min(h, d):
        return None, (
            f"all {values_above_threshold} exceed {VISIBLE:.0%} of the largest singular value: some may "
            "come from the initialization"
        )
    return (
        values_above_threshold,
        f"above {VISIBLE:.0%} of the largest singular value; no noise edge",
    )


def singular_values(weight: Tensor) -> Tensor:
    """Return the singular values of a weight, largest first, all divided by the same number.

    The weight of a convolution is flattened to a matrix with one filter per row.

    Args:
        weight: Weight of a layer with h neurons or channels, (h, ...).

    Returns:
        Singular values in float64.
    """
    # The triangular factor of the QR decomposition has the same singular values as the matrix. Using the
    # triangular factor is three times as fast.
    weight_matrix = weight.detach().double().flatten(1)
    largest_entry = weight_matrix.abs().max()
    tall_matrix = (
        weight_matrix if weight_matrix.shape[0] >= weight_matrix.shape[1] else weight_matrix.T
    )
    return torch.linalg.svdvals(
        torch.linalg.qr(tall_matrix / (largest_entry if largest_entry > 0 else 1), mode="r").R
    )


def rank_above(values: Tensor, tolerance: float) -> int:
    """Return the number of singular values above ``tolerance`` times the largest singular value.

    Args:
        values: Singular values.
        tolerance: Share of the largest singular value.

    Returns:
        The number of singular values.
    """
    return int((values > tolerance * values.max()).sum())


def noise_edge(values: Tensor, h: int, d: int) -> tuple[int, float]:
    """Estimate the largest singular value that random initial weights explain (the noise edge of a layer).

    Also count the singular values above this edge.

    The largest squared singular value of an (h, d) noise matrix varies about (sqrt h + sqrt d)^2. In units of
    (sqrt h + sqrt d)(1/sqrt h + 1/sqrt d)^(1/3) it follows the Tracy-Widom distribution (Johnstone 2001).
    One noise matrix in a thousand has a singular value above the edge.

    Args:
        values: Singular values of the layer, largest first.
        h: Number of rows of the weights.
        d: Number of columns of the weights.

    Returns:
        The number of singular values above the edge, and the edge as a share of the largest singular value.
    """
    squared_values = values.square()
    removed_counts = torch.arange(len(values), dtype=torch.float64)
    rows, columns = (h - removed_counts).sqrt(), (d - removed_counts).sqrt()
    remaining_squares = squared_values.flip(0).cumsum(0).flip(0)
    upper_ends, unit = rows + columns, (rows + columns) * (1 / rows + 1 / columns) ** (1 / 3)
    squared_edges = (
        remaining_squares / (rows * columns).square() * (upper_ends.square() + TRACY_WIDOM * unit)
    )
    # The smallest singular value is always below its edge, so this list is not empty.
    direction_count = int((squared_values <= squared_edges).nonzero()[0])
    if not squared_values[0] > 0:
        return direction_count, 0.0
    return direction_count, math.sqrt(float(squared_edges[direction_count] / squared_values[0]))


def is_noise(values: Tensor, h: int, d: int) -> bool:
    """Return True if ``values`` are distributed like the singular values of an (h, d) matrix of random noise.

    The singular values of noise hardly vary: in 999 of 1000 draws of a k by k matrix, the relative distance
    of its singular values from the expected quantiles is less than 2/k.

    Args:
        values: Singular values, largest first.
        h: Number of rows of the matrix.
        d: Number of columns of the matrix.

    Returns:
        True if the values have the distribution of noise. False if there are fewer than 20 values.
    """
    if len(values) < MIN_NOISE_VALUES:
        return False
    expected_values = noise_quantiles(h, d)
    noise_scale = values.norm() / math.sqrt(h * d)
    misfit = (values - noise_scale * expected_values).norm() / values.norm()
    return float(misfit) <= max(MAX_MISFIT, 2 / len(values))


def noise_quantiles(h: int, d: int, grid: int = 20_000) -> Tensor:
    """Return the expected singular values of an (h, d) noise matrix of scale 1 (Marchenko-Pastur).

    A squared singular value t has the density sqrt((b - t)(t - a))/t up to a factor, between
    a = (sqrt h - sqrt d)^2 and b = (sqrt h + sqrt d)^2. With t = (a + b)/2 + (b - a)/2 cos u, the density in
    u is sin(u)^2/t.

    Args:
        h: Number of rows of the matrix.
        d: Number of columns of the matrix.
        grid: Number of points of the numerical integration.

    Returns:
        Expected singular values (min(h, d),), largest first.
    """
    a, b = (math.sqrt(h) - math.sqrt(d)) ** 2, (math.sqrt(h) + math.sqrt(d)) ** 2
    angles = (torch.arange(grid, dtype=torch.float64) + 0.5) * (math.pi / grid)
    squared_values = (a + b) / 2 + (b - a) / 2 * angles.cos()
    cumulative_density = (angles.sin().square() / squared_values).cumsum(0)
    value_count = min(h, d)
    probabilities = (torch.arange(value_count, dtype=torch.float64) + 0.5) / value_count
    return squared_values[
        torch.searchsorted(cumulative_density, probabilities * cumulative_density[-1])
    ].sqrt()
