"""Read the columns of a table from a file: .csv, .tsv, .json, .jsonl or .parquet.

    .csv, .tsv     a header with column names, then one row per sample. The delimiter is a comma, semicolon,
                   tab or vertical bar. It is the one that splits the header into most names
    .json, .jsonl  a list of flat objects, or one flat object per line
    .parquet       needs the package pyarrow

The text files can be compressed with gzip (.csv.gz). A column holds numbers if all its values are numbers or
missing. The values true and false are the numbers 1 and 0. All sizes are limited.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from residuum.errors import DataError, MissingExtraError, UnsafeFileError
from residuum.records.tables import Column

MAX_TABLE = 256 << 20  # largest table in bytes, after it is decompressed
# Largest number of values in a table. The training images of MNIST as a table have 47 million values.
MAX_VALUES = 60_000_000
MAX_BATCH = 1024  # rows of a .parquet file that are read together
DELIMITERS = ",;\t|"
# Values that stand for a missing value in a column of numbers, in lower case.
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "?", "<na>", "-"})
BOOLEANS = {"true": "1", "false": "0"}
DECIMAL_COMMA = re.compile(r"([+-]?\d*),(\d+(?:[eE][+-]?\d+)?)")
# Texts of integers that lose digits if they are read as numbers: leading zeros, and more than 15 digits.
LEADING_ZEROS, LONG_INTEGER = re.compile(r"[+-]?0\d+"), re.compile(r"[+-]?\d{16,}")
# Matches column names such as id, patient_id and Record ID.
ID_COLUMN = re.compile(r"(?:.*[_ ])?ids?", re.IGNORECASE)
GZIP = ".gz"
SAVE_ROWS = "Save the table with a header and one row per sample."
SAVE_OBJECTS = "Save it with frame.to_json(path, orient='records')."
# Formats of tables that residuum does not read, with the expression that reads the file in Python.
UNREAD_FORMATS = {
    ".feather": "pandas.read_feather({path})",
    ".arrow": "pandas.read_feather({path})",
    ".orc": "pandas.read_orc({path})",
    ".xlsx": "pandas.read_excel({path})",
    ".xls": "pandas.read_excel({path})",
    ".ods": "pandas.read_excel({path})",
    ".dta": "pandas.read_stata({path})",
    ".sav": "pandas.read_spss({path})",
    ".sas7bdat": "pandas.read_sas({path})",
    ".h5": "pandas.read_hdf({path})",
    ".hdf5": "pandas.read_hdf({path})",
    ".pkl": "pandas.read_pickle({path})",
    ".pickle": "pandas.read_pickle({path})",
}
PICKLES = (".pkl", ".pickle")


def is_table(path: Path) -> bool:
    """Return True if the name of a file says that it holds a table that residuum reads."""
    return table_format(path) in READERS


def table_format(path: Path) -> str:
    """Return the suffix of a file in lower case, without the suffix ``.gz`` of a compressed table."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if len(suffixes) > 1 and suffixes[-1] == GZIP and suffixes[-2] in TEXT_FORMATS:
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def refuse_other_format(path: Path) -> None:
    """Raise an error for a file in a format of tables that residuum does not read.

    Args:
        path: The file.

    Raises:
        DataError: If the name of the file has a suffix of such a format. The error has the command that
            converts the file.
    """
    suffix = table_format(path)
    if suffix not in UNREAD_FORMATS:
        return
    expression = UNREAD_FORMATS[suffix].format(path=json.dumps(str(path)))
    advice = (
        "Reading a pickle can run code. If you trust the file, convert"
        if suffix in PICKLES
        else "Convert"
    )
    remedy = f"{advice} it: {_conversion(path, expression)}"
    raise DataError(
        f"Samples must be in a format that residuum reads; the file {str(path)!r} has the format {suffix}.",
        remedy,
    )


def read_table(path: Path) -> dict[str, Column]:
    """Read the columns of a table.

    Args:
        path: A file for which :func:`is_table` is True.

    Returns:
        The columns by name, in the order of the file.

    A table that is too large raises an ``UnsafeFileError``.

    Raises:
        DataError: If the file is missing or is not a table with named columns.
    """
    if not path.is_file():
        raise DataError(
            f"A data file must exist; there is no file at the path {str(path)!r}.",
            "Check the path.",
        )
    try:
        return READERS[table_format(path)](path)
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error) as problem:
        raise DataError(
            f"The file {str(path)!r} must be a table in the format {table_format(path)} with UTF-8 text; "
            f"reading the file failed ({' '.join(str(problem).split())[:120]}).",
            SAVE_ROWS,
        ) from problem


