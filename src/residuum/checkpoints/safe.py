"""Weights from files that may be hostile: every claim is checked before anything is believed.

Safetensors: 8 bytes length n (little endian), n bytes JSON {name: {dtype, shape, data_offsets}}, then
the tensors' bytes without gaps. The header is checked by hand before the library maps a byte: every
entry must agree with the size of the file.

Files of ``torch.save``, zipped or legacy: the checks allocate nothing that the file does not hold.
Members of the archive are stored, not compressed, and do not overlap; the pickle is run over inert
values (:mod:`.pickles`); each storage must be there in full. Only then is
``torch.load(weights_only=True)`` called.

What was loaded becomes a clean state dict: unwrapped, dense, real, finite, owned.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from residuum.checkpoints.pickles import EXPORT, MAX_DIMENSIONS, MAX_PICKLE_BYTES, Machine
from residuum.errors import CheckpointError, UnsafeFileError
from residuum.networks import refuse_by_name
from residuum.records.data import is_size, open_zip

MAX_HEADER_BYTES = 4 << 20  # 40 000 tensors; as empty JSON lists it takes 90 MB
KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64}
KINDS |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
KINDS |= {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
KINDS |= {"BOOL": torch.bool}
AGAIN = "Copy or save the file again."
# What torch raises on damaged files, as far as it was ever seen to.
UNREADABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
ENDED = (EOFError, OSError, OverflowError, struct.error)
ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MEMBER = re.compile(r"(?P<archive>[^/\\\x00]+)/(?!.*\.\.)(?P<record>[\w./-]+)")
WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "network")
PREFIXES = ("module.", "_orig_mod.")  # DataParallel, torch.compile
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
MAX_DEPTH = 8  # of state dicts in each other
MAX_NAME = 256  # characters
MAX_TENSORS = 1000  # 500 layers; what recognises them looks at pairs
MAX_SHARING = 4  # tied weights appear under several names, a memory bomb under thousands


def read_safetensors(
    path: Path, stream: BinaryIO, size: int, max_bytes: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the file of ``size`` bytes at ``path``, open as ``stream``."""
    header, metadata, _ = checked_header(stream, size, max_bytes)
    try:
        with safe_open(str(path), framework="pt", device="cpu") as archive:
            return {name: archive.get_tensor(name) for name in header}, metadata
    except (SafetensorError, RuntimeError, ValueError, TypeError, OSError) as problem:
        _damaged(f"the library could not read it: {type(problem).__name__}", problem)


