"""Read the texts in files of samples: text columns of tables, lines of text files, and strings in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from residuum.datasets.tables import is_table, read_table, table_format
from residuum.errors import DataError, UnsafeFileError

MAX_BYTES = 256 << 20  # largest size of a file of texts in bytes
MAX_TEXTS = 1_000_000  # largest number of texts
LINES = (".txt", ".text", ".md")
JSON = (".json", ".jsonl", ".ndjson")
# A column of texts with fewer distinct entries than this share of its rows holds categories, and an entry
# does not stand for a record.
MIN_DISTINCT_SHARE = 0.5


def read_texts(source: Any) -> tuple[str, ...]:
    """Return the distinct texts in a file or object of samples, () if there are none.

    Args:
        source: The path of a file, a DataFrame, a list of texts, or other samples, which hold no texts.

    Returns:
        The texts, in the order in which they first occur.
    """
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        texts: Iterable[str] = _read_file(path)
    elif isinstance(source, list | tuple) and source and all(isinstance(t, str) for t in source):
        texts = source
    elif hasattr(source, "columns") and hasattr(source, "iloc"):
        columns = [list(source.iloc[:, i]) for i in range(len(source.columns))]
        texts = _texts_of_columns(
            [[v if isinstance(v, str) else "" for v in column] for column in columns]
        )
    else:
        texts = ()
    return tuple(dict.fromkeys(text for text in texts if text.strip()))[:MAX_TEXTS]


def is_text_file(source: Any) -> bool:
    """Return True if a source of samples is a file of texts without a table of numbers."""
    return isinstance(source, str | Path) and Path(source).suffix.lower() in LINES


def _read_file(path: Path) -> Iterable[str]:
    if not is_text_file(path):
        return _texts_of_table(path) if is_table(path) else ()
    if not path.is_file():
        raise DataError(
            f"A data file must exist; there is no file at the path {str(path)!r}.",
            "Check the path.",
        )
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UnsafeFileError(
            f"A file of texts may have at most {MAX_BYTES} bytes; the file {str(path)!r} has {size} bytes.",
            "Split the file into several smaller files.",
        )
    try:
        content = path.read_text("utf-8-sig")
    except ValueError as problem:
        raise DataError(
            f"A file of texts must be in UTF-8; reading the file {str(path)!r} failed "
            f"({type(problem).__name__}).",
            "Save the texts in a .txt file in UTF-8, with one text per line.",
        ) from problem
    return [line for line in content.splitlines() if line.strip()]


def _texts_of_table(path: Path) -> list[str]:
    """Return the texts of records in a table, or the strings in a JSON file that is no table."""
    try:
        columns = read_table(path)
    except DataError:
        if (strings := _strings_of_json(path)) is None:
            raise
        return strings
    return _texts_of_columns([[*c] for c in columns.values() if not isinstance(c, Tensor)])


def _strings_of_json(path: Path) -> list[str] | None:
    """Return the strings in a file of nested JSON values, or None for other files."""
    suffix = table_format(path)
    if suffix not in JSON or path.suffix.lower() != suffix or path.stat().st_size > MAX_BYTES:
        return None
    try:
        content = path.read_text("utf-8-sig")
        lines = [content] if suffix == ".json" else filter(str.strip, content.splitlines())
        return [text for line in lines for text in _strings_in(json.loads(line))]
    except (ValueError, RecursionError):
        return None


def _texts_of_columns(columns: list[list[str]]) -> list[str]:
    """Return the entries of the columns that hold texts of records, not numbers or categories."""
    texts: list[str] = []
    for column in columns:
        texts_of_column = [text for text in column if text.strip() and not _is_number(text)]
        is_text = len(texts_of_column) * 2 > len(column)
        if is_text and len(set(texts_of_column)) >= MIN_DISTINCT_SHARE * len(texts_of_column):
            texts += texts_of_column
    return texts


def _strings_in(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value, without the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(child)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
