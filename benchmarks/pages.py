"""Tables of docs/ from the files that benchmarks wrote: ``python -m benchmarks.pages`` writes them anew.

A table stands in a page between ``<!-- table: NAME -->`` and ``<!-- /table -->``; NAME is a function marked
with ``@table`` in one of the files imported here. What a file does not hold (yet) leaves no row. A test says
that the committed pages are what this program writes, so no number of such a table can be wrong.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import (
    tables_of_attacks,
    tables_of_defenses,
    tables_of_uniqueness,
    tables_of_verdicts,
)
from benchmarks.markdown import TABLES

__all__ = [
    "TABLES",
    "filled",
    "tables_of_attacks",
    "tables_of_defenses",
    "tables_of_uniqueness",
    "tables_of_verdicts",
]
DOCS = Path(__file__).parents[1] / "docs"
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def main() -> None:
    """Write every page that holds a table."""
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"{page.name}: written anew")


def filled(text: str) -> str:
    """The text of a page with every table in it made anew."""
    return MARK.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n\n{mark[3]}", text)


if __name__ == "__main__":
    main()
