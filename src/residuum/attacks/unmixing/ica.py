"""Unmix: training samples out of one weight matrix, by independent component analysis.

Gradient descent from a small or known start adds multiples of the training samples to every row of a
layer that the input feeds, at any time of the training and whatever the loss, the labels or the
layers above; momentum and Adam keep a mean of such steps:

    W - c W0 = C X,   b - c b0 = C 1       c = 1, or what weight decay left of the start

So the rows are mixtures of samples, and images are sparse in their differences: taking them apart is
blind source separation (for single gradients of federated learning: Kariyappa et al. 2023, "Cocktail
Party Attack"; FastICA: Hyvarinen 1999).

    C X = U S V^T       r of the rows of V^T stand out of the noise of the start
    G = D V_r           differences of neighboring values (N, r), the domain in which samples are sparse
    Z = G K^T           whitened, Z^T Z / N = 1
    Q <- polar(E[tanh(a y) z^T] - diag(E[a (1 - tanh^2(a y))]) Q),   y = Q z
    X^ = Q K V_r^T                                                   up to order, and per row a factor

Nothing is assumed of the network but the span and of the samples but sparse differences; with more
samples than clean directions only part of them, or none, come apart, and clusters of neurons, each of
which mixes fewer samples, are taken apart one by one.

The factor of a source (``told``): its sign is the one that most say of the network (a sample enters the
rows of neurons that it switches on), the bias (all of C 1 is positive multiples of samples) and the
granted range of values; its size is the largest that stays in that range, or what the bias says.

One start of the iteration ends in a poor optimum. A run is therefore a small population: a few
starts, then rounds in which every member begins anew from the sparsest sources of several others.
Runs differ in rank and strength a and share nothing but V: what several of them find is true.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor

from residuum.attacks.random_streams import stream
from residuum.errors import InputError
from residuum.networks.spectrum import noise_edge

ROUNDING = 1e-7  # of float32, as a share of the largest singular value
CLIFF = 10.0  # fall between two singular values that only the end of the samples explains
SOUND = 1e-5  # share of the largest singular value of float32 sources below which is rounding
SAME = 0.9  # cosine from which two sources are one
COLUMNS = 1 << 16  # of a wide layer that are in float64 at a time
Domain = Callable[[Tensor], Tensor]
APART = 0.5  # cosine in the whitened domain below which two sources can stand in one solution
SMOOTH = 0.6  # share of the median roughness below which a source resembles images of any kind


@dataclass(frozen=True)
class Effort:
    """How hard to look.

    ranks: shares of the clean rank.
    strengths: a, large ones suit sharp edges.
    starts: members of a population.
    rounds, iterations: of each.
    partitions: into how many clusters the neurons are parted, of which come the share parted[0] of
        their rank.
    overfull: a layer is when half of the runs hold a smaller share of its sources; then
        overfull_partitions and all of ``parted`` are tried as well, and below the share lost, with
        partitions at all, each of them twice and with every strength.
    repeats: runs with each rank that differ in their start alone.
    most: sources brought back at most, in multiples of the clean rank.
    """

    ranks: tuple[float, ...] = (0.8, 0.6, 1.0, 0.7, 0.5, 0.9)
    strengths: tuple[float, ...] = (4.0, 2.0)
    starts: int = 4
    rounds: int = 3
    iterations: int = 40
    partitions: tuple[int, ...] = (2, 4)
    parted: tuple[float, ...] = (0.8, 0.6)
    overfull: float = 0.5
    overfull_partitions: tuple[int, ...] = (8, 16, 32)
    lost: float = 0.055
    repeats: int = 1
    most: int = 3


@dataclass(frozen=True, eq=False)
class Sources:
    """What came apart.

    x: (k, d) of length 1, their signs as the neurons say, those that most runs agree on first.
    support: (k,) share of the runs on the whole layer that hold such a source.
    parts: (k,) likewise of the partitions of its neurons.
    group: (k,) number of the source that a row is a version of.
    runs: on the whole layer, and partitions.
    rank: clean directions of the layer.
    edge: of the noise, as a share of the largest singular value.
    """

    x: Tensor
    support: Tensor
    parts: Tensor
    group: Tensor
    runs: tuple[int, int]
    rank: int
    edge: float

    @property
    def centers(self) -> Tensor:
        """(groups,) the first row of each source: the mean of its versions."""
        every = range(int(self.group.max()) + 1)
        return torch.stack([(self.group == g).nonzero()[0, 0] for g in every])


def unmix(
    rows: Tensor,
    shape: tuple[int, ...],
    effort: Effort | None = None,
    *,
    domain: str = "",
    rank: int = 0,
    seed: int = 0,
    seconds: float = math.inf,
) -> Sources:
    """Sources of ``rows`` (h, d), each a mixture of samples of ``shape``, on the device of ``rows``.

    domain: a name in ``DOMAINS``; by default differences where samples have a shape, coordinates of
        vectors.
    rank: clean directions, 0 where the spectrum shall say.
    seconds: no run is begun later than that, but the first one always.
    """
    effort, end = effort or Effort(), time.monotonic() + seconds
    sparse_in = DOMAINS[domain_of(domain, shape)]
    layer = Layer.of(rows)
    layer = replace(layer, rank=rank or layer.rank)
    if layer.rank < 2:
        raise InputError(
            f"Unmixing needs two clean directions at least; this layer has {layer.rank}.",
            "Grant the initial weights, or use another attack.",
        )
    look = partial(_sources, shape=shape, domain=sparse_in, effort=effort)
    found: list[Tensor] = []  # per run
    for share, again in product(effort.ranks, range(effort.repeats)):
        if not found or time.monotonic() < end:
            generator = stream("unmix", seed, str(share), *([again] if again else []))
            found += look([layer], share, effort.strengths, generator)
    whole = len(found)
    partitions, strengths = _partitions(effort, found)
    for share, k, again in partitions:
        if time.monotonic() < end:
            generator = stream(
                "unmix", seed, "clusters", k, str(share), *([again] if again else [])
            )
            parted = [rows[mine] for mine in clusters(layer, k, generator)]
            parts = [Layer.of(part) for part in parted if bool(part.any())]  # not dead neurons
            # What one partition brings with one strength is one run: its clusters share samples.
            if apart := look(parts, share, strengths, generator):
                found += [torch.cat(apart[i :: len(strengths)]) for i in range(len(strengths))]
    every, run = torch.cat(found), _owner(found)
    if len(partitions) > len(effort.partitions):  # overfull: what stays mixed is smooth
        rough = roughness(every.reshape(-1, *shape), sparse_in)
        telling = rough >= SMOOTH * rough.nanmedian()  # of a source of zeros it is none
        every, run = every[telling], run[telling.cpu()]
    sparse = sparseness(sparse_in(every.reshape(-1, *shape)))
    x, group = merged(every, run, sparse, effort.most * layer.rank)
    holds = held_by(x.to(every), every, run).cpu().float()
    runs = whole, len(found) - whole
    support, of_parts = holds[:, :whole].sum(1) / whole, holds[:, whole:].sum(1) / max(1, runs[1])
    return Sources(x, support, of_parts, group, runs, layer.rank, layer.edge)


def _partitions(
    effort: Effort, found: list[Tensor]
) -> tuple[list[tuple[float, int, int]], tuple[float, ...]]:
    """(share of the rank, number of clusters, which time), and strengths: more where few sources agree."""
    first = [(effort.parted[0], k, 0) for k in effort.partitions]
    every, one = torch.cat(found), effort.strengths[:1]
    half = held_by(every, every, _owner(found)).sum(1) >= max(2, len(found) / 2)
    agreed = float(half.float().mean())
    if len(found) < 2 or agreed >= effort.overfull:
        return first, one
    lost = agreed < effort.lost and bool(effort.partitions)
    every_k = (*effort.partitions, *effort.overfull_partitions)
    whole = [(share, k, t) for t in range(1 + lost) for share, k in product(effort.parted, every_k)]
    rest = [partition for partition in whole if partition not in first]
    return first + rest, effort.strengths if lost else one


def _owner(found: list[Tensor]) -> Tensor:
    """(k,) number of the run of each source."""
    return torch.arange(len(found)).repeat_interleave(torch.tensor([len(x) for x in found]))


def _sources(
    layers: list[Layer],
    share: float,
    strengths: tuple[float, ...],
    generator: torch.Generator,
    *,
    shape: tuple[int, ...],
    domain: Domain,
    effort: Effort,
) -> list[Tensor]:
    """Sources (r, d) of every layer with every strength, length 1, signs as the neurons give them.

    All have one rank, the share of the layers' median, so that they are found side by side; a layer
    with fewer neurons than that is left out. A sample enters only rows of neurons that it switches
    on, so of +x and -x the true one has positive products with the rows that hold it:
    sum_j c_j^2 <w_j, x> > 0, where c is its column of C.
    """
    r = max(2, round(share * sorted(layer.rank for layer in layers)[len(layers) // 2]))
    layers = [layer for layer in layers if len(layer.U) > r]
    if not layers:
        return []
    white = [whitened(layer.V[:r].reshape(-1, *shape), domain) for layer in layers]
    Z = torch.stack([Z for Z, _ in white for _ in strengths])
    a = torch.tensor(strengths * len(layers)).to(Z)
    Q = iter(population(Z, a, effort.starts, effort.rounds, effort.iterations, generator))
    found = []
    for layer, (_, K) in zip(layers, white, strict=True):
        V, A = layer.V[:r], (layer.U[:, :r] * layer.S[:r]).to(layer.V)
        for _ in strengths:
            B = next(Q) @ K
            C, singular = torch.linalg.solve_ex(B, A, left=False)
            if singular:  # two sources of a small cluster that fell together
                C = A @ torch.linalg.pinv(B)
            sign = (C.square() * (A @ B.T)).sum(0).sign()
            found.append(torch.nn.functional.normalize(B @ V) * sign[:, None])
    return found


@dataclass(frozen=True, eq=False)
class Layer:
    """Rows (h, d) = U S V^T; rank of its values stand out of the noise, whose edge is a share of S_1."""

    U: Tensor
    S: Tensor
    V: Tensor
    rank: int
    edge: float

    @classmethod
    def of(cls, rows: Tensor) -> Layer:
        """From the smaller Gram matrix in float64.

        Its eigenvalues are squares, so values below 1e-8 of the largest are lost: those of weights
        in float32 are rounding there.
        """
        h, d = rows.shape
        parts = rows.split(COLUMNS, int(h <= d))
        gram = torch.zeros(())
        for part in map(Tensor.double, parts):
            gram = gram.to(part) + (part @ part.T if h <= d else part.T @ part)
        squares, vectors = torch.linalg.eigh(gram)
        S, vectors = squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
        inverse = torch.where(1e-8 * S[0] < S, 1 / S, 0.0)
        if h <= d:
            V = [(inverse[:, None] * (vectors.T @ part.double())).float() for part in parts]
            return cls(vectors, S, torch.cat(V, 1), *clean_rank(S.cpu(), h, d))
        U = torch.cat([(part.double() @ vectors) * inverse for part in parts])
        return cls(U, S, vectors.T.float(), *clean_rank(S.cpu(), h, d))


def clean_rank(values: Tensor, h: int, d: int) -> tuple[int, float]:
    """How many singular values of (h, d) rows samples made, and where the noise of the start ends.

    Those above the noise edge and above rounding; of a moment or a difference, whose rest is no noise,
    those before the cliff: the largest fall from one to the next, where it is tenfold.
    """
    rank, edge = noise_edge(values, h, d)
    floor = ROUNDING * float(values[0])
    rank = min(rank, int((values > floor).sum()))
    seen = values.clamp(min=floor)[1 : rank + 1]
    falls = seen[:-1] / seen[1:]
    if len(falls) and float(falls.max()) >= CLIFF:
        rank = 2 + int(falls.argmax())
    return rank, edge


def differences(x: Tensor) -> Tensor:
    """(k, N) first differences of (k, *shape) along the last two axes of images, or the only one."""
    along = [x.diff(dim=axis).flatten(1) for axis in range(-1, -min(x.ndim - 1, 2) - 1, -1)]
    return torch.cat(along, 1)


def series(x: Tensor) -> Tensor:
    """(k, N) first differences of (k, *shape) along the last axis, time."""
    return x.diff(dim=-1).flatten(1)


def coordinates(x: Tensor) -> Tensor:
    """(k, N) the values themselves: tables and embeddings have no neighbors."""
    return x.flatten(1)


DOMAINS: dict[str, Domain] = {
    "differences": differences,
    "series": series,
    "coordinates": coordinates,
}


def domain_of(name: str, shape: tuple[int, ...]) -> str:
    """A key of ``DOMAINS``; "auto" or "": differences where samples have a shape, else coordinates."""
    if name in DOMAINS:
        return name
    return "differences" if len(shape) > 1 else "coordinates"


def whitened(directions: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """Z (N, r) and K (r, r) of directions (r, *shape): Z = (differences - mean) K^T has unit covariance.

    After it every mixture of independent sources is a rotation of them, so that only r x r orthogonal
    matrices are searched.
    """
    G = domain(directions).T
    G = G - G.mean(0)
    squares, vectors = torch.linalg.eigh((G.T @ G / len(G)).double())
    K = (vectors / squares.clamp(min=1e-12 * squares[-1]).sqrt()).T.to(G)
    return G @ K.T, K


def polar(P: Tensor, tolerance: float = 1e-4, most: int = 40) -> Tensor:
    """The nearest orthogonal matrices (..., r, r), (P P^T)^(-1/2) P.

    On a GPU by Newton and Schulz, products alone: its eigenvalues take ten times as long there.
    """
    if P.device.type == "cpu":
        squares, vectors = torch.linalg.eigh(P @ P.mT)
        floor = torch.finfo(P.dtype).eps * squares[..., -1:]
        scaled = vectors * torch.maximum(squares, floor).rsqrt()[..., None, :]
        return scaled @ (vectors.mT @ P)
    norms = torch.linalg.matrix_norm(P, 1) * torch.linalg.matrix_norm(P, math.inf)
    Q = P / norms.sqrt()[..., None, None]
    one = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    for k in range(most):
        square = Q.mT @ Q
        if k % 4 == 3 and float((square - one).abs().max()) < tolerance:
            break
        Q = 1.5 * Q - 0.5 * Q @ square
    return Q


def fastica(Z: Tensor, Q: Tensor, a: Tensor, iterations: int, tolerance: float = 1e-4) -> Tensor:
    """Symmetric FastICA with contrast log cosh(a y): P problems side by side, B starts of each.

    Z: (P, N, r) whitened.
    Q: (P, B, r, r), sources in rows.
    a: (P,).
    """
    Z, a, N = Z[:, None], a[:, None, None, None], Z.shape[1]
    for _ in range(iterations):
        g = (Z @ (a * Q).mT).tanh_()  # (P, B, N, r)
        slope = a * (1 - g.square().mean(2, keepdim=True))
        new = polar(g.mT @ Z / N - slope.mT * Q)
        still = float(((new * Q).sum(3).abs() - 1).abs().max())
        Q = new
        if still < tolerance:
            break
    return Q


def contrast(Z: Tensor, Q: Tensor, a: Tensor) -> Tensor:
    """(P, B, r) E log cosh(a y) / a of every source: the less, the sparser."""
    a = a[:, None, None, None]
    y = (a * (Z[:, None] @ Q.mT)).abs()
    return ((y + torch.log1p(torch.exp(-2 * y)) - math.log(2)) / a).mean(2)


def population(
    Z: Tensor, a: Tensor, starts: int, rounds: int, iterations: int, generator: torch.Generator
) -> Tensor:
    """(P, r, r) of each problem the best solution of a few starts that learn from each other."""
    P, _, r = Z.shape
    Q = torch.linalg.qr(torch.randn(P, starts, r, r, generator=generator))[0].to(Z)
    for left in reversed(range(rounds)):
        Q = fastica(Z, Q, a, iterations)
        sparse = contrast(Z, Q, a)
        if left and starts > 1:
            pairs = zip(Q.cpu(), sparse.cpu(), strict=True)
            Q = polar(torch.stack([crossed(q, s, generator) for q, s in pairs]).to(Z), most=100)
    return Q[torch.arange(P, device=Q.device), sparse.sum(2).argmin(1)]


def crossed(Q: Tensor, sparse: Tensor, generator: torch.Generator) -> Tensor:
    """Starts of a next round (B, r, r): each from the sparsest sources of three in five members.

    FastICA finds some sources from every start and not the same ones. Sparsest first, none twice; what
    is missing is small noise, which ``polar`` turns into a direction orthogonal to the rest.
    """
    B, r, _ = Q.shape
    pool, score = Q.reshape(B * r, r), sparse.flatten()
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
    return torch.stack(children)


def distinct(rows: Tensor, similarity: float) -> Tensor:
    """Indices of unit ``rows``, in their order, none more similar than that to one before it."""
    near = ((rows @ rows.T).abs() >= similarity).numpy()
    kept, free = [], np.ones(len(rows), dtype=bool)
    for i in range(len(rows)):
        if free[i]:
            kept.append(i)
            free &= ~near[i]
    return torch.tensor(kept)


def clusters(layer: Layer, k: int, generator: torch.Generator) -> list[Tensor]:
    """Neurons in ``k`` groups of similar direction.

    With more samples than clean directions the whole layer cannot be taken apart; a group of neurons
    that are on for the same samples mixes fewer of them.
    """
    rows = torch.nn.functional.normalize(layer.U * layer.S)[:, : layer.rank]
    seed = int(torch.randint(2**31, (), generator=generator))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # clusters are empty where rows are dead or few
        _, label = kmeans2(rows.cpu().numpy(), k, minit="++", seed=seed)
    return [torch.from_numpy(label == i).nonzero().flatten() for i in range(k)]


def sparseness(y: Tensor) -> Tensor:
    """(k,) E|y| over the root of E y^2: the less, the sparser."""
    return y.abs().mean(1) / y.square().mean(1).sqrt()


def roughness(x: Tensor, domain: Domain) -> Tensor:
    """(k,) energy in the sparse domain over the energy about the mean, of (k, *shape)."""
    centered = x.flatten(1) - x.flatten(1).mean(1, keepdim=True)
    return domain(x).square().sum(1) / centered.square().sum(1)


def held_by(x: Tensor, every: Tensor, run: Tensor) -> Tensor:
    """(k, runs) whether a run holds, among its part of ``every``, a source similar to each of ``x``."""
    member = torch.nn.functional.one_hot(run).to(every)
    near = [((part @ every.T).abs() >= SAME).to(every) @ member > 0 for part in x.split(4096)]
    return torch.cat(near)


def merged(x: Tensor, run: Tensor, sparse: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most ``most`` of the sources (k, d), and the group of each.

    A group is a source, of those that most runs back the sparsest, and all that are similar to it and
    in no group before. In this order, while there is room: the mean of each group that two runs back
    unless it is similar to one before, the sparsest member of each such group (means are blurred),
    and what one run alone found, sparsest first.
    """
    support = held_by(x, x, run).sum(1).cpu()
    cosines, x, sparse = (x @ x.T).cpu(), x.cpu(), sparse.cpu()
    order = (support - 0.999 * sparse.argsort().argsort() / len(x)).argsort(descending=True)
    free = torch.ones(len(x), dtype=torch.bool)
    means, members, singles = torch.empty_like(x), list[Tensor](), list[Tensor]()
    for i in order.tolist():
        if not free[i]:
            continue
        mine = (free & (cosines[i].abs() >= SAME)).nonzero().flatten()
        free[mine] = False
        if support[i] < 2:
            singles.append(x[i])
            continue
        alike = cosines[i, mine].sign()  # the sign of the group is that of most members
        rows = x[mine] * (alike * (1.0 if alike.sum() >= 0 else -1.0))[:, None]
        mean, n = torch.nn.functional.normalize(rows.mean(0), dim=0), len(members)
        if n and float((means[:n] @ mean).abs().max()) >= SAME:
            continue
        means[n] = mean
        members.append(rows[sparse[mine].argmin()])
    n = len(members)
    group = [*range(n), *range(n), *range(n, n + len(singles))]
    return torch.stack([*means[:n], *members, *singles][:most]), torch.tensor(group[:most])
