"""Convert durations such as ``90s``, ``1m30s`` or ``1h`` to seconds and back."""

from __future__ import annotations

import math
import re

from residuum.errors import InputError

# Seconds in each unit of time.
UNITS = {"s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0}
UNITS |= {"h": 3600.0, "hour": 3600.0}


def seconds_of(budget: str | float) -> float:
    """Convert a duration such as "1m30s" to seconds.

    Args:
        budget: Text such as "90s", "1m30s", "1.5h" or "5 minutes", or a number of seconds.

    Returns:
        The length in seconds.

    Raises:
        InputError: If the text is not a positive length of time.
    """
    compact_text = "".join(str(budget).split())
    numbers_with_units = re.findall(r"(\d+(?:\.\d*)?|\.\d+)([a-z]*)", compact_text)
    is_fully_parsed = "".join(number + unit for number, unit in numbers_with_units) == compact_text
    # The text "90" without a unit means 90 seconds. If the text has several numbers, each needs a unit.
    unit_seconds = [
        UNITS.get(unit, UNITS.get(unit.removesuffix("s"), math.nan))
        for _, unit in numbers_with_units
    ]
    if len(numbers_with_units) == 1 and not numbers_with_units[0][1]:
        unit_seconds = [1.0]
    total_seconds = sum(
        float(number) * size
        for (number, _), size in zip(numbers_with_units, unit_seconds, strict=True)
    )
    if (
        not is_fully_parsed
        or sorted(unit_seconds, reverse=True) != unit_seconds
        or not 0 < total_seconds < math.inf
    ):
        raise InputError(
            f"A time budget must be a duration such as 90s, 1m30s, 10min or 1h; got {str(budget)[:40]!r}.",
            "Pass --budget 1min.",
        )
    return total_seconds


def duration(seconds: float) -> str:
    """Convert a number of seconds to a text such as ``1m30s``, which :func:`seconds_of` can read."""
    total_seconds = max(1, round(seconds))
    counts_with_units = (
        (total_seconds // 3600, "h"),
        (total_seconds % 3600 // 60, "m"),
        (total_seconds % 60, "s"),
    )
    return "".join(f"{count}{unit}" for count, unit in counts_with_units if count)
