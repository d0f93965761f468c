"""Unmix: recover training samples from one weight matrix by independent component analysis.

Every step of gradient descent adds multiples of training samples to the rows of the input layer. This
holds for every loss, for all labels and for all layers above. Momentum and Adam store averages of such
steps. If the initial weights are small or known, the rows are therefore mixtures of samples:

    W - c W0 = C X,   b - c b0 = C 1       c = 1, or less if weight decay shrank the initial weights

Images are sparse in their differences, so separating the mixtures is blind source separation. For single
gradients in federated learning, see Kariyappa et al. 2023, "Cocktail Party Attack". For FastICA, see
Hyvarinen 1999.

    C X = U S V^T       r of the rows of V^T exceed the noise of the initial weights
    G = D V_r           differences of neighboring values (N, r), the domain in which samples are sparse
    Z = G K^T           whitened, Z^T Z / N = 1
    Q <- polar(E[tanh(a y) z^T] - diag(E[a (1 - tanh^2(a y))]) Q),   y = Q z
    X^ = Q K V_r^T      the samples, up to their order and one factor for each row

The attack assumes only the span of the rows and the sparse differences of the samples. If there are more
samples than clean directions, the layer separates incompletely or not at all. The attack then separates
clusters of neurons one by one, because each cluster mixes fewer samples.

``estimate_signs_and_sizes`` chooses the factor of each source. Three voters choose the sign: the network (a
sample enters the rows of the neurons that it activates), the bias (C 1 contains positive multiples of all
samples), and the known value range. The size is the largest that stays in the value range, or follows from
the bias.

A single start of the iteration usually ends in a poor optimum. A run is therefore a small population: it
has a few starts, followed by rounds in which every member starts again from the sparsest sources of several
other members. Runs differ in rank and strength a, and share only V. A source that several runs find is
probably true.
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

ROUNDING = 1e-7  # rounding of float32, as a share of the largest singular value
CLIFF = 10.0  # ratio of two singular values that separates the samples from the rest
SOUND = 1e-5  # singular values of float32 sources below this share of the largest are rounding
SAME = 0.9  # minimum cosine of two versions of the same source
COLUMNS = 1 << 16  # columns of a wide layer that are converted to float64 at a time
Domain = Callable[[Tensor], Tensor]
DISTINCT = 0.5  # maximum cosine, in the whitened domain, of two sources in the same solution
SMOOTH = 0.6  # sources below this share of the median roughness resemble smooth images of any kind


@dataclass(frozen=True)
class Effort:
    """The amount of computation of the attack.

    Attributes:
        ranks: Ranks of the runs, as shares of the clean rank.
        strengths: Strengths a of the contrast. Large values suit sharp edges.
        starts: Number of members of a population.
        rounds: Number of rounds of a population.
        iterations: Number of iterations in each round.
        partitions: Numbers of clusters into which the attack divides the neurons.
        cluster_ranks: Ranks of the runs on clusters, as shares of the rank of the clusters. By default only
            the first is used.
        overfull: If the runs agree on less than this share of the sources, the layer counts as overfull.
            The attack then uses ``overfull_partitions`` and all ``cluster_ranks`` too. Runs agree on a
            source if at least half of them contain it.
        overfull_partitions: Additional numbers of clusters for an overfull layer.
        lost: If the runs agree on less than this share, the attack uses every partition twice and with
            every strength. This requires ``partitions``.
        repeats: Number of runs for each rank. They differ only in their random start.
        max_sources: Maximum number of returned sources, as a multiple of the clean rank.
    """

    ranks: tuple[float, ...] = (0.8, 0.6, 1.0, 0.7, 0.5, 0.9)
    strengths: tuple[float, ...] = (4.0, 2.0)
    starts: int = 4
    rounds: int = 3
    iterations: int = 40
    partitions: tuple[int, ...] = (2, 4)
    cluster_ranks: tuple[float, ...] = (0.8, 0.6)
    overfull: float = 0.5
    overfull_partitions: tuple[int, ...] = (8, 16, 32)
    lost: float = 0.055
    repeats: int = 1
    max_sources: int = 3


@dataclass(frozen=True, eq=False)
class Sources:
    """The separated sources.

    Attributes:
        x: (k, d) sources of length 1, with the signs that the neurons suggest. Sources on which most runs
            agree come first.
        support: (k,) share of the runs on the whole layer that contain the source.
        cluster_support: (k,) share of the runs on clusters of neurons that contain the source.
        group: (k,) number of the source of which a row is a version.
        runs: Number of runs on the whole layer, and number of runs on clusters.
        rank: Number of clean directions of the layer.
        edge: Edge of the noise, as a share of the largest singular value.
    """

    x: Tensor
    support: Tensor
    cluster_support: Tensor
    group: Tensor
    runs: tuple[int, int]
    rank: int
    edge: float

    @property
    def centers(self) -> Tensor:
        """Index (groups,) of the first row of each source, which is the mean of its versions."""
        numbers = range(int(self.group.max()) + 1)
        return torch.stack([(self.group == g).nonzero()[0, 0] for g in numbers])


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
    """Separate the rows of a layer into sources. The computation runs on the device of ``rows``.

    Args:
        rows: (h, d) mixtures of samples.
        shape: Shape of a sample.
        effort: Amount of computation. The default is the full effort.
        domain: Name in ``DOMAINS``. The default is "differences" if samples have a shape, and "coordinates"
            if they are vectors.
        rank: Number of clean directions. If it is 0, it is estimated from the singular values.
        seed: Seed of the random starts.
        seconds: Time limit. After it, no new run starts, except that the first run always does.

    Returns:
        The sources.

    Raises:
        InputError: If the layer has fewer than two clean directions.
    """
    effort, end = effort or Effort(), time.monotonic() + seconds
    sparse_domain = DOMAINS[choose_domain(domain, shape)]
    layer = Layer.from_rows(rows)
    layer = replace(layer, rank=rank or layer.rank)
    if layer.rank < 2:
        raise InputError(
            f"Unmixing needs at least two clean directions; this layer has {layer.rank}.",
            "Pass the initial weights, or use another attack.",
        )
    separate = partial(_separate, shape=shape, domain=sparse_domain, effort=effort)
    sources_by_run: list[Tensor] = []
    for share, repeat in product(effort.ranks, range(effort.repeats)):
        if not sources_by_run or time.monotonic() < end:
            generator = stream("unmix", seed, str(share), *([repeat] if repeat else []))
            sources_by_run += separate([layer], share, effort.strengths, generator)
    layer_runs = len(sources_by_run)
    partitions, strengths = _choose_partitions(effort, sources_by_run)
    for share, k, repeat in partitions:
        if time.monotonic() < end:
            generator = stream(
                "unmix", seed, "clusters", k, str(share), *([repeat] if repeat else [])
            )
            clusters = [rows[neurons] for neurons in cluster_neurons(layer, k, generator)]
            layers = [Layer.from_rows(cluster) for cluster in clusters if bool(cluster.any())]
            # A partition with one strength counts as one run, because its clusters share samples.
            if sources := separate(layers, share, strengths, generator):
                step = len(strengths)
                sources_by_run += [torch.cat(sources[i::step]) for i in range(step)]
    versions, run = torch.cat(sources_by_run), _run_numbers(sources_by_run)
    if len(partitions) > len(effort.partitions):  # overfull layer: unseparated mixtures are smooth
        rough = roughness(versions.reshape(-1, *shape), sparse_domain)
        is_rough = rough >= SMOOTH * rough.nanmedian()  # False for a source of zeros
        versions, run = versions[is_rough], run[is_rough.cpu()]
    sparse = sparseness(sparse_domain(versions.reshape(-1, *shape)))
    x, group = merge_sources(versions, run, sparse, effort.max_sources * layer.rank)
    in_run = match_runs(x.to(versions), versions, run).cpu().float()
    runs = layer_runs, len(sources_by_run) - layer_runs
    support = in_run[:, :layer_runs].sum(1) / layer_runs
    cluster_support = in_run[:, layer_runs:].sum(1) / max(1, runs[1])
    return Sources(x, support, cluster_support, group, runs, layer.rank, layer.edge)


def _choose_partitions(
    effort: Effort, sources_by_run: list[Tensor]
) -> tuple[list[tuple[float, int, int]], tuple[float, ...]]:
    """Return the partitions (share of the rank, number of clusters, repeat) and the strengths.

    The less the runs agree, the more partitions and strengths are used.

    Args:
        effort: Amount of computation.
        sources_by_run: Sources of every run on the whole layer.

    Returns:
        The partitions and the strengths.
    """
    first = [(effort.cluster_ranks[0], k, 0) for k in effort.partitions]
    versions, first_strength = torch.cat(sources_by_run), effort.strengths[:1]
    count = match_runs(versions, versions, _run_numbers(sources_by_run)).sum(1)
    agreed = float((count >= max(2, len(sources_by_run) / 2)).float().mean())
    if len(sources_by_run) < 2 or agreed >= effort.overfull:
        return first, first_strength
    is_lost = agreed < effort.lost and bool(effort.partitions)
    counts = (*effort.partitions, *effort.overfull_partitions)
    partitions = [
        (share, k, repeat)
        for repeat in range(1 + is_lost)
        for share, k in product(effort.cluster_ranks, counts)
    ]
    added = [partition for partition in partitions if partition not in first]
    return first + added, effort.strengths if is_lost else first_strength


def _run_numbers(sources_by_run: list[Tensor]) -> Tensor:
    """Return the number (k,) of the run of each source."""
    lengths = torch.tensor([len(x) for x in sources_by_run])
    return torch.arange(len(sources_by_run)).repeat_interleave(lengths)


def _separate(
    layers: list[Layer],
    share: float,
    strengths: tuple[float, ...],
    generator: torch.Generator,
    *,
    shape: tuple[int, ...],
    domain: Domain,
    effort: Effort,
) -> list[Tensor]:
    """Separate every layer with every strength. The sources (r, d) have length 1.

    All layers are separated in one batch, so all use the same rank: a share of their median rank. Layers with
    fewer neurons than this rank are skipped. A sample enters only the rows of neurons that it activates. Of
    +x and -x, the true sample therefore has positive products with the rows that contain it:
    sum_j c_j^2 <w_j, x> > 0, where c is its column of C.

    Args:
        layers: The layers.
        share: Rank as a share of the median rank of the layers.
        strengths: Strengths of the contrast.
        generator: Random number generator.
        shape: Shape of a sample.
        domain: Domain in which samples are sparse.
        effort: Amount of computation.

    Returns:
        The sources, for each layer and within it for each strength.
    """
    r = max(2, round(share * sorted(layer.rank for layer in layers)[len(layers) // 2]))
    layers = [layer for layer in layers if len(layer.U) > r]
    if not layers:
        return []
    white = [whiten(layer.V[:r].reshape(-1, *shape), domain) for layer in layers]
    Z = torch.stack([Z for Z, _ in white for _ in strengths])
    a = torch.tensor(strengths * len(layers)).to(Z)
    Q = iter(run_population(Z, a, effort.starts, effort.rounds, effort.iterations, generator))
    sources = []
    for layer, (_, K) in zip(layers, white, strict=True):
        V, A = layer.V[:r], (layer.U[:, :r] * layer.S[:r]).to(layer.V)
        for _ in strengths:
            B = next(Q) @ K
            C, singular = torch.linalg.solve_ex(B, A, left=False)
            if singular:  # two sources of a small cluster coincide
                C = A @ torch.linalg.pinv(B)
            sign = (C.square() * (A @ B.T)).sum(0).sign()
            sources.append(torch.nn.functional.normalize(B @ V) * sign[:, None])
    return sources


@dataclass(frozen=True, eq=False)
class Layer:
    """Singular value decomposition U S V^T of the rows (h, d) of a layer.

    Attributes:
        U: Left singular vectors.
        S: Singular values, largest first.
        V: Right singular vectors, one in each row.
        rank: Number of singular values above the noise.
        edge: Edge of the noise, as a share of the largest singular value.
    """

    U: Tensor
    S: Tensor
    V: Tensor
    rank: int
    edge: float

    @classmethod
    def from_rows(cls, rows: Tensor) -> Layer:
        """Decompose the rows of a layer by means of the smaller Gram matrix in float64.

        The eigenvalues of the Gram matrix are squares, so singular values below 1e-8 of the largest are lost.
        For weights in float32, such small values are rounding.

        Args:
            rows: (h, d) rows of the layer.

        Returns:
            The decomposition.
        """
        h, d = rows.shape
        blocks = rows.split(COLUMNS, int(h <= d))
        gram = torch.zeros(())
        for block in map(Tensor.double, blocks):
            gram = gram.to(block) + (block @ block.T if h <= d else block.T @ block)
        squares, vectors = torch.linalg.eigh(gram)
        S, vectors = squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
        inverse = torch.where(1e-8 * S[0] < S, 1 / S, 0.0)
        if h <= d:
            V = [(inverse[:, None] * (vectors.T @ block.double())).float() for block in blocks]
            return cls(vectors, S, torch.cat(V, 1), *estimate_clean_rank(S.cpu(), h, d))
        U = torch.cat([(block.double() @ vectors) * inverse for block in blocks])
        return cls(U, S, vectors.T.float(), *estimate_clean_rank(S.cpu(), h, d))


def estimate_clean_rank(values: Tensor, h: int, d: int) -> tuple[int, float]:
    """Estimate how many singular values of the rows come from training samples, and the noise edge.

    Singular values count if they are above the noise edge and above rounding. An optimizer state or a
    weight update contains no noise of the initialization. There the count ends at the cliff, which is the
    largest ratio of two successive singular values, if that ratio is at least ten.

    Args:
        values: Singular values, largest first.
        h: Number of rows.
        d: Number of columns.

    Returns:
        The number of clean directions, and the noise edge as a share of the largest singular value.
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
    """Return the first differences (k, N) of samples (k, *shape) along their last two axes or only axis."""
    by_axis = [x.diff(dim=axis).flatten(1) for axis in range(-1, -min(x.ndim - 1, 2) - 1, -1)]
    return torch.cat(by_axis, 1)


