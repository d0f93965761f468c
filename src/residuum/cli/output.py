"""How results reach the user: one JSON object, or tables; progress only on a terminal."""

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

State = tuple[int, int, str]  # steps done, steps in all, and a line on where it stands
LOG_EVERY = 10.0  # seconds between lines where there is no terminal


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_line(text: str) -> None:
    """One line of plain text; markup in it is shown, not obeyed."""
    sys.stdout.write(text + "\n")


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table; cells are plain text, whatever a file put into them.

    Words are never broken: where the terminal is too narrow for that, every row is a short list.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console, heads, cells = Console(), [*columns], [[*row] for row in rows]
    widths = _widths(heads, cells, console.width - 3 * len(heads) - 1)
    if widths is None:
        print_line(title)
        for row in cells:
            print_line(f"- {row[0]}")
            for head, cell in zip(heads[1:], row[1:], strict=True):
                name = " ".join(head.split())
                print_wrapped(cell, f"    {name}: " if name else "    ")
        return
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for column, width in zip(heads, widths, strict=True):
        table.add_column(escape(column), overflow="fold", min_width=width, max_width=width)
    for row in cells:
        table.add_row(*map(escape, row))
    console.print(table)


def _widths(heads: list[str], rows: list[list[str]], room: int) -> list[int] | None:
    """Of columns: what they would like, or less where ``room`` is short; None where words would break."""
    columns = [[head, *cells] for head, *cells in zip(heads, *rows, strict=True)]
    liked = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
    least = [
        max((len(word) for cell in cells for word in cell.split()), default=1) for cells in columns
    ]
    if sum(least) > room:
        return None
    widths = liked
    while sum(widths) > room:  # the widest gives way
        widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i]) * widths[i])
        widths[widest] -= 1
    return widths


def print_wrapped(text: str, first: str = "", rest: str | None = None) -> None:
    """A paragraph as wide as the terminal, broken between words only."""
    rest = " " * len(first) if rest is None else rest
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    wrap = textwrap.TextWrapper(columns(), first, rest, **whole)
    for line in wrap.wrap(text) or [first.rstrip()]:
        print_line(line)


def columns() -> int:
    """Of the terminal, 80 where there is none; no more than are read with ease."""
    return min(shutil.get_terminal_size().columns, 110)


def print_notes(notes: Iterable[str], kind: str = "note") -> None:
    """What else is to be said, one line each."""
    for note in notes:
        print_wrapped(f"{kind}: {note}", rest="  ")


def number(value: float | None, digits: int = 4) -> str:
    """A figure for a person; a missing one is a dash."""
    return "-" if value is None else f"{value:.{digits}g}"


@contextmanager
def progress(title: str, state: Callable[..., State], visible: bool) -> Iterator[Any]:
    """A watcher of the ``state`` of what it is told; None for nobody.

    On a terminal one bar on standard error; elsewhere, as in the log of a pipeline, a plain line there
    every ``LOG_EVERY`` seconds.
    """
    if not visible:
        yield None
        return
    if not sys.stderr.isatty():
        said = [time.monotonic()]

        def log(*told: Any) -> None:
            if time.monotonic() - said[0] >= LOG_EVERY:
                said[0] = time.monotonic()
                step, steps, line = state(*told)
                share = f"{step / steps:.0%}  " if steps else ""
                sys.stderr.write(f"{title}: {share}{line}\n")
                sys.stderr.flush()

        yield log
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    told = TextColumn("{task.fields[state]}", markup=False)
    bar = (TextColumn(title), BarColumn(bar_width=10), told, TimeRemainingColumn())
    with Progress(*bar, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None, state="")

        def watch(*told: Any) -> None:
            step, steps, line = state(*told)
            bars.update(task, total=steps, completed=step, state=line)

        yield watch


def _training(at: TrainingProgress) -> State:
    """Loss and margin."""
    shown = at.normalized if at.normalized is not None else at.margin
    return at.step, at.steps, f"step {at.step}  loss {at.loss:.2e}  margin {number(shown, 3)}"


def _attacking(at: AttackProgress) -> State:
    """The best restart, residual per layer."""
    best = int(at.loss.nan_to_num(nan=float("inf")).argmin())
    residuals = at.layers[best].clamp(min=0).sqrt().tolist()
    shown = " ".join(f"{value:.1e}" for value in residuals)
    return at.step, at.steps, f"step {at.step}  loss {float(at.loss[best]):.1e}  layers {shown}"


def _sweeping(at: SweepProgress) -> State:
    """Trials done, best residual, rate, time to go."""
    rate = at.fresh / max(at.seconds, 1e-9)  # of this session
    left = f"  about {_duration((at.total - at.done) / rate)} left" if at.fresh else ""
    state = f"{at.done} of {at.total}  best {number(at.best, 3)}  failed {at.failed}"
    return at.done, at.total, f"{state}  {60 * rate:.3g} per minute{left}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} seconds"


# Each takes whether anybody watches.
training_progress = partial(progress, "training", _training)
attack_progress = partial(progress, "attacking", _attacking)
sweep_progress = partial(progress, "sweeping", _sweeping)
certificate_progress = partial(progress, "certifying", lambda at, of: (at, of, f"{at} of {of}"))
split_progress = partial(progress, "splitting", lambda at, of: (at, of, f"sample {at} of {of}"))
scan_progress = partial(progress, "scanning", lambda at, of, name: (at, of, f"{at} of {of} files"))
trial_progress = partial(progress, "defending", lambda at, of, state: (at, of, state))
exposure_progress = partial(progress, "exposure", lambda at, of, state: (at, of, state))
