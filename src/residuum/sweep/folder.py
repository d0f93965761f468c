"""The run directory of a sweep: one driver at a time, a file per trial, a summary written last."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from residuum.errors import InputError, OutputError, ResiduumError
from residuum.records import Reconstruction, make_directory, write_atomic, write_json

IGNORE, LOCK, REQUEST, TRIALS = ".gitignore", ".lock", "request.json", "trials"
SUMMARY, REPORT, POOLED = "sweep.json", "report.html", "reconstruction.safetensors"
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")  # what an interrupted write leaves


class Folder:
    """Files of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def claim(self, request: dict[str, Any]) -> None:
        """Begin, or go on with, the sweep that ``request`` describes; any other is refused."""
        wanted = json.loads(json.dumps(request))
        file = self.path / REQUEST
        if file.is_file():
            try:
                before = json.loads(file.read_text())
            except ValueError:
                before = None
            if before != wanted:
                raise InputError(
                    f"{str(self.path)!r} holds a sweep with other settings or on other weights.",
                    "Choose another --out, or remove that folder.",
                )
            return
        make_directory(self.path / TRIALS)
        write_json(file, wanted)

    def trial(self, number: int) -> Path:
        """Where a finished trial's candidates are."""
        return self.path / TRIALS / f"{number:06d}.safetensors"

    def state(self, number: int) -> Path:
        """Where a trial that successive halving paused goes on from."""
        return self.path / TRIALS / f"{number:06d}.state.safetensors"

    def load(self, number: int) -> Reconstruction | None:
        """A finished trial's candidates; None where there are none, or none that can be read."""
        path = self.trial(number)
        if not path.is_file():
            return None
        try:
            return Reconstruction.load(path)
        except ResiduumError:
            return None


def digest(values: Mapping[str, Any]) -> str:
    """Hash of plain values and tensors, by name: what tells two requests apart."""
    found = hashlib.sha256()
    for name in sorted(values):
        value = values[name]
        if isinstance(value, Tensor):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        else:
            text = digest(value) if isinstance(value, Mapping) else repr(value)
            found.update(f"{name} {text}".encode())
    return found.hexdigest()


@contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """``path`` for this process alone, entered by its owner alone."""
    make_directory(path)
    content = {entry.name for entry in path.iterdir()} - {IGNORE, LOCK}
    content = {name for name in content if not _TEMPORARY.fullmatch(name)}
    if content and REQUEST not in content:
        raise OutputError(
            f"--out must be a new or empty folder, or one of a sweep; {str(path)!r} holds other "
            "files.",
            "Choose another folder with --out.",
        )
    with suppress(OSError):  # a folder of somebody else's: writing decides
        path.chmod(0o700)
    write_atomic(path / IGNORE, "*\n")
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(handle)
        raise OutputError(
            f"Another sweep is writing to {str(path)!r}.",
            "Wait for it, or choose another folder with --out.",
        ) from problem
    try:
        yield Folder(path)
    finally:
        os.close(handle)
