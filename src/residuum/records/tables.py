"""Tables as the user passes them: all columns by name, with numbers, texts and missing values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from residuum.records.base import Record

# Numbers, (n,) in float64 with NaN for a missing value, or texts with "" for a missing value.
Column: TypeAlias = Tensor | tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Table(Record):
    """All columns of a table, including those that are not inputs of a model.

    Attributes:
        columns: The columns by name, in the order of the file.
        label: Name of the column with the labels, "" if the table has none.
        dropped: Names of the columns that the user excluded from the inputs of the model.
        inputs: Names of the columns that are read as inputs of the model. They hold numbers, unless the model
            takes texts.
        identifiers: Names of the columns that identify the rows and are not inputs.
    """

    columns: dict[str, Column]
    label: str = ""
    dropped: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    identifiers: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def numbers(self) -> Mapping[str, Tensor]:
        """The columns of numbers that can be inputs of a model: neither the label nor dropped."""
        excluded = (self.label, *self.dropped)
        return {
            name: column
            for name, column in self.columns.items()
            if isinstance(column, Tensor) and name not in excluded
        }

    @property
    def texts(self) -> Mapping[str, tuple[str, ...]]:
        """All columns of texts except the label. They include dropped columns.

        A search for stored texts uses these columns, because a release can store texts that are not inputs
        of the model.
        """
        return {
            name: column
            for name, column in self.columns.items()
            if not isinstance(column, Tensor) and name != self.label
        }

    @property
    def input_texts(self) -> tuple[str, ...]:
        """Names of the columns of texts that may be inputs of the model, but are not read as such."""
        excluded = (*self.dropped, *self.identifiers, *self.inputs)
        return tuple(name for name in self.texts if name not in excluded)
