"""Attack a random forest, or rank its training records by their risk, and write the result to a folder."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from residuum.attacks.trees.forest import NAME, ForestAttack, read_forest
from residuum.datasets.columns import check_columns, fit_columns
from residuum.datasets.given import locate_samples, read_samples
from residuum.evaluation.tables import column_ranges
from residuum.io.release import Release
from residuum.records import Knowledge, RecoveredTable, write_atomic, write_json
from residuum.records.rundir import refuse_foreign
from residuum.risk.forests import ForestExposure, rank_records

EXPOSURE, EXPOSURE_TABLE = "exposure.json", "exposure.csv"
SUMMARY, TABLE, RECORD = "attack.json", "table.csv", "table.safetensors"


def attack_forest(
    release: Release,
    knowledge: Knowledge,
    attack: ForestAttack,
    out: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> RecoveredTable:
    """Recover the training table of a forest and write it to a folder.

    ``table.csv`` has one row per record. If the file of the forest does not determine a cell, the cell has
    an interval of possible values, such as ``[1.5, 2]``, or an estimate, such as ``~1.7``.
    ``table.safetensors`` is a saved ``RecoveredTable``.

    Args:
        release: The release that holds the forest.
        knowledge: What the attacker knows.
        attack: The attack with its settings.
        out: The folder.
        progress: Function that receives lines of text.

    Returns:
        The recovered table.
    """
    refuse_foreign(out, "an attack on a forest", {SUMMARY})
    recovered_table = attack.run(read_forest(release), knowledge, progress)
    write_atomic(out / ".gitignore", "*\n")
    recovered_table.save(out / RECORD)
    write_atomic(out / TABLE, to_csv(recovered_table))
    write_json(
        out / SUMMARY,
        {
            **attack.to_json(),
            "attack": NAME,
            **recovered_table.summary().to_json(),
            "sha256": release.sha256,
        },
    )
    return recovered_table


def forest_exposure(
    release: Release,
    data: str | Path,
    out: Path | None,
    label: str = "",
    drop: Sequence[str] = (),
) -> ForestExposure:
    """Rank the records of a training table by how much of them the trees of a forest determine.

    The attacker of this ranking knows the smallest and the largest value of each column.

    Args:
        release: The release that holds the forest.
        data: File of the training table.
        out: Folder to write, None to write nothing.
        label: Name of the column with the targets, "" to find it.
        drop: Names of columns that are not inputs of the forest.

    Returns:
        The ranking.
    """
    forest = read_forest(release)
    train, _ = fit_columns(
        read_samples(locate_samples(data, "data"), label, drop)[0], None, forest.forest.columns
    )
    assert train is not None
    check_columns(train, None, forest.forest.columns)
    low, width = column_ranges(train.replace(x=train.x.flatten(1)))
    knowledge = Knowledge(
        column_ranges=torch.stack([low, low + width]), provenance={"column_ranges": "train"}
    )
    ranking = rank_records(ForestAttack(rows=False).run(forest, knowledge), train)
    if out is not None:
        refuse_foreign(out, "an exposure of a forest", {EXPOSURE})
        write_atomic(out / ".gitignore", "*\n")
        write_atomic(out / EXPOSURE_TABLE, ranking.to_csv())
        write_json(out / EXPOSURE, ranking.to_json())
    return ranking


def to_csv(table: RecoveredTable) -> str:
    """Return a recovered table as CSV, with one row per record."""
    column_names = table.names or tuple(f"column {j}" for j in range(table.columns))
    target_count = table.targets.shape[1]
    csv_buffer = io.StringIO()
    writer = csv.writer(csv_buffer, lineterminator="\n")
    target_names = ["target"] if target_count == 1 else [f"target {j}" for j in range(target_count)]
    writer.writerow([*column_names, *target_names])
    is_stated = (table.is_exact | table.is_likely).tolist()
    low, high, missing = table.low.tolist(), table.high.tolist(), table.is_missing.tolist()
    unknown_row = [math.nan] * table.columns
    estimates = [unknown_row] * table.records if table.values is None else table.values.tolist()
    for i, target in enumerate(table.targets.tolist()):
        csv_cells = [
            _cell(low[i][j], high[i][j], is_stated[i][j], missing[i][j], estimates[i][j])
            for j in range(table.columns)
        ]
        writer.writerow([*csv_cells, *("" if math.isnan(y) else f"{y:.10g}" for y in target)])
    return csv_buffer.getvalue()


def _cell(low: float, high: float, is_stated: bool, is_missing: bool, value: float) -> str:
    if is_missing:
        return "missing"
    if is_stated:
        return f"{(low + high) / 2:.7g}"
    if not math.isnan(value):
        return f"~{value:.7g}"
    return "" if math.isinf(low) and math.isinf(high) else f"[{low:.7g}, {high:.7g}]"
