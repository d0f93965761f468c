"""Show results in a notebook, as HTML without scripts, pictures and colors of its own.

Names in a result can come from hostile files. So all text is escaped, and characters that cannot be seen are
replaced. The HTML loads nothing and takes its colors from the notebook, which may be light or dark.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from html import escape

from residuum.terminal import TextTable

# Unicode categories of characters that are made visible. Cc: control characters; Cf: direction marks and
# characters without width; Cs: surrogates; Co, Cn: private use and unassigned; Zl, Zp: separators of lines
# and paragraphs.
INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
MAX_TEXT = 1000  # characters of a text that a notebook shows
BOX = (
    "max-width:75em;border:1px solid #9996;border-radius:6px;padding:.7em 1em;overflow-x:auto;"
    "line-height:1.4"
)
TABLE = "border-collapse:collapse;margin:.6em 0"
CAPTION = "text-align:left;font-weight:600;padding:.2em 0"
CELL = (
    "text-align:left;vertical-align:top;padding:.25em .8em .25em 0;border-top:1px solid #9996;"
    "min-width:7em;overflow-wrap:anywhere;white-space:normal"
)
LINE = "margin:.3em 0"


def escape_invisible(text: str) -> str:
    """Replace every invisible character of a text by its code point, such as ‹U+200B›."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        f"‹U+{ord(c):04X}›" if unicodedata.category(c) in INVISIBLE_CATEGORIES else c for c in text
    )


def render(title: str, tables: Iterable[TextTable], lines: Iterable[str] = ()) -> str:
    """Return a result as HTML for a notebook.

    Args:
        title: One line that sums up the result.
        tables: Tables. The first column of a table names its rows.
        lines: Paragraphs below the tables.

    Returns:
        An element of HTML.
    """
    elements = [f'<div style="{LINE};font-weight:600">{_text(title)}</div>']
    elements += [_render_table(table) for table in tables if table.rows]
    elements += [f'<div style="{LINE}">{_text(line)}</div>' for line in lines]
    return "\n".join([f'<div style="{BOX}">', *elements, "</div>"])


def _render_table(table: TextTable) -> str:
    head = "".join(
        f'<th scope="col" style="{CELL};font-weight:600">{_text(column)}</th>'
        for column in table.columns
    )
    rows = "\n".join(f"<tr>{_render_row(row)}</tr>" for row in table.rows)
    caption = f'<caption style="{CAPTION}">{_text(table.title)}</caption>' if table.title else ""
    return f'<table style="{TABLE}">{caption}<thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>'


def _render_row(row: tuple[str, ...]) -> str:
    name, *other_cells = row
    cells = [f'<th scope="row" style="{CELL};font-weight:600">{_text(name)}</th>']
    cells += [f'<td style="{CELL}">{_text(cell)}</td>' for cell in other_cells]
    return "".join(cells)


def _text(text: str) -> str:
    """Return HTML-escaped text of limited length, isolated from the writing direction around it."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}… ({len(text)} characters)"
    return f"<bdi>{escape(escape_invisible(text))}</bdi>"
