"""A release as it lies on disk, opened without running any of it: what kind of file, and what it holds.

==========================  =======================================================================
a file that begins          is read as
==========================  =======================================================================
8 bytes, then ``{``         safetensors: its header; ``adapter_config.json`` beside it
``PK\x03\x04``              torch.save or TorchScript: the pickle in the archive, over inert values
``\x80``, or a known name   a pickle of torch, scikit-learn or anything else, likewise
a packer's mark             joblib's compressed pickles, unpacked as they are read, up to a limit
any, named ``.onnx``        the initialisers of an ONNX graph (extra ``onnx``)
==========================  =======================================================================

Numbers are read when they are asked for, so that a large checkpoint is looked through in no time.
"""

from __future__ import annotations

import bz2
import io
import json
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from residuum.errors import CheckpointError, MissingExtraError, UnsafeFileError
from residuum.io.inert import Block, Reader, Thing, refusal
from residuum.io.pickles import LEGACY_MAGIC, Storage
from residuum.io.safetensors_files import AGAIN, NUMBERS, checked_header
from residuum.io.torch_files import PICKLE_MAGIC, ZIP_MAGIC, refuse_other_archives
from residuum.records.inputs import may_hold, open_zip

DEFAULT_MAX_BYTES = 64 << 30  # only headers and pickles are read until numbers are asked for
MAX_PICKLED = 2 << 30  # bytes that a pickle with its arrays may unpack to: they stay in memory
MAX_DATA_PKL = 64 << 20  # of torch's archives, without the numbers
MAX_CONFIG = 1 << 20  # bytes of adapter_config.json
UNPACKING = 100 << 20  # memory of an unpacker
CHUNK = 1 << 20  # bytes that are allocated on a claim at a time
SUFFIXES = (
    ".pt", ".pth", ".ckpt", ".bin", ".tar", ".pkl", ".pickle", ".p", ".sav", ".joblib", ".gz", ".z",
    ".bz2", ".xz", ".lzma", ".model", ".safetensors", ".onnx", ".ts", ".jit", ".pth.tar",
)  # fmt: skip
PICKLES = (".pkl", ".pickle", ".p", ".sav", ".joblib", ".model", ".bin", ".pt", ".pth")
ADAPTER_CONFIG = "adapter_config.json"
OTHERS = {
    b"\x89HDF": (
        "an HDF5 file (Keras)",
        "Save the weights as safetensors: safetensors.numpy.save_file(...).",
    ),
    b"GGUF": ("a GGUF file", "Scan the checkpoint that it was made from."),
    b"\x04\x22\x4d\x18": (
        "packed with lz4",
        "Save it again: joblib.dump(model, path, compress=('zlib', 3)).",
    ),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", "Unpack it first."),
}
MAX_DEPTH = 5000  # of values in each other: no pickler writes as many
LONGEST = 120  # of a place, as it is shown
# Parts of a checkpoint whose values mean something else than elsewhere: optimisers, averaged copies.
OPTIMISERS = {"AdamOptimizer": ("ms", "vs"), "SGDOptimizer": ("velocities",)}
AVERAGES = re.compile(
    r"^(model_?)?(ema|swa|shadow|averaged)(_?(model|state_dict|params|weights|shadow))?$|"
    r"^(state_dict_ema|shadow_params)$",
    re.IGNORECASE,
)


