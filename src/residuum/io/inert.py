"""Inert values that stand for what a file holds: nothing that it names is imported, called or built.

=====================================  ==========================================================
in the file                            in the tree
=====================================  ==========================================================
an array of numpy, torch or joblib     :class:`Block`: shape, kind of number, and a way to read it
a dict, list, tuple, number or text    itself
an object of any class, any other call :class:`InertObject`: the name, what it was given, its attributes
=====================================  ==========================================================
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

MAX_DIMENSIONS = 16  # of a tensor
# What reading the numbers of a damaged file can raise, long after it was opened.
UNREADABLE = (ValueError, TypeError, RuntimeError, OverflowError, OSError, EOFError, BadZipFile)
KINDS = {"Double": torch.float64, "Float": torch.float32, "Half": torch.float16}
KINDS |= {"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32}
KINDS |= {"Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool}
KINDS |= {"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128}
STORAGES = {f"torch.{name}Storage": kind.itemsize for name, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of numbers that a pickle refers to by key; kind: of number, where it is of interest."""

    key: str
    numel: int
    itemsize: int
    kind: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that the block takes."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a pickle describes it: a window on a storage, checked to lie inside it."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        """The last element reached by sizes and strides must lie inside the storage, and sizes must not
        repeat it.

        Stride 0 would make a tensor of any size from one number: ``count > held`` refuses that too.
        """
        numbers = (self.offset, *self.size, *self.stride)
        if len(self.size) != len(self.stride) or not all(is_size(n) for n in numbers):
            raise ValueError("a tensor needs as many strides as sizes, none negative")
        if len(self.size) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has at most {MAX_DIMENSIONS} dimensions")
        count, held = math.prod(self.size), self.storage.numel
        steps = zip(self.size, self.stride, strict=True)
        last = self.offset + sum((n - 1) * step for n, step in steps)
        if count > held or (count and last >= held):
            raise UnsafeFileError(
                f"A tensor must lie within its storage; one of shape {list(self.size)} claims "
                f"{max(count, last + 1)} elements and the file holds {held}.",
                "Save a full copy: {name: t.clone() for name, t in state.items()}.",
            )


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A global that a pickle names; nothing is imported.

    kind: HARMLESS, KNOWN, FOREIGN or UNLISTED (:mod:`.pickle_names`), if the reader judges names.
    """

    name: str
    kind: str = ""


@dataclass(eq=False, slots=True)
class Block:
    """An array as a file describes it; its numbers are read when they are asked for.

    kind: such as float32.
    objects: of an array of Python values, in their order, else None.
    name: the storage that it lies in, for arrays that share one.
    """

    shape: tuple[int, ...] = ()
    kind: str = ""
    read: Callable[[], Tensor] | None = None
    objects: Any = None
    name: str = ""
    structures: Callable[[], np.ndarray] | None = None

    def raw(self) -> np.ndarray | None:
        """Return the bytes of an array of structures, (entries, bytes of each); None for other arrays."""
        return None if self.structures is None else self.structures()

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def tensor(self) -> Tensor:
        """The numbers."""
        if self.read is None:
            raise CheckpointError(
                f"An array of numbers is needed; this one is of {self.kind or 'objects'}.",
                "Save it as numbers.",
            )
        try:
            return self.read()
        except UNREADABLE as problem:
            raise CheckpointError(
                f"An array must be in the file as it is described; this one is not ({problem}).",
                "Copy or save the file again.",
            ) from problem


@dataclass(eq=False, slots=True)
class InertObject:
    """What stands for an object, or for what a call would have returned.

    state: its attributes, as ``BUILD`` gives them.
    items, entries: what was appended or set.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    entries: dict[Any, Any] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        """The name of the class alone."""
        return self.name.rpartition(".")[2]

    @property
    def attributes(self) -> dict[str, Any]:
        """By name; of a state in two parts both."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        found: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, dict):
                found |= {key: value for key, value in part.items() if isinstance(key, str)}
        return found


class Opaque:
    """A key of a dict that is neither text nor a small number: it is told apart by nothing."""


def make_key(value: Any) -> Any:
    """Return a key that hashes in no time. Anything long or nested becomes an :class:`Opaque`."""
    plain = value is None or type(value) in (bool, float)
    if plain or (type(value) in (str, bytes) and len(value) <= 1000):
        return value
    return value if type(value) is int and abs(value) < 2**60 else Opaque()


def expect_type(value: Any, *kinds: type) -> Any:
    """Return the value.

    Raises:
        ValueError: If it is of none of these classes.
    """
    if type(value) not in kinds:
        raise ValueError(f"{type(value).__name__} where {kinds[0].__name__} belongs")
    return value
