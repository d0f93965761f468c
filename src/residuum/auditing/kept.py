"""Twins kept between audits: training and attacking one again would give the same answer.

``$RESIDUUM_CACHE`` names the folder, else ``$XDG_CACHE_HOME/residuum``, else ``~/.cache/residuum``; set
and empty it turns this off. A twin's weights hold the held-out samples it was trained on, so folder and
files are for their owner alone, and a folder that others may write to is not used. An entry is a record
(safetensors and JSON, no pickle) whose name ends in its own hash: one that was changed or cut off is
removed and made anew. The oldest go when there are too many. A cache that fails is no reason for an
audit to fail: then there is none.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from residuum.errors import ResiduumError
from residuum.records import Record
from residuum.records.rundir import sha256

VARIABLE = "RESIDUUM_CACHE"
MOST_FILES, MOST_BYTES = 64, 256 << 20
HASHED = 32  # characters of an entry's hash in its name
Kept = TypeVar("Kept", bound=Record)


def folder() -> Path | None:
    """Where twins are kept, made if need be; None where they are not."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        place = Path(named or Path(home) / "residuum") / "twins"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = place.stat()
        mine = found.st_uid == os.getuid()
        if mine and found.st_mode & 0o077:
            place.chmod(0o700)
    except (OSError, RuntimeError):  # no home
        return None
    return place if mine else None


def recall(kind: type[Kept], key: str) -> Kept | None:
    """The entry under ``key``; None where there is none that is whole."""
    place = folder()
    for path in sorted(place.glob(f"{key}-*.safetensors")) if place is not None else ():
        with suppress(OSError):
            if path.is_symlink():
                continue
            found = kind.load_or_none(path) if path.stem == _name(key, path) else None
            if found is not None:
                os.utime(path)  # the last to go
                return found
            path.unlink()
    return None


def keep(key: str, record: Record) -> None:
    """Put an entry there under ``key``; what is too large is not kept."""
    place = folder()
    if place is None:
        return
    pending = place / f".{key}.{os.getpid()}"
    with suppress(OSError, ResiduumError):
        try:
            record.save(pending)
            if pending.stat().st_size <= MOST_BYTES // 4:
                os.replace(pending, place / f"{_name(key, pending)}.safetensors")
        finally:
            pending.unlink(missing_ok=True)
        _trim(place)


def _name(key: str, path: Path) -> str:
    return f"{key}-{sha256(path)[:HASHED]}"


def _trim(place: Path) -> None:
    """The oldest go until what is left is within both bounds."""
    there = sorted(place.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    sizes = [path.stat().st_size for path in there]
    while len(sizes) > MOST_FILES or sum(sizes) > MOST_BYTES:
        there.pop(0).unlink(missing_ok=True)
        sizes.pop(0)