@dataclass(frozen=True, eq=False)
class Release:
    """What one file holds.

    kind: torch, torchscript, pickle, safetensors or onnx.
    content: the tree of :mod:`.inert`, or the tensors by name.
    metadata: texts that stand beside.
    config: of the adapter that it is.
    unsafe: what loading the file would do besides making values, such as "call os.system".
    foreign: classes and functions of other packages that the file names.
    """

    path: Path
    kind: str
    content: Any
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    unsafe: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def open_release(path: str | Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Release:
    """Read a file. Nothing in it is executed.

    Raises:
        UnsafeFileError: if loading the file would run code, or if it asks for too much memory.
        CheckpointError: if the file cannot be read.
    """
    release = look_into(path, max_bytes)
    if release.unsafe:
        raise refusal(release.unsafe)
    return release


def look_into(path: str | Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Release:
    """Read a file as :func:`open_release` does, and list what loading it would run instead of refusing."""
    path = Path(path)
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise CheckpointError(f"A release is a file; {str(path)!r} {what}.", "Check the path.")
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise UnsafeFileError(
                    f"A release may have {max_bytes} bytes; {str(path)!r} has {size}.",
                    "Raise max_bytes for a large model.",
                )
            return _opened(path, stream, size)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise CheckpointError(
            f"A release must be readable; {str(path)!r} is not ({reason}).", "Check the file."
        ) from problem


def _opened(path: Path, stream: BinaryIO, size: int) -> Release:
    """By the first bytes, not by the suffix: people name files as they like. Protocols 0 and 1 of pickle
    have no magic number, so there the suffix decides.
    """
    head = stream.read(16)
    stream.seek(0)
    if path.suffix == ".onnx":
        return Release(path, "onnx", *_onnx(path))
    if head[8:9] == b"{":
        return Release(path, "safetensors", *_safetensors(path, stream, size), _config(path))
    if head.startswith(ZIP_MAGIC):
        return _zip(path, stream, size)
    for magic, (what, remedy) in OTHERS.items():
        if head.startswith(magic):
            raise CheckpointError(f"{path.name!r} is {what}, which is not read.", remedy)
    if head.startswith(PICKLE_MAGIC):
        return _pickle(path, stream, size)
    for magic, unpacker in UNPACKERS.items():
        if head.startswith(magic):
            return _pickle(path, stream, size, unpacker)
    if path.suffix in PICKLES and head[:1] in b"(]}cKIVSF" and head:  # protocols 0 and 1
        return _pickle(path, stream, size)
    raise CheckpointError(
        f"A release is a file of torch, safetensors, pickle, joblib or ONNX; {path.name!r} "
        f"{'is none of them' if size else 'is empty'}.",
        "Scan the file of weights itself.",
    )


class Source:
    """A stream that gives no more than ``limit`` bytes and allocates no claim before it is there."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream, self._limit, self.taken = stream, limit, 0

    def read(self, count: int) -> bytes:
        """Bytes, fewer at the end."""
        self.taken += count
        if self.taken > self._limit:
            raise ValueError("it ends before what it claims, or unpacks to more than it may")
        if count <= CHUNK:
            return self._stream.read(count)
        parts = []
        while count:
            part = self._stream.read(min(count, CHUNK))
            if not part:
                raise ValueError("it ends before what it claims")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def readline(self) -> bytes:
        """Of the text protocol."""
        line = self._stream.readline(CHUNK)
        self.taken += len(line)
        return line


class Unpacking(io.RawIOBase):
    """What a packed stream unpacks to, piece by piece."""

    def __init__(self, stream: BinaryIO, unpacker: Any) -> None:
        self._stream, self._unpacker, self._rest = stream, unpacker, b""

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of ``buffer``."""
        unpacker = self._unpacker
        try:
            while not unpacker.eof:
                hungry = getattr(unpacker, "needs_input", not self._rest)
                given = self._rest or (self._stream.read(1 << 16) if hungry else b"")
                found = unpacker.decompress(given, len(buffer))
                self._rest = getattr(unpacker, "unconsumed_tail", b"")
                if found:
                    buffer[: len(found)] = found
                    return len(found)
                if not given and hungry:
                    break
        except (zlib.error, lzma.LZMAError, OSError, EOFError) as problem:
            raise ValueError(f"it cannot be unpacked: {problem}") from problem
        return 0


UNPACKERS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
    b"\x78": lambda: zlib.decompressobj(15),
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ": lambda: lzma.LZMADecompressor(memlimit=UNPACKING),
    b"\x5d\x00": lambda: lzma.LZMADecompressor(memlimit=UNPACKING),
}


def _source(stream: BinaryIO, size: int, unpacker: Callable[[], Any] | None) -> Source:
    stream.seek(0)
    if unpacker is None:
        return Source(stream, size)
    unpacked = io.BufferedReader(Unpacking(stream, unpacker()), 1 << 16)
    return Source(unpacked, min(MAX_PICKLED, may_hold(size)))


def _without_arrays(stream: BinaryIO, size: int, unpacker: Callable[[], Any] | None) -> list[str]:
    """List what ``pickle.load`` would run in a file of joblib.

    It knows nothing of the numbers that follow an array and takes them for instructions.
    """
    reader = Reader(size, joblib=False)
    try:
        reader.run(_source(stream, size, unpacker))  # type: ignore[arg-type]
    except CheckpointError:  # as with every honest file: numbers are no instructions
        return []
    except UnsafeFileError:
        if not reader.unsafe:  # more work than a file may ask for
            raise
    return [*reader.unsafe]


def _pickle(
    path: Path, stream: BinaryIO, size: int, unpacker: Callable[[], Any] | None = None
) -> Release:
    """One pickle, or the five of torch's legacy format before its storages."""
    starts: dict[str, int] = {}

    def of(storage: Storage) -> bytes:
        with path.open("rb") as again:
            again.seek(starts[storage.key])
            return again.read(storage.nbytes)

    if size > MAX_PICKLED:
        raise UnsafeFileError(
            f"A pickle may have {MAX_PICKLED} bytes; {path.name!r} has {size}.", "Split it."
        )
    reader, source = Reader(size, of), _source(stream, size, unpacker)
    first = reader.run(source)  # type: ignore[arg-type]
    if first != LEGACY_MAGIC or unpacker is not None:
        unsafe = [*reader.unsafe]
        if reader.has_joblib_arrays:
            unsafe += _without_arrays(stream, size, unpacker)
        unsafe = [*dict.fromkeys(unsafe)]
        return Release(path, "pickle", first, unsafe=tuple(unsafe), foreign=tuple(reader.foreign))
    reader.run(source)  # type: ignore[arg-type]  # protocol
    reader.run(source)  # type: ignore[arg-type]  # what the writing machine was like
    content = reader.run(source)  # type: ignore[arg-type]
    keys = reader.run(source)  # type: ignore[arg-type]
    for key in keys if isinstance(keys, list) else ():
        if not isinstance(key, str) or (storage := reader.storages.get(key)) is None:
            raise CheckpointError("The file must list the storages it refers to.", AGAIN)
        starts[key] = stream.seek(8, io.SEEK_CUR)
        if starts[key] + storage.nbytes > size:
            raise CheckpointError("A storage must be in the file in full.", AGAIN)
        stream.seek(storage.nbytes, io.SEEK_CUR)
    if {*starts} != {*reader.storages}:
        raise CheckpointError("The file must list the storages it refers to.", AGAIN)
    return Release(
        path, "torch", content, unsafe=tuple(reader.unsafe), foreign=tuple(reader.foreign)
    )


def _zip(path: Path, stream: BinaryIO, size: int) -> Release:
    """A file of torch.save or TorchScript: its pickle is read inertly, then every storage is held to its
    claim.

    Names must be distinct whatever their case, since unpackers differ in which of two they take.
    Numbers are read again from the file when asked for, so that a scan holds none of them.
    """
    try:
        with open_zip(stream) as archive:
            members = archive.infolist()
            names = [member.filename for member in members]
            pickles = [
                name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")
            ]
            if len({name.casefold() for name in names}) != len(names):
                raise UnsafeFileError("An archive has distinct names.", AGAIN)
            refuse_other_archives(names)
            if len(pickles) != 1:
                raise CheckpointError(
                    f"A torch archive holds one data.pkl in its one folder; {path.name!r} does not.",
                    "Write it with torch.save.",
                )
            folder = pickles[0].removesuffix("data.pkl")
            by_name = {member.filename: member for member in members}
            script = f"{folder}constants.pkl" in by_name
            content = _stored(archive, by_name, pickles[0], MAX_DATA_PKL)
            if f"{folder}byteorder" in by_name:
                order = _stored(archive, by_name, f"{folder}byteorder", 100)
                if order != b"little":
                    raise CheckpointError("Numbers must be little endian; these are not.", AGAIN)

            def of(storage: Storage) -> bytes:
                with path.open("rb") as again, open_zip(again) as whole:
                    places = {m.filename: m for m in whole.infolist()}
                    name = f"{folder}data/{storage.key}"
                    name = name if name in places else f"{folder}constants/{storage.key}"
                    return _stored(whole, places, name, storage.nbytes)

            reader = Reader(len(content), of)
            source = Source(io.BytesIO(content), len(content))
            tree = reader.run(source)  # type: ignore[arg-type]
            for storage in reader.storages.values():
                record = by_name.get(f"{folder}data/{storage.key}")
                record = record or by_name.get(f"{folder}constants/{storage.key}")
                if record is None or record.file_size < storage.nbytes or record.file_size > size:
                    raise UnsafeFileError(
                        f"A storage must be in the file in full; {storage.key[:80]!r} is not.",
                        AGAIN,
                    )
            kind = "torchscript" if script else "torch"
            return Release(
                path, kind, tree, unsafe=tuple(reader.unsafe), foreign=tuple(reader.foreign)
            )
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, NotImplementedError) as problem:
        raise CheckpointError(
            f"{path.name!r} must be a complete zip archive; it is damaged ({problem}).",
            AGAIN,
        ) from problem


