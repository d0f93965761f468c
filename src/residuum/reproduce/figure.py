"""One entry of the catalogue: what it shows, how it is computed, how it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from residuum.reproduce.context import Context
from residuum.reproduce.outcome import Outcome

Compute = Callable[[Context], Outcome]
Draw = Callable[[Outcome], bytes]


@dataclass(frozen=True)
class Figure:
    """title: one line; draw: None for a table, which is written as text alone."""

    title: str
    compute: Compute
    draw: Draw | None = None


def drawn(name: str) -> Draw:
    """A drawing of ``residuum.reproduce.pictures``, loaded when used: GPU machines have no matplotlib."""
    module, function = name.split(".")

    def draw(outcome: Outcome) -> bytes:
        found = import_module(f"residuum.reproduce.pictures.{module}")
        sheets = import_module("residuum.reproduce.pictures.sheets")
        picture: bytes = sheets.compact(getattr(found, function)(outcome))
        return picture

    draw.__qualname__ = name
    return draw
