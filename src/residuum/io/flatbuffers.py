"""Read tables of FlatBuffers, the format inside of binary models of CatBoost, with checks for every offset.

A table begins with the distance to its field list. The field list states for each field how far behind the
beginning of the table its content is, 0 for a field that is not stored. Texts, arrays and inner tables are
stored elsewhere, and the field holds the distance to them. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Table:
    """A table in the bytes of a file. Damaged offsets raise a ``ValueError``.

    Attributes:
        raw: The bytes of the file.
        position: Position of the table.
    """

    raw: bytes
    position: int

    @classmethod
    def root(cls, raw: bytes) -> Table:
        """Return the table to which the first bytes of a file refer."""
        return cls(raw, _read(raw, "<I", 0))

    def number(self, field: int, kind: str, default: float) -> float:
        """Return a number that is stored in the table.

        Args:
            field: Number of the field.
            kind: Format of the number, as in :mod:`struct`.
            default: Result for a field that is not stored.

        Returns:
            The number.
        """
        position = self._find(field)
        return default if position is None else _read(self.raw, kind, position)

    def table(self, field: int) -> Table | None:
        """Return an inner table, None if the field is not stored."""
        position = self._follow(field)
        return None if position is None else Table(self.raw, position)

    def text(self, field: int) -> str:
        """Return a text, "" if the field is not stored."""
        return self.array(field, "u1").tobytes().decode("utf-8", "replace")

    def array(self, field: int, kind: str) -> NDArray:
        """Return an array of numbers, which shares the bytes of the file.

        Args:
            field: Number of the field.
            kind: Dtype of numpy.

        Returns:
            The array, which is empty if the field is not stored.
        """
        position = self._follow(field)
        if position is None:
            return np.zeros(0, dtype=kind)
        count = _read(self.raw, "<I", position)
        return np.frombuffer(self.raw, kind, count, position + 4)

    def tables(self, field: int) -> Iterator[Table]:
        """Yield the tables of an array of tables."""
        position = self._follow(field)
        if position is None:
            return
        for k in range(_read(self.raw, "<I", position)):
            entry = position + 4 + 4 * k
            yield Table(self.raw, entry + _read(self.raw, "<I", entry))

    def _find(self, field: int) -> int | None:
        """Return the position of a field, None if the table does not store the field."""
        fields = self.position - _read(self.raw, "<i", self.position)
        size = _read(self.raw, "<H", fields)
        entry = 4 + 2 * field
        if entry + 2 > size:
            return None
        distance = _read(self.raw, "<H", fields + entry)
        return self.position + distance if distance else None

    def _follow(self, field: int) -> int | None:
        """Return the position to which a field refers."""
        position = self._find(field)
        return None if position is None else position + _read(self.raw, "<I", position)


def _read(raw: bytes, kind: str, position: int) -> int:
    if not 0 <= position <= len(raw) - struct.calcsize(kind):
        raise ValueError("an offset leads out of the file")
    return struct.unpack_from(kind, raw, position)[0]
