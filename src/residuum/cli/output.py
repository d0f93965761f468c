"""How results reach the user: one JSON object, or tables; progress only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residuum.attacks.state import Progress as AttackProgress
    from residuum.sweeping.run import Progress as SweepProgress
    from residuum.training import Progress as TrainingProgress

Update = Callable[[int, int, str], None]


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
    with _bar("training", visible) as update:
        if update is None:
            yield None
            return

        def watch(progress: TrainingProgress) -> None:
            shown = progress.normalized if progress.normalized is not None else progress.margin
            state = f"step {progress.step}  loss {progress.loss:.2e}  margin {number(shown, 3)}"
            update(progress.step, progress.steps, state)

        yield watch


@contextmanager
def attack_progress(visible: bool) -> Iterator[Any]:
    """A watcher for :func:`residuum.attacks.attack`: best restart, residual per layer."""
    with _bar("attacking", visible) as update:
        if update is None:
            yield None
            return

        def watch(progress: AttackProgress) -> None:
            best = int(progress.loss.nan_to_num(nan=float("inf")).argmin())
            residuals = progress.layers[best].clamp(min=0).sqrt().tolist()
            shown = " ".join(f"{value:.1e}" for value in residuals)
            state = f"step {progress.step}  loss {float(progress.loss[best]):.1e}  layers {shown}"
            update(progress.step, progress.steps, state)

        yield watch


@contextmanager
def certificate_progress(visible: bool) -> Iterator[Any]:
    """A watcher for :func:`residuum.theory.uniqueness.uniqueness`: candidates done."""
    with _bar("certifying", visible) as update:
        if update is None:
            yield None
        else:
            yield lambda done, total: update(done, total, f"{done} of {total}")


@contextmanager
def split_progress(visible: bool) -> Iterator[Any]:
    """A watcher for directions of splits, found sample by sample."""
    with _bar("splitting", visible) as update:
        if update is None:
            yield None
        else:
            yield lambda done, of: update(done, of, f"sample {done} of {of}")


@contextmanager
def sweep_progress(visible: bool) -> Iterator[Any]:
    """A watcher for :func:`residuum.sweeping.sweep`: trials done, best residual, rate, time to go."""
    with _bar("sweeping", visible) as update:
        if update is None:
            yield None
            return

        def watch(progress: SweepProgress) -> None:
            left = progress.remaining
            state = (
                f"{progress.done} of {progress.total}  best {number(progress.best, 3)}  "
                f"failed {progress.failed}  {progress.per_minute:.3g} per minute"
                + ("" if left is None else f"  about {_duration(left)} left")
            )
            update(progress.done, progress.total, state)

        yield watch


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} seconds"


@contextmanager
def trial_progress(visible: bool) -> Iterator[Any]:
    """A watcher for trials of defenses: which one, and its stage."""
    with _bar("defending", visible) as update:
        yield update


@contextmanager
def _bar(title: str, visible: bool) -> Iterator[Update | None]:
    """One progress bar on standard error; None where nobody watches."""
    if not visible or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[state]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None, state="")

        def update(step: int, steps: int, state: str) -> None:
            bars.update(task, total=steps, completed=step, state=state)

        yield update
