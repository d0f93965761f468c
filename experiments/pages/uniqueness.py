"""Tables of ``docs/uniqueness.md``: the search for sets that break the certificate."""

from __future__ import annotations

from experiments.pages.tables import grid, read, table


@table
def falsifier() -> str:
    """List the sets that were tried against the certificate."""
    names = {
        "relu": "exact ReLU points, 2 to 4 layers, 2 to 4 samples a pattern",
        "classes": "exact points of 3 to 5 classes",
        "digits": "networks trained on 20 digits",
    }
    rows = [
        [
            f"{row['networks']} {names[row['case']]}",
            row["tried"],
            row["not in the class"],
            f"{row['worst']:.0e}",
        ]
        for row in read("falsifier-cpu")["figures"]
    ]
    return grid("networks | sets tried | not in the class | nearest to a violation (above 0)", rows)
