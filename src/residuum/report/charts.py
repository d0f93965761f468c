"""Geometry of the report's charts: ticks, bars, lines and points in the units of an SVG view box.

Drawn on the server, so that a report without scripts shows them all; the script moves one line, the
threshold, for which a chart carries the two ends of its axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from residuum.report.page import Array, Control, Residuals

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 32, 44
BINS = 36
MAX_POINTS = 1500  # drawn in a scatter; more would only cover each other
MAX_STEPS = 240  # drawn of a history
STOPS = 200  # of the slider
KINDS = 6  # marks and dash patterns that the style sheet tells apart


@dataclass(frozen=True)
class Axis:
    """Values from low to high, placed at start to end; ticks as (position, text)."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...] = ()

    def at(self, value: float) -> float:
        """Where a value lies, to a tenth of a unit."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


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


def histogram(control: Control) -> Chart | None:
    """Shares of training samples and of held-out ones over the score."""
    train, null = finite(control.train), finite(control.null)
    if not len(train) and not len(null):
        return None
    low, high = _span(np.concatenate([train, null, finite([control.threshold])]))
    edges = np.linspace(low, high, BINS + 1)
    shares = [np.histogram(v, edges)[0] / max(len(v), 1) for v in (null, train)]
    x = _linear(low, high, LEFT, WIDTH - RIGHT)
    y = _linear(0.0, float(max(s.max() for s in shares)) * 1.08, HEIGHT - BOTTOM, TOP, percent=True)
    marks = (
        Mark(1, "held-out matches (chance)", path=_steps(shares[0], edges, x, y)),
        Mark(0, "training samples", path=_steps(shares[1], edges, x, y)),
    )
    return Chart(
        title=f"{control.metric} of training samples against held-out ones",
        x=x, y=y, x_name=control.metric, y_name="share", marks=marks,
        rule=x.at(control.threshold) if math.isfinite(control.threshold) else None,
        summary=f"Median {_median(train)} on training samples, {_median(null)} by chance.",
    )  # fmt: skip


def scatter(control: Control) -> Chart | None:
    """Score of every training sample against the network's output for it."""
    if control.outputs is None or len(control.outputs) != len(control.train):
        return None
    outputs, scores = np.asarray(control.outputs, float), np.asarray(control.train, float)
    good = np.flatnonzero(np.isfinite(outputs) & np.isfinite(scores))
    if not len(good):
        return None
    kept = good[np.linspace(0, len(good) - 1, min(len(good), MAX_POINTS)).astype(int)]
    x = _linear(*_span(outputs[good]), LEFT, WIDTH - RIGHT)
    y = _linear(*_span(np.append(scores[good], finite([control.threshold]))), HEIGHT - BOTTOM, TOP)
    known = len(control.labels) == len(scores)
    names = sorted({control.labels[i] for i in kept}) if known else [""]
    many = len(names) > KINDS
    marks = [
        Mark(0 if many else k, "" if many else name, points=tuple(
            (x.at(outputs[i]), y.at(scores[i]))
            for i in kept if not known or control.labels[i] == name
        ))
        for k, name in enumerate(names)
    ]  # fmt: skip
    note = f"{len(kept)} of {len(good)} points drawn." if len(kept) < len(good) else ""
    return Chart(
        title=f"{control.metric} against the {control.output_name}",
        x=x, y=y, x_name=control.output_name, y_name=control.metric, marks=tuple(marks), across=True,
        rule=y.at(control.threshold) if math.isfinite(control.threshold) else None,
        summary=f"{len(good)} training samples.", note=note,
    )  # fmt: skip


def residual_chart(history: Residuals) -> Chart | None:
    """Median and range of every layer's relative residual over the steps, on a log scale."""
    layers = {name: _positive(values) for name, values in history.layers.items()}
    known = [finite(values) for values in layers.values()]
    if not len(history.steps) or not any(map(len, known)):
        return None
    every = np.log10(np.concatenate([*known, finite([history.limit or math.nan])]))
    steps = np.asarray(history.steps, float)
    x = _linear(
        float(steps.min()), max(float(steps.max()), float(steps.min()) + 1), LEFT, WIDTH - RIGHT
    )
    y = _logarithmic(every, HEIGHT - BOTTOM, TOP)
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS)).astype(int))
    marks = tuple(
        _curve(k, name, steps[kept], values[:, kept], x, y)
        for k, (name, values) in enumerate(layers.items())
    )
    return Chart(
        title=f"Relative residual per layer, {history.attack}", x=x, y=y, x_name="step",
        y_name="residual", marks=marks, summary="",
        limit=y.at(math.log10(history.limit)) if history.limit else None,
    )  # fmt: skip


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


def finite(values: Array | Sequence[float]) -> Array:
    """The finite ones of some values."""
    array = np.asarray(values, dtype=float).ravel()
    return array[np.isfinite(array)]


def _positive(values: Array) -> Array:
    """(R, T), NaN where a logarithm has no value."""
    array = np.atleast_2d(np.asarray(values, dtype=float))
    return np.where(np.isfinite(array) & (array > 0), array, np.nan)


def _median(values: Array) -> str:
    return f"{np.median(values):.3g}" if len(values) else "–"


def _last(values: Array) -> str:
    """Median over the restarts at the last step that has one."""
    known = np.flatnonzero(np.isfinite(values).any(0))
    return f"{np.nanmedian(values[:, known[-1]]):.2g}" if len(known) else "–"
