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
from typing import Any, BinaryIO

import torch

from residuum.checkpoints.pickles import EXPORT, MAX_PICKLE_BYTES, Machine
from residuum.errors import CheckpointError, UnsafeFileError
from residuum.records.zips import open_zip

ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MEMBER = re.compile(r"(?P<archive>[^/\\\x00]+)/(?!.*\.\.)(?P<record>[\w./-]+)")
AGAIN = "Copy or save the file again."


def read_zip(stream: BinaryIO, size: int) -> Any:
    """The object in a zipped torch file of ``size`` bytes."""
    try:
        with open_zip(stream) as archive:
            records = _check_members(archive, size)
            if "data.pkl" not in records or records["data.pkl"].file_size > MAX_PICKLE_BYTES:
                raise CheckpointError(
                    f"A torch archive needs a data.pkl of at most {MAX_PICKLE_BYTES} bytes; "
                    f"this archive holds {sorted(records)[:5]}.",
                    EXPORT,
                )
            if damaged := archive.testzip():  # torch does not look
                raise CheckpointError(
                    f"The members of an archive must fit their checksums; {damaged!r} does not.",
                    "Copy or save the file again, not under torch's set_crc32_options(False).",
                )
            content = archive.read(records["data.pkl"])
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, struct.error) as problem:
        raise CheckpointError(
            f"The file must be a complete zip archive; it is damaged ({problem}).", AGAIN
        ) from problem
    machine = Machine(len(content))
    machine.run(io.BytesIO(content))
    for storage in machine.storages.values():
        record = records.get(f"data/{storage.key}")
        held = record.file_size if record else 0
        if storage.nbytes != held:
            raise UnsafeFileError(
                f"A storage must be in the file in full; {storage.key[:80]!r} claims "
                f"{storage.nbytes} bytes and {held} are there.",
                AGAIN,
            )
    stream.seek(0)
    return _load(stream)


def read_legacy(stream: BinaryIO, size: int, max_bytes: int) -> Any:
    """The object in a torch file of the time before zip: five pickles, then the storages."""
    stream.seek(0)
    head = io.BytesIO(stream.read(MAX_PICKLE_BYTES))
    machine = Machine(min(size, MAX_PICKLE_BYTES))
    if machine.run(head) != LEGACY_MAGIC or machine.run(head) != LEGACY_PROTOCOL:
        raise CheckpointError("A pickle must come from torch.save; this one does not.", EXPORT)
    machine.run(head)  # what the writing machine was like
    machine.run(head)
    keys = machine.run(head)
    listed = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not listed or sorted(keys) != sorted(machine.storages):
        raise CheckpointError("The file must list the storages it refers to; it does not.", AGAIN)
    total = sum(storage.nbytes for storage in machine.storages.values())
    if total > max_bytes:
        raise UnsafeFileError(
            f"Weights may take {max_bytes} bytes; this file claims {total}.",
            "Raise max_bytes for a large model.",
        )
    stream.seek(head.tell())
    for key in keys:
        storage = machine.storages[key]
        numel = int.from_bytes(stream.read(8), "little")
        if numel != storage.numel or stream.tell() + storage.nbytes > size:
            raise CheckpointError(
                f"Storage {key!r} must hold {storage.nbytes} bytes; the file ends before.", AGAIN
            )
        stream.seek(storage.nbytes, io.SEEK_CUR)
    stream.seek(0)
    return _load(io.BytesIO(stream.read()))  # torch would first parse an open file as a tar


def _check_members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Members by record name; refuses compression, overlaps and names that two readers differ on."""
    members = archive.infolist()
    if members and all(re.fullmatch(r"[^/\\]+\.npy", m.filename) for m in members):
        held = ", ".join(sorted(m.filename.removesuffix(".npy")[:20] for m in members)[:5])
        raise CheckpointError(
            f"A checkpoint holds weights; this is an archive of data (.npz, with {held}).",
            "Name the file of weights; data are given with --data.",
        )
    if any(member.filename.endswith("/constants.pkl") for member in members):
        raise CheckpointError(
            "A checkpoint holds weights; this is a TorchScript program.",
            "If you trust it, save its weights alone: "
            "torch.save(torch.jit.load(path).state_dict(), 'weights.pt').",
        )
    total = sum(member.file_size for member in members)
    if total > size or any(m.compress_type != zipfile.ZIP_STORED for m in members):
        raise UnsafeFileError(
            f"A torch archive stores its members uncompressed and apart; this one of {size} bytes "
            f"claims to unpack to {total}.",
            "Write it with torch.save.",
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


def _load(stream: BinaryIO) -> Any:
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
