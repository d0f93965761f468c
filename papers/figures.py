"""All figures by name, and how they are computed: one by one, or several in parallel processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from papers import buzaglo2023, drawing, haim2022, loo2024, refael2025, shen2026, uniqueness
from papers.runs import PICTURE, RESULT, SCALES, Context, load, save
from residuum.errors import InputError, ResiduumError, require_known
from residuum.records import make_directory, write_atomic
from residuum.records.rundir import environment, use_one_thread

PAPERS = (haim2022, refael2025, shen2026, buzaglo2023, loo2024, uniqueness)
FIGURES = {
    f"{paper.__name__.rpartition('.')[2]}:{name}": paper.FIGURES[name]
    for paper in PAPERS
    for name in sorted(paper.FIGURES, key=lambda name: (len(name), name))  # fig2 before fig10
}
GRACE = 3.0  # seconds that workers have to end, and between signals to workers that have not ended
Made = Generator[tuple[str, dict[str, Any] | ResiduumError], None, None]


def reproduce(
    name: str,
    out: str | Path,
    scale: str = "small",
    *,
    cache: str | Path | None = None,
    compute: bool = True,
    draw: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Compute or load a figure, and draw it.

    Args:
        name: A key of ``FIGURES``.
        out: Folder of all figures. Every figure, scale and seed has a subfolder: NAME at paper scale and seed
            0, NAME-small, NAME-small-images with a root, NAME-tiny-seed1.
        scale: A key of ``SCALES``.
        cache: Folder of victims and attacks, by default ``cache`` in ``out``.
        compute: Whether to compute the figure, else it is loaded.
        draw: Whether to draw the figure.
        **options: device, root, seed and visible of ``Context``.

    Returns:
        The content of result.json, with the folder, the picture and the size of the cache.
    """
    require_known(name, FIGURES, "No figure")
    context = Context(SCALES[scale], make_directory(cache or Path(out) / "cache"), **options)
    figure, folder = FIGURES[name], Path(out) / (name.replace(":", "-") + context.suffix)
    check_scale(folder, scale)
    write_atomic(Path(out) / ".gitignore", "*\n")
    if compute:
        make_directory(folder)
        start, is_small = time.monotonic(), scale != "paper" and context.device == "cpu"
        with use_one_thread() if is_small else nullcontext():
            outcome = figure.compute(context)
        if scale != "paper":  # titles and rows are named after the published experiment
            less = f"scale {scale}: networks, samples or steps are fewer than published"
            digits = "; where MNIST or CIFAR is named, bundled digits stand for it"
            outcome.notes.append(less + (digits if context.bundled else ""))
        head = {"id": name, "title": figure.title, "scale": scale, "seed": context.seed}
        head |= {"device": context.device, "seconds": time.monotonic() - start}
        save(outcome, folder, {**head, "environment": environment(context.device)})
    outcome, summary = load(folder)
    picture = None
    if draw and figure.draw is not None:
        picture = str(write_atomic(folder / PICTURE, drawing.picture(figure.draw, outcome)))
    size = sum(file.stat().st_size for file in context.cache.rglob("*") if file.is_file())
    return {**summary, "folder": str(folder), "picture": picture, "cache_bytes": size}


def check_scale(folder: Path, scale: str) -> None:
    """Check that a folder does not hold a figure of another scale.

    Args:
        folder: The folder.
        scale: The scale.

    Raises:
        InputError: If it does.
    """
    # In older versions the folders of all scales had the name of the paper scale.
    with suppress(OSError, ValueError, LookupError):
        existing = json.loads((folder / RESULT).read_text())["scale"]
        if existing != scale:
            raise InputError(
                f"{str(folder)!r} holds a result of scale {existing}, not {scale}.",
                "Move the folder, or choose another folder with --out.",
            )


def performed(
    requests: Sequence[tuple[str, dict[str, Any]]], workers: int
) -> Generator[tuple[str, dict[str, Any] | ResiduumError], None, None]:
    """Compute figures, in the order of the requests.

    With several workers, victims and attacks that figures share are computed only once. An interrupt ends the
    workers, which save their state, and no other figure begins.

    Args:
        requests: Names of figures with the arguments of ``reproduce``.
        workers: Number of processes.

    Yields:
        The name of a figure with its result or its error, when it is complete.

    Raises:
        KeyboardInterrupt: If the user interrupts the computation.
    """
    if workers == 1:
        for name, options in requests:
            yield name, attempt(name, options)
        return
    waiting, running, other_pids = deque(requests), dict[Future[Any], str](), active_pids()
    with ProcessPoolExecutor(workers, get_context("spawn"), ignore_interrupts) as pool:
        try:
            while waiting or running:
                # A pool does not return queued work, so there are never more requests than workers.
                while waiting and len(running) < workers:
                    with blocked_interrupts():
                        running[pool.submit(attempt_in_worker, *waiting[0])] = waiting[0][0]
                    waiting.popleft()
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except KeyboardInterrupt:
            # In a terminal, workers receive Ctrl-C too, and save their state.
            while wait(running, timeout=GRACE).not_done:
                for pid in active_pids() - other_pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGINT)
            raise


def active_pids() -> set[int]:
    """Return the running processes that this process has started."""
    return {child.pid for child in active_children() if child.pid is not None}


@contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Block interrupts, also in processes that are started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore interrupts in an idle worker, where they would cause a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def attempt_in_worker(name: str, options: dict[str, Any]) -> dict[str, Any] | ResiduumError:
    """Compute a figure in a worker. Only the first interrupt counts, so that the worker can save.

    Args:
        name: A key of ``FIGURES``.
        options: Arguments of ``reproduce``.

    Returns:
        The result or the error.
    """

    def interrupt(*_: object) -> None:
        ignore_interrupts()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        return attempt(name, options)
    finally:
        ignore_interrupts()


def attempt(name: str, options: dict[str, Any]) -> dict[str, Any] | ResiduumError:
    """Compute a figure.

    Args:
        name: A key of ``FIGURES``.
        options: Arguments of ``reproduce``.

    Returns:
        The result or the error.
    """
    try:
        return reproduce(name, **options)
    except ResiduumError as problem:
        return problem
