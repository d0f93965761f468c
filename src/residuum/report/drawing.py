"""Drawing: what the report's charts are in the units of an SVG view box, pictures as data URIs, PNGs.

Charts are drawn on the server, so that a report without scripts shows them all; the script moves one
line, the threshold, for which a chart carries the two ends of its axis. Samples on a page are small PNG
data URIs, or numbers where they are no images. PNGs are made of image grids, small line panels and
points in the plane. Colours are those of Okabe and Ito, told apart by colour-blind readers; none
carries a meaning that a shape or a word does not carry too. matplotlib is imported where it is used,
without pyplot.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from residuum.auditing.result import Evidence
    from residuum.records import Reconstruction
    from residuum.records.results import MetricScore

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, YELLOW, GREY, INK = "#56B4E9", "#E69F00", "#9A9A9A", "#222222"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, INK)
MARKERS = "os^Dv<>p"
DPI = 120  # sharp on a screen, small in a mail
SHOWN, PANELS = 30, 12  # images and curves of a figure
CELL, GAP, CAPTION, MARGIN, TITLE = 0.8, 0.1, 0.2, 0.12, 0.34  # inches
Array = np.ndarray[Any, Any]
Ticks = tuple[tuple[float, str], ...]
WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 32, 44
BOX = (LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
BINS = 36  # of a histogram: a few pixels each
MAX_POINTS = 1500  # drawn in a scatter; more would only cover each other
MAX_STEPS = 240  # drawn of a history
STOPS = 200  # of the slider
WIDE, TALL, SIDE, UPPER, LOWER = 960, 330, 60, 46, 300  # of parallel coordinates
MAX_LINES = 400  # drawn of them; more would only cover each other
BEST = 0.1  # share of the trials drawn in colour
KINDS = 6  # marks and dash patterns that the style sheet tells apart
MAX_SIDE = 160  # pixels; larger images are reduced, a report is for looking, not for keeping them
# Enlarged pixel by pixel: printers and mail programs smooth what the browser would not.
MIN_SIDE = 56  # pixels: smaller images are enlarged by whole numbers
MAX_VALUES = 6  # of a vector that is no image
LOW, MIDDLE, HIGH = (0, 114, 178), (250, 250, 250), (213, 94, 0)  # blue, orange
FIXED, LOOSE = (250, 250, 250), (110, 40, 130)
PNG = "data:image/png;base64,"
Colour = tuple[int, int, int]
Content = tuple[str, tuple[str, ...]]  # a data URI, or numbers


@dataclass(frozen=True)
class Axis:
    """Values from low to high, placed at start to end; ticks as (position, text)."""

    low: float
    high: float
    start: float
    end: float
    ticks: Ticks = ()

    def at(self, value: float) -> float:
        """Where a value lies, to a tenth of a unit."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


@dataclass(frozen=True)
class Coordinate:
    """One axis: values of the trials, best trial first; log: drawn on a log scale.

    low, high: the range that was searched, or that of the values where there is none.
    """

    name: str
    values: Sequence[float | None]
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Mark:
    """Something drawn: kind is its look, the others its place; name and value go into the legend."""

    kind: int
    name: str = ""
    path: str = ""
    value: str = ""
    band: str = ""
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Chart:
    """What the template draws. rule: position of the threshold line; across: it lies horizontally."""

    title: str
    x: Axis
    y: Axis
    x_name: str
    y_name: str
    summary: str
    marks: tuple[Mark, ...]
    rule: float | None = None
    across: bool = False
    limit: float | None = None
    note: str = ""


