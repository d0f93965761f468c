"""Samples as the network receives them, and their .npz files.

An .npz file is a zip archive, and it can come from an untrusted source. So the size of the directory (list of
members) of the archive is checked before the directory is parsed. A directory of a few megabytes can name a
hundred thousand members, or have extra fields that take quadratic time to parse. If an archive has two
directories, two programs can read different members.
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
from residuum.records.tables import Table

MAX_BYTES = 4 << 30  # largest size of an unpacked data file, in bytes
# If the arrays of a data file take at most this many bytes of memory, any compression ratio is accepted.
SMALL_BYTES = 128 << 20
# Largest ratio of the memory of the arrays (as float64) to the size of a compressed data file. The ratio is
# 40 for MNIST, and 170 for MNIST with only black and white pixels.
MAX_GROWTH = 200
MAX_ARRAYS = 500  # largest number of arrays in a data file, more than a dataset needs
MAX_HEADER = 1000  # largest header of an .npy array in characters; 118 are typical
TEXT_BYTES = 64  # bytes that Python needs for a string in addition to its characters
# Exceptions of zipfile and numpy for damaged files.
_UNREADABLE = (OSError, ValueError, EOFError, MemoryError, RuntimeError, SyntaxError)
_BROKEN = (zipfile.BadZipFile, zlib.error, tokenize.TokenError)
NUMBERS = ("x", "y", "mean", "scale", "offset")  # names of the arrays of numbers in a data file
TEXTS = ("classes", "features", "units")  # names of the arrays of texts in a data file
TASKS = ("binary", "multiclass", "regression")
# Largest directory of a zip archive. It suffices for about 13 000 tensors of torch.save.
MAX_DIRECTORY_BYTES = 1 << 20
END = struct.Struct("<4s4H2IH")  # record at the end of a zip archive, after its directory
# Record that describes the directory of a large (zip64) archive. It lies between the directory and LOCATOR.
END_64 = struct.Struct("<4sQ2H2I4Q")
# Record that stores the position of END_64 in a large (zip64) archive. It lies between END_64 and END.
LOCATOR = struct.Struct("<4sIQI")

# Texts of the error for a dataset field with a wrong number of entries: the rule, and the advice.
ONE_PER_SAMPLE = ("have one entry per sample", "Save one identifier per row of x.")
ONE_PER_COLUMN = ("name every column", "Save one name per column, in the order of x.")
ONE_OR_ONE_PER_COLUMN = (
    "be one number or one per column",
    "Save the divisor of x as 'scale', and the number that was subtracted before as 'offset'.",
)


@dataclass(frozen=True, eq=False)
class Dataset(Record):
    """Samples and labels, exactly as the network receives them.

    Attributes:
        x: Samples in floating point, (n, *shape).
        y: Labels -1/+1 or class indices (n,), or regression targets (n,) or (n, k).
        mean: The mean that was subtracted from the samples, (*shape), or None. It is added again for display.
        name: Name of the dataset.
        classes: Names of the classes.
        features: Names of the columns of a table.
        units: Units of the columns of a table.
        scale: Factor that converts x to original units, (*shape), see ``offset``.
        offset: Summand that converts x to original units: a value is (x + mean) * scale + offset, (*shape).
        notes: Sentences about how the samples were read.
        row_numbers: Row of each sample in the file or array of the user, counted from 0, (n,), or None if the
            dataset contains all rows in order.
        record_ids: Identifier of each sample from an ID column, or () without such a column.
        texts: The text from which each sample was made, such as the sentence of an embedding, or ().
        table: The table from which the samples were read, with all rows and columns, or None if they were not
            read from a table. The row of a sample is its row number.
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
    texts: tuple[str, ...] = ()
    table: Table | None = None

    def __post_init__(self) -> None:
        if len(self.x) == 0:
            raise DataError(
                "A dataset must have at least one sample; this one is empty.",
                "Pass one or more samples.",
            )
        if len(self.x) != len(self.y):
            raise DataError(
                f"'x' and 'y' must have the same number of rows; got {len(self.x)} and {len(self.y)}.",
                "Save one label per sample.",
            )
        column_count = self.x[0].numel()  # 0 for a table in which all columns are texts
        for name, sizes, rule, remedy in (
            ("row_numbers", (0, len(self)), *ONE_PER_SAMPLE),
            ("record_ids", (0, len(self)), *ONE_PER_SAMPLE),
            ("texts", (0, len(self)), *ONE_PER_SAMPLE),
            ("features", (0, column_count), *ONE_PER_COLUMN),
            ("units", (0, column_count), *ONE_PER_COLUMN),
            ("scale", (1, column_count), *ONE_OR_ONE_PER_COLUMN),
            ("offset", (1, column_count), *ONE_OR_ONE_PER_COLUMN),
        ):
            field_value = getattr(self, name)
            entry_count = (
                field_value.numel() if isinstance(field_value, Tensor) else len(field_value or ())
            )
            if field_value is not None and entry_count not in sizes:
                raise DataError(
                    f"The fields of a dataset must have matching sizes; the field {name!r} must {rule} "
                    f"({sizes[1]} entries), but it has {entry_count} entries.",
                    remedy,
                )

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def rows(self) -> list[int]:
        """Row number of each sample in the user's file, counted from 0."""
        return list(range(len(self))) if self.row_numbers is None else self.row_numbers.tolist()

    def take(self, rows: Tensor) -> Self:
        """Return a dataset of the samples at ``rows`` (positions or a mask), with row numbers and IDs."""
        positions = torch.arange(len(self))[rows]
        row_numbers = torch.tensor(self.rows)[positions]
        record_ids, texts = (
            tuple(values[i] for i in positions.tolist()) if values else ()
            for values in (self.record_ids, self.texts)
        )
        return self.replace(
            x=self.x[positions],
            y=self.y[positions],
            row_numbers=row_numbers,
            record_ids=record_ids,
            texts=texts,
        )

    @property
    def images(self) -> Tensor:
        """Samples for display: x plus the mean that was subtracted."""
        return add_mean(self.x, self.mean)

    def to_npz(self, path: str | Path) -> Path:
        """Write the dataset to an .npz archive and return the path."""
        tensors = {name: getattr(self, name) for name in NUMBERS}
        texts = {name: getattr(self, name) for name in TEXTS}
        texts |= {"id": self.record_ids, "text": self.texts}
        arrays = {name: t.numpy(force=True) for name, t in tensors.items() if t is not None}
        return write_npz(path, arrays | {name: np.array(t) for name, t in texts.items() if t})

    @classmethod
    def from_npz(cls, path: str | Path) -> Self:
        """Read an .npz archive with ``x`` and ``y``, such as one of :meth:`to_npz`.

        The archive is read without pickle, so no code from the file can run.

        Args:
            path: The archive.

        Returns:
            The dataset.

        Raises:
            DataError: If the archive lacks an array or has unusable values.
        """
        arrays = read_npz(path)
        if missing := {"x", "y"} - arrays.keys():
            raise DataError(
                f"A data file must have the arrays 'x' and 'y'; the file {str(path)!r} lacks "
                f"{sorted(missing)}.",
                f"The file has the arrays {sorted(arrays)}. Save the file again with numpy.savez(path, "
                "x=..., y=...).",
            )
        return cls.from_arrays(arrays, path)

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], path: str | Path) -> Self:
        """Make a dataset from named arrays.

        Args:
            arrays: Arrays by the names that :meth:`to_npz` uses.
            path: The file that the arrays come from, for messages.

        Returns:
            The dataset.

        Raises:
            DataError: If an array has unusable values or a wrong shape.
        """
        for name in filter(arrays.__contains__, NUMBERS):
            if arrays[name].dtype.kind == "U" or not np.isfinite(arrays[name]).all():
                raise DataError(
                    f"The array {name!r} must hold finite numbers; in the file {str(path)!r}, it contains "
                    "text, NaN or Inf.",
                    "Remove the rows with such values. If y holds class names, save class indices as y, and "
                    "the names as the array 'classes'.",
                )
        x = torch.from_numpy(arrays["x"])
        x = x if x.is_floating_point() else x.double()
        if x.ndim < 2 or arrays["y"].ndim < 1:
            raise DataError(
                "The arrays 'x' and 'y' must have one row for each of the n samples; 'x' has the shape "
                f"{tuple(x.shape)} and 'y' the shape {arrays['y'].shape} in the file {str(path)!r}.",
                "Save one row per sample.",
            )
        mean = torch.from_numpy(arrays["mean"]).to(x.dtype) if "mean" in arrays else None
        if mean is not None and mean.shape not in ((), x.shape[1:]):
            raise DataError(
                f"The array 'mean' must have the shape of a sample, {tuple(x.shape[1:])}; got an array of "
                f"shape {tuple(mean.shape)}.",
                "Save the mean image that was subtracted.",
            )
        fields: dict[str, Any] = {}
        for name in filter(arrays.__contains__, TEXTS):
            fields[name] = tuple(map(str, arrays[name].ravel()))
        for name in filter(arrays.__contains__, ("scale", "offset")):
            fields[name] = torch.from_numpy(arrays[name]).to(x.dtype)
        for name, array_name in (("record_ids", "id"), ("texts", "text")):
            if array_name in arrays:
                fields[name] = tuple(map(str, arrays[array_name].ravel()))
        return cls(x, torch.from_numpy(arrays["y"]), mean, Path(path).stem, **fields)


