"""What a figure found: rows of published against measured, and all that its picture is drawn from."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from papers.runs import Context
from residuum.errors import InputError
from residuum.records import Scores, read_npz, write_atomic, write_json

RESULT, ARRAYS, PICTURE, TABLE = "result.json", "arrays.npz", "figure.png", "table.md"
COLUMNS = ("published", "corrected", "measured", "chance")
Array = np.ndarray[Any, Any]


@dataclass
class Outcome:
    """rows: the table; arrays: for the picture; details: settings and victims; notes: what to know."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def row(
        self, what: str, measured: Any, published: Any = None, chance: Any = None, **more: Any
    ) -> None:
        """One more quantity. published: as printed; chance: the same where nothing was learnt (held-out
        samples, another seed, a rotation); more: corrected (what the mathematics says where that
        differs from print) and note.
        """
        row = {"what": what, "measured": measured, "published": published, "chance": chance}
        self.rows.append({**row, "corrected": None, "note": "", **more})

    def recovered(self, name: str, scores: Scores, note: str = "") -> None:
        """How many samples an attack brought back, and how many it would by chance."""
        ncc = scores.metrics["ncc"]
        parts = (f"of {scores.n}", ncc.rule, f"p {ncc.p_value:.2g}" if ncc.p_value else "", note)
        what, note = f"{name}: recovered (NCC beyond 99% of chance)", "; ".join(filter(None, parts))
        self.row(what, ncc.recovered, None, ncc.expected_by_chance, note=note)

    def keep(self, name: str, arrays: dict[str, Array]) -> None:
        """Arrays of one part of the figure, under its name."""
        self.arrays |= {f"{name}/{key}": value for key, value in arrays.items()}

    def column(self, name: str) -> dict[str, Any]:
        """The values of one column by what they are of."""
        return {row["what"]: row[name] for row in self.rows if row[name] is not None}


@dataclass(frozen=True)
class Figure:
    """title: one line; draw: None for a table, which is written as text alone."""

    title: str
    compute: Callable[[Context], Outcome]
    draw: Callable[[Outcome], bytes] | None = None


def save(outcome: Outcome, folder: Path, head: dict[str, Any]) -> None:
    """Write result.json, table.md and arrays.npz; head: what the run knows about itself."""
    columns = {name: outcome.column(name) for name in COLUMNS}
    found = columns["measured"].get("recovered")
    top = {} if found is None else {"recovered": found}
    rest = {"rows": outcome.rows, "details": outcome.details, "notes": outcome.notes}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **outcome.arrays)
    write_atomic(folder / ARRAYS, buffer.getvalue())
    write_atomic(folder / TABLE, table(outcome, head["title"]))
    write_json(folder / RESULT, _plain({**head, **columns, **top, **rest}))


def load(folder: Path) -> tuple[Outcome, dict[str, Any]]:
    """What :func:`save` wrote, to draw it again."""
    try:
        summary = json.loads((folder / RESULT).read_text())
        rows, details, notes = (summary[name] for name in ("rows", "details", "notes"))
    except (OSError, ValueError, LookupError) as problem:
        raise InputError(
            f"{str(folder)!r} holds no finished figure ({type(problem).__name__}).",
            "Run it without --draw-only first.",
        ) from problem
    return Outcome(rows, read_npz(folder / ARRAYS), details, notes), summary


def table(outcome: Outcome, title: str) -> str:
    """The rows as a Markdown table; columns that nobody fills are left out."""
    names = [*COLUMNS, "note"]
    filled = [name for name in names if any(row[name] not in (None, "") for row in outcome.rows)]
    lines = [["what", *filled], ["---"] * (1 + len(filled))]
    lines += [[row["what"], *(_shown(row[name]) for name in filled)] for row in outcome.rows]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"# {title}\n\n{text}\n" + "".join(f"\n- {note}" for note in outcome.notes) + "\n"


def _shown(value: Any) -> str:
    """A value for a person."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """JSON has no NaN, infinity, tuples or numpy numbers."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
