"""Records with missing values, filled with values that an attack inferred from the weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from residuum.records.base import Record


@dataclass(frozen=True, eq=False)
class FilledRecords(Record):
    """Records of an attacker in which missing values are filled.

    Attributes:
        x: The records as the network receives them, (n, d). NaN in cells that stay empty.
        is_missing: Mask (n, d) of the cells that were missing.
        p: P-value of each missing cell, (n, d): the chance that a record that was never trained on gives
            as much evidence for some value. NaN for cells that were not missing or not tested. The p-value
            is not the probability that a filled value is wrong.
        q: The smallest false discovery rate at which the cell is filled, (n, d), NaN like ``p``.
        reasons: For each record, why its missing cells were not tested, "" if they were tested or no cell
            is missing.
        notes: Remarks for the reader.
    """

    x: Tensor
    is_missing: Tensor
    p: Tensor
    q: Tensor
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_filled(self) -> Tensor:
        """Mask (n, d) of the missing cells that were filled."""
        return self.is_missing & self.x.isfinite()

    @property
    def line(self) -> str:
        """A sentence that says how many missing cells were filled."""
        tested = int(self.p.isfinite().sum())
        return (
            f"{int(self.is_filled.sum())} of {int(self.is_missing.sum())} missing cells were filled "
            f"({tested} were tested)."
        )
