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
    "sklearn-100": "joblib.dump of `MLPClassifier((200,))`, n=100, centred",
    "sklearn-100-raw": "the same, pixels in [0, 1]",
    "adam-100": "torch.save after Adam, 3072-1000-10, n=100, centred",
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


PUBLISHED_COUNT, PUBLISHED_SECONDS = 17, 430.0  # CIFAR n=500, two runs of Haim et al. 2022


@table
def speed() -> str:
    """Against the published way, or another program, each line from one run."""
    names = ("margin-cpu", "certificate-cpu", "step-cpu", "rowspace-cpu", "step-h200")
    rows = [
        [f"`{name}`", file["what"], ratio(file["ratio"]), short(file["bar"])]
        for name in names
        for file in (read(name),)
    ]
    quickest = min(
        one["seconds"]
        for one in read("stationarity-h200")["quick"].values()
        if one["ssim3"] >= PUBLISHED_COUNT
    )
    once = read("unmix-h200")["cpu"]["one run"]
    beside = read("sweep-cpu")["also"]["engines"]["local"]["overhead"]
    rows += [
        [
            "`stationarity-h200`",
            f"seconds to {PUBLISHED_COUNT} images above ssim3 0.4, published over ours, all included",
            ratio(PUBLISHED_SECONDS / quickest),
            "",
        ],
        [
            "`unmix-h200`",
            "seconds of one run of unmix, scikit-learn's FastICA over ours, one core",
            ratio(once["scikit-learn"] / once["unmix"]),
            "",
        ],
        [
            "`sweep-cpu`",
            "seconds of a sweep beside its trials, in one process ([sweeps](sweeps.md))",
            f"{beside:.0%}",
            "at most 15%",
        ],
    ]
    return grid("benchmark | compared | measured | wanted", rows, left=2)


def ratio(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 999 else f"{value:.0f}"
