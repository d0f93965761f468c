"""What a file or a folder gives away before any attack: every surface, with what to do about it.

No data, no attack, and nothing in a file is ever executed. A folder is walked within limits; links in it
are left alone. What cannot be read is named beside what was found: a scan never passes over a model in
silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from residuum.errors import CheckpointError, InputError, ResiduumError, require_known
from residuum.io.release import ADAPTER_CONFIG, Release, is_release, look_into, open_release
from residuum.records import Record
from residuum.records.base import json_schema
from residuum.scanning.base_comparison import compared
from residuum.scanning.findings import CODE, KINDS, STORED, Finding, findings, printable, rank

# Models, entries and folders in each other: more is no release but somebody's whole disk.
MAX_FILES, MAX_ENTRIES, MAX_DEPTH = 1000, 100_000, 16
SCHEMA_VERSION = "1.1"
Watch = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class ScannedFile(Record):
    """One file that was read; kind: torch, torchscript, pickle, safetensors or onnx."""

    file: str
    kind: str
    bytes: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, eq=False)
class UnreadFile(Record):
    """One file that bears a model's name and was not read; exit_code: 4 where it was refused for safety."""

    file: str
    reason: str
    exit_code: int


@dataclass(frozen=True, eq=False)
class Scan(Record):
    """What was found.

    fail_on: kinds of finding that end a pipeline.
    notes: what of a folder was not looked at.
    subject: the path as it was named.
    files: what was read, with findings.
    unread: what bears a model's name and could not be, with the reason.
    """

    subject: str
    files: tuple[ScannedFile, ...]
    unread: tuple[UnreadFile, ...] = ()
    notes: tuple[str, ...] = ()
    fail_on: tuple[str, ...] = (STORED,)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of all files."""
        return tuple(one for file in self.files for one in file.findings)

    @property
    def failed(self) -> tuple[str, ...]:
        """Kinds that were found and must not be."""
        return tuple(kind for kind in self.fail_on if any(f.kind == kind for f in self.findings))

    @property
    def exit_code(self) -> int:
        """Return 4 if a file would run code or exhaust memory, else 1 for what ``fail_on`` names, else 2
        if a file could not be read, else 0.
        """
        worst = max((file.exit_code for file in self.unread), default=0)
        if worst == 4 or any(finding.kind == CODE for finding in self.findings):
            return 4
        return 1 if self.failed else worst

    def to_json(self) -> dict[str, Any]:
        """The published form."""
        return {
            "schema_version": SCHEMA_VERSION,
            "tool": {"name": "residuum", "version": version("residuum")},
            **super().to_json(),
            "failed": list(self.failed),
            "exit_code": self.exit_code,
        }


def scan(
    path: str | Path,
    *,
    base: str | Path | None = None,
    fail_on: Iterable[str] = (STORED,),
    watch: Watch | None = None,
) -> Scan:
    """Every surface of a file, or of each model in a folder.

    base: the weights that training began from, which tell rows and layers that moved.
    fail_on: kinds (``checkpoints.contents.KINDS``) that make ``exit_code`` 1.
    watch: told the number of the file, how many there are, and its name.
    """
    path, kinds = Path(path), tuple(dict.fromkeys(fail_on))
    for kind in kinds:
        require_known(kind, KINDS, "No kind of finding")
    start = None if base is None else open_release(base)
    if not path.is_dir():
        return Scan(str(path), (_scanned(path, str(path), start),), fail_on=kinds)
    every, notes = _models(path)
    files, unread = [], []
    for i, file in enumerate(every):
        name = printable(file.relative_to(path).as_posix())
        if watch is not None:
            watch(i, len(every), name)
        try:
            files.append(_scanned(file, name, start))
        except ResiduumError as problem:
            unread.append(UnreadFile(name, printable(str(problem)), problem.exit_code))
    return Scan(str(path), tuple(files), tuple(unread), tuple(notes), kinds)


def _scanned(path: Path, name: str, base: Release | None) -> ScannedFile:
    release = look_into(path)
    found = findings(release)
    if base is not None:
        found = sorted([*found, *compared(release, base)], key=rank)
    return ScannedFile(name, release.kind, path.stat().st_size, tuple(found))


def _models(folder: Path) -> tuple[list[Path], list[str]]:
    """Files that bear a model's name, in order, and what was left out."""
    found: list[Path] = []
    others, links, deep = 0, 0, 0
    for count, (entry, depth) in enumerate(_entries(folder)):
        if count >= MAX_ENTRIES or len(found) >= MAX_FILES:
            raise InputError(
                f"A folder may hold {MAX_FILES} models and {MAX_ENTRIES} entries; {str(folder)!r} "
                "holds more.",
                "Scan its parts one by one.",
            )
        if entry.is_symlink():
            links += 1
        elif entry.is_dir(follow_symlinks=False):
            deep += depth >= MAX_DEPTH
        elif entry.is_file(follow_symlinks=False) and is_release(Path(entry.name)):
            found.append(Path(entry.path))
        else:
            others += entry.name != ADAPTER_CONFIG
    if not found:
        raise CheckpointError(
            f"A folder to scan must hold a model; {str(folder)!r} has no file that bears the name of "
            f"one ({links} links are left alone).",
            "Name the file itself.",
        )
    notes = [f"{others} other files were not looked at"] if others else []
    notes += [f"{links} links were left alone: scan what they point to"] if links else []
    notes += [f"{deep} folders lie deeper than {MAX_DEPTH} and were not entered"] if deep else []
    return sorted(found), notes


def _entries(folder: Path) -> Iterator[tuple[os.DirEntry[str], int]]:
    waiting = [(str(folder), 1)]
    while waiting:
        name, depth = waiting.pop()
        try:
            with os.scandir(name) as entries:
                for entry in entries:
                    yield entry, depth
                    below = entry.is_dir(follow_symlinks=False) and not entry.is_symlink()
                    if below and depth < MAX_DEPTH:
                        waiting.append((entry.path, depth + 1))
        except OSError as problem:
            said = f"A folder must be readable; {name!r} is not ({problem.strerror})."
            raise CheckpointError(said, "Check its permissions.") from problem


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


Count = Annotated[int, Field(ge=0)]
Kind = Literal[
    "code",
    "stored",
    "optimiser-state",
    "start",
    "touched-rows",
    "adapter",
    "statistics",
    "paths",
    "classes",
]


class PublishedTool(_Model):
    """What wrote it."""

    name: Literal["residuum"]
    version: str


class PublishedFinding(_Model):
    """One surface: what, where first, in how many places, how much, why, and what to do."""

    kind: Kind
    severity: Literal["high", "medium", "low"]
    what: str
    where: str
    reason: str
    remedy: str
    places: Count
    count: Count | None
    rows: list[Count]


class PublishedFile(_Model):
    """A file that was read."""

    file: str
    kind: Literal["torch", "torchscript", "pickle", "safetensors", "onnx"]
    bytes: Count
    findings: list[PublishedFinding]


class PublishedUnread(_Model):
    """A file that was not."""

    file: str
    reason: str
    exit_code: Literal[2, 4]


class PublishedScan(_Model):
    """The whole of what ``residuum scan --json`` prints."""

    schema_version: Literal["1.1"]
    tool: PublishedTool
    subject: str
    files: list[PublishedFile]
    unread: list[PublishedUnread]
    notes: list[str]
    fail_on: list[Kind]
    failed: list[Kind]
    exit_code: Literal[0, 1, 2, 4]


def scan_schema() -> dict[str, Any]:
    """The JSON Schema of ``residuum scan --json``."""
    return json_schema(PublishedScan, "scan", SCHEMA_VERSION)