def histogram(evidence: Evidence, metric: MetricScore) -> Chart | None:
    """Shares of training samples and of held-out ones over the score."""
    train, null, threshold = finite(evidence.values), finite(evidence.null), _threshold(metric)
    if not len(train) and not len(null):
        return None
    low, high = _span(np.concatenate([train, null, finite([threshold])]))
    edges = np.linspace(low, high, BINS + 1)
    shares = [np.histogram(v, edges)[0] / max(len(v), 1) for v in (null, train)]
    x = _linear(low, high, LEFT, WIDTH - RIGHT)
    y = _linear(0.0, float(max(s.max() for s in shares)) * 1.08, HEIGHT - BOTTOM, TOP, percent=True)
    marks = (
        Mark(1, "held-out matches (chance)", path=_steps(shares[0], edges, x, y)),
        Mark(0, "training samples", path=_steps(shares[1], edges, x, y)),
    )
    title = f"{metric.name} of training samples against held-out ones"
    summary = f"Median {_median(train)} on training samples, {_median(null)} by chance."
    rule = x.at(threshold) if math.isfinite(threshold) else None
    return Chart(title, x, y, metric.name, "share", summary, marks, rule)


def scatter(evidence: Evidence, metric: MetricScore) -> Chart | None:
    """Score of every training sample against the network's output for it."""
    if evidence.outputs is None or len(evidence.outputs) != len(evidence.values):
        return None
    outputs, scores = np.asarray(evidence.outputs, float), np.asarray(evidence.values, float)
    good, threshold = np.flatnonzero(np.isfinite(outputs) & np.isfinite(scores)), _threshold(metric)
    if not len(good):
        return None
    kept = good[np.linspace(0, len(good) - 1, min(len(good), MAX_POINTS)).astype(int)]
    x = _linear(*_span(outputs[good]), LEFT, WIDTH - RIGHT)
    y = _linear(*_span(np.append(scores[good], finite([threshold]))), HEIGHT - BOTTOM, TOP)
    known = len(evidence.labels) == len(scores)
    names = sorted({evidence.labels[i] for i in kept}) if known else [""]
    many = len(names) > KINDS
    marks = []
    for k, name in enumerate(names):
        mine = [i for i in kept if not known or evidence.labels[i] == name]
        points = tuple((x.at(outputs[i]), y.at(scores[i])) for i in mine)
        marks.append(Mark(0, points=points) if many else Mark(k, name, points=points))
    title = f"{metric.name} against the {evidence.output_name}"
    summary = f"{len(good)} training samples."
    note = f"{len(kept)} of {len(good)} points drawn." if len(kept) < len(good) else ""
    rule = y.at(threshold) if math.isfinite(threshold) else None
    named = evidence.output_name, metric.name
    return Chart(title, x, y, *named, summary, tuple(marks), rule, across=True, note=note)


def residual_chart(found: Reconstruction, limit: float | None) -> Chart | None:
    """Median and range of every layer's relative residual over the steps, on a log scale.

    Residuals are norms, not squares; limit: what the judged layers must stay below to count as
    explained, drawn as a line where it is known.
    """
    residuals = found.layers.double().clamp(min=0).sqrt()  # (restarts, steps, layers)
    values = positive(residuals).numpy()
    known, steps = finite(values), np.asarray(found.steps, float)
    if not len(steps) or not len(known):
        return None
    x = _linear(float(steps.min()), float(steps.max()), LEFT, WIDTH - RIGHT)
    drawn = np.append(known, [limit] if limit else [])
    y = _logarithmic(np.log10(drawn), HEIGHT - BOTTOM, TOP)
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS)).astype(int))
    layers = enumerate(found.layer_names)
    marks = tuple(_curve(k, name, steps[kept], values[:, kept, k], x, y) for k, name in layers)
    line = y.at(math.log10(limit)) if limit else None
    title = f"Relative residual per layer, {found.attack}"
    return Chart(title, x, y, "step", "residual", "", marks, limit=line)


def threshold_table(evidence: Evidence, metric: MetricScore) -> dict[str, Any] | None:
    """Counts at every position of the slider; the calibrated threshold is one of the positions.

    A sample counts when it strictly beats the threshold, as in the verdict; held-out counts are
    means over the sets, so that they stand beside a training set of the same size.
    """
    train, null, threshold = finite(evidence.values), finite(evidence.null), _threshold(metric)
    if not len(train):
        return None
    sign = 1 if metric.higher_is_better else -1
    values = positions([*train, *null], threshold)
    end = len(values) - 1 if sign > 0 else 0  # of the scale, where nothing counts
    start = values.index(threshold) if math.isfinite(threshold) else end
    sets = max(evidence.null_sets, 1)
    return {
        "metric": metric.name,
        "values": values,
        "start": start,
        "sign": sign,
        "texts": [f"{value:.4g}" for value in values],
        "n": len(evidence.values),
        "train": [int((sign * train > sign * v).sum()) for v in values],
        "null": [round(float((sign * null > sign * v).sum() / sets), 4) for v in values],
        "sets": sets,
        "reachable": math.isfinite(threshold),
    }


