"""What goes in: samples as the network receives them, what is released, and what an attacker is told.

Everything else about the data stays unknown to the attack: :class:`Checkpoint` and :class:`Knowledge` are
all that it has.

Samples come as .npz files from anywhere. The directory of a zip archive is measured before anything parses
it: one of a few megabytes can name a hundred thousand members, or carry extra fields that take quadratic
time to walk; two directories can show two readers different members.
"""

from __future__ import annotations

import io
import math
import struct
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from residuum.errors import DataError, UnsafeFileError
from residuum.records.base import Record
from residuum.records.rundir import write_atomic

MAX_BYTES = 4 << 30  # that a file may unpack to
SMALL_BYTES = 128 << 20  # that it may take whatever its size: any machine has that
MAX_GROWTH = 200  # of a packed file read as float64; MNIST reaches 40, in black and white 170
MAX_ARRAYS = 500  # more than anybody names
MAX_HEADER = 1000  # characters of an array's description; 118 are usual
TEXT_BYTES = 64  # what Python needs for a text beside its letters
# What zipfile and numpy raise on damaged files.
_UNREADABLE = (OSError, ValueError, EOFError, MemoryError, RuntimeError, SyntaxError)
_BROKEN = (zipfile.BadZipFile, zlib.error, tokenize.TokenError)
NUMBERS = ("x", "y", "mean", "scale", "offset")  # arrays of a data file
TEXTS = ("classes", "features", "units")
TASKS = ("binary", "multiclass", "regression")
MAX_DIRECTORY_BYTES = 1 << 20  # about 13 000 members of torch.save
END = struct.Struct("<4s4H2IH")
END_64 = struct.Struct("<4sQ2H2I4Q")  # zip64 writes this and a locator before END
LOCATOR = struct.Struct("<4sIQI")

# Rules of the length of a field, each with its remedy.
ONE_PER_SAMPLE = ("have one entry per sample", "Save one identifier per row of x.")
ONE_PER_COLUMN = ("name every column", "Save one name per column, in the order of x.")
ONE_OR_ONE_PER_COLUMN = (
    "be one number or one per column",
    "Save what x was divided by as 'scale', what was subtracted before as 'offset'.",
)


