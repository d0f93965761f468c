"""How results reach the user: one JSON object, or tables; progress only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residuum.attacks.state import Progress as AttackProgress
    from residuum.sweeping.run import Progress as SweepProgress
    from residuum.training import Progress as TrainingProgress

State = tuple[int, int, str]  # steps done, steps in all, and a line on where it stands


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


def print_notes(notes: Iterable[str], kind: str = "note") -> None:
    """What else is to be said, one line each."""
    for note in notes:
        print_line(f"{kind}: {note}")


def number(value: float | None, digits: int = 4) -> str:
    """A figure for a person; a missing one is a dash."""
    return "-" if value is None else f"{value:.{digits}g}"


@contextmanager
def progress(title: str, state: Callable[..., State], visible: bool) -> Iterator[Any]:
    """A watcher: one bar on standard error with the ``state`` of what it is told; None for nobody."""
    if not visible or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    told = TextColumn("{task.fields[state]}", markup=False)
    columns = (TextColumn(title), BarColumn(bar_width=10), told, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
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
