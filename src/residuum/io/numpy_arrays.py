"""Read arrays and numbers of numpy from a pickle without calling the functions of numpy that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residuum.io.inert import Block, GlobalName, InertObject, NumberReader, expect_type
from residuum.records.inputs import is_size

MAX_ITEM_BYTES = 1 << 16  # largest size of one entry of an array, in bytes
PLAIN_DTYPE = re.compile(r"[fiubcSUVOmM]\d{0,5}")


@dataclass(eq=False, slots=True)
class NumpyDtype:
    """The dtype of a numpy array in a pickle.

    Attributes:
        code: Kind and size in bytes as numpy writes them, such as "f8" for float64.
        order: The byte order, "<" or ">".
    """

    code: str
    order: str = "<"

    @property
    def itemsize(self) -> int:
        """Size of one entry in bytes."""
        entry_bytes = np.dtype(self.code).itemsize
        if entry_bytes > MAX_ITEM_BYTES:
            raise ValueError("an entry of an array may have at most 65536 bytes")
        return entry_bytes


def read_dtype(argument: Any = "", *_: Any) -> NumpyDtype | InertObject:
    """Return the dtype that a call in a pickle makes, such as ``numpy.dtype('f8', False, True)``.

    Args:
        argument: The first argument of the call ``numpy.dtype(...)``, such as 'f8'.
        *_: The other arguments, which are ignored.

    Returns:
        The dtype. If the dtype is not plain, such as a structured dtype, a plain description of the call.
    """
    # A pickle can also call numpy.dtype with a class, such as numpy.float64.
    if isinstance(argument, GlobalName):
        argument = np.dtype(getattr(np, argument.name.rpartition(".")[2], "V1")).str[1:]
    if type(argument) is not str or not PLAIN_DTYPE.fullmatch(argument):
        return InertObject("numpy.dtype", (argument,))
    return NumpyDtype(argument)


def read_array(raw: Any, kind: Any, shape: Any, fortran: bool, block: Block | None = None) -> Block:
    """Return an array of a pickle from its bytes or its list of objects.

    Args:
        raw: The bytes, or the list of objects. Files of Python 2 hold the bytes as a text with one letter
            for each byte.
        kind: The stand-in for the dtype.
        shape: Shape of the array.
        fortran: Whether the numbers are in Fortran order (the first index varies fastest).
        block: The block that receives the shape and the content, or None to make a new block.

    Returns:
        The array as a block.

    Raises:
        ValueError: If the shape is not valid or does not fit the bytes.
    """
    block = block or Block()
    block.shape = (
        (expect_type(shape, int),) if type(shape) is int else tuple(expect_type(shape, tuple, list))
    )
    if len(block.shape) > 32 or not all(map(is_size, block.shape)):
        raise ValueError("an array may have at most 32 dimensions, and none may be negative")
    if type(raw) is list:
        block.kind, block.objects = "object", raw
        return block
    if not isinstance(kind, NumpyDtype):
        block.kind = "structured"
        return block
    entry_bytes = kind.itemsize
    if block.numel * entry_bytes != len(expect_type(raw, bytes, bytearray, str)):
        raise ValueError("the number of bytes of an array must fit its shape and dtype")
    block.kind = np.dtype(kind.code).name if kind.code[0] in "fiubc" else f"bytes of {entry_bytes}"
    if kind.code[0] == "V" and entry_bytes and not isinstance(raw, str):
        block.structures = lambda: np.frombuffer(raw, np.uint8).reshape(-1, entry_bytes)
    if kind.code[0] in "US":
        block.kind = "text"
        block.objects = TextArray(raw, kind, block.numel)
    elif kind.code[0] in "fiubc":
        order: Any = "F" if fortran else "C"

        def flat_numbers() -> np.ndarray:
            array_bytes = raw.encode("latin-1") if isinstance(raw, str) else raw
            return np.frombuffer(array_bytes, np.dtype(kind.order + kind.code))

        def convert(array: np.ndarray) -> Tensor:
            supported_dtype = (
                np.float64 if array.dtype == np.longdouble else array.dtype.newbyteorder("=")
            )
            return torch.from_numpy(np.array(array, dtype=supported_dtype))

        block.read = lambda: convert(flat_numbers().reshape(block.shape, order=order))
        stored_shape = block.shape[::-1] if fortran else block.shape
        block.part_reader = NumberReader(
            stored_shape, lambda first, last: convert(flat_numbers()[first:last])
        )
    return block


@dataclass(eq=False)
class TextArray:
    """The texts in a numpy array of texts. A text is decoded when a caller iterates over the array.

    Iteration shortens long texts, because most callers show them.

    Attributes:
        raw: Bytes of the array.
        kind: Dtype of the array.
        count: Number of texts.
    """

    raw: Any
    kind: NumpyDtype
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        return (text[:200] for text in self.full_texts())

    def full_texts(self) -> Iterator[str]:
        """Return an iterator over the texts at their full length."""
        if isinstance(self.raw, str):
            return iter(())
        array = np.frombuffer(self.raw, np.dtype(self.kind.order + self.kind.code))
        is_bytes = self.kind.code[0] == "S"
        return (t.decode("utf-8", "replace") if is_bytes else str(t) for t in array)


def read_scalar(kind: Any, raw: Any = b"") -> Any:
    """Return the number that a call of ``numpy.core.multiarray.scalar`` in a pickle makes.

    Args:
        kind: The stand-in for the dtype.
        raw: Bytes of the number.

    Returns:
        The number. If the result is not a plain number, a description of the call.

    Raises:
        ValueError: If the bytes do not fit the dtype.
    """
    if isinstance(kind, NumpyDtype) and kind.code[0] in "fiub" and isinstance(raw, bytes):
        if len(raw) != kind.itemsize:
            raise ValueError("the number of bytes of a number must fit its dtype")
        return np.frombuffer(raw, np.dtype(kind.order + kind.code))[0].item()
    return InertObject("numpy.scalar", (kind, raw))
