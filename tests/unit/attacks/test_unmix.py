"""Unmixing: a planted mixture comes apart, noise does not, and the iteration is scikit-learn's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from residuum.attacks.random_streams import stream
from residuum.attacks.unmixing import ica
from residuum.attacks.unmixing.attack import estimate_signs_and_sizes
from residuum.attacks.unmixing.ica import (
    Effort,
    Layer,
    Sources,
    differences,
    estimate_clean_rank,
    fastica,
    match_runs,
    merge_sources,
    polar,
    roughness,
    unmix,
    whiten,
)
from residuum.attacks.unmixing.layers import InputLayer
from residuum.errors import InputError
from residuum.records import Knowledge
from residuum.similarity import ncc

SHAPE = (3, 24, 24)
QUICK = Effort(ranks=(1.0, 0.9), strengths=(2.0,), starts=2, rounds=2, iterations=20, partitions=())


def blocks(n: int, seed: int = 0) -> Tensor:
    """(n, *SHAPE) images of a few flat rectangles: sparse in their differences."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(n, *SHAPE)
    for image in x:
        for _ in range(4):
            top, left_edge = torch.randint(20, (2,), generator=generator).tolist()
            high, wide = torch.randint(3, 12, (2,), generator=generator).tolist()
            image[:, top : top + high, left_edge : left_edge + wide] += torch.randn(
                3, 1, 1, generator=generator
            )
    return x


def mixture(x: Tensor, h: int = 80, noise: float = 0.0, seed: int = 1) -> Tensor:
    """(h, d) rows that mix ``x``, half of the coefficients zero, as gates make them."""
    generator = torch.Generator().manual_seed(seed)
    C = torch.randn(h, len(x), generator=generator) * (
        torch.rand(h, len(x), generator=generator) < 0.5
    )
    rows = C @ x.flatten(1)
    return rows + noise * torch.randn(rows.shape, generator=generator)


def best(x_found: Tensor, x: Tensor) -> Tensor:
    """Of each of ``x`` the sign-free NCC with the nearest source."""
    return ncc(x_found.reshape(-1, *SHAPE), x).abs().amax(0)


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_planted_images_come_apart_whatever_the_mixing(noise: float) -> None:
    x = blocks(12)
    sources = unmix(mixture(x, noise=noise), SHAPE, QUICK)
    assert sources.rank == 12
    assert (best(sources.x, x) > 0.95).all()
    assert (best(sources.x, blocks(12, seed=7)) < 0.8).all()


def test_sources_without_a_common_difference_come_apart_exactly() -> None:
    x = torch.zeros(8, *SHAPE)
    for i in range(8):  # a square of its own for each: no two have a difference in one place
        x[i, :, 3 * i + 1, 2:9] = torch.randn(3, 1, generator=torch.Generator().manual_seed(i))
    sources = unmix(mixture(x), SHAPE, QUICK)
    assert (best(sources.x, x) > 0.9999).all()


def test_what_runs_agree_on_comes_first_and_is_true() -> None:
    x = blocks(12)
    sources = unmix(mixture(x, noise=1e-3), SHAPE, QUICK)
    backed = sources.x[sources.support == 1.0]
    assert len(backed) >= 10
    assert (ncc(backed.reshape(-1, *SHAPE), x).abs().amax(1) > 0.95).all()
    assert sources.support[0] == 1.0


def test_noise_has_no_clean_direction_and_is_refused() -> None:
    rows = torch.randn(60, 1728, generator=torch.Generator().manual_seed(3))
    with pytest.raises(InputError, match="at least two singular values above the noise"):
        unmix(rows, SHAPE, QUICK)


def test_noise_with_a_forced_rank_gives_no_image() -> None:
    rows = torch.randn(60, 1728, generator=torch.Generator().manual_seed(3))
    sources = unmix(rows, SHAPE, QUICK, rank=12)
    assert (best(sources.x, blocks(12)) < 0.6).all()


def test_the_same_seed_gives_the_same_sources_and_another_others() -> None:
    rows = mixture(blocks(12), noise=1e-3)
    once, repeated, other = (unmix(rows, SHAPE, QUICK, seed=seed).x for seed in (0, 0, 1))
    assert torch.equal(once, repeated)
    assert once.shape != other.shape or not torch.allclose(once, other)


def test_signs_are_those_of_samples_that_switch_their_neurons_on() -> None:
    x = blocks(12)
    flat = torch.nn.functional.normalize(x.flatten(1))
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(400, flat.shape[1], generator=generator)
    C = torch.relu(start @ flat.T)  # a row grows towards the samples that its neuron is on for
    sources = unmix(C @ flat, SHAPE, QUICK)
    inner = ncc(sources.x[:12].reshape(-1, *SHAPE), x)
    assert (inner.amax(1) > -inner.amin(1)).float().mean() > 0.8


def test_the_iteration_is_that_of_scikit_learn() -> None:
    from sklearn.decomposition import FastICA

    Z, _ = whiten(
        Layer.from_rows(mixture(blocks(8))).V[:8].double().reshape(-1, *SHAPE), differences
    )
    Q = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)).double())[0]
    for a in (1.0, 2.0):
        ours = fastica(Z[None], Q[None, None], torch.tensor([a]).double(), 5, tolerance=0.0)[0, 0]
        with pytest.warns(UserWarning, match="did not converge"):
            reference = FastICA(
                fun_args={"alpha": a}, max_iter=5, tol=0.0, whiten=False, w_init=Q.numpy()
            ).fit(Z.numpy())
        theirs = torch.tensor(reference.components_)
        assert torch.allclose(ours, theirs, atol=1e-9)


