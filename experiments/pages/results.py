"""Tables of ``docs/results.md``: counts and speed of attacks, and the confidence of the selection."""

from __future__ import annotations

import json
from importlib.resources import files

from experiments.pages.tables import (
    Figures,
    grid,
    means,
    read,
    short,
    table,
    victims_of,
    with_chance,
)

ARMS = {
    "published": "published settings",
    "plain": "without the terms",
    "margins": "equal margins alone",
    "prior": "sparse prior alone",
    "all": "residuum",
    "both": "both: residuum",
    "kinks": "both, then kinks",
    "patches": "patch prior alone",
    "unmix": "unmix",
    "with unmix": "residuum and unmix",
}


def arms_of(name: str) -> dict[str, list[Figures]]:
    """Return the scored figures of every arm of a row, victim by victim."""
    entries = [v["arms"] for v in victims_of("stationarity-h200", name)]
    scored = {arm: [e[arm] for e in entries if "candidates" in e.get(arm, {})] for arm in ARMS}
    return {arm: entries for arm, entries in scored.items() if entries}


@table
def ablation() -> str:
    """List each term alone and all together: one restart, n = 500 and n = 100."""
    cells: dict[str, list[str]] = {arm: [] for arm in ARMS}
    for name in ("cifar-500-ablation", "cifar-100-ablation"):
        figures = {arm: means(entries) for arm, entries in arms_of(name).items()}
        for arm in ARMS:
            if arm in figures:
                row = figures[arm]
                cells[arm] += [with_chance(row, "ssim3", "0.8", "0.9"), f"{row['seconds']:.0f}"]
    head = "attack | n=500: ssim3 > 0.4 / NCC > 0.8 / 0.9 | seconds | n=100: the same | seconds"
    return grid(head, [[ARMS[arm], *row] for arm, row in cells.items() if row])


@table
def quick() -> str:
    """List the time to published quality: one short restart."""
    runs = read("stationarity-h200")["quick"]
    return grid(
        "steps | seconds, capture included | ssim3 > 0.4 (held out) | top ten",
        [
            [steps, f"{run['seconds']:.2f}", with_chance(run, "ssim3"), f"{run['top10']:.2f}"]
            for steps, run in sorted(runs.items(), key=lambda pair: int(pair[0]))
            if steps != "1"
        ],
    )


@table
def confidence() -> str:
    """Compare confidence with truth. Each half of the networks is judged by the fit to the other half."""
    file = files("residuum.attacks") / "calibration.json"
    bins = json.loads(file.read_text("utf-8"))["provenance"]["reliability_other_half"]
    rows = [[f"{b['confidence']:.2f}", f"{b['true']:.2f}", b["groups"]] for b in bins]
    return grid("confidence | share with NCC > 0.8 | groups", rows)


@table
def steps() -> str:
    """List the milliseconds of one step, on two cores and on one GPU."""
    figures = [figure for name in ("step-h200", "step-cpu") for figure in read(name)["figures"]]
    last = ("floor", "share of floor", "ratio")
    names = [k for columns in figures for k in columns if k not in (*last, "shape")]
    rows = [
        [name, *(f"{figure[name]:.3g}" if name in figure else "" for figure in figures)]
        for name in dict.fromkeys((*names, *last))
    ]
    return grid(
        "ms per step | H200, cifar | H200, mnist | two cores, cifar | two cores, mnist", rows
    )


@table
def speed() -> str:
    """Compare with the published way. Each line comes from one run."""
    names = ("margin-cpu", "certificate-cpu", "step-cpu", "step-h200")
    rows = [
        [f"`{name}`", file["what"], ratio(file["ratio"]), short(file["bar"])]
        for name in names
        for file in (read(name),)
    ]
    return grid("benchmark | compared | measured | wanted", rows, text_columns=2)


@table
def speed_in_one_run() -> str:
    """List what takes time on one GPU: a step, published quality, an audit, unmixing, a sweep."""
    file = read("speed-h200")
    figures, count = file["figures"][0], file["settings"]["published count"]
    step, quality, source = (
        (figures[theirs], figures[ours])
        for theirs, ours in (
            ("published step, ms", "step, ms"),
            ("published, s", "to published quality, s"),
            ("the same by scikit-learn's FastICA, s", "one run of unmix, one core, s"),
        )
    )
    reached = f"{figures['images above ssim3 0.4 then']} ({figures['the same of held-out images']})"
    audited = f"{figures['audit, recovered']} ({short(figures['audit, by chance'])})"
    rows = [
        ["a step, all layers, m = 1000", "published", *pair(step, "ms")],
        [
            f"{count} images above ssim3 0.4, all included; here {reached} in "
            f"{figures['to published quality, steps']} steps",
            "published, two runs; timed on another day",
            *pair(quality, "s"),
        ],
        [
            f"one run of unmix on one core, rank {file['settings']['rank']}",
            "scikit-learn's FastICA",
            *pair(source, "s"),
        ],
        [
            f"a whole audit, budget of a minute: {audited} recovered",
            "",
            "",
            f"{figures['audit with a budget of a minute, s']:.0f} s",
            "",
        ],
        [
            "a sweep beside its trials, one process",
            "",
            "",
            f"{figures['sweep, seconds beside its trials']:.0%}",
            "",
        ],
    ]
    return grid("what | beside | takes | residuum | ratio", rows, text_columns=2)


def pair(seconds: tuple[float, float], unit: str) -> list[str]:
    """Return the cost of the reference, our cost, and their ratio."""
    theirs, ours = seconds
    return [f"{theirs:.3g} {unit}", f"{ours:.3g} {unit}", ratio(theirs / ours)]


def ratio(value: float) -> str:
    """Return a ratio with three digits."""
    return f"{value:.3g}" if value < 999 else f"{value:.0f}"
