"""Read files of ``torch.save`` and TorchScript as trees of inert values.

The checks allocate nothing that the file does not hold. Members of an archive are stored, not compressed,
and do not overlap. The pickle is read as inert values (:mod:`.inert`), and each storage must be in the
file in full. Numbers are read when they are asked for, and their checksum is checked then.
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
from residuum.io.streams import MAX_PICKLE_BYTES, Source, open_source
from residuum.records.inputs import MAX_GROWTH, open_zip

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_PROTOCOL = 1001
LEGACY_HEAD = pickle.dumps(LEGACY_MAGIC, protocol=2)
MAX_DATA_PKL = 64 << 20  # bytes of the pickle in an archive, without the numbers
EXPORT_ADVICE = (
    "Export the weights alone: torch.save(model.state_dict(), path), or "
    "safetensors.torch.save_file(model.state_dict(), path)."
)
LOCAL_HEADER = struct.Struct(
    "<26x2H"
)  # of a zip member: the lengths of its name and its extra field
MEMBER = re.compile(r"(?P<folder>[^/\\\x00]+)/(?!.*\.\.)[\w./-]+")
CHECKSUM = "The members of an archive must fit their checksums (CRC); {!r} does not."
KEEP_CHECKSUMS = "Copy or save the file again, not under torch's set_crc32_options(False)."


@dataclass(frozen=True)
class PickleContent:
    """What the pickle of a file holds, and what loading it would run.

    Attributes:
        kind: torch, torchscript or pickle.
        content: The tree of inert values.
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
        size: Its bytes.

    Raises:
        CheckpointError: If the archive is damaged or written by another library.
        UnsafeFileError: If it claims more than it holds.
    """
    try:
        with open_zip(stream) as archive:
            members = {member.filename: member for member in archive.infolist()}
            _check_members(archive.infolist(), size)
            folder = _find_folder(members, path.name)
            content = _read_member(path, members.get(f"{folder}data.pkl"), MAX_DATA_PKL)
            order = members.get(f"{folder}byteorder")
            if order is not None and _read_member(path, order, 100) != b"little":
                raise CheckpointError("Numbers must be little endian; these are not.", COPY_AGAIN)
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, NotImplementedError) as problem:
        raise CheckpointError(
            f"{path.name!r} must be a complete zip archive; it is damaged ({problem}).", COPY_AGAIN
        ) from problem

    def member_of(storage: Storage) -> zipfile.ZipInfo | None:
        places = (members.get(f"{folder}{part}/{storage.key}") for part in ("data", "constants"))
        return next((member for member in places if member is not None), None)

    def read_storage(storage: Storage) -> bytearray:
        return _read_member(path, member_of(storage), storage.nbytes)

    reader = PickleReader(cache_last_storage(read_storage))
    tree = reader.run(Source(io.BytesIO(content), len(content)))  # type: ignore[arg-type]
    for storage in reader.storages.values():
        member = member_of(storage)
        held = member.file_size if member else 0
        if storage.nbytes != held:
            raise UnsafeFileError(
                f"A storage must be in the file in full; {storage.key[:80]!r} claims "
                f"{storage.nbytes} bytes and {held} are there.",
                COPY_AGAIN,
            )
    kind = "torchscript" if f"{folder}constants.pkl" in members else "torch"
    return PickleContent(kind, tree, tuple(reader.unsafe), tuple(reader.foreign))


def read_pickle(
    path: Path, stream: io.BufferedReader, size: int, unpacker: Callable[[], Any] | None = None
) -> PickleContent:
    """Read one pickle, or the five pickles of torch's legacy format before its storages.

    Args:
        path: The file.
        stream: The same file, open.
        size: Its bytes.
        unpacker: Makes the decompressor of a packed file.
    """
    starts: dict[str, int] = {}

    def read_storage(storage: Storage) -> bytearray:
        raw = bytearray(storage.nbytes)
        with path.open("rb") as again:
            again.seek(starts[storage.key])
            if again.readinto(raw) != len(raw):
                raise ValueError("it ends before what it claims")
        return raw

    is_legacy = unpacker is None and stream.peek(len(LEGACY_HEAD)).startswith(LEGACY_HEAD)
    if size > MAX_PICKLE_BYTES and not is_legacy:  # whose numbers stay in the file
        raise UnsafeFileError(
            f"A pickle may have {MAX_PICKLE_BYTES} bytes; {path.name!r} has {size}.", "Split it."
        )
    reader = PickleReader(cache_last_storage(read_storage))
    source: Any = open_source(stream, size, unpacker)
    content, kind = reader.run(source), "pickle"
    if is_legacy:
        kind = "torch"
        if reader.run(source) != LEGACY_PROTOCOL:
            raise CheckpointError(
                "A pickle must come from torch.save; this one does not.", EXPORT_ADVICE
            )
        reader.run(source)  # what the writing machine was like
        content = reader.run(source)
        starts |= _storage_positions(reader.run(source), reader.storages, stream, size)
    unsafe = [*reader.unsafe]
    if reader.has_joblib_arrays:
        unsafe += _run_without_joblib(open_source(stream, size, unpacker))
    return PickleContent(kind, content, tuple(dict.fromkeys(unsafe)), tuple(reader.foreign))


def cache_last_storage(read: Callable[[Storage], bytearray]) -> Callable[[Storage], bytearray]:
    """Return ``read`` with a memory of its last result, because tensors often share one storage."""
    last: list[tuple[Storage, bytearray]] = []

    def remember(storage: Storage) -> bytearray:
        if not last or last[0][0] != storage:
            last.clear()  # before the next one is read, so that two are never held
            last.append((storage, read(storage)))
        return last[0][1]

    return remember


def _storage_positions(
    keys: Any, storages: dict[str, Storage], stream: BinaryIO, size: int
) -> dict[str, int]:
    """Return where each storage of a legacy file begins. Each has its length in front of it."""
    listed = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not listed or sorted(keys) != sorted(storages):
        raise CheckpointError(
            "The file must list the storages it refers to; it does not.", COPY_AGAIN
        )
    starts = {}
    for key in keys:
        storage = storages[key]
        if storage.nbytes > size:
            raise UnsafeFileError(
                f"A storage must be in the file in full; {key[:80]!r} claims {storage.nbytes} bytes of "
                f"{size}.",
                COPY_AGAIN,
            )
        numel = int.from_bytes(stream.read(8), "little")
        starts[key] = stream.tell()
        if numel != storage.numel or starts[key] + storage.nbytes > size:
            raise CheckpointError(
                f"Storage {key[:80]!r} must hold {storage.nbytes} bytes; the file ends before.",
                COPY_AGAIN,
            )
        stream.seek(storage.nbytes, io.SEEK_CUR)
    return starts


def _run_without_joblib(source: Source) -> list[str]:
    """List what ``pickle.load`` would run in a file of joblib.

    ``pickle.load`` does not know the numbers that follow an array and takes them for instructions.
    """
    reader = PickleReader(joblib=False)
    try:
        reader.run(source)  # type: ignore[arg-type]
    except CheckpointError:  # as with every honest file: numbers are no instructions
        return []
    except UnsafeFileError:
        if not reader.unsafe:  # more work than a file may ask for
            raise
    return [*reader.unsafe]


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    """Refuse archives of other libraries, bombs, and names that two readers would take differently."""
    refuse_other_archives([member.filename for member in members])
    total = sum(member.file_size for member in members)
    stored = sum(m.file_size for m in members if m.compress_type == zipfile.ZIP_STORED)
    if stored > size or total > MAX_GROWTH * size:
        raise UnsafeFileError(
            f"A torch archive stores its members uncompressed and apart; this one of {size} bytes claims "
            f"to unpack to {total}.",
            "Write it with torch.save.",
        )
    names = [MEMBER.fullmatch(member.filename) for member in members]
    folders = {match["folder"] for match in names if match}
    distinct = {member.filename.casefold() for member in members}
    if None in names or len(folders) != 1 or len(distinct) != len(members):
        raise UnsafeFileError(
            "A torch archive has one folder of distinct plain names; this one has duplicate or odd names.",
            EXPORT_ADVICE,
        )


def _find_folder(members: dict[str, zipfile.ZipInfo], file: str) -> str:
    """Return the one folder of an archive, with its slash."""
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(
            f"A torch archive holds one data.pkl in its one folder; {file!r} does not.",
            "Write it with torch.save.",
        )
    return pickles[0].removesuffix("data.pkl")


def _read_member(path: Path, member: zipfile.ZipInfo | None, limit: int) -> bytearray:
    """Return the bytes of a stored member, checked against its checksum.

    The position comes from the directory that was read before. Opening the archive again for each of a
    thousand tensors would parse that directory a thousand times.
    """
    if member is None or member.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            "A torch archive stores its members uncompressed; one is missing or compressed.",
            "Write it with torch.save.",
        )
    if member.file_size > limit:
        raise UnsafeFileError(
            f"{member.filename[:80]!r} in a torch archive may have {limit} bytes; it has "
            f"{member.file_size}.",
            "Write it with torch.save.",
        )
    raw = bytearray(member.file_size)
    with path.open("rb") as stream:
        stream.seek(member.header_offset)
        header = stream.read(LOCAL_HEADER.size)
        if len(header) < LOCAL_HEADER.size or not header.startswith(ZIP_MAGIC):
            raise zipfile.BadZipFile("a member does not begin where the directory says")
        stream.seek(sum(LOCAL_HEADER.unpack(header)), io.SEEK_CUR)
        if stream.readinto(raw) != len(raw):
            raise zipfile.BadZipFile("a member ends before what it claims")
    if zlib.crc32(raw) != member.CRC:
        raise CheckpointError(CHECKSUM.format(member.filename[:80]), KEEP_CHECKSUMS)
    return raw


def refuse_other_archives(names: list[str]) -> None:
    """Refuse zip archives that other libraries write, each with what to do.

    Raises:
        CheckpointError: If the archive is not one of ``torch.save`` or TorchScript.
    """
    if any(name.endswith("/data.pkl") for name in names):
        return
    first = ", ".join(name[:40] for name in sorted(names)[:4])
    what, remedy = f"a zip archive with {first or 'nothing in it'}", EXPORT_ADVICE
    if names and all(name.endswith(".npy") for name in names):
        what = f"an archive of arrays (.npz, with {first})"
        remedy = (
            "Pass samples with --data. Save weights as safetensors: "
            "safetensors.numpy.save_file(dict(numpy.load(path)), 'model.safetensors')."
        )
    elif "model.weights.h5" in names:
        what = "a Keras model (.keras)"
        remedy = (
            "Save its weights as safetensors: safetensors.numpy.save_file({w.path: w.numpy() for w in "
            "model.weights}, 'model.safetensors')."
        )
    elif "schema.json" in names:
        what = "an archive of skops"
        remedy = "If you trust it, load it with skops.io.load and save it with joblib.dump."
    raise CheckpointError(f"residuum reads zip archives of torch.save; this is {what}.", remedy)
