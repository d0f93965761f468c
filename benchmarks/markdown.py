"""What tables of results are written with: files read, numbers shortened, columns laid out in Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from statistics import mean
from typing import Any

from benchmarks.harness import RESULTS

TABLES: dict[str, Callable[[], str]] = {}
Figures = dict[str, Any]


def table(make: Callable[[], str]) -> Callable[[], str]:
    """Enter a table under its function's name."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


def grid(head: str, rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Markdown; ``head`` names columns between bars, of which ``left`` hold words."""
    names = head.split(" | ")
    dashes = ["---" if k < left else "---:" for k in range(len(names))]
    lines = [f"| {' | '.join(map(str, row))} |" for row in (names, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(dashes)}|", *lines[1:]])


def once(rows: Sequence[Sequence[object]], column: int = 0) -> list[list[object]]:
    """Rows in which a cell that repeats the one above is blank."""
    shown = [[*row] for row in rows]
    for (above, row), copy in zip(pairwise(rows), shown[1:], strict=True):
        if row[column] == above[column]:
            copy[column] = ""
    return shown


@cache
def read(name: str) -> Figures:
    """A file of results."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def of_seeds(name: str) -> list[Figures]:
    """The files of a figure's seeds, in their order: NAME, NAME-seed1, NAME-seed2."""
    paths = [RESULTS / f"{name}.json", *RESULTS.glob(f"{name}-seed*.json")]
    found = [
        read(str(path.relative_to(RESULTS).with_suffix(""))) for path in paths if path.exists()
    ]
    return sorted(found, key=lambda one: int(one["seed"]))


def short(value: float, digits: int = 1) -> str:
    """A number without zeros behind its point."""
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def means(entries: Sequence[Figures]) -> dict[str, float]:
    """Of every number that all entries have."""
    keys = [k for k, v in entries[0].items() if isinstance(v, int | float)]
    return {k: mean(e[k] for e in entries) for k in keys if all(k in e for e in entries)}


def with_chance(one: dict[str, float], *keys: str) -> str:
    """Counts, each with the same for held-out images in brackets."""
    return " / ".join(f"{short(one[k])} ({short(one[f'{k} held out'])})" for k in keys)


def victims_of(file: str, name: str) -> list[Figures]:
    """Entries of one row of a file, victim by victim."""
    return [v for key, v in read(file)["victims"].items() if key.split("/")[0] == name]


def grouped(rows: Iterable[Figures], key: str) -> dict[Any, list[Figures]]:
    """Rows by what they have under a key, in their order."""
    groups: dict[Any, list[Figures]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def each(rows: Iterable[Figures], key: str, digits: str = "d") -> str:
    """One figure of every row."""
    return " ".join(format(row[key], digits) for row in rows)


def span(rows: Iterable[Figures], key: str, digits: str = ".2f") -> str:
    """From the least to the largest of a figure."""
    values = [row[key] for row in rows]
    ends = [format(value, digits) for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else "-".join(ends)
