"""Single values of columns are counted with the number that chance explains."""

from __future__ import annotations

import numpy as np

from residuum.scanning.value_search import Column, make_column, match_columns

EPS = float(np.finfo(np.float64).eps)


def column(numbers: object) -> Column:
    new_column = make_column("age", np.asarray(numbers, dtype=np.float64), EPS)
    assert new_column is not None
    return new_column


def test_stored_values_are_counted_as_a_set_intersection_counts_them() -> None:
    values = np.random.default_rng(0).normal(size=100)
    stored = np.unique(np.concatenate([values[:87], np.random.default_rng(1).normal(size=500)]))
    (match,) = match_columns([column(values)], stored, EPS)
    assert match.found_count == len({*values} & {*stored}) == 87
    assert match.by_chance == 0
    assert match.p_value < 1e-20
    assert match_columns([column(values)], np.random.default_rng(2).normal(size=5000), EPS) == []


def test_values_of_a_dense_grid_are_no_evidence() -> None:
    ages = np.arange(18, 80, 3)
    (match,) = match_columns([column(ages)], np.arange(1000.0), EPS)
    assert match.found_count == len(ages)
    assert match.by_chance == len(ages)
    assert match.p_value == 1
    assert make_column("class", np.arange(30.0), EPS) is None  # there is no number between
    assert make_column("flag", np.arange(100.0) % 2, EPS) is None  # too few values


def test_comparison_numbers_have_as_many_decimals_and_are_no_values() -> None:
    prices = np.round(np.random.default_rng(0).uniform(0, 1000, 80), 2)
    new_column = column(prices)
    assert np.allclose(new_column.between, np.round(new_column.between, 2))
    assert not {*new_column.between} & {*new_column.values}
    scaled = new_column.scale("after StandardScaler", -2.0, 1.0, 1e-6)
    assert np.all(np.diff(scaled.values) > 0)
    (match,) = match_columns([scaled], np.unique(1 - 2 * prices), EPS)
    assert match.found_count == len(new_column.values)
