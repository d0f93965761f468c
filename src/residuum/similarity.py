"""How alike are two batches of samples? Pure pairwise functions, chunked.

Every function takes a: (m, *shape) and b: (n, *shape) and returns (m, n). Rows of ``a`` are worked
through in chunks, so that beyond inputs and result the memory is bounded by ``CHUNK`` elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from residuum.errors import InputError

CHUNK = 1 << 24  # elements at a time, 128 MiB in float64
# Below this share of |a|^2 + |b|^2 the expanded square has lost digits and the pair is recomputed:
# float64 keeps 16 digits, so above it the distance still has ten.
CANCELLATION = 1e-6


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the angle between samples; a zero sample has cosine 0 with everything. (m, n)."""
    check_alike(a, b)
    return _products(_unit(a.flatten(1)), _unit(b.flatten(1)))


def ncc(a: Tensor, b: Tensor) -> Tensor:
    """Normalized cross-correlation in [-1, 1], see :func:`standardize`. (m, n)."""
    check_alike(a, b)
    return _products(standardize(a), standardize(b))


def l2(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean distance, exact to 1e-6 also between near-identical samples. (m, n).

    |a|^2 + |b|^2 - 2 a.b in float64, and |a - b| itself for the pairs where that cancels.
    """
    check_alike(a, b)
    x, y = a.flatten(1), b.flatten(1).double()
    y_squares = y.square().sum(1)
    distances = a.new_empty(len(x), len(y))
    for rows in chunks(len(x), x.shape[1] + len(y)):
        part = x[rows].double()
        sizes = part.square().sum(1)[:, None] + y_squares
        squares = sizes - 2 * part @ y.T
        i, j = torch.nonzero(squares < CANCELLATION * sizes, as_tuple=True)
        for some in chunks(len(i), x.shape[1]):
            squares[i[some], j[some]] = (part[i[some]] - y[j[some]]).square().sum(1)
        distances[rows] = squares.sqrt().to(distances.dtype)
    return distances


def standardize(x: Tensor) -> Tensor:
    """Samples whose inner product is their normalized cross-correlation. (m, d), flat.

    Each channel of a (c, h, w) sample, or a sample of another shape as a whole, is centered and
    scaled to norm 1/sqrt(c): the correlation of two samples is the mean of those of their channels.
    A constant channel becomes 0: it correlates with nothing, not even with itself.
    """
    channels = x.shape[1] if x.ndim == 4 else 1
    parts = x.reshape(len(x), channels, -1)
    centered = parts - parts.mean(2, keepdim=True)
    # What centring leaves of a constant is rounding, which scaling would blow up to a random image.
    rounding = 8 * torch.finfo(x.dtype).eps * parts.norm(dim=2, keepdim=True)
    norm = centered.norm(dim=2, keepdim=True)
    scaled = torch.where(norm > rounding, centered / norm, 0.0)
    return scaled.flatten(1) / channels**0.5


def chunks(rows: int, width: int, limit: int | None = None) -> Iterator[slice]:
    """Slices that cover ``rows`` rows of ``width`` elements, about ``limit`` elements each."""
    step = max(1, (limit or CHUNK) // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def check_alike(a: Tensor, b: Tensor) -> None:
    """Refuse batches whose samples differ in shape."""
    if a.ndim < 2 or a.shape[1:] != b.shape[1:]:
        raise InputError(
            f"Samples compared must have one shape, (m, *shape) and (n, *shape); got "
            f"{tuple(a.shape)} and {tuple(b.shape)}.",
            "Reshape one of them; single samples need a leading axis: x[None].",
        )


def _unit(x: Tensor) -> Tensor:
    norm = x.norm(dim=1, keepdim=True)
    return torch.where(norm > 0, x / norm, 0.0)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of rows that have at most unit norm, rounding kept inside [-1, 1]."""
    return (x @ y.T).clamp_(-1, 1)