@dataclass(frozen=True, eq=False)
class Split(Record):
    """Training samples and a disjoint held-out set with the same preprocessing.

    Attributes:
        train: Training samples.
        holdout: The held-out set.
        available: Number of samples from which the training samples were chosen, or 0 if this number is not
            known.
    """

    train: Dataset
    holdout: Dataset
    available: int = 0


def read_npz(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, np.ndarray]:
    """Read the numeric and string arrays of an .npz archive, and check sizes before unpacking.

    A malicious archive of some kilobytes may claim gigabytes, or contain overlapping or repeated members.
    So the claimed sizes are compared with ``max_bytes``, with the size of the archive and with the headers
    of the arrays. An archive that claims too much memory raises an ``UnsafeFileError``.

    Args:
        path: The archive.
        max_bytes: Maximum size of the unpacked file.

    Returns:
        Arrays by name.

    Raises:
        DataError: If the file is missing or is not an archive of plain arrays.
    """
    try:
        if not Path(path).is_file():
            raise DataError(
                f"A data file must exist; there is no file at the path {str(path)!r}.",
                "Check the path.",
            )
        with Path(path).open("rb") as stream, open_zip(stream) as archive:
            members = _check_members(archive, stream, path, max_bytes)
            return {name: _unpack(archive, member) for name, member in members.items()}
    except (*_UNREADABLE, *_BROKEN) as problem:
        raise DataError(
            f"The data file {str(path)!r} must be an .npz archive of plain arrays; reading the file failed "
            f"({str(problem)[:200]}).",
            "Save it with numpy.savez(path, x=..., y=...).",
        ) from problem


