"""Unmix: training samples out of one weight matrix, by independent component analysis.

Gradient descent from a small or known start adds multiples of the training samples to every row of a
layer that the input feeds, at any time of the training and whatever the loss, the labels or the
layers above (the bias is one more coordinate, equal to 1 in every sample):

    [W, b] = C [X, 1]

So the rows are mixtures of samples, and images are sparse in their differences: taking them apart is
blind source separation (for single gradients of federated learning: Kariyappa et al. 2023, "Cocktail
Party Attack"; FastICA: Hyvarinen 1999).

    [W, b] = U S V^T,   r of the rows of V^T stand out of the noise of the start
    G = D V_r           differences of neighbouring values (N, r), the domain in which samples are sparse
    Z = G K^T           whitened, Z^T Z / N = 1
    Q <- polar(E[tanh(a y) z^T] - diag(E[a (1 - tanh^2(a y))]) Q),   y = Q z
    [X^, t] = Q K V_r^T                                              up to order, and per row a factor

The last coordinate of a sample is 1, so X^ / t has the right sign and size. Nothing is assumed of
the network but the span and of the samples but sparse differences; with more samples than clean
directions only part of them, or none, come apart, and clusters of neurons, each of which mixes fewer
samples, are taken apart one by one.

One start of the iteration ends in a poor optimum. A run is therefore a small population: a few
starts, then rounds in which every member begins anew from the sparsest sources of several others.
Runs differ in rank and strength a and share nothing but V: what several of them find is true.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.attacks.randomness import stream
from residuum.checkpoints.spectrum import noise_edge

SAME = 0.9  # cosine from which two sources are one
APART = 0.5  # cosine in the whitened domain below which two sources can stand in one solution


@dataclass(frozen=True)
class Setting:
    """How hard to look.

    ranks: shares of the clean rank; strengths: a, large ones suit sharp edges; starts: members of a
    population; rounds, iterations: of each; partitions: into how many clusters the neurons are parted
    where the whole layer is overfull; overfull: it is when a smaller share of the sources of a run is
    found by half of the runs; most: sources brought back at most, in multiples of the clean rank.
    """

    ranks: tuple[float, ...] = (0.8, 0.7, 0.9)
    strengths: tuple[float, ...] = (4.0, 2.0, 8.0)
    starts: int = 4
    rounds: int = 3
    iterations: int = 40
    partitions: tuple[int, ...] = (2, 4, 8, 16)
    overfull: float = 0.5
    most: int = 3


@dataclass(frozen=True, eq=False)
class Sources:
    """What came apart.

    x: (k, d) samples as the network receives them, the ones most runs agree on first; size: whether
    sign and length of them are known; support: (k,) how many of the ``runs`` hold such a source;
    group: (k,) number of the source it is a version of; rank: clean directions of the layer; edge: of
    the noise, as a share of the largest singular value.
    """

    x: Tensor
    known: Tensor
    support: Tensor
    group: Tensor
    runs: int
    rank: int
    edge: float


def differences(x: Tensor) -> Tensor:
    """(k, N) first differences of (k, *shape) along the last two axes of images, or the only one."""
    along = [x.diff(dim=axis).flatten(1) for axis in range(-1, -min(x.ndim - 1, 2) - 1, -1)]
    return torch.cat(along, 1)


def coordinates(x: Tensor) -> Tensor:
    """(k, N) the values themselves: tables and embeddings have no neighbours."""
    return x.flatten(1)


DOMAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "differences": differences,
    "coordinates": coordinates,
}


def directions(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values (k,), left vectors (h, k) and right ones (k, d) of ``rows`` (h, d), float64.

    From the smaller Gram matrix: its eigenvalues are squares, so values below 1e-8 of the largest are
    lost, which is far below the rounding of float32 weights.
    """
    h, d = rows.shape
    rows = rows.double()
    squares, vectors = torch.linalg.eigh(rows @ rows.T if h <= d else rows.T @ rows)
    squares, vectors = squares.flip(0).clamp(min=0), vectors.flip(1)
    s = squares.sqrt()
    inverse = torch.where(s > 1e-8 * s[0], 1 / s, 0.0)
    if h <= d:
        return s, vectors, inverse[:, None] * (vectors.T @ rows)
    return s, (rows @ vectors) * inverse, vectors.T


