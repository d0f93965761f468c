"""Pairwise similarities against loops in float64, and the corners where formulas lose digits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum import similarity
from residuum.errors import InputError

FUNCTIONS = {"cosine": similarity.cosine, "ncc": similarity.ncc, "l2": similarity.l2}
SHAPES = [(7,), (5, 6), (1, 4, 4), (3, 4, 5)]


def batch(seed: int, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)


def correlation(a: list[float], b: list[float]) -> float:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    a, b = [v - mean_a for v in a], [v - mean_b for v in b]
    return naive("cosine", *torch.tensor([a, b], dtype=torch.float64))


def naive(name: str, a: torch.Tensor, b: torch.Tensor) -> float:
    """One pair, number by number."""
    if name == "ncc":
        channels = range(len(a)) if a.ndim == 3 else [slice(None)]
        correlations = [
            correlation(a[c].flatten().tolist(), b[c].flatten().tolist()) for c in channels
        ]
        return sum(correlations) / len(correlations)
    pairs = list(zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))
    if name == "l2":
        return math.sqrt(math.fsum((u - v) ** 2 for u, v in pairs))
    norms = math.sqrt(sum(u * u for u, _ in pairs) * sum(v * v for _, v in pairs))
    return sum(u * v for u, v in pairs) / norms


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_the_loop(name):
    for shape in SHAPES:
        a, b = batch(0, 4, shape), batch(1, 3, shape)
        expected = torch.tensor([[naive(name, x, y) for y in b] for x in a], dtype=torch.float64)
        torch.testing.assert_close(FUNCTIONS[name](a, b), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_chunks_change_nothing(name, monkeypatch):
    a, b = batch(0, 9, (3, 4, 4)), batch(1, 5, (3, 4, 4))
    unchunked = FUNCTIONS[name](a, b)
    # Samples that fill more than one chunk of the real size take more than 128 MiB.
    monkeypatch.setattr(similarity, "CHUNK", 60)
    torch.testing.assert_close(FUNCTIONS[name](a, b), unchunked, rtol=1e-12, atol=1e-12)


def test_l2_keeps_its_digits_between_near_identical_samples():
    for dtype in [torch.float32, torch.float64]:
        for offset in [0.0, 100.0]:
            for gap in [1.0, 1e-3, 1e-5]:
                a = (batch(0, 6, (50,)) + offset).to(dtype)
                b = (a.double() + gap * batch(1, 6, (50,))).to(dtype)
                exact = torch.tensor(
                    [[naive("l2", x, y) for y in b] for x in a], dtype=torch.float64
                )
                torch.testing.assert_close(similarity.l2(a, b).double(), exact, rtol=1e-6, atol=0)
                assert similarity.l2(a, a).diagonal().eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_images_correlate_with_nothing(dtype):
    constant = torch.full((2, 3, 8, 8), 0.1, dtype=dtype) * torch.tensor([1, 7]).view(2, 1, 1, 1)
    image = batch(0, 1, (3, 8, 8)).to(dtype)
    assert similarity.ncc(constant, image).eq(0).all()
    assert similarity.ncc(constant, constant).eq(0).all()
    assert similarity.cosine(torch.zeros(1, 4), torch.ones(1, 4)).item() == 0


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000),
    gain=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    shift=st.lists(st.floats(-10, 10), min_size=3, max_size=3),
)
def test_ncc_ignores_brightness_and_contrast_of_each_channel(seed, gain, shift):
    a, b = batch(seed, 3, (3, 4, 4)), batch(seed + 1, 2, (3, 4, 4))
    changed = a * torch.tensor(gain).view(3, 1, 1) + torch.tensor(shift).view(3, 1, 1)
    torch.testing.assert_close(similarity.ncc(changed, b), similarity.ncc(a, b), atol=1e-9, rtol=0)
    torch.testing.assert_close(similarity.ncc(-a, b), -similarity.ncc(a, b), atol=1e-9, rtol=0)


def test_samples_of_two_shapes_are_refused():
    with pytest.raises(InputError, match="the same shape"):
        similarity.ncc(torch.zeros(2, 4), torch.zeros(2, 5))
    with pytest.raises(InputError, match="leading axis"):
        similarity.l2(torch.zeros(4), torch.zeros(4))
