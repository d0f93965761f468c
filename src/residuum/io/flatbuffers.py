"""Read tables of FlatBuffers, the format of binary models of CatBoost, with checks for every offset.

A table is a group of fields, which are numbered from 0. The table begins with the distance in bytes back to
its field list. The field list states the distance from the beginning of the table to each field, or 0 for a
field that is not stored. A number is stored in its field. For a text, an array or an inner table, the field
holds the distance to the place where the content is stored. All numbers are little-endian.
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
        position: Position of the table in the file, in bytes.
    """

    raw: bytes
    position: int

    @classmethod
    def root(cls, raw: bytes) -> Table:
        """Return the outermost table. The first four bytes of a file state its position."""
        return cls(raw, _read(raw, "<I", 0))

    def number(self, field: int, kind: str, default: float) -> float:
        """Return a number that is stored in the table.

        Args:
            field: Index of the field in the table.
            kind: Format of the number, as in :mod:`struct`.
            default: Value to return if the field is not stored.

        Returns:
            The number.
        """
        position = self._find(field)
        return default if position is None else _read(self.raw, kind, position)

    def table(self, field: int) -> Table | None:
        """Return the inner table in a field, or None if the field is not stored."""
        position = self._follow(field)
        return None if position is None else Table(self.raw, position)

    def text(self, field: int) -> str:
        """Return the text in a field, or "" if the field is not stored."""
        return self.array(field, "u1").tobytes().decode("utf-8", "replace")

    def array(self, field: int, kind: str) -> NDArray:
        """Return the array of numbers in a field, as a view of the bytes of the file without a copy.

        Args:
            field: Index of the field in the table.
            kind: Dtype of the numbers, as numpy names it.

        Returns:
            The array, which is empty if the field is not stored.
        """
        position = self._follow(field)
        if position is None:
            return np.zeros(0, dtype=kind)
        entry_count = _read(self.raw, "<I", position)
        return np.frombuffer(self.raw, kind, entry_count, position + 4)

    def tables(self, field: int) -> Iterator[Table]:
        """Yield the tables in a field that holds an array of tables."""
        position = self._follow(field)
        if position is None:
            return
        for index in range(_read(self.raw, "<I", position)):
            entry_position = position + 4 + 4 * index
            yield Table(self.raw, entry_position + _read(self.raw, "<I", entry_position))

    def _find(self, field: int) -> int | None:
        """Return the position of a field of this table in the file, or None if the field is not stored."""
        list_position = self.position - _read(self.raw, "<i", self.position)
        list_bytes = _read(self.raw, "<H", list_position)
        entry_offset = 4 + 2 * field
        if entry_offset + 2 > list_bytes:
            return None
        field_distance = _read(self.raw, "<H", list_position + entry_offset)
        return self.position + field_distance if field_distance else None

    def _follow(self, field: int) -> int | None:
        """Return the position of the text, array or inner table of a field, or None if it is not stored."""
        position = self._find(field)
        return None if position is None else position + _read(self.raw, "<I", position)


def _read(raw: bytes, kind: str, position: int) -> int:
    if not 0 <= position <= len(raw) - struct.calcsize(kind):
        raise ValueError("an offset leads out of the file")
    return struct.unpack_from(kind, raw, position)[0]
