"""Right digits of recovered rows, and the test of recovered targets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from residuum.evaluation.tables import MISSING, column_ranges, right_digits, scale_columns
from residuum.evaluation.targets import compare_labels, compare_targets
from residuum.records import Dataset


def digits_by_definition(a: list[float], b: list[float]) -> float:
    digits = []
    for digit_a, right in zip(a, b, strict=True):
        error = min(max(abs(digit_a - right), 1e-5), 1.0)
        digits.append(-math.log10(error))
    return sum(digits) / len(digits)


def test_right_digits_agree_with_their_definition() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((6, 3)), rng.random((7, 3))
    b[0] = a[0]
    b[1] = a[1] + [0.1, 0.01, 0.001]
    fast = right_digits(torch.from_numpy(a), torch.from_numpy(b))
    slow = [[digits_by_definition(row.tolist(), other.tolist()) for other in b] for row in a]
    assert np.allclose(fast, slow)
    assert fast[0, 0] == 5
    assert fast[1, 1] == pytest.approx(2)


def test_columns_are_scaled_by_their_ranges_and_keep_their_units() -> None:
    x = torch.tensor([[0.0, 5.0, 1.0], [4.0, 5.0, 3.0], [2.0, 5.0, torch.nan]])
    table = Dataset(x, torch.zeros(3))
    low, width = column_ranges(table)
    assert width.tolist() == [4, 1, 2]
    scaled = scale_columns(table, low, width)
    assert scaled.x[:, 0].tolist() == [0, 1, 0.5]
    assert scaled.x[2, 2] == MISSING
    assert scaled.scale is not None
    assert scaled.offset is not None
    assert torch.allclose((scaled.x * scaled.scale + scaled.offset)[:2], x[:2].double())


def test_targets_of_training_samples_show_a_leak() -> None:
    y, holdout = np.random.default_rng(0).normal(size=(2, 150))
    test = compare_targets(np.concatenate([y[:60], [np.nan]]), y, holdout, tests=4)
    assert (test.recovered, test.n, test.expected_by_chance) == (60, 150, 0)
    assert test.is_finding(0.001)


def test_targets_of_other_tables_show_no_leak() -> None:
    rng = np.random.default_rng(1)
    rejections = 0
    for _ in range(200):
        y, holdout, other = (np.round(rng.normal(size=n), 1) for n in (60, 120, 60))
        rejections += compare_targets(other, y, holdout, tests=1).p_value <= 0.05
    assert rejections <= 200 * 0.05 + 3 * math.sqrt(200 * 0.05 * 0.95)


def test_labels_are_compared_in_row_order() -> None:
    labels = np.random.default_rng(0).integers(0, 2, 80)
    assert compare_labels(labels.astype(float), labels, tests=4, seed=0).is_finding(0.01)
    shuffled = np.random.default_rng(1).permutation(labels)
    assert not compare_labels(labels.astype(float), shuffled, tests=4, seed=0).is_finding(0.01)
    shorter = compare_labels(labels[:50].astype(float), labels, tests=4, seed=0)
    assert "50 training records" in shorter.reason
    assert not shorter.is_finding(1.0)