def make_column(name: str, values: Sequence[Any], has_decimal_commas: bool = False) -> Column:
    """Make a column from the values of a file or of a data frame.

    Args:
        name: Name of the column.
        values: Texts, numbers, booleans, or None and NaN for missing values.
        has_decimal_commas: Whether texts such as "1,5" are numbers.

    Returns:
        Numbers if all values are numbers or missing, otherwise texts. Long integers are texts, because they
        would lose digits, and so are identifiers with leading zeros.
    """
    texts = [value for value in values if isinstance(value, str)]
    loses_digits = any(map(LONG_INTEGER.fullmatch, texts)) or (
        has_name_of_ids(name) and any(map(LEADING_ZEROS.fullmatch, texts))
    )
    if loses_digits:
        return tuple("" if _is_missing(value) else str(value) for value in values)
    try:
        return torch.from_numpy(np.array(values, dtype=np.float64))
    except (TypeError, ValueError):
        pass
    texts = ["" if _is_missing(value) else str(value) for value in values]
    numerals = [_as_numeral(text, has_decimal_commas) for text in texts]
    try:
        return torch.from_numpy(np.array(numerals, dtype=np.float64))
    except ValueError:
        return tuple(texts)


def has_name_of_ids(name: str) -> bool:
    """Return True if a column has a name such as id, patient_id or Record ID."""
    return ID_COLUMN.fullmatch(name.strip()) is not None


def _as_numeral(text: str, has_decimal_commas: bool) -> str:
    """Return the text of a value as Python writes a number. Other texts are returned unchanged."""
    word = text.strip().lower()
    if word in MISSING:
        return "nan"
    if has_decimal_commas and (match := DECIMAL_COMMA.fullmatch(word)):
        return f"{match[1]}.{match[2]}"
    return BOOLEANS.get(word, text)


def _is_missing(value: Any) -> bool:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    return type(value).__name__ in ("NAType", "NaTType")  # missing values of pandas


def _read_separated(path: Path) -> dict[str, Column]:
    text = _read_text(path)
    header_line = next((line for line in io.StringIO(text) if line.strip()), "")
    delimiter = max(DELIMITERS, key=lambda d: len(next(csv.reader([header_line], delimiter=d), ())))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    names: list[str] = []
    rows: list[list[str]] = []
    for row in reader:
        if not names:
            names = row
        elif len(row) == len(names):
            rows.append(row)
        elif row:
            raise DataError(
                "Every row of a table must have as many values as the header has names; the file "
                f"{str(path)!r} has {len(names)} names, and its line {reader.line_num} has {len(row)} "
                "values.",
                "Save one row per sample, with the label in a separate column.",
            )
        if len(rows) * len(names) > MAX_VALUES:
            raise UnsafeFileError(*_too_large(path, f"{MAX_VALUES:,} values"))
    if not rows:
        raise DataError(
            f"A table must have a header and at least one row; the file {str(path)!r} has no rows.",
            SAVE_ROWS,
        )
    _check_names(names, path)
    columns = zip(*rows, strict=True)
    return {
        name: make_column(name, values, delimiter != ",")
        for name, values in zip(names, columns, strict=True)
    }


def _read_json(path: Path) -> dict[str, Column]:
    return _from_objects(json.loads(_read_text(path)), path)


def _read_json_lines(path: Path) -> dict[str, Column]:
    return _from_objects(
        [json.loads(line) for line in io.StringIO(_read_text(path)) if line.strip()], path
    )


def _from_objects(objects: Any, path: Path) -> dict[str, Column]:
    """Return the columns of a list of flat objects. A key that an object lacks is a missing value."""
    if not (isinstance(objects, list) and objects and all(isinstance(o, dict) for o in objects)):
        raise DataError(
            f"A table in JSON must be a list of objects, one object per sample; the file {str(path)!r} "
            "holds something else.",
            SAVE_OBJECTS,
        )
    names = list(dict.fromkeys(name for row in objects for name in row))
    if len(names) * len(objects) > MAX_VALUES:
        raise UnsafeFileError(*_too_large(path, f"{MAX_VALUES:,} values"))
    for row in objects:
        for name, value in row.items():
            if isinstance(value, dict | list):
                raise DataError(
                    f"The JSON objects of a table must hold only single values; the key {name!r} in the "
                    f"file {str(path)!r} holds a {type(value).__name__}.",
                    "Save each of its entries under a separate key, or save the samples as x and y with "
                    "numpy.savez.",
                )
    _check_names(names, path)
    return {name: make_column(name, [row.get(name) for row in objects]) for name in names}


