"""Every figure by its name, and how it is made: alone, or several in processes side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from papers import buzaglo2023, drawing, haim2022, loo2024, refael2025, shen2026, uniqueness
from papers.runs import PICTURE, SCALES, Context, load, save
from residuum.errors import ResiduumError, require_known
from residuum.records import make_directory, write_atomic
from residuum.records.rundir import environment, one_thread

PAPERS = (haim2022, refael2025, shen2026, buzaglo2023, loo2024, uniqueness)
FIGURES = {
    f"{paper.__name__.rpartition('.')[2]}:{name}": paper.FIGURES[name]
    for paper in PAPERS
    for name in sorted(paper.FIGURES, key=lambda name: (len(name), name))  # fig2 before fig10
}


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
    write_atomic(Path(out) / ".gitignore", "*\n")
    if compute:
        make_directory(folder)
        start, alone = time.monotonic(), scale != "paper" and context.device == "cpu"
        with one_thread() if alone else nullcontext():
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


def performed(
    asked: Sequence[tuple[str, dict[str, Any]]], workers: int
) -> Iterator[tuple[str, dict[str, Any] | ResiduumError]]:
    """What each figure gave, or why it did not, as they end; those named first begin first.

    In several processes victims and attacks that figures share are computed by one of them.
    """
    if workers == 1:
        for name, options in asked:
            yield name, attempt(name, options)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(attempt, name, options): name for name, options in asked}
        for one in as_completed(waiting):
            yield waiting[one], one.result()


def attempt(name: str, options: dict[str, Any]) -> dict[str, Any] | ResiduumError:
    """A figure, or what it was refused for."""
    try:
        return reproduce(name, **options)
    except ResiduumError as problem:
        return problem
