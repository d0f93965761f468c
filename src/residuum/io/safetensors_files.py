"""Read safetensors files after checking their header.

A file has 8 bytes with the length n (little endian), n bytes of JSON
``{name: {dtype, shape, data_offsets}}``, and the bytes of the tensors without gaps. Every entry must agree
with the size of the file before a number is read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.inert import MAX_DIMENSIONS, Block, NumberReader
from residuum.io.streams import read_range
from residuum.records.inputs import is_size

MAX_CLAIMED = 64 << 30  # largest size in bytes of all tensors of a file together
# Largest size of the header of a file. It is enough for 40 000 tensors. A hostile header of this size, which
# consists of empty JSON lists, takes 90 MB of memory.
MAX_HEADER_BYTES = 4 << 20
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
DTYPES |= {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
DTYPES |= {"BOOL": torch.bool}
COPY_AGAIN = "Copy or save the file again."


def sort_header(content: bytes) -> bytes:
    """Sort the header keys of a safetensors file, because the library safetensors orders them at random."""
    tensors_start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(
        json.loads(content[8:tensors_start]),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(header).to_bytes(8, "little") + header + content[tensors_start:]


def read_safetensors(
    path: Path, stream: BinaryIO, size: int
) -> tuple[dict[str, Block], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata. Numbers are read on demand.

    Args:
        path: The file.
        stream: The same file, open.
        size: Size of the file in bytes.

    Returns:
        The tensors by name, and the metadata.
    """
    header, metadata, start = read_header(stream, size)

    def make_block(entry: dict[str, Any]) -> Block:
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]

        def read() -> Tensor:
            tensor_bytes = read_range(path, start + begin, end - begin)
            if not tensor_bytes:
                return torch.zeros(shape, dtype=dtype)
            return torch.frombuffer(tensor_bytes, dtype=dtype).reshape(shape)

        def read_part(first: int, last: int) -> Tensor:
            tensor_bytes = read_range(
                path, start + begin + first * dtype.itemsize, (last - first) * dtype.itemsize
            )
            return (
                torch.frombuffer(tensor_bytes, dtype=dtype)
                if tensor_bytes
                else torch.zeros(0, dtype=dtype)
            )

        part_reader = NumberReader(shape, read_part)
        return Block(shape, str(dtype).removeprefix("torch."), read, part_reader=part_reader)

    return {name: make_block(entry) for name, entry in header.items()}, metadata


def read_header(stream: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, str], int]:
    """Read the header of a safetensors file and check that its tensors fill the file.

    Args:
        stream: The open file.
        size: Size of the file in bytes.

    Returns:
        The entries by tensor name, the metadata, and the position of the first tensor.

    Raises:
        UnsafeFileError: If the header claims bytes that the file does not hold.
    """
    header, start = _parse_header(stream, size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _raise_damaged("its metadata must be strings")
    tensors_end = 0
    for begin, stop, claimed, name in sorted(_read_span(*item) for item in header.items()):
        if begin != tensors_end or claimed != stop - begin:
            raise UnsafeFileError(
                "In a safetensors file, a tensor must begin where the previous tensor ends, and have as "
                f"many bytes as its shape needs; the tensor {name[:80]!r} needs {claimed} bytes and has "
                f"{max(stop - begin, 0)} "
                f"bytes from position {begin} (the previous tensor ends at {tensors_end}).",
                COPY_AGAIN,
            )
        tensors_end = stop
    if tensors_end > MAX_CLAIMED:
        raise UnsafeFileError(
            f"The tensors of a file may take at most {MAX_CLAIMED} bytes; according to the header, the "
            f"tensors of this file take {tensors_end} bytes.",
            COPY_AGAIN,
        )
    if start + tensors_end != size:
        _raise_damaged(
            f"the header of this file describes {start + tensors_end} bytes, but the file has {size}"
        )
    return header, metadata, start


def _parse_header(stream: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the position of the first tensor."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if 8 + length > size:
        _raise_damaged(f"this file has {size} bytes and its header claims {length}")
    if length > MAX_HEADER_BYTES:
        raise UnsafeFileError(
            f"The header of a safetensors file may have at most {MAX_HEADER_BYTES} bytes; the header of "
            f"this file has {length} bytes.",
            "Save fewer tensors and less metadata.",
        )
    try:
        header = json.loads(stream.read(length), object_pairs_hook=_make_dict)
    except (ValueError, RecursionError) as problem:
        _raise_damaged(f"its header is not JSON: {type(problem).__name__}", problem)
    if not isinstance(header, dict):
        _raise_damaged("its header is not a JSON object")
    return header, 8 + length


def _make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of names and values, and raise an error if a name occurs twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _read_span(name: str, entry: Any) -> tuple[int, int, int, str]:
    """Return where the bytes of a tensor begin and end, how many bytes its shape needs, and its name."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            is_valid = len(shape) <= MAX_DIMENSIONS and all(map(is_size, (*shape, begin, end)))
            if dtype in DTYPES and is_valid:
                return begin, end, math.prod(shape) * DTYPES[dtype].itemsize, name
    _raise_damaged(f"tensor {name[:80]!r} has no known dtype, shape or pair of offsets")


def _raise_damaged(reason: str, cause: BaseException | None = None) -> NoReturn:
    raise CheckpointError(f"A safetensors file must be complete; {reason}.", COPY_AGAIN) from cause
