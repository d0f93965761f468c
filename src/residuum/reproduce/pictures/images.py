"""Grids of reconstructions above their training images, and scores against outputs."""

from __future__ import annotations

import io
import math
from typing import Any

import torch

from residuum.report import drawing
from residuum.report.drawing import BLUE, INK, ORANGE, Cell
from residuum.reproduce.outcome import Array, Outcome

COLUMNS = 15
GOOD = 0.4  # ssim3 above which the paper calls a reconstruction good


def grids(outcome: Outcome) -> bytes:
    """Every run of the figure: reconstructions above training images, best first."""
    runs = outcome.details["runs"].items()
    return stacked([_band(outcome, name, _title(name, run)) for name, run in runs])


def methods(outcome: Outcome) -> bytes:
    """Every attack on every run, a band each."""
    bands = []
    for name, run in outcome.details["runs"].items():
        for attack in run["attacks"]:
            title = f"{_title(name, run)}: {attack}"
            bands.append(_band(outcome, f"{name}/{attack}", title, COLUMNS))
    return stacked(bands)


def shifts(outcome: Outcome) -> bytes:
    """Reconstructions beside their nearest training images, a row per shift."""
    names = list(dict.fromkeys(key.rsplit("/", 1)[0] for key in outcome.arrays))
    return stacked([_band(outcome, name, f"{name}, NCC") for name in names])


def stacked(
    bands: list[tuple[str, list[Cell]]], rows: tuple[str, ...] = ("found", "train")
) -> bytes:
    """Grids one below the other, each under its title; rows: what the images of a cell are."""
    from PIL import Image

    pictures = [drawing.image_grid(title, cells, rows, COLUMNS) for title, cells in bands]
    if len(pictures) == 1:
        return pictures[0]

    images = [Image.open(io.BytesIO(part)).convert("RGB") for part in pictures]
    sheet = Image.new("RGB", (max(i.width for i in images), sum(i.height for i in images)), "white")
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def scatters(outcome: Outcome) -> bytes:
    """Score against output, a panel per run; recovered samples are filled."""
    names = list(outcome.details["runs"])
    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure = drawing.new_figure(2.9 * columns, 2.5 * rows + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, names, strict=False):
        output, score, found = (
            outcome.arrays[f"{name}/{k}"] for k in ("output", "score", "recovered")
        )
        for mask, colour, label in (
            (~found, ORANGE, "not recovered"),
            (found, BLUE, "recovered (NCC)"),
        ):
            axes.scatter(
                output[mask],
                score[mask],
                s=9,
                alpha=0.7,
                color=colour,
                label=label,
                marker="x" if colour == ORANGE else "o",
                linewidth=0.8 if colour == ORANGE else 0,
            )
        axes.axhline(GOOD, color=INK, lw=0.8, ls=":")
        axes.set_title(name, fontsize=8.5)
        axes.set_xlabel("network output", fontsize=7.5)
        axes.set_ylabel("score", fontsize=7.5)
        drawing.tidy(axes)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize=7.5,
        frameon=False,
    )
    return drawing.png(figure)


def _title(name: str, run: dict[str, Any]) -> str:
    return f"{name} ({run['data']}, {run['n']} samples), best first by {run['metric']}"


def _band(
    outcome: Outcome, key: str, title: str, count: int | None = None
) -> tuple[str, list[Cell]]:
    found, true, score = (outcome.arrays[f"{key}/{part}"] for part in ("found", "true", "score"))
    return title, cells(found, true, score)[:count]


def cells(found: Array, true: Array, score: Array) -> list[Cell]:
    """A pair of images each, captioned by its score."""
    triples = zip(found, true, score, strict=True)
    return [
        Cell((torch.from_numpy(a), torch.from_numpy(b)), f"{float(s):.2f}") for a, b, s in triples
    ]
