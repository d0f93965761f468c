"""Scan a file or folder for everything that can reveal training data, without an attack.

A scan needs no data and never executes anything in a file. A folder is searched within limits, and links are
not followed. All files of a folder are examined: models, and also data, tokenizers and files of a Trainer.
The result lists models that cannot be read and names the files that are skipped.

If a file holds a network that residuum can read, the scan also measures the weights of this network, such as
their size and singular values. A file that is not safe to load is never read as a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from residuum.errors import (
    CheckpointError,
    InconclusiveError,
    InputError,
    ResiduumError,
    UnsafeFileError,
)
from residuum.io.checkpoints import load_checkpoint
from residuum.io.folders import list_folder
from residuum.io.forests import read_forests
from residuum.io.inert import Block
from residuum.io.release import IMAGES, OTHER, RELEASE_KINDS, Release, open_release, read_release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.tree import walk
from residuum.io.vocabularies import Vocabulary, find_vocabulary
from residuum.records import Record
from residuum.records.published import Count, SchemaRule, Tool, this_tool
from residuum.scanning import showing
from residuum.scanning.base_comparison import compare_with_base
from residuum.scanning.content import ContentSearch, Queries, read_queries, search_content
from residuum.scanning.fail_on import HIGH, check_limits, select_failing
from residuum.scanning.findings import (
    CODE,
    KINDS,
    SEVERITIES,
    Finding,
    Kind,
    findings,
    printable,
    rank,
)
from residuum.scanning.folder_files import (
    DATA,
    MAX_FILES,
    MODEL,
    VOCABULARY,
    FolderItem,
    open_item,
    plan_folder,
)
from residuum.scanning.folder_rules import BaseFolder, examine_file, examine_unread_data
from residuum.scanning.showing import TOO_LARGE
from residuum.scanning.update_rules import find_updates
from residuum.surfaces.inspection import Inspection, inspect_network

# Largest total number of weights of the networks that a scan measures. Most of the time is for the singular
# values of the first layer: up to 5 s for a layer of 2000 x 2000, and 40 s for a layer of 4000 x 4000.
MAX_MEASURED_WEIGHTS = 5_000_000
SCHEMA_VERSION = "2.0"
# A function that receives the number of the file, the number of all files, and the name of the file.
Watch = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Searched(Record):
    """Counts of a search for the user's samples and texts in a file: what was searched, and what was found.

    Attributes:
        samples: Number of samples of the user.
        found_samples: Number of samples of the user that are stored in the file.
        holdout: Number of held-out samples, for comparison.
        shuffled: Number of shuffled samples, for comparison.
        texts: Number of texts of the user.
        found_texts: Number of texts of the user that are stored in the file.
        arrays: Number of arrays, tables and lists of numbers in the file.
        strings: Number of strings in the file.
        notes: What was not searched.
    """

    samples: Count
    found_samples: Count
    holdout: Count
    shuffled: Count
    texts: Count
    found_texts: Count
    arrays: Count
    strings: Count
    notes: tuple[str, ...] = ()

    @classmethod
    def from_search(cls, search: ContentSearch) -> Searched:
        """Return the counts of a search for samples and texts: what was searched, and what was found."""
        queries = search.queries
        found_texts = {i for place in search.texts for i in (*place.long, *place.short)}
        return cls(
            samples=0 if queries.samples is None else len(queries.samples),
            found_samples=len(search.samples),
            holdout=0 if queries.holdout is None else len(queries.holdout),
            shuffled=search.shuffled_count,
            texts=len(queries.texts),
            found_texts=len(found_texts),
            arrays=search.array_count,
            strings=search.string_count,
            notes=search.notes,
        )


@dataclass(frozen=True, eq=False)
class ScannedFile(Record):
    """A file that a scan has read, or many files of one format in the same folder.

    Attributes:
        file: Name of the file, or a pattern such as ``images/*.png``.
        kind: Format of the file.
        bytes: Size of the file.
        findings: What in the file can reveal training data, the most severe first.
        network: The measurements of the network in the file, None if no network was measured.
        network_reason: Why no network was measured, "" if a network was measured or if the file is no model.
        searched: Counts of the search for samples and texts of the user, None without them.
    """

    file: str
    kind: Annotated[str, SchemaRule(enum=[*RELEASE_KINDS])]
    bytes: Count
    findings: tuple[Finding, ...]
    network: Inspection | None = None
    network_reason: str = ""
    searched: Searched | None = None


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
    """The result of a scan: what in a file or folder can reveal training data.

    Attributes:
        subject: The path that was scanned.
        files: The files that were read, with their findings.
        unread: Files with the name of a model that could not be read, with the reason.
        notes: What was skipped in a folder.
        fail_on: A severity, or kinds of findings, that make ``exit_code`` 1. Empty if no finding does.
    """

    derived = ("failed", "exit_code", "schema_version", "tool")

    subject: str
    files: tuple[ScannedFile, ...]
    unread: tuple[UnreadFile, ...] = ()
    notes: tuple[str, ...] = ()
    fail_on: tuple[Annotated[str, SchemaRule(enum=[*SEVERITIES, *KINDS])], ...] = (HIGH,)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all files."""
        return tuple(finding for file in self.files for finding in file.findings)

    @property
    def failed(self) -> tuple[Kind, ...]:
        """The kinds of the findings because of which the command exits with code 1 (``--fail-on``)."""
        failing_kinds = {finding.kind for finding in select_failing(self.findings, self.fail_on)}
        return tuple(kind for kind in KINDS if kind in failing_kinds)

    @property
    def exit_code(self) -> Annotated[int, SchemaRule(enum=[0, 1, 3, 4])]:
        """The exit code of the command ``residuum scan``, which is the worst of its files.

        The code is 4 if loading a file would run code or exhaust memory. Otherwise it is 1 if the scan found
        what ``fail_on`` names. Otherwise it is 3 if a model could not be read, and 0 if all models were read.
        """
        is_unsafe = any(file.exit_code == UnsafeFileError.exit_code for file in self.unread)
        if is_unsafe or any(finding.kind == CODE for finding in self.findings):
            return UnsafeFileError.exit_code
        if self.failed:
            return 1
        return InconclusiveError.exit_code if self.unread else 0

    @property
    def schema_version(self) -> Annotated[str, SchemaRule(enum=[SCHEMA_VERSION])]:
        """The version of the JSON schema of a scan."""
        return SCHEMA_VERSION

    @property
    def tool(self) -> Tool:
        """The program that ran the scan."""
        return this_tool()

    def show(self) -> None:
        """Print the findings, as the command ``residuum scan`` does."""
        showing.show(self)

    def _repr_html_(self) -> str:
        return showing.render(self)


def scan(
    path: str | Path,
    *,
    base: str | Path | None = None,
    data: Any = None,
    holdout: Any = None,
    fail_on: str | Iterable[str] = HIGH,
    watch: Watch | None = None,
) -> Scan:
    """List what in a model file can reveal training data, and measure the network in it.

    Nothing in a file is executed. A model in a folder that cannot be read is listed in ``unread``. If
    ``path`` is a single file that cannot be read, a ``CheckpointError`` is raised.

    Args:
        path: A file or a folder of files.
        base: The file or folder with the weights before training, which shows which rows and layers changed.
            Its tokenizer shows which tokens were added.
        data: Samples or texts that are searched in every array and string: a file, a folder, a DataFrame, a
            list of texts, or other samples, see ``rs.audit``.
        holdout: Samples or texts that the model never saw, to which the matches are compared.
        fail_on: What makes ``exit_code`` 1: findings of at least a severity ("high", "medium" or "low"),
            or kinds of findings (``scanning.findings.KINDS``), separated by commas or as a list. "none" for
            no finding.
        watch: Function that is called with the number of the file, the number of all files, and the name of
            the file.

    Returns:
        The findings of every file, and the measurements of the network if there is one.
    """
    path, limits = Path(path), check_limits(fail_on)
    known_base = None if base is None else _Base.read(base)
    queries = None if data is None else read_queries(data, holdout)
    if path.is_dir():
        return _scan_folder(path, known_base, queries, limits, watch)
    release = read_release(path)
    scanned_file = _describe_model(release, str(path), MAX_MEASURED_WEIGHTS)
    changes = _find_updates(release, known_base)
    if not changes and known_base is not None:
        changes = known_base.compare(release, path)
    scanned_file = _add_findings(scanned_file, changes)
    return Scan(str(path), (_search_file(scanned_file, release, queries),), fail_on=limits)


def _search_file(file: ScannedFile, release: Release, queries: Queries | None) -> ScannedFile:
    """Return the scanned file, with the user's samples and texts that are stored in it."""
    if queries is None:
        return file
    search = search_content(release, queries)
    search_findings = search.findings()
    if release.kind == IMAGES and len(search_findings) > 1:
        search_findings = [_merge_images(search_findings, search)]
    file_findings = tuple(sorted([*search_findings, *file.findings], key=rank))
    return file.replace(findings=file_findings, searched=Searched.from_search(search))


def _merge_images(search_findings: list[Finding], search: ContentSearch) -> Finding:
    """Return one finding for many image files that are samples of the user."""
    assert search.queries.samples is not None
    count = len(search.samples)
    return search_findings[0].replace(
        what=f"{count} of {len(search.queries.samples)} given samples",
        remedy="Delete these images from the release.",
        places=len(search_findings),
        count=count,
        rows=tuple(sorted({row for finding in search_findings for row in finding.rows})),
    )


def _find_updates(release: Release, base: _Base | None) -> list[Finding]:
    """Return a finding if a file holds a gradient or a weight difference in place of weights."""
    if release.unsafe or _count_weights(release) > MAX_MEASURED_WEIGHTS:
        return []
    return find_updates(release, None if base is None else base.release)


def _add_findings(file: ScannedFile, new_findings: list[Finding]) -> ScannedFile:
    return file.replace(findings=tuple(sorted([*file.findings, *new_findings], key=rank)))


@dataclass(frozen=True, eq=False)
class _Base:
    """The base of a scanned model: the weights before training, and their tokenizer.

    Attributes:
        release: The weights before training.
        files: The tokens of its tokenizer.
        vocabulary: The same tokens by row of the embedding, None if the base has no tokenizer.
    """

    release: Release
    files: BaseFolder
    vocabulary: Vocabulary | None

    @classmethod
    def read(cls, path: str | Path) -> _Base:
        """Read the weights and the tokenizer of a base from a file or a folder."""
        return cls(open_release(path), BaseFolder.read(path), find_vocabulary(path))

    def compare(self, release: Release, path: Path) -> list[Finding]:
        """Return what a model file and its base (the weights before training) reveal together."""
        vocabulary = find_vocabulary(path.parent) or self.vocabulary
        return compare_with_base(release, self.release, vocabulary)


def _scan_folder(
    folder: Path,
    base: _Base | None,
    queries: Queries | None,
    limits: tuple[str, ...],
    watch: Watch | None,
) -> Scan:
    listing = list_folder(folder)
    items, notes = plan_folder(listing)
    if sum(item.role == MODEL for item in items) > MAX_FILES:
        raise InputError(
            f"A folder to scan may contain at most {MAX_FILES} model files; the folder {str(folder)!r} "
            "contains more.",
            "Scan the subfolders separately.",
        )
    if not items:
        raise CheckpointError(
            f"A folder to scan must contain a model or data; no file in the folder {str(folder)!r} has a "
            f"format that residuum reads (the folder has {len(listing.files)} other files, and "
            f"{len(listing.links)} links, which are not followed).",
            "Pass the path of the model file itself.",
        )
    scanned: list[ScannedFile] = []
    unread: list[UnreadFile] = []
    comparison = _FolderComparison(base)
    weight_budget = MAX_MEASURED_WEIGHTS
    for i, item in enumerate(items):
        if watch is not None:
            watch(i, len(items), item.name)
        try:
            release = open_item(item)
            if item.role == MODEL:
                scanned_file = _describe_model(release, item.name, weight_budget)
                scanned_file = comparison.add_changes(scanned_file, release, item)
            else:
                base_folder = BaseFolder() if base is None else base.files
                file_findings = examine_file(item, release, base_folder)
                scanned_file = ScannedFile(
                    item.name, release.kind, release.size, tuple(file_findings)
                )
            scanned_file = _search_file(scanned_file, release, queries)
        except ResiduumError as problem:
            is_damaged = item.role in (DATA, VOCABULARY) and isinstance(problem, InputError)
            if is_damaged:
                finding = examine_unread_data(item, problem)
                size = item.path.lstat().st_size
                scanned.append(ScannedFile(item.name, OTHER, size, (finding,)))
            else:
                unread.append(UnreadFile(item.name, printable(str(problem)), problem.exit_code))
            continue
        scanned.append(scanned_file)
        if scanned_file.network is not None:
            weight_budget -= scanned_file.network.parameters
    comparison.check()
    return Scan(str(folder), tuple(scanned), tuple(unread), tuple(notes), limits)


class _FolderComparison:
    """Compares the models of a folder with a base (weights before training). At least one model must fit."""

    def __init__(self, base: _Base | None) -> None:
        self._base = base
        self._has_match = False
        self._problem: CheckpointError | None = None

    def add_changes(self, file: ScannedFile, release: Release, item: FolderItem) -> ScannedFile:
        """Return the scanned file, with findings about what training changed relative to the base weights."""
        # An update (a gradient or weight difference) is not compared with the base, as it holds no weights.
        if updates := _find_updates(release, self._base):
            return _add_findings(file, updates)
        if self._base is None or release.unsafe:
            return file
        try:
            changes = self._base.compare(release, item.path)
        except CheckpointError as problem:
            self._problem = problem
            return file
        self._has_match = True
        return _add_findings(file, changes)

    def check(self) -> None:
        """Raise an error if no model of the folder fits the base (the weights before training)."""
        if self._problem is not None and not self._has_match:
            raise self._problem


def _describe_model(release: Release, name: str, weight_budget: int) -> ScannedFile:
    """Return the findings of a model, and measure its network if it has at most ``weight_budget`` weights."""
    network, reason = _measure_network(release, weight_budget)
    weight_count = release.size
    return ScannedFile(name, release.kind, weight_count, tuple(findings(release)), network, reason)


def _measure_network(release: Release, weight_budget: int) -> tuple[Inspection | None, str]:
    """Return the measurements of the network in a file, or None and the reason."""
    if release.unsafe:
        return None, "the file is not safe to load, so the scan reads no network from it"
    if (weights := _count_weights(release)) > weight_budget:
        limit_text = f"{TOO_LARGE} {MAX_MEASURED_WEIGHTS} weights"
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
