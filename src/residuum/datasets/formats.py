"""Reading the files MNIST and CIFAR-10 are published in, without trusting them.

An IDX file states its sizes; they are checked against the file's length before anything is read.
A CIFAR-10 batch is a pickle; it is read with stand-ins for the few numpy names it needs, so that no
code named by the file ever runs and no array is larger than the bytes that fill it.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from residuum.errors import DataError, UnsafeFileError
from residuum.records.data import MAX_BYTES, may_hold

MAX_BATCH_BYTES = 256 << 20  # eight times a published batch
MAX_BATCH_STEPS = 500_000  # of its pickle; a published batch takes 50 000
MAX_KEY = 1000
UINT8 = ("u1", "|u1", b"u1", b"|u1")
COPYING = pickle.REDUCE + pickle.BUILD
KEYED = pickle.SETITEM + pickle.SETITEMS + pickle.DICT
UNUSED = pickle.EMPTY_SET + pickle.ADDITEMS + pickle.FROZENSET  # hash what they are given
UNUSED += pickle.BYTEARRAY8  # takes the memory it claims
UNUSED += pickle.OBJ + pickle.INST + pickle.NEWOBJ + pickle.NEWOBJ_EX  # other ways to call


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """The unsigned bytes of an IDX file with ``ndim`` dimensions, plain or gzipped.

    Layout: 0, 0, 8 (unsigned byte), ndim; ndim big-endian 32-bit sizes; the bytes, last index fastest.
    """
    header_length = 4 + 4 * ndim
    packed = path.suffix == ".gz"
    try:
        length = path.stat().st_size
        with gzip.open(path) if packed else path.open("rb") as stream:
            header = stream.read(header_length)
            if len(header) < header_length or header[:4] != bytes((0, 0, 8, ndim)):
                raise _broken_idx(path, f"it begins with {header[:4].hex(' ') or 'nothing'}")
            shape = struct.unpack(f">{ndim}I", header[4:])
            size = math.prod(shape)
            most = min(MAX_BYTES, may_hold(length) // 8) if packed else length - header_length
            if size > most:
                raise _broken_idx(path, f"it claims {shape} in a file of {length} bytes")
            body = stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as problem:
        raise _broken_idx(path, f"reading it failed ({problem})") from problem
    if len(body) != size:
        more = "more" if len(body) > size else f"only {len(body)}"
        raise _broken_idx(path, f"it claims {size} bytes of data and holds {more}")
    return np.frombuffer(bytearray(body), np.uint8).reshape(shape)


def read_cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) uint8 and labels (N,) int64 of one CIFAR-10 python batch."""
    try:
        if (length := path.stat().st_size) > MAX_BATCH_BYTES:
            raise UnsafeFileError(
                f"A CIFAR-10 batch may have {MAX_BATCH_BYTES} bytes; {str(path)!r} has {length}.",
                "Download the batch again.",
            )
        batch = _BatchUnpickler(path).load()
    except OSError as problem:
        raise _broken_batch(path, problem.strerror or "it cannot be read") from problem
    except (
        pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError,
        ArithmeticError, AssertionError, MemoryError, RecursionError, struct.error,
    ) as problem:  # fmt: skip
        raise _broken_batch(path, f"{type(problem).__name__} while reading it") from problem
    if not isinstance(batch, dict):
        raise _broken_batch(path, "it holds no dictionary")
    data = batch.get(b"data", batch.get("data"))
    labels = batch.get(b"labels", batch.get("labels"))
    if not isinstance(data, _Array) or (images := data.decode()) is None:
        raise _broken_batch(path, "its 'data' is no matrix of unsigned bytes")
    if images.shape[1] != 3 * 32 * 32:
        raise _broken_batch(path, f"its 'data' has shape {images.shape}, not (N, 3072)")
    if not isinstance(labels, list) or not all(type(y) is int and 0 <= y <= 9 for y in labels):
        raise _broken_batch(path, "its 'labels' are no list of classes 0 to 9")
    if len(labels) != len(images):
        raise _broken_batch(path, f"it has {len(images)} images and {len(labels)} labels")
    return images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


class _Array:
    """Stand-in for a pickled numpy array: keeps the pickled state as plain data."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def decode(self) -> np.ndarray | None:
        """The array, if the state is that of a matrix of unsigned bytes."""
        match self.state:
            case (_, (int(rows), int(width)), _Dtype(code=code), fortran, bytes(raw)) if (
                code in UINT8
            ):
                if 0 <= min(rows, width) <= max(rows, width) <= len(raw) == rows * width:
                    flat = np.frombuffer(bytearray(raw), np.uint8)
                    matrix = flat.reshape((rows, width), order="F" if fortran else "C")
                    return np.ascontiguousarray(matrix)
        return None


class _Dtype:
    """Stand-in for a pickled numpy dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment mean nothing for single bytes."""


def _admitted(code: int, step: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(reader: _BatchUnpickler) -> None:
        reader.admit(code)
        step(reader)

    return run


class _BatchUnpickler(pickle._Unpickler):
    """Reads dictionaries, lists, numbers, bytes, text and numpy arrays; any other name is refused.

    The pure Python reader is used because its memo is a dictionary: the C one allocates as many
    slots as the file names. Every call returns a new function, so a file can alter nothing that
    outlives it. Steps are counted, with what they copy.
    """

    stack: list[Any]

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.path = path
        self.steps, self.bytes = MAX_BATCH_STEPS, len(content)

    def admit(self, code: int) -> None:
        """Count an instruction and what it copies, before it runs; keys must be short texts.

        Hashing a nested tuple overflows the stack or never ends; long equal keys are compared in full.
        """
        self.steps -= 1 + (len(self.stack[-1]) if code in COPYING else 0)
        if self.steps < 0:
            raise ValueError("more steps than a batch takes")
        if code in KEYED:
            keys = self.stack[-2:-1] if code == pickle.SETITEM[0] else self.stack[::2]
            if not all(type(key) in (str, bytes) and len(key) <= MAX_KEY for key in keys):
                raise ValueError("a key that is no short text")

    dispatch: ClassVar = {
        code: _admitted(code, step)
        for code, step in pickle._Unpickler.dispatch.items()
        if code not in UNUSED
    }

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name that an array of numbers or a byte string needs."""
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return lambda *_: _Array()
            case ("numpy", "ndarray"):
                return "ndarray"
            case ("numpy", "dtype"):
                return lambda *arguments: _Dtype(*arguments)
            case ("_codecs", "encode"):  # how Python 3 writes bytes in protocol 2
                return lambda text, _codec: self._encode(text)
        raise UnsafeFileError(
            f"A CIFAR-10 batch may hold arrays and plain data only; {str(self.path)!r} names "
            f"{f'{module}.{name}'[:80]!r}, which could run code.",
            "Do not open it with other tools; download the batch again.",
        )

    def _encode(self, text: str) -> bytes:
        self.bytes -= len(text)
        if self.bytes < 0:
            raise ValueError("more bytes than the file has")
        return text.encode("latin-1")


def _broken_idx(path: Path, why: str) -> DataError:
    return DataError(
        f"{str(path)!r} must be an IDX file of unsigned bytes, as long as its header says; {why}.",
        "Download it again.",
    )


def _broken_batch(path: Path, why: str) -> DataError:
    return DataError(
        f"{str(path)!r} must be a CIFAR-10 python batch with 'data' and 'labels'; {why}.",
        "Download it again.",
    )