def _threshold(metric: MetricScore) -> float:
    return math.nan if metric.threshold_null99 is None else metric.threshold_null99


def parallel(
    coordinates: Sequence[Coordinate],
) -> tuple[list[tuple[float, str, Ticks]], list[tuple[str, bool]]]:
    """Axes as (x, name, ticks), and one path per trial with whether it is among the best, drawn last."""
    count = len(coordinates[0].values) if coordinates else 0
    if not count:
        return [], []
    placed = [_upright(one) for one in coordinates]
    gap = (WIDE - 2 * SIDE) / max(1, len(coordinates) - 1)
    at = [round(SIDE + i * gap, 1) for i in range(len(coordinates))]
    best = max(1, round(BEST * count))
    shown = sorted({*range(best), *range(best, count, -(-count // MAX_LINES))}, reverse=True)
    lines = []
    for trial in shown:
        heights = [(x, ys[trial]) for x, (ys, _) in zip(at, placed, strict=True)]
        points = [f"{x},{y}" for x, y in heights if y is not None]
        lines.append(("M" + "L".join(points), trial < best))
    named = zip(at, coordinates, placed, strict=True)
    return [(x, one.name, ticks) for x, one, (_, ticks) in named], lines


def _upright(one: Coordinate) -> tuple[list[float | None], Ticks]:
    """Heights of the values on an axis, and its ticks: both ends and the middle."""
    known = [v for v in one.values if v is not None and math.isfinite(v) and (v > 0 or not one.log)]
    low = one.low if one.low is not None else min(known, default=0.0)
    high = one.high if one.high is not None else max(known, default=1.0)
    log = one.log and low > 0
    a, b = (math.log(low), math.log(high)) if log else (low, high)
    b = b if b > a else a + 1.0
    axis, inside = Axis(a, b, LOWER, UPPER), set(known)
    ends = (low, math.exp((a + b) / 2), math.exp(b)) if log else (a, (a + b) / 2, b)

    def height(value: float) -> float:
        return axis.at(math.log(value) if log else value)

    ticks = tuple((height(v), f"{v:.0f}" if abs(v) >= 100 else f"{v:.2g}") for v in ends)
    return [height(v) if v in inside else None for v in one.values], ticks


def positions(values: Sequence[float], threshold: float) -> list[float]:
    """Stops of a slider over the values: even ones to three digits, and the threshold itself."""
    low, high = min(values), max(values)
    digits = max(3, 3 - math.floor(math.log10((high - low) or 1.0)))
    stops = {round(float(stop), digits) for stop in np.linspace(low, high, STOPS)}
    # Beyond both ends, so that the slider reaches "all" and "none".
    stops |= {(math.floor(low * 1000) - 1) / 1000, (math.ceil(high * 1000) + 1) / 1000}
    return sorted(stops | ({threshold} if math.isfinite(threshold) else set()))


def _curve(k: int, name: str, steps: Array, values: Array, x: Axis, y: Axis) -> Mark:
    with np.errstate(all="ignore"):
        logs = np.log10(values)
    known = np.isfinite(logs).any(0)
    logs, steps = logs[:, known], steps[known]
    middle, low, high = np.nanmedian(logs, 0), np.nanmin(logs, 0), np.nanmax(logs, 0)
    last = f"{np.nanmedian(values[:, known][:, -1]):.2g}" if len(steps) else "–"
    around = np.concatenate([steps, steps[::-1]]), np.concatenate([high, low[::-1]])
    band = f"{_line(*around, x, y)}Z" if len(values) > 1 and len(steps) else ""
    return Mark(k % KINDS, name, _line(steps, middle, x, y), value=last, band=band)


def _line(xs: Array, ys: Array, x: Axis, y: Axis) -> str:
    """A path through points."""
    places = [f"{x.at(a)},{y.at(b)}" for a, b in zip(xs, ys, strict=True)]
    return "M" + "L".join(places) if places else ""


def _steps(shares: Array, edges: Array, x: Axis, y: Axis) -> str:
    """Outline of a histogram, closed at the base line."""
    path = f"M{x.at(edges[0])},{y.at(0)}"
    for share, right in zip(shares, edges[1:], strict=True):
        path += f"V{y.at(float(share))}H{x.at(right)}"
    return path + f"V{y.at(0)}Z"


def _linear(low: float, high: float, start: float, end: float, percent: bool = False) -> Axis:
    """An axis with four to six ticks at round numbers."""
    high = high if high > low else low + 1.0
    axis = Axis(low, high, start, end)
    step = 10.0 ** math.floor(math.log10((high - low) / 4))  # an integer could overflow in numpy
    step *= next((m for m in (1, 2, 5) if (high - low) / (step * m) <= 6), 10)
    values = np.arange(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1) * step
    texts = [f"{100 * v:.3g}%" if percent else f"{v + 0.0:.6g}" for v in values.round(12)]
    return replace(axis, ticks=tuple(zip(map(axis.at, values), texts, strict=True)))


def _logarithmic(every: Array, start: float, end: float) -> Axis:
    """An axis in powers of ten, whole ones at the ticks, at most seven."""
    # A tenth of a decade beyond a tick does not earn the axis another one.
    low, high = math.floor(every.min() + 0.1), math.ceil(every.max() - 0.1)
    axis = Axis(low, max(high, low + 1), start, end)
    stride = math.ceil((axis.high - low) / 7)
    powers = range(low, int(axis.high) + 1, stride)
    return replace(axis, ticks=tuple((axis.at(p), f"{10.0**p:g}") for p in powers))


def _span(values: Array) -> tuple[float, float]:
    """Least and greatest with a little room."""
    low, high = float(values.min()), float(values.max())
    room = 0.03 * (high - low) or 0.5
    return low - room, high + room


def finite(values: Any) -> Array:
    """The finite ones of some values."""
    array = np.asarray(values, dtype=float).ravel()
    return array[np.isfinite(array)]


def positive(values: Tensor) -> Tensor:
    """What a logarithmic axis can show, NaN for the rest."""
    values = values.double()
    return torch.where(torch.isfinite(values) & (values > 0), values, torch.nan)


def _median(values: Array) -> str:
    return f"{np.median(values):.3g}" if len(values) else "–"


def fitted(found: Array, sample: Array) -> Array:
    """``a found + b`` with the a >= 0 and b that come closest to the sample."""
    centred = found - found.mean()
    power = float((centred**2).sum())
    slope = max(float((centred * (sample - sample.mean())).sum()) / power, 0.0) if power else 0.0
    return slope * centred + sample.mean()


def data_uri(values: Array) -> str:
    """(h, w) or (h, w, 3) in [0, 1] as a PNG data URI, no side above ``MAX_SIDE``."""
    from PIL import Image

    image = Image.fromarray(np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8))
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BOX)
    image = image.resize([side * -(-MIN_SIDE // max(image.size)) for side in image.size], 0)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=9)
    return PNG + base64.b64encode(buffer.getvalue()).decode()


def grey_or_colour(values: Array) -> Content:
    """A sample, stretched to its own range as published figures are."""
    if not is_image(values.shape):
        return "", _numbers(values)
    return data_uri(pixels(torch.from_numpy(values))), ()


def difference(found: Array, sample: Array) -> Content:
    """Signed: orange where above the sample, blue where below, full colour at the sample's own range."""
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


def _mixed(share: Array, none: Colour, full: Colour) -> Array:
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
        for (name, values), colour, style in zip(curves.items(), CYCLE, ("-", "--"), strict=False):
            look = {"marker": "o" if len(values) <= 24 else None, "markersize": 2.5}
            axes.plot(values, style, color=colour, label=name, lw=1.1, **look)
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
    """Colour and marker of the k-th kind of points."""
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
