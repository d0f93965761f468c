"""Metadata that residuum writes next to the weights in a safetensors file, and reads from strangers' files.

The metadata are plain strings that any safetensors reader can show. ``FORMAT_KEY`` marks a file as ours. A
file may come from a hostile author, so every value is checked against ``RULES`` before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from residuum.errors import CheckpointError
from residuum.networks.kinds import ASSUMED_RELU, ASSUMED_STRIDES
from residuum.networks.network import Network
from residuum.records import TASKS

FORMAT_KEY, FORMAT = "residuum_format", "1"
# Of what a file says of itself: characters, texts and sizes that no network of ours comes near.
MAX_ARCHITECTURE, MAX_TEXT, MAX_TEXTS, MAX_SIZES = 256, 200, 10_000, 8
# Sentences out of a file's metadata end up in verdicts, so a reader must see whose sentences they are.
METADATA_SAYS = "The file's metadata says (not checked): "
MAX_STATEMENTS = 10


def encode_metadata(checkpoint: Network) -> dict[str, str]:
    """Metadata of a safetensors file; ``format`` is what other libraries look for."""
    metadata = {"format": "pt", FORMAT_KEY: FORMAT, "architecture": checkpoint.arch}
    metadata |= {key: json.dumps(getattr(checkpoint, key)) for key in ("input_shape", "labels")}
    statements = [text.removeprefix(METADATA_SAYS) for text in checkpoint.assumptions]
    metadata |= {"assumptions": json.dumps(statements)}
    metadata |= {"task": checkpoint.task}
    decode_metadata(metadata)  # never write what cannot be read back
    return metadata


def decode_metadata(metadata: dict[str, str]) -> Network:
    """What a file says of itself, without weights, or which value is not what it must be."""
    if FORMAT_KEY not in metadata:
        return NO_METADATA
    if metadata[FORMAT_KEY] != FORMAT:
        raise CheckpointError(
            f"This version reads checkpoint format {FORMAT}; got {metadata[FORMAT_KEY][:20]!r}.",
            "Upgrade residuum.",
        )
    found: dict[str, Any] = {key: metadata.get(key, "") for key in RULES}
    for key, (most, allowed, rule) in RULES.items():
        if key not in ("architecture", "task"):
            found[key] = _parse_list(found[key])
        value = found[key]
        if value is None or len(value) > most or not allowed(value):
            raise CheckpointError(
                f"The checkpoint's {key!r} must be {rule}; got {metadata.get(key, '')[:40]!r}.",
                "Save it again with save_checkpoint, or its tensors without metadata.",
            )
    found["assumptions"] = _attribute_statements(found["assumptions"])
    return Network({}, found.pop("architecture"), **found)


def _attribute_statements(statements: tuple[str, ...]) -> tuple[str, ...]:
    """Mark sentences of a file as its own, except those that residuum itself words, and keep ten."""
    texts = [
        text if text in (ASSUMED_RELU, ASSUMED_STRIDES) else f"{METADATA_SAYS}{text}"
        for text in statements[:MAX_STATEMENTS]
    ]
    if (dropped := len(statements) - MAX_STATEMENTS) > 0:
        texts.append(
            f"{METADATA_SAYS}{dropped} more sentences, which are left out (at most "
            f"{MAX_STATEMENTS} are shown)"
        )
    return tuple(texts)


def _parse_list(text: str) -> tuple[Any, ...] | None:
    """What a JSON list holds, nothing for no text; None for anything else."""
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return None
    return tuple(found) if isinstance(found, list) else None


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return all(type(n) is int and 0 < n < 2**31 for n in values)


def _are_texts(values: tuple[Any, ...]) -> bool:
    return all(isinstance(v, str) and len(v) <= MAX_TEXT and v.isprintable() for v in values)


NO_METADATA = Network({}, "")
TEXTS = (MAX_TEXTS, _are_texts, f"up to {MAX_TEXTS} printable texts of up to {MAX_TEXT} characters")
RULES: dict[str, tuple[int, Callable[[Any], bool], str]] = {  # longest, what it holds, in words
    "architecture": (MAX_ARCHITECTURE, bool, f"a text of 1 to {MAX_ARCHITECTURE} characters"),
    "input_shape": (MAX_SIZES, _are_sizes, f"up to {MAX_SIZES} positive whole numbers"),
    "labels": TEXTS,
    "task": (MAX_TEXT, ("", *TASKS).__contains__, f"one of {', '.join(TASKS)}, or empty"),
    "assumptions": TEXTS,
}
