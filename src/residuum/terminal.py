"""Print tables and paragraphs as wide as the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

MAX_WIDTH = 110  # maximal number of characters in a printed line. Longer lines are hard to read


class TextTable(NamedTuple):
    """A table whose cells are texts. A terminal or a notebook can show it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def print_line(text: str) -> None:
    """Print a line of plain text. Markup in the text is not interpreted."""
    sys.stdout.write(text + "\n")


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table. Markup in the cells is not interpreted, because cells can come from untrusted files.

    Words are never broken. If the terminal is too narrow for the longest words, every row is printed as a
    short list.

    Args:
        title: Title above the table.
        columns: Names of the columns.
        rows: The rows, each with one cell for each column.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console, headers, cells = Console(), [*columns], [[*row] for row in rows]
    widths = _column_widths(headers, cells, console.width - 3 * len(headers) - 1)
    if widths is None:
        print_line(title)
        for row in cells:
            print_line(f"- {row[0]}")
            for head, cell in zip(headers[1:], row[1:], strict=True):
                column_name = " ".join(head.split())
                print_wrapped(cell, f"    {column_name}: " if column_name else "    ")
        return
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for column, width in zip(headers, widths, strict=True):
        table.add_column(escape(column), overflow="fold", min_width=width, max_width=width)
    for row in cells:
        table.add_row(*map(escape, row))
    console.print(table)


def _column_widths(headers: list[str], rows: list[list[str]], available: int) -> list[int] | None:
    """Return column widths whose sum is at most ``available``, or None if words would be broken."""
    cells_by_column = [[head, *cells] for head, *cells in zip(headers, *rows, strict=True)]
    preferred_widths = [
        max(len(line) for cell in cells for line in cell.split("\n")) for cells in cells_by_column
    ]
    minimal_widths = [
        max((len(word) for cell in cells for word in cell.split()), default=1)
        for cells in cells_by_column
    ]
    if sum(minimal_widths) > available:
        return None
    widths = preferred_widths
    while (
        sum(widths) > available
    ):  # narrow the widest column that is not yet as narrow as its longest word
        widest_index = max(
            range(len(widths)), key=lambda i: (widths[i] > minimal_widths[i]) * widths[i]
        )
        widths[widest_index] -= 1
    return widths


def print_wrapped(text: str, first_indent: str = "", later_indent: str | None = None) -> None:
    """Print a paragraph as wide as the terminal. Lines are broken between words only.

    Args:
        text: The paragraph.
        first_indent: Text before the first line.
        later_indent: Text before the other lines, by default spaces as wide as ``first_indent``.
    """
    later_indent = " " * len(first_indent) if later_indent is None else later_indent
    wrapper = textwrap.TextWrapper(
        terminal_width(),
        initial_indent=first_indent,
        subsequent_indent=later_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in wrapper.wrap(text) or [first_indent.rstrip()]:
        print_line(line)


def terminal_width() -> int:
    """Return the width of the terminal in characters, at most ``MAX_WIDTH``. Without a terminal: 80."""
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)


def print_notes(notes: Iterable[str], kind: str = "note") -> None:
    """Print every note as a paragraph that starts with a word, such as "note: ".

    Args:
        notes: Texts of the notes.
        kind: The word before every note.
    """
    for note in notes:
        print_wrapped(f"{kind}: {note}", later_indent="  ")


def format_number(value: float | None, digits: int = 4) -> str:
    """Return a number as text for a person.

    Args:
        value: The number, None if the number is missing.
        digits: Number of significant digits.

    Returns:
        The number as text, or a dash if the number is missing.
    """
    return "-" if value is None else f"{value:.{digits}g}"
