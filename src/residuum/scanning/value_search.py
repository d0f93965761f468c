"""Find single values of the columns of a table in an array.

An encoder, a quantile transform or a tree stores values of training records, but no whole records. For each
column we count how many of its distinct values are in the array. Numbers between neighboring values of the
column, with as many decimal places, show how many values would be found by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import hypergeom

Floats = NDArray[np.float64]

MIN_VALUES = 10  # smallest number of distinct values of a column that is searched
MIN_FOUND = 5  # smallest number of values of a column in an array that is reported
MAX_COLUMNS = 200  # largest number of columns of a table whose single values are searched
MAX_DECIMALS = 6
# Numbers at these fractions between two neighboring values of a column show how many matches occur by chance.
# The fraction 0.5 is left out, because the thresholds of trees are midpoints.
BETWEEN = (0.13, 0.21, 0.29, 0.37, 0.63, 0.71, 0.79, 0.87)


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a table in one form, such as after a scaler.

    Attributes:
        name: Name of the column.
        form: How the values were changed, "" for values as given.
        values: The distinct values, ascending.
        between: Numbers between the values, ascending, which are in no record.
        slack: Rounding error of the values.
    """

    name: str
    form: str
    values: Floats
    between: Floats
    slack: float

    def scale(self, form: str, factor: float, shift: float, rounding: float) -> Column:
        """Return the column after the change to ``factor * value + shift``.

        Args:
            form: The change in words.
            factor: The factor.
            shift: The summand.
            rounding: Relative rounding error of the computation.

        Returns:
            The changed column.
        """
        largest = float(np.abs(self.values).max()) * abs(factor) + abs(shift)
        values, between = self.values * factor + shift, self.between * factor + shift
        return Column(self.name, form, np.sort(values), np.sort(between), rounding * largest)


@dataclass(frozen=True)
class ColumnMatches:
    """The values of a column that are in an array.

    Attributes:
        column: The column.
        found_count: Number of values in the array.
        by_chance: Number of values that are expected by chance.
        p_value: Probability of so many values by chance.
    """

    column: Column
    found_count: int
    by_chance: float
    p_value: float


def make_column(name: str, numbers: Floats, relative: float) -> Column | None:
    """Return a column whose values are searched in a file, or None if the column has too few distinct values.

    Args:
        name: Name of the column.
        numbers: The value of each record.
        relative: Relative rounding error of the values.

    Returns:
        The column.
    """
    distinct_values = np.unique(numbers[np.isfinite(numbers)])
    if len(distinct_values) < MIN_VALUES:
        return None
    gaps = np.diff(distinct_values)
    between = np.concatenate([distinct_values[:-1] + share * gaps for share in BETWEEN])
    decimals = _count_decimals(distinct_values, relative)
    if decimals is not None:
        between = np.round(between, decimals)
    between = np.unique(between)
    slack = float(relative * np.abs(distinct_values).max())
    between = between[~_is_in(between, distinct_values, np.full(len(between), slack))]
    return Column(name, "", distinct_values, between, slack) if len(between) >= MIN_VALUES else None


def _count_decimals(values: Floats, relative: float) -> int | None:
    """Return the number of decimal places of all values, or None if they have more than six."""
    for decimals in range(MAX_DECIMALS + 1):
        errors = np.abs(values - np.round(values, decimals))
        if np.all(errors <= np.maximum(relative, 1e-12) * np.abs(values)):
            return decimals
    return None


def match_columns(columns: Sequence[Column], array: Floats, relative: float) -> list[ColumnMatches]:
    """Return the columns of a table of which an array holds more values than expected by chance.

    Args:
        columns: The columns.
        array: The numbers of the array, ascending and distinct.
        relative: Distance of neighboring numbers near 1 in the dtype of the array.

    Returns:
        The columns with their matches.
    """
    matches = []
    for column in columns:
        found_count = _count(column.values, array, column.slack, relative)
        if found_count < MIN_FOUND:
            continue
        between_found = _count(column.between, array, column.slack, relative)
        n, m = len(column.values), len(column.between)
        p_value = float(hypergeom.sf(found_count - 1, n + m, found_count + between_found, n))
        matches.append(ColumnMatches(column, found_count, n * between_found / m, p_value))
    return matches


def _count(values: Floats, array: Floats, slack: float, relative: float) -> int:
    return int(_is_in(values, array, slack + relative * np.abs(values)).sum())


def _is_in(values: Floats, array: Floats, slack: Floats) -> NDArray[np.bool_]:
    """Return for each value whether a sorted array has a number that differs from it by at most ``slack``."""
    positions = np.searchsorted(array, values - slack)
    nearest = array[np.minimum(positions, len(array) - 1)]
    return (positions < len(array)) & (nearest <= values + slack)
