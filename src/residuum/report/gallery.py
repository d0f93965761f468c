"""The cards of the report's gallery: which are shown, their pictures, and what they sort by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from residuum.report.page import Item, Page
from residuum.report.pictures import Picture, frames

MAX_CARDS = 120
MAX_BYTES = 6_000_000  # of pictures in one file: it is mailed, and opened on phones
BEYOND = 1e300
Key = tuple[str, str]


@dataclass(frozen=True)
class Card:
    """An item, what it is called, and its pictures."""

    item: Item
    title: str
    pictures: tuple[Picture, ...]


def cards(page: Page) -> tuple[Card, ...]:
    """The best items that fit, in the page's order; without scores, by confidence."""
    items = _ordered(page)
    return fitting(items, page.shape, lambda item: "sample" if matched(item) else "candidate")


def fitting(
    items: Sequence[Item], shape: tuple[int, ...], noun: Callable[[Item], str]
) -> tuple[Card, ...]:
    """The first items, as many as a file to be mailed has room for; noun: what one is called."""
    made: list[Card] = []
    room = MAX_BYTES
    for item in items[:MAX_CARDS]:
        title = f"{noun(item)} {item.number}"
        pictures = frames(item, shape, title)
        room -= sum(len(picture.uri) for picture in pictures)
        if room < 0 and made:
            break
        made.append(Card(item, title, pictures))
    return tuple(made)


def matched(item: Item) -> bool:
    """Whether an item was compared with the data; true of redacted ones too."""
    return item.nearest is not None or any(score is not None for score in item.scores.values())


def redacted(page: Page) -> Page:
    """The page without any array that shows a sample."""
    hidden = (replace(item, found=None, nearest=None, ambiguity=None) for item in page.items)
    return replace(page, items=tuple(hidden))


def total(page: Page) -> int:
    """How many items there are, shown or not."""
    return max(page.items_total or 0, len(page.items))


def left_out(page: Page, shown: tuple[Card, ...]) -> int:
    """How many items the gallery does not show."""
    return total(page) - len(shown)


def keys(item: Item) -> dict[str, Any]:
    """What the script sorts and filters by; what is no number is null."""
    numbers = {
        "margin": item.margin,
        "confidence": item.confidence,
        "determined_energy": item.determined_energy,
        "radius": item.radius,
    }
    return {
        "number": item.number,
        "label": item.label,
        "certificate": item.certificate,
        "recovered": item.recovered,
        "scores": {name: _finite(value) for name, value in item.scores.items()},
        **{name: _finite(value) for name, value in numbers.items()},
    }


def sort_keys(page: Page, shown: tuple[Card, ...]) -> list[Key]:
    """(key, name) of every order that some card has a value for, the page's own order first."""
    items = [card.item for card in shown]
    found: list[Key] = [("order", "best first")]
    metrics = dict.fromkeys(name for item in items for name in item.scores)
    found += [(f"scores:{name}", name) for name in metrics]
    names = {
        "margin": "margin",
        "confidence": "confidence",
        "determined_energy": "energy that pairs keep",
        "radius": "certificate radius",
    }
    found += [
        (key, name)
        for key, name in names.items()
        if any(getattr(item, key) is not None for item in items)
    ]
    return [*found, ("number", "number")]


def ascending(page: Page) -> list[str]:
    """Sort keys whose least value comes first: samples on the margin, lowest distances."""
    metrics = [f"scores:{row.name}" for row in page.metrics if not row.higher_is_better]
    if page.control is not None and not page.control.higher_is_better:
        metrics.append(f"scores:{page.control.metric}")
    return ["number", "margin", *dict.fromkeys(metrics)]


def _ordered(page: Page) -> tuple[Item, ...]:
    if any(item.scores for item in page.items):
        return page.items
    return tuple(sorted(page.items, key=lambda item: -(item.confidence or 0.0)))


def _finite(value: float | None) -> float | None:
    """JSON has no infinity; an unbounded radius still sorts as the largest."""
    if value is None or math.isnan(value):
        return None
    return max(-BEYOND, min(BEYOND, float(value)))
