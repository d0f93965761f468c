"""Drawing: pictures as data URIs, and PNGs.

Samples on a page are small PNG data URIs, or numbers where they are no images. PNGs are made of image
grids, small line panels and points in the plane. Colors are those of Okabe and Ito, told apart by
color-blind readers; none carries a meaning that a shape or a word does not carry too. matplotlib is
imported where it is used, without pyplot.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, YELLOW, GREY, INK = "#56B4E9", "#E69F00", "#9A9A9A", "#222222"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, INK)
MARKERS = "os^Dv<>p"
DPI = 120  # sharp on a screen, small in a mail
SHOWN, PANELS = 30, 12  # images and curves of a figure
CELL, GAP, CAPTION, MARGIN, TITLE = 0.8, 0.1, 0.2, 0.12, 0.34  # inches
Array = np.ndarray[Any, Any]
MAX_SIDE = 160  # pixels; larger images are reduced, a report is for looking, not for keeping them
# Enlarged pixel by pixel: printers and mail programs smooth what the browser would not.
MIN_SIDE = 56  # pixels: smaller images are enlarged by whole numbers
MAX_VALUES = 6  # of a vector that is no image
LOW, MIDDLE, HIGH = (0, 114, 178), (250, 250, 250), (213, 94, 0)  # blue, orange
FIXED, LOOSE = (250, 250, 250), (110, 40, 130)
PNG = "data:image/png;base64,"
Color = tuple[int, int, int]
Content = tuple[str, tuple[str, ...]]  # a data URI, or numbers


def positive(values: Tensor) -> Tensor:
    """What a logarithmic axis can show, NaN for the rest."""
    values = values.double()
    return torch.where(torch.isfinite(values) & (values > 0), values, torch.nan)


def fitted(found: Array, sample: Array) -> Array:
    """``a found + b`` with the a >= 0 and b that come closest to the sample."""
    centered = found - found.mean()
    power = float((centered**2).sum())
    slope = max(float((centered * (sample - sample.mean())).sum()) / power, 0.0) if power else 0.0
    return slope * centered + sample.mean()


def data_uri(values: Array) -> str:
    """(h, w) or (h, w, 3) in [0, 1] as a PNG data URI, no side above ``MAX_SIDE``."""
    from PIL import Image

    image = Image.fromarray(np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8))
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BOX)
    image = image.resize([side * -(-MIN_SIDE // max(image.size)) for side in image.size], 0)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=9)
    return PNG + base64.b64encode(buffer.getvalue()).decode()


def gray_or_color(values: Array) -> Content:
    """A sample, stretched to its own range as published figures are."""
    if not is_image(values.shape):
        return "", _numbers(values)
    return data_uri(pixels(torch.from_numpy(values))), ()


def difference(found: Array, sample: Array) -> Content:
    """Signed: orange where above the sample, blue where below, full color at the sample's own range."""
    if found.shape != sample.shape:
        return "", ("–",)
    if not is_image(found.shape):
        return "", _numbers(found - sample)
    signed = (fitted(found, sample) - sample) / (np.ptp(sample) or 1.0)
    signed = signed.mean(0) if signed.ndim == 3 else signed
    above = _mixed(np.clip(signed, 0, 1), MIDDLE, HIGH)
    below = _mixed(np.clip(-signed, 0, 1), MIDDLE, LOW)
    return data_uri(np.where(signed[..., None] > 0, above, below)), ()


def freedom(share: Array) -> Content:
    """Violet where a value is free, by its share of the range."""
    if not is_image(share.shape):
        return "", _numbers(share)
    return data_uri(_mixed(share.mean(0) if share.ndim == 3 else share, FIXED, LOOSE)), ()


def _mixed(share: Array, none: Color, full: Color) -> Array:
    start, end = np.array(none) / 255, np.array(full) / 255
    return start + share[..., None] * (end - start)


