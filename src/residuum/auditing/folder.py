"""The run directory of an audit: one process at a time, finished batches kept, half of nothing.

A folder belongs to an audit when it holds ``work/`` (one that can go on) or ``result.json`` (one
that is complete, written last). Every file is written beside its place and renamed into it, so a
kill at any moment leaves a folder that the same command takes up again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from residuum.auditing.budget import Batch
from residuum.errors import InputError, OutputError, ResiduumError
from residuum.records import Reconstruction, make_directory, write_atomic, write_json

IGNORE, LOCK, WORK, RESULT = ".gitignore", ".lock", "work", "result.json"
REQUEST, STATE, PLAN = "request.json", "state.safetensors", "plan.json"
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")  # what tempfile names beside a file to be written


class Folder:
    """An open run directory, and the store of its batches (``stages.Store``)."""

    def __init__(self, path: Path) -> None:
        self.path, self.work = path, path / WORK

    @property
    def complete(self) -> bool:
        """Whether an audit has ended here."""
        return (self.path / RESULT).is_file()

    def refuse_other_results(self) -> None:
        """Nothing that another audit left is written over."""
        if self.complete or self.work.exists():
            raise OutputError(
                f"{str(self.path)!r} holds an audit already.",
                "Choose another folder, or remove that one.",
            )

    def claim(self, request: dict[str, Any]) -> None:
        """Begin, or go on with, the audit that ``request`` describes; any other is refused."""
        wanted = json.loads(json.dumps(request))
        before = _read(self.path / RESULT).get("request") if self.complete else None
        if not self.complete and (self.work / REQUEST).is_file():
            before = _read(self.work / REQUEST)
        if before != wanted and (before is not None or self.complete):
            before = before if isinstance(before, dict) else {}
            changed = sorted(k for k in {*before, *wanted} if before.get(k) != wanted.get(k))
            raise InputError(
                f"{str(self.path)!r} holds an audit with other settings or inputs "
                f"({', '.join(changed[:4])}).",
                "Choose another --out, or remove that folder.",
            )
        if not self.complete:
            write_json(self.work / REQUEST, request)
            self.work.chmod(0o700)

    def load(self, batch: Batch) -> Reconstruction | None:
        """The finished batch; one that cannot be read is run again."""
        path = self._file(batch)
        if not path.is_file():
            return None
        try:
            return Reconstruction.load(path)
        except ResiduumError:
            path.unlink()
            return None

    def save(self, batch: Batch, found: Reconstruction) -> None:
        """Keep a finished batch; its state is of no more use."""
        found.save(self._file(batch))
        self.state().unlink(missing_ok=True)

    def state(self) -> Path:
        """Where the batch under way is kept."""
        return self.work / STATE

    def planned(self, attack: str) -> Batch | None:
        """The first batch of ``attack`` as planned before the interruption."""
        with suppress(TypeError):
            return Batch(**_read(self.work / PLAN)[attack]) if self._plans(attack) else None
        return None

    def plan(self, batch: Batch) -> None:
        """Keep the plan of an attack."""
        write_json(self.work / PLAN, {**_read(self.work / PLAN), batch.attack: vars(batch)})

    def finish(self) -> None:
        """Drop what only an unfinished audit needs."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _plans(self, attack: str) -> bool:
        return isinstance(_read(self.work / PLAN).get(attack), dict)

    def _file(self, batch: Batch) -> Path:
        name = f"{batch.attack}-{batch.seed}-{batch.restarts}x{batch.steps}.safetensors"
        return self.work / name


@contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """``path`` for this process alone, entered by its owner alone; an empty new one goes again."""
    fresh = not path.exists()
    make_directory(path)
    _refuse_foreign(path)
    with _locked(path):
        with suppress(OSError):  # a folder of somebody else's: writing decides
            path.chmod(0o700)
        _clear_temporaries(path)
        write_atomic(path / IGNORE, "*\n")
        try:
            yield Folder(path)
        finally:
            left = {entry.name for entry in path.iterdir()}
            if fresh and not left - {IGNORE, LOCK}:
                shutil.rmtree(path, ignore_errors=True)


def _refuse_foreign(path: Path) -> None:
    """A folder that holds anything but an audit is not entered: not even a lock is left there."""
    content = {entry.name for entry in path.iterdir()} - {IGNORE, LOCK}
    content = {name for name in content if not _TEMPORARY.fullmatch(name)}
    if content and not content & {WORK, RESULT}:
        raise OutputError(
            f"--out must be a new or empty folder, or one of an audit; {str(path)!r} holds other "
            "files.",
            "Choose another folder with --out.",
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The folder's lock; the system lets go of it when the process ends, however it ends."""
    try:
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise OutputError(
            f"Output must be a writable place; {str(path)!r} is not ({problem.strerror}).",
            "Choose another folder with --out.",
        ) from problem
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(handle)
        raise OutputError(
            f"Another audit is writing to {str(path)!r}.",
            "Wait for it, or choose another folder with --out.",
        ) from problem
    try:
        yield
    finally:
        os.close(handle)


def _clear_temporaries(path: Path) -> None:
    """Remove what a killed write left; only with the lock held."""
    for folder in (path, path / WORK):
        for entry in folder.iterdir() if folder.is_dir() else ():
            if _TEMPORARY.fullmatch(entry.name) and entry.is_file() and not entry.is_symlink():
                entry.unlink()


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where it is missing or damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
