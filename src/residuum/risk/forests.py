"""Rank the records of a training table by how much of each record the trees of a forest determine.

The owner of the model has the training table. The module compares this table with the table that an attack
recovers from the trees (:mod:`residuum.attacks.trees.forest`). A record is at risk if the recovered table
states many of its columns and its target.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from residuum.errors import InputError
from residuum.evaluation.matching import greedy
from residuum.evaluation.tables import (
    DIGITS,
    MAX_DIGITS,
    column_ranges,
    right_digits,
    scale_columns,
)
from residuum.evaluation.targets import match_targets
from residuum.records import Dataset, RecoveredTable
from residuum.records.base import Record

# A recovered value counts as exact if its error is at most this share of the column's range.
EXACT = 1e-5
COLUMNS = ("rank", "record", "id", "exact_columns", "right_digits", "target")


@dataclass(frozen=True, eq=False)
class ForestExposure(Record):
    """How much of each record of a training table the trees of a forest determine.

    Attributes:
        model: Class of the model.
        columns: Number of columns.
        rows: (n,) row of each record in the user's file.
        ids: Identifier of each record, () if the records have no identifiers.
        exact_columns: (n,) number of columns of each record whose recovered value has an error of at most
            1e-5 times the range of the column.
        digits: (n,) number of right digits of the recovered row that is matched with the record, from 0 to 5.
            The mean over the columns.
        has_target: (n,) whether the trees determine the target of the record.
        lines: Sentences that summarize the ranking.
    """

    derived: ClassVar[tuple[str, ...]] = ("per_record",)
    unpublished: ClassVar[tuple[str, ...]] = (
        "rows",
        "ids",
        "exact_columns",
        "digits",
        "has_target",
    )

    model: str
    columns: int
    rows: tuple[int, ...]
    ids: tuple[str, ...]
    exact_columns: Tensor
    digits: Tensor
    has_target: Tensor
    lines: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def per_record(self) -> list[dict[str, Any]]:
        """A dictionary for each record, with its measurements. Records at highest risk come first."""
        score = self.digits + self.has_target.double() / (self.columns + 1)
        record_order = score.argsort(descending=True, stable=True).tolist()
        return [
            {
                "rank": rank,
                "record": self.rows[i],
                "id": self.ids[i] if self.ids else "",
                "exact_columns": int(self.exact_columns[i]),
                "right_digits": round(float(self.digits[i]), 3),
                "target": bool(self.has_target[i]),
            }
            for rank, i in enumerate(record_order, 1)
        ]

    def to_csv(self) -> str:
        """Return the ranking as CSV text with one row per record."""
        csv_text = io.StringIO()
        writer = csv.DictWriter(csv_text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.per_record)
        return csv_text.getvalue()


def rank_records(table: RecoveredTable, data: Dataset) -> ForestExposure:
    """Rank the records of a training table by how much of each record was recovered.

    Args:
        table: The recovered table.
        data: The training table.

    Returns:
        The ranking.

    Raises:
        InputError: If the two tables have different numbers of columns.
    """
    n, width = len(data), data.x[0].numel()
    if width != table.columns:
        raise InputError(
            f"The samples must have as many columns as the forest was trained on; the forest has "
            f"{table.columns} columns, and the samples have {width}.",
            "Pass the columns that the forest was trained on, in the same order.",
        )
    train = data.replace(x=data.x.flatten(1))
    low, ranges = column_ranges(train)
    scaled = scale_columns(train, low, ranges).x
    exact, digits = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.float64)
    if table.records:
        candidates = Dataset(table.estimate(low, ranges), torch.zeros(table.records))
        scaled_candidates = scale_columns(candidates, low, ranges).x
        matched = torch.from_numpy(
            greedy(right_digits(scaled_candidates, scaled).numpy()).candidate
        )
        is_matched = matched >= 0
        errors_by_column = (scaled_candidates[matched] - scaled).abs()
        is_exact = (errors_by_column <= EXACT) & table.is_stated[matched]
        exact = torch.where(is_matched, is_exact.sum(1), exact)
        digits = torch.where(is_matched, DIGITS.score(scaled_candidates[matched], scaled), digits)
    has_target = torch.zeros(n, dtype=torch.bool)
    if table.targets.shape[1]:
        table_targets = data.y.double().reshape(n, -1)[:, 0].numpy()
        has_target = torch.from_numpy(match_targets(table, table_targets))
    whole_rows = int((exact == width).sum())
    what = "labels" if table.is_classifier else "targets"
    summary_lines = (
        f"{whole_rows} of {n} records are determined exactly in all {width} columns.",
        f"The {what} of {int(has_target.sum())} of {n} records are determined.",
        f"On average a column of a record has {float(digits.mean()):.1f} of {MAX_DIGITS} right digits.",
    )
    ids = tuple(data.record_ids)
    return ForestExposure(
        table.model, width, tuple(data.rows), ids, exact, digits, has_target, summary_lines
    )
