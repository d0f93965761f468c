"""Run directories: of one kind of run, entered by their owner alone, one process at a time."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from residuum.errors import InputError, OutputError
from residuum.records.files import make_directory, unwritable, write_atomic

IGNORE, LOCK = ".gitignore", ".lock"
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")  # what tempfile names beside a file to be written


@contextmanager
def claimed(path: Path, what: str, own: Collection[str]) -> Iterator[None]:
    """``path`` for this run; a new folder goes again if nothing was kept in it.

    what: the run with its article, such as "an audit"; own: files of which a folder of such a run
    holds at least one.
    """
    fresh = not path.exists()
    make_directory(path)
    refuse_foreign(path, what, own)
    with _locked(path, what):
        with suppress(OSError):  # a folder of somebody else's: writing decides
            path.chmod(0o700)
        write_atomic(path / IGNORE, "*\n")
        try:
            yield
        finally:
            if fresh and not {entry.name for entry in path.iterdir()} - {IGNORE, LOCK}:
                shutil.rmtree(path, ignore_errors=True)


def refuse_foreign(path: Path, what: str, own: Collection[str]) -> None:
    """A folder that holds anything but ``what`` is not entered: not even a lock is left there."""
    if not path.exists():
        return
    make_directory(path)  # says why where it is a file
    content = {entry.name for entry in path.iterdir()} - {IGNORE, LOCK}
    content = {name for name in content if not _TEMPORARY.fullmatch(name)}
    if content and content.isdisjoint(own):
        raise OutputError(
            f"--out must be a new or empty folder, or one of {what}; {str(path)!r} holds other "
            "files.",
            "Choose another folder with --out.",
        )


def another(path: Path, what: str, other: str) -> InputError:
    """What to raise where a folder holds a run of the same kind that was asked for otherwise."""
    return InputError(
        f"{str(path)!r} holds {what} with other {other}.",
        "Choose another --out, or remove that folder.",
    )


def clear_temporaries(folder: Path) -> None:
    """Remove what a killed write left; only with the lock held."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if _TEMPORARY.fullmatch(entry.name) and entry.is_file() and not entry.is_symlink():
            entry.unlink()


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """The folder's lock; the system lets go of it when the process ends, however it ends."""
    try:
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise unwritable(path, problem) from problem
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(handle)
        raise OutputError(
            f"Another {what.split()[-1]} is writing to {str(path)!r}.",
            "Wait for it, or choose another folder with --out.",
        ) from problem
    try:
        yield
    finally:
        os.close(handle)
