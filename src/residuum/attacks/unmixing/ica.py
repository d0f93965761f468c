"""The attack "unmix": recover training samples from one weight matrix by independent component analysis.

Every step of gradient descent adds multiples of training samples to the rows of the input layer, whatever the
loss, the labels and the layers above. Momentum and Adam store averages of such steps. If the initial weights
are small or known, the rows are therefore mixtures of samples:

    W - c W0 = C X,   b - c b0 = C 1       c = 1, or less if weight decay shrank the initial weights

W and b are the weights and biases of the layer, W0 and b0 their initial values. The rows of X are samples,
and C holds the coefficients of the mixtures. Images are sparse in their differences, so separating the
mixtures is blind source separation. For single gradients in federated learning, see Kariyappa et al. 2023,
"Cocktail Party Attack". For FastICA, see Hyvarinen 1999.

    C X = U S V^T       r of the rows of V^T exceed the noise of the initial weights
    G = D V_r           differences of neighboring values (N, r), the domain in which samples are sparse
    Z = G K^T           whitened, Z^T Z / N = 1
    Q <- polar(E[tanh(a y) z^T] - diag(E[a (1 - tanh^2(a y))]) Q),   y = Q z
    X^ = Q K V_r^T      the samples, up to their order and one factor for each row

The attack assumes only the span of the rows and the sparse differences of the samples. The rank of the layer
is the number of singular values of C X that exceed the noise. If there are more samples than the rank, the
rows separate incompletely or not at all. The attack then separates clusters of neurons one by one, because
each cluster mixes fewer samples.

``estimate_signs_and_sizes`` chooses the sign and the size of each source. Three votes decide the sign: the
network (a sample enters the rows of the neurons that it activates), the bias (C 1 contains positive multiples
of all samples), and the known value range. The size is the largest size at which the source stays in the
value range. If the value range is not known, the size follows from the bias.

A single start of the iteration usually ends in a poor optimum. A run is therefore a small population: it
has a few starts, followed by rounds in which every member starts again from the sparsest sources of several
other members. Runs use different ranks r and strengths a, and share only the singular vectors V. A source
that several runs find is probably a training sample.
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

# Singular values of float32 weights below this share of the largest singular value are rounding errors.
ROUNDING = 1e-7
# Let two successive singular values be given, the first from training samples and the second from noise.
# Their ratio is at least this number.
CLIFF = 10.0
# Singular values of float32 sources below this share of the largest singular value are rounding errors.
SOUND = 1e-5
SAME = 0.9  # minimum absolute cosine similarity of two versions of the same sample
# Number of columns of a wide layer that are converted to float64 at a time, to limit the memory.
COLUMNS = 1 << 16
Domain = Callable[[Tensor], Tensor]
# Two sources (recovered samples) count as different if their absolute cosine similarity is at most this.
DISTINCT = 0.5
# Candidates with a roughness below this share of the median roughness are unseparated mixtures of samples.
SMOOTH = 0.6


@dataclass(frozen=True)
class Effort:
    """The amount of computation of the attack "unmix", which makes several runs.

    The rank of a layer is the number of singular values of its weight matrix that exceed the noise.

    Attributes:
        ranks: Number of separated sources in the runs, as shares of the rank of the layer.
        strengths: Strengths a of the contrast log cosh(a y) of a source y, which FastICA optimizes. Large
            values suit images with sharp edges.
        starts: Number of starting points of a run.
        rounds: Number of rounds of a run. Each round after the first starts from combinations of the sources
            that the starting points of the previous round found.
        iterations: Number of FastICA iterations in each round.
        partitions: Numbers of clusters into which the attack divides the neurons. The attack separates each
            cluster on its own.
        cluster_ranks: Number of separated sources in the runs on clusters, as shares of the rank of the
            clusters. The attack uses only the first share, unless the layer mixes too many samples
            (``overfull``).
        overfull: If the runs agree on less than this share of the sources, the layer counts as overfull,
            because it mixes too many samples. The attack then also uses ``overfull_partitions`` and all
            ``cluster_ranks``. The runs agree on a source if at least half of the runs contain it.
        overfull_partitions: Additional numbers of clusters for an overfull layer.
        lost: If the runs agree on less than this share of the sources, the attack uses every partition
            twice and with every strength. This requires ``partitions``.
        repeats: Number of runs for each rank. Repeated runs differ only in their random starting points.
        max_sources: Maximum number of returned sources, as a multiple of the rank of the layer.
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
    """The sources (samples up to sign and size) into which the attack separated the rows of a layer.

    Attributes:
        x: (k, d) sources of length 1. Their signs are chosen so that the sources activate the neurons in
            whose rows they appear. Sources on which most runs agree come first.
        support: (k,) share of the runs on the whole layer that contain the source.
        cluster_support: (k,) share of the runs on clusters of neurons that contain the source.
        group: (k,) number of the group of each row of ``x``. Similar sources of several runs form a group.
            The rows of a group are the mean of the group and the source of a single run.
        runs: Number of runs on the whole layer, and number of runs on clusters.
        rank: Number of singular values of the layer's weights above the noise of the initial weights.
        edge: Largest singular value of the noise, as a share of the largest singular value of the layer.
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
        """(groups,) index of the first source of each group of similar sources: the mean of the group."""
        group_numbers = range(int(self.group.max()) + 1)
        return torch.stack([(self.group == g).nonzero()[0, 0] for g in group_numbers])


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
    """Separate the rows of a layer, which mix samples, into the samples up to sign and size (sources).

    The computation runs on the device of ``rows``.

    Args:
        rows: (h, d) mixtures of samples.
        shape: Shape of a sample.
        effort: Amount of computation. The default is the largest amount.
        domain: Name in ``DOMAINS`` of the domain in which samples are sparse. The default is "differences"
            if samples have more than one axis, and "coordinates" if samples are vectors.
        rank: Number of singular values of ``rows`` that exceed the noise. If ``rank`` is 0, this number is
            estimated from the singular values.
        seed: Seed of the random starting points.
        seconds: Time limit. After the limit, no new run starts. The first run always starts.

    Returns:
        The sources.

    Raises:
        InputError: If fewer than two singular values of the layer exceed the noise.
    """
    effort, end = effort or Effort(), time.monotonic() + seconds
    sparse_domain = DOMAINS[choose_domain(domain, shape)]
    layer = Layer.from_rows(rows)
    layer = replace(layer, rank=rank or layer.rank)
    if layer.rank < 2:
        raise InputError(
            f"The attack 'unmix' needs a weight matrix with at least two singular values above the noise "
            f"of the initial weights; the matrix of this layer has {layer.rank}.",
            "Pass the initial weights, or use another attack.",
        )
    separate = partial(_separate, shape=shape, domain=sparse_domain, effort=effort)
    sources_by_run: list[Tensor] = []
    for share, repeat in product(effort.ranks, range(effort.repeats)):
        if not sources_by_run or time.monotonic() < end:
            generator = stream("unmix", seed, str(share), *([repeat] if repeat else []))
            sources_by_run += separate([layer], share, effort.strengths, generator)
    layer_run_count = len(sources_by_run)
    partitions, strengths = _choose_partitions(effort, sources_by_run)
    for share, k, repeat in partitions:
        if time.monotonic() < end:
            generator = stream(
                "unmix", seed, "clusters", k, str(share), *([repeat] if repeat else [])
            )
            clusters = [rows[neurons] for neurons in cluster_neurons(layer, k, generator)]
            layers = [Layer.from_rows(cluster) for cluster in clusters if bool(cluster.any())]
            # The neurons are divided into clusters, and samples are recovered from each cluster. Two
            # clusters can recover the same sample, so all clusters together count as one run.
            if sources := separate(layers, share, strengths, generator):
                stride = len(strengths)
                sources_by_run += [torch.cat(sources[i::stride]) for i in range(stride)]
    versions, run = torch.cat(sources_by_run), _run_numbers(sources_by_run)
    # If the layer mixes very many samples (more partitions than planned), some recovered sources are still
    # mixtures. Mixtures are smooth, so smooth sources are dropped.
    if len(partitions) > len(effort.partitions):
        source_roughness = roughness(versions.reshape(-1, *shape), sparse_domain)
        is_rough = (
            source_roughness >= SMOOTH * source_roughness.nanmedian()
        )  # False if a source is zero
        versions, run = versions[is_rough], run[is_rough.cpu()]
    sparseness_ratios = sparseness(sparse_domain(versions.reshape(-1, *shape)))
    x, group = merge_sources(versions, run, sparseness_ratios, effort.max_sources * layer.rank)
    in_run = match_runs(x.to(versions), versions, run).cpu().float()
    run_counts = layer_run_count, len(sources_by_run) - layer_run_count
    share_of_runs = in_run[:, :layer_run_count].sum(1) / layer_run_count
    cluster_support = in_run[:, layer_run_count:].sum(1) / max(1, run_counts[1])
    return Sources(x, share_of_runs, cluster_support, group, run_counts, layer.rank, layer.edge)


def _choose_partitions(
    effort: Effort, sources_by_run: list[Tensor]
) -> tuple[list[tuple[float, int, int]], tuple[float, ...]]:
    """Choose into which clusters the neurons are divided, and with which settings each cluster is processed.

    A partition divides the neurons into clusters. A strength is the factor a of the contrast log cosh(a y) of
    a source y. The less the runs on the whole layer agree, the more partitions and strengths are used.

    Args:
        effort: Amount of computation.
        sources_by_run: Sources of every run on the whole layer.

    Returns:
        The partitions and the strengths. Each partition is a tuple of the rank (as a share of the rank of the
        clusters), the number of clusters, and the index of the repetition.
    """
    base_partitions = [(effort.cluster_ranks[0], k, 0) for k in effort.partitions]
    versions, first_strength = torch.cat(sources_by_run), effort.strengths[:1]
    run_counts = match_runs(versions, versions, _run_numbers(sources_by_run)).sum(1)
    agreed_share = float((run_counts >= max(2, len(sources_by_run) / 2)).float().mean())
    if len(sources_by_run) < 2 or agreed_share >= effort.overfull:
        return base_partitions, first_strength
    has_no_agreement = agreed_share < effort.lost and bool(effort.partitions)
    cluster_counts = (*effort.partitions, *effort.overfull_partitions)
    partitions = [
        (share, k, repeat)
        for repeat in range(1 + has_no_agreement)
        for share, k in product(effort.cluster_ranks, cluster_counts)
    ]
    added_partitions = [partition for partition in partitions if partition not in base_partitions]
    return (
        base_partitions + added_partitions,
        effort.strengths if has_no_agreement else first_strength,
    )


def _run_numbers(sources_by_run: list[Tensor]) -> Tensor:
    """Return for each source (recovered sample) the number of the run that found it."""
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
    """Separate the rows of every layer into sources of length 1, once with each strength of the contrast.

    All layers are separated in one batch, so all use the same rank r: a share of their median rank. Layers
    with fewer neurons than r are skipped.

    A sample x enters only the rows w_j of neurons that the sample activates. The sign of x is therefore the
    sign at which sum_j c_j^2 <w_j, x> > 0, where c_j is the coefficient of x in the row w_j.

    Args:
        layers: The layers, whose rows are mixtures of samples.
        share: Rank r as a share of the median rank of the layers.
        strengths: Strengths a of the contrast log cosh(a y) of a source y.
        generator: Random number generator.
        shape: Shape of a sample.
        domain: Name of the transform that makes most values of samples nearly zero.
        effort: Amount of computation.

    Returns:
        The sources (r, d) for each pair of a layer and a strength. The pairs of the first layer come first.
    """
    source_count = max(2, round(share * sorted(layer.rank for layer in layers)[len(layers) // 2]))
    layers = [layer for layer in layers if len(layer.U) > source_count]
    if not layers:
        return []
    whitened = [whiten(layer.V[:source_count].reshape(-1, *shape), domain) for layer in layers]
    whitened_data = torch.stack([whitened_data for whitened_data, _ in whitened for _ in strengths])
    contrast_strengths = torch.tensor(strengths * len(layers)).to(whitened_data)
    solution_iterator = iter(
        run_population(
            whitened_data,
            contrast_strengths,
            effort.starts,
            effort.rounds,
            effort.iterations,
            generator,
        )
    )
    sources = []
    for layer, (_, K) in zip(layers, whitened, strict=True):
        V, A = (
            layer.V[:source_count],
            (layer.U[:, :source_count] * layer.S[:source_count]).to(layer.V),
        )
        for _ in strengths:
            sources.append(orient_sources(next(solution_iterator) @ K, A, V))
    return sources


def orient_sources(B: Tensor, A: Tensor, V: Tensor) -> Tensor:
    """Scale recovered sources B V to length 1, and give them the sign of the samples.

    The rows A V of a layer are mixtures C B V of the sources. The sign is explained in :func:`_separate`.

    Args:
        B: (r, r) coefficients of the sources in the directions V. B is singular if two sources coincide.
        A: (h, r) coefficients of the rows in the directions V.
        V: (r, d) orthonormal directions.

    Returns:
        The sources (r, d).
    """
    mixing_coefficients, singular = torch.linalg.solve_ex(B, A, left=False)
    if singular:  # the matrix has no inverse, because two estimated samples are equal
        mixing_coefficients = A @ torch.linalg.pinv(B)
    source_signs = (mixing_coefficients.square() * (A @ B.T)).sum(0).sign()
    return torch.nn.functional.normalize(B @ V) * source_signs[:, None]


@dataclass(frozen=True, eq=False)
class Layer:
    """The singular value decomposition U S V^T of the weight matrix of a layer, with h rows of d values.

    Attributes:
        U: Left singular vectors.
        S: Singular values, largest first.
        V: Right singular vectors, one in each row.
        rank: Number of singular values above the noise.
        edge: Largest singular value of the noise, as a share of the largest singular value of the layer.
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
        For weights in float32, such small values are rounding errors.

        Args:
            rows: (h, d) rows of the layer.

        Returns:
            The decomposition.
        """
        h, d = rows.shape
        blocks = rows.split(COLUMNS, int(h <= d))
        gram_matrix = torch.zeros(())
        for block in map(Tensor.double, blocks):
            gram_matrix = gram_matrix.to(block) + (block @ block.T if h <= d else block.T @ block)
        squares, vectors = torch.linalg.eigh(gram_matrix)
        S, vectors = squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
        inverse_values = torch.where(1e-8 * S[0] < S, 1 / S, 0.0)
        if h <= d:
            right_vector_blocks = [
                (inverse_values[:, None] * (vectors.T @ block.double())).float() for block in blocks
            ]
            return cls(
                vectors, S, torch.cat(right_vector_blocks, 1), *estimate_clean_rank(S.cpu(), h, d)
            )
        left_vectors = torch.cat([(block.double() @ vectors) * inverse_values for block in blocks])
        return cls(left_vectors, S, vectors.T.float(), *estimate_clean_rank(S.cpu(), h, d))


def estimate_clean_rank(values: Tensor, h: int, d: int) -> tuple[int, float]:
    """Estimate how many singular values of a layer come from training samples.

    Singular values count if they exceed the largest singular value of the noise (the noise edge) and the
    rounding errors. An optimizer state or a weight update contains no noise of the initialization, so their
    singular values can fall abruptly. If the largest ratio of two successive values is at least ten, only the
    values before this fall count.

    Args:
        values: Singular values, largest first.
        h: Number of rows.
        d: Number of columns.

    Returns:
        The number of singular values from samples, and the noise edge as a share of the largest singular
        value.
    """
    rank, edge = noise_edge(values, h, d)
    rounding_threshold = ROUNDING * float(values[0])
    rank = min(rank, int((values > rounding_threshold).sum()))
    clamped_values = values.clamp(min=rounding_threshold)[1 : rank + 1]
    successive_ratios = clamped_values[:-1] / clamped_values[1:]
    if len(successive_ratios) and float(successive_ratios.max()) >= CLIFF:
        rank = 2 + int(successive_ratios.argmax())
    return rank, edge


def differences(x: Tensor) -> Tensor:
    """Return the first differences (k, N) of samples (k, *shape) along the last two axes.

    If samples have a single axis, the differences are along this axis.

    Returns:
        The differences along all axes, as one row for each sample.
    """
    by_axis = [x.diff(dim=axis).flatten(1) for axis in range(-1, -min(x.ndim - 1, 2) - 1, -1)]
    return torch.cat(by_axis, 1)


def series(x: Tensor) -> Tensor:
    """Return the first differences (k, N) of samples (k, *shape) along the last axis, which is time."""
    return x.diff(dim=-1).flatten(1)


def coordinates(x: Tensor) -> Tensor:
    """Return the values (k, N) of samples unchanged, for tables and embeddings without neighboring values."""
    return x.flatten(1)


DOMAINS: dict[str, Domain] = {
    "differences": differences,
    "series": series,
    "coordinates": coordinates,
}


def choose_domain(name: str, shape: tuple[int, ...]) -> str:
    """Choose the domain in which samples are sparse.

    Args:
        name: Key of ``DOMAINS``. For "auto" or "", the shape of a sample decides.
        shape: Shape of a sample.

    Returns:
        The key of the domain. If the shape decides, the key is "differences" for samples with more than one
        axis, and "coordinates" otherwise.
    """
    if name in DOMAINS:
        return name
    return "differences" if len(shape) > 1 else "coordinates"


def whiten(directions: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """Transform directions so that samples become sparse, and whiten the result (unit covariance).

    The result Z = (mapped directions - mean) K^T has unit covariance. After whitening, every mixture of
    independent sources is a rotation of the sources. The search is then limited to orthogonal r x r
    matrices.

    Args:
        directions: (r, *shape) directions that span the rows of a layer.
        domain: Name of the transform that makes most values of samples nearly zero.

    Returns:
        The whitened directions Z (N, r) and the whitening matrix K (r, r).
    """
    transformed_directions = domain(directions).T
    transformed_directions = transformed_directions - transformed_directions.mean(0)
    squares, vectors = torch.linalg.eigh(
        (transformed_directions.T @ transformed_directions / len(transformed_directions)).double()
    )
    whitening_matrix = (vectors / squares.clamp(min=1e-12 * squares[-1]).sqrt()).T.to(
        transformed_directions
    )
    return transformed_directions @ whitening_matrix.T, whitening_matrix


def polar(P: Tensor, tolerance: float = 1e-4, max_iterations: int = 40) -> Tensor:
    """Return the orthogonal matrix (P P^T)^(-1/2) P that is nearest to each matrix P.

    On a GPU, the function uses the Newton-Schulz iteration, which needs only matrix products. An
    eigenvalue decomposition takes ten times as long on a GPU.

    Args:
        P: (..., r, r) matrices.
        tolerance: Maximum difference between Q^T Q and the identity at which the iteration stops.
        max_iterations: Maximum number of iterations.

    Returns:
        (..., r, r) orthogonal matrices.
    """
    if P.device.type == "cpu":
        squares, vectors = torch.linalg.eigh(P @ P.mT)
        smallest_square = torch.finfo(P.dtype).eps * squares[..., -1:]
        scaled_vectors = vectors * torch.maximum(squares, smallest_square).rsqrt()[..., None, :]
        return scaled_vectors @ (vectors.mT @ P)
    norms = torch.linalg.matrix_norm(P, 1) * torch.linalg.matrix_norm(P, math.inf)
    orthogonal_matrices = P / norms.sqrt()[..., None, None]
    identity_matrix = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    for k in range(max_iterations):
        gram_matrices = orthogonal_matrices.mT @ orthogonal_matrices
        if k % 4 == 3 and float((gram_matrices - identity_matrix).abs().max()) < tolerance:
            break
        orthogonal_matrices = 1.5 * orthogonal_matrices - 0.5 * orthogonal_matrices @ gram_matrices
    return orthogonal_matrices


def fastica(Z: Tensor, Q: Tensor, a: Tensor, iterations: int, tolerance: float = 1e-4) -> Tensor:
    """Run symmetric FastICA from B starting points for each of P problems.

    FastICA searches for sparse sources y, which have a small contrast E log cosh(a y).

    Args:
        Z: (P, N, r) whitened data of each problem.
        Q: (P, B, r, r) starting points, orthogonal matrices with one source in each row.
        a: (P,) strength a of the contrast in each problem.
        iterations: Maximum number of iterations.
        tolerance: Maximum change of a source at which the iteration stops.

    Returns:
        (P, B, r, r) solutions.
    """
    Z, a, N = Z[:, None], a[:, None, None, None], Z.shape[1]
    for _ in range(iterations):
        tanh_values = (Z @ (a * Q).mT).tanh_()  # (P, B, N, r)
        slope = a * (1 - tanh_values.square().mean(2, keepdim=True))
        new_Q = polar(tanh_values.mT @ Z / N - slope.mT * Q)
        largest_change = float(((new_Q * Q).sum(3).abs() - 1).abs().max())
        Q = new_Q
        if largest_change < tolerance:
            break
    return Q


def contrast(Z: Tensor, Q: Tensor, a: Tensor) -> Tensor:
    """Compute how sparse each separated source y is: E log cosh(a y) / a, which is small for sparse y.

    Args:
        Z: (P, N, r) whitened data.
        Q: (P, B, r, r) solutions of P problems from B starting points, with one source in each row.
        a: (P,) strength a of the contrast in each problem.

    Returns:
        (P, B, r) contrasts.
    """
    a = a[:, None, None, None]
    scaled_sources = (a * (Z[:, None] @ Q.mT)).abs()
    return ((scaled_sources + torch.log1p(torch.exp(-2 * scaled_sources)) - math.log(2)) / a).mean(
        2
    )


def run_population(
    Z: Tensor, a: Tensor, starts: int, rounds: int, iterations: int, generator: torch.Generator
) -> Tensor:
    """Run FastICA from several starting points, whose solutions exchange sources between rounds.

    Args:
        Z: (P, N, r) whitened data of each problem.
        a: (P,) strength a of the contrast log cosh(a y) of a source y in each problem.
        starts: Number of starting points.
        rounds: Number of rounds.
        iterations: Maximum number of iterations in each round.
        generator: Random number generator.

    Returns:
        (P, r, r) solution of each problem with the sparsest sources.
    """
    P, _, r = Z.shape
    solutions = torch.linalg.qr(torch.randn(P, starts, r, r, generator=generator))[0].to(Z)
    for remaining in reversed(range(rounds)):
        solutions = fastica(Z, solutions, a, iterations)
        contrasts = contrast(Z, solutions, a)
        if remaining and starts > 1:
            solutions_with_contrasts = zip(solutions.cpu(), contrasts.cpu(), strict=True)
            new_starts = torch.stack(
                [cross_solutions(q, s, generator) for q, s in solutions_with_contrasts]
            )
            solutions = polar(new_starts.to(Z), max_iterations=100)
    return solutions[torch.arange(P, device=solutions.device), contrasts.sum(2).argmin(1)]


def cross_solutions(Q: Tensor, sparse: Tensor, generator: torch.Generator) -> Tensor:
    """Build the starting points of the next round from the sparsest distinct sources of several solutions.

    FastICA finds only some of the sources from each starting point, and different starting points lead to
    different sources. Each new starting point combines the sources of about three in five solutions. Missing
    rows are filled with small noise, which ``polar`` turns into directions orthogonal to the sources.

    Args:
        Q: (B, r, r) solutions from B starting points.
        sparse: (B, r) contrast of each source, which is small for sparse sources.
        generator: Random number generator.

    Returns:
        (B, r, r) new starting points, not orthogonal yet.
    """
    B, r, _ = Q.shape
    pool, score = Q.reshape(B * r, r), sparse.flatten()
    solution_of_source = torch.arange(B).repeat_interleave(r)
    new_starts = []
    for b in range(B):
        is_parent = torch.rand(B, generator=generator) < 0.6
        is_parent[b] = True
        pool_index = is_parent[solution_of_source].nonzero().flatten()
        pool_index = pool_index[score[pool_index].argsort()]
        sources = pool[pool_index[find_distinct(pool[pool_index], DISTINCT)[:r]]]
        noise_rows = 0.01 * torch.randn(r - len(sources), r, generator=generator)
        new_starts.append(torch.cat([sources, noise_rows]))
    return torch.stack(new_starts)


def find_distinct(rows: Tensor, similarity: float) -> Tensor:
    """Select rows one after the other, without rows that are similar to an earlier selected row.

    Args:
        rows: (n, d) rows of length 1.
        similarity: Minimum absolute cosine of two similar rows.

    Returns:
        Indices of the selected rows, in ascending order.
    """
    is_similar = ((rows @ rows.T).abs() >= similarity).numpy()
    selected_rows, is_selectable = [], np.ones(len(rows), dtype=bool)
    for i in range(len(rows)):
        if is_selectable[i]:
            selected_rows.append(i)
            is_selectable &= ~is_similar[i]
    return torch.tensor(selected_rows)


def cluster_neurons(layer: Layer, k: int, generator: torch.Generator) -> list[Tensor]:
    """Divide the neurons of a layer into clusters with similar weight vectors.

    If there are more samples than singular values above the noise, the rows of the whole layer cannot be
    separated. A cluster of neurons that are active on the same samples mixes fewer samples.

    Args:
        layer: The layer.
        k: Number of clusters.
        generator: Random number generator.

    Returns:
        Indices of the neurons in each cluster.
    """
    unit_rows = torch.nn.functional.normalize(layer.U * layer.S)[:, : layer.rank]
    seed = int(torch.randint(2**31, (), generator=generator))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # kmeans2 warns if a cluster is empty
        _, label = kmeans2(unit_rows.cpu().numpy(), k, minit="++", seed=seed)
    return [torch.from_numpy(label == i).nonzero().flatten() for i in range(k)]


def sparseness(y: Tensor) -> Tensor:
    """Return the ratio E|y| / sqrt(E y^2) of each source y (k,). Sparse sources have small ratios."""
    return y.abs().mean(1) / y.square().mean(1).sqrt()


def roughness(x: Tensor, domain: Domain) -> Tensor:
    """Measure the roughness of sources (recovered samples), for example the energy of pixel differences.

    The energy is divided by the energy of the source around its mean.

    Args:
        x: (k, *shape) sources.
        domain: Name of the transform that makes most values of samples nearly zero.

    Returns:
        (k,) roughness of each source.
    """
    centered_sources = x.flatten(1) - x.flatten(1).mean(1, keepdim=True)
    return domain(x).square().sum(1) / centered_sources.square().sum(1)


def match_runs(x: Tensor, versions: Tensor, run: Tensor) -> Tensor:
    """Find, for each source (recovered sample), the runs of the attack that contain a similar source.

    Args:
        x: (k, d) sources to look for.
        versions: (n, d) sources of all runs.
        run: (n,) number of the run that found each of these sources.

    Returns:
        (k, runs) Whether each run contains a source that is similar to each source in ``x``.
    """
    one_hot_runs = torch.nn.functional.one_hot(run).to(versions)
    in_run = [
        ((block @ versions.T).abs() >= SAME).to(versions) @ one_hot_runs > 0
        for block in x.split(4096)
    ]
    return torch.cat(in_run)


def merge_sources(
    x: Tensor, run: Tensor, sparse: Tensor, max_sources: int
) -> tuple[Tensor, Tensor]:
    """Merge similar sources (separated candidates) of several runs and sort the results, best first.

    The function groups similar sources greedily. Each group starts with the ungrouped source that most runs
    contain. If there is a tie, the group starts with the sparsest of the tied sources. All ungrouped sources
    that are similar to the first source join the group. The result lists, in this order:

    - the mean of each group from at least two runs, unless the mean is similar to an earlier mean;
    - the sparsest source of each of these groups, because means are blurred;
    - the sources that only one run contains, sparsest first.

    Args:
        x: (k, d) sources of all runs.
        run: (k,) number of the run that found each source.
        sparse: (k,) ratio E|y| / sqrt(E y^2) of each source y, which is small for sparse sources.
        max_sources: Maximum number of returned sources.

    Returns:
        The sources, and the number of the group of each source.
    """
    runs_per_source = match_runs(x, x, run).sum(1).cpu()
    cosines, x, sparse = (x @ x.T).cpu(), x.cpu(), sparse.cpu()
    source_order = (runs_per_source - 0.999 * sparse.argsort().argsort() / len(x)).argsort(
        descending=True
    )
    is_ungrouped = torch.ones(len(x), dtype=torch.bool)
    means, members, singles = torch.empty_like(x), list[Tensor](), list[Tensor]()
    for i in source_order.tolist():
        if not is_ungrouped[i]:
            continue
        group_index = (is_ungrouped & (cosines[i].abs() >= SAME)).nonzero().flatten()
        is_ungrouped[group_index] = False
        if runs_per_source[i] < 2:
            singles.append(x[i])
            continue
        signs_to_center = cosines[
            i, group_index
        ].sign()  # the majority of the sources decides the sign of the group
        aligned_sources = (
            x[group_index]
            * (signs_to_center * (1.0 if signs_to_center.sum() >= 0 else -1.0))[:, None]
        )
        unit_mean = torch.nn.functional.normalize(aligned_sources.mean(0), dim=0)
        group_count = len(members)
        if group_count and float((means[:group_count] @ unit_mean).abs().max()) >= SAME:
            continue
        means[group_count] = unit_mean
        members.append(aligned_sources[sparse[group_index].argmin()])
    group_count = len(members)
    group_numbers = [
        *range(group_count),
        *range(group_count),
        *range(group_count, group_count + len(singles)),
    ]
    x = torch.stack([*means[:group_count], *members, *singles][:max_sources])
    return x, torch.tensor(group_numbers[:max_sources])
