"""Output for the user: one JSON object or tables, and progress while a command runs."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residuum.attacks.base import AttackProgress
    from residuum.sweeping.run import SweepProgress
    from residuum.training import TrainingProgress

# The state of a task: number of finished steps, number of all steps, and a line of text about the state.
State = tuple[int, int, str]
LOG_INTERVAL = 10.0  # seconds between progress lines if standard error is not a terminal
MAX_WIDTH = 110  # maximal number of characters in a printed line. Longer lines are hard to read


def print_json(value: Any) -> None:
    """Print one JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


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
    """Return widths of table columns with a sum of at most ``available``, without breaking words.

    The result is None if this is impossible.
    """
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


@contextmanager
def show_progress(title: str, describe: Callable[..., State], visible: bool) -> Iterator[Any]:
    """Show the progress of a task on standard error.

    On a terminal, the progress is a bar. Elsewhere, as in the log of a pipeline, the progress is a plain line
    every ``LOG_INTERVAL`` seconds.

    Args:
        title: Name of the task.
        describe: Function that gets the arguments of the callback, and returns the finished steps, the number
            of all steps, and a line about the current state.
        visible: Whether to show progress.

    Yields:
        A function that the task calls with its progress, or None if progress is not shown.
    """
    if not visible:
        yield None
        return
    if not sys.stderr.isatty():
        last_log_time = time.monotonic()

        def log(*progress: Any) -> None:
            nonlocal last_log_time
            if time.monotonic() - last_log_time >= LOG_INTERVAL:
                last_log_time = time.monotonic()
                step, steps, line = describe(*progress)
                percentage = f"{step / steps:.0%}  " if steps else ""
                sys.stderr.write(f"{title}: {percentage}{line}\n")
                sys.stderr.flush()

        yield log
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    state_column = TextColumn("{task.fields[state]}", markup=False)
    bar_columns = (TextColumn(title), BarColumn(bar_width=10), state_column, TimeRemainingColumn())
    with Progress(*bar_columns, console=Console(stderr=True), transient=True) as bars:
        progress_task = bars.add_task(title, total=None, state="")

        def update_bar(*progress: Any) -> None:
            step, steps, line = describe(*progress)
            bars.update(progress_task, total=steps, completed=step, state=line)

        yield update_bar


def _describe_training(progress: TrainingProgress) -> State:
    margin = progress.normalized if progress.normalized is not None else progress.margin
    line = f"step {progress.step}  loss {progress.loss:.2e}  margin {format_number(margin, 3)}"
    return progress.step, progress.steps, line


def _describe_attack(progress: AttackProgress) -> State:
    """Describe the progress of an attack: steps, loss, and error in each layer of the best run."""
    best_restart = int(progress.loss.nan_to_num(nan=float("inf")).argmin())
    residuals = progress.layers[best_restart].clamp(min=0).sqrt().tolist()
    residual_text = " ".join(f"{value:.1e}" for value in residuals)
    loss = float(progress.loss[best_restart])
    line = f"step {progress.step}  loss {loss:.1e}  residual per layer {residual_text}"
    return progress.step, progress.steps, line


def _describe_sweep(progress: SweepProgress) -> State:
    """Describe the progress of a sweep (many attacks): best error, trials per minute, remaining time."""
    # To estimate the remaining time, count only the trials that were finished since this process started.
    trials_per_second = progress.fresh / max(progress.seconds, 1e-9)
    remaining_time = ""
    if progress.fresh:
        remaining_time = (
            f"  about {_duration((progress.total - progress.done) / trials_per_second)} left"
        )
    best_text = format_number(progress.best, 3)
    line = f"{progress.done} of {progress.total}  best {best_text}  failed {progress.failed}"
    return (
        progress.done,
        progress.total,
        f"{line}  {60 * trials_per_second:.3g} per minute{remaining_time}",
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} seconds"


# Each of these functions returns a context manager that shows the progress of a task if ``visible`` is True.
training_progress = partial(show_progress, "training", _describe_training)
attack_progress = partial(show_progress, "attacking", _describe_attack)
sweep_progress = partial(show_progress, "sweeping", _describe_sweep)
certificate_progress = partial(
    show_progress, "certifying", lambda done, total: (done, total, f"{done} of {total}")
)
split_progress = partial(
    show_progress, "splitting", lambda done, total: (done, total, f"sample {done} of {total}")
)
scan_progress = partial(
    show_progress, "scanning", lambda done, total, _: (done, total, f"{done} of {total} files")
)
trial_progress = partial(show_progress, "defending", lambda done, total, line: (done, total, line))
exposure_progress = partial(
    show_progress, "exposure", lambda done, total, line: (done, total, line)
)