def whitened(directions: Tensor, domain: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Z (N, r) and K (r, r) of directions (r, *shape)."""
    G = domain(directions).T
    G = G - G.mean(0)
    squares, vectors = torch.linalg.eigh((G.T @ G / len(G)).double())
    K = (vectors / squares.clamp(min=1e-12 * squares[-1]).sqrt()).T.to(G)
    return G @ K.T, K


def polar(P: Tensor, tolerance: float = 1e-4, most: int = 40) -> Tensor:
    """The nearest orthogonal matrices (B, r, r), by Newton and Schulz: products alone, on any device."""
    norms = torch.linalg.matrix_norm(P, 1) * torch.linalg.matrix_norm(P, math.inf)
    Q = P / norms.sqrt()[:, None, None]
    one = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    for k in range(most):
        square = Q.mT @ Q
        if k % 4 == 3 and float((square - one).abs().max()) < tolerance:
            break
        Q = 1.5 * Q - 0.5 * Q @ square
    return Q


def fastica(Z: Tensor, Q: Tensor, a: float, iterations: int, tolerance: float = 1e-4) -> Tensor:
    """Symmetric FastICA with contrast log cosh(a y) from Q (B, r, r), all members side by side."""
    for _ in range(iterations):
        g = torch.tanh(a * (Z @ Q.mT))  # (B, N, r)
        slope = a * (1 - g.square().mean(1))
        new = polar(g.mT @ Z / len(Z) - slope[:, :, None] * Q)
        still = float(((new * Q).sum(2).abs() - 1).abs().max())
        Q = new
        if still < tolerance:
            break
    return Q


def contrast(Z: Tensor, Q: Tensor, a: float) -> Tensor:
    """(B, r) E log cosh(a y) / a of every source: the less, the sparser."""
    y = (a * (Z @ Q.mT)).abs()
    return (y + torch.log1p(torch.exp(-2 * y)) - math.log(2)).mean(1) / a


def crossed(Q: Tensor, sparse: Tensor, generator: torch.Generator) -> Tensor:
    """Starts of a next round (B, r, r): each from the sparsest sources of three in five members."""
    B, r, _ = Q.shape
    pool, score = Q.reshape(B * r, r).cpu(), sparse.flatten().cpu()
    owner = torch.arange(B).repeat_interleave(r)
    children = []
    for b in range(B):
        parents = torch.rand(B, generator=generator) < 0.6
        parents[b] = True
        mine = parents[owner].nonzero().flatten()
        mine = mine[score[mine].argsort()]
        rows = pool[mine[distinct(pool[mine], APART)[:r]]]
        rest = 0.01 * torch.randn(r - len(rows), r, generator=generator)
        children.append(torch.cat([rows, rest]))
    return polar(torch.stack(children).to(Q), most=100)


def distinct(rows: Tensor, similarity: float) -> Tensor:
    """Indices of unit ``rows``, in their order, none more similar than that to one before it."""
    near = ((rows @ rows.T).abs() >= similarity).numpy()
    kept, free = [], ~near[0] | True
    for i in range(len(rows)):
        if free[i]:
            kept.append(i)
            free &= ~near[i]
    return torch.tensor(kept)


def population(
    Z: Tensor, a: float, starts: int, rounds: int, iterations: int, generator: torch.Generator
) -> Tensor:
    """(r, r) the best solution of a few starts that learn from each other."""
    r = Z.shape[1]
    Q = torch.linalg.qr(torch.randn(starts, r, r, generator=generator))[0].to(Z)
    for round_ in range(rounds):
        Q = fastica(Z, Q, a, iterations)
        sparse = contrast(Z, Q, a)
        if starts > 1 and round_ < rounds - 1:
            Q = crossed(Q, sparse, generator)
    return Q[int(sparse.sum(1).argmin())]
