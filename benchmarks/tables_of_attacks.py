"""Tables of attacks: what came back, how fast, beside chance."""

from __future__ import annotations

import json
from importlib.resources import files

from benchmarks.markdown import (
    Figures,
    grid,
    means,
    once,
    read,
    short,
    table,
    victims_of,
    with_chance,
)

# Stationarity and surfaces: means of victims on different images.

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
    """Figures of every arm of a row that was scored, victim by victim."""
    entries = [v["arms"] for v in victims_of("stationarity-h200", name)]
    scored = {arm: [e[arm] for e in entries if "candidates" in e.get(arm, {})] for arm in ARMS}
    return {arm: found for arm, found in scored.items() if found}


@table
def ablation() -> str:
    """Each term by itself and together, one restart, at n = 500 and n = 100."""
    cells: dict[str, list[str]] = {arm: [] for arm in ARMS}
    for name in ("cifar-500-ablation", "cifar-100-ablation"):
        found = {arm: means(entries) for arm, entries in arms_of(name).items()}
        for arm in ARMS:
            if arm in found:
                one = found[arm]
                cells[arm] += [with_chance(one, "ssim3", "0.8", "0.9"), f"{one['seconds']:.0f}"]
    head = "attack | n=500: ssim3 > 0.4 / NCC > 0.8 / 0.9 | seconds | n=100: the same | seconds"
    return grid(head, [[ARMS[arm], *row] for arm, row in cells.items() if row])


@table
def quick() -> str:
    """Time to published quality: one short restart."""
    found = read("stationarity-h200")["quick"]
    return grid(
        "steps | seconds, capture included | ssim3 > 0.4 (held out) | top ten",
        [
            [steps, f"{one['seconds']:.2f}", with_chance(one, "ssim3"), f"{one['top10']:.2f}"]
            for steps, one in sorted(found.items(), key=lambda pair: int(pair[0]))
            if steps != "1"
        ],
    )


FILES = {
    "momentum-500": "torch.save after SGD with momentum, 3072-1000-1000-1, n=500",
    "sklearn-100": "joblib.dump of `MLPClassifier((200,))`, n=100, centered",
    "sklearn-100-raw": "the same, pixels in [0, 1]",
    "adam-100": "torch.save after Adam, 3072-1000-10, n=100, centered",
    "adam-100-raw": "the same, pixels in [0, 1]",
}


@table
def surfaces() -> str:
    """Files as saved, and stripped of everything but the weights."""
    rows = []
    for name, title in FILES.items():
        file = "surfaces-h200" if name == "momentum-500" else "surfaces-cpu"
        for arm in ("as saved", "weights alone"):
            own = [e[arm]["all"] for e in victims_of(file, name) if "all" in e.get(arm, {})]
            if own:
                one = means(own)
                above = ", ".join(str(e["0.9"]) for e in own)
                rows.append(
                    [
                        f"{title}, {len(own)} files",
                        "stripped" if arm == "weights alone" else arm,
                        with_chance(one, "0.8"),
                        f"{with_chance(one, '0.9')}: {above}",
                        f"{short(one['recovered'])} ({short(one['expected'])})",
                        f"{one['seconds']:.0f}",
                    ]
                )
    head = "file | attacked | NCC > 0.8 (held out) | NCC > 0.9 (held out): per file"
    return grid(f"{head} | recovered (chance) | seconds", once(rows), left=2)


# Confidence and steps.


@table
def confidence() -> str:
    """Confidence against truth, each half of the victims judged by the fit to the other."""
    file = files("residuum.attacks") / "calibration.json"
    bins = json.loads(file.read_text("utf-8"))["provenance"]["reliability_other_half"]
    rows = [[f"{b['confidence']:.2f}", f"{b['true']:.2f}", b["groups"]] for b in bins]
    return grid("confidence | share with NCC > 0.8 | groups", rows)


@table
def steps() -> str:
    """Milliseconds of one step, on two cores and on one GPU."""
    figures = [one for name in ("step-h200", "step-cpu") for one in read(name)["figures"]]
    last = ("floor", "share of floor", "ratio")
    names = [k for figure in figures for k in figure if k not in (*last, "shape")]
    rows = [
        [name, *(f"{one[name]:.3g}" if name in one else "" for one in figures)]
        for name in dict.fromkeys((*names, *last))
    ]
    return grid(
        "ms per step | H200, cifar | H200, mnist | two cores, cifar | two cores, mnist", rows
    )


@table
def speed() -> str:
    """Against the published way, each line from one run."""
    names = ("margin-cpu", "certificate-cpu", "step-cpu", "step-h200")
    rows = [
        [f"`{name}`", file["what"], ratio(file["ratio"]), short(file["bar"])]
        for name in names
        for file in (read(name),)
    ]
    return grid("benchmark | compared | measured | wanted", rows, left=2)


@table
def speed_in_one_run() -> str:
    """One victim on one GPU: a step, published quality, a whole audit, unmixing, a sweep."""
    file = read("speed-h200")
    found, count = file["figures"][0], file["settings"]["published count"]
    step, quality, source = (
        (found[theirs], found[ours])
        for theirs, ours in (
            ("published step, ms", "step, ms"),
            ("published, s", "to published quality, s"),
            ("the same by scikit-learn's FastICA, s", "one run of unmix, one core, s"),
        )
    )
    reached = f"{found['images above ssim3 0.4 then']} ({found['the same of held-out images']})"
    audited = f"{found['audit, recovered']} ({short(found['audit, by chance'])})"
    rows = [
        ["a step, all layers, m = 1000", "published", *pair(step, "ms")],
        [
            f"{count} images above ssim3 0.4, all included; here {reached} in "
            f"{found['to published quality, steps']} steps",
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
            f"{found['audit with a budget of a minute, s']:.0f} s",
            "",
        ],
        [
            "a sweep beside its trials, one process",
            "",
            "",
            f"{found['sweep, seconds beside its trials']:.0%}",
            "",
        ],
    ]
    return grid("what | beside | takes | residuum | ratio", rows, left=2)


def pair(seconds: tuple[float, float], unit: str) -> list[str]:
    """What another way takes, what ours does, and how many times as long that is."""
    theirs, ours = seconds
    return [f"{theirs:.3g} {unit}", f"{ours:.3g} {unit}", ratio(theirs / ours)]


def ratio(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 999 else f"{value:.0f}"
