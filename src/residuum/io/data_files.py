"""Read data files such as tables and images in the folder of a model, within limits of time and memory.

======================================  ==========  ===================================================
file                                    kind        content of the release
======================================  ==========  ===================================================
``.csv``, ``.tsv``, ``.jsonl``,         table       ``columns``: names; ``numbers``: a block (rows,
``.parquet`` (needs pyarrow)                        columns); ``texts``: a block of the other cells
``.npy``, ``.npz``                      arrays      a block for each array
``.txt``, ``.md``, ``.rst``, ``.log``   text        ``text``: a block of overlapping pieces of the text
``.json``, ``.ipynb``                   json        the value in the file; lists of numbers are blocks
``.png``, ``.jpg`` and others           images      a block (height, width, channels) for each image
======================================  ==========  ===================================================

Numbers and cells are read when a caller reads the block (:class:`.inert.Block`). Large files are read in
part, and ``Release.notes`` says so. Arrays of Python objects are never unpickled.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import warnings
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.inert import Block
from residuum.io.json_files import parse_json, read_json
from residuum.io.release import ARRAYS, IMAGES, JSON, TABLE, TEXT, Release
from residuum.records.inputs import MAX_ARRAYS, MAX_HEADER, max_memory, open_zip

SUFFIXES = {
    TABLE: (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"),
    ARRAYS: (".npy", ".npz"),
    TEXT: (".txt", ".md", ".rst", ".log"),
    JSON: (".json", ".ipynb"),
    IMAGES: (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp"),
}
PACKED = ".gz"  # tables and texts may be packed with gzip
IMAGE_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")
# Largest number of characters and of lines of a table or text that are read.
MAX_READ, MAX_LINES = 256 << 20, 10_000_000
# Largest number of characters that are read of a packed file, relative to its size, and smallest such limit.
# Tables of numbers unpack to about 3 times their size, and tables of few different words to 10 times.
MAX_UNPACKED_RATIO, MIN_UNPACKED = 20, 16 << 20
# Largest size of a line. A field of a CSV file may have 131 072 characters, the limit of the csv module.
MAX_LINE = 1 << 20
MAX_VALUES = 20_000_000  # largest number of numbers of a table that are read (160 MB)
SAMPLED_ROWS = 200  # number of rows that show the columns of a table and their types
MAX_COLUMNS = 10_000
PIECE, OVERLAP = (
    1 << 20,
    10_000,
)  # sizes of a piece of a text, and of its overlap with the next piece
MAX_PIXELS = 64_000_000  # largest number of pixels of an image that is decoded
MAX_GROUP = 20_000  # largest number of images of a folder that are read
COPY_AGAIN = "Copy or save the file again, or delete it from the release."
# Exceptions of the readers for damaged files.
DAMAGED = (
    *(OSError, ValueError, EOFError, MemoryError, RuntimeError, SyntaxError, KeyError),
    *(OverflowError, zipfile.BadZipFile, zlib.error, csv.Error),
)


def find_data_kind(name: str) -> str:
    """Return the kind of a data file by the ending of its name, "" for the names of other files."""
    ending = Path(name.lower().removesuffix(PACKED)).suffix
    kind = next((kind for kind, suffixes in SUFFIXES.items() if ending in suffixes), "")
    is_packable = kind == TEXT or ending in (".csv", ".tsv", ".jsonl", ".ndjson")
    return kind if is_packable or not name.lower().endswith(PACKED) else ""


def read_data_file(path: Path) -> Release:
    """Read a data file. Nothing in the file is executed.

    Args:
        path: A regular file with the name of a data file.

    Returns:
        The release.

    Raises:
        CheckpointError: If the file is damaged.
    """
    kind = find_data_kind(path.name)
    try:
        content, notes = READERS[kind](path)
        size = path.stat().st_size
    except DAMAGED as problem:
        raise CheckpointError(
            f"A data file must be complete and readable; reading the file {path.name!r} failed "
            f"({type(problem).__name__}: {str(problem)[:100]}).",
            COPY_AGAIN,
        ) from problem
    return Release(path, kind, content, size, notes=tuple(notes))


def read_images(folder: Path, paths: Iterable[Path]) -> Release:
    """Read the images of a folder as one set of data. The pixels are read on demand.

    Args:
        folder: The folder.
        paths: The images.

    Returns:
        The release. The notes of the release count the images that cannot be decoded.
    """
    image_files = list(paths)
    notes = [f"only {MAX_GROUP} of {len(image_files)} images were read"] * (
        len(image_files) > MAX_GROUP
    )
    content: dict[str, Block] = {}
    for path in image_files[:MAX_GROUP]:
        try:
            content[path.name] = _read_image(path)
        except DAMAGED:
            continue
    if damaged_count := len(image_files[:MAX_GROUP]) - len(content):
        notes.append(f"{damaged_count} images could not be decoded")
    total_size = sum(path.lstat().st_size for path in image_files)
    return Release(folder, IMAGES, content, total_size, notes=tuple(notes))


# Tables


@dataclass(eq=False)
class Table:
    """A table whose rows are read again from the file whenever they are needed.

    Attributes:
        read_rows: Function that returns an iterator over the rows, each a list of cells.
        columns: Names of the columns.
        number_columns: Positions of the columns of numbers. All other columns hold texts.
        row_count: Number of rows.
    """

    read_rows: Callable[[], Iterator[list[Any]]]
    columns: list[str]
    number_columns: list[int]
    row_count: int

    @property
    def text_columns(self) -> list[int]:
        """Positions of the columns of texts."""
        return [i for i in range(len(self.columns)) if i not in {*self.number_columns}]

    def content(self) -> dict[str, Any]:
        """Return the content of this table: names of the columns, numbers and texts."""
        content: dict[str, Any] = {"columns": self.columns}
        if width := len(self.number_columns):
            shape = (min(self.row_count, MAX_VALUES // width), width)
            content["numbers"] = Block(shape, "float64", partial(self.read_numbers, shape[0]))
        if text_columns := self.text_columns:
            cells = _Cells(self, text_columns)
            content["texts"] = Block(
                (self.row_count, len(text_columns)), kind="text", objects=cells
            )
        return content

    def read_numbers(self, row_count: int) -> Tensor:
        """Return the first rows of the columns of numbers. A cell without a number is NaN.

        Args:
            row_count: Number of rows.

        Returns:
            The numbers (rows, columns) in float64.
        """
        numbers = array("d")
        for row in itertools.islice(self.read_rows(), row_count):
            numbers.extend(
                _number(row[i]) if i < len(row) else math.nan for i in self.number_columns
            )
        return (
            torch.from_numpy(np.frombuffer(numbers)).reshape(-1, len(self.number_columns)).clone()
        )


@dataclass(eq=False)
class _Cells:
    """The texts in a table, row by row. They are read from the file when a caller iterates over them."""

    table: Table
    columns: list[int]

    def __len__(self) -> int:
        return self.table.row_count * len(self.columns)

    def __iter__(self) -> Iterator[str]:
        for row in self.table.read_rows():
            for i in self.columns:
                yield _text(row[i]) if i < len(row) else ""


def _number(cell: Any) -> float:
    try:
        return math.nan if cell is None else float(cell)
    except (ValueError, TypeError, OverflowError):
        return math.nan


def _text(cell: Any) -> str:
    """Return the texts in a cell: the cell itself, or all texts in a nested value of JSON."""
    if isinstance(cell, str):
        return cell
    if not isinstance(cell, dict | list):
        return "" if cell is None else str(cell)
    texts: list[str] = []
    values: list[Any] = [cell]
    while values:
        nested_value = values.pop()
        if isinstance(nested_value, str):
            texts.append(nested_value)
        elif isinstance(nested_value, dict | list):
            values.extend(
                reversed(
                    [*(nested_value.values() if isinstance(nested_value, dict) else nested_value)]
                )
            )
    return "\n".join(texts)


def _is_number_column(cells: list[Any]) -> bool:
    filled_cells = [cell for cell in cells if cell not in ("", None)]
    return bool(filled_cells) and not any(math.isnan(_number(cell)) for cell in filled_cells)


def _make_table(
    read_rows: Callable[[], Iterator[list[Any]]], columns: list[str] | None, row_count: int
) -> Table:
    sampled_rows = [*itertools.islice(read_rows(), SAMPLED_ROWS)]
    width = min(max((len(row) for row in sampled_rows), default=0), MAX_COLUMNS)
    column_names = [f"column {i + 1}" for i in range(width)]
    if columns is not None:
        column_names = [name[:200] for name in columns[:MAX_COLUMNS]] + column_names[len(columns) :]
    number_columns = [
        i
        for i in range(len(column_names))
        if _is_number_column([row[i] for row in sampled_rows if i < len(row)])
    ]
    return Table(read_rows, column_names, number_columns, row_count)


def _read_table(path: Path) -> tuple[dict[str, Any], list[str]]:
    ending = Path(path.name.lower().removesuffix(PACKED)).suffix
    if ending == ".parquet":
        return _read_parquet(path)
    notes: list[str] = []
    if ending in (".jsonl", ".ndjson"):
        columns = _collect_keys(_read_json_lines(path))
        rows = partial(_read_json_rows, path, columns)
        row_count = sum(1 for _ in _read_lines(path, notes))
        return _make_table(rows, columns, row_count).content(), notes
    first_line = next(_read_lines(path), "")
    delimiter = "\t" if ending == ".tsv" else max(",;\t|", key=first_line.count)
    first_row = next(csv.reader([first_line], delimiter=delimiter), [])
    has_header = any(math.isnan(_number(cell)) for cell in first_row)
    rows = partial(_read_csv_rows, path, delimiter, has_header)
    row_count = sum(1 for _ in _read_csv_rows(path, delimiter, has_header, notes))
    return _make_table(rows, first_row if has_header else None, row_count).content(), notes


def _read_lines(path: Path, notes: list[str] | None = None) -> Iterator[str]:
    """Yield the lines of a text file, up to a limit. Notes on what was not read are added to ``notes``."""
    notes = [] if notes is None else notes
    line_limit, count, line_count = MAX_READ, 0, 0
    if path.name.lower().endswith(PACKED):
        line_limit = min(line_limit, max(MIN_UNPACKED, MAX_UNPACKED_RATIO * path.stat().st_size))
    try:
        with _open_text(path) as stream:
            while line := stream.readline(MAX_LINE):
                count += len(line)
                line_count += 1
                if count > line_limit or line_count > MAX_LINES:
                    notes.append(f"only the first {(count - len(line)) / 1e6:.0f} MB were read")
                    return
                yield line
    except (OSError, EOFError, zlib.error) as problem:
        notes.append(f"the file is damaged after {count} characters ({type(problem).__name__})")


def _open_text(path: Path) -> io.TextIOWrapper:
    stream: Any = gzip.open(path) if path.name.lower().endswith(PACKED) else path.open("rb")  # noqa: SIM115
    is_utf_16 = stream.read(2) in (b"\xff\xfe", b"\xfe\xff")
    stream.seek(0)
    encoding = "utf-16" if is_utf_16 else "utf-8-sig"
    return io.TextIOWrapper(stream, encoding, errors="replace", newline="")


def _read_csv_rows(
    path: Path, delimiter: str, has_header: bool, notes: list[str] | None = None
) -> Iterator[list[str]]:
    notes = [] if notes is None else notes
    reader = csv.reader(_read_lines(path, notes), delimiter=delimiter)
    try:
        if has_header:
            next(reader, None)
        yield from filter(None, reader)
    except csv.Error as problem:
        notes.append(f"the rows after line {reader.line_num} were not read ({problem})")


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in _read_lines(path):
        try:
            value = parse_json(line.encode(), path.name)
        except CheckpointError:
            value = line
        yield value if isinstance(value, dict) else {"value": value}


def _collect_keys(rows: Iterable[dict[str, Any]]) -> list[str]:
    sampled_rows = itertools.islice(rows, SAMPLED_ROWS)
    return list(dict.fromkeys(key for row in sampled_rows for key in row))[:MAX_COLUMNS]


def _read_json_rows(path: Path, columns: list[str]) -> Iterator[list[Any]]:
    return ([row.get(column) for column in columns] for row in _read_json_lines(path))


def _read_parquet(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return {}, ["a Parquet file, which was not read, because pyarrow is not installed"]
    try:
        file = parquet.ParquetFile(path)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    except Exception as problem:
        # pyarrow raises exceptions of its own classes
        raise ValueError(f"pyarrow cannot read the file: {type(problem).__name__}") from problem
    if sum(group.total_byte_size for group in groups) > max_memory(path.stat().st_size):
        raise UnsafeFileError(
            f"A Parquet file of this size may unpack to at most {max_memory(path.stat().st_size)} bytes; "
            f"according to its header, the file {path.name!r} unpacks to more.",
            COPY_AGAIN,
        )
    columns = list(map(str, file.schema_arrow.names))

    def read_rows() -> Iterator[list[Any]]:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1000):
            for row in batch.to_pylist():
                yield [row.get(column) for column in columns]

    return _make_table(read_rows, columns, file.metadata.num_rows).content(), []


# Arrays


def _read_arrays(path: Path) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    content: dict[str, Any] = {}
    size = path.stat().st_size
    if path.suffix.lower() == ".npy":
        with path.open("rb") as stream:
            shape, dtype = _read_array_header(stream)
            if math.prod(shape) * dtype.itemsize > size - stream.tell() and not dtype.hasobject:
                raise ValueError("the file ends before its array")
        content["array"] = _make_array(shape, dtype, partial(_load_array, path, None))
    else:
        with path.open("rb") as stream, open_zip(stream) as archive:
            members = archive.infolist()
            claimed = sum(member.file_size for member in members)
            if claimed > max_memory(size):
                raise UnsafeFileError(
                    f"The arrays of a file of {size} bytes may unpack to at most {max_memory(size)} "
                    f"bytes; the arrays of the file {path.name!r} unpack to {claimed} bytes.",
                    COPY_AGAIN,
                )
            for member in members[:MAX_ARRAYS]:
                if not member.filename.endswith(".npy"):
                    notes.append(f"the member {member.filename[:80]!r} was not read")
                    continue
                with archive.open(member) as member_stream:
                    shape, dtype = _read_array_header(member_stream)
                    data_size = member.file_size - member_stream.tell()
                if math.prod(shape) * dtype.itemsize != data_size and not dtype.hasobject:
                    raise ValueError(
                        f"{member.filename[:80]!r} does not have the size that it claims"
                    )
                read = partial(_load_array, path, member.filename)
                content[member.filename.removesuffix(".npy")] = _make_array(shape, dtype, read)
            if len(members) > MAX_ARRAYS:
                notes.append(f"only {MAX_ARRAYS} of {len(members)} arrays were read")
    if any(block.kind == "object" for block in content.values()):
        notes.append("pickled Python objects were not read")
    return content, notes


def _read_array_header(stream: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    is_version_1 = npy.read_magic(stream) == (1, 0)
    read_header = npy.read_array_header_1_0 if is_version_1 else npy.read_array_header_2_0
    shape, _, dtype = read_header(stream, max_header_size=MAX_HEADER)
    if min(shape, default=0) < 0 or len(shape) > 32:
        raise ValueError("an array must have a valid shape")
    return shape, dtype


def _make_array(
    shape: tuple[int, ...], dtype: np.dtype[Any], read: Callable[[], np.ndarray]
) -> Block:
    if dtype.kind == "U":
        return Block(shape, "text", objects=_ArrayTexts(read, math.prod(shape)))
    if dtype.kind not in "fiubc":
        return Block(shape, "object" if dtype.hasobject else f"bytes of {dtype.itemsize}")
    return Block(shape, dtype.name, lambda: torch.from_numpy(read()))


def _load_array(path: Path, member: str | None) -> np.ndarray:
    """Read an array of an .npy file, or of a member of an .npz archive. Nothing is unpickled."""
    with path.open("rb") as stream:
        if member is None:
            loaded = npy.read_array(stream, allow_pickle=False, max_header_size=MAX_HEADER)
        else:
            with open_zip(stream) as archive, archive.open(member) as member_stream:
                loaded = npy.read_array(
                    member_stream, allow_pickle=False, max_header_size=MAX_HEADER
                )
    native_dtype = loaded.dtype.newbyteorder("=")
    return loaded.astype(np.float64 if native_dtype == np.longdouble else native_dtype, copy=False)


@dataclass(eq=False)
class _ArrayTexts:
    """The texts of an array. They are read when a caller iterates over them."""

    read: Callable[[], np.ndarray]
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        return (str(text) for text in self.read().flat)


# Readers of texts, JSON files and images follow.


@dataclass(eq=False)
class _TextPieces:
    """The pieces of a text file. They are read when a caller iterates over them."""

    path: Path
    notes: list[str]

    @cached_property
    def _count(self) -> int:
        return sum(1 for _ in self)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        text = ""
        count = 0
        self.notes.clear()
        for line in _read_lines(self.path, self.notes):
            text += line
            if len(text) >= PIECE:
                count += 1
                yield text
                text = text[-OVERLAP:]
        if text and (not count or len(text) > OVERLAP):
            yield text


def _read_text(path: Path) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    text_pieces = _TextPieces(path, notes)
    return {"text": Block((len(text_pieces),), "text", objects=text_pieces)}, notes


def _read_json_file(path: Path) -> tuple[Any, list[str]]:
    try:
        value = read_json(path)
    except UnsafeFileError:  # the JSON file is too large to read, and its values are not needed
        return {}, ["a JSON file that is too large to be read"]
    is_table = isinstance(value, list) and all(isinstance(row, dict) for row in value)
    if is_table and len(value) > 1:
        columns = _collect_keys(value)
        rows = [[row.get(column) for column in columns] for row in value]
        return {**_make_table(lambda: iter(rows), columns, len(rows)).content()}, []
    return _convert_number_lists(value), []


def _convert_number_lists(value: Any) -> Any:
    """Replace each list of numbers, or of equally long lists of numbers, by a block."""
    root = [value]
    containers: list[Any] = [root]
    while containers:
        container = containers.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, child in [*items]:
            if isinstance(child, list) and (numbers := _as_numbers(child)) is not None:
                shape = tuple(numbers.shape)
                container[key] = Block(shape, "float64", partial(torch.clone, numbers))
            elif isinstance(child, dict | list):
                containers.append(child)
    return root[0]


def _as_numbers(values: list[Any]) -> Tensor | None:
    """Return a list of numbers as a vector, a list of equally long lists as a matrix, or None."""
    rows = values if values and isinstance(values[0], list) else [values]
    width = len(rows[0])
    for row in rows:
        is_row = isinstance(row, list) and len(row) == width > 1
        if not is_row or not all(type(number) in (int, float) for number in row):
            return None
    try:
        numbers = torch.tensor(rows, dtype=torch.float64)
    except (OverflowError, ValueError, RuntimeError):  # an integer that is too large
        return None
    return numbers if rows is values else numbers[0]


def _read_image_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    return {path.name: _read_image(path)}, []


def _read_image(path: Path) -> Block:
    """Read the header of an image. The pixels are decoded on demand."""
    from PIL import Image

    with warnings.catch_warnings():  # Pillow warns about large images, which we do not decode
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            with Image.open(path, formats=IMAGE_FORMATS) as image:
                width, height = image.size
                channels = {"L": 1, "1": 1, "P": 3, "RGBA": 4, "LA": 2}.get(image.mode, 3)
        except Image.DecompressionBombError as problem:
            raise ValueError(str(problem)) from problem
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels are more than {MAX_PIXELS}")
    mode = {1: "L", 2: "LA", 4: "RGBA"}.get(channels, "RGB")

    def read() -> Tensor:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            pixels = np.array(image.convert(mode), dtype=np.uint8)
        return torch.from_numpy(pixels).reshape(height, width, channels)

    return Block((height, width, channels), "uint8", read)


READERS: dict[str, Callable[[Path], tuple[Any, list[str]]]] = {
    TABLE: _read_table,
    ARRAYS: _read_arrays,
    TEXT: _read_text,
    JSON: _read_json_file,
    IMAGES: _read_image_file,
}
