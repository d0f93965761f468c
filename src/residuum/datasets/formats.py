"""Reading the files MNIST and CIFAR-10 are published in, without trusting them.

An IDX file states its sizes; they are checked against the file's length before anything is read.
A CIFAR-10 batch is a pickle. It is read as inert values, so that no code named by the file ever runs and no
array is larger than the bytes that fill it.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from residuum.errors import CheckpointError, DataError, UnsafeFileError
from residuum.io.inert import Block
from residuum.io.pickle_files import read_pickle
from residuum.records.inputs import MAX_BYTES, max_memory

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
            size, limit = math.prod(shape), min(MAX_BYTES, max_memory(length) // 8)
            body = stream.read(min(size, limit if packed else length) + 1)
    except (OSError, EOFError, zlib.error) as problem:
        raise _broken_idx(path, f"reading it failed ({problem})") from problem
    if len(body) != size:
        held = "more" if len(body) > size else f"only {len(body)}"
        raise _broken_idx(path, f"it claims {shape}, {size} bytes of data, and holds {held}")
    return np.frombuffer(bytearray(body), np.uint8).reshape(shape)


def read_cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (N, 3, 32, 32) uint8 and labels (N,) int64 of one CIFAR-10 python batch.

    Raises:
        DataError: If the file is no such batch.
        UnsafeFileError: If it names functions, or if it is too large.
    """
    try:
        if (length := path.stat().st_size) > MAX_BATCH_BYTES:
            raise UnsafeFileError(
                f"A CIFAR-10 batch may have {MAX_BATCH_BYTES} bytes; {str(path)!r} has {length}.",
                "Download the batch again.",
            )
        with path.open("rb") as stream:
            pickled = read_pickle(path, stream, length)
    except OSError as problem:
        raise _broken_batch(path, problem.strerror or "it cannot be read") from problem
    except CheckpointError as problem:
        raise _broken_batch(path, "it is no pickle of plain data") from problem
    if names := (*pickled.unsafe, *pickled.foreign):
        raise UnsafeFileError(
            f"A CIFAR-10 batch may hold arrays and plain data only; {str(path)!r} names "
            f"{names[0].rpartition(' ')[2]!r}, which could run code.",
            "Do not open it with other tools; download the batch again.",
        )
    batch = pickled.content if isinstance(pickled.content, dict) else {}
    data, labels = (batch.get(name, batch.get(name.encode())) for name in ("data", "labels"))
    if not isinstance(data, Block) or data.kind != "uint8" or data.shape[1:] != (3 * 32 * 32,):
        raise _broken_batch(path, "its 'data' is no matrix (N, 3072) of unsigned bytes")
    if not (
        isinstance(labels, list)
        and len(labels) == data.shape[0]
        and all(type(y) is int and 0 <= y <= 9 for y in labels)
    ):
        raise _broken_batch(path, f"its 'labels' are no list of {data.shape[0]} classes 0 to 9")
    images = data.tensor().numpy().reshape(-1, 3, 32, 32)
    return images, np.array(labels, dtype=np.int64)


def _broken(what: str, path: Path, why: str) -> DataError:
    return DataError(f"{str(path)!r} must be {what}; {why}.", "Download it again.")


_broken_idx = partial(_broken, "an IDX file of unsigned bytes, as long as its header says")
_broken_batch = partial(_broken, "a CIFAR-10 python batch with 'data' and 'labels'")
