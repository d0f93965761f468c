"""Writing files so that a reader never meets half of one, and reading them back."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from residuum.errors import OutputError


def write_atomic(path: str | Path, content: bytes | str) -> Path:
    """Write ``content`` to a neighbour of ``path`` and rename it into place."""
    path = Path(path)
    make_directory(path.parent)
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        raise unwritable(path, problem) from problem
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
    return path


def write_json(path: str | Path, value: Any) -> Path:
    """Write ``value`` as indented JSON; NaN and infinity are refused, since JSON has neither."""
    return write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object; empty where it is missing or damaged."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def make_directory(path: str | Path) -> Path:
    """Create ``path`` with its parents, or say why it cannot be."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise unwritable(path, problem) from problem
    return path


def unwritable(path: Path, problem: OSError) -> OutputError:
    """What to raise where the system refuses to write."""
    reason = problem.strerror or type(problem).__name__
    return OutputError(
        f"Output must be a writable place; {str(path)!r} is not ({reason}).",
        "Choose another folder with --out.",
    )
