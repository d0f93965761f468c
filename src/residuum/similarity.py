"""Pairwise similarity of two batches of samples.

A similarity takes samples ``a`` (m, *shape) and ``b`` (n, *shape) and returns an (m, n) tensor. Rows of ``a``
are processed in chunks, so that intermediate results take at most the memory of ``CHUNK`` elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from residuum.errors import InputError

CHUNK = 1 << 24  # largest number of elements of a chunk, 128 MiB in float64
# If |a|^2 + |b|^2 - 2 a.b is below this share of |a|^2 + |b|^2, cancellation has lost digits, and |a - b|^2
# is computed directly. float64 has 16 digits, so a squared distance above this share still has ten digits.
CANCELLATION = 1e-6


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of the angle between samples. A zero sample has cosine 0 with every sample.

    Args:
        a: Samples, (m, *shape).
        b: Samples, (n, *shape).

    Returns:
        Cosines, (m, n).
    """
    check_shapes(a, b)
    return _products(_unit(a.flatten(1)), _unit(b.flatten(1)))


def ncc(a: Tensor, b: Tensor) -> Tensor:
    """Return the normalized cross-correlation (NCC) of samples, see :func:`standardize`.

    Args:
        a: Samples, (m, *shape).
        b: Samples, (n, *shape).

    Returns:
        NCC in [-1, 1], (m, n).
    """
    check_shapes(a, b)
    return _products(standardize(a), standardize(b))


def l2(a: Tensor, b: Tensor) -> Tensor:
    """Return Euclidean distances, exact to 1e-6 even between nearly identical samples.

    Squared distances are computed as |a|^2 + |b|^2 - 2 a.b in float64. If a and b are so close that this
    formula loses digits, |a - b|^2 is computed instead.

    Args:
        a: Samples, (m, *shape).
        b: Samples, (n, *shape).

    Returns:
        Distances, (m, n).
    """
    check_shapes(a, b)
    x, y = a.flatten(1), b.flatten(1).double()
    y_squares = y.square().sum(1)
    distances = a.new_empty(len(x), len(y))
    for rows in chunks(len(x), x.shape[1] + len(y)):
        block = x[rows].double()
        squared_norms = block.square().sum(1)[:, None] + y_squares
        squared_distances = squared_norms - 2 * block @ y.T
        i, j = torch.nonzero(squared_distances < CANCELLATION * squared_norms, as_tuple=True)
        for pairs in chunks(len(i), x.shape[1]):
            squared_distances[i[pairs], j[pairs]] = (block[i[pairs]] - y[j[pairs]]).square().sum(1)
        distances[rows] = squared_distances.sqrt().to(distances.dtype)
    return distances


def standardize(x: Tensor) -> Tensor:
    """Standardize samples, so that their inner products are normalized cross-correlations.

    Each channel of a (c, h, w) sample is centered and scaled to norm 1/sqrt(c), so the correlation of two
    samples is the mean correlation of their channels. A sample of another shape counts as a single channel. A
    constant channel becomes 0, so its correlation with any channel is 0.

    Args:
        x: Samples, (m, *shape).

    Returns:
        Standardized samples, (m, d).
    """
    channels = x.shape[1] if x.ndim == 4 else 1
    channel_values = x.reshape(len(x), channels, -1)
    centered_channels = channel_values - channel_values.mean(2, keepdim=True)
    # After centering, a constant channel consists of rounding errors. Scaling would turn these into a
    # random image.
    rounding = 8 * torch.finfo(x.dtype).eps * channel_values.norm(dim=2, keepdim=True)
    norm = centered_channels.norm(dim=2, keepdim=True)
    scaled = torch.where(norm > rounding, centered_channels / norm, 0.0)
    return scaled.flatten(1) / channels**0.5


def chunks(rows: int, width: int, limit: int | None = None) -> Iterator[slice]:
    """Divide rows into slices of about equal size.

    Args:
        rows: Number of rows.
        width: Number of elements of a row.
        limit: Maximum number of elements of a slice, by default ``CHUNK``.

    Returns:
        Slices that cover all rows.
    """
    rows_per_slice = max(1, (limit or CHUNK) // max(1, width))
    return (
        slice(start, min(start + rows_per_slice, rows)) for start in range(0, rows, rows_per_slice)
    )


def check_shapes(a: Tensor, b: Tensor) -> None:
    """Check that the samples of two batches have the same shape.

    Args:
        a: Samples.
        b: Samples.

    Raises:
        InputError: If the shapes differ.
    """
    if a.ndim < 2 or a.shape[1:] != b.shape[1:]:
        raise InputError(
            f"Two batches of samples can be compared only if their samples have the same shape; got "
            f"batches of shape {tuple(a.shape)} and {tuple(b.shape)}.",
            "Reshape one of the batches. A single sample needs a leading axis: x[None].",
        )


def _unit(x: Tensor) -> Tensor:
    norm = x.norm(dim=1, keepdim=True)
    return torch.where(norm > 0, x / norm, 0.0)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Return inner products of rows whose norm is at most 1, clamped to [-1, 1] against rounding errors."""
    return (x @ y.T).clamp_(-1, 1)