def write_npz(path: str | Path, arrays: dict[str, np.ndarray]) -> Path:
    """Write an .npz archive. It is compressed unless :func:`read_npz` would refuse the compressed file.

    The function ``read_npz`` refuses small files whose arrays take much memory (:func:`max_memory`).

    Args:
        path: The archive.
        arrays: Arrays by name.

    Returns:
        The path.
    """
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    if 8 * sum(array.size for array in arrays.values()) > max_memory(buffer.tell()):
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
    return write_atomic(path, buffer.getvalue())


def max_memory(packed: int) -> int:
    """Return how many bytes of memory the arrays of a compressed file of ``packed`` bytes may take."""
    return max(SMALL_BYTES, MAX_GROWTH * packed)


def _check_members(
    archive: zipfile.ZipFile, stream: BinaryIO, path: str | Path, max_bytes: int
) -> dict[str, zipfile.ZipInfo]:
    """Check the sizes that an archive claims, and return its members by the names of the arrays."""
    members_by_name = {
        member.filename.removesuffix(".npy"): member for member in archive.infolist()
    }
    if not len(members_by_name) == len(archive.infolist()) <= MAX_ARRAYS:
        raise ValueError(f"an archive must hold at most {MAX_ARRAYS} arrays, with different names")
    file_bytes = stream.seek(0, io.SEEK_END)
    if sum(member.compress_size for member in members_by_name.values()) > file_bytes:
        raise ValueError("the members of the archive overlap")
    unpacked_bytes = sum(member.file_size for member in members_by_name.values())
    if unpacked_bytes > max_bytes:
        raise UnsafeFileError(
            f"The unpacked arrays of a data file may have at most {max_bytes} bytes; according to its "
            f"headers, the file {str(path)!r} unpacks to {unpacked_bytes} bytes.",
            "Save fewer samples.",
        )
    memory_bytes = sum(
        _check_member(name, archive, member) for name, member in members_by_name.items()
    )
    if memory_bytes > max_memory(file_bytes):
        raise UnsafeFileError(
            f"The arrays of a data file must take at most {SMALL_BYTES} bytes of memory, or {MAX_GROWTH} "
            f"times the size of the file if that is more; the file {str(path)!r} has {file_bytes} bytes, "
            f"and its arrays would take {memory_bytes} bytes.",
            "Save the arrays uncompressed, with numpy.savez(path, x=..., y=...).",
        )
    return members_by_name


