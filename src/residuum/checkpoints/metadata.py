"""What residuum writes beside the weights: plain strings that any safetensors reader can show.

``residuum_format`` marks a file as ours. Files come from strangers: every value is checked again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from residuum.errors import CheckpointError
from residuum.records import Checkpoint

FORMAT_KEY = "residuum_format"
FORMAT = "1"
TASKS = ("", "binary", "multiclass", "regression")
MAX_ARCHITECTURE = 256
MAX_TEXT = 200
MAX_TEXTS = 10_000
MAX_DIMENSIONS = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Metadata:
    """The fields of a checkpoint that are not weights; all empty for a file that is not ours."""

    architecture: str = ""
    input_shape: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    task: str = ""
    assumptions: tuple[str, ...] = ()


def encode_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """Metadata of a safetensors file; ``format`` is what other libraries look for."""
    metadata = {
        "format": "pt",
        FORMAT_KEY: FORMAT,
        "architecture": checkpoint.arch,
        "input_shape": json.dumps(list(checkpoint.input_shape)),
        "labels": json.dumps(list(checkpoint.labels)),
        "task": checkpoint.task,
        "assumptions": json.dumps(list(checkpoint.assumptions)),
    }
    decode_metadata(metadata)  # never write what cannot be read back
    return metadata


def decode_metadata(metadata: dict[str, str]) -> Metadata:
    """Read back what :func:`encode_metadata` wrote, or say which value is not what it must be."""
    if FORMAT_KEY not in metadata:
        return Metadata()
    if metadata[FORMAT_KEY] != FORMAT:
        raise CheckpointError(
            f"This version reads checkpoint format {FORMAT}; got {metadata[FORMAT_KEY][:20]!r}.",
            "Upgrade residuum.",
        )
    return Metadata(
        _field(metadata, "architecture", _architecture),
        _field(metadata, "input_shape", _sizes),
        _field(metadata, "labels", _texts),
        _field(metadata, "task", _task),
        _field(metadata, "assumptions", _texts),
    )


def _field(metadata: dict[str, str], key: str, read: Callable[[str], T]) -> T:
    try:
        return read(metadata.get(key, ""))
    except ValueError as problem:
        raise CheckpointError(
            f"The checkpoint's {key!r} must be {problem}; got {metadata.get(key, '')[:40]!r}.",
            "Save it again with save_checkpoint, or its tensors without metadata.",
        ) from problem


def _architecture(text: str) -> str:
    if not text or len(text) > MAX_ARCHITECTURE:
        raise ValueError(f"a text of 1 to {MAX_ARCHITECTURE} characters")
    return text


def _task(text: str) -> str:
    if text not in TASKS:
        raise ValueError(f"one of {', '.join(TASKS[1:])}, or empty")
    return text


def _sizes(text: str) -> tuple[int, ...]:
    found = _json_list(text)
    if len(found) > MAX_DIMENSIONS or not all(type(n) is int and 0 < n < 2**31 for n in found):
        raise ValueError(f"at most {MAX_DIMENSIONS} positive whole numbers")
    return tuple(found)


def _texts(text: str) -> tuple[str, ...]:
    found = _json_list(text)
    if len(found) > MAX_TEXTS or not all(map(_is_text, found)):
        raise ValueError(f"at most {MAX_TEXTS} printable texts of at most {MAX_TEXT} characters")
    return tuple(found)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()


def _json_list(text: str) -> list[Any]:
    try:
        found = json.loads(text) if text else []
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise ValueError("a JSON list")
    return found