@dataclass(frozen=True, eq=False)
class Dataset(Record):
    """Samples exactly as the network receives them.

    x: (n, *shape) floating.
    y: (n,) labels -1/+1, class indices, or regression targets (n,) / (n, k).
    mean: (*shape) what was subtracted, to be added back for display; None when nothing was.
    features, units: of the columns of a table.
    scale, offset: (*shape) a value as a person knows it is (x + mean) scale + offset.
    notes: what was recognized while reading, one sentence each.
    row_numbers: (n,) row of each sample in the file or array that the user gave, counted from 0;
        None if every row is there in order.
    record_ids: the user's own identifier of each sample, from an ID column; () if there is none.
    """

    x: Tensor
    y: Tensor
    mean: Tensor | None = None
    name: str = ""
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    scale: Tensor | None = None
    offset: Tensor | None = None
    notes: tuple[str, ...] = ()
    row_numbers: Tensor | None = None
    record_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) == 0:
            raise DataError("A dataset needs at least one sample; this one is empty.", "Check n.")
        if len(self.x) != len(self.y):
            raise DataError(
                f"x and y must have equally many rows; got {len(self.x)} and {len(self.y)}.",
                "Save them from the same arrays.",
            )
        columns = self.x[0].numel()
        for name, sizes, rule, remedy in (
            ("row_numbers", (0, len(self)), *ONE_PER_SAMPLE),
            ("record_ids", (0, len(self)), *ONE_PER_SAMPLE),
            ("features", (0, columns), *ONE_PER_COLUMN),
            ("units", (0, columns), *ONE_PER_COLUMN),
            ("scale", (1, columns), *ONE_OR_ONE_PER_COLUMN),
            ("offset", (1, columns), *ONE_OR_ONE_PER_COLUMN),
        ):
            value = getattr(self, name)
            size = value.numel() if isinstance(value, Tensor) else len(value or ())
            if value is not None and size not in sizes:
                raise DataError(f"{name!r} must {rule}, {sizes[1]}; got {size}.", remedy)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def rows(self) -> list[int]:
        """The row number of each sample in the user's file, counted from 0."""
        return list(range(len(self))) if self.row_numbers is None else self.row_numbers.tolist()

    def take(self, rows: Tensor) -> Self:
        """Return the samples at ``rows`` (positions or a mask), with their row numbers and IDs."""
        positions = torch.arange(len(self))[rows]
        numbers = torch.tensor(self.rows)[positions]
        ids = tuple(self.record_ids[i] for i in positions.tolist()) if self.record_ids else ()
        return self.replace(
            x=self.x[positions], y=self.y[positions], row_numbers=numbers, record_ids=ids
        )

    @property
    def images(self) -> Tensor:
        """Samples as a person would look at them: the mean added back."""
        return with_mean(self.x, self.mean)

    def to_npz(self, path: str | Path) -> Path:
        """Write ``x``, ``y`` and whatever else is known to an .npz archive."""
        tensors = {name: getattr(self, name) for name in NUMBERS}
        texts = {name: getattr(self, name) for name in TEXTS} | {"id": self.record_ids}
        arrays = {name: t.numpy(force=True) for name, t in tensors.items() if t is not None}
        return write_npz(path, arrays | {name: np.array(t) for name, t in texts.items() if t})

    @classmethod
    def from_npz(cls, path: str | Path) -> Self:
        """Read what :meth:`to_npz` wrote, or any .npz with ``x`` and ``y``; never unpickles."""
        arrays = read_npz(path)
        if missing := {"x", "y"} - arrays.keys():
            raise DataError(
                f"A data file needs arrays 'x' and 'y'; {str(path)!r} lacks {sorted(missing)}.",
                f"It holds {sorted(arrays)}; save it with numpy.savez(path, x=..., y=...).",
            )
        return cls.from_arrays(arrays, path)

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], path: str | Path) -> Self:
        """The dataset of arrays as :meth:`to_npz` names them; path: whose they are, for messages."""
        for name in filter(arrays.__contains__, NUMBERS):
            if arrays[name].dtype.kind == "U" or not np.isfinite(arrays[name]).all():
                raise DataError(
                    f"{name!r} must hold finite numbers; in {str(path)!r} it holds text, NaN or Inf.",
                    "Drop such rows; save class indices as y, and their names as classes.",
                )
        x = torch.from_numpy(arrays["x"])
        x = x if x.is_floating_point() else x.double()
        if x.ndim < 2 or arrays["y"].ndim < 1:
            raise DataError(
                f"'x' must be (n, ...) and 'y' (n,); got shapes {tuple(x.shape)} and "
                f"{arrays['y'].shape} in {str(path)!r}.",
                "One row per sample.",
            )
        mean = torch.from_numpy(arrays["mean"]).to(x.dtype) if "mean" in arrays else None
        if mean is not None and mean.shape not in ((), x.shape[1:]):
            raise DataError(
                f"'mean' must have the shape of a sample, {tuple(x.shape[1:])}; got {tuple(mean.shape)}.",
                "Save the mean image that was subtracted.",
            )
        known: dict[str, Any] = {}
        for name in filter(arrays.__contains__, TEXTS):
            known[name] = tuple(map(str, arrays[name].ravel()))
        for name in filter(arrays.__contains__, ("scale", "offset")):
            known[name] = torch.from_numpy(arrays[name]).to(x.dtype)
        if "id" in arrays:
            known["record_ids"] = tuple(map(str, arrays["id"].ravel()))
        return cls(x, torch.from_numpy(arrays["y"]), mean, Path(path).stem, **known)


@dataclass(frozen=True, eq=False)
class Split(Record):
    """Training samples and a disjoint held-out set, preprocessed alike.

    available: samples of the source that the training samples were chosen from; 0 when not known.
    """

    train: Dataset
    holdout: Dataset
    available: int = 0


def read_npz(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, np.ndarray]:
    """Numeric and string arrays of an .npz archive, sizes checked before anything is unpacked.

    An archive of some kilobytes may claim gigabytes, overlap its members or name one twice. What it
    claims is compared with ``max_bytes`` and with its own size first, then with what its array headers
    say.
    """
    try:
        if not Path(path).is_file():
            raise DataError(f"No data file at {str(path)!r}.", "Check the path.")
        with Path(path).open("rb") as stream, open_zip(stream) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            if not len(members) == len(archive.infolist()) <= MAX_ARRAYS:
                raise ValueError(f"it may hold {MAX_ARRAYS} arrays of different names")
            packed = stream.seek(0, io.SEEK_END)
            if sum(member.compress_size for member in members.values()) > packed:
                raise ValueError("its members overlap")
            unpacked = sum(member.file_size for member in members.values())
            if unpacked > max_bytes:
                raise UnsafeFileError(
                    f"A data file may unpack to {max_bytes} bytes; {str(path)!r} claims {unpacked}.",
                    "Save fewer samples.",
                )
            held = sum(_claim(name, archive, member) for name, member in members.items())
            if held > may_hold(packed):
                raise UnsafeFileError(
                    f"A data file may take {SMALL_BYTES} bytes in memory or {MAX_GROWTH} times its "
                    f"own; {str(path)!r} of {packed} bytes claims {held}.",
                    "Save it uncompressed, with numpy.savez(path, x=..., y=...).",
                )
            return {name: _unpack(archive, member) for name, member in members.items()}
    except (*_UNREADABLE, *_BROKEN) as problem:
        raise DataError(
            f"{str(path)!r} must be an .npz archive of plain arrays; reading it failed "
            f"({str(problem)[:200]}).",
            "Save it with numpy.savez(path, x=..., y=...).",
        ) from problem


