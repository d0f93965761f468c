"""Find the values of text columns, such as surnames, in the strings of a model file.

An encoder stores the distinct values of a column that it was fitted to. So a value of the user's table counts
if it equals a whole string of the file, without regard to case and white space. Values that only the held-out
table has show how many strings agree by chance: the model never saw them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from scipy.stats import hypergeom

from residuum.io.release import Release
from residuum.io.tree import walk
from residuum.records.tables import Table

# A column needs this many distinct values. Columns with fewer values, such as yes and no, occur everywhere.
MIN_VALUES = 8
# Without held-out values to compare with, the file must hold this share of the values of a column.
MIN_SHARE = 0.8
SIGNIFICANCE = 0.01
LAST_INDEX = re.compile(r"\[\d+\]$")


@dataclass(frozen=True)
class CategoryPlace:
    """A place in a model file that holds values of a text column of the user's table.

    Attributes:
        where: Path of the place.
        column: Name of the column.
        found_count: Number of distinct values of the column in the place.
        value_count: Number of distinct values of the column.
        holdout_found: Number of values in the place that only the held-out table has.
        holdout_count: Number of values that only the held-out table has.
    """

    where: str
    column: str
    found_count: int
    value_count: int
    holdout_found: int
    holdout_count: int

    @property
    def is_beyond_chance(self) -> bool:
        """Whether the place holds more values of the user's table than held-out values explain."""
        if self.found_count < MIN_VALUES:
            return False
        if not self.holdout_count:
            return self.found_count >= MIN_SHARE * self.value_count
        p_value = hypergeom.sf(
            self.found_count - 1,
            self.value_count + self.holdout_count,
            self.found_count + self.holdout_found,
            self.value_count,
        )
        return bool(p_value <= SIGNIFICANCE)


def search_categories(
    release: Release,
    table: Table | None,
    holdout: Table | None,
    list_strings: Callable[[Any], Iterable[str]],
) -> list[CategoryPlace]:
    """Find the places in a model file that hold values of text columns.

    Args:
        release: The model file.
        table: The user's table, None if the samples were not read from a table.
        holdout: A table of samples that the model never saw, or None.
        list_strings: Function that returns the strings that a value of the model file holds directly.

    Returns:
        The places that hold more values than expected by chance.
    """
    if table is None:
        return []
    values = {column: _distinct(entries) for column, entries in table.texts.items()}
    values = {column: names for column, names in values.items() if len(names) >= MIN_VALUES}
    if not values:
        return []
    held_out = {
        column: _distinct(() if holdout is None else holdout.texts.get(column, ())) - names
        for column, names in values.items()
    }
    wanted_strings = set().union(*values.values(), *held_out.values())
    strings_by_place: dict[str, set[str]] = {}
    for place in walk({"": release.content, "metadata": dict(release.metadata)}):
        for string in list_strings(place.value):
            if (key := _normalize(string)) in wanted_strings:
                where = LAST_INDEX.sub("", place.path)
                strings_by_place.setdefault(where, set()).add(key)
    places = [
        CategoryPlace(
            where,
            column,
            len(names & strings),
            len(names),
            len(held_out[column] & strings),
            len(held_out[column]),
        )
        for where, strings in strings_by_place.items()
        for column, names in values.items()
    ]
    return [place for place in places if place.is_beyond_chance]


def _distinct(entries: Iterable[str]) -> set[str]:
    return {_normalize(entry) for entry in entries} - {""}


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split()) if len(text) < 1000 else ""
