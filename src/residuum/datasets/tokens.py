"""Read texts for a token model: token ids, or texts and a tokenizer.

    token ids       an integer array (n, length); or a dictionary, an .npz or a DataFrame with ``input_ids``,
                    and optionally ``attention_mask`` and ``labels``. Tokens whose mask is 0 are left out
    texts           a list of str, a DataFrame or a data set of Hugging Face with a text column
    .txt            one text per line
    .csv, .jsonl    a text column, and optionally a label column
    (x, y)          any of the first two with labels

The text column is the column named text, sentence, content, review, document or prompt. If there is no such
column, it is the column with the longest values that are no numbers. The label column is named label, labels,
target, class or y.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residuum.datasets.columns import LABELS, convert_labels
from residuum.datasets.given import locate_samples
from residuum.datasets.tables import MAX_TABLE, make_column
from residuum.errors import DataError, InputError, UnsafeFileError
from residuum.records import Dataset, read_npz
from residuum.records.tokens import PADDING, TokenDataset, pack_tokens

TEXT_COLUMNS = ("text", "sentence", "content", "review", "document", "prompt")
IDS, MASK = "input_ids", "attention_mask"
LABEL_COLUMNS = ("labels", *LABELS)
SUFFIXES = (".csv", ".jsonl", ".txt", ".npz")
TOKENIZE_BLOCK = 1000  # texts that the tokenizer receives at once
PASS_TEXTS = "Pass texts with tokenizer=, or token ids as an integer array of shape (n, length)."
Tokenizer = Callable[..., Any]


def read_train_and_holdout_texts(
    data: Any, holdout: Any, tokenizer: Tokenizer | None, max_length: int
) -> tuple[TokenDataset | None, TokenDataset | None]:
    """Read training and held-out texts.

    Args:
        data: Training texts in any supported form, or None.
        holdout: Held-out texts in any supported form, or None.
        tokenizer: Function of texts that returns a dictionary with ``input_ids``, as in transformers.
        max_length: Longer texts are cut after this number of tokens.

    Returns:
        Training and held-out texts with the same number of columns. None if there are none.
    """
    sets = [
        None if texts is None else read_texts(texts, tokenizer, max_length, name)
        for name, texts in (("data", data), ("holdout", holdout))
    ]
    longest = max((texts.x.shape[1] for texts in sets if texts is not None), default=0)
    train, held_out = (None if texts is None else texts.padded_to(longest) for texts in sets)
    if train is None or held_out is None or train.classes == held_out.classes:
        return train, held_out
    classes = tuple(sorted({*train.classes, *held_out.classes}))
    return _with_classes(train, classes), _with_classes(held_out, classes)


def read_texts(
    source: Any, tokenizer: Tokenizer | None, max_length: int, name: str
) -> TokenDataset:
    """Read texts in any supported form.

    Args:
        source: The texts.
        tokenizer: Function of texts that returns a dictionary with ``input_ids``, None without a tokenizer.
        max_length: Longer texts are cut after this number of tokens.
        name: Name of the texts, for messages.

    Returns:
        The texts as token ids.

    """
    if isinstance(source, TokenDataset):
        return source
    if isinstance(source, Dataset):
        return _from_columns({IDS: source.x, "labels": source.y}, None, max_length, name)
    labels = None
    if isinstance(source, tuple) and len(source) == 2 and not isinstance(source[0], str):
        source, labels = source
    if isinstance(source, str | Path):
        columns = _read_file(locate_samples(source, name))
    elif isinstance(source, Mapping) or hasattr(source, "keys"):
        columns = {str(key): source[key] for key in source.keys()}  # noqa: SIM118
    elif hasattr(source, "columns") and hasattr(source, "to_numpy"):
        columns = {str(column): list(source[column]) for column in source.columns}
    elif hasattr(source, "column_names"):
        columns = {str(column): source[column] for column in source.column_names}
    elif isinstance(source, Sequence) and len(source) and isinstance(source[0], str):
        columns = {TEXT_COLUMNS[0]: source}
    elif isinstance(source, np.ndarray) and source.dtype.kind in "OU":
        columns = {TEXT_COLUMNS[0]: source.tolist()}
    elif isinstance(source, np.ndarray | Tensor | list):
        columns = {IDS: source}
    else:
        columns = _columns_of_items(source, name)
    columns = columns if labels is None else {**columns, "labels": labels}
    return _from_columns(columns, tokenizer, max_length, name)


def _columns_of_items(source: Any, name: str) -> dict[str, Any]:
    """Return the columns of a data set with items (x, y) or dictionaries, or of its DataLoader."""
    dataset = getattr(source, "dataset", source)
    try:
        items = [dataset[i] for i in range(len(dataset))]
    except (TypeError, KeyError, NotImplementedError, AttributeError) as problem:
        raise DataError(
            f"The samples {name!r} must be texts or token ids; got an object of type "
            f"{type(source).__name__}.",
            PASS_TEXTS,
        ) from problem
    if items and isinstance(items[0], Mapping):
        return {str(key): [item[key] for item in items] for key in items[0]}
    if items and isinstance(items[0], tuple | list) and len(items[0]) == 2:
        x, y = ([item[i] for item in items] for i in (0, 1))
        return {TEXT_COLUMNS[0] if isinstance(x[0], str) else IDS: x, "labels": y}
    first_item = items[0] if items else ""
    return {TEXT_COLUMNS[0] if isinstance(first_item, str) else IDS: items}


def _read_file(path: Path) -> dict[str, Any]:
    """Return the columns of a file of texts."""
    suffix = path.suffix.lower()
    if not path.is_file() or suffix not in SUFFIXES:
        defect = f"has the suffix {suffix!r}" if path.is_file() else "is no file"
        raise DataError(
            f"A file of texts must have one of the extensions {', '.join(SUFFIXES)}; the path "
            f"{str(path)!r} {defect}.",
            "Save the texts as .csv with a text column and a label column.",
        )
    if suffix == ".npz":
        arrays: dict[str, Any] = dict(read_npz(path))
        renamed = {"x": IDS, "y": "labels"}
        return {renamed.get(name, name): array for name, array in arrays.items()}
    if (size := path.stat().st_size) > MAX_TABLE:
        raise UnsafeFileError(
            f"A file of texts may have at most {MAX_TABLE} bytes; the file {str(path)!r} has {size} bytes.",
            "Pass a file with fewer texts.",
        )
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            if suffix == ".txt":
                return {TEXT_COLUMNS[0]: [line.strip() for line in stream if line.strip()]}
            rows: list[Any]
            if suffix == ".csv":
                rows = list(csv.DictReader(stream))
            else:
                rows = [json.loads(line) for line in stream if line.strip()]
    except (ValueError, RecursionError, csv.Error) as problem:
        raise DataError(
            f"The file {str(path)!r} must be a {suffix} file in UTF-8; reading the file failed "
            f"({type(problem).__name__}).",
            "Save one text per row, with a header in a .csv file.",
        ) from problem
    if not rows or not all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows):
        raise DataError(
            f"All rows of a table of texts must have the same columns; the file {str(path)!r} has rows "
            "with other columns, or no rows.",
            "Save one text per row.",
        )
    return {str(key): [row[key] for row in rows] for key in rows[0]}


def _from_columns(
    columns: Mapping[str, Any], tokenizer: Tokenizer | None, max_length: int, name: str
) -> TokenDataset:
    """Return the texts in named columns: token ids, or a text column that is tokenized."""
    texts: tuple[str, ...] = ()
    if IDS in columns:
        rows = _token_rows(columns[IDS], columns.get(MASK), name)
    else:
        text_column = _find_text_column(columns, name)
        texts = tuple(map(str, columns[text_column]))
        rows = _tokenize(texts, tokenizer, max_length, name)
    x = pack_tokens([row[:max_length] for row in rows], name, PASS_TEXTS)
    by_lower_name = {key.strip().lower(): key for key in columns}
    label_column = next((by_lower_name[key] for key in LABEL_COLUMNS if key in by_lower_name), None)
    y = torch.zeros(len(x), dtype=torch.long)
    classes: tuple[str, ...] = ()
    if label_column is not None:
        labels = columns[label_column]
        labels = labels.numpy(force=True) if isinstance(labels, Tensor) else np.asarray(labels)
        if labels.ndim == 1:  # the labels of language models are token ids, (n, length)
            y, classes = convert_labels(make_column(label_column, labels.tolist()))
    shortened_count = sum(len(row) > max_length for row in rows)
    notes = (
        (f"{shortened_count} texts of {name!r} were cut after {max_length} tokens",)
        if shortened_count
        else ()
    )
    return TokenDataset(x, y, name=name, classes=classes, notes=notes, texts=texts)


def _token_rows(ids: Any, mask: Any, name: str) -> list[list[int]]:
    """Return the token ids of each text, without padding (the tokens whose attention mask is 0)."""
    try:
        rows = [[int(token) for token in row] for row in _as_lists(ids)]
        are_integers = all(
            a == b
            for row, raw in zip(rows, _as_lists(ids), strict=True)
            for a, b in zip(row, raw, strict=True)
        )
        masks = None if mask is None else [[bool(m) for m in row] for row in _as_lists(mask)]
        rows = [
            [
                token
                for token, is_visible in zip(row, mask_row, strict=True)
                if is_visible and token != PADDING
            ]
            for row, mask_row in zip(
                rows, masks or [[True] * len(row) for row in rows], strict=True
            )
        ]
    except (TypeError, ValueError, OverflowError) as problem:
        raise DataError(
            "Token ids must be rows of integers, with one value of the attention mask per token; "
            f"converting {name!r} failed ({type(problem).__name__}).",
            PASS_TEXTS,
        ) from problem
    if not are_integers:
        raise DataError(
            f"Token ids must be whole numbers; the ids in {name!r} are not.", PASS_TEXTS
        )
    return rows


def _as_lists(values: Any) -> list[Any]:
    return (
        values.tolist()
        if hasattr(values, "tolist")
        else [row.tolist() if hasattr(row, "tolist") else row for row in values]
    )


def _find_text_column(columns: Mapping[str, Any], name: str) -> str:
    """Return the name of the column that holds the texts."""
    by_lower_name = {key.strip().lower(): key for key in columns}
    named = next((by_lower_name[key] for key in TEXT_COLUMNS if key in by_lower_name), None)
    if named is not None:
        return named
    lengths = {
        key: sum(map(len, values)) / max(1, len(values))
        for key, values in columns.items()
        if key.strip().lower() not in LABEL_COLUMNS
        and all(isinstance(value, str) for value in values)
    }
    if not lengths:
        raise DataError(
            f"The table {name!r} must have a text column or a column 'input_ids' with token ids; its "
            f"columns are {sorted(columns)[:8]}.",
            "Name the column that holds the texts 'text'.",
        )
    return max(lengths, key=lambda key: lengths[key])


def _tokenize(
    texts: Sequence[str], tokenizer: Tokenizer | None, max_length: int, name: str
) -> list[list[int]]:
    """Return the token ids of each text."""
    if tokenizer is None:
        raise InputError(
            f"Texts must be converted to token ids by a tokenizer; the samples {name!r} are texts, and "
            "no tokenizer was passed.",
            "Pass the tokenizer of the model as tokenizer=, or pass token ids in place of texts.",
        )
    rows: list[list[int]] = []
    try:
        for start in range(0, len(texts), TOKENIZE_BLOCK):
            block = list(texts[start : start + TOKENIZE_BLOCK])
            encoded = _call_tokenizer(tokenizer, block, max_length)
            ids = (
                encoded[IDS]
                if isinstance(encoded, Mapping) or hasattr(encoded, "keys")
                else encoded
            )
            rows += [list(map(int, row)) for row in ids]
    except Exception as problem:
        raise InputError(
            "A tokenizer must return the key input_ids for a list of texts; calling the tokenizer "
            f"{type(tokenizer).__name__} raised {type(problem).__name__}: "
            f"{' '.join(str(problem).split())[:200]}.",
            "Pass the tokenizer of the model, as in transformers.",
        ) from problem
    if len(rows) != len(texts):
        raise InputError(
            "A tokenizer must return one row of token ids for each text; the tokenizer returned "
            f"{len(rows)} rows for {len(texts)} texts.",
            "Pass the tokenizer of the model, as in transformers.",
        )
    return rows


def _call_tokenizer(tokenizer: Tokenizer, texts: list[str], max_length: int) -> Any:
    """Call a tokenizer with truncation. If it does not know this argument, call it without."""
    try:
        return tokenizer(texts, truncation=True, max_length=max_length)
    except TypeError:
        return tokenizer(texts)


def _with_classes(texts: TokenDataset, classes: tuple[str, ...]) -> TokenDataset:
    """Return texts with class indices as labels: the position of each label in ``classes``."""
    if not texts.classes:
        return texts
    positions = torch.tensor([classes.index(name) for name in texts.classes])
    return texts.replace(y=positions[texts.y], classes=classes)