def _stored(
    archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str, most: int
) -> bytes:
    """A member that is not packed: its bytes are in the file."""
    member = members.get(name)
    if member is None or member.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"A torch archive stores its members uncompressed; {name[:80]!r} is missing or compressed.",
            "Write it with torch.save.",
        )
    if member.file_size > most:
        raise UnsafeFileError(
            f"{name[:80]!r} in a torch archive may have {most} bytes; it has {member.file_size}.",
            "Write it with torch.save.",
        )
    return archive.read(member)


def _safetensors(
    path: Path, stream: BinaryIO, size: int
) -> tuple[dict[str, Block], dict[str, str]]:
    header, metadata, start = checked_header(stream, size, DEFAULT_MAX_BYTES)

    def block(entry: dict[str, Any]) -> Block:
        kind, shape = NUMBERS[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]

        def read() -> Tensor:
            with path.open("rb") as again:
                again.seek(start + begin)
                raw = bytearray(again.read(end - begin))
            if not raw:
                return torch.zeros(shape, dtype=kind)
            return torch.frombuffer(raw, dtype=kind).reshape(shape)

        return Block(shape, str(kind).removeprefix("torch."), read)

    return {name: block(entry) for name, entry in header.items()}, metadata


def _config(path: Path) -> dict[str, Any]:
    """What stands in the adapter_config.json beside the file."""
    file = path.parent / ADAPTER_CONFIG
    if not file.is_file() or file.stat().st_size > MAX_CONFIG:
        return {}
    try:
        found = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _onnx(path: Path) -> tuple[dict[str, Block], dict[str, str]]:
    """Initializers of a graph by name, and its metadata. Numbers in other files are not followed."""
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError:
        raise MissingExtraError(
            "An ONNX graph needs the extra 'onnx'; it is not installed.",
            'In a clone of residuum: pip install ".[onnx]"',
        ) from None
    if path.stat().st_size > MAX_PICKLED:
        raise UnsafeFileError(f"{path.name!r} is larger than {MAX_PICKLED} bytes.", "Split it.")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as problem:  # protobuf's own errors have no common base
        raise CheckpointError(
            f"{path.name!r} must be an ONNX graph; it cannot be read ({type(problem).__name__}).",
            AGAIN,
        ) from problem

    def block(tensor: Any) -> Block:
        def read() -> Tensor:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise ValueError("its numbers are in another file")
            return torch.from_numpy(numpy_helper.to_array(tensor).copy())

        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        return Block(
            tuple(tensor.dims), {"float": "float32", "double": "float64"}.get(kind, kind), read
        )

    metadata = {entry.key: entry.value for entry in model.metadata_props}
    metadata |= {k: v for k in ("producer_name", "doc_string") if (v := getattr(model, k, ""))}
    return {tensor.name: block(tensor) for tensor in model.graph.initializer}, metadata


