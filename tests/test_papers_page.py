"""Results of the papers at paper scale: the files, and that their page quotes them as they are.

A table is compared when its head begins with an id (`paper:figure`) or with "figure". A cell is
``measured [published] (chance)``; a number agrees when it is the value rounded to the digits shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import pytest

from papers.figures import FIGURES
from tests.documents import ROOT

FILES = sorted((ROOT / "benchmarks" / "results" / "papers").glob("*.json"))
PICTURES = sorted((ROOT / "docs" / "figures" / "papers").glob("*.png"))
PAGE = ROOT / "docs" / "papers.md"
COLUMNS = ("published", "corrected", "measured", "chance")
SHORT = {"recovered": "recovered (NCC beyond 99% of chance)"}
CELL = re.compile(r"(?P<measured>[^\[(]*?)(?: \[(?P<published>.+)\])?(?: \((?P<chance>[^)]+)\))?")
Result = dict[str, Any]


@dataclass(frozen=True)
class Quote:
    """A value as a page has it: of which file and quantity, in which column."""

    file: str
    what: str
    column: str
    text: str


def results() -> dict[str, Result]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}


def tables(text: str) -> Iterator[list[list[str]]]:
    """Rows of cells of every table, the line of dashes left out."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        cells = [[cell.strip().replace("\\|", "|") for cell in line] for line in lines]
        yield [line for line in cells if not re.fullmatch(r":?-+:?", line[0])]


def quotes(text: str) -> Iterator[Quote]:
    """Everything that the tables of a page quote."""
    for head, *rows in tables(text):
        name = re.fullmatch(r"`(\w+:[\w-]+)`", head[0])
        for first, *cells in rows:
            if name:
                yield from quoted(name[1], first, head[1:], cells)
            elif head[0] == "figure":
                values = dict(zip(head[1:], cells, strict=True))
                what = values.pop("quantity", "")
                yield from quoted(first.strip("`"), what, list(values), list(values.values()))


def quoted(name: str, row: str, columns: list[str], cells: list[str]) -> Iterator[Quote]:
    """One row; columns are those of result.json, seeds, or the second half of a quantity."""
    file = name.replace(":", "-")
    for column, cell in zip(columns, cells, strict=True):
        if column in COLUMNS or column == "seconds":
            yield Quote(file, row, column, cell)
            continue
        seed = re.fullmatch(r"seed (\d+)", column)
        other = f"{file}-seed{seed[1]}" if seed and seed[1] != "0" else file
        parts = CELL.fullmatch(cell)
        assert parts, f"{name}, {row}: {cell!r} is no cell"
        for part, text in parts.groupdict().items():
            if text is not None:
                yield Quote(other, row if seed else f"{row}: {column}", part, text)


def check_page(text: str) -> int:
    """Check all quotations of a page; how many there are."""
    found, known = list(quotes(text)), results()
    for quote in found:
        check(quote, known)
    return len(found)


def check(quote: Quote, known: dict[str, Result]) -> None:
    """Refuse a quotation that its file does not bear out."""
    result = known[quote.file]
    if quote.column == "seconds":
        assert agrees(quote.text, result["seconds"]), quote
        return
    rows = {row["what"]: row for row in result["rows"]}
    head, colon, last = quote.what.rpartition(": ")
    what = quote.what if quote.what in rows else f"{head}{colon}{SHORT.get(last, last)}"
    assert what in rows, f"{quote}: no such quantity"
    assert agrees(quote.text, rows[what][quote.column]), f"{quote}: {rows[what][quote.column]!r}"


def agrees(text: str, value: Any) -> bool:
    """Whether a text says a value, to the digits it shows."""
    if value is None or isinstance(value, str):
        return text == (value or "")
    if isinstance(value, list):
        parts = text.split(", ")
        return len(parts) == len(value) and all(map(agrees, parts, value))
    try:
        shown = Decimal(text)
    except InvalidOperation:
        return False
    return abs(Decimal(value) - shown) <= Decimal((0, (5,), int(shown.as_tuple().exponent) - 1))


def test_a_result_says_what_was_run() -> None:
    for path in FILES:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert result["id"] in FIGURES
        stem = result["id"].replace(":", "-")
        assert path.stem == (f"{stem}-seed{result['seed']}" if result["seed"] else stem)
        assert result["title"] == FIGURES[result["id"]].title
        assert result["scale"] == "paper"
        assert result["device"] in ("cuda", "cpu")
        assert result["seconds"] > 0
        assert {"torch", "numpy"} <= result["environment"]["packages"].keys()
        assert result["details"]
        assert {row["what"] for row in result["rows"]} >= result["measured"].keys() > set()
        assert path.stat().st_size < 40_000


def test_what_was_not_run_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    stated = [
        re.search(f"{start}([^\n]+)", text)
        for start in ("Not run at this scale: ", "Run at it before")
    ]
    missing, elsewhere = ({*re.findall(r"`(\w+:[\w-]+)`", line[1])} for line in stated if line)
    elsewhere |= {name for name in FIGURES if name.startswith("uniqueness:")}
    run = {result["id"] for result in results().values()}
    assert {*FIGURES} == run | missing | elsewhere
    assert len(FIGURES) == len(run) + len(missing) + len(elsewhere)
    for name in elsewhere:
        file = f"{name.replace(':', '-')}.json" if name.startswith("uniq") else "splitting-*.json"
        assert [*(ROOT / "benchmarks" / "results").glob(file)], name


def test_quoted_figures_are_those_of_the_files() -> None:
    assert check_page(PAGE.read_text(encoding="utf-8")) > 200


def test_every_published_picture_is_shown_and_small() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {*re.findall(r"\]\(figures/papers/([\w-]+\.png)\)", text)} == {p.name for p in PICTURES}
    assert sum(path.stat().st_size for path in PICTURES) < 3_000_000


WRONG = {
    "a count": ("| `haim2022:fig2` | measured |\n|---|---:|\n| recovered | 19 |\n"),
    "chance": ("| `haim2022:fig5` | recovered |\n|---|---:|\n| CIFAR, residuum | 31 (4.9) |\n"),
    "a published value": (
        "| figure | quantity | published |\n|---|---|---:|\n| `haim2022:fig2` | recovered | 21 |\n"
    ),
    "a value left out": (
        "| figure | quantity | published |\n|---|---|---:|\n| `haim2022:fig2` | recovered | |\n"
    ),
    "a quantity": ("| `haim2022:fig2` | measured |\n|---|---:|\n| found | 19 |\n"),
    "a time": ("| figure | seconds |\n|---|---:|\n| `haim2022:fig2` | 56 |\n"),
    "a word": (
        "| `shen2026:fig2` | measured |\n|---|---:|\n"
        "| loo mnist n=100 k=30: best 25, improved by splitting | 21 of 25 |\n"
    ),
}


@pytest.mark.parametrize("table", WRONG.values(), ids=WRONG)
def test_a_page_that_drifts_is_noticed(table: str) -> None:
    page = f"Before.\n\n{table}\nAfter."
    assert list(quotes(page))
    with pytest.raises(AssertionError, match="Quote"):
        check_page(page)


def test_rounding() -> None:
    assert agrees("0.63", 0.6301)
    assert agrees("2.9e-06", 2.924e-06)
    assert agrees("60, 202", [60, 202])
    assert not agrees("0.64", 0.6301)
    assert not agrees("60", [60, 202])
    assert not agrees("many", 3)
