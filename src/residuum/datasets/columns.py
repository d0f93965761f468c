"""Decide which columns of a table are labels, record IDs and inputs of a model.

The label is the column that the user names. Otherwise it is the first column named label, target, class or y,
and otherwise the last column, unless this column identifies the rows. Record IDs are not inputs: a column
with a name such as patient_id whose values all differ, or a column without a name that counts the rows, as
pandas writes it. Columns of texts are not inputs, because it is not known how the training encoded them.

If the number of inputs of the model is known, :func:`fit_columns` uses it to decide in doubtful cases.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence

import torch
from torch import Tensor

from residuum.datasets.tables import has_name_of_ids
from residuum.errors import DataError, did_you_mean
from residuum.records import Dataset
from residuum.records.tables import Column, Table

LABELS = ("label", "target", "class", "y")  # column names that mark the labels of a table
UNIT = re.compile(r"\s*[\[(]([^\])]*)[\])]\s*$")
UNNAMED = re.compile(r"(Unnamed: 0(\.\d+)*)?")  # names of a column of row numbers that pandas wrote
MAX_NAMED = 5  # largest number of columns that a message names


def read_columns(
    columns: dict[str, Column],
    name: str,
    label: str = "",
    drop: Sequence[str] = (),
    is_holdout: bool = False,
) -> Dataset:
    """Make a dataset from the named columns of a table.

    Units in brackets after a column name are stored, so that reports can show them. ``x`` holds the columns
    of numbers, with NaN for missing values. The dataset also holds the whole table.

    Args:
        columns: The columns by name.
        name: Name of the dataset.
        label: Name of the column with the labels, "" to find it.
        drop: Names of columns that are not inputs of the model.
        is_holdout: Whether the table holds held-out samples, which may lack these columns.

    Returns:
        The dataset.

    Raises:
        DataError: If ``label`` or ``drop`` names a column that does not exist, or if no column remains.
    """
    for column in (*([label] if label else []), *drop):
        if column not in columns and not is_holdout:
            raise DataError(
                f"A column that you name must exist in the table; the table {name!r} has no column "
                f"{column!r}.",
                did_you_mean(column, list(columns)),
            )
    label = (label if label in columns else "") if label else _find_label(columns, drop)
    dropped = tuple(column for column in dict.fromkeys(drop) if column in columns)
    table = Table(dict(columns), label, dropped)
    inputs = [c for c, values in table.numbers.items() if not _identifies_rows(c, values)]
    if not inputs and not table.texts and not table.numbers:
        raise DataError(
            f"A table must have at least one column in addition to the labels; the table {name!r} has only "
            "labels.",
            "Add the columns that are inputs of the network.",
        )
    return _build(table, inputs, name)


def fit_columns(
    train: Dataset | None,
    holdout: Dataset | None,
    input_count: int | None = None,
    input_names: Sequence[str] = (),
) -> tuple[Dataset | None, Dataset | None]:
    """Choose the columns that are inputs of a model, and use the same columns of the held-out table.

    If the names of the inputs are known, these columns are used. If the model has as many inputs as the table
    has columns of numbers with its record IDs, the record IDs are inputs. If the model has fewer inputs,
    columns that count the rows are not inputs. Datasets that were not read from a table are returned
    unchanged.

    Args:
        train: The training samples.
        holdout: The held-out samples.
        input_count: Number of inputs of the model, None if it is unknown.
        input_names: Names of the inputs of the model, which can be columns of texts, () if they are unknown.

    Returns:
        The training and the held-out samples.
    """
    samples = train if train is not None else holdout
    if samples is None or samples.table is None or samples.x.ndim != 2:
        return train, holdout
    training_table = samples.table
    inputs = _choose_inputs(training_table, input_count, input_names)
    # Texts are replaced by numbers from 0 to ``scale``, the largest standard deviation of a column of
    # numbers.
    deviations = [
        float(v.nan_to_num().std()) for c, v in training_table.numbers.items() if c in inputs
    ]
    scale = max((d for d in deviations if d > 0), default=1.0)
    if train is not None:
        train = _rebuild(train, training_table, inputs, scale)
    if holdout is not None and holdout.table is not None:
        held_out = holdout.table
        shared = [
            c for c in inputs if _is_same_kind(training_table.columns[c], held_out.columns.get(c))
        ]
        label = training_table.label if training_table.label in held_out.columns else ""
        training_table = held_out.replace(label=label, dropped=training_table.dropped)
        holdout = _rebuild(
            holdout, training_table, shared, scale, () if train is None else train.classes
        )
    return train, holdout


def _is_same_kind(column: Column, other: Column | None) -> bool:
    return isinstance(other, type(column))


def check_columns(
    train: Dataset | None, holdout: Dataset | None, input_count: int | None = None
) -> None:
    """Raise an error if a model cannot receive the samples of a table.

    Args:
        train: The training samples.
        holdout: The held-out samples.
        input_count: Number of inputs of the model, None if it is unknown.

    Raises:
        DataError: If the number of columns is wrong, a column of texts may be an input, or a value is
            missing.
    """
    for samples in (train, holdout):
        if samples is not None and samples.table is not None and samples.x.ndim == 2:
            _check_count(samples, samples.table, input_count)
            _check_missing(samples, samples.table)
    if train is not None and holdout is not None and train.table is not None:
        held_out_inputs = () if holdout.table is None else holdout.table.inputs
        missing = [c for c in train.table.inputs if c not in held_out_inputs]
        if holdout.table is not None and missing:
            raise DataError(
                f"Held-out samples must have the columns of the training samples; {_names(missing)} of the "
                f"table {train.name!r} is missing in the table {holdout.name!r}.",
                "Save both tables with the same columns.",
            )


def _check_count(samples: Dataset, table: Table, input_count: int | None) -> None:
    number_count, texts = samples.shape[0], table.input_texts
    if number_count and number_count == input_count:
        return
    if number_count and not texts and input_count is None:
        return
    holds = f"{samples.name!r} has {number_count} columns of numbers"
    if texts:
        holds += f", and {_names(texts)} hold{'s' if len(texts) == 1 else ''} text"
    if input_count is None or not number_count:
        rule = (
            "The inputs of a model must be numbers, unless the model encodes texts itself in memory"
        )
    else:
        rule = f"A table must have one column of numbers for each of the {input_count} inputs of the model"
    if input_count is not None and number_count > input_count:
        remedy = (
            "Exclude the columns that are not inputs, such as "
            f"{drop_options(table.inputs[: number_count - input_count])}. Pass the label with "
            "--label COLUMN."
        )
    elif texts:
        remedy = "Encode the columns of text as in the training and save the result"
        is_enough_without = number_count and input_count is None
        remedy += f", or exclude them with {drop_options(texts)}." if is_enough_without else "."
    else:
        remedy = "Save the columns that the model receives, after the steps of the training."
    raise DataError(f"{rule}; {holds}.", remedy)


def _check_missing(samples: Dataset, table: Table) -> None:
    is_missing = ~samples.x.isfinite()
    if not bool(is_missing.any()):
        labels = samples.y
        if labels.is_floating_point() and not bool(labels.isfinite().all()):
            rows_without_label = (~labels.isfinite()).nonzero().flatten().tolist()
            raise DataError(
                f"Every sample needs a label; in the column {table.label!r} of the table {samples.name!r}, "
                f"the label is missing in row {rows_without_label[0]} (counted from 0) "
                f"and in {len(rows_without_label) - 1} other rows.",
                "Remove these rows.",
            )
        return
    missing_counts = is_missing.sum(0)
    columns_with_missing = [table.inputs[i] for i in missing_counts.nonzero().flatten().tolist()]
    first_row = int(is_missing.any(1).nonzero()[0])
    raise DataError(
        f"A table must not have missing or infinite values; the table {samples.name!r} has "
        f"{int(missing_counts.sum())} such values in {_names(columns_with_missing)}, the first in row "
        f"{first_row} (counted from 0, without the header).",
        "Fill in these values as in the training, or remove their rows, or exclude the columns with "
        f"{drop_options(columns_with_missing)}.",
    )


def drop_options(columns: Sequence[str]) -> str:
    """Return the options of the command line that exclude columns, as text of a message."""
    options = [f"--drop {shlex.quote(column)}" for column in columns[:MAX_NAMED]]
    return " ".join(options) + (" ..." if len(columns) > MAX_NAMED else "")


def _names(columns: Sequence[str]) -> str:
    listed_names = ", ".join(map(repr, columns[:MAX_NAMED]))
    return listed_names + (
        f" and {len(columns) - MAX_NAMED} more" if len(columns) > MAX_NAMED else ""
    )


def _find_label(columns: dict[str, Column], drop: Sequence[str]) -> str:
    """Return the name of the column with the labels, "" if there is none."""
    column_by_lower_name = {column.strip().lower(): column for column in columns}
    for label in LABELS:
        if (column := column_by_lower_name.get(label)) is not None and column not in drop:
            return column
    remaining = [column for column in columns if column not in drop]
    if len(remaining) < 2:
        return ""
    last_name = remaining[-1]
    values = columns[last_name]
    is_label = not _identifies_rows(last_name, values) and (
        isinstance(values, Tensor) or len(set(values)) < len(values)
    )
    return last_name if is_label else ""


def _identifies_rows(name: str, values: Column) -> bool:
    """Return True if a column is named like an ID, or has no name, and has another value in every row."""
    if UNNAMED.fullmatch(name.strip()):
        return counts_rows(values)
    return has_name_of_ids(name) and len(set(_as_texts(values))) == len(values)


def is_identifier(name: str, values: Column) -> bool:
    """Return True if a column says which row a sample is, by its name or because it counts the rows.

    Args:
        name: Name of the column.
        values: The column.

    Returns:
        Whether the column identifies the rows.
    """
    return _identifies_rows(name, values) or counts_rows(values)


def counts_rows(values: Column) -> bool:
    """Return True if a column holds integers that rise in every row, such as row numbers."""
    if not isinstance(values, Tensor) or not bool(values.isfinite().all()):
        return False
    return bool((values == values.round()).all()) and bool((values.diff() > 0).all())


def _as_texts(values: Column) -> tuple[str, ...]:
    if not isinstance(values, Tensor):
        return values
    return tuple(f"{v:.0f}" if v == round(v) else f"{v:g}" for v in values.nan_to_num().tolist())


def _choose_inputs(table: Table, input_count: int | None, input_names: Sequence[str]) -> list[str]:
    """Return the names of the columns that are inputs of a model, see :func:`fit_columns`."""
    numbers = table.numbers
    if input_names and all(name in table.columns for name in input_names):
        return list(input_names)
    usual = [c for c, values in numbers.items() if not _identifies_rows(c, values)]
    if input_count is None or len(usual) == input_count:
        return usual
    if len(numbers) == input_count:
        return list(numbers)
    row_counters = [c for c in usual if counts_rows(numbers[c])]
    if len(usual) - len(row_counters) == input_count:
        return [c for c in usual if c not in row_counters]
    return usual


def _rebuild(
    dataset: Dataset,
    table: Table,
    inputs: Sequence[str],
    scale: float,
    classes: Sequence[str] = (),
) -> Dataset:
    """Return the dataset again, with other columns of its table as inputs of the model."""
    rebuilt = _build(table, inputs, dataset.name, classes, scale)
    return rebuilt if dataset.row_numbers is None else rebuilt.take(dataset.row_numbers)


def _build(
    table: Table,
    inputs: Sequence[str],
    name: str,
    known_classes: Sequence[str] = (),
    scale: float = 1.0,
) -> Dataset:
    has_texts = any(column in table.texts for column in inputs)
    columns = [_as_numbers(table.columns[column], scale) for column in inputs]
    if has_texts:
        columns = [
            torch.zeros_like(x) if c == table.label or is_identifier(c, table.columns[c]) else x
            for c, x in zip(inputs, columns, strict=True)
        ]
    x = torch.stack(columns, 1) if columns else torch.zeros(len(table), 0, dtype=torch.float64)
    x = x.nan_to_num() if has_texts else x  # a model that takes texts can take missing values
    y, classes = torch.zeros(len(table), dtype=torch.long), tuple[str, ...]()
    if table.label:
        y, classes = convert_labels(table.columns[table.label], known_classes)
    unit_matches = [UNIT.search(column) for column in inputs]
    units = tuple(match[1].strip() if match else "" for match in unit_matches)
    features = tuple(UNIT.sub("", column).strip() for column in inputs)
    identifiers = tuple(
        c
        for c, v in table.columns.items()
        if c not in (table.label, *inputs) and (_identifies_rows(c, v) or c in table.numbers)
    )
    id_columns = [c for c in identifiers if has_name_of_ids(c)]
    record_ids = _as_texts(table.columns[id_columns[0]]) if id_columns else ()
    table = table.replace(inputs=tuple(inputs), identifiers=identifiers)
    return Dataset(
        x,
        y,
        name=name,
        classes=classes,
        features=features,
        units=units if any(units) else (),
        notes=_describe(table, name),
        record_ids=record_ids,
        table=table,
    )


def _as_numbers(column: Column, scale: float) -> Tensor:
    """Return a column of numbers unchanged, and a number from 0 to ``scale`` for every text.

    Equal texts have equal numbers. The numbers only serve to compare samples. A model that takes texts
    receives the texts.
    """
    if isinstance(column, Tensor):
        return column
    largest_hash = float(2**64)
    hashes = [
        int.from_bytes(hashlib.sha256(t.encode()).digest()[:8]) / largest_hash for t in column
    ]
    return torch.tensor(hashes, dtype=torch.float64) * scale


def _describe(table: Table, name: str) -> tuple[str, ...]:
    """Return sentences about how the columns of a table were used: inputs, label, record IDs."""
    notes = [
        f"the column {table.label!r} of {name!r} is the label"
        if table.label
        else f"no column of {name!r} is the label. Pass it with --label COLUMN"
    ]
    for columns, what in (
        ([c for c in table.identifiers if has_name_of_ids(c)], "holds record IDs"),
        ([c for c in table.identifiers if not has_name_of_ids(c)], "counts the rows"),
        (table.input_texts, "holds text"),
        (table.dropped, "was excluded with --drop"),
    ):
        notes += [
            f"the column {column!r} of {name!r} {what} and is not an input of the network"
            for column in columns[:MAX_NAMED]
        ]
    return tuple(notes)


def convert_labels(
    values: Column, known_classes: Sequence[str] = ()
) -> tuple[Tensor, tuple[str, ...]]:
    """Convert a column of labels: whole numbers and text become classes, other numbers become targets.

    Args:
        values: The labels.
        known_classes: Names of the classes of the training samples, in the order of their numbers.

    Returns:
        The labels, and the names of the classes.
    """
    if isinstance(values, Tensor):
        return (values.long() if bool((values == values.round()).all()) else values), ()
    classes = tuple(dict.fromkeys((*known_classes, *sorted(set(values)))))
    number_of_class = {name: i for i, name in enumerate(classes)}
    return torch.tensor([number_of_class[value] for value in values]), classes
