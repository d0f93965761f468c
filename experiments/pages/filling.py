"""Replace the tables and numbers of a page by those of the result files.

The docstring of the package explains the marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from statistics import mean
from typing import Any

# Importing the file of a page enters its tables.
from experiments.pages import (
    attributes,  # noqa: F401
    audit,  # noqa: F401
    convnets,  # noqa: F401
    defenses,  # noqa: F401
    field,  # noqa: F401
    forests,  # noqa: F401
    glossary,  # noqa: F401
    papers,  # noqa: F401
    results,  # noqa: F401
    results_exposure,  # noqa: F401
    scan,  # noqa: F401
    splitting,  # noqa: F401
    start,  # noqa: F401
    uniqueness,  # noqa: F401
)
from experiments.pages.tables import TABLES, read, read_seeds, short

# Pages whose running text has no number outside marks.
PROSE = ("defenses.md", "field.md", "forests.md", "papers.md", "results.md")
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: (\S+)(?: (\S+))? -->).*?(<!-- / -->)", re.DOTALL)
MARKED = re.compile(r"<!-- (?:value: [^>]*|given) -->.*?<!-- / -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```|^\|.*?$|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+\.\d+|\d+%|\d+ of \d+")
FIGURES: dict[str, Callable[[list[Any]], Any]] = {
    "mean": mean,
    "min": min,
    "max": max,
    "sum": sum,
    "count": len,
}


def filled(text: str) -> str:
    """Return the text of a page with all tables and numbers of the result files."""
    text = MARK.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n\n{mark[3]}", text)
    return VALUE.sub(lambda mark: f"{mark[1]}{value(mark[2], mark[3] or '')}{mark[4]}", text)


def value(path: str, form: str = "") -> str:
    """Return the text of a number in running text.

    Args:
        path: File and keys, separated by colons.
        form: Format, after the figure that replaces the mean.

    Returns:
        The formatted number.

    Raises:
        KeyError: If nothing matches the path.
    """
    name, *keys = path.split(":")
    matches: list[Any] = read_seeds(name[:-1]) if name.endswith("+") else [read(name)]
    for key in keys:
        matches = [v for match in matches for k, v in entries(match) if fnmatchcase(k, key)]
    if not matches:
        raise KeyError(f"the result files have nothing at {path!r}")
    figure, _, digits = form.rpartition("=")
    if figure == "each":
        return ", ".join(formatted(match, digits) for match in matches)
    single = len(matches) == 1 and not figure
    return formatted(matches[0] if single else FIGURES[figure or "mean"](matches), digits)


def entries(content: Any) -> Iterator[tuple[str, Any]]:
    """Return the entries of a level of a file, by name or by number."""
    if isinstance(content, list):
        return ((str(k), v) for k, v in enumerate(content))
    return iter(content.items()) if isinstance(content, dict) else iter(())


def formatted(content: Any, digits: str) -> str:
    """Return a number with its digits, and a word as it is."""
    if isinstance(content, str) or digits:
        return format(content, digits)
    return short(content)


def unmarked(text: str) -> list[str]:
    """Return the numbers in the running text of a page that stand outside marks."""
    for generated in (MARK, MARKED, CODE):
        text = generated.sub("", text)
    return NUMBER.findall(text)
