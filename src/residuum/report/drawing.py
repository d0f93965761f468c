"""Draw samples as data URIs and figures as PNG.

A sample on a page is a small PNG data URI, or a few numbers if the sample is no image. PNG figures are grids
of images, small panels with curves, and points in the plane. Color-blind readers can distinguish the colors
(Okabe and Ito), and a shape or a word repeats the meaning of each color. matplotlib is imported inside
functions, without pyplot.
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
DPI = 120  # dots per inch; figures are sharp on a screen and small in an email
MAX_IMAGES, MAX_PANELS = 30, 12  # largest number of images, or of panels with curves, in a figure
# Sizes in a grid of images, in inches.
CELL, GAP, CAPTION, MARGIN, TITLE = 0.8, 0.1, 0.2, 0.12, 0.34
Array = np.ndarray[Any, Any]
MAX_SIDE = (
    160  # largest side of an image in pixels; larger images are reduced, so that reports stay small
)
# Smaller images are enlarged by whole numbers, because printers and mail programs smooth small images.
MIN_SIDE = 56  # pixels of the longer side
MAX_VALUES = 6  # largest number of listed values of a vector that is no image
# Colors of a negative difference (blue), no difference (near white) and a positive difference (orange).
LOW_COLOR, MIDDLE_COLOR, HIGH_COLOR = (0, 114, 178), (250, 250, 250), (213, 94, 0)
# Colors of a value that cannot change (near white) and of a value that can take any number (violet).
FIXED_COLOR, FREE_COLOR = (250, 250, 250), (110, 40, 130)
PNG = "data:image/png;base64,"
Color = tuple[int, int, int]
Content = tuple[str, tuple[str, ...]]  # a data URI, and numbers if the sample is no image


def mask_nonpositive(values: Tensor) -> Tensor:
    """Replace values that a logarithmic axis cannot show, such as zeros, by NaN."""
    values = values.double()
    return torch.where(torch.isfinite(values) & (values > 0), values, torch.nan)


def fit_to_sample(reconstruction: Array, sample: Array) -> Array:
    """Scale and shift a reconstruction to a sample by least squares, with a nonnegative scale.

    Args:
        reconstruction: The reconstruction.
        sample: The sample.

    Returns:
        ``a * reconstruction + b`` with the scale a >= 0 and the offset b that come closest to the sample.
    """
    centered_reconstruction = reconstruction - reconstruction.mean()
    squared_norm = float((centered_reconstruction**2).sum())
    slope = (
        max(float((centered_reconstruction * (sample - sample.mean())).sum()) / squared_norm, 0.0)
        if squared_norm
        else 0.0
    )
    return slope * centered_reconstruction + sample.mean()


def encode_data_uri(values: Array) -> str:
    """Return an image (h, w) or (h, w, 3) in [0, 1] as a PNG data URI of at most ``MAX_SIDE`` pixels."""
    from PIL import Image

    image = Image.fromarray(np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8))
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BOX)
    image = image.resize([side * -(-MIN_SIDE // max(image.size)) for side in image.size], 0)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=9)
    return PNG + base64.b64encode(buffer.getvalue()).decode()


def draw_sample(values: Array) -> Content:
    """Return a picture of a sample, whose smallest value is black and whose largest value is white."""
    if not is_image(values.shape):
        return "", _format_values(values)
    return encode_data_uri(to_pixels(torch.from_numpy(values))), ()


def draw_difference(reconstruction: Array, sample: Array) -> Content:
    """Return a picture of a reconstruction minus a sample: orange if positive, blue if negative.

    Args:
        reconstruction: The reconstruction.
        sample: The sample. A difference as large as its range has the full color.

    Returns:
        The picture, or numbers if the sample is no image.
    """
    if reconstruction.shape != sample.shape:
        return "", ("–",)
    if not is_image(reconstruction.shape):
        return "", _format_values(reconstruction - sample)
    relative_difference = (fit_to_sample(reconstruction, sample) - sample) / (np.ptp(sample) or 1.0)
    relative_difference = (
        relative_difference.mean(0) if relative_difference.ndim == 3 else relative_difference
    )
    positive_colors = _blend(np.clip(relative_difference, 0, 1), MIDDLE_COLOR, HIGH_COLOR)
    negative_colors = _blend(np.clip(-relative_difference, 0, 1), MIDDLE_COLOR, LOW_COLOR)
    return encode_data_uri(
        np.where(relative_difference[..., None] > 0, positive_colors, negative_colors)
    ), ()


def draw_freedom(share: Array) -> Content:
    """Return a picture of how much each value of a sample can change in other training sets.

    Args:
        share: Share of the value range that each value can take. The color is near white for 0, and violet
            for 1.

    Returns:
        The picture, or numbers if the sample is no image.
    """
    if not is_image(share.shape):
        return "", _format_values(share)
    return encode_data_uri(
        _blend(share.mean(0) if share.ndim == 3 else share, FIXED_COLOR, FREE_COLOR)
    ), ()


def _blend(share: Array, none: Color, full: Color) -> Array:
    start, end = np.array(none) / 255, np.array(full) / 255
    return start + share[..., None] * (end - start)


def _format_values(values: Array) -> tuple[str, ...]:
    flat_values = values.ravel()
    count_text = (f"… {flat_values.size} values",) if flat_values.size > MAX_VALUES else ()
    return (*(f"{value:.3f}" for value in flat_values[:MAX_VALUES]), *count_text)


@dataclass(frozen=True)
class Cell:
    """A column of a grid of images: images of the same shape, a caption, and whether to draw a frame."""

    images: tuple[Tensor, ...]
    caption: str = ""
    framed: bool = False


def new_figure(width: float, height: float, automatic: bool = True) -> Figure:
    """Return an empty matplotlib figure.

    Args:
        width: Width in inches.
        height: Height in inches.
        automatic: Whether matplotlib computes the layout, which takes longer than drawing.

    Returns:
        The figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained" if automatic else None)
    FigureCanvasAgg(figure)
    return figure


