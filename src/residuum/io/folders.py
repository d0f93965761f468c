"""Find the weights, the tokenizer and all other files in the folder of a model.

==============================  ===================================================================
folder                          its weights
==============================  ===================================================================
a directory of residuum train   ``model.safetensors``
Hugging Face, Trainer           ``model.safetensors`` or ``pytorch_model.bin``, or the shards that
                                ``model.safetensors.index.json`` lists
PEFT                            ``adapter_model.safetensors`` or ``adapter_model.bin``
==============================  ===================================================================

A folder can come from an untrusted source, so links are not followed. The only exception are the links of
the cache of Hugging Face: ``snapshots/REVISION/FILE`` is a link to ``blobs/HASH`` of the same repository.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from residuum.errors import CheckpointError, InputError, UnsafeFileError
from residuum.io.json_files import read_json

# Largest number of files and folders, and largest nesting depth of the folders that we search. A folder that
# exceeds the first limit is not a release but an entire disk.
MAX_ENTRIES, MAX_DEPTH = 100_000, 16
INDEX_SUFFIX = ".index.json"
# The names that libraries give to the weights of a model, the preferred names first.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
MAX_SHARDS = 1000  # largest number of files in which the weights of one model may be stored
SAVE_SHARDS = "Save the model again: model.save_pretrained(folder)."
# Folders that programs make for themselves. A finding names them, and their files are not read.
PRIVATE_FOLDERS = (".git",)


@dataclass(frozen=True, eq=False)
class FolderListing:
    """The entries of a folder and of its subfolders.

    Attributes:
        path: The folder.
        files: All regular files, sorted.
        links: Links that were not followed.
        special_files: Named pipes, sockets and devices, which are not opened.
        deep_folders: Folders that are nested too deeply and were not searched.
        private_folders: Folders such as ``.git``, which were not searched.
    """

    path: Path
    files: tuple[Path, ...]
    links: tuple[Path, ...] = ()
    special_files: tuple[Path, ...] = ()
    deep_folders: tuple[Path, ...] = ()
    private_folders: tuple[Path, ...] = ()


def list_folder(folder: str | Path) -> FolderListing:
    """List the files of a folder and of its subfolders, without opening a file.

    Args:
        folder: The folder.

    Returns:
        The listing.

    Raises:
        InputError: If the folder has too many entries.
    """
    path = Path(folder)
    files: list[Path] = []
    links: list[Path] = []
    special_files: list[Path] = []
    deep_folders: list[Path] = []
    private_folders: list[Path] = []
    for count, (entry, depth) in enumerate(_walk_folder(path)):
        if count >= MAX_ENTRIES:
            raise InputError(
                f"A folder may contain at most {MAX_ENTRIES} files and folders; the folder {str(path)!r} "
                "contains more.",
                "Scan the subfolders separately.",
            )
        entry_path = Path(entry.path)
        if entry.is_symlink():
            (files if is_inner_file(entry_path) else links).append(entry_path)
        elif entry.is_dir(follow_symlinks=False):
            if entry.name in PRIVATE_FOLDERS:
                private_folders.append(entry_path)
            elif depth >= MAX_DEPTH:
                deep_folders.append(entry_path)
        else:
            is_regular = entry.is_file(follow_symlinks=False)
            (files if is_regular else special_files).append(entry_path)
    lists = (files, links, special_files, deep_folders, private_folders)
    return FolderListing(path, *(tuple(sorted(paths)) for paths in lists))


def _walk_folder(folder: Path) -> Iterator[tuple[os.DirEntry[str], int]]:
    folder_stack = [(str(folder), 1)]
    while folder_stack:
        name, depth = folder_stack.pop()
        try:
            with os.scandir(name) as entries:
                for entry in entries:
                    yield entry, depth
                    is_folder = entry.is_dir(follow_symlinks=False) and not entry.is_symlink()
                    if is_folder and depth < MAX_DEPTH and entry.name not in PRIVATE_FOLDERS:
                        folder_stack.append((entry.path, depth + 1))
        except OSError as problem:
            message = f"A folder must be readable; {name!r} is not ({problem.strerror})."
            remedy = "Check whether you have the permission to read this folder."
            raise CheckpointError(message, remedy) from problem


def is_inner_file(path: Path) -> bool:
    """Return True if a path is a regular file, or a link in a cache of Hugging Face to its regular file.

    Args:
        path: A path in the folder of a model.

    Returns:
        Whether the file may be read as a part of the folder.
    """
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode):
            return stat.S_ISREG(mode)
        snapshots = path.absolute().parent.parent
        blobs = snapshots.parent / "blobs"
        is_cache = snapshots.name == "snapshots" and stat.S_ISDIR(blobs.lstat().st_mode)
        target = path.parent / os.readlink(path)
        is_blob = target.parent.resolve() == blobs.resolve()
        return is_cache and is_blob and stat.S_ISREG(target.lstat().st_mode)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return False


def locate_weights(path: str | Path) -> Path:
    """Return the file of the weights: the path itself, or the weights in a folder.

    If the weights are stored in several files (shards), the path of the index file is returned.

    Args:
        path: A file, or a folder of residuum train, Hugging Face, Trainer or PEFT.

    Returns:
        The file.

    Raises:
        CheckpointError: If the path does not lead to a file of weights.
    """
    path = Path(path)
    if not path.is_dir():
        if path.is_file():
            return path
        defect = "is not a regular file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"The path of a model must be a model file or a folder with a model; the path {str(path)!r} "
            f"{defect}.",
            "Check the path.",
        )
    for name in WEIGHT_FILES:
        if is_inner_file(path / name):
            return path / name
    special_names = [name for name in WEIGHT_FILES if os.path.lexists(path / name)]
    if special_names:
        raise CheckpointError(
            f"The weights in a folder must be a regular file; the file {special_names[0]!r} in the "
            f"folder {str(path)!r} is a link or a special file.",
            "Pass the path of the model file to which the link points.",
        )
    raise CheckpointError(
        "A folder with a model must contain model.safetensors, pytorch_model.bin, "
        f"adapter_model.safetensors, or an index of several weight files; the folder {str(path)!r} "
        "contains none of these files.",
        "Pass the path of the model file itself.",
    )


def is_shard_index(path: Path) -> bool:
    """Return True if a file has the name of an index of shards, such as model.safetensors.index.json."""
    return path.name.endswith((f".safetensors{INDEX_SUFFIX}", f".bin{INDEX_SUFFIX}"))


def read_shard_index(index: Path) -> dict[Path, list[str]]:
    """Read which tensors each shard of a model holds. The shards themselves are not opened.

    Args:
        index: The index file.

    Returns:
        The names of the tensors by shard, sorted by shard.

    Raises:
        CheckpointError: If the index is not valid, or names a file that does not exist.
        UnsafeFileError: If the index names a file outside of its folder.
    """
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    is_valid = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())
    if not is_valid or not weight_map:
        raise CheckpointError(
            "The index of a model in several files must have a 'weight_map', which names the file of "
            f"each tensor; the index {index.name!r} has none.",
            SAVE_SHARDS,
        )
    shards: dict[Path, list[str]] = {}
    for tensor_name, file_name in weight_map.items():
        shards.setdefault(Path(file_name), []).append(tensor_name)
        if len(shards) > MAX_SHARDS:
            raise UnsafeFileError(
                f"The index of a model may list at most {MAX_SHARDS} weight files; the index "
                f"{index.name!r} lists more.",
                SAVE_SHARDS,
            )
    for shard in shards:
        has_folder = {*str(shard)} & {*"/\\\0"} or str(shard) in ("..", ".", "")
        if has_folder or (index.parent / shard).is_symlink():
            if has_folder or not is_inner_file(index.parent / shard):
                raise UnsafeFileError(
                    "The index of a model may only list weight files in its own folder; the index "
                    f"{index.name!r} lists the file {str(shard)[:80]!r}.",
                    "Do not trust this folder. Download the model again.",
                )
        elif not is_inner_file(index.parent / shard):
            raise CheckpointError(
                "Every weight file that the index of a model lists must exist; the file "
                f"{str(shard)[:80]!r} does not.",
                "Download the missing file, or save the model again.",
            )
    return {index.parent / shard: shards[shard] for shard in sorted(shards)}
