"""Files of ``torch.save``, zipped or legacy: every claim is checked, then the weights are loaded.

The checks come first and allocate nothing that the file does not hold: members of the archive are
stored, not compressed, and do not overlap; the pickle is run over inert values (:mod:`.pickles`);
each storage must be there in full. Only then is ``torch.load(weights_only=True)`` called.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable
from typing import Any, BinaryIO

import torch

from residuum.checkpoints.pickles import EXPORT, MAX_PICKLE_BYTES, Machine, Storage
from residuum.errors import CheckpointError, UnsafeFileError

ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MEMBER = re.compile(r"(?P<archive>[^/\\\x00]+)/(?!.*\.\.)(?P<record>[\w./-]+)")
END_OF_ZIP = struct.Struct("<4s4H2IH")
AGAIN = "Copy or save the file again."


def read_zip(stream: BinaryIO, size: int, max_bytes: int) -> Any:
    """The object in a zipped torch file of ``size`` bytes."""
    try:
        _check_directory(stream, size)
        with zipfile.ZipFile(stream) as archive:
            records = _check_members(archive, size, max_bytes)
            if "data.pkl" not in records or records["data.pkl"].file_size > MAX_PICKLE_BYTES:
                raise CheckpointError(
                    f"A torch archive needs a data.pkl of at most {MAX_PICKLE_BYTES} bytes; "
                    f"this archive holds {sorted(records)[:5]}.",
                    EXPORT,
                )
            content = archive.read(records["data.pkl"])
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, struct.error) as problem:
        raise CheckpointError(
            f"The file must be a complete zip archive; it is damaged ({problem}).", AGAIN
        ) from problem
    machine = Machine()
    machine.run(io.BytesIO(content))
    for storage in machine.storages.values():
        record = records.get(f"data/{storage.key}")
        _check_storage(storage, record.file_size if record else 0)
    return _load(stream)


def read_legacy(stream: BinaryIO, size: int, max_bytes: int) -> Any:
    """The object in a torch file of the time before zip: five pickles, then the storages."""
    stream.seek(0)
    head = io.BytesIO(stream.read(MAX_PICKLE_BYTES))
    machine = Machine()
    if machine.run(head) != LEGACY_MAGIC or machine.run(head) != LEGACY_PROTOCOL:
        raise CheckpointError("A pickle must come from torch.save; this one does not.", EXPORT)
    machine.run(head)  # what the writing machine was like
    machine.run(head)
    keys = machine.run(head)
    if not isinstance(keys, list) or set(map(str, keys)) != machine.storages.keys():
        raise CheckpointError("The file must list the storages it refers to; it does not.", AGAIN)
    _check_total(machine.storages.values(), max_bytes)
    stream.seek(head.tell())
    for key in map(str, keys):
        storage = machine.storages[key]
        numel = int.from_bytes(stream.read(8), "little")
        if numel != storage.numel or stream.tell() + storage.nbytes > size:
            raise CheckpointError(
                f"Storage {key!r} must hold {storage.nbytes} bytes; the file ends before.", AGAIN
            )
        stream.seek(storage.nbytes, io.SEEK_CUR)
    return _load(stream)


def _check_directory(stream: BinaryIO, size: int) -> None:
    """One directory, at the very end: a second one could show another reader other members."""
    position = stream.seek(max(size - END_OF_ZIP.size, 0))
    signature, *_, length, start, comment = END_OF_ZIP.unpack(stream.read(END_OF_ZIP.size))
    gap = position - (start + length)  # a zip64 archive keeps 76 more bytes here
    if signature != b"PK\x05\x06" or comment or (gap not in (0, 76) and start != 0xFFFFFFFF):
        raise zipfile.BadZipFile("it does not end in its directory")


def _check_members(
    archive: zipfile.ZipFile, size: int, max_bytes: int
) -> dict[str, zipfile.ZipInfo]:
    """Members by record name; refuses compression, overlaps and names that two readers differ on."""
    members = archive.infolist()
    if members and all(re.fullmatch(r"[^/\\]+\.npy", m.filename) for m in members):
        held = ", ".join(sorted(m.filename.removesuffix(".npy")[:20] for m in members)[:5])
        raise CheckpointError(
            f"A checkpoint holds weights; this is an archive of data (.npz, with {held}).",
            "Name the file of weights; data are given with --data.",
        )
    total = sum(member.file_size for member in members)
    packed = [m for m in members if m.compress_type != zipfile.ZIP_STORED]
    if packed or total > min(size, max_bytes):
        raise UnsafeFileError(
            f"A torch archive stores its members uncompressed; this one of {size} bytes claims to "
            f"unpack to {total} (the limit is {min(size, max_bytes)}).",
            "Write it with torch.save, or raise max_bytes for a large model.",
        )
    names = [MEMBER.fullmatch(member.filename) for member in members]
    folders = {match["archive"] for match in names if match}
    distinct = {member.filename.casefold() for member in members}
    if None in names or len(folders) != 1 or len(distinct) != len(members):
        raise UnsafeFileError(
            "A torch archive has one folder of distinct plain names; this one has duplicate or odd "
            "names.",
            EXPORT,
        )
    return {match["record"]: m for match, m in zip(names, members, strict=True) if match}


def _check_storage(storage: Storage, held: int) -> None:
    if storage.nbytes > held:
        raise UnsafeFileError(
            f"A storage must be in the file in full; {storage.key[:80]!r} claims {storage.nbytes} "
            f"bytes and {held} are there.",
            AGAIN,
        )


def _check_total(storages: Iterable[Storage], max_bytes: int) -> None:
    total = sum(storage.nbytes for storage in storages)
    if total > max_bytes:
        raise UnsafeFileError(
            f"Weights may take {max_bytes} bytes; this file claims {total}.",
            "Raise max_bytes for a large model.",
        )


def _load(stream: BinaryIO) -> Any:
    stream.seek(0)
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise UnsafeFileError(
            "A checkpoint must load with weights_only=True; torch refused this one.", EXPORT
        ) from problem
    except (
        RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError,
        EOFError, OSError, OverflowError, struct.error,
    ) as problem:  # fmt: skip
        raise CheckpointError(
            f"torch must be able to read the file; it could not ({type(problem).__name__}).", AGAIN
        ) from problem
