"""The report of a sweep: settings as parallel coordinates, best trials, consensus reconstructions.

One HTML file without a script, under the same policy as the audit's report: nothing is loaded, and
no name from a file is markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from residuum.records.knowledge import Fact
from residuum.report import gallery, html
from residuum.report.gallery import Item
from residuum.report.page import Row as Figure

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 960, 330, 60, 46, 300
MAX_LINES = 400  # drawn; more would only cover each other
BEST = 0.1  # share of the trials drawn in colour


@dataclass(frozen=True)
class Coordinate:
    """One axis: values of the trials, in the page's order; log: drawn on a log scale.

    low, high: the range that was searched, or that of the values where there is none.
    """

    name: str
    values: Sequence[float | None]
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """One trial of the table: its rank without the data, its figures, and its settings."""

    rank: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class SweepPage:
    """Everything the report shows. coordinates: one value per complete trial, best trial first.

    figures: the tiles at the top; columns, rows: the table of the best trials; choice: sentences on
    what the ranking without the data lost against the one with it, empty without data.
    """

    subject: str
    headline: str
    sentence: str
    created: str = ""
    figures: tuple[tuple[str, str], ...] = ()
    coordinates: tuple[Coordinate, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    choice: tuple[str, ...] = ()
    scores: tuple[Figure, ...] = ()
    items: tuple[Item, ...] = ()
    items_total: int = 0
    shape: tuple[int, ...] = ()
    knowledge: tuple[Fact, ...] = ()
    failures: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawn:
    """An axis in place: x, name, ticks as (y, text)."""

    x: float
    name: str
    ticks: tuple[tuple[float, str], ...]


def render(page: SweepPage) -> str:
    """The whole report as one file."""
    style = Markup("\n").join(html._inlined(name) for name in ("report.css", "sweep.css"))
    axes, lines = parallel(page.coordinates)
    cards = gallery.cards(page.items, page.shape, lambda item: "consensus")
    return html._environment().get_template("sweep.html").render(
        page=page, created=page.created, style=style, policy=html._policy(style, ""),
        blur=False, redact=False, axes=axes, lines=lines,
        size=(WIDTH, HEIGHT), span=(TOP, BOTTOM), cards=cards,
        total=max(page.items_total, len(page.items)),
        tables=[
            (name, html._flat(rows))
            for name, rows in (("Settings", page.settings), ("Environment", page.environment))
            if rows
        ],
    )  # fmt: skip


def parallel(
    coordinates: Sequence[Coordinate],
) -> tuple[tuple[Drawn, ...], tuple[tuple[str, bool], ...]]:
    """Axes, and one path per trial with whether it is among the best; the best are drawn last."""
    count = len(coordinates[0].values) if coordinates else 0
    if not count:
        return (), ()
    places = [_placed(one) for one in coordinates]
    gap = (WIDTH - 2 * LEFT) / max(1, len(coordinates) - 1)
    at = [round(LEFT + i * gap, 1) for i in range(len(coordinates))]
    axes = tuple(
        Drawn(x, one.name, ticks)
        for x, one, (_, ticks) in zip(at, coordinates, places, strict=True)
    )
    best = max(1, round(BEST * count))
    shown = sorted({*range(best), *range(best, count, -(-count // MAX_LINES))}, reverse=True)
    lines = []
    for trial in shown:
        points = [
            f"{x},{ys[trial]}" for x, (ys, _) in zip(at, places, strict=True) if ys[trial] is not None
        ]  # fmt: skip
        lines.append(("M" + "L".join(points), trial < best))
    return axes, tuple(lines)


def _placed(
    one: Coordinate,
) -> tuple[list[float | None], tuple[tuple[float, str], ...]]:
    """Heights of the values on an axis, and its ticks: both ends and the middle."""
    known = [v for v in one.values if v is not None and math.isfinite(v) and (v > 0 or not one.log)]
    low = one.low if one.low is not None else min(known, default=0.0)
    high = one.high if one.high is not None else max(known, default=1.0)
    log = one.log and low > 0
    a, b = (math.log(low), math.log(high)) if log else (low, high)
    b = b if b > a else a + 1.0

    def height(value: float) -> float:
        share = ((math.log(value) if log else value) - a) / (b - a)
        return round(BOTTOM - share * (BOTTOM - TOP), 1)

    middle = math.exp((a + b) / 2) if log else (a + b) / 2
    ends = (low, middle, math.exp(b) if log else b)
    ticks = tuple(
        (height(value), f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}") for value in ends
    )
    inside = set(known)
    return [height(v) if v in inside else None for v in one.values], ticks
