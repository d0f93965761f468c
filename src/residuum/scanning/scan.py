"""Scan a file or folder for everything that can reveal training data, without an attack.

A scan needs no data and never executes anything in a file. A folder is searched within limits, and links are
not followed. The result lists files that cannot be read, so no model is skipped silently.

If a file holds a network that residuum can read, the scan also measures the weights of this network, such as
their size and singular values. A file that is not safe to load is never read as a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from residuum.errors import CheckpointError, InputError, ResiduumError, require_known
from residuum.io.checkpoints import load_checkpoint
from residuum.io.forests import read_forests
from residuum.io.inert import Block
from residuum.io.release import (
    ADAPTER_CONFIG,
    RELEASE_KINDS,
    Release,
    is_release,
    open_release,
    read_release,
)
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.tree import walk
from residuum.records import Record
from residuum.records.published import Count, SchemaRule, Tool, this_tool
from residuum.scanning.base_comparison import compare_with_base
from residuum.scanning.findings import CODE, KINDS, STORED, Finding, Kind, findings, printable, rank
from residuum.scanning.update_rules import find_updates
from residuum.surfaces.inspection import Inspection, inspect_network

# Largest number of model files, largest number of files and folders, and largest nesting depth of the folders
# that a scan searches. A folder that exceeds these limits is not a release but an entire disk.
MAX_FILES, MAX_ENTRIES, MAX_DEPTH = 1000, 100_000, 16
# Largest total number of weights of the networks that a scan measures. Most of the time is for the singular
# values of the first layer: up to 5 s for a layer of 2000 x 2000, and 40 s for a layer of 4000 x 4000.
MAX_MEASURED_WEIGHTS = 5_000_000
SCHEMA_VERSION = "1.2"
# A function that receives the number of the file, the number of all files, and the name of the file.
Watch = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class ScannedFile(Record):
    """A file that a scan has read.

    Attributes:
        file: Name of the file.
        kind: Format of the file.
        bytes: Size of the file.
        findings: What in the file can reveal training data, the most severe first.
        network: The measurements of the network in the file, None if no network was measured.
        network_reason: Why no network was measured, "" if a network was measured.
    """

    file: str
    kind: Annotated[str, SchemaRule(enum=[*RELEASE_KINDS])]
    bytes: Count
    findings: tuple[Finding, ...]
    network: Inspection | None = None
    network_reason: str = ""


@dataclass(frozen=True, eq=False)
class UnreadFile(Record):
    """A file with the name of a model that was not read.

    Attributes:
        file: Name of the file.
        reason: Why the file was not read.
        exit_code: 4 if the file is not safe to read, else 2.
    """

    file: str
    reason: str
    exit_code: Annotated[int, SchemaRule(enum=[2, 4])]


@dataclass(frozen=True, eq=False)
class Scan(Record):
    """The result of a scan.

    Attributes:
        subject: The path that was scanned.
        files: The files that were read, with their findings.
        unread: Files with the name of a model that could not be read, with the reason.
        notes: What was skipped in a folder.
        fail_on: Kinds of findings that make ``exit_code`` 1.
    """

    derived = ("failed", "exit_code", "schema_version", "tool")

    subject: str
    files: tuple[ScannedFile, ...]
    unread: tuple[UnreadFile, ...] = ()
    notes: tuple[str, ...] = ()
    fail_on: tuple[Kind, ...] = (STORED,)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all files."""
        return tuple(finding for file in self.files for finding in file.findings)

    @property
    def failed(self) -> tuple[Kind, ...]:
        """The kinds of findings in ``fail_on`` that the scan found."""
        return tuple(kind for kind in self.fail_on if any(f.kind == kind for f in self.findings))

    @property
    def exit_code(self) -> Annotated[int, SchemaRule(enum=[0, 1, 2, 4])]:
        """The exit code of the command ``residuum scan``.

        The code is 4 if loading a file would run code or exhaust memory. Otherwise it is 1 if a kind in
        ``fail_on`` was found. Otherwise it is 2 if a file could not be read, and 0 if all files were read.
        """
        largest_code = max((file.exit_code for file in self.unread), default=0)
        if largest_code == 4 or any(finding.kind == CODE for finding in self.findings):
            return 4
        return 1 if self.failed else largest_code

    @property
    def schema_version(self) -> Annotated[str, SchemaRule(enum=[SCHEMA_VERSION])]:
        """The version of the JSON schema of a scan."""
        return SCHEMA_VERSION

    @property
    def tool(self) -> Tool:
        """The program that ran the scan."""
        return this_tool()


