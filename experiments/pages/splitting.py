"""Tables of ``docs/splitting.md``: growth of the candidate set."""

from __future__ import annotations

from experiments.pages.tables import grid, read, table


@table
def growth() -> str:
    """Count the samples within the published distance, by the way in which new candidates are made."""
    files = {
        "`growth-ntk`, 80 000 steps, five restarts": "shen2026-growth-ntk",
        "`growth-kkt`, 20 000 steps, three restarts": "shen2026-growth-kkt",
    }
    arms = ("none", "paper", "curvature", "random", "frank-wolfe")
    rows = []
    for title, file in files.items():
        results = read(file)["arms"]
        counts = [
            results[a]["train"]["below_threshold_one_to_one"] if a in results else [] for a in arms
        ]
        rows.append([title, *(f"{min(seeds)}-{max(seeds)}" if seeds else "" for seeds in counts)])
    return grid("`python -m papers shen2026:` | " + " | ".join(arms), rows)
