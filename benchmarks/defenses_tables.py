"""Markdown tables of results of ``benchmarks.defenses``: ``python -m benchmarks.defenses_tables FILE``.

Counts are of all seeds, in their order, with the mean count by chance; * marks p <= 0.01.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

Row = dict[str, Any]


def defenses_table(rows: list[Row]) -> str:
    """Every defense: counts of three attackers, and the price."""
    head = ("defense", "unaware", "adaptive", "told the shift", "by chance", "KKT", "determined",
            "test accuracy", "test loss", "train s")  # fmt: skip
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for name, group in _grouped(rows, "defense").items():
        chance = [row["unaware"]["expected_by_chance"] for row in group]
        lines.append(_line([
            f"`{name}`", *(_counts(group, who) for who in ("unaware", "adaptive", "told")),
            f"{mean(chance):.2g}", _mean(group, "kkt_plain"), _mean(group, "determined_energy"),
            _mean(group, "accuracy", 3), _mean(group, "loss"),
            f"{mean(row['seconds']['train'] for row in group):.1f}",
        ]))  # fmt: skip
    return "\n".join(lines)


def shift_table(rows: list[Row]) -> str:
    """Inferred shifts: the error for every seed, and counts before and after it is undone."""
    before = {row["seed"]: row for row in rows if row["name"] == "none"}
    head = ("network", "c", "seed", "inferred c - c", "imbalance left", "consensus",
            "recovered undefended", "rewritten, unaware", "inferred shift undone", "true shift undone",
            "by chance")  # fmt: skip
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for row in rows:
        balance = ((row["adaptive"] or {}).get("findings") or {}).get("balance")
        if balance is None:
            continue
        vector = balance["kind"] == "vector"
        error = "-" if vector else f"{balance['shift_per_pixel'] - row['strength']:.2g}"
        lines.append(_line([
            f"`{row['arch']}`", f"{'random, ' if vector else ''}{row['strength']:g}",
            str(row["seed"]), error, f"{balance['imbalance']:.2g}",
            "yes" if balance["consensus"] else "no", _count(before[row["seed"]]["unaware"]),
            *(_count(row[who]) for who in ("unaware", "adaptive", "told")),
            f"{row['unaware']['expected_by_chance']:.2g}",
        ]))  # fmt: skip
    return "\n".join(lines)


def length_table(rows: list[Row]) -> str:
    """Training steps: loss, KKT residual, capacity and count."""
    head = ("steps", "train loss", "KKT residual", "leak capacity", "recovered", "by chance",
            "test accuracy")  # fmt: skip
    lines = [_line(head), _line(["---:"] * len(head))]
    for steps, group in sorted(_grouped(rows, "steps").items()):
        chance = mean(row["unaware"]["expected_by_chance"] for row in group)
        lines.append(_line([
            str(steps), _each(group, lambda r: f"{r['train_loss']:.0e}"),
            _each(group, lambda r: f"{r['kkt_plain']:.2f}"), _each(group, lambda r: str(r["capacity"])),
            _counts(group, "unaware"), f"{chance:.2g}", _mean(group, "accuracy", 3),
        ]))  # fmt: skip
    return "\n".join(lines)


def _grouped(rows: list[Row], key: str) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _counts(group: list[Row], who: str) -> str:
    return ", ".join(_count(row[who]) for row in group)


def _count(attacked: Row | None) -> str:
    if not attacked or attacked["recovered"] is None:
        return "-"
    return f"{attacked['recovered']}{'*' if attacked['p_value'] <= 0.01 else ''}"


def _each(group: list[Row], text: Callable[[Row], str]) -> str:
    return ", ".join(map(text, group))


def _mean(group: list[Row], key: str, digits: int = 2) -> str:
    values = [row[key] for row in group if row[key] is not None]
    return f"{mean(values):.{digits}g}" if values else "-"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    content = json.loads(Path(sys.argv[1]).read_text())
    for part, table in (
        ("table", defenses_table),
        ("shift", shift_table),
        ("length", length_table),
    ):
        if content.get(part):
            print(f"### {part}\n\n{table(content[part])}\n")
    for skipped in content["skipped"]:
        print(f"skipped: {skipped}")