def _check_member(name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """Check the header of an array against its size, and return the memory that the array takes."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("the archive uses a compression that numpy does not write")
    with archive.open(member) as stream:
        is_version_1 = npy.read_magic(stream) == (1, 0)
        read_header = npy.read_array_header_1_0 if is_version_1 else npy.read_array_header_2_0
        shape, _, dtype = read_header(stream, max_header_size=MAX_HEADER)
        data_start = stream.tell()
    if dtype.kind not in "fiubU":
        raise DataError(
            f"Arrays in a data file must hold real numbers or text; the array {name[:80]!r} has the type "
            f"{str(dtype)[:80]}.",
            "Convert the array before you save it.",
        )
    if (
        min(shape, default=0) < 0
        or data_start + math.prod(shape) * dtype.itemsize != member.file_size
    ):
        raise ValueError(
            f"{name[:80]!r} claims the shape {str(shape)[:80]} in {member.file_size} bytes"
        )
    is_text = dtype.kind == "U"
    bytes_per_value = dtype.itemsize + TEXT_BYTES if is_text else max(dtype.itemsize, 8)
    return math.prod(shape) * bytes_per_value


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Read an array of an archive, check its CRC, and convert it to a dtype that PyTorch supports."""
    with archive.open(member) as stream:
        array = npy.read_array(stream, allow_pickle=False)
    native_dtype = array.dtype.newbyteorder("=")
    return array.astype(np.float64 if native_dtype == np.longdouble else native_dtype, copy=False)


def is_size(value: Any) -> bool:
    """Return True if a value is an integer that can be a size or an offset in a file."""
    return type(value) is int and 0 <= value < 2**63


def add_mean(x: Tensor, mean: Tensor | None) -> Tensor:
    """Add a mean to samples for display.

    Args:
        x: A single sample (*shape), or samples (n, *shape).
        mean: A single number, a value per entry, or None for no mean.

    Returns:
        The samples in the shape of ``x``.
    """
    if mean is None:
        return x
    shape = x.shape if mean.numel() == x.numel() else x.shape[1:]
    return x + mean.to(x).reshape(() if mean.numel() == 1 else shape)


def find_samples_file(path: Path, name: str) -> Path:
    """Return the path of a file of samples.

    Args:
        path: A file, or a training directory.
        name: Name of the file in the folder ``private`` of a training directory.

    Returns:
        ``path`` if it is a file, else ``path/private/name``.

    Raises:
        DataError: If the directory has no such file.
    """
    if not path.is_dir():
        return path
    if not (path / "private" / name).is_file():
        raise DataError(
            f"A directory that `residuum train` wrote must contain the file private/{name}; the directory "
            f"{str(path)!r} does not.",
            "Pass an .npz file with the arrays 'x' and 'y'.",
        )
    return path / "private" / name


def find_training_samples(checkpoint: Path, data: Path | None = None) -> Path:
    """Return the path of the training samples for a certificate.

    Args:
        checkpoint: A weights file or a training directory.
        data: A file of samples, or None to use the samples of the training directory.

    Returns:
        Path of the samples.

    Raises:
        DataError: If the training directory has no samples and ``data`` is None.
    """
    if data is None and not (checkpoint / "private" / "train.npz").is_file():
        raise DataError(
            f"A certificate is computed from the training samples; the directory {str(checkpoint)!r} has no "
            "file private/train.npz with these samples.",
            "Pass --data FILE.npz.",
        )
    return find_samples_file(data or checkpoint, "train.npz")


def open_zip(stream: BinaryIO) -> zipfile.ZipFile:
    """Open a zip archive that ends with a single directory of a reasonable size.

    Programs disagree about archives with bytes after the directory or with two directories. PyTorch or numpy
    could read other members of such an archive than the members that residuum checks.

    Args:
        stream: The file.

    Returns:
        The archive.

    Raises:
        BadZipFile: If the archive does not end with its directory.
        UnsafeFileError: If the directory is too large.
    """
    end_record_start = stream.seek(0, io.SEEK_END) - END.size
    zip64_bytes = END_64.size + LOCATOR.size
    stream.seek(max(end_record_start - zip64_bytes, 0))
    end_of_archive = stream.read()
    before, last = end_of_archive[: -END.size], end_of_archive[-END.size :]
    if not last.startswith(b"PK\x05\x06") or len(last) < END.size:
        raise zipfile.BadZipFile("the zip archive does not end with its end record")
    *_, length, start, comment = END.unpack(last)
    # If a LOCATOR record (which starts with these bytes) exists, zipfile and PyTorch use the directory that
    # END_64 describes.
    if before[-LOCATOR.size :].startswith(b"PK\x06\x07"):
        if not before.startswith(b"PK\x06\x06") or len(before) < zip64_bytes:
            raise zipfile.BadZipFile("the zip64 end record of the zip archive is missing")
        *_, length, start = END_64.unpack(before[: END_64.size])
        end_record_start -= zip64_bytes
    if comment or start + length != end_record_start:
        raise zipfile.BadZipFile("the zip archive has other bytes after its directory")
    if length > MAX_DIRECTORY_BYTES:
        raise UnsafeFileError(
            f"The list of files in a zip archive may have at most {MAX_DIRECTORY_BYTES} bytes; the list in "
            f"this archive has {length} bytes.",
            "Save fewer, larger arrays.",
        )
    return zipfile.ZipFile(stream)
