"""How results reach the user: one JSON object, or tables; progress only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residuum.training import Progress


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_line(text: str) -> None:
    """One line of plain text; markup in it is shown, not obeyed."""
    sys.stdout.write(text + "\n")


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table; cells are plain text, whatever a file put into them."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table)


def number(value: float | None, digits: int = 4) -> str:
    """A figure for a person; a missing one is a dash."""
    return "-" if value is None else f"{value:.{digits}g}"


@contextmanager
def training_progress(visible: bool) -> Iterator[Any]:
    """A watcher for :func:`residuum.training.train`: bar, loss and margin, live on a terminal."""
    if not visible or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("training", total=None, state="")

        def watch(progress: Progress) -> None:
            shown = progress.normalized if progress.normalized is not None else progress.margin
            state = f"step {progress.step}  loss {progress.loss:.2e}  margin {number(shown, 3)}"
            bars.update(task, total=progress.steps, completed=progress.step, state=state)

        yield watch
