r"""Compare recovered rows of a table with its training rows: how many digits of each column are right.

The columns of a table have different units. So rows are first scaled by the range of each column, and a
column of a recovered row has

    digits(a, b) = -log10 |a - b|,   between 0 and 5,

right digits. A column that is equal within 1e-5 of its range has 5 right digits, and a column that is wrong
by the whole range has none. The similarity of two rows is the mean over all columns.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from residuum import similarity
from residuum.evaluation.matching import Array, Metric
from residuum.records.inputs import Dataset

# Number of correct digits that counts as exact, because float32 numbers have few more.
MAX_DIGITS = 5
# This number replaces missing values of a table. All other values are scaled to [0, 1], so they are far
# from it.
MISSING = -2.0


def right_digits(a: Tensor, b: Tensor) -> Tensor:
    """Compute the mean number of correct digits for each pair of a recovered row and a table row.

    Args:
        a: (m, columns) recovered rows, scaled by the ranges of the columns.
        b: (n, columns) rows of a table, scaled in the same way.

    Returns:
        (m, n) means over the columns, from 0 to 5.
    """
    similarity.check_shapes(a, b)
    digits = a.new_empty(len(a), len(b))
    for rows in similarity.chunks(len(a), b.numel()):
        digits[rows] = _digits(a[rows, None] - b[None]).mean(2)
    return digits


def _digits(error: Tensor) -> Tensor:
    return -error.abs().clamp(min=10.0**-MAX_DIGITS, max=1.0).log10()


def _score(a: Tensor, b: Tensor) -> Tensor:
    return _digits(a - b).mean(1)


DIGITS = Metric(
    name="digits",
    higher_is_better=True,
    published_threshold=None,
    score=_score,
    search=right_digits,
    description="number of correct decimal digits, averaged over the columns; 5 means that the error of a "
    "value is 1e-5 of the range of its column",
)


def scale_columns(table: Dataset, low: Tensor, width: Tensor) -> Dataset:
    """Scale the columns of a table by their ranges, so that columns with different units are comparable.

    Args:
        table: The table. Missing values are NaN.
        low: (columns,) smallest value of each column.
        width: (columns,) range of each column, positive.

    Returns:
        The scaled table, in which :data:`MISSING` stands for a missing value.
    """
    scaled_values = ((table.x.double() - low) / width).nan_to_num(nan=MISSING)
    scale = torch.ones_like(width) if table.scale is None else table.scale.double()
    offset = torch.zeros_like(width) if table.offset is None else table.offset.double()
    return replace(
        table, x=scaled_values, mean=None, scale=width * scale, offset=low * scale + offset
    )


def column_ranges(*tables: Dataset | None) -> tuple[Tensor, Tensor]:
    """Return the smallest value and the range of each column, over several tables.

    Args:
        *tables: The tables. Missing values are NaN.

    Returns:
        (columns,) smallest values, and (columns,) ranges. The range of a constant column is 1.
    """
    all_rows = torch.cat([table.x.double() for table in tables if table is not None])
    low = all_rows.nan_to_num(nan=torch.inf).amin(0)
    high = all_rows.nan_to_num(nan=-torch.inf).amax(0)
    ranges = high - low
    return low.nan_to_num(posinf=0.0), torch.where((ranges > 0) & ranges.isfinite(), ranges, 1.0)


def mean_error(a: Tensor, b: Tensor) -> Array:
    """Compute the mean absolute error of each pair of rows, with errors limited to the column's range.

    Args:
        a: (m, columns) rows, scaled by the ranges of the columns.
        b: (n, columns) rows, scaled in the same way.

    Returns:
        (m, n) means over the columns.
    """
    mean_errors = a.new_empty(len(a), len(b))
    for rows in similarity.chunks(len(a), b.numel()):
        mean_errors[rows] = (a[rows, None] - b[None]).abs().clamp(max=1.0).mean(2)
    result: Array = mean_errors.numpy(force=True)
    return result


def count_right_columns(a: Tensor, b: Tensor, tolerance: float) -> Array:
    """Return in how many columns two rows agree.

    Args:
        a: (n, columns) recovered rows, scaled by the ranges of the columns.
        b: (n, columns) rows of a table, scaled in the same way.
        tolerance: Largest difference, as a share of the range of the column.

    Returns:
        (n,) numbers of columns.
    """
    return np.asarray(((a - b).abs() <= tolerance).sum(1))
