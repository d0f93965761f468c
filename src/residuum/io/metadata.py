"""Write and read the metadata of a network in a safetensors file.

The metadata are plain strings that any safetensors reader can show. ``FORMAT_KEY`` marks a file that residuum
wrote. A file may come from a hostile author, so every value is checked against ``RULES`` before it is used.
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
# Limits for the metadata of a file. The metadata that residuum writes are far below these limits.
# Largest number of characters of an architecture string, and of any other text.
MAX_ARCHITECTURE, MAX_TEXT = 256, 200
# Largest number of labels or of sentences, and largest number of dimensions of a sample.
MAX_TEXTS, MAX_SIZES = 10_000, 8
# Audits print sentences from a file's metadata. This prefix shows that a sentence comes from the file.
METADATA_SAYS = "The file's metadata says (not checked): "
MAX_STATEMENTS = 10  # largest number of sentences from the metadata that an audit prints


def encode_metadata(checkpoint: Network) -> dict[str, str]:
    """Return the metadata of a safetensors file, with the key ``format`` that other libraries need."""
    metadata = {"format": "pt", FORMAT_KEY: FORMAT, "architecture": checkpoint.arch}
    metadata |= {key: json.dumps(getattr(checkpoint, key)) for key in ("input_shape", "labels")}
    sentences = [text.removeprefix(METADATA_SAYS) for text in checkpoint.assumptions]
    metadata |= {"assumptions": json.dumps(sentences)}
    metadata |= {"task": checkpoint.task}
    decode_metadata(metadata)  # raises an error if the written metadata could not be read again
    return metadata


def decode_metadata(metadata: dict[str, str]) -> Network:
    """Return what the metadata of a file say, as a network without weights.

    Args:
        metadata: The metadata of a safetensors file.

    Returns:
        The network without weights, or ``NO_METADATA`` if residuum did not write the file.

    Raises:
        CheckpointError: If a value of the metadata breaks its rule in ``RULES``.
    """
    if FORMAT_KEY not in metadata:
        return NO_METADATA
    if metadata[FORMAT_KEY] != FORMAT:
        raise CheckpointError(
            f"This version of residuum reads version {FORMAT} of its checkpoint format; the file has "
            f"version {metadata[FORMAT_KEY][:20]!r}.",
            "Upgrade residuum.",
        )
    fields: dict[str, Any] = {key: metadata.get(key, "") for key in RULES}
    for key, (max_length, is_allowed, rule) in RULES.items():
        if key not in ("architecture", "task"):
            fields[key] = _parse_list(fields[key])
        field_value = fields[key]
        if field_value is None or len(field_value) > max_length or not is_allowed(field_value):
            raise CheckpointError(
                f"In the metadata of a checkpoint, the value of {key!r} must be {rule}; got "
                f"{metadata.get(key, '')[:40]!r}.",
                "Save the checkpoint again with save_checkpoint, or save its tensors without metadata.",
            )
    fields["assumptions"] = _attribute_statements(fields["assumptions"])
    return Network({}, fields.pop("architecture"), **fields)


def _attribute_statements(sentences: tuple[str, ...]) -> tuple[str, ...]:
    """Return up to ten sentences from the metadata, each marked if another program may have written it."""
    marked_sentences = [
        text if text in (ASSUMED_RELU, ASSUMED_STRIDES) else f"{METADATA_SAYS}{text}"
        for text in sentences[:MAX_STATEMENTS]
    ]
    if (dropped := len(sentences) - MAX_STATEMENTS) > 0:
        marked_sentences.append(
            f"{METADATA_SAYS}{dropped} more sentences, which are omitted (at most "
            f"{MAX_STATEMENTS} are shown)"
        )
    return tuple(marked_sentences)


def _parse_list(text: str) -> tuple[Any, ...] | None:
    """Return the entries of a JSON list, () for an empty text, or None if the text is not a list."""
    try:
        entries = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return None
    return tuple(entries) if isinstance(entries, list) else None


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return all(type(n) is int and 0 < n < 2**31 for n in values)


def _are_texts(values: tuple[Any, ...]) -> bool:
    return all(isinstance(v, str) and len(v) <= MAX_TEXT and v.isprintable() for v in values)


NO_METADATA = Network({}, "")
TEXTS = (MAX_TEXTS, _are_texts, f"up to {MAX_TEXTS} printable texts of up to {MAX_TEXT} characters")
# For each key of the metadata: the largest length of its value, a function that checks the value, and the
# rule in words.
RULES: dict[str, tuple[int, Callable[[Any], bool], str]] = {
    "architecture": (MAX_ARCHITECTURE, bool, f"a text of 1 to {MAX_ARCHITECTURE} characters"),
    "input_shape": (MAX_SIZES, _are_sizes, f"up to {MAX_SIZES} positive whole numbers"),
    "labels": TEXTS,
    "task": (MAX_TEXT, ("", *TASKS).__contains__, f"one of {', '.join(TASKS)}, or empty"),
    "assumptions": TEXTS,
}
