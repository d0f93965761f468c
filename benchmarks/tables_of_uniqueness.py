"""Tables of experiments about uniqueness, and of growing the candidate set."""

from __future__ import annotations

from statistics import mean

from benchmarks.markdown import each, grid, grouped, read, table


@table
def partial() -> str:
    """Part of the weights."""
    rows = []
    for access, own in grouped(read("uniqueness-partial")["rows"], "access").items():
        rows.append([access, each(own, "recovered"), each(own, "top10_mean", ".2f")])
    return grid("known | recovered of 50, per victim | mean NCC of the ten best", rows)


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


# Growing the candidate set.


@table
def growth_ntk() -> str:
    """Ways to grow, against none, with initial weights."""
    found, rows = read("splitting-ntk-mnist-h200"), []
    for arm, one in found["arms"].items():
        compared = found["compared"].get(arm, {})
        gains = [interval(compared.get(f"{kind}_l2_difference")) for kind in ("train", "held_out")]
        counts, held = (one[kind]["below_threshold_one_to_one"] for kind in ("train", "held_out"))
        ends = sorted({*one["final_candidates"]})
        rows.append(
            [
                arm,
                "-".join(str(end) for end in dict.fromkeys((ends[0], ends[-1]))),
                f"{mean(one['final_loss']):.2g}",
                " ".join(map(str, counts)),
                " ".join(map(str, dict.fromkeys(held))),
                *gains,
            ]
        )
    head = "arm | candidates | loss | L2 < 2.5 one-to-one, per seed | held out"
    return grid(f"{head} | L2 against `none` | held out", rows)


def interval(one: dict[str, float] | None) -> str:
    """A mean and its bootstrap interval."""
    return f"{one['mean']:+.2f} [{one['low']:.2f}, {one['high']:.2f}]" if one else ""
