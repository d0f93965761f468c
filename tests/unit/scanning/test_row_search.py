"""Samples are found in the rows of an array as a double loop over rows and samples finds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from residuum.io.inert import NumberReader
from residuum.scanning.number_sources import read_tensor
from residuum.scanning.row_search import SampleIndex, list_forms, match_array
from residuum.scanning.sample_forms import GivenRows, ShuffledRows, list_layouts, list_scalings

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def random_rows(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def search(samples: Tensor, array: Tensor) -> set[tuple[int, int]]:
    """Return the pairs of row and sample that the search finds."""
    forms = list_forms(list_scalings(samples), list_layouts(tuple(samples.shape[1:])))
    index = SampleIndex(GivenRows(samples), forms)
    windows = match_array(index, read_tensor(array), samples[0].numel()).values()
    return {pair for w in windows for pair in zip(w.rows, w.samples, strict=True)}


def search_naively(samples: Tensor, rows: Tensor, relative: float) -> set[tuple[int, int]]:
    """Return the same pairs: row = a * sample + b with a > 0, by least squares for every pair."""
    pairs = set()
    for i, row in enumerate(rows.double().numpy()):
        if not row.any():
            continue
        for j, sample in enumerate(samples.double().numpy()):
            a, b = np.polyfit(sample, row, 1)
            error = np.abs(row - (a * sample + b)).max() / np.abs(row).max()
            if a > 0 and error <= relative:
                pairs.add((i, j))
    return pairs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_search_agrees_with_a_double_loop(dtype: torch.dtype) -> None:
    samples = random_rows(12, 40, seed=0)
    array = random_rows(80, 40, seed=1)
    array[[3, 20, 41, 70]] = 0.5 * samples[[5, 5, 0, 11]] - 0.25
    array[50] = samples[7] + 0.05 * random_rows(1, 40, seed=2)[0]  # similar, but no copy
    array[60] = -samples[8]
    array[61] = 0
    stored = array.to(dtype)
    expected = search_naively(samples, stored, 2 * torch.finfo(dtype).eps + 1e-6)
    assert expected == {(3, 5), (20, 5), (41, 0), (70, 11)}
    assert search(samples, stored) == expected


def test_few_values_are_compared_as_they_are() -> None:
    """With few columns, a row and a sample must be equal, not only equal up to scale."""
    samples = random_rows(30, 4, seed=0) * torch.tensor([1.0, 100.0, 1e-3, 1e4])
    array = random_rows(200, 4, seed=1) * torch.tensor([1.0, 100.0, 1e-3, 1e4])
    array[10] = samples[3]
    array[11] = samples[4] * (1 + 1e-9)
    array[12] = samples[5] * torch.tensor([1, 1, 1.01, 1])  # the column of small values differs
    array[13] = samples[6] * 3
    assert search(samples, array) == {(10, 3), (11, 4)}
    standardized = (samples - samples.mean(0)) / samples.std(0, correction=0)
    assert search(samples, standardized[:7].float()) == {(i, i) for i in range(7)}


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_rows_are_found_in_every_arrangement(extra: int) -> None:
    samples = random_rows(9, 20, seed=0)
    table = torch.cat([random_rows(50, extra, seed=2), random_rows(50, 20, seed=1)], 1)
    table[5:14, extra:] = samples
    expected = {(i + 5, i) for i in range(9)}
    assert search(samples, table) == expected
    assert search(samples, table.T.contiguous()) == expected
    assert search(samples, torch.cat([table, random_rows(50, 2, seed=3)], 1)) == expected
    if not extra:
        assert search(samples, table.flatten()) == expected
        assert search(samples, table.view(50, 4, 5)) == expected


def test_images_are_found_as_bytes_with_their_channels_last() -> None:
    images = torch.rand(6, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    stored = (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8)
    expected = {(i, i) for i in range(6)}
    assert search(images, stored) == expected
    assert search(images, (images * 255).to(torch.uint8)) == expected  # truncated
    mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    assert search(images, (images - mean) / deviation) == expected


def test_large_arrays_are_read_in_parts() -> None:
    """A reader is asked for parts only, and rows in different parts have the right numbers."""
    samples = random_rows(3, 64, seed=0).float()
    array = random_rows(70_000, 64, seed=1).float()
    array[[0, 33_000, 69_999]] = samples
    sizes = []

    def read(first: int, last: int) -> Tensor:
        sizes.append(last - first)
        return array.flatten()[first:last]

    forms = list_forms(list_scalings(samples), list_layouts((64,)))
    index = SampleIndex(GivenRows(samples), forms)
    (window,) = match_array(index, NumberReader((70_000, 64), read), 64).values()
    assert window.rows == [0, 33_000, 69_999]
    assert max(sizes) < array.numel()


@pytest.mark.parametrize(("n", "d"), [(1, 9), (2, 9), (5, 9), (40, 9), (40, 60)])
def test_shuffled_samples_have_the_values_of_each_column_and_no_row(n: int, d: int) -> None:
    samples = random_rows(n, d, seed=0)
    shuffled = ShuffledRows(samples)
    rows = shuffled.take(torch.arange(len(shuffled)))
    assert len(rows) == 100 * n
    assert not any((row == sample).all() for row in rows for sample in samples)
    if n > 1:
        for j in range(d):
            assert set(rows[:, j].tolist()) == set(samples[:, j].tolist())
            assert torch.equal(rows[:n, j].sort().values, samples[:, j].sort().values)
