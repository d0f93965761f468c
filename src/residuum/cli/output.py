"""Output for the user: one JSON object or tables (:mod:`residuum.terminal`), and progress of a command."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from residuum.terminal import format_number as format_number
from residuum.terminal import print_line as print_line
from residuum.terminal import print_notes as print_notes
from residuum.terminal import print_table as print_table
from residuum.terminal import print_wrapped as print_wrapped
from residuum.terminal import terminal_width as terminal_width

if TYPE_CHECKING:
    from residuum.attacks.base import AttackProgress
    from residuum.sweeping.run import SweepProgress
    from residuum.training import TrainingProgress

# The state of a task: number of finished steps, number of all steps, and a line of text about the state.
State = tuple[int, int, str]
LOG_INTERVAL = 10.0  # seconds between progress lines if standard error is not a terminal


def print_json(value: Any) -> None:
    """Print one JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


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
    """Return the progress of an attack, with the loss and the residual per layer of the best restart."""
    best_restart = int(progress.loss.nan_to_num(nan=float("inf")).argmin())
    residuals = progress.layers[best_restart].clamp(min=0).sqrt().tolist()
    residual_text = " ".join(f"{value:.1e}" for value in residuals)
    loss = float(progress.loss[best_restart])
    line = f"step {progress.step}  loss {loss:.1e}  residual per layer {residual_text}"
    return progress.step, progress.steps, line


def _describe_sweep(progress: SweepProgress) -> State:
    """Return the progress of a sweep, with the best residual, trials per minute and remaining time."""
    # The rate counts only trials that finished since the sweep was started or continued.
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
