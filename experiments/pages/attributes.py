"""Tables of ``docs/attributes.md``: missing values that the weights of networks disclose."""

from __future__ import annotations

from statistics import mean

from experiments.attributes import BARS
from experiments.common import read_rows
from experiments.pages.tables import FOLDERS, Figures, grid, once, table

PARTS = {"cells": "one", "pairs": "two", "triples": "three"}
TABLES = {
    "cancer": "breast cancer",
    "binary cancer": "breast cancer, binary columns",
    "digits": "digits as a table",
    "mixed": "synthetic, mixed columns",
    "choices": "synthetic, mixed columns",
}
TRAININGS = {
    "default": "defaults",
    "long": "2,000 iterations",
    "two layers": "PyTorch, two hidden layers",
    "bfloat16": "2,000 iterations, rounded to bfloat16",
    "int8": "2,000 iterations, rounded to int8",
}


@table
def attributes_disclosed() -> str:
    """List the shares of cells that are reported, and how many of them are right."""
    rows = []
    for key in BARS:
        count, name, n, training = key
        # The tables "mixed" and "choices" with default training are the same setting with other seeds.
        if (name, training) == ("choices", "default"):
            continue
        networks = _select(key)
        reported, right = (sum(row[figure] for row in networks) for figure in ("reported", "right"))
        shares = [row["reported"] / row["cells"] for row in networks]
        imputable = sum(row["imputable"] for row in networks) if count == "cells" else None
        rows.append(
            [
                PARTS[count],
                f"{TABLES.get(name, name)}, {n} rows",
                TRAININGS[training],
                f"{mean(shares):.1%} ({min(shares):.0%} to {max(shares):.0%})",
                f"{right / max(reported, 1):.1%} of {reported:,}",
                "" if imputable is None else f"{1 - imputable / max(right, 1):.0%}",
            ]
        )
    rows.sort(key=lambda row: [*PARTS.values()].index(row[0]))
    head = "unknown columns | table | training | cells reported | right | not imputable"
    return grid(head, once(rows), text_columns=3)


@table
def attributes_of_non_members() -> str:
    """Count the sets of records that were never trained on of which any cell is reported."""
    rows = []
    for shifted, name in ((False, "same distribution"), (True, "shifted by half a deviation")):
        sets = [
            row
            for row in _read()
            if row["case"]["part"] == "none" and row["case"]["shifted"] is shifted
        ]
        cells = sum(row["cells"] for row in sets)
        reported = sum(row["reported"] for row in sets)
        count = sum(row["reported"] > 0 for row in sets)
        rows.append([name, f"{count} of {len(sets)}", f"{reported} of {cells:,}"])
    return grid("records | sets with a reported cell | cells reported", rows)


def _read() -> list[Figures]:
    return read_rows(FOLDERS[0] / "attributes.jsonl")


def _select(key: tuple[str, str, int, str]) -> list[Figures]:
    names = ("part", "table", "n", "training")
    return [row for row in _read() if tuple(row["case"].get(name) for name in names) == key]
