"""What a reproduction keeps so that nothing is computed twice: victims, attacks, comparisons.

A file is named by the hash of everything that decided its content (weights, data, settings), and
beside it lies the hash of its bytes, checked whenever it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from residuum.errors import CheckpointError
from residuum.records import Record, write_atomic
from residuum.records.environment import sha256

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Cache:
    """A folder of records by kind and key."""

    folder: Path

    def fetch(self, kind: str, key: str, cls: type[R], make: Callable[[Path], R]) -> R:
        """The record under this key, verified; or made, and kept.

        make: gets a path where unfinished work may be kept, so that it goes on after an interrupt;
        what lies there is removed once the record is complete.
        """
        path = self.folder / kind / f"{key}.safetensors"
        sums, partial = path.with_suffix(".sha256"), path.with_suffix(".partial")
        if not (path.is_file() and sums.is_file()):
            made = make(partial)
            if not (path.is_file() and sums.is_file()):  # nobody was faster
                made.save(path)
                write_atomic(sums, sha256(path) + "\n")
            partial.unlink(missing_ok=True)
        if sha256(path) != sums.read_text().strip():
            raise CheckpointError(
                f"{str(path)!r} is not what was written there: its hash differs.",
                "Remove it; it will be made again.",
            )
        return cls.load(path)

    @property
    def bytes_used(self) -> int:
        """Of all files in the cache."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def digest(*parts: Any) -> str:
    """Content hash of records, tensors and plain values, the same on every machine."""
    found = hashlib.sha256()
    for part in parts:
        _feed(found, part)
    return found.hexdigest()[:32]


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Record):
        _feed(found, {f.name: getattr(value, f.name) for f in fields(value)})
    elif isinstance(value, Tensor):
        array = value.detach().cpu().contiguous()
        found.update(f"{array.dtype}{tuple(array.shape)}".encode())
        found.update(array.numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value):
            found.update(f"{key}=".encode())
            _feed(found, value[key])
    elif isinstance(value, list | tuple):
        found.update(f"[{len(value)}".encode())
        for item in value:
            _feed(found, item)
    else:
        found.update(json.dumps(value).encode())
    found.update(b";")
