"""What a file or a folder gives away before any attack: every surface, with what to do about it.

No data, no attack, and nothing in a file is ever executed. A folder is walked within limits; links in it
are left alone. What cannot be read is named beside what was found: a scan never passes over a model in
silence.

If a file holds a network that residuum can read, the scan also measures that network. A file that is not
safe to load is never read as a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from residuum.errors import CheckpointError, InputError, ResiduumError, require_known
from residuum.io.checkpoints import load_checkpoint
from residuum.io.inert import Block
from residuum.io.release import ADAPTER_CONFIG, Release, is_release, open_release, read_release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.tree import walk
from residuum.records import Record
from residuum.records.published import Count, SchemaRule, Tool, this_tool
from residuum.scanning.base_comparison import compared
from residuum.scanning.findings import CODE, KINDS, STORED, Finding, Kind, findings, printable, rank
from residuum.surfaces.inspection import Inspection, inspect_network

# Models, entries and folders in each other: more is no release but somebody's whole disk.
MAX_FILES, MAX_ENTRIES, MAX_DEPTH = 1000, 100_000, 16
# Networks are measured until their weights together have this many values. The singular values of the first
# layer take most of the time: up to 5 s for a layer of 2000 x 2000, and 40 s for one of 4000 x 4000.
MAX_MEASURED = 5_000_000
SCHEMA_VERSION = "1.2"
Watch = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class ScannedFile(Record):
    """One file that was read.

    Args:
        file: Its name.
        kind: Its format.
        bytes: Its size.
        findings: What in it can reveal training data, the gravest first.
        network: The measurements of the network in it, None if it was not measured.
        network_reason: Why the network was not measured, "" if it was.
    """

    file: str
    kind: Annotated[str, SchemaRule(enum=["torch", "torchscript", "pickle", "safetensors", "onnx"])]
    bytes: Count
    findings: tuple[Finding, ...]
    network: Inspection | None = None
    network_reason: str = ""


@dataclass(frozen=True, eq=False)
class UnreadFile(Record):
    """One file that bears a model's name and was not read; exit_code: 4 where it was refused for safety."""

    file: str
    reason: str
    exit_code: Annotated[int, SchemaRule(enum=[2, 4])]


@dataclass(frozen=True, eq=False)
class Scan(Record):
    """What was found.

    fail_on: kinds of finding that end a pipeline.
    notes: what of a folder was not looked at.
    subject: the path as it was named.
    files: what was read, with findings.
    unread: what bears a model's name and could not be, with the reason.
    """

    derived = ("failed", "exit_code", "schema_version", "tool")

    subject: str
    files: tuple[ScannedFile, ...]
    unread: tuple[UnreadFile, ...] = ()
    notes: tuple[str, ...] = ()
    fail_on: tuple[Kind, ...] = (STORED,)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of all files."""
        return tuple(one for file in self.files for one in file.findings)

    @property
    def failed(self) -> tuple[Kind, ...]:
        """Kinds that were found and must not be."""
        return tuple(kind for kind in self.fail_on if any(f.kind == kind for f in self.findings))

    @property
    def exit_code(self) -> Annotated[int, SchemaRule(enum=[0, 1, 2, 4])]:
        """Return 4 if a file would run code or exhaust memory, else 1 for what ``fail_on`` names, else 2
        if a file could not be read, else 0.
        """
        worst = max((file.exit_code for file in self.unread), default=0)
        if worst == 4 or any(finding.kind == CODE for finding in self.findings):
            return 4
        return 1 if self.failed else worst

    @property
    def schema_version(self) -> Annotated[str, SchemaRule(enum=[SCHEMA_VERSION])]:
        """The version of the JSON."""
        return SCHEMA_VERSION

    @property
    def tool(self) -> Tool:
        """The program that scanned."""
        return this_tool()


def scan(
    path: str | Path,
    *,
    base: str | Path | None = None,
    fail_on: Iterable[str] = (STORED,),
    watch: Watch | None = None,
) -> Scan:
    """List what in a release can reveal training data, and measure the network in it.

    Nothing in a file is executed.

    Args:
        path: A file, or a folder of them.
        base: The weights that training began from. They tell which rows and layers moved.
        fail_on: Kinds of finding (``scanning.findings.KINDS``) that make ``exit_code`` 1.
        watch: Called with the number of the file, how many there are, and its name.

    Returns:
        The findings of every file, and the measurements of the network if there is one.

    Raises:
        CheckpointError: If a single file cannot be read, or a folder holds no model.
        UnsafeFileError: If reading a single file would exhaust memory.
        InputError: If ``fail_on`` names an unknown kind, or a folder holds too many files.
    """
    path, kinds = Path(path), tuple(dict.fromkeys(fail_on))
    for kind in kinds:
        require_known(kind, KINDS, "No kind of finding")
    start = None if base is None else open_release(base)
    if not path.is_dir():
        return Scan(str(path), (_scanned(path, str(path), start, MAX_MEASURED),), fail_on=kinds)
    every, notes = _models(path)
    files, unread, room = [], [], MAX_MEASURED
    for i, file in enumerate(every):
        name = printable(file.relative_to(path).as_posix())
        if watch is not None:
            watch(i, len(every), name)
        try:
            files.append(_scanned(file, name, start, room))
        except ResiduumError as problem:
            unread.append(UnreadFile(name, printable(str(problem)), problem.exit_code))
            continue
        if (network := files[-1].network) is not None:
            room -= network.parameters
    return Scan(str(path), tuple(files), tuple(unread), tuple(notes), kinds)


def _scanned(path: Path, name: str, base: Release | None, room: int) -> ScannedFile:
    """Scan one file. ``room`` is the number of weights that may still be measured."""
    release = read_release(path)
    found = findings(release)
    if base is not None:
        found = sorted([*found, *compared(release, base)], key=rank)
    network, reason = _measured(release, room)
    return ScannedFile(name, release.kind, path.stat().st_size, tuple(found), network, reason)


def _measured(release: Release, room: int) -> tuple[Inspection | None, str]:
    """Return the measurements of the network in a file, or None and the reason."""
    if release.unsafe:
        return None, "the file is not safe to load, so no network is read from it"
    if (weights := _count_weights(release)) > room:
        return None, f"a scan measures {MAX_MEASURED} weights at most, and this file has {weights}"
    try:
        return inspect_network(load_checkpoint(release)), ""
    except ResiduumError as problem:
        return None, printable(problem.message)


def _count_weights(release: Release) -> int:
    """Return the number of weights in a file without reading them."""
    try:
        return sum(block.numel for block in flatten_blocks(find_weights(release)).values())
    except CheckpointError:  # no state dict: an estimator, or something else
        values = (place.value for place in walk(release.content))
        return sum(value.numel for value in values if isinstance(value, Block))


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