def write_npz(path: str | Path, arrays: dict[str, np.ndarray]) -> Path:
    """Packed, unless that would make of it what :func:`read_npz` refuses."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    if 8 * sum(array.size for array in arrays.values()) > may_hold(buffer.tell()):
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
    return write_atomic(path, buffer.getvalue())


def may_hold(packed: int) -> int:
    """Bytes that numbers from a file of ``packed`` bytes may take as float64."""
    return max(SMALL_BYTES, MAX_GROWTH * packed)


def _claim(name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """Bytes that an array takes once it is read, by its header, which must fit the member's size."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it is packed in a way that numpy does not write")
    with archive.open(member) as stream:
        first = npy.read_magic(stream) == (1, 0)
        header = npy.read_array_header_1_0 if first else npy.read_array_header_2_0
        shape, _, dtype = header(stream, max_header_size=MAX_HEADER)
        start = stream.tell()
    if dtype.kind not in "fiubU":
        raise DataError(
            f"Arrays of a data file must be real numbers or text; {name[:80]!r} is {str(dtype)[:80]}.",
            "Convert it before saving.",
        )
    if min(shape, default=0) < 0 or start + math.prod(shape) * dtype.itemsize != member.file_size:
        raise ValueError(
            f"{name[:80]!r} claims the shape {str(shape)[:80]} in {member.file_size} bytes"
        )
    each = dtype.itemsize + TEXT_BYTES if dtype.kind == "U" else max(dtype.itemsize, 8)
    return math.prod(shape) * each


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One array in this machine's byte order, and no wider than torch can take; its CRC must fit."""
    with archive.open(member) as stream:
        array = npy.read_array(stream, allow_pickle=False)
    kind = array.dtype.newbyteorder("=")
    return array.astype(np.float64 if kind == np.longdouble else kind, copy=False)


def is_size(value: Any) -> bool:
    """Whether a number from a file can be a length or a place in it."""
    return type(value) is int and 0 <= value < 2**63


def with_mean(x: Tensor, mean: Tensor | None) -> Tensor:
    """One sample or several as a person would look at them: a mean of one or many values added."""
    if mean is None:
        return x
    whole = x.shape if mean.numel() == x.numel() else x.shape[1:]
    return x + mean.to(x).reshape(() if mean.numel() == 1 else whole)


def samples_file(path: Path, name: str) -> Path:
    """An .npz, or ``private/name`` in a training directory."""
    if not path.is_dir():
        return path
    if not (path / "private" / name).is_file():
        raise DataError(
            f"A training directory must hold private/{name}; {str(path)!r} does not.",
            "Name an .npz with x and y.",
        )
    return path / "private" / name


def own_data(checkpoint: Path, given: Path | None = None) -> Path:
    """The samples ``given``, or else those that a training directory was trained on."""
    if given is None and not (checkpoint / "private" / "train.npz").is_file():
        raise DataError(
            f"A certificate needs the samples; {str(checkpoint)!r} has no private/train.npz.",
            "Pass --data FILE.npz.",
        )
    return samples_file(given or checkpoint, "train.npz")


def open_zip(stream: BinaryIO) -> zipfile.ZipFile:
    """The archive in ``stream``, which must end in its one directory, and that of a sane length.

    Readers disagree about archives with bytes after the directory or with two of them: what was checked
    here could then differ from what torch or numpy reads.
    """
    end = stream.seek(0, io.SEEK_END) - END.size
    wide = END_64.size + LOCATOR.size
    stream.seek(max(end - wide, 0))
    tail = stream.read()
    before, last = tail[: -END.size], tail[-END.size :]
    if not last.startswith(b"PK\x05\x06") or len(last) < END.size:
        raise zipfile.BadZipFile("it does not end in its directory")
    *_, length, start, comment = END.unpack(last)
    if before[-LOCATOR.size :].startswith(b"PK\x06\x07"):  # what zipfile and torch go by
        if not before.startswith(b"PK\x06\x06") or len(before) < wide:
            raise zipfile.BadZipFile("its directory has no end")
        *_, length, start = END_64.unpack(before[: END_64.size])
        end -= wide
    if comment or start + length != end:
        raise zipfile.BadZipFile("it does not end in its directory")
    if length > MAX_DIRECTORY_BYTES:
        raise UnsafeFileError(
            f"The directory of an archive may have {MAX_DIRECTORY_BYTES} bytes; this one has {length}.",
            "Save fewer, larger arrays.",
        )
    return zipfile.ZipFile(stream)
