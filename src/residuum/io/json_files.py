"""Read JSON files within limits of size, memory and nesting."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from residuum.errors import CheckpointError, UnsafeFileError

MAX_JSON_BYTES = 64 << 20  # largest size of a JSON file; the tokenizer of Gemma has 33 MB
# Largest memory of the values of a JSON file. A hostile file of empty lists needs 30 times its size.
MAX_JSON_MEMORY = 200 << 20
# Estimated memory of a value by the character that begins it, or that separates it from the previous value.
# Short texts need about 60 bytes.
BYTES_BY_CHARACTER = {b"[": 72, b"{": 200, b",": 40, b":": 80}
SAVE_LESS = "Remove large values from the file, or delete the file from the release."


def read_json(path: Path) -> Any:
    """Read a JSON file. Links, devices and files that need too much memory are refused.

    Args:
        path: The file.

    Returns:
        The value in the file.

    Raises:
        CheckpointError: If the file is not a regular file of JSON.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(
                f"A JSON file must be a regular file; the path {path.name!r} is a folder, a link or a "
                "special file.",
                "Check the path.",
            )
        with path.open("rb") as stream:
            json_bytes = stream.read(MAX_JSON_BYTES + 1)
    except OSError as problem:
        raise CheckpointError(
            f"A JSON file must be readable; reading the file {path.name!r} failed ({problem.strerror}).",
            "Check the file.",
        ) from problem
    return parse_json(json_bytes, path.name)


def parse_json(text: bytes, name: str) -> Any:
    """Return the value of a JSON text.

    Args:
        text: The text in UTF-8.
        name: Name of the file, for messages.

    Returns:
        The value.

    Raises:
        CheckpointError: If the text is not JSON.
        UnsafeFileError: If the text or its values would need too much memory.
    """
    memory = len(text) + sum(text.count(mark) * cost for mark, cost in BYTES_BY_CHARACTER.items())
    if len(text) > MAX_JSON_BYTES or memory > MAX_JSON_MEMORY:
        raise UnsafeFileError(
            f"A JSON file may have at most {MAX_JSON_BYTES} bytes, and its values may need at most "
            f"{MAX_JSON_MEMORY} bytes of memory; the file {name!r} exceeds these limits.",
            SAVE_LESS,
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(
            f"A JSON file must hold exactly one valid JSON value; the file {name!r} does not "
            f"({type(problem).__name__}).",
            "Save the file again.",
        ) from problem