def _numbers(values: Array) -> tuple[str, ...]:
    flat = values.ravel()
    rest = (f"… {flat.size} values",) if flat.size > MAX_VALUES else ()
    return (*(f"{value:.3f}" for value in flat[:MAX_VALUES]), *rest)


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
    """(h, w) gray or (h, w, 3) color, stretched to its own range; other channels are averaged."""
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
        line = {"ec": BLUE, "lw": 2.2} if cell.framed else {"ec": "#CCCCCC", "lw": 0.5}
        weight = "bold" if cell.framed else "normal"
        look: dict[str, Any] = {"fontweight": weight, "ha": "center", "color": INK}
        axes.text(x + w / 2, y + CAPTION - 0.05, cell.caption, fontsize=7.5, **look)
        for k, image in enumerate(cell.images):
            place(axes, image, (x, y + CAPTION + k * step, w, h), **line)
        if i % columns == 0:
            for k, name in enumerate(rows):
                middle, size = y + CAPTION + k * step + h / 2, 7 if h > 0.5 else 4.5
                upright: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "center"}
                axes.text(x - 0.07, middle, name, fontsize=size, **upright)
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
    edges = 0.4 / width, 0.45 / height, 1 - 0.1 / width, 1 - 0.5 / height
    figure.subplots_adjust(*edges, wspace=0.22, hspace=0.5)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (caption, curves) in zip(grid.flat, panels, strict=False):
        for (name, values), color, style in zip(curves.items(), CYCLE, ("-", "--"), strict=False):
            look = {"marker": "o" if len(values) <= 24 else None, "markersize": 2.5}
            axes.plot(values, style, color=color, label=name, lw=1.1, **look)
        axes.set_title(caption, fontsize=7.5)
        axes.tick_params(labelsize=6.5)
    figure.text(0.12 / width, 1 - 0.22 / height, title, fontsize=8.5, color=INK)
    handles, names = grid.flat[0].get_legend_handles_labels()
    if len(names) > 1:
        legend_below(figure, handles, names, "lower center")
    return png(figure)


def side_by_side(
    title: str, cells: Sequence[Cell], rows: Sequence[str], lines: Sequence[str]
) -> bytes:
    """Cells of samples: images above each other, named by ``rows``; other vectors as curves.

    lines: names of the curves, "" for one that is left out.
    """
    if is_image(cells[0].images[0].shape):
        return image_grid(title, cells[:SHOWN], rows)
    curves = [dict(zip(lines, cell.images, strict=False)) for cell in cells[:PANELS]]
    shown = [{n: v.flatten().numpy() for n, v in part.items() if n} for part in curves]
    return line_panels(title, list(zip((cell.caption for cell in cells), shown, strict=False)))


def kind(k: int) -> dict[str, Any]:
    """Color and marker of the k-th kind of points."""
    return {"color": CYCLE[k % len(CYCLE)], "marker": MARKERS[k % len(MARKERS)]}


def legend_below(
    figure: Figure, marks: Any, names: Any, at: Any = "outside lower center", columns: int = 0
) -> None:
    """One legend for all panels, without a box."""
    figure.legend(marks, names, loc=at, ncols=columns or len(names), fontsize=7.5, frameon=False)


def tidy(axes: Axes) -> None:
    """Light grid, small ticks, no box."""
    axes.grid(True, color="#E4E4E4", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def place(axes: Axes, image: Tensor, at: tuple[float, float, float, float], **line: Any) -> None:
    """One image at (left, top, width, height); line: of its frame."""
    left, top, w, h = at
    extent = (left, left + w, top + h, top)
    axes.imshow(pixels(image), "gray", vmin=0, vmax=1, interpolation="nearest", extent=extent)
    if line:
        frame(axes, at, **line)


def frame(axes: Axes, at: tuple[float, float, float, float], **line: Any) -> None:
    """A rectangle at (left, top, width, height)."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(at[:2], *at[2:], fill=False, **line))