def encode_png(figure: Figure) -> bytes:
    """Return the figure as PNG bytes without a date, so that equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def is_image(shape: Sequence[int]) -> bool:
    """Return whether samples of this shape are drawn as images."""
    return len(shape) in (2, 3) and min(shape[-2:]) > 1


def to_pixels(image: Tensor) -> Array:
    """Return an image as (h, w) gray or (h, w, 3) color, scaled so that its values fill [0, 1]."""
    pixels = image.detach().cpu().double()
    if pixels.ndim == 3:
        pixels = pixels.permute(1, 2, 0) if len(pixels) == 3 else pixels.mean(0)
    low, high = pixels.min(), pixels.max()
    return ((pixels - low) / (high - low) if high > low else pixels * 0).numpy()


def draw_image_grid(
    title: str, cells: Sequence[Cell], rows: Sequence[str], columns: int = 10
) -> bytes:
    """Draw a grid of images, in horizontal bands of cells.

    Args:
        title: The title of the figure.
        cells: The cells. Each is a column of images.
        rows: Names of the images in a cell from top to bottom, written at the left edge.
        columns: Maximum number of cells in a band.

    Returns:
        A PNG.
    """
    columns = max(1, min(columns, len(cells)))
    band_count = math.ceil(len(cells) / columns)
    image_height, image_width = cells[0].images[0].shape[-2:]
    w, h = CELL * min(1, image_width / image_height), CELL * min(1, image_height / image_width)
    left_edge = MARGIN + (0.2 if any(rows) else 0.0)
    cell_width, row_height = max(w, 0.6 * CELL) + GAP, h + 0.04
    band_height = CAPTION + len(rows) * row_height + GAP
    figure_width = max(left_edge + columns * cell_width + MARGIN, 5.5)
    height = TITLE + band_count * band_height + MARGIN
    figure = new_figure(figure_width, height, automatic=False)
    axes = figure.add_axes((0, 0, 1, 1))  # One unit is one inch, and the origin is at the top left.
    for i, cell in enumerate(cells):
        x, y = left_edge + (i % columns) * cell_width, TITLE + (i // columns) * band_height
        frame_style = {"ec": BLUE, "lw": 2.2} if cell.framed else {"ec": "#CCCCCC", "lw": 0.5}
        font_weight = "bold" if cell.framed else "normal"
        text_style: dict[str, Any] = {"fontweight": font_weight, "ha": "center", "color": INK}
        axes.text(x + w / 2, y + CAPTION - 0.05, cell.caption, fontsize=7.5, **text_style)
        for k, image in enumerate(cell.images):
            draw_image(axes, image, (x, y + CAPTION + k * row_height, w, h), **frame_style)
        if i % columns == 0:
            for k, name in enumerate(rows):
                middle, size = y + CAPTION + k * row_height + h / 2, 7 if h > 0.5 else 4.5
                label_style: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "center"}
                axes.text(x - 0.07, middle, name, fontsize=size, **label_style)
    axes.text(MARGIN, 0.2, title, fontsize=8.5, color=INK)
    axes.set(xlim=(0, figure_width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return encode_png(figure)


def draw_line_panels(title: str, panels: Sequence[tuple[str, dict[str, Array]]]) -> bytes:
    """Draw vectors that are no images as curves over the coordinates.

    Args:
        title: The title of the figure.
        panels: For each panel a caption and its curves by name.

    Returns:
        A PNG.
    """
    column_count = max(1, min(4, len(panels)))
    row_count = max(1, math.ceil(len(panels) / column_count))
    width, height = max(2.2 * column_count, 5.5), 1.5 * row_count + 0.6
    figure = new_figure(width, height, automatic=False)
    axes_grid = figure.subplots(row_count, column_count, squeeze=False)
    panel_margins = 0.4 / width, 0.45 / height, 1 - 0.1 / width, 1 - 0.5 / height
    figure.subplots_adjust(*panel_margins, wspace=0.22, hspace=0.5)
    for axes in axes_grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (caption, curves) in zip(axes_grid.flat, panels, strict=False):
        for (name, values), color, style in zip(curves.items(), CYCLE, ("-", "--"), strict=False):
            marker_style = {"marker": "o" if len(values) <= 24 else None, "markersize": 2.5}
            axes.plot(values, style, color=color, label=name, lw=1.1, **marker_style)
        axes.set_title(caption, fontsize=7.5)
        axes.tick_params(labelsize=6.5)
    figure.text(0.12 / width, 1 - 0.22 / height, title, fontsize=8.5, color=INK)
    handles, names = axes_grid.flat[0].get_legend_handles_labels()
    if len(names) > 1:
        add_legend_below(figure, handles, names, "lower center")
    return encode_png(figure)


def draw_cells(
    title: str, cells: Sequence[Cell], rows: Sequence[str], lines: Sequence[str]
) -> bytes:
    """Draw the cells of a figure: images in a grid, other vectors as curves.

    Args:
        title: The title of the figure.
        cells: The cells.
        rows: Names of the images in a cell from top to bottom.
        lines: Names of the curves, "" for a curve that is not drawn.

    Returns:
        A PNG.
    """
    if is_image(cells[0].images[0].shape):
        return draw_image_grid(title, cells[:MAX_IMAGES], rows)
    vectors_by_name = [dict(zip(lines, cell.images, strict=False)) for cell in cells[:MAX_PANELS]]
    curves = [
        {n: v.flatten().numpy() for n, v in vectors.items() if n} for vectors in vectors_by_name
    ]
    captions = (cell.caption for cell in cells)
    return draw_line_panels(title, list(zip(captions, curves, strict=False)))


def get_point_style(k: int) -> dict[str, Any]:
    """Return color and marker of the k-th kind of points."""
    return {"color": CYCLE[k % len(CYCLE)], "marker": MARKERS[k % len(MARKERS)]}


def add_legend_below(
    figure: Figure, marks: Any, names: Any, location: Any = "outside lower center", columns: int = 0
) -> None:
    """Add one legend for all panels, without a box.

    Args:
        figure: The figure.
        marks: The marks of the legend.
        names: The names of the marks.
        location: Location of the legend, as in matplotlib.
        columns: Number of columns, by default all marks in one row.
    """
    figure.legend(
        marks, names, loc=location, ncols=columns or len(names), fontsize=7.5, frameon=False
    )


def tidy(axes: Axes) -> None:
    """Give axes a light grid and small tick labels, and remove the top and right lines."""
    axes.grid(True, color="#E4E4E4", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_image(
    axes: Axes, image: Tensor, box: tuple[float, float, float, float], **line: Any
) -> None:
    """Draw an image in a box on the axes, with a frame if a line style is passed.

    Args:
        axes: The axes.
        image: The image.
        box: Left edge, top edge, width and height of the image.
        **line: Line style of the frame.
    """
    left_edge, top, width, height = box
    extent = (left_edge, left_edge + width, top + height, top)
    axes.imshow(to_pixels(image), "gray", vmin=0, vmax=1, interpolation="nearest", extent=extent)
    if line:
        draw_frame(axes, box, **line)


def draw_frame(axes: Axes, box: tuple[float, float, float, float], **line: Any) -> None:
    """Draw a frame around a box on the axes.

    Args:
        axes: The axes.
        box: Left edge, top edge, width and height of the frame.
        **line: Line style of the frame.
    """
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(box[:2], *box[2:], fill=False, **line))
