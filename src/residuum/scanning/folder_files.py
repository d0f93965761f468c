"""Decide what each file in the folder of a model is, and read it.

=============  =====================================================================================
role           files
=============  =====================================================================================
``model``      files with the names of models; shards and their index are one item
``state``      what a Trainer saves to continue training: optimizer, random states, arguments
``vocabulary`` the files of tokenizers
``data``       tables, arrays, texts, JSON files and images
``named``      files that a scan names and does not read: audio, archives, event files, code, git
=============  =====================================================================================

Many files of one format in the same folder, such as images, are one item. All other files are skipped, and a
note names them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residuum.errors import ResiduumError
from residuum.io.data_files import find_data_kind, read_data_file, read_images
from residuum.io.folders import MAX_DEPTH, FolderListing, is_shard_index, read_shard_index
from residuum.io.inert import Block
from residuum.io.release import (
    ADAPTER_CONFIG,
    IMAGES,
    JSON,
    OTHER,
    TEXT,
    Release,
    is_release,
    read_release,
)
from residuum.io.vocabularies import (
    VOCABULARY_FILES,
    Vocabulary,
    decode_bytes,
    read_vocabulary,
)
from residuum.scanning.finding import printable

MODEL, STATE, VOCABULARY, DATA, NAMED = "model", "state", "vocabulary", "data", "named"
TRAINER_FILES = re.compile(
    r"^(optimizer|scheduler|scaler)(_\d+)?\.(pt|pth|bin|safetensors)$|^rng_state(_\d+)?\.pth$|"
    r"^random_states_\d+\.pkl$|^training_args\.(bin|pt)$"
)
VOCABULARY_NAMES = {
    *VOCABULARY_FILES,
    *("added_tokens.json", "special_tokens_map.json", "merges.txt", "bpe.codes"),
}
# Formats of models that residuum does not read. In a folder they make a scan inconclusive.
UNREAD_MODELS = (
    ".h5",
    ".hdf5",
    ".keras",
    ".gguf",
    ".msgpack",
    ".tflite",
    ".pb",
    ".mlmodel",
    ".pdparams",
)
# Formats of data that residuum does not read.
UNREAD_DATA = (
    ".arrow", ".feather", ".avro", ".orc", ".xlsx", ".xls", ".db", ".sqlite", ".sqlite3", ".mdb",
    ".tfrecord", ".tfrecords", ".wav", ".mp3", ".flac", ".ogg", ".mp4", ".avi", ".mov", ".pdf", ".docx",
    ".dcm", ".nii", ".mat", ".zip", ".tgz", ".7z", ".rar", ".zst",
)  # fmt: skip
EVENTS = "events.out.tfevents"
CODE_SUFFIX = ".py"
# Texts of libraries and licenses. They are not texts of a training set.
KNOWN_TEXTS = re.compile(
    r"^(licen[cs]e|notice|copying|changelog|contributing|authors|requirements|constraints|use_policy)\b",
    re.IGNORECASE,
)
# Files with a meaning of their own, which are never part of a group.
SINGLE_FILES = {"config.json", "trainer_state.json", "README.md"}
MAX_FILES = 1000  # largest number of files with the names of models
# If a folder has more files of one format than this, they are one item with one finding.
MAX_SINGLE_FILES = 20
MAX_GROUP_READ = 200  # largest number of files of such an item, other than images, that are read
MAX_NAMED_FILES = 10  # largest number of skipped files that a note names


@dataclass(frozen=True)
class FolderItem:
    """A file in the folder of a model, or many files of one format in the same folder, such as images.

    Attributes:
        name: Name of the file relative to the folder, or a pattern such as ``images/*.png``.
        role: What the file is: "model", "state" (of the training), "vocabulary", "data", or "named" if a
            finding only names the file.
        paths: The files.
        is_group: Whether the item stands for several files.
    """

    name: str
    role: str
    paths: tuple[Path, ...]
    is_group: bool = False

    @property
    def path(self) -> Path:
        """The file, or the first of several files."""
        return self.paths[0]


def plan_folder(listing: FolderListing) -> tuple[list[FolderItem], list[str]]:
    """Decide what each file of a folder is.

    Args:
        listing: The files of the folder.

    Returns:
        The items to scan, and notes on what is skipped.
    """
    shards = {shard for path in listing.files for shard in _shards(path)}
    groups: dict[tuple[str, str, Path], list[Path]] = defaultdict(list)
    skipped: list[Path] = []
    for path in listing.files:
        role = _find_role(path)
        if path in shards or path.name == ADAPTER_CONFIG:
            continue
        if role:
            is_groupable = role == DATA or path.suffix.lower() in UNREAD_DATA
            is_groupable = is_groupable and path.name not in SINGLE_FILES
            name_or_suffix = path.suffix.lower() if is_groupable else path.name
            groups[role, name_or_suffix, path.parent].append(path)
        else:
            skipped.append(path)
    items: list[FolderItem] = []
    for (role, ending, folder), paths in groups.items():
        is_image = find_data_kind(paths[0].name) == IMAGES
        is_large = len(paths) > (1 if is_image or role == NAMED else MAX_SINGLE_FILES)
        if is_large:
            name = _relative_name(folder / f"*{ending}", listing.path)
            items.append(FolderItem(name, role, tuple(paths), is_group=True))
        else:
            items += [FolderItem(_relative_name(p, listing.path), role, (p,)) for p in paths]
    items += [
        FolderItem(f"{_relative_name(path, listing.path)}/", NAMED, (path,))
        for path in listing.private_folders
    ]
    return sorted(items, key=lambda item: item.name), _describe_skipped(listing, skipped)


def open_item(item: FolderItem) -> Release:
    """Read one file, or many files of the same format, in a folder. Nothing in a file is executed.

    Args:
        item: The item.

    Returns:
        The release.
    """
    if item.role in (MODEL, STATE):
        return read_release(item.path)
    if item.role == VOCABULARY:
        return _open_vocabulary(item.path)
    if item.role == NAMED:
        total_size = sum(path.lstat().st_size for path in item.paths if not path.is_dir())
        return Release(item.path, OTHER, {}, total_size)
    if not item.is_group:
        return read_data_file(item.path)
    if find_data_kind(item.path.name) == IMAGES:
        return read_images(item.path.parent, item.paths)
    return _open_group(item)


def read_tokens(path: Path) -> Vocabulary:
    """Read the tokens in a file of a tokenizer, also of those that list merges or special tokens.

    Args:
        path: The file.

    Returns:
        The vocabulary. It has no tokens if the file lists none.
    """
    if path.name not in ("merges.txt", "bpe.codes"):
        return read_vocabulary(path)
    merge_lines = read_vocabulary(path).tokens
    is_byte_level = any("Ġ" in line for line in merge_lines.values())
    tokens = {
        i: _join_merge(line, is_byte_level)
        for i, line in merge_lines.items()
        if not line.startswith("#version")
    }
    return Vocabulary(path.name, tokens)


def _join_merge(line: str, is_byte_level: bool) -> str:
    """Return the piece that a line of merges.txt makes of two pieces, such as "per" from "p er"."""
    piece = "".join(line.replace("</w>", "").split(" ")[:2])
    return decode_bytes(piece).strip() if is_byte_level else piece.replace("▁", "")


def _find_role(path: Path) -> str:
    name, ending = path.name, path.suffix.lower()
    if is_shard_index(path):
        return MODEL
    if TRAINER_FILES.match(name):
        return STATE
    if name in VOCABULARY_NAMES or ending == ".spm":
        return VOCABULARY
    if name.startswith(EVENTS) or ending in (CODE_SUFFIX, *UNREAD_DATA):
        return NAMED
    if KNOWN_TEXTS.match(name):
        return ""
    if find_data_kind(name):
        return DATA
    return MODEL if is_release(path) or ending in UNREAD_MODELS else ""


def _shards(path: Path) -> list[Path]:
    """Return the weight files that an index lists, [] if the file is no valid index."""
    try:
        return [*read_shard_index(path)] if is_shard_index(path) else []
    except ResiduumError:  # the scan of the index reports the problem
        return []


def _relative_name(path: Path, folder: Path) -> str:
    return printable(path.relative_to(folder).as_posix())


def _describe_skipped(listing: FolderListing, skipped: list[Path]) -> list[str]:
    notes = []
    if skipped:
        names = [_relative_name(path, listing.path) for path in skipped[:MAX_NAMED_FILES]]
        ellipsis = ", ..." if len(skipped) > MAX_NAMED_FILES else ""
        verb_phrase = (
            "1 other file was skipped"
            if len(skipped) == 1
            else f"{len(skipped)} other files were skipped"
        )
        notes.append(f"{verb_phrase}: {', '.join(names)}{ellipsis}")
    for paths, sentence in (
        (listing.links, "links were not followed; scan their targets"),
        (listing.special_files, "pipes, sockets or devices were not opened"),
        (listing.deep_folders, f"folders deeper than {MAX_DEPTH} levels were skipped"),
    ):
        if paths:
            notes.append(f"{len(paths)} {sentence}")
    return notes


def _open_vocabulary(path: Path) -> Release:
    tokens = [*read_tokens(path).tokens.values()]
    content = {"tokens": Block((len(tokens),), "text", objects=tokens)}
    kind = JSON if path.suffix == ".json" else TEXT
    return Release(path, kind, content, path.stat().st_size)


def _open_group(item: FolderItem) -> Release:
    """Read many data files of the same format, such as images, as one set of data."""
    content: dict[str, Any] = {}
    notes: list[str] = []
    unread_count = 0
    for path in item.paths[:MAX_GROUP_READ]:
        try:
            release = read_data_file(path)
        except ResiduumError:
            unread_count += 1
            continue
        content[path.name] = release.content
        notes += [f"{path.name}: {note}" for note in release.notes]
    if unread_count:
        notes.append(f"{unread_count} files could not be read")
    if len(item.paths) > MAX_GROUP_READ:
        notes.append(f"only {MAX_GROUP_READ} of {len(item.paths)} files were read")
    total_size = sum(path.lstat().st_size for path in item.paths)
    kind = find_data_kind(item.path.name)
    return Release(
        item.path.parent, kind, content, total_size, notes=tuple(notes[:MAX_NAMED_FILES])
    )
