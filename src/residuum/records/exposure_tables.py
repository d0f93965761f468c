"""Show an exposure as tables: the most exposed records, and their groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residuum.terminal import TextTable, format_number

if TYPE_CHECKING:
    from residuum.records.attribute_test import AttributeTest
    from residuum.records.exposure import Exposure, GroupExposure

MAX_CELLS = 20  # maximal number of values in the table of missing values
MAX_GROUPS = 20  # maximal number of groups in the table


def tables_of(result: Exposure) -> tuple[TextTable, ...]:
    """Return the tables of the most exposed records, of the groups, and of missing values.

    Args:
        result: The risk of every record.

    Returns:
        The tables that have rows.
    """
    has_candidates = not bool(result.found_ncc.isnan().all())
    field_of_column = {  # headers of the columns, and the fields of a record that they show
        **({"score": "score"} if result.uncalibrated else {"prob.": "probability"}),
        **({"found": "found_ncc"} if has_candidates else {"heard": "heard"}),
        "own": "own_over_misfit",
        "informed": "informed_ncc",
        "kinks": "kinks",
        "q": "kink_q",
        "margin": "margin",
    }
    record_rows = []
    for row in result.rows(len(result.top)):
        record_values = map(row.get, field_of_column.values())
        cells = [str(v) if isinstance(v, int) else format_number(v, 2) for v in record_values]
        record_rows.append((str(row["index"]), row["group"] or "-", *cells))
    records = TextTable(
        f"{result.arch}: the most exposed of {len(result)} records",
        ("record", result.grouped_by or "group", *field_of_column),
        tuple(record_rows),
    )
    probability_headers = ("expected", "mean prob.", "95% interval")
    mean_headers = ("mean score",) if result.uncalibrated else probability_headers
    groups = TextTable(
        "groups",
        (result.grouped_by, "records", *mean_headers, "flagged"),
        tuple(_group_row(group) for group in result.by_group[:MAX_GROUPS]),
    )
    tables = (records, groups, *_attribute_tables(result.attributes))
    return tuple(table for table in tables if table.rows)


def _attribute_tables(test: AttributeTest | None) -> tuple[TextTable, ...]:
    """Return the table of values that an attacker can infer, () if there is no such test."""
    if test is None:
        return ()
    cells = test.disclosed[:MAX_CELLS]
    rows = tuple(
        (
            f"{cell.row} (ID {cell.record_id})" if cell.record_id else str(cell.row),
            f"{cell.column} ({cell.unit})" if cell.unit else cell.column,
            *cell.texts,
            format_number(cell.q, 2),
        )
        for cell in cells
    )
    title = f"missing values that can be inferred: {len(cells)} of {test.disclosed_count}"
    headers = ("record", "column", "original", "inferred", "ridge regression", "error rate")
    return (TextTable(title, headers, rows),)


def _group_row(group: GroupExposure) -> tuple[str, ...]:
    """Return the table row of a group of records.

    The row has the expected number of recovered records. If the records have no probabilities of being
    recovered, the row has the mean score of the records instead.
    """
    flagged_count = "-" if group.called is None else str(group.called)
    if group.interval is None:
        return group.name, str(group.records), format_number(group.score, 2), flagged_count
    low, high = group.interval
    interval_text = f"{low:.2f} to {high:.2f}"
    mean_cells = (
        format_number(group.expected, 3),
        format_number(group.probability, 2),
        interval_text,
    )
    return (group.name, str(group.records), *mean_cells, flagged_count)
