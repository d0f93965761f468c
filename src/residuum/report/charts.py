"""Geometry of the report's charts: ticks, bars, lines and points in the units of an SVG view box.

Drawn on the server, so that a report without scripts shows them all; the script moves one line, the
threshold, for which a chart carries the two ends of its axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from residuum.records.scores import MetricScore

if TYPE_CHECKING:
    from residuum.auditing.result import Evidence
    from residuum.records import Reconstruction

Array = np.ndarray[Any, Any]
Ticks = tuple[tuple[float, str], ...]
WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 32, 44
BINS = 36
MAX_POINTS = 1500  # drawn in a scatter; more would only cover each other
MAX_STEPS = 240  # drawn of a history
STOPS = 200  # of the slider
WIDE, TALL, SIDE, UPPER, LOWER = 960, 330, 60, 46, 300  # of parallel coordinates
MAX_LINES = 400  # drawn of them; more would only cover each other
BEST = 0.1  # share of the trials drawn in colour
KINDS = 6  # marks and dash patterns that the style sheet tells apart


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
    box: tuple[int, int, int, int] = field(
        default=(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    )
    size: tuple[int, int] = (WIDTH, HEIGHT)


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
    return Chart(
        title=f"{metric.name} of training samples against held-out ones",
        x=x, y=y, x_name=metric.name, y_name="share", marks=marks,
        rule=x.at(threshold) if math.isfinite(threshold) else None,
        summary=f"Median {_median(train)} on training samples, {_median(null)} by chance.",
    )  # fmt: skip


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
    marks = [
        Mark(0 if many else k, "" if many else name, points=tuple(
            (x.at(outputs[i]), y.at(scores[i]))
            for i in kept if not known or evidence.labels[i] == name
        ))
        for k, name in enumerate(names)
    ]  # fmt: skip
    note = f"{len(kept)} of {len(good)} points drawn." if len(kept) < len(good) else ""
    return Chart(
        title=f"{metric.name} against the {evidence.output_name}",
        x=x, y=y, x_name=evidence.output_name, y_name=metric.name, marks=tuple(marks), across=True,
        rule=y.at(threshold) if math.isfinite(threshold) else None,
        summary=f"{len(good)} training samples.", note=note,
    )  # fmt: skip


def residual_chart(found: Reconstruction, limit: float) -> Chart | None:
    """Median and range of every layer's relative residual over the steps, on a log scale.

    Residuals are norms, not squares; limit: of the first layer's convergence, drawn as a line.
    """
    values = _positive(
        found.layers.double().clamp(min=0).sqrt().numpy()
    )  # (restarts, steps, layers)
    known, steps = finite(values), np.asarray(found.steps, float)
    if not len(steps) or not len(known):
        return None
    x = _linear(
        float(steps.min()), max(float(steps.max()), float(steps.min()) + 1), LEFT, WIDTH - RIGHT
    )
    y = _logarithmic(np.log10(np.append(known, limit)), HEIGHT - BOTTOM, TOP)
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS)).astype(int))
    marks = tuple(
        _curve(k, name, steps[kept], values[:, kept, k], x, y)
        for k, name in enumerate(found.layer_names)
    )
    return Chart(
        title=f"Relative residual per layer, {found.attack}", x=x, y=y, x_name="step",
        y_name="residual", marks=marks, summary="", limit=y.at(math.log10(limit)),
    )  # fmt: skip


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
    start = values.index(threshold) if math.isfinite(threshold) else None
    if start is None:  # nothing could beat it: the end of the scale where nothing counts
        start = len(values) - 1 if sign > 0 else 0
    sets = max(evidence.null_sets, 1)
    return {
        "metric": metric.name, "values": values, "start": start, "sign": sign,
        "texts": [f"{value:.4g}" for value in values], "n": len(evidence.values),
        "train": [int((sign * train > sign * v).sum()) for v in values],
        "null": [round(float((sign * null > sign * v).sum() / sets), 4) for v in values],
        "sets": sets, "reachable": math.isfinite(threshold),
    }  # fmt: skip


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
    mark = Mark(k % KINDS, name, _polyline(steps, middle, x, y), value=_last(values))
    if len(values) == 1 or not len(steps):
        return mark
    there = [f"{x.at(s)},{y.at(v)}" for s, v in zip(steps, high, strict=True)]
    back = [f"{x.at(s)},{y.at(v)}" for s, v in zip(steps[::-1], low[::-1], strict=True)]
    return replace(mark, band="M" + "L".join(there + back) + "Z")


def _polyline(xs: Array, ys: Array, x: Axis, y: Axis) -> str:
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
    step = 10 ** math.floor(math.log10((high - low) / 4))
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


def _positive(values: Array) -> Array:
    """NaN where a logarithm has no value."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def _median(values: Array) -> str:
    return f"{np.median(values):.3g}" if len(values) else "–"


def _last(values: Array) -> str:
    """Median over the restarts at the last step that has one."""
    known = np.flatnonzero(np.isfinite(values).any(0))
    return f"{np.nanmedian(values[:, known[-1]]):.2g}" if len(known) else "–"