def checked_header(
    stream: BinaryIO, size: int, max_bytes: int
) -> tuple[dict[str, Any], dict[str, str], int]:
    """Entries by tensor, known to fill the file, the metadata, and where the tensors' bytes begin."""
    header, start = _parse(stream, size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _damaged("its metadata are not strings")
    end = 0
    for begin, over, claimed, name in sorted(_span(*item) for item in header.items()):
        if begin != end or claimed != over - begin:
            raise UnsafeFileError(
                f"A tensor must fill the bytes its header gives it; {name[:80]!r} claims {claimed} "
                f"bytes and has {max(over - begin, 0)} from {begin} (free from {end}).",
                AGAIN,
            )
        end = over
    _bound(end, max_bytes)
    if start + end != size:
        _damaged(f"its header describes {start + end} bytes and it has {size}")
    return header, metadata, start


def _parse(stream: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header, its names known to be distinct, and where the tensors' bytes begin."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise UnsafeFileError(
            f"A safetensors header must lie in the file and take at most {MAX_HEADER_BYTES} bytes; "
            f"this one claims {length} of {size}.",
            AGAIN,
        )
    try:
        header = json.loads(stream.read(length), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as problem:
        _damaged(f"its header is not JSON: {type(problem).__name__}", problem)
    if not isinstance(header, dict):
        _damaged("its header is not a JSON object")
    return header, 8 + length


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _span(name: str, entry: Any) -> tuple[int, int, int, str]:
    """Where a tensor's bytes begin and end, how many its shape claims, and its name."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            sizes = len(shape) <= MAX_DIMENSIONS and all(map(is_size, (*shape, begin, end)))
            if dtype in KINDS and sizes:
                return begin, end, math.prod(shape) * KINDS[dtype].itemsize, name
    _damaged(f"tensor {name[:80]!r} has no known dtype, shape or pair of offsets")


def _bound(claimed: int, max_bytes: int) -> None:
    if claimed > max_bytes:
        raise UnsafeFileError(
            f"Weights may take {max_bytes} bytes; this file claims {claimed}.",
            "Raise max_bytes for a large model.",
        )


def _damaged(why: str, cause: BaseException | None = None) -> NoReturn:
    raise CheckpointError(f"A safetensors file must be complete; {why}.", AGAIN) from cause


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
        rule = "A torch archive has one folder of distinct plain names"
        raise UnsafeFileError(f"{rule}; this one has duplicate or odd names.", EXPORT)
    return {match["record"]: m for match, m in zip(names, members, strict=True) if match}


def _load(stream: BinaryIO) -> Any:
    """torch's own reader with weights_only, after the file was checked; its many errors become two of
    ours.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        rule = "A checkpoint must load with weights_only=True; torch refused this one."
        raise UnsafeFileError(rule, EXPORT) from problem
    except (*UNREADABLE, *ENDED) as problem:
        said = f"torch must be able to read the file; it could not ({type(problem).__name__})."
        raise CheckpointError(said, AGAIN) from problem


def find_state(content: Any) -> dict[str, Tensor]:
    """The state dict in a loaded object: itself, or under one of the names in ``WRAPPERS``."""
    for _ in range(MAX_DEPTH):
        if not isinstance(content, dict):
            break
        # By the class: a file can give the object an attribute named ``items``.
        wrapper = next((k for k in WRAPPERS if isinstance(dict.get(content, k), dict)), None)
        if wrapper is None:
            return {name: t for name, t in dict.items(content) if isinstance(t, Tensor)}
        content = content[wrapper]
    held = type(content).__name__
    raise CheckpointError(
        f"A checkpoint must hold a dict of tensors; this one holds a {held}.", EXPORT
    )


def clean_state(
    state: dict[str, Tensor], held: int | None = None
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Checked float tensors of one dtype, the file's name for each, and what was converted.

    held: bytes of the file, which bounds what its tensors may take together; None for tensors that
    are in memory already.
    """
    if not state:
        raise CheckpointError("A checkpoint must hold tensors; this one has none.", EXPORT)
    for name in state:
        if not isinstance(name, str) or len(name) > MAX_NAME or not name.isprintable():
            raise CheckpointError(
                f"Tensors need printable names of at most {MAX_NAME} characters; got "
                f"{str(name)[:40]!r}.",
                EXPORT,
            )
    refuse_by_name(state)
    for name, tensor in state.items():
        _check_tensor(name, tensor)
    if len(state) > MAX_TENSORS:
        raise CheckpointError(
            f"A network may have {MAX_TENSORS} tensors; this one has {len(state)}.",
            "Save the weights of one network alone.",
        )
    found = {t.dtype for t in state.values()}
    dtype = torch.float64 if torch.float64 in found else torch.float32
    to = f"weights converted to {dtype}".replace("torch.", "")
    others = sorted(str(other).removeprefix("torch.") for other in found - {dtype})
    notes = [f"{other} {to}" for other in others]
    total = sum(t.numel() * dtype.itemsize for t in state.values())
    if held is not None and total > MAX_SHARING * held:
        raise UnsafeFileError(
            f"Tensors may share memory {MAX_SHARING}-fold; these claim {total} of {held} bytes.",
            "Save full copies: {name: t.clone() for name, t in state.items()}.",
        )
    short = _strip_prefixes(list(state))
    # Copies: tied weights and memory maps would make one tensor's change another's.
    owned = {
        short[name]: t.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        for name, t in state.items()
    }
    for name, tensor in owned.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"Weights must be finite; {name!r} has NaN or infinite entries.",
                "The training diverged or the file is damaged; use an earlier checkpoint.",
            )
    return owned, {ours: name for name, ours in short.items()}, notes


def _check_tensor(name: str, tensor: Tensor) -> None:
    """A tensor that attacks can use, and that holds what it claims: an expanded one would claim any size."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(
            f"Weights must be dense tensors with data; {name!r} is not.",
            "Convert it before saving, e.g. with .to_dense().",
        )
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"Weights must be real floating-point tensors; {name!r} is {tensor.dtype}.",
            "Leave it out, or convert it with .float() before saving.",
        )
    if tensor.numel() == 0:
        raise CheckpointError(
            f"Weights need entries; {name!r} is empty.", "Save the network again."
        )
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UnsafeFileError(
            f"A tensor must hold its elements; {name!r} of shape {list(tensor.shape)} has memory for "
            f"{tensor.untyped_storage().nbytes() // tensor.element_size()}.",
            "Save a full copy with .clone().",
        )


def _strip_prefixes(names: list[str]) -> dict[str, str]:
    """Each name without the prefixes that all of them share."""
    short = dict(zip(names, names, strict=True))
    while prefix := next((p for p in PREFIXES if all(s.startswith(p) for s in short.values())), ""):
        short = {name: s.removeprefix(prefix) for name, s in short.items()}
    return short
