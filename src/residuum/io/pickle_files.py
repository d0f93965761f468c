"""Read files of ``torch.save`` and TorchScript, and other pickles, without running them.

A pickle is read as a tree of inert values (plain objects that describe the content, :mod:`.inert`). The
checks allocate no more memory than the file holds. Members of an archive (the files in it) must be
uncompressed and must not overlap. Each storage (the numbers of a tensor) must be complete. Numbers are read
on demand, and their checksum is checked at that time.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.inert import Storage
from residuum.io.pickle_reader import LEGACY_MAGIC, PickleReader
from residuum.io.safetensors_files import COPY_AGAIN
from residuum.io.streams import MAX_PICKLE_BYTES, Source, open_source, read_range
from residuum.records.inputs import MAX_GROWTH, open_zip

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_PROTOCOL = 1001
LEGACY_HEAD = pickle.dumps(LEGACY_MAGIC, protocol=2)
# Largest size in bytes of data.pkl, the pickle in an archive. The numbers of tensors are in other files.
MAX_DATA_PKL = 64 << 20
EXPORT_ADVICE = (
    "Export the weights alone: torch.save(model.state_dict(), path), or "
    "safetensors.torch.save_file(model.state_dict(), path)."
)
# Two fields in the header of a file in a zip archive: the lengths of its name and of its extra data.
LOCAL_HEADER = struct.Struct("<26x2H")
MEMBER = re.compile(r"(?P<folder>[^/\\\x00]+)/(?!.*\.\.)[\w./-]+")
CHECKSUM = "The members of an archive must match their checksums (CRC); the member {!r} does not."
KEEP_CHECKSUMS = "Copy or save the file again, without torch's set_crc32_options(False)."


@dataclass(frozen=True)
class PickleContent:
    """The content of a pickle, and the code that loading the pickle would run.

    Attributes:
        kind: "torch", "torchscript", "pickle" or "skops".
        content: The content as a tree of inert values (:mod:`.inert`).
        unsafe: Calls of unknown functions, such as "call os.system".
        foreign: Classes and functions of other packages that the pickle names.
    """

    kind: str
    content: Any
    unsafe: tuple[str, ...]
    foreign: tuple[str, ...]


def read_archive(path: Path, stream: BinaryIO, size: int) -> PickleContent:
    """Read the zip archive of ``torch.save`` or TorchScript.

    Args:
        path: The file.
        stream: The same file, open.
        size: Size of the file in bytes.

    Returns:
        The content.

    Raises:
        CheckpointError: If the archive is damaged or written by another library.
        UnsafeFileError: If the archive claims more bytes than it holds.
    """
    try:
        with open_zip(stream) as archive:
            members = {member.filename: member for member in archive.infolist()}
            _check_members(archive.infolist(), size)
            folder = _find_folder(members, path.name)
            content = _read_member(path, members.get(f"{folder}data.pkl"), MAX_DATA_PKL)
            byte_order_member = members.get(f"{folder}byteorder")
            if (
                byte_order_member is not None
                and _read_member(path, byte_order_member, 100) != b"little"
            ):
                raise CheckpointError(
                    "The numbers in a torch archive must be little-endian; the numbers in this archive "
                    "are big-endian.",
                    COPY_AGAIN,
                )
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, NotImplementedError) as problem:
        raise CheckpointError(
            f"The file {path.name!r} must be a complete zip archive; the archive is damaged ({problem}).",
            COPY_AGAIN,
        ) from problem

    def find_member(storage: Storage) -> zipfile.ZipInfo | None:
        possible_names = (
            f"{folder}{subfolder}/{storage.key}" for subfolder in ("data", "constants")
        )
        return next((members[name] for name in possible_names if name in members), None)

    def read_storage(storage: Storage) -> bytearray:
        return _read_member(path, find_member(storage), storage.nbytes)

    def read_part(storage: Storage, first: int, count: int) -> bytearray:
        member = find_member(storage)
        if member is None or member.compress_type != zipfile.ZIP_STORED:
            raise ValueError("a storage is missing or compressed")
        return read_range(path, _find_start(path, member) + first, count)

    reader = PickleReader(cache_last_storage(read_storage), read_part=read_part)
    content_tree = reader.run(Source(io.BytesIO(content), len(content)))  # type: ignore[arg-type]
    for storage in reader.storages.values():
        member = find_member(storage)
        stored_bytes = member.file_size if member else 0
        if storage.nbytes != stored_bytes:
            raise UnsafeFileError(
                "The file must contain all numbers of a tensor storage; the storage "
                f"{storage.key[:80]!r} needs {storage.nbytes} bytes, but the file has only "
                f"{stored_bytes} bytes of it.",
                COPY_AGAIN,
            )
    kind = "torchscript" if f"{folder}constants.pkl" in members else "torch"
    return PickleContent(kind, content_tree, tuple(reader.unsafe), tuple(reader.foreign))


def read_pickle(
    path: Path, stream: io.BufferedReader, size: int, unpacker: Callable[[], Any] | None = None
) -> PickleContent:
    """Read a file that holds one pickle, or a file in the legacy format of ``torch.save``.

    The legacy format has five pickles, followed by the storages.

    Args:
        path: The file.
        stream: The same file, open.
        size: Size of the file in bytes.
        unpacker: Function that makes the decompressor, None for a file that is not compressed.

    Returns:
        The content.

    Raises:
        CheckpointError: If the file is damaged.
        UnsafeFileError: If the file is too large.
    """
    storage_positions: dict[str, int] = {}

    def read_storage(storage: Storage) -> bytearray:
        return read_range(path, storage_positions[storage.key], storage.nbytes)

    def read_part(storage: Storage, first: int, count: int) -> bytearray:
        return read_range(path, storage_positions[storage.key] + first, count)

    is_legacy = unpacker is None and stream.peek(len(LEGACY_HEAD)).startswith(LEGACY_HEAD)
    # The limit is for files that are read into memory. The numbers of legacy files are read on demand.
    if size > MAX_PICKLE_BYTES and not is_legacy:
        raise UnsafeFileError(
            f"A pickle may have at most {MAX_PICKLE_BYTES} bytes; the file {path.name!r} has {size} bytes.",
            "Save the model in several files.",
        )
    reader = PickleReader(cache_last_storage(read_storage), read_part=read_part)
    source: Any = open_source(stream, size, unpacker)
    content, kind = reader.run(source), "pickle"
    if is_legacy:
        kind = "torch"
        if reader.run(source) != LEGACY_PROTOCOL:
            raise CheckpointError(
                f"A file in the old format of torch.save must state version {LEGACY_PROTOCOL} of the "
                f"format; the file {path.name!r} does not.",
                EXPORT_ADVICE,
            )
        reader.run(source)  # skip the third pickle, which describes the machine that wrote the file
        content = reader.run(source)
        storage_positions |= _read_storage_positions(
            reader.run(source), reader.storages, stream, size
        )
    unsafe_calls = [*reader.unsafe]
    if reader.has_joblib_arrays:
        unsafe_calls += _run_without_joblib(open_source(stream, size, unpacker))
    return PickleContent(kind, content, tuple(dict.fromkeys(unsafe_calls)), tuple(reader.foreign))


def cache_last_storage(read: Callable[[Storage], bytearray]) -> Callable[[Storage], bytearray]:
    """Return a function that reads a storage (the numbers of tensors) and remembers the last storage."""
    last: list[tuple[Storage, bytearray]] = []

    def read_cached(storage: Storage) -> bytearray:
        if not last or last[0][0] != storage:
            last.clear()  # free the memory of the previous storage before the next storage is read
            last.append((storage, read(storage)))
        return last[0][1]

    return read_cached


def _read_storage_positions(
    keys: Any, storages: dict[str, Storage], stream: BinaryIO, size: int
) -> dict[str, int]:
    """Return the position of the numbers of each storage in a legacy file, by the key of the storage."""
    # For each storage, the file holds the number of elements in 8 bytes, and then the elements.
    are_keys_texts = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not are_keys_texts or sorted(keys) != sorted(storages):
        raise CheckpointError(
            "A file in the old format of torch.save must list the storages (arrays of numbers) of its "
            "tensors; this file does not.",
            COPY_AGAIN,
        )
    positions = {}
    for key in keys:
        storage = storages[key]
        if storage.nbytes > size:
            raise UnsafeFileError(
                f"The file must contain all numbers of a tensor storage; the storage {key[:80]!r} needs "
                f"{storage.nbytes} bytes, but the file has only {size} bytes.",
                COPY_AGAIN,
            )
        numel = int.from_bytes(stream.read(8), "little")
        positions[key] = stream.tell()
        if numel != storage.numel or positions[key] + storage.nbytes > size:
            raise CheckpointError(
                f"The tensor storage {key[:80]!r} must have {storage.nbytes} bytes; the file ends before "
                "the last byte.",
                COPY_AGAIN,
            )
        stream.seek(storage.nbytes, io.SEEK_CUR)
    return positions


def _run_without_joblib(source: Source) -> list[str]:
    """Return the unsafe calls that a joblib file would make if ``pickle.load`` loads it."""
    # In a file of joblib, the numbers of an array follow the pickle instructions that describe the array.
    # ``joblib.load`` skips these numbers. ``pickle.load`` runs the numbers as instructions.
    reader = PickleReader(joblib=False)
    try:
        reader.run(source)  # type: ignore[arg-type]
    except CheckpointError:
        # The numbers are not valid instructions, so ``pickle.load`` fails before it calls anything unsafe.
        return []
    except UnsafeFileError:
        # If an unsafe call was found before a limit was exceeded, we report this call.
        if not reader.unsafe:
            raise
    return [*reader.unsafe]


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    """Raise an error for archives of other libraries, zip bombs, and archives with ambiguous file names."""
    refuse_other_archives([member.filename for member in members])
    total_bytes = sum(member.file_size for member in members)
    uncompressed_bytes = sum(m.file_size for m in members if m.compress_type == zipfile.ZIP_STORED)
    if uncompressed_bytes > size or total_bytes > MAX_GROWTH * size:
        raise UnsafeFileError(
            "A torch archive must store its files uncompressed and without overlap; this archive of "
            f"{size} bytes would unpack to {total_bytes} bytes.",
            "Write the archive with torch.save.",
        )
    name_matches = [MEMBER.fullmatch(member.filename) for member in members]
    folders = {match["folder"] for match in name_matches if match}
    distinct_names = {member.filename.casefold() for member in members}
    if None in name_matches or len(folders) != 1 or len(distinct_names) != len(members):
        raise UnsafeFileError(
            "A torch archive must contain one folder, with different file names of letters, digits, '.', "
            "'_' and '-'; this archive has duplicate names or names with other characters.",
            EXPORT_ADVICE,
        )


def _find_folder(members: dict[str, zipfile.ZipInfo], file: str) -> str:
    """Return the folder in a torch archive that holds all of its files, such as "model/"."""
    pickle_names = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickle_names) != 1:
        raise CheckpointError(
            f"A torch archive must contain exactly one file data.pkl in its folder; the archive {file!r} "
            "does not.",
            "Write the archive with torch.save.",
        )
    return pickle_names[0].removesuffix("data.pkl")


def _read_member(path: Path, member: zipfile.ZipInfo | None, limit: int) -> bytearray:
    """Return the bytes of an uncompressed file in an archive after checking its checksum."""
    # Read the bytes at the position that the archive states for this member. Opening the archive with zipfile
    # would parse its whole list of files again for each tensor.
    if member is None or member.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            "A torch archive must store its files uncompressed; one of its files is missing or compressed.",
            "Write the archive with torch.save.",
        )
    if member.file_size > limit:
        raise UnsafeFileError(
            f"The file {member.filename[:80]!r} in a torch archive may have at most {limit} bytes; in "
            f"this archive it has {member.file_size} bytes.",
            "Write the archive with torch.save.",
        )
    member_bytes = read_range(path, _find_start(path, member), member.file_size)
    if zlib.crc32(member_bytes) != member.CRC:
        raise CheckpointError(CHECKSUM.format(member.filename[:80]), KEEP_CHECKSUMS)
    return member_bytes


def _find_start(path: Path, member: zipfile.ZipInfo) -> int:
    """Return the position of the first byte of an uncompressed file in an archive."""
    with path.open("rb") as stream:
        stream.seek(member.header_offset)
        header = stream.read(LOCAL_HEADER.size)
    if len(header) < LOCAL_HEADER.size or not header.startswith(ZIP_MAGIC):
        raise zipfile.BadZipFile(
            "a file in the archive does not begin at the position that the archive lists for it"
        )
    return member.header_offset + LOCAL_HEADER.size + sum(LOCAL_HEADER.unpack(header))


def refuse_other_archives(names: list[str]) -> None:
    """Raise an error for a zip archive of another library. The error says how to save the weights.

    Args:
        names: Names of the files in the archive.

    Raises:
        CheckpointError: If the archive is not one of ``torch.save`` or TorchScript.
    """
    if any(name.endswith("/data.pkl") for name in names):
        return
    first_names = ", ".join(name[:40] for name in sorted(names)[:4])
    description, remedy = f"a zip archive with {first_names or 'nothing in it'}", EXPORT_ADVICE
    if names and all(name.endswith(".npy") for name in names):
        description = f"an archive of arrays (.npz, with {first_names})"
        remedy = (
            "Pass an archive of samples with --data. Save weights as safetensors: "
            "safetensors.numpy.save_file(dict(numpy.load(path)), 'model.safetensors')."
        )
    elif "model.weights.h5" in names:
        description = "a Keras model (.keras)"
        remedy = (
            "Save the weights as safetensors: safetensors.numpy.save_file({w.path: w.numpy() for w in "
            "model.weights}, 'model.safetensors')."
        )
    raise CheckpointError(
        f"residuum reads only zip archives that torch.save wrote; this file is {description}.",
        remedy,
    )
