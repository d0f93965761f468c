"""Inert values: plain Python objects that describe what is in a model file, so that nothing is executed.

The classes and functions that the file names are neither imported nor called.

=======================================  ==============================================================
in the file                              inert value in the tree
=======================================  ==============================================================
an array of numpy, torch or joblib       :class:`Block`: shape, dtype, and how to read the numbers
a dict, list, tuple, number or text      itself
an object of any class, any other call   :class:`InertObject`: its class, its arguments, its attributes
=======================================  ==============================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.records.inputs import is_size

MAX_DIMENSIONS = 16  # largest number of dimensions of a tensor
# Exceptions that reading the numbers of a damaged file can raise, possibly long after the file was opened.
UNREADABLE = (ValueError, TypeError, RuntimeError, OverflowError, OSError, EOFError, BadZipFile)
KINDS = {"Double": torch.float64, "Float": torch.float32, "Half": torch.float16}
KINDS |= {"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32}
KINDS |= {"Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool}
KINDS |= {"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128}
STORAGES = {f"torch.{name}Storage": kind.itemsize for name, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Storage:
    """A torch storage (an array of numbers that several tensors can share), which a pickle refers to by key.

    Attributes:
        key: Name of the storage in the file.
        numel: Number of elements.
        itemsize: Bytes of one element.
        kind: Type of the elements as in the name of a storage class of torch, such as "Float".
    """

    key: str
    numel: int
    itemsize: int
    kind: str = ""

    @property
    def nbytes(self) -> int:
        """Size of the storage (the numbers of tensors) in bytes."""
        return self.numel * self.itemsize


def _order_of_storage(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of a tensor in the order of its stored numbers, or None if not contiguous."""
    dimensions = sorted(
        ((step, n) for step, n in zip(stride, size, strict=True) if n != 1), reverse=True
    )
    expected_step = 1
    for step, n in reversed(dimensions):
        if step != expected_step:
            return None
        expected_step *= n
    return tuple(n for _, n in dimensions)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a pickle describes it: a view of a storage (an array of numbers), which must contain it.

    Attributes:
        storage: The storage that holds the numbers.
        offset: Index of the first element of the tensor in the storage.
        size: Shape of the tensor.
        stride: For each dimension, the distance in the storage between neighboring elements of the tensor.
    """

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the tensor lies inside its storage and is no larger than its storage.

        With stride 0, a tensor of any size could repeat a single number. So the number of elements of the
        tensor may not exceed the number of elements of the storage.

        Raises:
            ValueError: If sizes and strides are malformed.
            UnsafeFileError: If the view is larger than the storage.
        """
        offset_and_sizes_and_strides = (self.offset, *self.size, *self.stride)
        if len(self.size) != len(self.stride) or not all(
            is_size(n) for n in offset_and_sizes_and_strides
        ):
            raise ValueError("a tensor needs as many strides as sizes, and none may be negative")
        if len(self.size) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has at most {MAX_DIMENSIONS} dimensions")
        count, stored = math.prod(self.size), self.storage.numel
        sizes_and_strides = zip(self.size, self.stride, strict=True)
        last_index = self.offset + sum((n - 1) * step for n, step in sizes_and_strides)
        if count > stored or (count and last_index >= stored):
            raise UnsafeFileError(
                f"The file must contain all elements of a tensor; a tensor of shape {list(self.size)} "
                f"needs {max(count, last_index + 1)} elements, but the file has only {stored} elements "
                "for this tensor.",
                "Save full copies of the tensors: {name: t.clone() for name, t in state.items()}.",
            )

    @property
    def stored_size(self) -> tuple[int, ...] | None:
        """Shape of the tensor in the order of its stored numbers, None if they are not contiguous."""
        return _order_of_storage(self.size, self.stride)


