"""Safetensors files: the header is checked by hand before the library maps a byte.

A file reads: 8 bytes length n (little endian), n bytes JSON {name: {dtype, shape, data_offsets}},
then the tensors' bytes without gaps. Every entry must agree with the size of the file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from safetensors import SafetensorError, safe_open
from torch import Tensor

from residuum.errors import CheckpointError, UnsafeFileError

MAX_HEADER_BYTES = 4 << 20  # 40 000 tensors; as empty JSON lists it takes 90 MB
MAX_DIMENSIONS = 16
ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
AGAIN = "Copy or save the file again."


def is_safetensors(head: bytes) -> bool:
    """Whether a file that begins so is meant as safetensors: after the length comes a JSON object."""
    return head[8:9] == b"{"


def read_safetensors(
    path: Path, stream: BinaryIO, size: int, max_bytes: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the file of ``size`` bytes at ``path``, open as ``stream``."""
    header, start = _parse(stream, size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _damaged("its metadata are not strings")
    end = 0
    for name, entry in sorted(header.items(), key=_begin):
        end = _check_entry(name, entry, end)
    if end > max_bytes:
        raise UnsafeFileError(
            f"Weights may take {max_bytes} bytes; this file claims {end}.",
            "Raise max_bytes for a large model.",
        )
    if start + end != size:
        _damaged(f"its header describes {start + end} bytes and it has {size}")
    try:
        with safe_open(str(path), framework="pt", device="cpu") as archive:
            return {name: archive.get_tensor(name) for name in header}, metadata
    except (SafetensorError, RuntimeError, ValueError, TypeError, OSError) as problem:
        _damaged(f"the library could not read it: {type(problem).__name__}", problem)


def _parse(stream: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header, its names known to be distinct, and where the tensors' bytes begin."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise UnsafeFileError(
            f"A safetensors header must lie in the file and take at most {MAX_HEADER_BYTES} bytes; "
            f"this one claims {length} of {size}.",
            AGAIN,
        )
    try:
        header = json.loads(stream.read(length), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as problem:
        _damaged(f"its header is not JSON: {type(problem).__name__}", problem)
    if not isinstance(header, dict):
        _damaged("its header is not a JSON object")
    return header, 8 + length


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _begin(item: tuple[str, Any]) -> tuple[int, int]:
    """Where a tensor's bytes begin and end."""
    name, entry = item
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _damaged(f"tensor {name[:80]!r} has no pair of offsets")
    return offsets[0], offsets[1]


def _check_entry(name: str, entry: dict[str, Any], expected: int) -> int:
    """Where this tensor ends; it must begin where the one before ended and fill its bytes."""
    begin, end = _begin((name, entry))
    shape, dtype = entry.get("shape"), entry.get("dtype")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        _damaged(f"tensor {name[:80]!r} has no shape")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        _damaged(f"tensor {name[:80]!r} has the unknown dtype {str(dtype)[:20]!r}")
    claimed = math.prod(shape) * ITEM_SIZES[dtype]
    if begin != expected or claimed != end - begin:
        raise UnsafeFileError(
            f"A tensor must fill the bytes its header gives it; {name[:80]!r} claims {claimed} bytes "
            f"and has {max(end - begin, 0)} from {begin} (free from {expected}).",
            AGAIN,
        )
    return end


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _damaged(why: str, cause: BaseException | None = None) -> NoReturn:
    raise CheckpointError(f"A safetensors file must be complete; {why}.", AGAIN) from cause
