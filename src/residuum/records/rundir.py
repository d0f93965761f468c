"""Run directories, and the files in them: of one kind of run, one process at a time, half of nothing.

Every file is written beside its place and renamed into it, the summary last: it completes a run. A kill
at any moment leaves a folder that the same command takes up again; a run that was asked for otherwise,
or a folder of somebody else's, is refused. With what a run was measured, :func:`environment` says.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from residuum.errors import InputError, OutputError

IGNORE, LOCK = ".gitignore", ".lock"
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")  # what tempfile names beside a file to be written
PACKAGES = ["residuum", "torch", "numpy", "scipy", "safetensors", "scikit-learn", "clarabel"]
PACKAGES += ["kornia", "optuna"]
OPTIONAL = ("opacus", "ray")  # of the extras dp and cluster: named where they are installed


class RunDir:
    """An open run directory; each kind of run is a class of its own.

    what: the run with its article, such as "an audit".
    own: files of which a folder of such a run holds at least one.
    summary: the file that completes it, with what was asked for under "request".
    asked: where that is kept before.
    """

    what: ClassVar[str]
    own: ClassVar[Collection[str]]
    summary: ClassVar[str]
    asked: ClassVar[str] = "request.json"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    @contextmanager
    def open(cls, path: str | Path) -> Iterator[Self]:
        """``path`` for this run, entered by its owner alone; a new one goes if nothing was kept."""
        run = cls(path)
        fresh = not run.path.exists()
        make_directory(run.path)
        refuse_foreign(run.path, cls.what, run.signs())
        with _locked(run.path, cls.what):
            with suppress(OSError):  # a folder of somebody else's: writing decides
                run.path.chmod(0o700)
            write_atomic(run.path / IGNORE, "*\n")
            for folder in {run.path, (run.path / cls.asked).parent}:
                _clear_temporaries(folder)
            try:
                yield run
            finally:
                if fresh and not {entry.name for entry in run.path.iterdir()} - {IGNORE, LOCK}:
                    shutil.rmtree(run.path, ignore_errors=True)

    @property
    def complete(self) -> bool:
        """Whether a run has ended here."""
        return (self.path / self.summary).is_file()

    @property
    def started(self) -> bool:
        """Whether work would be lost with another request."""
        return True

    def signs(self) -> Collection[str]:
        """Files of which one tells that the folder is of such a run."""
        return self.own

    def claim(self, request: dict[str, Any]) -> None:
        """Begin, or go on with, the run that ``request`` describes; any other is refused.

        A request that left no work, because its inputs were refused, stands in nobody's way.
        """
        wanted, asked = json.loads(json.dumps(request)), self.path / self.asked
        before = read_json(asked) if asked.is_file() else None
        if before is None and self.complete:
            before = read_json(self.path / self.summary).get("request")
        if before == wanted:
            return
        if self.complete or (before is not None and self.started):
            before = before if isinstance(before, dict) else {}
            changed = sorted(k for k in {*before, *wanted} if before.get(k) != wanted.get(k))
            raise another(self.path, self.what, f"settings or inputs ({', '.join(changed[:4])})")
        if not self.started:
            self.forget()
        write_json(asked, wanted)
        asked.parent.chmod(0o700)

    def forget(self) -> None:
        """Drop what an earlier request left that came to nothing."""


def digest(*parts: Any) -> str:
    """What tells two runs apart: a hash of text, of other plain values as JSON, of tensors as float64."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update(part.detach().cpu().double().contiguous().numpy().tobytes())
        else:
            text = part if isinstance(part, str) else json.dumps(part, sort_keys=True)
            found.update(text.encode())
    return found.hexdigest()


def another(path: Path, what: str, other: str) -> InputError:
    """What to raise where a folder holds a run of the same kind that was asked for otherwise."""
    return InputError(
        f"{str(path)!r} holds {what} with other {other}.",
        "Choose another --out, or remove that folder.",
    )


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


def write_atomic(path: str | Path, content: bytes | str) -> Path:
    """Write ``content`` to a neighbor of ``path`` and rename it into place.

    Whoever reads sees the old file or the new one, also after a crash: the neighbor is on the disk
    before it is renamed, and is removed where something failed.
    """
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
        raise _unwritable(path, problem) from problem
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
        raise _unwritable(path, problem) from problem
    return path


def _unwritable(path: Path, problem: OSError) -> OutputError:
    reason = problem.strerror or type(problem).__name__
    return OutputError(
        f"Output must be a writable place; {str(path)!r} is not ({reason}).",
        "Choose another folder with --out.",
    )


def _clear_temporaries(folder: Path) -> None:
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
        raise _unwritable(path, problem) from problem
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


def require_device(device: str) -> None:
    """Refuse a device that is not there, before any work."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InputError(f"A device is cpu or cuda; got {device!r}.", "Use --device cpu.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(f"No CUDA device was found for {device!r}.", "Use --device cpu.")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions of what computes, the processor, and the device in words."""
    found = {}
    for name in (*PACKAGES, *OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "not installed"
    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    return {
        "python": platform.python_version(),
        "packages": found,
        "system": platform.system(),
        "device": name,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """The same figures whatever the number of cores; problems this small gain nothing by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sha256(path: str | Path) -> str:
    """Hash of a file, read in pieces."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
