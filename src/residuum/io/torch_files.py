"""Read files of ``torch.save``, after everything they claim was checked.

The checks allocate nothing that the file does not hold. Members of the archive are stored, not compressed,
and do not overlap. The pickle is read as inert values (:mod:`.pickles`), and each storage must be in the
file in full. Only then is ``torch.load(weights_only=True)`` called.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
from typing import Any, BinaryIO

import torch

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.pickles import EXPORT, LEGACY_MAGIC, MAX_PICKLE_BYTES, Machine
from residuum.io.safetensors_files import AGAIN, _bound
from residuum.records.inputs import MAX_GROWTH, open_zip

# What torch raises on damaged files.
UNREADABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
ENDED = (EOFError, OSError, OverflowError, struct.error)
ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"
LEGACY_PROTOCOL = 1001
MEMBER = re.compile(r"(?P<archive>[^/\\\x00]+)/(?!.*\.\.)(?P<record>[\w./-]+)")


def read_zip(stream: BinaryIO, size: int) -> Any:
    """The object in a zipped torch file of ``size`` bytes.

    Three readings: members against their checksums, which torch leaves out; the pickle by a machine
    that knows a few words, to learn every storage it claims; torch itself with weights_only, once all
    claims are met.
    """
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
    """The object in a torch file of the time before zip: five pickles, then the storages.

    The storages follow in the order of the last pickle, each with its length before it; all must be
    there in full before torch is let at the file.
    """
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
    _bound(sum(storage.nbytes for storage in machine.storages.values()), max_bytes)
    stream.seek(head.tell())
    for key in keys:
        storage = machine.storages[key]
        numel = int.from_bytes(stream.read(8), "little")
        if numel != storage.numel or stream.tell() + storage.nbytes > size:
            said = f"Storage {key!r} must hold {storage.nbytes} bytes; the file ends before."
            raise CheckpointError(said, AGAIN)
        stream.seek(storage.nbytes, io.SEEK_CUR)
    stream.seek(0)
    return _load(io.BytesIO(stream.read()))  # torch would first parse an open file as a tar


def _check_members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Members by record name; refuses compression, overlaps and names that two readers differ on."""
    members = archive.infolist()
    refuse_other_archives([member.filename for member in members])
    if any(member.filename.endswith("/constants.pkl") for member in members):
        raise CheckpointError(
            "A checkpoint holds weights; this is a TorchScript program.",
            "If you trust it, save its weights alone: "
            "torch.save(torch.jit.load(path).state_dict(), 'weights.pt').",
        )
    total = sum(member.file_size for member in members)
    is_packed = any(m.compress_type != zipfile.ZIP_STORED for m in members)
    if total > size or is_packed:
        is_bomb = total > MAX_GROWTH * size or not is_packed  # unpacked members must not overlap
        raise (UnsafeFileError if is_bomb else CheckpointError)(
            f"A torch archive stores its members uncompressed and apart; this one of {size} bytes "
            f"claims to unpack to {total}.",
            "Write it with torch.save.",
        )
    names = [MEMBER.fullmatch(member.filename) for member in members]
    folders = {match["archive"] for match in names if match}
    distinct = {member.filename.casefold() for member in members}
    if None in names or len(folders) != 1 or len(distinct) != len(members):
        rule = "A torch archive has one folder of distinct plain names"
        raise UnsafeFileError(f"{rule}; this one has duplicate or odd names.", EXPORT)
    return {match["record"]: m for match, m in zip(names, members, strict=True) if match}


def refuse_other_archives(names: list[str]) -> None:
    """Refuse zip archives that other libraries write, each with what to do.

    Raises:
        CheckpointError: if the archive is not one of ``torch.save`` or TorchScript.
    """
    if any(name.endswith("/data.pkl") for name in names):
        return
    first = ", ".join(name[:40] for name in sorted(names)[:4])
    what, remedy = f"a zip archive with {first or 'nothing in it'}", EXPORT
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


def _load(stream: BinaryIO) -> Any:
    """torch's own reader with weights_only, after the file was checked; its many errors become two of
    ours.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        rule = "A checkpoint must load with weights_only=True; torch refused this one."
        raise CheckpointError(rule, EXPORT) from problem
    except (*UNREADABLE, *ENDED) as problem:
        said = f"torch must be able to read the file; it could not ({type(problem).__name__})."
        raise CheckpointError(said, AGAIN) from problem
