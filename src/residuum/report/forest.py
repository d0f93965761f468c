"""What the report shows of a recovered table: for each column, how many values the trees determine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from residuum.records import RecoveredTable

MAX_COLUMNS = 60  # largest number of columns that the report lists


class ColumnSummary(NamedTuple):
    """How much of one column of the training table the trees determine.

    Attributes:
        name: Name of the column.
        determined: Number of records whose value is determined.
        missing: Number of records whose value is missing.
        bounded: Number of other records whose value has a lower and an upper limit.
        width: Median width of the intervals of these records, None if there are none.
    """

    name: str
    determined: int
    missing: int
    bounded: int
    width: float | None


def summarize_columns(table: RecoveredTable, names: tuple[str, ...]) -> list[ColumnSummary]:
    """Return a summary of each column, in the order of the table.

    Args:
        table: The recovered table.
        names: Names of the columns, () to use the names in the file or the numbers of the columns.

    Returns:
        At most :data:`MAX_COLUMNS` summaries.
    """
    names = names or table.names or tuple(f"column {j}" for j in range(table.columns))
    is_determined = table.is_exact | table.is_likely
    interval_widths = table.high - table.low
    is_bounded = interval_widths.isfinite() & ~is_determined & ~table.is_missing
    column_summaries = []
    for j in range(min(table.columns, MAX_COLUMNS)):
        bounded_widths = interval_widths[is_bounded[:, j], j]
        column_summaries.append(
            ColumnSummary(
                names[j],
                int(is_determined[:, j].sum()),
                int(table.is_missing[:, j].sum()),
                len(bounded_widths),
                float(torch.median(bounded_widths)) if len(bounded_widths) else None,
            )
        )
    return column_summaries