def series(x: Tensor) -> Tensor:
    """Return the first differences (k, N) of samples (k, *shape) along the last axis, which is time."""
    return x.diff(dim=-1).flatten(1)


def coordinates(x: Tensor) -> Tensor:
    """Return the values themselves (k, N), because tables and embeddings have no neighboring values."""
    return x.flatten(1)


DOMAINS: dict[str, Domain] = {
    "differences": differences,
    "series": series,
    "coordinates": coordinates,
}


def choose_domain(name: str, shape: tuple[int, ...]) -> str:
    """Choose the domain in which samples are sparse.

    Args:
        name: Key of ``DOMAINS``. For "auto" or "", the shape decides.
        shape: Shape of a sample.

    Returns:
        The name. If the shape decides, it is "differences" if samples have more than one axis, and
        "coordinates" otherwise.
    """
    if name in DOMAINS:
        return name
    return "differences" if len(shape) > 1 else "coordinates"


def whiten(directions: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """Whiten directions in a domain: Z = (differences - mean) K^T has unit covariance.

    After whitening, every mixture of independent sources is a rotation of the sources. The search is then
    limited to orthogonal r x r matrices.

    Args:
        directions: (r, *shape) directions.
        domain: Domain in which samples are sparse.

    Returns:
        Z (N, r) and K (r, r).
    """
    G = domain(directions).T
    G = G - G.mean(0)
    squares, vectors = torch.linalg.eigh((G.T @ G / len(G)).double())
    K = (vectors / squares.clamp(min=1e-12 * squares[-1]).sqrt()).T.to(G)
    return G @ K.T, K


def polar(P: Tensor, tolerance: float = 1e-4, max_iterations: int = 40) -> Tensor:
    """Return the nearest orthogonal matrices, (P P^T)^(-1/2) P.

    On a GPU, the function uses the Newton-Schulz iteration, which needs only matrix products. Eigenvalues
    take ten times as long there.

    Args:
        P: (..., r, r) matrices.
        tolerance: Maximum error of Q^T Q at which the iteration stops.
        max_iterations: Maximum number of iterations.

    Returns:
        (..., r, r) orthogonal matrices.
    """
    if P.device.type == "cpu":
        squares, vectors = torch.linalg.eigh(P @ P.mT)
        floor = torch.finfo(P.dtype).eps * squares[..., -1:]
        scaled = vectors * torch.maximum(squares, floor).rsqrt()[..., None, :]
        return scaled @ (vectors.mT @ P)
    norms = torch.linalg.matrix_norm(P, 1) * torch.linalg.matrix_norm(P, math.inf)
    Q = P / norms.sqrt()[..., None, None]
    identity = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    for k in range(max_iterations):
        square = Q.mT @ Q
        if k % 4 == 3 and float((square - identity).abs().max()) < tolerance:
            break
        Q = 1.5 * Q - 0.5 * Q @ square
    return Q


def fastica(Z: Tensor, Q: Tensor, a: Tensor, iterations: int, tolerance: float = 1e-4) -> Tensor:
    """Run symmetric FastICA with the contrast log cosh(a y) on P problems with B starts each.

    Args:
        Z: (P, N, r) whitened data.
        Q: (P, B, r, r) starts, with one source in each row.
        a: (P,) strengths of the contrast.
        iterations: Maximum number of iterations.
        tolerance: Maximum change of a source at which the iteration stops.

    Returns:
        (P, B, r, r) solutions.
    """
    Z, a, N = Z[:, None], a[:, None, None, None], Z.shape[1]
    for _ in range(iterations):
        g = (Z @ (a * Q).mT).tanh_()  # (P, B, N, r)
        slope = a * (1 - g.square().mean(2, keepdim=True))
        new = polar(g.mT @ Z / N - slope.mT * Q)
        change = float(((new * Q).sum(3).abs() - 1).abs().max())
        Q = new
        if change < tolerance:
            break
    return Q


def contrast(Z: Tensor, Q: Tensor, a: Tensor) -> Tensor:
    """Return the contrast E log cosh(a y) / a of every source. Sparse sources have small values.

    Args:
        Z: (P, N, r) whitened data.
        Q: (P, B, r, r) solutions, with one source in each row.
        a: (P,) strengths of the contrast.

    Returns:
        (P, B, r) contrasts.
    """
    a = a[:, None, None, None]
    y = (a * (Z[:, None] @ Q.mT)).abs()
    return ((y + torch.log1p(torch.exp(-2 * y)) - math.log(2)) / a).mean(2)


def run_population(
    Z: Tensor, a: Tensor, starts: int, rounds: int, iterations: int, generator: torch.Generator
) -> Tensor:
    """Run FastICA from several starts, which exchange sources between rounds.

    Args:
        Z: (P, N, r) whitened data.
        a: (P,) strengths of the contrast.
        starts: Number of starts.
        rounds: Number of rounds.
        iterations: Maximum number of iterations in each round.
        generator: Random number generator.

    Returns:
        (P, r, r) the best solution of each problem.
    """
    P, _, r = Z.shape
    Q = torch.linalg.qr(torch.randn(P, starts, r, r, generator=generator))[0].to(Z)
    for remaining in reversed(range(rounds)):
        Q = fastica(Z, Q, a, iterations)
        sparse = contrast(Z, Q, a)
        if remaining and starts > 1:
            pairs = zip(Q.cpu(), sparse.cpu(), strict=True)
            children = torch.stack([cross_solutions(q, s, generator) for q, s in pairs])
            Q = polar(children.to(Z), max_iterations=100)
    return Q[torch.arange(P, device=Q.device), sparse.sum(2).argmin(1)]


def cross_solutions(Q: Tensor, sparse: Tensor, generator: torch.Generator) -> Tensor:
    """Build the starts of the next round from the sparsest distinct sources of several members.

    FastICA finds only some of the sources from each start, and different starts find different sources. Each
    new start combines about three in five of the members. Missing rows are filled with small noise, which
    ``polar`` turns into directions orthogonal to the sources.

    Args:
        Q: (B, r, r) solutions of the members.
        sparse: (B, r) contrasts of their sources.
        generator: Random number generator.

    Returns:
        (B, r, r) starts, not orthogonal yet.
    """
    B, r, _ = Q.shape
    pool, score = Q.reshape(B * r, r), sparse.flatten()
    owner = torch.arange(B).repeat_interleave(r)
    children = []
    for b in range(B):
        parents = torch.rand(B, generator=generator) < 0.6
        parents[b] = True
        index = parents[owner].nonzero().flatten()
        index = index[score[index].argsort()]
        rows = pool[index[find_distinct(pool[index], DISTINCT)[:r]]]
        noise = 0.01 * torch.randn(r - len(rows), r, generator=generator)
        children.append(torch.cat([rows, noise]))
    return torch.stack(children)


def find_distinct(rows: Tensor, similarity: float) -> Tensor:
    """Find the rows that are not similar to an earlier selected row.

    Args:
        rows: (n, d) rows of length 1.
        similarity: Minimum absolute cosine of two similar rows.

    Returns:
        Indices of the selected rows, in ascending order.
    """
    is_similar = ((rows @ rows.T).abs() >= similarity).numpy()
    selected, free = [], np.ones(len(rows), dtype=bool)
    for i in range(len(rows)):
        if free[i]:
            selected.append(i)
            free &= ~is_similar[i]
    return torch.tensor(selected)


def cluster_neurons(layer: Layer, k: int, generator: torch.Generator) -> list[Tensor]:
    """Divide the neurons of a layer into groups with similar directions.

    If there are more samples than clean directions, the whole layer cannot be separated. Neurons that are
    active on the same samples mix fewer samples.

    Args:
        layer: The layer.
        k: Number of groups.
        generator: Random number generator.

    Returns:
        Indices of the neurons in each group.
    """
    rows = torch.nn.functional.normalize(layer.U * layer.S)[:, : layer.rank]
    seed = int(torch.randint(2**31, (), generator=generator))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # clusters can be empty if rows are zero or few
        _, label = kmeans2(rows.cpu().numpy(), k, minit="++", seed=seed)
    return [torch.from_numpy(label == i).nonzero().flatten() for i in range(k)]


def sparseness(y: Tensor) -> Tensor:
    """Return E|y| / sqrt(E y^2) of each source (k,). Sparse sources have small values."""
    return y.abs().mean(1) / y.square().mean(1).sqrt()


def roughness(x: Tensor, domain: Domain) -> Tensor:
    """Return the energy in the sparse domain divided by the energy around the mean.

    Args:
        x: (k, *shape) sources.
        domain: Domain in which samples are sparse.

    Returns:
        (k,) ratios.
    """
    centered = x.flatten(1) - x.flatten(1).mean(1, keepdim=True)
    return domain(x).square().sum(1) / centered.square().sum(1)


def match_runs(x: Tensor, versions: Tensor, run: Tensor) -> Tensor:
    """Find the runs that contain a version of each source.

    Args:
        x: (k, d) sources.
        versions: (n, d) sources of all runs.
        run: (n,) number of the run of each of them.

    Returns:
        (k, runs) True if the run contains a source that is similar to the given source.
    """
    member = torch.nn.functional.one_hot(run).to(versions)
    in_run = [
        ((block @ versions.T).abs() >= SAME).to(versions) @ member > 0 for block in x.split(4096)
    ]
    return torch.cat(in_run)


def merge_sources(
    x: Tensor, run: Tensor, sparse: Tensor, max_sources: int
) -> tuple[Tensor, Tensor]:
    """Merge the versions of each source and sort the sources, best first.

    A group starts with an ungrouped source: first the sources that most runs contain, and among these the
    sparsest. It takes all ungrouped sources that are similar. The result lists, in this order:

    - the mean of each group of at least two runs, unless it is similar to an earlier mean;
    - the sparsest member of each of these groups, because means are blurred;
    - the sources of single runs, sparsest first.

    Args:
        x: (k, d) sources of all runs.
        run: (k,) number of the run of each source.
        sparse: (k,) sparseness of each source.
        max_sources: Maximum number of returned sources.

    Returns:
        The sources, and the group of each.
    """
    support = match_runs(x, x, run).sum(1).cpu()
    cosines, x, sparse = (x @ x.T).cpu(), x.cpu(), sparse.cpu()
    order = (support - 0.999 * sparse.argsort().argsort() / len(x)).argsort(descending=True)
    free = torch.ones(len(x), dtype=torch.bool)
    means, members, singles = torch.empty_like(x), list[Tensor](), list[Tensor]()
    for i in order.tolist():
        if not free[i]:
            continue
        index = (free & (cosines[i].abs() >= SAME)).nonzero().flatten()
        free[index] = False
        if support[i] < 2:
            singles.append(x[i])
            continue
        sign = cosines[i, index].sign()  # most members decide the sign of the group
        rows = x[index] * (sign * (1.0 if sign.sum() >= 0 else -1.0))[:, None]
        mean, n = torch.nn.functional.normalize(rows.mean(0), dim=0), len(members)
        if n and float((means[:n] @ mean).abs().max()) >= SAME:
            continue
        means[n] = mean
        members.append(rows[sparse[index].argmin()])
    n = len(members)
    group = [*range(n), *range(n), *range(n, n + len(singles))]
    x = torch.stack([*means[:n], *members, *singles][:max_sources])
    return x, torch.tensor(group[:max_sources])