def is_release(path: Path) -> bool:
    """Whether a file's name is one that models bear."""
    return path.name.lower().endswith(SUFFIXES)


class Place(NamedTuple):
    """A value in the tree: its path, its own name, the class of the object it belongs to."""

    path: str
    name: str
    owner: str
    value: Any
    inside: str = ""  # the part of a checkpoint that it lies in: "state" of an optimiser, "average"

    @property
    def leaf(self) -> str:
        """The last part of the name: that of ``layer1.0.bn.running_mean`` is ``running_mean``."""
        return self.name.rpartition(".")[2]


def walk(tree: Any) -> Iterator[Place]:
    """Every place of a tree once, parents before their parts, however often or deep they are held."""
    waiting = [iter((Place("", "", "", tree),))]
    seen: set[int] = set()
    while waiting:
        place = next(waiting[-1], None)
        if place is None:
            waiting.pop()
            continue
        value = place.value
        if isinstance(value, dict | list | tuple | Thing | Block):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if len(waiting) > MAX_DEPTH:
                raise UnsafeFileError(
                    f"Values may lie {MAX_DEPTH} deep in each other; in this file they lie deeper.",
                    "Scan the parts of this model one by one.",
                )
            waiting.append(_parts(place))
        yield place


def _parts(place: Place) -> Iterator[Place]:
    """The places directly below one, with what they are inside of: optimiser state, an average, a step
    count.

    That is inherited downwards, and told by the shape of what trainers save: ``state`` beside
    ``param_groups``, an optimiser's class, names such as ``ema``.
    """
    value, inside = place.value, place.inside
    if isinstance(value, Thing):
        owner = value.short
        if owner in OPTIMISERS:
            inside = "state"
        for name, part in value.attributes.items():
            yield Place(joined(place.path, name), name, owner, part, inside)
        rest = [value.entries, value.items, value.arguments]
        if not isinstance(value.state, dict):
            rest.append(value.state)
        for part in rest:
            if part:
                yield Place(place.path, place.name, owner, part, inside)
    elif isinstance(value, dict):
        if "state" in value and "param_groups" in value:
            inside = "state"
        for key, part in value.items():
            name = str(key)[:200] if isinstance(key, str | int) else "?"
            within = "average" if any(map(AVERAGES.match, name.split("."))) else inside
            within = "step" if inside == "state" and name == "step" else within
            yield Place(joined(place.path, name), name, place.owner, part, within)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield Place(f"{place.path}[{i}]"[:LONGEST], place.name, place.owner, part, inside)


def joined(path: str, name: str) -> str:
    """The path of a part, as it is shown."""
    return (f"{path}.{name}" if path else name)[:LONGEST]