def _read_parquet(path: Path) -> dict[str, Column]:
    try:
        from pyarrow import parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from pyarrow.lib import ArrowException  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        expression = f"pandas.read_parquet({json.dumps(str(path))})"
        raise MissingExtraError(
            f"The file {str(path)!r} is a .parquet file. Reading it needs the Python package pyarrow, "
            "which is not installed.",
            f"Run pip install pyarrow, or convert the file: {_conversion(path, expression)}",
        ) from None
    try:
        names = parquet.read_schema(path).names
        # A small file can state a long text once and use it in many rows. This option keeps one copy in
        # memory.
        file = parquet.ParquetFile(path, read_dictionary=names)
        metadata = file.metadata
        row_groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        byte_count = sum(group.total_byte_size for group in row_groups)
        if metadata.num_rows * max(metadata.num_columns, 1) > MAX_VALUES or byte_count > MAX_TABLE:
            raise UnsafeFileError(
                *_too_large(path, f"{MAX_VALUES:,} values and {MAX_TABLE:,} bytes")
            )
        values: dict[str, list[Any]] = {name: [] for name in names}
        text_length = 0
        for batch in file.iter_batches(batch_size=MAX_BATCH):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                batch_values = _parquet_values(column)
                text_length += sum(len(value) for value in batch_values if isinstance(value, str))
                values[name] += batch_values
            if text_length > MAX_TABLE:
                raise UnsafeFileError(*_too_large(path, f"{MAX_TABLE:,} bytes"))
    except ArrowException as problem:
        raise ValueError(str(problem)) from problem
    if not values or not any(values.values()):
        raise DataError(
            f"A table must have at least one row; the file {str(path)!r} has no rows.", SAVE_ROWS
        )
    for name, column in values.items():
        if any(isinstance(value, dict | list) for value in column):
            raise DataError(
                f"Every column of a table must hold single values; the column {name!r} of the file "
                f"{str(path)!r} holds lists.",
                "Save each entry of the lists in a separate column.",
            )
    return {name: make_column(name, column) for name, column in values.items()}


def _parquet_values(column: Any) -> list[Any]:
    """Return the values of a pyarrow array as Python objects. Repeated texts share one object."""
    if not hasattr(column, "dictionary"):
        return list(column.to_pylist())
    entries = column.dictionary.to_pylist()
    return [None if i is None else entries[i] for i in column.indices.to_pylist()]


def _read_text(path: Path) -> str:
    """Return the text of a file, which may be compressed with gzip. The size of the text is limited."""
    with gzip.open(path) if path.suffix.lower() == GZIP else path.open("rb") as stream:
        content = stream.read(MAX_TABLE + 1)
    if len(content) > MAX_TABLE:
        raise UnsafeFileError(*_too_large(path, f"{MAX_TABLE:,} bytes"))
    return content.decode("utf-8-sig")


def _too_large(path: Path, limit: str) -> tuple[str, str]:
    """Return the error message and the advice for a table that exceeds a size limit."""
    return (
        f"A table must have at most {limit}; {str(path)!r} has more.",
        "Save it with numpy.savez(path, x=..., y=...).",
    )


def _check_names(names: Iterable[str], path: Path) -> None:
    """Check that the columns of a table have names, and that no two columns have the same name."""
    names = list(names)
    if not isinstance(make_column("", names), tuple):
        raise DataError(
            "The first line of a table must hold the names of the columns; the first line of the file "
            f"{str(path)!r} holds numbers.",
            "Add a header, such as age,height,label.",
        )
    if len(set(names)) < len(names):
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        raise DataError(
            f"All columns of a table must have different names; the file {str(path)!r} has two columns "
            f"named {repeated!r}.",
            "Rename one of the two columns.",
        )


def _conversion(path: Path, expression: str) -> str:
    """Return the command that converts a file to CSV, with the expression that reads the file."""
    target = json.dumps(str(path.with_suffix(".csv")))
    code = f"import pandas; {expression}.to_csv({target}, index=False)"
    return shlex.join(["python", "-c", code])


TEXT_FORMATS: Mapping[str, Callable[[Path], dict[str, Column]]] = {
    ".csv": _read_separated,
    ".tsv": _read_separated,
    ".tab": _read_separated,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
READERS = {**TEXT_FORMATS, ".parquet": _read_parquet}
