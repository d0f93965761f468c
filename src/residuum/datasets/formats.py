"""Read the file formats of MNIST and CIFAR-10 safely, even if the files are malicious.

MNIST uses IDX files. The header of an IDX file states how large the array is. The reader never reads more
bytes than the length of the file allows, whatever the header states.

A CIFAR-10 batch is a pickle. The reader extracts the values without executing the pickle, so functions to
which the pickle refers never run. An array is never larger than its bytes in the file.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from residuum.errors import CheckpointError, DataError, UnsafeFileError
from residuum.io.inert import Block
from residuum.io.pickle_files import read_pickle
from residuum.records.inputs import MAX_BYTES, max_memory

MAX_BATCH_BYTES = 256 << 20  # largest CIFAR-10 batch in bytes: eight times the published size
IDX = "an IDX file of unsigned bytes, as long as its header says"
BATCH = "a CIFAR-10 python batch with 'data' and 'labels'"


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read the unsigned bytes of an IDX file, plain or gzipped.

    The file starts with the four bytes 0, 0, 8 (for unsigned bytes) and ndim. Then come the ndim sizes as
    big-endian 32-bit integers, and the bytes of the array in row-major order.

    Args:
        path: The file.
        ndim: Number of dimensions.

    Returns:
        The unsigned bytes as an array.

    Raises:
        DataError: If the file is not an IDX file of unsigned bytes with ``ndim`` dimensions.
    """
    header_length = 4 + 4 * ndim
    is_gzipped = path.suffix == ".gz"
    try:
        file_length = path.stat().st_size
        with gzip.open(path) if is_gzipped else path.open("rb") as stream:
            header = stream.read(header_length)
            if len(header) < header_length or header[:4] != bytes((0, 0, 8, ndim)):
                defect = f"the file begins with {header[:4].hex(' ') or 'nothing'}"
                raise DataError(*_explain_broken(IDX, path, defect))
            shape = struct.unpack(f">{ndim}I", header[4:])
            size, limit = math.prod(shape), min(MAX_BYTES, max_memory(file_length) // 8)
            array_bytes = stream.read(min(size, limit if is_gzipped else file_length) + 1)
    except (OSError, EOFError, zlib.error) as problem:
        defect = f"reading it failed ({problem})"
        raise DataError(*_explain_broken(IDX, path, defect)) from problem
    if len(array_bytes) != size:
        actual_size_text = "more" if len(array_bytes) > size else f"only {len(array_bytes)}"
        defect = f"the header claims {shape}, {size} bytes of data, and the file holds {actual_size_text}"
        raise DataError(*_explain_broken(IDX, path, defect))
    return np.frombuffer(bytearray(array_bytes), np.uint8).reshape(shape)


def read_cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a CIFAR-10 python batch.

    Args:
        path: The file.

    Returns:
        Images (N, 3, 32, 32) uint8 and labels (N,) int64.

    Raises:
        DataError: If the file is not a CIFAR-10 python batch.
        UnsafeFileError: If the file refers to functions, or if the file is too large.
    """
    try:
        if (file_length := path.stat().st_size) > MAX_BATCH_BYTES:
            raise UnsafeFileError(
                f"A file of CIFAR-10 may have at most {MAX_BATCH_BYTES} bytes; the file {str(path)!r} has "
                f"{file_length} bytes.",
                "Download the file again.",
            )
        with path.open("rb") as stream:
            pickled = read_pickle(path, stream, file_length)
    except OSError as problem:
        defect = problem.strerror or "the file cannot be read"
        raise DataError(*_explain_broken(BATCH, path, defect)) from problem
    except CheckpointError as problem:
        defect = "the file is not a pickle of plain data"
        raise DataError(*_explain_broken(BATCH, path, defect)) from problem
    if names := (*pickled.unsafe, *pickled.foreign):
        raise UnsafeFileError(
            f"A file of CIFAR-10 must hold only arrays and plain data; the file {str(path)!r} refers to the "
            f"function {names[0].rpartition(' ')[2]!r}, which could run code.",
            "Do not open the file with other tools. Download the file again.",
        )
    batch = pickled.content if isinstance(pickled.content, dict) else {}
    data, labels = (batch.get(name, batch.get(name.encode())) for name in ("data", "labels"))
    if not isinstance(data, Block) or data.kind != "uint8" or data.shape[1:] != (3 * 32 * 32,):
        defect = "'data' is not a matrix (N, 3072) of unsigned bytes"
        raise DataError(*_explain_broken(BATCH, path, defect))
    if not (
        isinstance(labels, list)
        and len(labels) == data.shape[0]
        and all(type(y) is int and 0 <= y <= 9 for y in labels)
    ):
        defect = f"'labels' is not a list of {data.shape[0]} classes 0 to 9"
        raise DataError(*_explain_broken(BATCH, path, defect))
    images = data.tensor().numpy().reshape(-1, 3, 32, 32)
    return images, np.array(labels, dtype=np.int64)


def _explain_broken(expected_file: str, path: Path, defect: str) -> tuple[str, str]:
    """Return the error message and the advice to the user for a damaged dataset file."""
    return f"{str(path)!r} must be {expected_file}; {defect}.", "Download the file again."