def scan(
    path: str | Path,
    *,
    base: str | Path | None = None,
    fail_on: Iterable[str] = (STORED,),
    watch: Watch | None = None,
) -> Scan:
    """List what in a release can reveal training data, and measure the network in it.

    Nothing in a file is executed. A folder must hold a model. A file in a folder that cannot be read is
    listed in ``unread``. If ``path`` is a single file that cannot be read, a ``CheckpointError`` is raised.

    Args:
        path: A file or a folder of files.
        base: The file with the weights before training, which shows which rows and layers changed.
        fail_on: Kinds of findings (``scanning.findings.KINDS``) that make ``exit_code`` 1.
        watch: Function that is called with the number of the file, the number of all files, and the name of
            the file.

    Returns:
        The findings of every file, and the measurements of the network if there is one.
    """
    path, kinds = Path(path), tuple(dict.fromkeys(fail_on))
    for kind in kinds:
        require_known(kind, KINDS, "No kind of finding")
    base_release = None if base is None else open_release(base)
    if not path.is_dir():
        files = (_scan_file(path, str(path), base_release, MAX_MEASURED_WEIGHTS),)
        return Scan(str(path), files, fail_on=kinds)
    models, notes = _find_models(path)
    scanned, unread, weight_budget = [], [], MAX_MEASURED_WEIGHTS
    for i, file in enumerate(models):
        relative_name = printable(file.relative_to(path).as_posix())
        if watch is not None:
            watch(i, len(models), relative_name)
        try:
            scanned.append(_scan_file(file, relative_name, base_release, weight_budget))
        except ResiduumError as problem:
            unread.append(UnreadFile(relative_name, printable(str(problem)), problem.exit_code))
            continue
        if (network := scanned[-1].network) is not None:
            weight_budget -= network.parameters
    return Scan(str(path), tuple(scanned), tuple(unread), tuple(notes), kinds)


def _scan_file(path: Path, name: str, base: Release | None, weight_budget: int) -> ScannedFile:
    """Scan one file, and measure its network if the network has at most ``weight_budget`` weights."""
    release = read_release(path)
    file_findings = findings(release)
    if _count_weights(release) <= weight_budget and (updates := find_updates(release, base)):
        # Nothing can be subtracted from an update, so the update is not compared with the base.
        file_findings = sorted([*file_findings, *updates], key=rank)
    elif base is not None:
        file_findings = sorted([*file_findings, *compare_with_base(release, base)], key=rank)
    network, reason = _measure_network(release, weight_budget)
    return ScannedFile(
        name, release.kind, path.stat().st_size, tuple(file_findings), network, reason
    )


def _measure_network(release: Release, weight_budget: int) -> tuple[Inspection | None, str]:
    """Return the measurements of the network in a file, or None and the reason."""
    if release.unsafe:
        return None, "the file is not safe to load, so the scan reads no network from it"
    if (weights := _count_weights(release)) > weight_budget:
        limit_text = f"a scan measures at most {MAX_MEASURED_WEIGHTS} weights"
        return None, f"{limit_text}, and this file has {weights}"
    if _holds_trees(release):
        return None, "the file holds decision trees and no network. residuum audit tests the trees"
    try:
        return inspect_network(load_checkpoint(release)), ""
    except ResiduumError as problem:
        return None, printable(problem.message)


def _holds_trees(release: Release) -> bool:
    try:
        return bool(read_forests(release))
    except CheckpointError:
        return False


def _count_weights(release: Release) -> int:
    """Return the number of weights in a file without reading them."""
    try:
        return sum(block.numel for block in flatten_blocks(find_weights(release)).values())
    except CheckpointError:  # the file holds no state dict, so we count the values of all arrays
        values = (place.value for place in walk(release.content))
        return sum(value.numel for value in values if isinstance(value, Block))


def _find_models(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the sorted files of a folder that have names of model files, and notes on skipped entries."""
    models: list[Path] = []
    other_files, links, deep_folders = 0, 0, 0
    for count, (entry, depth) in enumerate(_walk_folder(folder)):
        if count >= MAX_ENTRIES or len(models) >= MAX_FILES:
            raise InputError(
                f"A folder may hold at most {MAX_FILES} models and {MAX_ENTRIES} entries; "
                f"{str(folder)!r} holds more.",
                "Scan the subfolders one by one.",
            )
        if entry.is_symlink():
            links += 1
        elif entry.is_dir(follow_symlinks=False):
            deep_folders += depth >= MAX_DEPTH
        elif entry.is_file(follow_symlinks=False) and is_release(Path(entry.name)):
            models.append(Path(entry.path))
        else:
            other_files += entry.name != ADAPTER_CONFIG
    if not models:
        raise CheckpointError(
            f"A folder to scan must hold a model; {str(folder)!r} has no file with the name of a model "
            f"({links} links were not followed).",
            "Pass the path of the model file itself.",
        )
    notes = [f"{other_files} other files were skipped"] if other_files else []
    notes += [f"{links} links were not followed; scan their targets"] if links else []
    notes += (
        [f"{deep_folders} folders deeper than {MAX_DEPTH} levels were skipped"]
        if deep_folders
        else []
    )
    return sorted(models), notes


def _walk_folder(folder: Path) -> Iterator[tuple[os.DirEntry[str], int]]:
    folder_stack = [(str(folder), 1)]
    while folder_stack:
        name, depth = folder_stack.pop()
        try:
            with os.scandir(name) as entries:
                for entry in entries:
                    yield entry, depth
                    is_folder = entry.is_dir(follow_symlinks=False) and not entry.is_symlink()
                    if is_folder and depth < MAX_DEPTH:
                        folder_stack.append((entry.path, depth + 1))
        except OSError as problem:
            message = f"A folder must be readable; {name!r} is not ({problem.strerror})."
            remedy = "Check whether you have the permission to read this folder."
            raise CheckpointError(message, remedy) from problem
