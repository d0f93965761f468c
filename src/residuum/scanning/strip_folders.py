"""Strip the folder of a model: write a new folder that holds only what users of the model need.

=============================================  ============================================================
file                                           in the new folder
=============================================  ============================================================
weights                                        their state dict, bit for bit
shards of weights                              the same
configuration, tokenizer, README, license      copied. Configurations lose paths of local folders
optimizer, trainer state, logs, data, images   left out
any other file                                 left out, unless the user keeps it by name
=============================================  ============================================================

The new folder is written under a temporary name and renamed when it is complete. Links are not followed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from residuum.errors import CheckpointError, InputError, OutputError, ResiduumError
from residuum.io.folders import (
    INDEX_SUFFIX,
    FolderListing,
    is_shard_index,
    list_folder,
    read_shard_index,
)
from residuum.io.json_files import read_json
from residuum.io.release import is_release, read_release
from residuum.io.release_weights import find_weights
from residuum.records import write_atomic
from residuum.scanning.finding import Finding, printable, rank
from residuum.scanning.path_rules import PATH
from residuum.scanning.scan import Scan, scan
from residuum.scanning.strip_weights import KEPT_METADATA, strip_weights
from residuum.scanning.stripped import Stripped, removed_findings

MAX_WEIGHTS = (
    16 << 30
)  # largest size of a file of weights in bytes, because its tensors are in memory twice
# Names of files that a model needs, or that describe the model. Names of folders are not compared.
NEEDED = (
    "config.json", "generation_config.json", "adapter_config.json", "preprocessor_config.json",
    "processor_config.json", "image_processor_config.json", "feature_extractor_config.json",
    "video_preprocessor_config.json", "scheduler_config.json", "model_index.json", "modules.json",
    "config_sentence_transformers.json", "sentence_*_config.json", "tokenizer_config.json", "tokenizer.json",
    "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "spiece.model", "sentencepiece.bpe.model", "*.tiktoken", "chat_template.*",
    "normalizer.json", "README*", "MODEL_CARD*", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*",
    ".gitattributes", ".gitignore",
)  # fmt: skip
# Files that training leaves in a folder, each with the reason to leave the file out. The first match counts.
LEFT_OUT = {
    "optimizer*": "optimizer state",
    "scheduler.*": "the state of the learning rate schedule",
    "scaler.*": "the state of mixed-precision training",
    "rng_state*": "states of random generators",
    "random_states*": "states of random generators",
    "training_args.*": "settings of the training, with seeds and paths",
    "trainer_state.json": "the loss at every step of the training",
    "*_results.json": "metrics of the training",
    "events.out.tfevents*": "logs of the training",
    "*.log": "logs of the training",
}
DATA_SUFFIXES = (
    "csv", "tsv", "jsonl", "ndjson", "parquet", "arrow", "feather", "npy", "npz", "h5", "hdf5", "tfrecord",
    "xls", "xlsx", "sqlite", "db", "txt", "zip", "tar", "gz",
)  # fmt: skip
IMAGE_SUFFIXES = (
    "png", "jpg", "jpeg", "gif", "bmp", "tif", "tiff", "webp", "dcm", "wav", "mp3", "flac", "mp4",
)  # fmt: skip
CHECKPOINT_FOLDER = re.compile(r"(checkpoint|global_step|epoch)[-_]?\d+$")
# Names of configuration entries that can hold the path of a folder or a file.
PATH_KEYS = re.compile(r"path|file|dir|dataset|data$|checkpoint|model$", re.IGNORECASE)
LOCAL_PATH = re.compile(
    r"^(~|/|\.{1,2}/|[A-Za-z]:[\\/]|\\\\|s3://|gs://|hdfs://|abfss?://|file://)|"
    r"/.*/|\\|(^|/)checkpoint-\d+/?$",
)
MAX_DEPTH = 20  # largest nesting depth of a configuration that is searched for paths


@dataclass
class _NewFolder:
    """The stripped copy of a folder while it is written, and what happened to each file."""

    source: Path
    path: Path
    copied: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tensors: int = 0

    def target(self, name: str) -> Path:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def copy(self, name: str) -> None:
        shutil.copyfile(self.source / name, self.target(name))
        self.copied.append(printable(name))

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out.append(printable(f"{name}: {reason}"))


def strip_folder(folder: Path, out: Path, *, keep: Iterable[str] = ()) -> Stripped:
    """Write a copy of the folder of a model without training state, data and local paths.

    Args:
        folder: The folder.
        out: The new folder.
        keep: Names of files, or paths in the folder, that are copied unchanged.

    Returns:
        What was copied, changed and left out, and the findings that remain.

    Raises:
        InputError: If the folder holds no weights.
        OutputError: If ``out`` is inside the folder.
    """
    if out.resolve().is_relative_to(folder.resolve()):
        raise OutputError(
            f"The new folder must be outside of the original folder; the path {str(out)!r} is inside of "
            "the original folder.",
            "Choose another --out.",
        )
    listing = list_folder(folder)
    new_folder = _NewFolder(folder, out.with_name(f".{out.name}.unchecked"))
    relative_names = [file.relative_to(folder).as_posix() for file in listing.files]
    names_to_keep = _find_names_to_keep(relative_names, keep)
    shards = _find_shards(listing)
    try:
        new_folder.path.mkdir(parents=True)
    except OSError as problem:
        raise OutputError(
            f"strip must be able to write the new folder; writing {str(out)!r} failed ({problem.strerror}).",
            "Choose another --out.",
        ) from problem
    try:
        for name in relative_names:
            if name in names_to_keep:
                new_folder.copy(name)
            else:
                _strip_file(new_folder, name, is_shard=folder / name in shards)
        _leave_out_entries(new_folder, listing)
        if not new_folder.tensors:
            raise InputError(
                f"A folder to strip must contain weights that strip can copy; the folder {str(folder)!r} "
                f"contains none ({'; '.join(new_folder.left_out[:3])}).",
                "Pass the folder with the weights, such as model.safetensors.",
            )
        new_scan = scan(new_folder.path)
        new_size = sum(file.stat().st_size for file in new_folder.path.rglob("*") if file.is_file())
        new_folder.path.rename(out)
    finally:
        shutil.rmtree(new_folder.path, ignore_errors=True)
    remaining = _findings_with_files(new_scan)
    return Stripped(
        file=str(folder),
        out=str(out),
        tensors=new_folder.tensors,
        bytes=new_size,
        dropped=removed_findings(_findings_with_files(_scan_or_empty(folder)), remaining),
        remaining=tuple(remaining),
        copied=tuple(new_folder.copied),
        changed=tuple(new_folder.changed),
        left_out=tuple(new_folder.left_out),
    )


def _find_names_to_keep(names: list[str], keep: Iterable[str]) -> set[str]:
    """Return the paths in the folder that the user keeps by path or by file name."""
    names_to_keep: set[str] = set()
    for text in keep:
        matching_names = {name for name in names if text in (name, Path(name).name)}
        if not matching_names:
            raise InputError(
                f"A file that you keep must be in the folder; the folder has no file {text!r}.",
                "Pass the name of a file from the list of omitted files that strip prints.",
            )
        names_to_keep |= matching_names
    return names_to_keep


def _find_shards(listing: FolderListing) -> set[Path]:
    return {
        shard for file in listing.files if is_shard_index(file) for shard in read_shard_index(file)
    }


def _strip_file(new_folder: _NewFolder, name: str, *, is_shard: bool) -> None:
    """Copy a file to the new folder, strip the file, or leave the file out, depending on its kind."""
    path = Path(name)
    suffix = path.suffix.lower().lstrip(".")
    if any(CHECKPOINT_FOLDER.match(parent.name) for parent in path.parents):
        new_folder.leave_out(name, "part of another checkpoint. Strip its folder alone")
    elif is_shard and suffix == "safetensors":
        _copy_shard(new_folder, name)
    elif reason := next((r for pattern, r in LEFT_OUT.items() if fnmatch(path.name, pattern)), ""):
        new_folder.leave_out(name, reason)
    elif any(fnmatch(path.name, pattern) for pattern in NEEDED) or name.endswith(INDEX_SUFFIX):
        _copy_description(new_folder, name)
    elif suffix in DATA_SUFFIXES:
        new_folder.leave_out(name, "a file of data")
    elif suffix in IMAGE_SUFFIXES:
        new_folder.leave_out(name, "an image or a recording")
    elif suffix == "ipynb":
        new_folder.leave_out(name, "a notebook, which can show data")
    elif is_release(path):
        _strip_weights(new_folder, name)
    else:
        new_folder.leave_out(name, "not known as a file of a model. To copy it, add --keep")


def _copy_shard(new_folder: _NewFolder, name: str) -> None:
    """Copy a weight file of a model in several files, without metadata other than the format."""
    release = read_release(new_folder.source / name, MAX_WEIGHTS)
    if {*release.metadata} <= {*KEPT_METADATA}:
        new_folder.copy(name)
        new_folder.tensors += len(release.content)
    else:
        _strip_weights(new_folder, name)


def _strip_weights(new_folder: _NewFolder, name: str) -> None:
    try:
        release = read_release(new_folder.source / name, MAX_WEIGHTS)
        if release.kind not in ("torch", "safetensors"):
            command = "residuum strip shows how to strip it"
            new_folder.leave_out(name, f"a file of the kind {release.kind}. {command}")
            return
        stripped = strip_weights(release, new_folder.target(name))
    except CheckpointError as problem:
        new_folder.leave_out(name, problem.message)
        return
    new_folder.tensors += stripped.tensors
    reasons = [finding.what for finding in stripped.dropped]
    if not reasons and find_weights(release).keys() != release.content.keys():
        reasons = ["values other than the weights"]
    if reasons:
        new_folder.changed.append(printable(f"{name}: without {', '.join(reasons)}"))
    else:
        new_folder.copied.append(printable(name))


def _copy_description(new_folder: _NewFolder, name: str) -> None:
    """Copy a file that describes the model, such as config.json or README.md, without local paths."""
    file_name = Path(name).name
    is_configuration = file_name.endswith(".json") and (
        "config" in file_name or file_name == "model_index.json"
    )
    if not is_configuration:
        new_folder.copy(name)
        return
    try:
        content = read_json(new_folder.source / name)
    except ResiduumError as problem:
        new_folder.leave_out(name, problem.message)
        return
    removed_keys: list[str] = []
    content = _without_paths(content, removed_keys)
    if not removed_keys:
        new_folder.copy(name)
        return
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_atomic(new_folder.target(name), f"{text}\n")
    new_folder.changed.append(
        printable(f"{name}: without the local path in {', '.join(removed_keys)}")
    )


def _without_paths(value: Any, removed_keys: list[str], depth: int = 0) -> Any:
    """Return a configuration without the paths of local folders and files.

    Args:
        value: The configuration, or a value in it.
        removed_keys: The names of the removed entries are added to this list.
        depth: Nesting depth of the value.

    Returns:
        The configuration. The path of the base model of an adapter becomes null, other entries are removed.
    """
    if not isinstance(value, dict) or depth > MAX_DEPTH:
        return value
    cleaned: dict[str, Any] = {}
    for key, child in value.items():
        is_path = isinstance(child, str) and bool(PATH_KEYS.search(key)) and _is_local_path(child)
        if is_path:
            removed_keys.append(key[:40])
        if is_path and key == "base_model_name_or_path":
            cleaned[key] = None
        elif not is_path:
            cleaned[key] = _without_paths(child, removed_keys, depth + 1)
    return cleaned


def _is_local_path(text: str) -> bool:
    """Return True for paths and names of data, and False for repositories and files that a model needs."""
    is_needed = any(fnmatch(text, pattern) for pattern in NEEDED)
    return bool(LOCAL_PATH.search(text) or PATH.match(text)) and not is_needed


def _leave_out_entries(new_folder: _NewFolder, listing: FolderListing) -> None:
    reasons = (
        (listing.links, "a link, which is not followed"),
        (listing.special_files, "not a regular file"),
        (listing.private_folders, "the history of the folder"),
        (listing.deep_folders, "nested too deeply"),
    )
    for paths, reason in reasons:
        for path in paths:
            new_folder.leave_out(path.relative_to(listing.path).as_posix(), reason)


def _scan_or_empty(folder: Path) -> Scan:
    try:
        return scan(folder)
    except ResiduumError:  # the original folder is unreadable or too large for a scan
        return Scan(str(folder), ())


def _findings_with_files(result: Scan) -> list[Finding]:
    """Return the findings of a folder. The place of each finding begins with the name of its file."""
    placed_findings = [
        finding
        if finding.where.startswith(file.file)  # findings about whole files name the file
        else finding.replace(where=": ".join(filter(None, (file.file, finding.where))))
        for file in result.files
        for finding in file.findings
    ]
    return sorted(placed_findings, key=rank)
