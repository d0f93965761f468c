"""Numbers of docs/ from the files that benchmarks wrote: ``python -m benchmarks.pages`` writes them anew.

A table stands in a page between ``<!-- table: NAME -->`` and ``<!-- /table -->``; NAME is a function marked
with ``@table`` in one of the files imported here. What a file does not hold (yet) leaves no row.

A number in running text stands between ``<!-- value: PATH FORMAT -->`` and ``<!-- / -->``:

    <!-- value: surfaces-h200:victims:momentum-500/*:as?saved:all:0.9 .1f -->26.3<!-- / -->

PATH is a file of benchmarks/results without its ending (with a ``+`` behind it: the files of all its seeds)
and the keys below, with colons between; ``*`` and ``?`` are wildcards (``?`` for a blank or a colon of a
key), and the mean of all that are met is taken. FORMAT is that of Python, by default one digit at most;
``min=``, ``max=``, ``sum=``, ``count=`` and ``each=`` before it take another figure than the mean. A number
that nobody here measured, a published one or an aim, stands between ``<!-- given -->`` and ``<!-- / -->``.

A test says that the committed pages are what this program writes, and that decimals, percentages and counts
("3 of 20") in the running text of PROSE stand between such marks: no number there can be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import (
    tables_of_attacks,
    tables_of_convnets,
    tables_of_defenses,
    tables_of_exposure,
    tables_of_field,
    tables_of_papers,
    tables_of_uniqueness,
    tables_of_verdicts,
)
from benchmarks.harness import arguments
from benchmarks.markdown import TABLES, grid, of_seeds, read, short, table
from residuum.cli.main import COMMANDS
from residuum.report.glossary import GLOSSARY

__all__ = [
    "TABLES",
    "filled",
    "tables_of_attacks",
    "tables_of_convnets",
    "tables_of_defenses",
    "tables_of_exposure",
    "tables_of_field",
    "tables_of_papers",
    "tables_of_uniqueness",
    "tables_of_verdicts",
    "unmarked",
    "value",
]
ROOT = Path(__file__).parents[1]
PROSE = (
    "defenses.md",
    "field.md",
    "papers.md",
    "results.md",
)  # pages whose running text holds no number of its own
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: (\S+)(?: (\S+))? -->).*?(<!-- / -->)", re.DOTALL)
OWN = re.compile(r"<!-- (?:value: [^>]*|given) -->.*?<!-- / -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```|^\|.*?$|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+\.\d+|\d+%|\d+ of \d+")
FIGURES: dict[str, Callable[[list[Any]], Any]] = {
    "mean": mean,
    "min": min,
    "max": max,
    "sum": sum,
    "count": len,
}


@table
def words() -> str:
    """The glossary of reports."""
    return "\n\n".join(f"**{word}**: {text}" for word, text in GLOSSARY.items())


@table
def commands() -> str:
    """What ``residuum --help`` lists."""
    rows = [(f"`residuum {name}`", text) for name, text in COMMANDS.items()]
    return grid("command | what it does", rows, left=2)


def main() -> None:
    """Write every page that holds a table or a number."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"{page.name}: written anew")


def filled(text: str) -> str:
    """The text of a page with every table and number in it made anew."""
    text = MARK.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n\n{mark[3]}", text)
    return VALUE.sub(lambda mark: f"{mark[1]}{value(mark[2], mark[3] or '')}{mark[4]}", text)


def value(path: str, form: str = "") -> str:
    """What a mark in running text says; see the head of this file."""
    name, *keys = path.split(":")
    found: list[Any] = of_seeds(name[:-1]) if name.endswith("+") else [read(name)]
    for key in keys:
        found = [v for one in found for k, v in entries(one) if fnmatchcase(k, key)]
    if not found:
        raise KeyError(f"benchmarks/results has nothing at {path!r}")
    figure, _, digits = form.rpartition("=")
    if figure == "each":
        return ", ".join(written(one, digits) for one in found)
    return written(
        FIGURES[figure or "mean"](found) if len(found) > 1 or figure else found[0], digits
    )


def entries(one: Any) -> Iterator[tuple[str, Any]]:
    """What a level of a file holds, by name or number."""
    if isinstance(one, list):
        return ((str(k), v) for k, v in enumerate(one))
    return iter(one.items()) if isinstance(one, dict) else iter(())


def written(one: Any, digits: str) -> str:
    """A number with its digits; a word as it is."""
    if isinstance(one, str) or digits:
        return format(one, digits)
    return short(one)


def unmarked(text: str) -> list[str]:
    """Numbers of the running text of a page that stand between no marks."""
    for generated in (MARK, OWN, CODE):
        text = generated.sub("", text)
    return NUMBER.findall(text)


if __name__ == "__main__":
    arguments(__doc__)
    main()
