"""The training table that an attack recovers from the trees of a forest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from residuum.records.base import Record
from residuum.records.published import Count, SchemaRule, Share


@dataclass(frozen=True, eq=False)
class RecoveredTable(Record):
    """The training table of a forest, as far as the model file determines this table.

    Attributes:
        model: Class of the model, such as "RandomForestRegressor".
        trees: Number of trees.
        low: (records, columns) lower ends of the intervals that hold the values. -inf if nothing is known.
        high: (records, columns) upper ends of these intervals. inf if nothing is known.
        is_exact: (records, columns) whether the value is determined exactly.
        is_likely: (records, columns) whether the value is determined, if every leaf was attributed to the
            right number of records. A file without seeds and counts has likely values instead of exact ones.
        is_missing: (records, columns) whether the value is missing in the training table.
        targets: (records, targets) recovered targets or class numbers, NaN if a target is not determined.
        has_row_order: Whether the records are in the order of the training table.
        is_classifier: Whether the targets are class numbers.
        records_in_file: Number of training records, None if the file does not say.
        names: Names of the columns, () if the file stores no names.
        seconds: Run time in seconds.
        notes: Remarks for the reader.
        values: (records, columns) estimates of values that are not exact, NaN for no estimate. None if the
            middle of each interval is the estimate.
    """

    model: str
    trees: int
    low: Tensor
    high: Tensor
    is_exact: Tensor
    is_likely: Tensor
    is_missing: Tensor
    targets: Tensor
    has_row_order: bool
    is_classifier: bool = False
    records_in_file: int | None = None
    names: tuple[str, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default_factory=tuple)
    values: Tensor | None = None

    @property
    def records(self) -> int:
        """Number of recovered records. Their values may still be unknown."""
        return len(self.low)

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.low.shape[1]

    @property
    def is_stated(self) -> Tensor:
        """Mask (records, columns) of the cells with a determined value: exact, likely or missing."""
        return self.is_exact | self.is_likely | self.is_missing

    @property
    def known_targets(self) -> int:
        """Number of records whose target is determined."""
        return int((~self.targets.isnan()).all(1).sum()) if self.targets.shape[1] else 0

    @property
    def whole_rows(self) -> int:
        """Number of records whose values are determined in all columns."""
        return int(self.is_stated.all(1).sum()) if self.columns else 0

    @property
    def stated_share(self) -> float:
        """Share of the cells with a determined value: exact, likely or missing."""
        return float(self.is_stated.double().mean()) if self.is_stated.numel() else 0.0

    @property
    def certainty(self) -> str:
        """How certain the determined values are: "exact", or "likely" for a file without random seeds."""
        return "likely" if bool(self.is_likely.any()) else "exact"

    def estimate(self, low: Tensor, width: Tensor) -> Tensor:
        """Return one value for each cell: its estimate, or the middle of its interval.

        Args:
            low: (columns,) smallest value of each column.
            width: (columns,) range of each column.

        Returns:
            (records, columns) estimates. A cell without a limit has the middle of the column.
        """
        lower = torch.maximum(self.low, low.expand_as(self.low))
        upper = torch.minimum(self.high, (low + width).expand_as(self.high))
        estimates = (lower + upper) / 2
        is_determined = self.is_exact | self.is_likely
        if self.values is not None:
            estimates = torch.where(self.values.isnan(), estimates, self.values)
        estimates = torch.where(is_determined, (self.low + self.high) / 2, estimates)
        return torch.where(self.is_missing, torch.nan, estimates)

    @property
    def lines(self) -> tuple[str, ...]:
        """Sentences that say what was recovered of the training table."""
        record_count = self.records_in_file or self.records
        target_noun = "labels" if self.is_classifier else "targets"
        order_text = (
            "in the order of the training table" if self.has_row_order else "in unknown order"
        )
        sentences = []
        if self.known_targets:
            sentences.append(
                f"The file determines the {target_noun} of {self.known_targets} of {record_count} training "
                f"records, {order_text}."
            )
        else:
            sentences.append(f"The file determines no {target_noun} of training records.")
        if self.stated_share > 0:
            sentences.append(
                f"{self.stated_share:.1%} of all cells are {self.certainty}, and {self.whole_rows} of "
                f"{record_count} rows are {self.certainty} in every column."
            )
        return tuple(sentences)

    def summary(self) -> TableSummary:
        """Return a summary of the table: counts of recovered values, without the values."""
        return TableSummary(
            model=self.model,
            trees=self.trees,
            records=self.records_in_file or self.records,
            columns=self.columns,
            targets=self.known_targets,
            in_row_order=self.has_row_order,
            certainty=self.certainty,
            stated_cells=round(self.stated_share, 6),
            whole_rows=self.whole_rows,
            missing_cells=int(self.is_missing.sum()),
            seconds=self.seconds,
            notes=self.notes,
        )


@dataclass(frozen=True, eq=False)
class TableSummary(Record):
    """What an attack on a forest recovered, without any value of the training table.

    Attributes:
        model: class of the model
        trees: number of trees
        records: number of training records
        columns: number of columns
        targets: number of records whose target or label is determined
        in_row_order: whether the recovered records are in the order of the training table
        certainty: "exact", or "likely" for a file without seeds and counts
        stated_cells: share of all cells whose value is determined with this certainty
        whole_rows: number of records of which all columns are determined
        missing_cells: number of cells that are missing in the training table
        seconds: run time of the attack in seconds
        notes: remarks for the reader
    """

    model: str
    trees: Count
    records: Count
    columns: Count
    targets: Count
    in_row_order: bool
    certainty: Annotated[str, SchemaRule(enum=["exact", "likely"])]
    stated_cells: Share
    whole_rows: Count
    missing_cells: Count
    seconds: float
    notes: tuple[str, ...] = ()
