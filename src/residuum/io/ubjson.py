"""Read UBJSON (Universal Binary JSON), the binary format of XGBoost, with limits for every claimed length.

A value is a letter that states its type, followed by its content. Numbers are big-endian. A list or an
object may state the type (``$``) and the number (``#``) of its values. A list of numbers of one type becomes
an array of numpy that shares the bytes of the file.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.safetensors_files import COPY_AGAIN

MAX_DEPTH = 64  # largest nesting depth of lists and objects; XGBoost files have about 10
# Largest number of values in a file. Each value becomes a Python object of up to 230 bytes. An array of
# numbers counts as one value.
MAX_VALUES = 2_000_000
MAX_TEXT = 1 << 20  # longest text in bytes
NUMBERS = {
    "i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8",
}  # fmt: skip
SCALARS = {
    "i": struct.Struct(">b"), "U": struct.Struct(">B"), "I": struct.Struct(">h"),
    "l": struct.Struct(">i"), "L": struct.Struct(">q"), "d": struct.Struct(">f"),
    "D": struct.Struct(">d"),
}  # fmt: skip
CONSTANTS = {"Z": None, "T": True, "F": False}


def read_ubjson(raw: bytes | bytearray) -> Any:
    """Return the value in a UBJSON file.

    Args:
        raw: The bytes of the file.

    Returns:
        Objects as dicts, lists of numbers of one type as arrays, other lists as lists.

    Raises:
        CheckpointError: If the file is damaged.
    """
    reader = _Reader(bytes(raw))
    try:
        value = reader.read_value(reader.read_type(), 0)
    except (ValueError, struct.error, IndexError) as problem:
        raise CheckpointError(
            f"A UBJSON file must be complete; this file is damaged ({problem}).", COPY_AGAIN
        ) from problem
    return value


class _Reader:
    """Reads values from the bytes of a UBJSON file, one after another.

    Attributes:
        raw: The bytes of the file.
        position: Position of the next byte.
        values: Number of values that were read so far.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw, self.position, self.values = raw, 0, 0

    def read_type(self) -> str:
        """Return the letter that states the type of the next value. Skip "N" (no operation)."""
        while (letter := chr(self.raw[self.position])) == "N":
            self.position += 1
        self.position += 1
        return letter

    def read_value(self, letter: str, depth: int) -> Any:
        """Return the next value, whose type letter was read before."""
        self.values += 1
        if self.values > MAX_VALUES or depth > MAX_DEPTH:
            raise UnsafeFileError(
                f"A UBJSON file may have at most {MAX_VALUES:,} values, nested at most {MAX_DEPTH} deep; "
                "this file has more.",
                "Save the model with fewer trees.",
            )
        if letter in SCALARS:
            (number,) = SCALARS[letter].unpack_from(self.raw, self.position)
            self.position += SCALARS[letter].size
            return number
        if letter in CONSTANTS:
            return CONSTANTS[letter]
        match letter:
            case "S":
                return self.read_text()
            case "C":
                return self.take(1).decode("latin-1")
            case "[":
                return self.read_list(depth)
            case "{":
                return self.read_object(depth)
        raise ValueError(f"the type {letter!r} is not known")

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        self.check_room(count)
        self.position += count
        return self.raw[self.position - count : self.position]

    def check_room(self, count: int) -> None:
        """Raise an error if fewer than ``count`` bytes are left in the file."""
        if not 0 <= count <= len(self.raw) - self.position:
            raise ValueError(f"a length of {count} exceeds the file")

    def read_length(self) -> int:
        """Return the next length. A length is stored as an integer of any type."""
        type_letter = self.read_type()
        if type_letter not in "iUIlL":
            raise ValueError(f"a length must be an integer, not of type {type_letter!r}")
        (length,) = SCALARS[type_letter].unpack_from(self.raw, self.position)
        self.position += SCALARS[type_letter].size
        return length

    def read_text(self) -> str:
        """Return the next text. The file stores its length before its bytes."""
        length = self.read_length()
        if length > MAX_TEXT:
            raise ValueError(f"a text may have at most {MAX_TEXT} bytes")
        return self.take(length).decode("utf-8", "replace")

    def read_header(self) -> tuple[str, int | None]:
        """Return the type letter and number of values of a list or object, or "" and None if not stated."""
        letter, count = "", None
        if self.peek() == "$":
            self.position += 1
            letter = self.read_type()
        if self.peek() == "#":
            self.position += 1
            count = self.read_length()
        if letter and (count is None or letter not in NUMBERS):
            raise ValueError("a typed container must state a type of numbers and their count")
        return letter, count

    def peek(self) -> str:
        """Return the next byte as a letter without moving the position."""
        return chr(self.raw[self.position])

    def read_list(self, depth: int) -> Any:
        """Return the next list. If the file states one number type for all values, return an array."""
        letter, count = self.read_header()
        if letter:
            dtype = np.dtype(NUMBERS[letter])
            assert count is not None
            # Check the count itself first, because a damaged file can state any number.
            self.check_room(count)
            self.check_room(count * dtype.itemsize)
            numbers = np.frombuffer(self.raw, dtype, count, self.position)
            self.position += count * dtype.itemsize
            return numbers
        if count is not None:
            self.check_room(count)
            return [self.read_value(self.read_type(), depth + 1) for _ in range(count)]
        values = []
        while (letter := self.read_type()) != "]":
            values.append(self.read_value(letter, depth + 1))
        return values

    def read_object(self, depth: int) -> dict[str, Any]:
        """Return the next object as a dict."""
        letter, count = self.read_header()
        if count is not None:
            self.check_room(count)
            return {
                self.read_text(): self.read_value(letter or self.read_type(), depth + 1)
                for _ in range(count)
            }
        members = {}
        while self.peek() != "}":
            name = self.read_text()
            members[name] = self.read_value(self.read_type(), depth + 1)
        self.position += 1
        return members
