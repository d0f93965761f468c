"""Every figure and table that can be reproduced, and how one is run.

A new paper is a module with a dict ``FIGURES`` and one line in ``PAPERS``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from residuum.errors import InputError, did_you_mean
from residuum.records import make_directory, write_atomic
from residuum.records.environment import environment
from residuum.reproduce import buzaglo2023, haim2022, loo2024, refael2025, shen2026
from residuum.reproduce.cache import Cache
from residuum.reproduce.context import Context, Watching
from residuum.reproduce.figure import Figure
from residuum.reproduce.outcome import PICTURE, Outcome, load, save
from residuum.reproduce.scales import scale_named


def find(name: str) -> Figure:
    """The figure of this id, paper:figure."""
    if name not in FIGURES:
        raise InputError(f"No figure {name!r}.", did_you_mean(name, tuple(FIGURES)))
    return FIGURES[name]


def reproduce(
    name: str,
    out: str | Path,
    *,
    scale: str = "small",
    device: str = "cpu",
    root: str | Path | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
    compute: bool = True,
    draw: bool = True,
    **watching: Watching,
) -> dict[str, Any]:
    """Compute (or load), draw, and return what result.json holds.

    out: a folder for all figures, each in one of its own below it; cache: where victims and attacks
    are kept, by default ``cache`` in that folder; watching: ``training`` and ``attacking`` of Context.
    """
    figure, size = find(name), scale_named(scale)
    folder = make_directory(Path(out) / name.replace(":", "-"))
    kept = Cache(make_directory(cache if cache is not None else Path(out) / "cache"))
    write_atomic(Path(out) / ".gitignore", "*\n")
    if compute:
        where = None if root is None else Path(root)
        context = Context(size, kept, device, where, seed, **watching)
        _compute(name, context, folder)
    outcome, summary = load(folder)
    picture = None
    if draw and figure.draw is not None:
        picture = str(write_atomic(folder / PICTURE, figure.draw(outcome)))
    return {**summary, "folder": str(folder), "picture": picture, "cache_bytes": kept.bytes_used}


def _compute(name: str, context: Context, folder: Path) -> None:
    """Run a figure and save what it found."""
    figure, scale, device = find(name), context.scale.name, context.device
    start = time.monotonic()
    with _few_threads(scale != "paper" and device == "cpu"):
        outcome = _labelled(figure.compute(context), scale)
    head = {
        "id": name,
        "title": figure.title,
        "scale": scale,
        "seed": context.seed,
        "device": device,
        "seconds": time.monotonic() - start,
        "environment": environment(device),
    }
    save(outcome, folder, head)


@contextmanager
def _few_threads(wanted: bool) -> Iterator[None]:
    """One thread: the same figures whatever the number of cores; small problems lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _labelled(outcome: Outcome, scale: str) -> Outcome:
    """Published values are of the paper's size; say so wherever another one was run."""
    if scale == "paper" or not outcome.columns()["published"]:
        return outcome
    note = f"scale {scale}: smaller networks and other data than the published values are of"
    return replace(outcome, notes=(*outcome.notes, note))


PAPERS: dict[str, dict[str, Figure]] = {
    "haim2022": haim2022.FIGURES,
    "refael2025": refael2025.FIGURES,
    "shen2026": shen2026.FIGURES,
    "buzaglo2023": buzaglo2023.FIGURES,
    "loo2024": loo2024.FIGURES,
}
FIGURES: dict[str, Figure] = {
    f"{paper}:{name}": figure
    for paper, figures in PAPERS.items()
    for name, figure in figures.items()
}
