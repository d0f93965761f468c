"""Reading the files MNIST and CIFAR-10 are published in, without trusting them.

An IDX file states its sizes; they are checked against the file's length before anything is read.
A CIFAR-10 batch is a pickle; it is read with stand-ins for the few numpy names it needs, so that no
code named by the file ever runs and no array is larger than the bytes that fill it.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from residuum.errors import CheckpointError, DataError, UnsafeFileError
from residuum.io.pickles import Machine, expect
from residuum.records.inputs import MAX_BYTES, may_hold

MAX_BATCH_BYTES = 256 << 20  # eight times a published batch


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
        with path.open("rb") as stream:
            batch = _Batch(path, length).run(stream)
    except OSError as problem:
        raise _broken_batch(path, problem.strerror or "it cannot be read") from problem
    except CheckpointError as problem:
        raise _broken_batch(path, "it is no pickle of plain data") from problem
    if not isinstance(batch, dict):
        raise _broken_batch(path, "it holds no dictionary")
    labels = batch.get("labels")
    if (images := _decode(batch.get("data"))) is None:
        raise _broken_batch(path, "its 'data' is no matrix of unsigned bytes")
    if images.shape[1] != 3 * 32 * 32:
        raise _broken_batch(path, f"its 'data' has shape {images.shape}, not (N, 3072)")
    if not isinstance(labels, list) or not all(type(y) is int and 0 <= y <= 9 for y in labels):
        raise _broken_batch(path, "its 'labels' are no list of classes 0 to 9")
    if len(labels) != len(images):
        raise _broken_batch(path, f"it has {len(images)} images and {len(labels)} labels")
    return images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


@dataclass
class _Made:
    """Stand-in for what a call would have made: its arguments, and the state that was set."""

    arguments: tuple[Any, ...]
    state: Any = None


def _decode(data: Any) -> np.ndarray | None:
    """The array that was pickled, if it is a matrix of unsigned bytes."""
    match data:
        case _Made(
            state=(_, (int(rows), int(width)), _Made(arguments=("u1" | "|u1", *_)), order, str(raw))
        ) if 0 <= min(rows, width) <= max(rows, width) <= len(raw):
            flat = np.frombuffer(bytearray(raw, "latin-1", "ignore"), np.uint8)
            if len(flat) == rows * width:
                matrix = flat.reshape((rows, width), order="F" if order else "C")
                return np.ascontiguousarray(matrix)
    return None


class _Batch(Machine):
    """Reads dictionaries, lists, numbers, text and numpy arrays; bytes are text of as many letters.

    Python 2 wrote both alike, and what encodes text as bytes in protocol 2 has nothing left to do.
    """

    words: ClassVar[Collection[str]] = ("numpy.ndarray",)

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(size)
        self.path = path

    def refuse(self, what: str) -> NoReturn:
        """Say what the batch names that is neither an array nor plain."""
        raise UnsafeFileError(
            f"A CIFAR-10 batch may hold arrays and plain data only; {str(self.path)!r} names "
            f"{what[:80]!r}, which could run code.",
            "Do not open it with other tools; download the batch again.",
        )

    def make_dict(self, _: None) -> None:
        """Protocol 0 opens a dictionary so."""
        items = self._above_mark()
        self.push({})
        self._set(items)

    def set_state(self, _: None) -> None:
        """Keep the state of an array, or of its dtype."""
        state = expect(self.stack.pop(), tuple)
        self.charge(len(state))
        expect(self.stack[-1], _Made).state = state


_Batch.steps = {
    **Machine.steps,
    **dict.fromkeys(("BINSTRING", "UNICODE"), Machine.push),
    **dict.fromkeys(
        ("SHORT_BINBYTES", "BINBYTES"), lambda batch, raw: batch.push(raw.decode("latin-1"))
    ),
    "PUT": Machine.steps["BINPUT"],
    "DICT": _Batch.make_dict,
    "BUILD": _Batch.set_state,
}
_Batch.calls = {
    "_codecs.encode": lambda text, _codec: text,
    "numpy.dtype": lambda *arguments: _Made(arguments),
    "numpy.core.multiarray._reconstruct": lambda *arguments: _Made(arguments),
    "numpy._core.multiarray._reconstruct": lambda *arguments: _Made(arguments),
}


def _broken(what: str, path: Path, why: str) -> DataError:
    return DataError(f"{str(path)!r} must be {what}; {why}.", "Download it again.")


_broken_idx = partial(_broken, "an IDX file of unsigned bytes, as long as its header says")
_broken_batch = partial(_broken, "a CIFAR-10 python batch with 'data' and 'labels'")
