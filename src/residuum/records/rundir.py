"""Run directories: folders for the files of a run that can be interrupted and continued.

A run directory belongs to one kind of run, and only one process may write to it at a time. Every file is
written to a temporary file and then renamed, so no file is ever incomplete. The summary is written last and
completes the run. After an interruption, the same command continues the run. A directory with other settings
or with files of other programs is refused. :func:`environment` describes the software and the hardware of a
run.
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
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor

from residuum.errors import InputError, OutputError

IGNORE, LOCK = ".gitignore", ".lock"
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")  # names of the temporary files of write_atomic
# Packages whose versions are stored with the results of every run.
PACKAGES = ["residuum", "torch", "numpy", "scipy", "safetensors", "scikit-learn", "clarabel"]
PACKAGES += ["kornia", "optuna"]
# Optional packages, whose versions are stored with the results only if the packages are installed.
OPTIONAL = ("opacus", "ray")


class RunDir:
    """An open run directory. Every kind of run is a subclass.

    Attributes:
        what: Name of this kind of run with its article, such as "an audit".
        files: Names of files of such a run. The directory of a run that has started holds at least one of
            these files.
        summary: Name of the file that completes the run and holds its settings under the key "request".
        request_file: Name of the file that holds the settings before the run is complete.
    """

    what: ClassVar[str]
    files: ClassVar[Collection[str]]
    summary: ClassVar[str]
    request_file: ClassVar[str] = "request.json"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    @contextmanager
    def open(cls, path: str | Path) -> Iterator[Self]:
        """Create or enter a run directory, and lock the directory for this process.

        Only the owner can read the directory. A new directory is removed if it stays empty.

        Args:
            path: The directory.

        Yields:
            The run directory.
        """
        run_directory = cls(path)
        is_new = not run_directory.path.exists()
        make_directory(run_directory.path)
        refuse_foreign(run_directory.path, cls.what, run_directory.expected_files())
        with _locked(run_directory.path, cls.what):
            # If another user owns the directory, chmod fails, but writing may still work.
            with suppress(OSError):
                run_directory.path.chmod(0o700)
            write_atomic(run_directory.path / IGNORE, "*\n")
            for folder in {run_directory.path, (run_directory.path / cls.request_file).parent}:
                _clear_temporaries(folder)
            try:
                yield run_directory
            finally:
                if is_new and not {entry.name for entry in run_directory.path.iterdir()} - {
                    IGNORE,
                    LOCK,
                }:
                    shutil.rmtree(run_directory.path, ignore_errors=True)

    @property
    def is_complete(self) -> bool:
        """Whether the run is complete, so that its summary exists."""
        return (self.path / self.summary).is_file()

    @property
    def has_work(self) -> bool:
        """Whether the directory holds results that a run with other settings would destroy."""
        return True

    def expected_files(self) -> Collection[str]:
        """Return the names of files that this kind of run writes. A run that has started has at least one."""
        return self.files

    def begin(self, request: dict[str, Any]) -> None:
        """Begin a run with these settings, or continue a run with the same settings.

        If the directory holds work of a run with other settings, an ``InputError`` is raised. Settings of a
        run without any work, such as a run whose inputs were refused, are replaced.

        Args:
            request: Settings of the run.
        """
        settings, file = json.loads(json.dumps(request)), self.path / self.request_file
        earlier_settings = read_json(file) if file.is_file() else None
        if earlier_settings is None and self.is_complete:
            earlier_settings = read_json(self.path / self.summary).get("request")
        if earlier_settings == settings:
            return
        if self.is_complete or (earlier_settings is not None and self.has_work):
            earlier_settings = earlier_settings if isinstance(earlier_settings, dict) else {}
            changed_names = sorted(
                k
                for k in {*earlier_settings, *settings}
                if earlier_settings.get(k) != settings.get(k)
            )
            refuse_other_run(
                self.path, self.what, f"settings or inputs ({', '.join(changed_names[:4])})"
            )
        if not self.has_work:
            self.discard_work()
        write_json(file, settings)
        file.parent.chmod(0o700)

    def discard_work(self) -> None:
        """Remove the files of an earlier run in this directory that ended before it produced results."""


def digest(*values: Any) -> str:
    """Compute a hash of values: texts, tensors (as float64) and other plain values (as JSON)."""
    hasher = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            hasher.update(value.detach().cpu().double().contiguous().numpy().tobytes())
        else:
            text_to_hash = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            hasher.update(text_to_hash.encode())
    return hasher.hexdigest()


def refuse_other_run(path: Path, what: str, difference: str) -> NoReturn:
    """Refuse a directory that holds a run of the same kind with other settings.

    Args:
        path: The directory.
        what: Name of the kind of run with its article, such as "an audit".
        difference: Part of the run that differs, such as "settings".

    Raises:
        InputError: Always.
    """
    raise InputError(
        f"A folder can hold the results of only one run; {str(path)!r} holds {what} with other {difference}.",
        "Pass another folder with --out, or remove this folder.",
    )


def refuse_foreign(path: Path, what: str, files: Collection[str]) -> None:
    """Raise ``OutputError`` if a directory holds files but none of a run, so that nothing is overwritten.

    Args:
        path: The directory.
        what: Name of the kind of run with its article, such as "an audit".
        files: Names of files of such a run. A directory that is not empty must hold at least one of these
            files.

    Raises:
        OutputError: If the directory is not empty and holds none of ``files``.
    """
    if not path.exists():
        return
    make_directory(path)  # raises an error if the path is a file
    file_names = {entry.name for entry in path.iterdir()} - {IGNORE, LOCK}
    file_names = {name for name in file_names if not _TEMPORARY.fullmatch(name)}
    if file_names and file_names.isdisjoint(files):
        raise OutputError(
            f"The folder --out must be new or empty, or hold the results of {what}; {str(path)!r} holds "
            f"other files.",
            "Pass another folder with --out.",
        )


def write_atomic(path: str | Path, content: bytes | str) -> Path:
    """Write a file atomically: write a temporary file in the same folder, then rename the temporary file.

    A reader sees either the old content or the new content, even after a crash. The temporary file is removed
    if an error occurs.

    Args:
        path: The file.
        content: New content of the file.

    Returns:
        The path.

    Raises:
        OutputError: If the file cannot be written.
    """
    path = Path(path)
    make_directory(path.parent)
    content_bytes = content.encode() if isinstance(content, str) else content
    temporary_path = None
    try:
        handle, temporary_path = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content_bytes)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary_path, path)
    except OSError as problem:
        raise OutputError(*_explain_unwritable(path, problem)) from problem
    finally:
        if temporary_path is not None and os.path.exists(temporary_path):
            os.unlink(temporary_path)
    return path


def write_json(path: str | Path, value: Any) -> Path:
    """Write a value as indented JSON.

    Args:
        path: The file.
        value: A value of JSON types, without NaN and infinity.

    Returns:
        The path.
    """
    return write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a file, and return {} if the file is missing or damaged."""
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def make_directory(path: str | Path) -> Path:
    """Create a directory with its parents and return its path, or raise ``OutputError``."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise OutputError(*_explain_unwritable(path, problem)) from problem
    return path


def _explain_unwritable(path: Path, problem: OSError) -> tuple[str, str]:
    """Return the error message and the remedy for an output path that cannot be written."""
    reason = problem.strerror or type(problem).__name__
    message = f"The output path must be writable; {str(path)!r} is not ({reason})."
    return message, "Pass another folder with --out."


def _clear_temporaries(folder: Path) -> None:
    """Remove the temporary files that interrupted writes left in a folder. The caller must hold the lock."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if _TEMPORARY.fullmatch(entry.name) and entry.is_file() and not entry.is_symlink():
            entry.unlink()


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Lock a run directory for this process. The operating system releases the lock if the process ends."""
    try:
        lock_handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise OutputError(*_explain_unwritable(path, problem)) from problem
    try:
        fcntl.flock(lock_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(lock_handle)
        raise OutputError(
            f"Only one run can write to a folder; another {what.split()[-1]} is writing to {str(path)!r}.",
            "Wait until the other run ends, or pass another folder with --out.",
        ) from problem
    try:
        yield
    finally:
        os.close(lock_handle)


def require_device(device: str) -> None:
    """Raise ``InputError`` unless ``device`` names an available device, such as cpu or cuda:0."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InputError(
            f"The option --device must be cpu or cuda; got {device!r}.", "Pass --device cpu."
        )
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"The device must exist on this machine; the CUDA device {device!r} was not found.",
            "Pass --device cpu.",
        )


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return the versions of Python and of packages, the operating system, and the name of the device."""
    package_versions = {}
    for name in (*PACKAGES, *OPTIONAL):
        try:
            package_versions[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                package_versions[name] = "not installed"
    device_name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    return {
        "python": platform.python_version(),
        "packages": package_versions,
        "system": platform.system(),
        "device": device_name,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Let PyTorch use a single thread, so that results do not depend on the number of cores."""
    earlier_thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(earlier_thread_count)


def sha256(path: str | Path) -> str:
    """Return the SHA-256 hash of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
