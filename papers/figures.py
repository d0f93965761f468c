"""Every figure by its name, and how it is made: alone, or several in processes side by side."""

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
GRACE = 3.0  # seconds for workers to end by themselves, and between signals to those that have not
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
    """Compute (or load), draw, and return what result.json holds.

    out: a folder for all figures, each in one of its own below it for every scale and seed (NAME at
    paper scale and seed 0, NAME-small, NAME-small-images with a root, NAME-tiny-seed1);
    cache: where victims and attacks are kept, by default ``cache`` in that folder; options: device,
    root, seed, visible of Context.
    """
    require_known(name, FIGURES, "No figure")
    context = Context(SCALES[scale], make_directory(cache or Path(out) / "cache"), **options)
    figure, folder = FIGURES[name], Path(out) / (name.replace(":", "-") + context.suffix)
    check_scale(folder, scale)
    write_atomic(Path(out) / ".gitignore", "*\n")
    if compute:
        make_directory(folder)
        start, alone = time.monotonic(), scale != "paper" and context.device == "cpu"
        with use_one_thread() if alone else nullcontext():
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
    kept = sum(file.stat().st_size for file in context.cache.rglob("*") if file.is_file())
    return {**summary, "folder": str(folder), "picture": picture, "cache_bytes": kept}


def check_scale(folder: Path, scale: str) -> None:
    """Refuse a folder that holds another scale: once all of them had the name that paper scale has."""
    with suppress(OSError, ValueError, LookupError):
        found = json.loads((folder / RESULT).read_text())["scale"]
        if found != scale:
            raise InputError(
                f"{str(folder)!r} holds a result of scale {found}, not {scale}.",
                "Move it away, or choose another folder with --out.",
            )


def performed(asked: Sequence[tuple[str, dict[str, Any]]], workers: int) -> Made:
    """What each figure gave, or why it did not, as they end; those named first begin first.

    In several processes victims and attacks that figures share are computed by one of them. An
    interrupt ends those at work, which keep what they have, and no other begins.
    """
    if workers == 1:
        for name, options in asked:
            yield name, attempt(name, options)
        return
    left, running, others = deque(asked), dict[Future[Any], str](), active_pids()
    with ProcessPoolExecutor(workers, get_context("spawn"), deaf) as pool:
        try:
            while left or running:
                # Never more than there are workers: a pool does not give back what it has queued.
                while left and len(running) < workers:
                    with held():
                        running[pool.submit(at_work, *left[0])] = left[0][0]
                    left.popleft()
                for one in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(one), one.result()
        except KeyboardInterrupt:
            # In a terminal Ctrl-C has reached the workers too, and they are saving.
            while wait(running, timeout=GRACE).not_done:
                for pid in active_pids() - others:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGINT)
            raise


def active_pids() -> set[int]:
    """Processes that this one has started and that live."""
    return {child.pid for child in active_children() if child.pid is not None}


@contextmanager
def held() -> Iterator[None]:
    """Interrupts wait meanwhile; a process that is started here begins with them held as well."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def deaf() -> None:
    """A worker without work has nothing to end: the pool's own code would end in a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def at_work(name: str, options: dict[str, Any]) -> dict[str, Any] | ResiduumError:
    """A figure in a worker; the first interrupt ends it, others would stop it from saving."""

    def interrupted(*_: object) -> None:
        deaf()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    try:
        return attempt(name, options)
    finally:
        deaf()


def attempt(name: str, options: dict[str, Any]) -> dict[str, Any] | ResiduumError:
    """A figure, or what it was refused for."""
    try:
        return reproduce(name, **options)
    except ResiduumError as problem:
        return problem