@dataclass(frozen=True, slots=True)
class GlobalName:
    """The name of a class or function in a pickle. The class or function is not imported.

    Attributes:
        name: The full name, such as "torch.nn.modules.linear.Linear".
        kind: One of four kinds that say what a pickle may do with the class or function. HARMLESS: call it.
            KNOWN: make an instance without a call. FOREIGN: the same, but the scan reports the package.
            UNLISTED: nothing. See :mod:`.pickle_names`.
    """

    name: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class NumberReader:
    """Reads a part of the numbers of an array, so that a search of a large array needs little memory.

    Attributes:
        shape: Shape of the array, with its dimensions in the order of storage: the last index varies fastest.
        read: Function that takes the positions of the first number and of the end of the part, and returns
            the numbers as a tensor with one dimension. Checksums are not checked.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]


@dataclass(eq=False, slots=True)
class Block:
    """An array as a file describes it. The numbers are read from the file on demand.

    Attributes:
        shape: Shape of the array.
        kind: Dtype of the array, such as "float32", or a word such as "object".
        read: Function that reads the numbers, None if the entries are not numbers.
        objects: The values of an array of Python objects or texts, None for other arrays.
        name: Name of the storage that holds the numbers. Several arrays can share a storage.
        structures: Function that reads the bytes of an array of structures (a dtype with fields), else None.
        part_reader: Reads parts of the numbers, None if the array can only be read at once.
    """

    shape: tuple[int, ...] = ()
    kind: str = ""
    read: Callable[[], Tensor] | None = None
    objects: Any = None
    name: str = ""
    structures: Callable[[], np.ndarray] | None = None
    part_reader: NumberReader | None = None

    def raw(self) -> np.ndarray | None:
        """Return the bytes of a structured array (a dtype with fields), a row per entry, else None."""
        return None if self.structures is None else self.structures()

    @property
    def numel(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)

    def meta(self) -> Tensor:
        """Return a tensor of the same shape and dtype on the device "meta", which takes no memory."""
        return torch.empty(
            self.shape, dtype=getattr(torch, self.kind, torch.float32), device="meta"
        )

    def tensor(self) -> Tensor:
        """Read the numbers of the array from the file.

        Returns:
            The numbers as a tensor.

        Raises:
            CheckpointError: If the array holds no numbers, or the file is damaged.
        """
        if self.read is None:
            raise CheckpointError(
                "residuum reads only arrays of numbers; an array in this file holds "
                f"{self.kind or 'objects'}.",
                "Save the array as numbers.",
            )
        try:
            return self.read()
        except UNREADABLE as problem:
            raise CheckpointError(
                "An array in a file must have as many bytes as its header states; an array in this file "
                f"is damaged ({problem}).",
                "Copy or save the file again.",
            ) from problem


@dataclass(eq=False, slots=True)
class InertObject:
    """A plain description of an object in a pickle, or of the result of a call. Nothing is executed.

    Attributes:
        name: Full name of the class or function.
        arguments: Arguments of the call.
        state: State of the object that the pickle sets, usually a dict of attributes.
        items: Items that the pickle appends to the object, as to a list.
        entries: Entries that the pickle sets in the object, as in a dict.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    entries: dict[Any, Any] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        """Name of the class without its module."""
        return self.name.rpartition(".")[2]

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the object by name, from all dicts of its state."""
        # A pickle can store the state of an object as two dicts: for ``__dict__`` and for ``__slots__``.
        state_values = self.state if isinstance(self.state, tuple) else (self.state,)
        attributes: dict[str, Any] = {}
        for state in state_values:
            if isinstance(state, dict):
                attributes |= {key: value for key, value in state.items() if isinstance(key, str)}
        return attributes


class Opaque:
    """A placeholder for a dict key or number in a pickle that is too large or too nested to store."""


def make_key(value: Any) -> Any:
    """Return a value as a dict key. A long or nested value, slow to hash, becomes a placeholder."""
    is_short = value is None or type(value) in (bool, float)
    if is_short or (type(value) in (str, bytes) and len(value) <= 1000):
        return value
    return value if type(value) is int and abs(value) < 2**60 else Opaque()


def expect_type(value: Any, *kinds: type) -> Any:
    """Return the value after checking its class.

    Args:
        value: Any value of a pickle.
        *kinds: The allowed classes. Subclasses are refused.

    Returns:
        The value.

    Raises:
        ValueError: If the value has none of these classes.
    """
    if type(value) not in kinds:
        raise ValueError(f"a {kinds[0].__name__} is needed; got a {type(value).__name__}")
    return value
