"""``residuum reproduce``: a figure or table of a paper again, measured beside published values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from residuum.cli.options import Device, Json, Quiet, check_device
from residuum.cli.output import (
    attack_progress,
    print_json,
    print_line,
    print_table,
    training_progress,
)
from residuum.errors import InputError

EXAMPLES = """Examples:

residuum reproduce --list

residuum reproduce haim2022:fig2

residuum reproduce haim2022:fig3 --scale paper --root data --device cuda --out runs/papers

residuum reproduce haim2022:fig3 --draw-only --out runs/papers
"""
COLUMNS = ("published", "corrected", "measured", "chance")


def command(
    figure: Annotated[
        str | None,
        typer.Argument(
            metavar="PAPER:FIGURE", help="What to reproduce; --list names them.", show_default=False
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="tiny (seconds), small (minutes on a CPU) or paper (a GPU and data files)."
        ),
    ] = "small",
    out: Annotated[
        Path, typer.Option(help="Folder; each figure gets one of its own in it.")
    ] = Path("runs/reproduce"),
    root: Annotated[
        Path | None,
        typer.Option(
            "--root",
            "--data-root",
            help="Folder of mnist.npz and cifar10.npz, or torchvision's layout. By default $RESIDUUM_DATA.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Where victims and attacks are kept and found again; by default OUT/cache.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="0 takes the first samples, as the papers do.")
    ] = 0,
    device: Device = "cpu",
    list_all: Annotated[bool, typer.Option("--list", help="Name every figure and table.")] = False,
    no_draw: Annotated[
        bool, typer.Option("--no-draw", help="Compute and save; draw later with --draw-only.")
    ] = False,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Draw what was computed before.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce a figure or table of a paper: train or load victims, attack, score, draw, compare."""
    from residuum.reproduce.registry import reproduce

    if list_all:
        _list(json, quiet)
        return
    if figure is None:
        raise InputError(
            "Nothing to reproduce was named.", "Example: residuum reproduce haim2022:fig2."
        )
    if no_draw and draw_only:
        raise InputError("--no-draw and --draw-only exclude each other.", "Give one of them.")
    check_device(device)
    spoken = not (json or quiet)
    done = reproduce(
        figure,
        out,
        scale=scale,
        device=device,
        root=_root(root),
        cache=cache,
        seed=seed,
        compute=not draw_only,
        draw=not no_draw,
        training=lambda: training_progress(spoken),
        attacking=lambda: attack_progress(spoken),
    )
    if json:
        print_json(done)
    elif spoken:
        _show(done)


def _root(given: Path | None) -> str | None:
    """The data folder said or set in the environment."""
    import os

    from residuum.datasets import ROOT_VARIABLE

    return str(given) if given is not None else os.environ.get(ROOT_VARIABLE) or None


def _list(json: bool, quiet: bool) -> None:
    from residuum.reproduce.registry import FIGURES

    if json:
        print_json({"figures": {name: figure.title for name, figure in FIGURES.items()}})
    elif not quiet:
        width = max(map(len, FIGURES))
        for name, figure in FIGURES.items():
            print_line(f"{name:<{width}}  {figure.title}")


def _show(done: dict[str, Any]) -> None:
    from residuum.reproduce.outcome import shown

    filled = [name for name in COLUMNS if done[name]]
    rows = [
        (row["what"], *(shown(row[name]) for name in filled), row["note"]) for row in done["rows"]
    ]
    title = f"{done['id']}: {done['title']} (scale {done['scale']}, {done['seconds']:.0f} s)"
    print_table(title, ("what", *filled, "note"), rows)
    for note in done["notes"]:
        print_line(f"note: {note}")
    for what, path in (("figure", done["picture"]), ("results", done["folder"])):
        if path is not None:
            print_line(f"{what}: {path}")
    print_line(f"kept for the next run: {done['cache_bytes'] / 1e6:.1f} MB in the cache")
