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
def certificate() -> str:
    """Of all 500 samples, with and without a value range."""
    cases = read("certificate_uniqueness-h200")["figures"]
    keys = {
        "seconds (bar: 60)": ("seconds", ".1f"),
        "GPU memory, GB (bar: 4)": ("memory, GB", ".1f"),
        "energy that others keep, median, proved": ("others keep at least, median", ".3f"),
        "the same if they keep the margins": ("margins kept: at least, median", ".3f"),
        "largest gap to the example found": ("gap, largest", ".0e"),
        "largest change of the sum of gradients by an example": ("change", ".0e"),
    }
    rows = [
        [title, *(format(one[key], digits) for one in cases)]
        for title, (key, digits) in keys.items()
    ]
    return grid("value range | " + " | ".join(one["case"] for one in cases), rows)


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


def arms(file: str) -> str:
    """Ways to grow, against none."""
    found, rows = read(file), []
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


@table
def growth_ntk() -> str:
    """With initial weights."""
    return arms("splitting-ntk-mnist-h200")


@table
def growth_kkt() -> str:
    """Binary KKT."""
    return arms("splitting-binary-mnist-h200")
