"""What a figure found: rows of published against measured, and the arrays its picture is drawn from."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from residuum.errors import InputError
from residuum.records import write_atomic, write_json
from residuum.records.data import read_npz

RESULT, ARRAYS, PICTURE, TABLE = "result.json", "arrays.npz", "figure.png", "table.md"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Row:
    """One quantity. published: as printed; corrected: what the mathematics says where that differs;
    chance: the same quantity where nothing was learnt (held-out samples, another seed, a rotation).
    """

    what: str
    measured: Any
    published: Any = None
    chance: Any = None
    corrected: Any = None
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """rows: the table; arrays: for the picture; details: settings and victims; notes: what to know."""

    rows: tuple[Row, ...]
    arrays: dict[str, Array] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def columns(self) -> dict[str, dict[str, Any]]:
        """published, measured, chance and corrected values by what they are of."""
        return {
            name: {row.what: getattr(row, name) for row in self.rows if keep(getattr(row, name))}
            for name in ("published", "measured", "chance", "corrected")
        }

    def value(self, what: str, column: str = "measured") -> Any:
        """One entry of the table."""
        return next(getattr(row, column) for row in self.rows if row.what == what)


def keep(value: Any) -> bool:
    """Whether there is a value."""
    return value is not None


def save(outcome: Outcome, folder: Path, head: dict[str, Any]) -> dict[str, Any]:
    """Write result.json, table.md and arrays.npz; head: what the run knows about itself."""
    columns = outcome.columns()
    summary = {**head, **columns}
    if "recovered" in columns["measured"]:
        summary["recovered"] = columns["measured"]["recovered"]
    summary |= {
        "rows": [asdict(row) for row in outcome.rows],
        "details": outcome.details,
        "notes": list(outcome.notes),
    }
    summary = _plain(summary)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **outcome.arrays)
    write_atomic(folder / ARRAYS, buffer.getvalue())
    write_atomic(folder / TABLE, table(outcome, str(head.get("title", ""))))
    write_json(folder / RESULT, summary)
    return summary


def load(folder: Path) -> tuple[Outcome, dict[str, Any]]:
    """What :func:`save` wrote, to draw it again."""
    try:
        summary = json.loads((folder / RESULT).read_text())
        rows = tuple(Row(**row) for row in summary["rows"])
        details, notes = summary["details"], tuple(summary["notes"])
    except (OSError, ValueError, TypeError, LookupError) as problem:
        raise InputError(
            f"{str(folder)!r} holds no finished reproduction ({type(problem).__name__}).",
            "Run it without --draw-only first.",
        ) from problem
    return Outcome(rows, read_npz(folder / ARRAYS), details, notes), summary


def table(outcome: Outcome, title: str) -> str:
    """The rows as a Markdown table; columns that nobody fills are left out."""
    names = ["published", "corrected", "measured", "chance", "note"]
    filled = [
        name for name in names if any(getattr(row, name) not in (None, "") for row in outcome.rows)
    ]
    head = ["what", *filled]
    lines = [head, ["---"] * len(head)]
    lines += [[row.what, *(shown(getattr(row, name)) for name in filled)] for row in outcome.rows]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    notes = "".join(f"\n- {note}" for note in outcome.notes)
    return f"# {title}\n\n{text}\n" + (f"{notes}\n" if notes else "")


def shown(value: Any) -> str:
    """A value for a person."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return str(value)


def _plain(value: Any) -> Any:
    """JSON has no NaN, infinity, tuples or numpy numbers."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
