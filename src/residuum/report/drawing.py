"""Pieces that figures are made of: image grids, small line panels, points in the plane.

Colours are those of Okabe and Ito, told apart by colour-blind readers; none carries a meaning that a
shape or a word does not carry too. matplotlib is imported where it is used, without pyplot.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, YELLOW, GREY, INK = "#56B4E9", "#E69F00", "#9A9A9A", "#222222"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, INK)
MARKERS = "os^Dv<>p"
DPI = 120
SHOWN, PANELS = 30, 12  # images and curves of a figure
CELL, GAP, CAPTION, MARGIN, TITLE = 0.8, 0.1, 0.2, 0.12, 0.34  # inches
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Cell:
    """One column of a grid: one or more images of the same shape, a caption, framed or not."""

    images: tuple[Tensor, ...]
    caption: str = ""
    framed: bool = False


def new_figure(width: float, height: float, automatic: bool = True) -> Figure:
    """An empty figure of this size in inches; automatic layout takes longer than all the rest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained" if automatic else None)
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def is_image(shape: Sequence[int]) -> bool:
    """Whether a sample of this shape is looked at as an image."""
    return len(shape) in (2, 3) and min(shape[-2:]) > 1


def pixels(image: Tensor) -> Array:
    """(h, w) grey or (h, w, 3) colour, stretched to its own range; other channels are averaged."""
    values = image.detach().cpu().double()
    if values.ndim == 3:
        values = values.permute(1, 2, 0) if len(values) == 3 else values.mean(0)
    low, high = values.min(), values.max()
    return ((values - low) / (high - low) if high > low else values * 0).numpy()


def image_grid(title: str, cells: Sequence[Cell], rows: Sequence[str], columns: int = 10) -> bytes:
    """Bands of cells; ``rows`` names the images of a cell from top to bottom, at the left edge."""
    columns = max(1, min(columns, len(cells)))
    bands = math.ceil(len(cells) / columns)
    tall, wide = cells[0].images[0].shape[-2:]
    w, h = CELL * min(1, wide / tall), CELL * min(1, tall / wide)
    edge = MARGIN + (0.2 if any(rows) else 0.0)
    across, step = max(w, 0.6 * CELL) + GAP, h + 0.04
    band = CAPTION + len(rows) * step + GAP
    width = max(edge + columns * across + MARGIN, 5.5)
    height = TITLE + bands * band + MARGIN
    figure = new_figure(width, height, automatic=False)
    axes = figure.add_axes((0, 0, 1, 1))  # one unit is one inch, the origin at the top left
    for i, cell in enumerate(cells):
        x, y = edge + (i % columns) * across, TITLE + (i // columns) * band
        weight = "bold" if cell.framed else "normal"
        axes.text(x + w / 2, y + CAPTION - 0.05, cell.caption, ha="center", fontsize=7.5,
                  color=INK, fontweight=weight)  # fmt: skip
        for k, image in enumerate(cell.images):
            _place(axes, image, (x, y + CAPTION + k * step, w, h), cell.framed)
        if i % columns == 0:
            for k, name in enumerate(rows):
                middle = y + CAPTION + k * step + h / 2
                axes.text(x - 0.07, middle, name, fontsize=7 if h > 0.5 else 4.5, rotation=90,
                          ha="right", va="center")  # fmt: skip
    axes.text(MARGIN, 0.2, title, fontsize=8.5, color=INK)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return png(figure)


def line_panels(title: str, panels: Sequence[tuple[str, dict[str, Array]]]) -> bytes:
    """Vectors that are no images: per panel a caption and named curves over the coordinates."""
    columns = max(1, min(4, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    width, height = max(2.2 * columns, 5.5), 1.5 * rows + 0.6
    figure = new_figure(width, height, automatic=False)
    grid = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        0.4 / width, 0.45 / height, 1 - 0.1 / width, 1 - 0.5 / height, wspace=0.22, hspace=0.5
    )
    for axes in grid.flat:
        axes.set_visible(False)
    for axes, (caption, curves) in zip(grid.flat, panels, strict=False):
        axes.set_visible(True)
        for (name, values), colour, style in zip(curves.items(), CYCLE, ("-", "--"), strict=False):
            marker = "o" if len(values) <= 24 else None
            axes.plot(
                values, style, color=colour, label=name, lw=1.1, marker=marker, markersize=2.5
            )
        axes.set_title(caption, fontsize=7.5)
        axes.tick_params(labelsize=6.5)
    figure.text(0.12 / width, 1 - 0.22 / height, title, fontsize=8.5, color=INK)
    handles, names = grid.flat[0].get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(handles, names, loc="lower center", ncols=len(names), fontsize=7.5,
                      frameon=False)  # fmt: skip
    return png(figure)


def side_by_side(
    title: str,
    groups: Sequence[tuple[Tensor, ...]],
    captions: Sequence[str],
    rows: Sequence[str],
    lines: Sequence[str],
    framed: Sequence[bool] = (),
) -> bytes:
    """Groups of samples: images above each other, named by ``rows``; other vectors as curves.

    lines: names of the curves, "" for one that is left out.
    """
    if is_image(groups[0][0].shape):
        frames = framed or [False] * len(groups)
        cells = [Cell(*one) for one in zip(groups, captions, frames, strict=False)]
        return image_grid(title, cells[:SHOWN], rows)
    panels = [
        (text, {name: v.flatten().numpy() for name, v in zip(lines, group, strict=False) if name})
        for group, text in zip(groups, captions, strict=False)
    ]
    return line_panels(title, panels[:PANELS])


def tidy(axes: Axes) -> None:
    """Light grid, small ticks, no box."""
    axes.grid(True, color="#E4E4E4", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for all panels, that of ``axes``."""
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize=7.5,
        frameon=False,
    )


def _place(axes: Axes, image: Tensor, at: tuple[float, float, float, float], framed: bool) -> None:
    """One image at (left, top, width, height)."""
    from matplotlib.patches import Rectangle

    left, top, w, h = at
    axes.imshow(
        pixels(image), cmap="gray", vmin=0, vmax=1, interpolation="nearest",
        extent=(left, left + w, top + h, top),
    )  # fmt: skip
    line = {"ec": BLUE, "lw": 2.2} if framed else {"ec": "#CCCCCC", "lw": 0.5}
    axes.add_patch(Rectangle((left, top), w, h, fill=False, **line))  # type: ignore[arg-type]
