"""Register tables, read result files, shorten numbers, and lay out columns in Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import benchmarks
import experiments
from experiments.common import read_rows

TABLES: dict[str, Callable[[], str]] = {}
FOLDERS = (experiments.RESULTS, benchmarks.RESULTS)
Figures = dict[str, Any]


def table(make: Callable[[], str]) -> Callable[[], str]:
    """Register a table under the name of its function, with hyphens."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


def grid(head: str, rows: Iterable[Sequence[object]], text_columns: int = 1) -> str:
    """Return a Markdown table.

    Args:
        head: Names of the columns with bars between them.
        rows: Cells, row by row.
        text_columns: How many columns hold words. They are aligned on their left side.

    Returns:
        The table.
    """
    names = head.split(" | ")
    dashes = ["---" if k < text_columns else "---:" for k in range(len(names))]
    lines = [f"| {' | '.join(map(str, row))} |" for row in (names, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(dashes)}|", *lines[1:]])


def once(rows: Sequence[Sequence[object]], column: int = 0) -> list[list[object]]:
    """Return rows in which a cell of a column is blank if it repeats the cell above."""
    copies = [[*row] for row in rows]
    for (above, row), copy in zip(pairwise(rows), copies[1:], strict=True):
        if row[column] == above[column]:
            copy[column] = ""
    return copies


def find_file(name: str) -> Path | None:
    """Return the path of a result file, None if there is none."""
    paths = [folder / f"{name}{ending}" for folder in FOLDERS for ending in (".json", ".jsonl")]
    return next((path for path in paths if path.exists()), None)


@cache
def read(name: str) -> Figures:
    """Return the content of a result file. The rows of JSON Lines are named by their cases: setting/seed."""
    path = find_file(name)
    if path is None:
        raise FileNotFoundError(f"No folder of results has a file {name}.json.")
    if path.suffix == ".jsonl":
        rows = read_rows(path)
        return {"/".join(str(value) for value in row["case"].values()): row for row in rows}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def read_seeds(name: str) -> list[Figures]:
    """Return the files of all seeds of a figure in their order: NAME, NAME-seed1, NAME-seed2."""
    folder = experiments.RESULTS
    paths = [folder / f"{name}.json", *folder.glob(f"{name}-seed*.json")]
    files = [read(str(path.relative_to(folder).with_suffix(""))) for path in paths if path.exists()]
    return sorted(files, key=lambda file: int(file["seed"]))


def short(value: float, digits: int = 1) -> str:
    """Return a number without zeros at the end of its decimals."""
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def means(entries: Sequence[Figures]) -> dict[str, float]:
    """Return the mean of every number that all entries have."""
    keys = [k for k, v in entries[0].items() if isinstance(v, int | float)]
    return {k: mean(e[k] for e in entries) for k in keys if all(k in e for e in entries)}


def with_chance(figures: dict[str, float], *keys: str) -> str:
    """Return counts, each with the count for held-out images in brackets."""
    return " / ".join(f"{short(figures[k])} ({short(figures[f'{k} held out'])})" for k in keys)


def victims_of(file: str, name: str) -> list[Figures]:
    """Return the entries of one row of a file, victim by victim."""
    return [v for key, v in read(file)["victims"].items() if key.split("/")[0] == name]


def join_figures(rows: Iterable[Figures], key: str, digits: str = "d") -> str:
    """Return one figure of every row, with blanks between them."""
    return " ".join(format(row[key], digits) for row in rows)
