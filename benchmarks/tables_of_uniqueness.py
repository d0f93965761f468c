"""Tables of experiments about uniqueness, and of growing the candidate set."""

from __future__ import annotations

from statistics import mean

from benchmarks.markdown import Figures, each, grid, grouped, means, read, span, table


def pair(one: Figures, key: str, digits: str = ".2f") -> str:
    """A figure for the training set, and for held-out samples."""
    return " / ".join(format(one[f"{key}_{kind}"], digits) for kind in ("train", "holdout"))


@table
def sphere() -> str:
    """Distance of the five best against the initial radius."""
    rows = []
    for radius, own in grouped(read("uniqueness-sphere")["rows"], "radius").items():
        default, small = (
            means([r for r in own if r["init"] == init]) for init in ("default", "small")
        )
        raw, projected = "five_best_raw", "five_best_projected"
        cells = [pair(default, raw), pair(small, raw), pair(small, projected)]
        rows.append([f"{radius:g}", *cells, f"{small['outside_share']:.0%}"])
    head = "radius | default first layer | small first layer | small, on row(W1)"
    return grid(f"{head} | outside row(W1)", rows)


@table
def shift() -> str:
    """Shifted CIFAR images, biases rewritten or the network trained again."""
    rows = []
    for one in read("uniqueness-shift")["rows"]:
        name = one["shift"] if one["shift"] == "none" else f"{one['shift']} {one['per_pixel']:g}"
        rows.append(
            [
                name,
                f"{one['margin']:.1f}",
                f"{one['residual_at_data']:.2f}",
                pair(one, "above_0.8", "d"),
                pair(one, "five_best_ncc"),
                pair(one, "single_ncc"),
                pair(one, "mixture_ncc"),
            ]
        )
    head = "shift per pixel | margin | KKT residual at the data | matched, training / held out"
    return grid(f"{head} | five best NCC | best single, median | best mixture of five", rows)


def against(file: str, key: str, title: str) -> str:
    """Recovered samples and what stands beside them, by what was varied."""
    rows = []
    for value, own in grouped(read(file)["rows"], key).items():
        budgets = each(own, "budget_over_norm", ".2g")
        residuals = span(own, "residual_plain")
        rows.append(
            [f"{value:g}", each(own, "recovered"), each(own, "capacity"), residuals, budgets]
        )
    head = f"{title} | recovered of 50, per victim | rank of W1 at 1% | KKT residual at the samples"
    return grid(f"{head} | exact budget / \\|x\\|", rows)


@table
def length() -> str:
    """Training steps."""
    return against("uniqueness-length", "length", "steps")


@table
def flat() -> str:
    """Everything beyond the first principal directions scaled down."""
    return against("uniqueness-flat", "factor", "factor")


@table
def spectrum() -> str:
    """Budgets against the lowest singular value of the data; two seeds."""
    rows = []
    for factor, own in grouped(read("uniqueness-spectrum")["rows"], "factor").items():
        ratios = [one["exact_median"] / one["theorem8_median"] for one in own]
        rows.append(
            [
                f"{factor:g}",
                each(own, "sigma_d", ".2g"),
                each(own, "exact_median", ".2g"),
                each(own, "theorem8_median", ".1e"),
                " ".join(f"{ratio:.0f}" for ratio in ratios),
                ", ".join(pair(one, "five_best_projected") for one in own),
            ]
        )
    head = "factor | lowest singular value | exact budget | Theorem 8 | exact / Theorem 8"
    return grid(f"{head} | five best on row(W1), training / held out", rows)


@table
def partial() -> str:
    """Part of the weights."""
    rows = []
    for access, own in grouped(read("uniqueness-partial")["rows"], "access").items():
        rows.append(
            [access, each(own, "recovered"), each(own, "capacity"), each(own, "top10_mean", ".2f")]
        )
    head = "known | recovered of 50, per victim | rank of that part of W1 at 1%"
    return grid(f"{head} | mean NCC of the ten best", rows)


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
