"""Fill missing values in a table of an attacker from the weights of a model, and write the filled table."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.tabular.fill import fill
from residuum.datasets.columns import LABELS
from residuum.datasets.tables import has_name_of_ids, is_table, read_table
from residuum.errors import DataError, InputError, require_known
from residuum.io.decision_trees import read_names
from residuum.io.inert import InertObject
from residuum.io.linear_models import Wrapped, find_estimator
from residuum.io.release import Release
from residuum.io.tree import walk
from residuum.networks.network import Network
from residuum.records import Dataset, FilledRecords, Knowledge, write_atomic
from residuum.records.tables import Column

CELLS = ".cells.csv"  # ending of the file that lists the missing cells
MAX_NAMED = 5  # largest number of columns that a message names
UNSCALED = (
    "residuum found no scaler in the model file, so the records were used as they are. If the network was "
    "trained on standardized columns, standardize the records in the same way"
)


@dataclass(frozen=True)
class MissingCell:
    """A cell of the attacker's table that was missing.

    Attributes:
        row: Number of the record in the file, counted from 0.
        column: Name of the column.
        value: The inferred value in the units of the file, None if the cell stays empty.
        p: P-value of the evidence, None if the cell was not tested.
        q: The smallest false discovery rate at which the cell is filled, None if the cell was not tested.
        reason: Why the cell was not tested, "" if it was tested.
    """

    row: int
    column: str
    value: float | None
    p: float | None
    q: float | None
    reason: str


@dataclass(frozen=True)
class FilledTable:
    """The attacker's table after the attack.

    Attributes:
        columns: All columns of the file, with inferred values in their units. NaN in cells that stay empty.
        cells: The cells that were missing.
        notes: Remarks for the reader.
        line: A sentence that says how many cells were filled.
    """

    columns: dict[str, Column]
    cells: tuple[MissingCell, ...]
    notes: tuple[str, ...]
    line: str

    def to_json(self) -> dict[str, Any]:
        """Return the missing cells and the notes as plain values."""
        filled = sum(cell.value is not None for cell in self.cells)
        return {
            "attack": "fill",
            "missing": len(self.cells),
            "tested": sum(cell.p is not None for cell in self.cells),
            "filled": filled,
            "cells": [vars(cell) for cell in self.cells],
            "notes": [*self.notes],
        }


def fill_table(
    release: Release,
    network: Network,
    partial: Path,
    out: Path,
    *,
    reference: Path | None = None,
    drop: Sequence[str] = (),
    columns: str | None = None,
    seed: int = 0,
) -> FilledTable:
    """Fill missing values in a table from the weights of a network, and write the filled table.

    If the release is a pipeline with scalers, the scalers are applied to the records. Inferred values are in
    the units of the file. A second file lists every missing cell with its p-value and its q.

    Args:
        release: The release that holds the network.
        network: The network.
        partial: Table with records of the training set. A missing value is an empty cell, NaN or "?".
        out: The .csv file to write. The second file has the ending ``.cells.csv``.
        reference: Table with other records of the same kind, None if the partial records suffice.
        drop: Names of columns that are not inputs of the network.
        columns: Types of the inputs of the network, such as ``0-2:onehot``, None to recognize them.
        seed: Seed of the decoys.

    Returns:
        The filled table.

    Raises:
        InputError: If the output is no new .csv file, or the attack does not apply.
        DataError: If the columns of the tables do not fit.
    """
    cells_path = out.with_suffix(CELLS)
    inputs = [path.resolve() for path in (partial, reference, release.path) if path is not None]
    if out.suffix.lower() != ".csv" or {out.resolve(), cells_path.resolve()} & {*inputs}:
        raise InputError(
            f"The filled table must be a new .csv file; got {str(out)[:80]!r}.",
            "Pass --out filled.csv.",
        )
    pipeline = _read_pipeline(release)
    table = _read_columns(partial, "--partial")
    names = choose_inputs(table, network.architecture.inputs, _read_input_names(release), drop)
    samples = {"partial": _stack(table, names)}
    if reference is not None:
        reference_table = _read_columns(reference, "--reference")
        if missing := [name for name in names if name not in reference_table]:
            raise DataError(
                "Reference records must have the columns of the partial records; the reference records have "
                f"no column {_join_names(missing)}.",
                "Save both tables with the same columns.",
            )
        samples["reference"] = _stack(reference_table, names)
    datasets = {name: Dataset(x, torch.zeros(len(x))) for name, x in samples.items()}
    if pipeline is not None:
        datasets = {name: pipeline.scale(dataset) for name, dataset in datasets.items()}
    reference_x = datasets["reference"].x if "reference" in datasets else None
    knowledge = Knowledge(partial=datasets["partial"].x, reference=reference_x, columns=columns)
    filled = fill(network, knowledge, seed=seed)
    values, scale, offset = filled.x, datasets["partial"].scale, datasets["partial"].offset
    notes: tuple[str, ...] = (UNSCALED,)
    if scale is not None and offset is not None:
        values, notes = values * scale + offset, ()
    result = _describe(table, names, filled, values, notes)
    texts = zip(*map(_texts, result.columns.values()), strict=True)
    write_atomic(out, _to_csv(result.columns, texts))
    rows = ([_text(value) for value in vars(cell).values()] for cell in result.cells)
    write_atomic(cells_path, _to_csv(MissingCell.__dataclass_fields__, rows))
    return result


def choose_inputs(
    columns: Mapping[str, Column], count: int, input_names: Sequence[str], drop: Sequence[str] = ()
) -> list[str]:
    """Return the names of the columns that are inputs of a network, in their order.

    Args:
        columns: The columns by name.
        count: Number of inputs of the network.
        input_names: Names of the inputs that the release stores, () if it stores none.
        drop: Names of columns that are not inputs.

    Returns:
        The names: those of the release if the table has them, otherwise all columns of numbers. If there are
        too many, columns with names of labels and record IDs are left out.

    Raises:
        DataError: If the table has another number of inputs.
    """
    for name in drop:
        require_known(name, columns, "The table has no column")
    if input_names and all(isinstance(columns.get(name), Tensor) for name in input_names):
        return [*input_names]
    numbers = [n for n, c in columns.items() if isinstance(c, Tensor) and n not in drop]
    if len(numbers) != count:
        numbers = [n for n in numbers if n not in LABELS and not has_name_of_ids(n)]
    if len(numbers) != count:
        texts = [n for n, c in columns.items() if not isinstance(c, Tensor) and n not in drop]
        also = f" and the columns of texts {_join_names(texts)}" if texts else ""
        raise DataError(
            f"The partial records must have one column of numbers for each of the {count} inputs of the "
            f"network; they have {len(numbers)}{also}.",
            "Leave out columns that are no inputs with --drop COLUMN, and encode texts as the training did.",
        )
    return numbers


def _read_columns(path: Path, option: str) -> dict[str, Column]:
    if not is_table(path):
        raise DataError(
            f"{option} must be a table (.csv, .tsv, .json, .jsonl or .parquet); got {str(path)[:80]!r}.",
            "Save the records with a header and one row per record.",
        )
    return read_table(path)


def _read_input_names(release: Release) -> tuple[str, ...]:
    """Return the names of the inputs that an estimator in the release stores, or ()."""
    objects = (place.value for place in walk(release.content))
    names = (read_names(value) for value in objects if isinstance(value, InertObject))
    return next(filter(None, names), ())


def _stack(columns: Mapping[str, Column], names: Sequence[str]) -> Tensor:
    texts = [name for name in names if not isinstance(columns[name], Tensor)]
    if texts:
        raise DataError(
            f"Inputs of the network must be numbers; {_join_names(texts)} holds texts.",
            "Encode texts as the training did.",
        )
    return torch.stack([torch.as_tensor(columns[name]).double() for name in names], 1)


def _read_pipeline(release: Release) -> Wrapped | None:
    """Return the network's pipeline with its scalers, None if the release holds no estimator."""
    pipeline = find_estimator(release.content)
    if pipeline is not None and not pipeline.is_readable:
        raise InputError(
            "The model file must apply only scalers before the network; it applies other steps that residuum "
            "cannot invert.",
            "Save the network without these steps, and pass records as the network receives them.",
        )
    return pipeline


def _describe(
    table: Mapping[str, Column],
    names: Sequence[str],
    filled: FilledRecords,
    values: Tensor,
    notes: Sequence[str],
) -> FilledTable:
    inputs = {name: torch.as_tensor(table[name]).clone() for name in names}
    cells = []
    for row, index in filled.is_missing.nonzero().tolist():
        numbers = (values[row, index], filled.p[row, index], filled.q[row, index])
        value, p, q = (None if math.isnan(number) else float(number) for number in numbers)
        if value is not None:
            value = float(f"{value:.7g}")
            inputs[names[index]][row] = value
        cells.append(MissingCell(row, names[index], value, p, q, filled.reasons[row]))
    return FilledTable({**table, **inputs}, tuple(cells), (*filled.notes, *notes), filled.line)


def _to_csv(names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return buffer.getvalue()


def _texts(column: Column) -> Iterable[str]:
    return map(_text, column.tolist()) if isinstance(column, Tensor) else column


def _text(value: Any) -> str:
    """Return the text of a cell. Whole numbers have no decimal point, and a missing value is empty."""
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value).removesuffix(".0")
    return "" if value is None else str(value)


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(repr(name[:40]) for name in names[:MAX_NAMED])
