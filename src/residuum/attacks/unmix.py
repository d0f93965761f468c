"""Unmix: training samples out of one weight matrix, by independent component analysis.

Gradient descent from a small or known start adds multiples of the training samples to every row of a
layer that the input feeds, at any time of the training and whatever the loss, the labels or the
layers above; momentum and Adam keep a mean of such steps:

    W - c W0 = C X,   b - c b0 = C 1       c = 1, or what weight decay left of the start

So the rows are mixtures of samples, and images are sparse in their differences: taking them apart is
blind source separation (for single gradients of federated learning: Kariyappa et al. 2023, "Cocktail
Party Attack"; FastICA: Hyvarinen 1999).

    C X = U S V^T       r of the rows of V^T stand out of the noise of the start
    G = D V_r           differences of neighbouring values (N, r), the domain in which samples are sparse
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
from functools import lru_cache, partial
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor, nn

from residuum.attacks.contract import AtOnce, stream
from residuum.checkpoints.surfaces import WEIGHTS, Surface, noise_edge
from residuum.errors import InputError
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.settings import AttackConfig

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
    def centres(self) -> Tensor:
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
    """(k, N) the values themselves: tables and embeddings have no neighbours."""
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
    centred = x.flatten(1) - x.flatten(1).mean(1, keepdim=True)
    return domain(x).square().sum(1) / centred.square().sum(1)


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


# ---- the attack: which layer, what of it, how hard to look, and what a source is in pixels ----

MOST_BYTES = 16 * 2**30  # a layer that would take more memory is refused before it is read
SPEED = {"cpu": 1e10, "cuda": 1e12}  # of products and tanh a second, on the cautious side
MIN_WEIGHT, MAX_WEIGHT = (
    1e-12,
    1e12,
)  # of the largest weight: sums of squares stay finite in float32
VISIBLE = 0.1  # noise of a start that is too large to see samples through, as a share of S_1
LADDER = (  # from one rank, one strength and one start to all
    Effort(ranks=(0.8,), strengths=(4.0,), starts=1, rounds=1, partitions=()),
    Effort(ranks=(0.8,), strengths=(4.0,), partitions=()),
    Effort(ranks=(0.8, 0.6), partitions=()),
    Effort(),
)
INSIDE = 0.02  # share of its values by which a source may leave the granted range
SLACK = 0.05  # of the range, that a value may lie outside of it
# Probability that a source has |NCC| > 0.8 with a sample: sigmoid(a + b s), s being the share of all runs
# that hold it. Fitted on 217 sources of two networks each on 40 photos (3072-300-300-1) and 20 digits
# (64-200-200-1), seven runs; of sources that half of the runs hold 84% were true. Of one run 56% were.
CONFIDENCE, BASE_RATE = (-2.8, 5.4), 0.56
# See ``disagree``. In the gap of networks on images that no claim uses: of 400 images on 300 neurons runs
# agree on 4.6% of the rank, and 2 of those 11 sources are true; of 400 and 250 on 150 neurons on 6.2%
# and 7.9%, and 14 of those 20 are.
AGREED = 0.055
CONFIDENT_VALUES = (
    784  # of a sample, at least; on 20 and 60 digits of 64 values 1 of 40 was true, not 26
)
SMALL = (
    f"no confidence is shown. For samples with fewer than {CONFIDENT_VALUES} values, repeated runs of the "
    "attack can agree on candidates that are no training samples"
)
DISAGREEING = (
    "runs agree on next to nothing, as where a layer holds more samples than clean directions: "
    "agreement may not tell a true source from a false one there, and confidence is withheld"
)
TOO_FEW_DIRECTIONS = "fewer than two directions of the first layer stand out of the noise"
LARGE_INITIALIZATION = "the initial weights are neither small nor known"
ASSUMES = (
    "unmix assumes that training from a small or known start made the rows of the layer on the input "
    "mixtures of samples, and that samples are sparse in their differences (images, series) or values "
    "(tables); it knows no labels and needs no convergence. It convicts and never acquits."
)


def confidence_by_share(share: Tensor, runs: int, values: int, rank: int = 0) -> Tensor:
    """Return the probability that each source is true, by the share of the runs that hold it.

    Args:
        share: (k,) share of runs that hold each distinct source.
        runs: number of runs.
        values: number of values of a sample.
        rank: of the layer, 0 where it is not known.

    Returns:
        (k,) probabilities. NaN where confidence is withheld: for small samples, and where runs agree on
        next to nothing.
    """
    if values < CONFIDENT_VALUES or (runs > 1 and disagree(share, runs, rank)):
        return torch.full_like(share, torch.nan)
    if runs < 2:
        return torch.full_like(share, BASE_RATE)
    return torch.sigmoid(CONFIDENCE[0] + CONFIDENCE[1] * share)


def disagree(share: Tensor, runs: int, rank: int) -> bool:
    """Whether two runs, and a quarter of all, hold fewer distinct sources than the share ``AGREED`` of
    the rank: the layer holds more samples than come apart.
    """
    return int((share >= max(2, runs / 4) / runs - 1e-6).sum()) < AGREED * rank


@dataclass(frozen=True, eq=False)
class Mixed:
    """What is unmixed.

    rows: (h, d).
    bias: (h,), None where there is none.
    weight: (h, d) of the network itself.
    shape: of what the rows mix.
    whole: whether that is a sample, not a patch of one.
    kept: c.
    """

    rows: Tensor
    bias: Tensor | None
    weight: Tensor
    shape: tuple[int, ...]
    whole: bool
    rank: int
    kept: float


@lru_cache(maxsize=2)  # asked whether it applies, then run
def mixed(surface: Surface, knowledge: Knowledge, domain: str = "") -> Mixed | str:
    """The layer on the input, less its start; or the first condition that it does not meet.

    Conditions in order of cost: there is such a layer, it fits into memory, the start is small or
    known, and at least two directions stand out of its noise.
    """
    name, shape, whole = fed_by_input(surface.model(), surface.shape(knowledge))
    if not name:
        return "no dense layer meets the input, nor a convolution whose stride is its kernel"
    if name not in surface.equations:
        return f"the moment of {name}, which meets the input, is not there"
    theta, start = surface.checkpoint.theta, knowledge.theta0
    rows = surface.target[f"{name}.weight"].flatten(1).float()
    bias = surface.target.get(f"{name}.bias")
    values = DOMAINS[domain_of(domain, shape)](torch.zeros(1, *shape)).shape[1]
    if (needed := layer_bytes(*rows.shape)) > MOST_BYTES:
        return _too_large(needed)
    kept = 1.0
    if start is not None and surface.name == WEIGHTS:
        before = start[f"{name}.weight"].to(rows).flatten(1)
        kept, size = left_of(rows, before), rows.norm()
        rows = rows - kept * before
        if rows.norm() <= 10 * ROUNDING * size:
            return "the first layer is its start, but for a factor and rounding"
        bias = None if bias is None else bias - kept * start[f"{name}.bias"].to(bias)
    largest = float(rows.abs().max())
    if largest and not MIN_WEIGHT <= largest <= MAX_WEIGHT:
        return f"the largest weight of the first layer is {largest:.1g}: its squares would overflow or vanish"
    layer = Layer.of(rows) if bool(rows.any()) else None  # a frozen or dead layer
    if layer is None or layer.rank < 2:
        return TOO_FEW_DIRECTIONS
    if start is None and surface.name == WEIGHTS and layer.edge > VISIBLE:
        return (
            f"{LARGE_INITIALIZATION}: their noise reaches "
            f"{layer.edge:.0%} of the largest singular value"
        )
    full = Effort()
    needed = 12 * len(full.strengths) * full.starts * values * layer.rank
    if needed > MOST_BYTES:
        return _too_large(needed)
    weight = theta[f"{name}.weight"].flatten(1).to(rows)
    bias = None if bias is None else bias.to(rows)
    return Mixed(rows, bias, weight, shape, whole, layer.rank, kept)


def layer_bytes(h: int, d: int) -> int:
    """What ``Layer.of`` holds at a time: the rows, a part of them twice in float64, U and V."""
    part = 16 * min(h, d) * min(max(h, d), COLUMNS)
    return 8 * h * d + part + 24 * min(h, d) ** 2 + (8 * h * d if h > d else 0)


def _too_large(needed: int) -> str:
    return f"it would take about {needed / 2**30:.1f} GiB, above {MOST_BYTES / 2**30:.0f}"


def fed_by_input(model: nn.Module, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], bool]:
    """Name of the layer that meets samples of ``shape``, what its rows mix, and whether that is all.

    Dense, or a convolution whose stride is its kernel: each row is a sum over samples, or patches.
    "" where there is none. One random input shows it: what the layer is given equals the input.
    """
    probe = torch.randn(2, *shape, generator=stream("probe")).to(next(model.parameters()))
    found: dict[str, tuple[int, ...]] = {}

    def look(name: str, layer: nn.Linear | nn.Conv2d, given: tuple[Any, ...]) -> None:
        x = given[0]
        if x.numel() != probe.numel() or not torch.equal(x.flatten(), probe.flatten()):
            return
        if isinstance(layer, nn.Linear):
            found.setdefault(name, (layer.in_features,))
        elif layer.padding in ((0, 0), "valid") and (
            (layer.stride, layer.dilation, layer.groups) == (layer.kernel_size, (1, 1), 1)
        ):
            found.setdefault(name, tuple(layer.weight.shape[1:]))

    hooks = [
        layer.register_forward_pre_hook(partial(look, name))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    try:
        with torch.no_grad():
            model(probe)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        return "", (), False
    name, seen = next(iter(found.items()))
    whole = math.prod(seen) == math.prod(shape)
    return name, shape if whole else seen, whole


def left_of(rows: Tensor, before: Tensor) -> float:
    """c: how much of the start is left, fitted outside of what the samples span, a few times in turn.

    W = c W0 + sum of samples. The regression of W on W0 would count what of W0 lies along samples; the
    part of W0 orthogonal to the change found last does not, and the change needs c: so in turn.
    """
    apart, c = before, math.nan
    for _ in range(4):
        inner = (rows * apart).sum(dtype=torch.float64)
        square = apart.square().sum(dtype=torch.float64)
        last, c = c, float(inner / square.clamp(min=1e-30))
        change = rows - c * before
        if abs(c - last) < 1e-6 or change.norm() <= 10 * ROUNDING * rows.norm():
            break
        layer = Layer.of(change)
        V = layer.V[: min(layer.rank, len(layer.V) - 1)]
        apart = before - (before @ V.T) @ V
    return c


def within(seconds: float, rank: int, values: int, device: str) -> Effort:
    """The most thorough effort that should end in time: the same for the same figures."""
    allowed = seconds * SPEED["cuda" if device.startswith("cuda") else "cpu"]

    def work(effort: Effort) -> float:
        r = [share * rank for share in effort.ranks]
        once = sum(4 * values * k**2 + 40 * values * k + 60 * k**3 for k in r)
        starts = len(effort.strengths) * effort.starts * effort.rounds * effort.iterations
        return once * starts * (1 + len(effort.partitions) / 4)

    fitting = [effort for effort in LADDER if work(effort) <= allowed]
    return fitting[-1] if fitting else LADDER[0]


def named(config: AttackConfig, effort: Effort) -> Effort:
    """``effort`` with the rank, strength and starts that a configuration names, 0 naming none.

    One rank or strength leaves fewer runs to agree, or none: others then start anew, ``restarts`` of them,
    and where no time was left for clusters of neurons an overfull layer takes none either.
    """
    ranks = (config.unmixing.rank,) if config.unmixing.rank else effort.ranks
    strengths = (config.unmixing.strength,) if config.unmixing.strength else effort.strengths
    chosen = config.unmixing.rank or config.unmixing.strength
    return replace(
        effort,
        ranks=ranks,
        strengths=strengths,
        starts=config.unmixing.starts or effort.starts,
        repeats=config.restarts if chosen else effort.repeats,
        overfull_partitions=effort.overfull_partitions if effort.partitions or not chosen else (),
    )


def told(
    found: Sources, layer: Mixed, knowledge: Knowledge, centres: Tensor
) -> tuple[Tensor, Tensor, str]:
    """(k,) signs and sizes of the sources, and what they rest on.

    centres: (groups,) the first source of each group. All members of a group have one sign.
    """
    X = found.x[centres].double()
    # Sources are in float32: of their directions, those below SOUND of the largest are rounding.
    C = torch.linalg.lstsq(X.T, layer.rows.double().T, rcond=SOUND, driver="gelsd").solution.T
    on = (C.square() * (layer.weight.double() @ X.T)).sum(0)
    votes, said = 1.5 * on.sign(), ["the network"]
    size = torch.ones(len(X), dtype=torch.float64)
    if layer.bias is not None:
        b = layer.bias.double()[:, None]
        inverse = torch.linalg.lstsq(C, b, rcond=SOUND, driver="gelsd").solution[:, 0]
        votes, size = votes + inverse.sign(), 1 / inverse.abs().clamp(min=1e-12)
        size = size.clamp(size.median() / 3, 3 * size.median())
        said.append("the bias")
    of = said[-1] if len(said) > 1 else "nothing: length 1"
    box = knowledge.box(torch.zeros(layer.shape, dtype=torch.float64)) if layer.whole else None
    if box is not None:
        up, down = reach(X, *box), reach(-X, *box)
        votes, size = votes + (up - down).sign(), torch.maximum(up, down)
        said.append("the range")
        of = "the range"
    sign = torch.where(votes < 0, -1.0, 1.0)
    alike = (found.x * found.x[centres][found.group]).sum(1).sign()  # versions of one source
    return alike * sign[found.group], size[found.group], f"sign by {', '.join(said)}; size by {of}"


def reach(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """(k,) the largest factors that keep almost all values of (k, d) sources about within bounds.

    A pixel that is never bright has its mean for a bound, so that any noise there would leave it:
    bounds are taken a little wider than they are.
    """
    slack = SLACK * (high - low)
    low, high = (part.flatten().expand(x.shape[1]) for part in (low - slack, high + slack))
    most = torch.where(x > 0, high / x.clamp(min=1e-12), low / x.clamp(max=-1e-12))
    return most.clamp(min=0).quantile(INSIDE, dim=1)


class Unmix(AtOnce):
    """The rows of the layer on the input, taken apart."""

    acquits: ClassVar[bool] = False
    pace: ClassVar[str] = "sized"
    part: ClassVar[float] = 0.25
    assumes: ClassVar[str] = ASSUMES

    def __init__(self, name: str, surface: str) -> None:
        self.name, self.surface = name, surface

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Conditions, cheapest first."""
        if surface.name != self.surface:
            return "needs the state of an optimiser, in the file or of a live one"
        found = mixed(surface, knowledge)
        return found if isinstance(found, str) else ""

    def why(self, surface: Surface) -> str:
        """In a few words."""
        return "the layer on the input holds mixtures of samples, which come apart where sparse"

    def left_out(self, surface: Surface, knowledge: Knowledge) -> str:
        """An audit compares samples."""
        found = mixed(surface, knowledge)
        if isinstance(found, str) or found.whole:
            return ""
        return "its sources are patches, which cannot be compared with samples: residuum attack"

    def find(self, surface: Surface, knowledge: Knowledge, config: AttackConfig) -> Reconstruction:
        """As hard as ``config.seconds`` allow; candidates: what most runs agree on first."""
        layer = mixed(surface, knowledge)
        assert isinstance(layer, Mixed)
        domain = domain_of(config.unmixing.domain, layer.shape)
        values = DOMAINS[domain](torch.zeros(1, *layer.shape)).shape[1]
        effort = named(config, within(config.seconds, layer.rank, values, config.device))
        found = unmix(
            layer.rows.to(config.device), layer.shape, effort, domain=domain, seed=config.seed
        )
        centres = found.centres
        sign, size, said = told(found, layer, knowledge, centres)
        x = (found.x * (sign * size)[:, None]).reshape(-1, *layer.shape).double()
        labels = torch.zeros(len(x))
        held = found.support * found.runs[0] + found.parts * found.runs[1]
        runs = sum(found.runs)
        share = held / runs
        values = math.prod(layer.shape)
        sure = confidence_by_share(share[centres], runs, values, found.rank)
        support = held[centres].round().long()
        chosen = Selection.plain(x, labels, centres, sure, support=support)
        notes = self._notes(layer, found, domain, said)
        if values < CONFIDENT_VALUES:
            notes += (f"{self.name}: {SMALL}",)
        elif runs > 1 and disagree(share[centres], runs, found.rank):
            notes += (f"{self.name}: {DISAGREEING}",)
        result = Reconstruction.at_once(self.name, x, labels, torch.ones(len(x)), knowledge)
        return result.replace(
            status=("finished",) * runs,
            loss=torch.zeros(runs, 0),
            layers=torch.zeros(runs, 0, 0),
            selection=chosen,
            notes=notes,
        )

    def _notes(self, layer: Mixed, found: Sources, domain: str, said: str) -> tuple[str, ...]:
        """What was assumed of samples, and what was run."""
        what = f"{self.name}: samples, or patches, are taken to be sparse in their {domain}"
        if len(layer.shape) == 1 and domain == "coordinates":
            what += ", since no shape is known: grant one for images, name series for signals"
        runs = (
            f"{self.name}: {found.rank} clean directions, {found.runs[0]} runs on the layer and "
            f"{found.runs[1]} on clusters of its neurons; {said}"
        )
        start = f"; {layer.kept:.3g} of the start was taken off" if layer.kept != 1 else ""
        return what, runs + start
