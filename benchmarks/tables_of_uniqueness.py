"""Tables of experiments about uniqueness, and of growing the candidate set."""

from __future__ import annotations

from benchmarks.markdown import grid, read, table


@table
def falsifier() -> str:
    """Sets tried against the certificate."""
    names = {
        "relu": "exact ReLU points, 2 to 4 layers, 2 to 4 samples a pattern",
        "classes": "exact points of 3 to 5 classes",
        "digits": "networks trained on 20 digits",
    }
    rows = [
        [
            f"{one['networks']} {names[one['case']]}",
            one["tried"],
            one["not in the class"],
            f"{one['worst']:.0e}",
        ]
        for one in read("falsifier-cpu")["figures"]
    ]
    return grid("networks | sets tried | not in the class | nearest to a violation (above 0)", rows)


@table
def growth() -> str:
    """Samples within the published distance, by the way new candidates are found."""
    files = {
        "`growth-ntk`, 80 000 steps, five restarts": "splitting-ntk-mnist-h200",
        "`growth-kkt`, 20 000 steps, three restarts": "splitting-binary-mnist-h200",
    }
    arms = ("none", "paper", "curvature", "random", "frank-wolfe")
    rows = []
    for title, file in files.items():
        found = read(file)["arms"]
        counts = [
            found[a]["train"]["below_threshold_one_to_one"] if a in found else [] for a in arms
        ]
        rows.append([title, *(f"{min(own)}-{max(own)}" if own else "" for own in counts)])
    return grid("`python -m papers shen2026:` | " + " | ".join(arms), rows)
