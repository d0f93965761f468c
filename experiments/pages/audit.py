"""Tables of ``docs/audit.md``: the grades of matches."""

from __future__ import annotations

from collections import Counter

from experiments.pages.tables import Figures, grid, read, table

GRADES = ("near-copy", "resembles", "class-like")


@table
def grades() -> str:
    """Count the grades of candidates of a known kind and of an attack, on three data sets together."""
    kinds = {
        "near-copy": "the sample with noise (NCC about 0.9)",
        "resembles": "of 500 other images the nearest",
        "class-like": "mean of the class, of other images",
    }
    networks_of = read("grades")["rows"]
    networks = [
        row for file in ("digits", "mnist", "cifar") for row in networks_of[f"grades_{file}"]
    ]
    rows = [[title, *_sums(networks, "confusion", kind)] for kind, title in kinds.items()]
    chance = sum(row["expected"] for row in networks)
    rows.append([f"brought back by the attack (chance {chance:.1f})", *_sums(networks)])
    return grid("candidates | " + " | ".join(GRADES), rows)


def _sums(rows: list[Figures], *where: str) -> list[int]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row[where[0]][where[1]] if where else row["grades"])
    return [counts[grade] for grade in GRADES]
