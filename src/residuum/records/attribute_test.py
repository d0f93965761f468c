"""Values of training records that an attacker can infer from the weights, and the test that finds them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from residuum.records.base import Record
from residuum.records.published import Count, Share

# A finding needs at least this number of records with a disclosed value, as for membership.
MIN_RECORDS = 3
SEPARATORS = "_=-. :"  # characters between the name of a column and a choice, such as "city_Lyon"


@dataclass(frozen=True, eq=False)
class DisclosedCell(Record):
    """A value of a training record that the weights disclose to an attacker who knows the other columns.

    Attributes:
        row: Row of the record in the training data.
        columns: Indices of the columns, several for a group of one-hot columns.
        original: True values of these columns.
        inferred: Inferred values.
        imputed: Values that ridge regression on held-out records predicts.
        q: The smallest false discovery rate at which the cell is reported.
        names: Names of the columns, empty if they have none.
        unit: Unit of the column, empty if it is unknown.
        record_id: The user's identifier of the record, empty if the data has no identifiers.
    """

    row: Count
    columns: tuple[int, ...]
    original: tuple[float, ...]
    inferred: tuple[float, ...]
    imputed: tuple[float, ...]
    q: Share
    names: tuple[str, ...] = ()
    unit: str = ""
    record_id: str = ""

    @property
    def column(self) -> str:
        """Name of the column. A group of one-hot columns has the start that all its names share."""
        names = self.names or tuple(f"column {column}" for column in self.columns)
        if len(names) == 1:
            return names[0]
        return (self._prefix.rstrip(SEPARATORS) if self.names else "") or ", ".join(names)

    @property
    def texts(self) -> tuple[str, str, str]:
        """The original, the inferred and the imputed value as text."""
        original, inferred, imputed = map(
            self._format, (self.original, self.inferred, self.imputed)
        )
        return original, inferred, imputed

    @property
    def _prefix(self) -> str:
        equal_letters = takewhile(
            lambda letters: len({*letters}) == 1, zip(*self.names, strict=False)
        )
        return "".join(letters[0] for letters in equal_letters)

    def _format(self, values: tuple[float, ...]) -> str:
        """Return a value as text. The value of a one-hot group is the choice with the largest number."""
        if len(values) == 1:
            return f"{values[0]:.5g}"
        position = values.index(max(values))
        if not self.names:
            return f"column {self.columns[position]}"
        return self.names[position].removeprefix(self._prefix) or self.names[position]


@dataclass(frozen=True, eq=False)
class AttributeTest(Record):
    """The result of a test of attributes: which values of training records an attacker can infer.

    The attacker has the weights, and a training record of which one column is missing.

    Attributes:
        records: Number n of training records that were tested.
        variables: Number of variables (columns or groups of one-hot columns) that were tested.
        level: False discovery rate of the reported cells, 0 if nothing was tested.
        reported: Number of cells whose inferred values are reported.
        right: Number of reported cells whose inferred value is right.
        imputable: Number of right cells that ridge regression predicts as well.
        rows: Rows of the training records with at least one disclosed value.
        disclosed: Reported, right cells that are not imputable. The most certain cell of each record comes
            first. If there are many cells, only the first ones are listed.
        holdout_cells: Number of cells of held-out records that were tested as a negative control.
        holdout_reported: Number of these cells whose values are reported.
        untested: Number of training records that were left out to save time.
        reason: Why nothing was tested, empty if the test ran.
    """

    derived: ClassVar[tuple[str, ...]] = ("is_finding", "line", "disclosed_count")

    records: Count
    variables: Count = 0
    level: Share = 0.0
    reported: Count = 0
    right: Count = 0
    imputable: Count = 0
    rows: tuple[Count, ...] = ()
    disclosed: tuple[DisclosedCell, ...] = ()
    holdout_cells: Count = 0
    holdout_reported: Count = 0
    untested: Count = 0
    reason: str = ""

    @property
    def disclosed_count(self) -> Count:
        """Number of disclosed cells: reported, right and not imputable."""
        return self.right - self.imputable

    @property
    def is_finding(self) -> bool:
        """Whether enough records have a disclosed value, and the negative control reports fewer cells."""
        has_clean_control = self.holdout_reported * self.records * self.variables <= (
            self.level * self.reported * max(1, self.holdout_cells)
        )
        return len(self.rows) >= MIN_RECORDS and has_clean_control

    @property
    def short_line(self) -> str:
        """The most important numbers of ``line``, for the first screen of an audit."""
        wrong = self.reported - self.right
        if len(self.rows) < MIN_RECORDS:
            return f"{len(self.rows)} of {self.records} records have a value that can be inferred."
        return (
            f"For {len(self.rows)} of your {self.records} records, an attacker who knows the other columns "
            f"can infer a missing value. Of {self.reported} reported values, {wrong} are wrong. Of "
            f"{self.holdout_cells} values of held-out records, {self.holdout_reported} are reported."
        )

    @property
    def line(self) -> str:
        """Sentences for the user that say for how many records a missing value can be inferred."""
        if self.reason:
            return f"Attributes were not tested: {self.reason}."
        untested = (
            f" To save time, {self.untested} other records were not tested."
            if self.untested
            else ""
        )
        wrong = self.reported - self.right
        return (
            f"For {len(self.rows)} of your {self.records} records, an attacker who knows the other columns "
            f"can infer a missing value. At a false discovery rate of {self.level:.0%}, {self.reported} of "
            f"{self.records * self.variables} values are reported. Of these, {wrong} are wrong and "
            f"{self.imputable} can be predicted without the network. As a control, {self.holdout_reported} "
            f"of {self.holdout_cells} values of held-out records are reported.{untested}"
        )