def test_whitened_differences_are_uncorrelated() -> None:
    Z, K = whiten(Layer.from_rows(mixture(blocks(8))).V[:8].reshape(-1, *SHAPE), differences)
    assert torch.allclose(Z.T @ Z / len(Z), torch.eye(8), atol=1e-4)
    assert K.shape == (8, 8)


def test_polar_is_the_orthogonal_factor_of_the_svd() -> None:
    P = torch.randn(3, 9, 9, generator=torch.Generator().manual_seed(0)).double()
    U, _, V = torch.linalg.svd(P)
    assert torch.allclose(polar(P), U @ V, atol=1e-8)


def test_the_rank_ends_at_a_cliff_where_the_rest_is_rounding() -> None:
    values = torch.cat([torch.logspace(0, -2, 20), torch.logspace(-7, -9, 40)]).double()
    assert estimate_clean_rank(values, 60, 3072)[0] == 20
    slope = torch.logspace(0, -2, 20).double()
    noise = torch.linalg.svdvals(torch.randn(40, 3052, generator=torch.Generator().manual_seed(0)))
    noisy = torch.cat([slope, noise.double() * 1e-3 / noise.max()])
    assert estimate_clean_rank(noisy, 60, 3072)[0] == 20


def test_the_rank_ends_where_rounding_begins_even_without_a_cliff() -> None:
    values = torch.cat([torch.logspace(0, -7, 60), torch.logspace(-7.05, -9, 40)]).double()
    assert estimate_clean_rank(values, 100, 3072)[0] in (59, 60)


def test_a_direction_far_above_the_others_is_no_cliff() -> None:
    noise = torch.linalg.svdvals(torch.randn(40, 3052, generator=torch.Generator().manual_seed(0)))
    values = torch.cat([torch.tensor([50.0]), torch.logspace(0, -1, 19)]).double()
    values = torch.cat([values, noise.double() * 1e-2 / noise.max()])
    assert estimate_clean_rank(values, 60, 3072)[0] == 20


def test_merging_keeps_one_mean_per_source_and_counts_runs_once() -> None:
    first, two = torch.eye(6)[:2]
    tilted = torch.nn.functional.normalize(first + 0.1 * torch.eye(6)[2], dim=0)
    x = torch.stack([first, two, -tilted, first, torch.eye(6)[3]])
    run = torch.tensor([0, 0, 1, 1, 2])
    assert match_runs(x, x, run).sum(1).tolist() == [2, 1, 2, 2, 1]
    merged, group = merge_sources(x, run, torch.zeros(5), max_sources=10)
    assert group.tolist() == [0, 0, 1, 2]  # mean and sparsest member of the first, two singles
    assert float(merged[0] @ first) > 0.99  # two of three members say plus
    assert len(merge_sources(x, run, torch.zeros(5), max_sources=2)[0]) == 2


def test_a_smooth_ramp_is_rougher_than_nothing_and_smoother_than_edges():
    ramp = torch.linspace(-1, 1, 16).expand(1, 1, 16, 16)
    noise = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    naive = ((ramp[0, 0, :, 1:] - ramp[0, 0, :, :-1]) ** 2).sum() / (ramp**2).sum()
    assert torch.allclose(roughness(ramp, differences)[0], naive, atol=1e-6)
    assert roughness(ramp, differences) < 0.1 < 1 < roughness(noise, differences)


HARD = Effort(
    ranks=(0.8, 0.6), starts=1, rounds=1, iterations=5, partitions=(2,), overfull_partitions=(3,)
)


@pytest.mark.parametrize(
    ("lost", "partitions", "runs"),
    [(0.055, (2,), 16), (0.0, (2,), 4), (0.055, (), 2)],
    ids=["every strength, twice", "one strength, once", "no time for clusters"],
)
def test_if_runs_agree_on_nothing_more_clusters_are_separated(lost, partitions, runs):
    noise = torch.randn(60, 64, generator=stream("noise"))  # no sparse source: runs find other ones
    setting = replace(HARD, lost=lost, partitions=partitions)
    assert unmix(noise, (8, 8), setting, rank=30).runs == (4, runs)


def test_signs_are_estimated_if_sources_outnumber_the_directions_they_span():
    generator = stream("signs")
    x = blocks(40).flatten(1)
    x = torch.nn.functional.normalize(x - x.mean(0))
    C = torch.relu(torch.randn(200, 40, generator=generator))
    C = C * (torch.rand(200, 40, generator=generator) < 0.1)  # a neuron mixes few samples
    rows = C @ x + 1e-6 * torch.randn(200, x.shape[1], generator=generator)
    blends = torch.nn.functional.normalize(torch.randn(60, 40, generator=generator) @ x)
    all_sources = torch.cat([-x, blends])  # in float32: 40 directions, and rounding
    sources = Sources(all_sources, *[torch.ones(100)] * 2, torch.arange(100), (1, 0), 40, 0.0)
    layer = InputLayer(rows, None, rows, SHAPE, True, 40, 1.0)
    sign, _, _ = estimate_signs_and_sizes(sources, layer, Knowledge(), sources.centers)
    assert (sign[:40] == -1).all()  # with every direction 19 of 40: a coin toss


def test_sources_that_coincide_are_no_error():
    """As happens in clusters of a few neurons: both are returned, equal, and no others are lost."""
    generator = torch.Generator().manual_seed(0)
    layer = ica.Layer.from_rows(torch.randn(6, 8, generator=generator))
    V, A = layer.V[:2], layer.U[:, :2] * layer.S[:2]
    _, K = ica.whiten(V, ica.DOMAINS["coordinates"])
    unmixed = ica.orient_sources(torch.tensor([[1.0, 0.0], [1.0, 0.0]]).to(K) @ K, A.to(V), V)
    assert torch.allclose(unmixed.norm(dim=1), torch.ones(2))
    assert torch.allclose(unmixed[0], unmixed[1])
