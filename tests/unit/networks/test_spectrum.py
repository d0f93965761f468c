"""Directions of the first layer: planted ones are counted, noise is none, and naive references agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from residuum.datasets import load_dataset
from residuum.networks.network import Network
from residuum.networks.spectrum import (
    TRACY_WIDOM,
    count_directions,
    is_noise,
    noise_edge,
    noise_quantiles,
    rank_above,
    singular_values,
)
from residuum.surfaces.inspection import inspect_network
from residuum.training import TrainingConfig, train

NOISE = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.uniform(-(3**0.5), 3**0.5, shape),
}


def directions_and_meaning(weight: np.ndarray | Tensor) -> tuple[int | None, str]:
    weight = torch.as_tensor(weight)
    return count_directions(singular_values(weight), *weight.shape)


def with_spectrum(values: np.ndarray, h: int, d: int, seed: int = 0) -> np.ndarray:
    """An (h, d) matrix of these singular values between random orthonormal bases."""
    rng = np.random.default_rng(seed)
    left_vectors, right = (np.linalg.qr(rng.standard_normal((k, len(values))))[0] for k in (h, d))
    return left_vectors * values @ right.T


@pytest.mark.parametrize("kind", NOISE)
def test_planted_directions_are_counted(kind: str) -> None:
    for shape in [(100, 64), (60, 60), (50, 300)]:
        for rank in [1, 7, 30]:
            scale = 1e-4
            edge = scale * (math.sqrt(shape[0]) + math.sqrt(shape[1]))
            rng = np.random.default_rng(rank)
            planted = with_spectrum(
                np.geomspace(1, 3 * edge, rank) if rank > 1 else np.ones(1), *shape
            )
            count, meaning = directions_and_meaning(planted + scale * NOISE[kind](rng, shape))
            assert (count, meaning[:20]) == (rank, "above the noise edge")
            noise_edge = scale * (math.sqrt(shape[0] - rank) + math.sqrt(shape[1] - rank))
            percent = float(meaning.split(", ")[1].split("%")[0])
            assert noise_edge < percent / 100 < 1.2 * noise_edge


@pytest.mark.parametrize("kind", NOISE)
def test_noise_has_no_directions(kind: str) -> None:
    for shape in [(100, 64), (64, 64), (40, 300), (10, 10), (30, 2), (1, 5)]:
        rng = np.random.default_rng(0)
        for _ in range(20):
            count, meaning = directions_and_meaning(1e-4 * NOISE[kind](rng, shape))
            assert count is None
            assert "no direction exceeds" in meaning


def test_layers_never_trained_have_no_directions() -> None:
    torch.manual_seed(0)
    for h, d in ((128, 784), (100, 30), (20, 10), (784, 784)):
        layer = torch.nn.Linear(d, h)
        assert directions_and_meaning(layer.weight)[0] is None
        assert directions_and_meaning(torch.nn.init.orthogonal_(layer.weight))[0] is None
    assert directions_and_meaning(torch.zeros(4, 3))[0] is None


def test_directions_below_the_edge_are_not_distinguished_from_noise() -> None:
    shape, scale = (100, 64), 1e-4
    edge = scale * (math.sqrt(shape[0]) + math.sqrt(shape[1]))
    planted = with_spectrum(np.array([1.0, 0.5, 0.2 * edge, 0.1 * edge]), *shape)
    assert (
        directions_and_meaning(planted + scale * np.random.default_rng(0).standard_normal(shape))[0]
        == 2
    )


def test_noise_above_one_per_cent_is_a_visible_initialization() -> None:
    noise = np.random.default_rng(0).standard_normal((100, 64))
    planted = with_spectrum(np.array([1.0, 0.8, 0.7]), 100, 64)
    assert directions_and_meaning(planted + 4e-4 * noise)[0] == 3  # edge 0.7%
    count, meaning = directions_and_meaning(planted + 1e-3 * noise)  # edge 1.8%
    assert count is None
    assert "its noise reaches 1." in meaning


@pytest.mark.parametrize(
    ("values", "count"),
    [(0.8 ** np.arange(64), 21), (1 / np.arange(1.0, 65) ** 1.9, 11), (np.eye(1, 64)[0], 1)],
)
def test_a_smooth_spectrum_has_no_noise_edge(values: np.ndarray, count: int) -> None:
    """Negative control: the other directions are smaller, but do not have the shape of noise."""
    values = np.maximum(values, 1e-9)
    assert directions_and_meaning(with_spectrum(values, 100, 64)) == (
        count,
        "above 1% of the largest singular value; no noise edge",
    )


def test_a_full_rank_that_is_not_noise_is_a_dash() -> None:
    values = np.full(64, 0.05)
    values[0] = 1
    count, meaning = directions_and_meaning(with_spectrum(values, 100, 64))
    assert count is None
    assert meaning.startswith("all 64 exceed 1%")


def naive_edge(values: list[float], h: int, d: int) -> tuple[int, float]:
    for r in range(len(values)):
        rows, columns = math.sqrt(h - r), math.sqrt(d - r)
        square = sum(v * v for v in values[r:]) / ((h - r) * (d - r))
        mean = (rows + columns) ** 2
        spread = (rows + columns) * (1 / rows + 1 / columns) ** (1 / 3)
        edge = math.sqrt(square * (mean + TRACY_WIDOM * spread))
        if values[r] <= edge:
            return r, edge / values[0]
    raise AssertionError


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (25, 25), (7, 1)])
def test_the_edge_is_that_of_a_naive_loop(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    for power in (0.0, 0.5, 1.0, 4.0):
        values = np.sort(rng.uniform(size=min(shape)) ** power)[::-1].copy()
        expected = naive_edge(values.tolist(), *shape)
        assert noise_edge(torch.from_numpy(values), *shape) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", [(60, 60), (100, 64), (30, 90)])
def test_quantiles_are_those_of_drawn_noise(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    spectra = [np.linalg.svd(rng.standard_normal(shape), compute_uv=False) for _ in range(200)]
    mean = np.mean(spectra, 0)
    expected = noise_quantiles(*shape).numpy()
    assert np.abs(expected - mean).max() < 0.02 * mean[0]
    assert (expected**2).sum() == pytest.approx(shape[0] * shape[1], rel=1e-2)


def test_one_matrix_of_noise_in_a_thousand_exceeds_the_edge() -> None:
    rng, outside, draws = np.random.default_rng(0), 0, 4000
    for _ in range(draws):
        values = np.linalg.svd(rng.standard_normal((40, 25)), compute_uv=False)
        outside += noise_edge(torch.from_numpy(values), 40, 25)[0] > 0
    assert outside <= 12  # 4 expected; more than 12 have a probability of 3e-4


def test_noise_has_its_shape_and_other_spectra_have_not() -> None:
    rng = np.random.default_rng(0)
    for shape in ((20, 20), (30, 30), (100, 64), (25, 200)):
        for kind in NOISE.values():
            values = singular_values(torch.from_numpy(kind(rng, shape)))
            assert is_noise(values, *shape)
            assert not is_noise(values.square(), *shape)
            assert not is_noise(torch.ones_like(values), *shape)
    few = singular_values(torch.from_numpy(rng.standard_normal((19, 19))))
    assert not is_noise(few, 19, 19)


def test_singular_values_up_to_a_factor_and_ranks_above_a_share() -> None:
    generator = torch.Generator().manual_seed(0)
    for rank in (1, 3, 8):
        a = torch.randn(30, rank, generator=generator)
        b = torch.randn(rank, 18, generator=generator)
        for weight in (a @ b, (a @ b).reshape(30, 2, 3, 3)):
            values = singular_values(weight)
            dense = torch.linalg.svdvals(weight.flatten(1).double())
            torch.testing.assert_close(values / values[0], dense / dense[0], rtol=0, atol=1e-12)
            assert rank_above(values, 1e-4) == rank
    falling = torch.diag(torch.tensor([1.0, 0.5, 0.011, 0.009]))
    assert rank_above(singular_values(falling), 0.01) == 3
    assert rank_above(singular_values(torch.zeros(3, 3)), 0.01) == 0
    assert rank_above(singular_values(1e300 * torch.eye(4, dtype=torch.float64)), 0.01) == 4


@pytest.mark.parametrize("arch", ["mlp:64-100-1", "mlp:64-100-100-1"])
def test_a_network_trained_on_digits_has_a_direction_per_dimension_of_its_data(arch: str) -> None:
    split = load_dataset("digits", 20, seed=100)
    assert np.linalg.matrix_rank(split.train.x.flatten(1).double().numpy()) == 19  # mean removed
    small, standard = (
        inspect_network(
            Network(train(arch, split.train, TrainingConfig(steps=300, init=init)).theta, arch)
        )
        for init in ("small", "default")
    )
    assert small.directions == 19
    assert small.directions_of.startswith("above the noise edge")
    assert small.ranks["0.01"] < 19
    assert standard.directions is None
    assert standard.directions_of.startswith("the initialization is visible")


def test_more_samples_than_inputs_leave_no_directions_to_count() -> None:
    weight = with_spectrum(np.array([1.0, 0.5]), 60, 40) + 1e-5 * np.random.default_rng(0).normal(
        size=(60, 40)
    )
    theta = {"layers.0.weight": torch.from_numpy(weight), "layers.0.bias": torch.zeros(60)}
    theta["layers.1.weight"] = torch.ones(1, 60)
    inspection = inspect_network(
        Network({name: t.double() for name, t in theta.items()}, "mlp:40-60-1")
    )
    assert inspection.directions_for(None) == (2, inspection.directions_of)
    assert inspection.directions_for(40) == (2, inspection.directions_of)
    assert inspection.directions_for(41) == (None, "more samples (41) than inputs (40)")
