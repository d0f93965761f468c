"""Tables of attacks: what came back, how fast, beside chance."""

from __future__ import annotations

import json
from importlib.resources import files
from statistics import mean

from benchmarks import stationarity as stationary
from benchmarks import unmix as unmixing
from benchmarks.markdown import (
    Figures,
    each,
    grid,
    means,
    once,
    read,
    short,
    table,
    victims_of,
    with_chance,
)

# Unmix, stationarity and surfaces: means of victims on different images.

SURFACES = {
    "cifar-50": "CIFAR n=50, margin",
    "cifar-100": "CIFAR n=100, margin",
    "cifar-200": "CIFAR n=200, margin",
    "cifar-500": "CIFAR n=500, margin",
    "cifar-100-gd": "CIFAR n=100, gradient descent, 1e4 epochs",
    "mnist-100": "MNIST n=100, margin",
    "cifar-100-momentum": "CIFAR n=100, momentum buffer, batches of 50",
    "sklearn-100": "MLPClassifier, CIFAR n=100, centred, Adam moment",
    "sklearn-100-raw": "the same, pixels in [0, 1]",
}


@table
def unmix() -> str:
    """Both claims, the second one below the first."""
    rows = []
    for file, claim in (("unmix-h200", ""), ("unmix-again-h200", ", second claim")):
        for name, title in SURFACES.items():
            entries = victims_of(file, name)
            if not entries:
                continue
            one, rival = (means([e[arm] for e in entries]) for arm in ("unmix", "stationarity"))
            counts = ", ".join(str(e["unmix"]["recovered"]) for e in entries)
            sources = [source for e in entries for source in e["sources"]]
            backed = [similar for share, _, similar, _ in sources if share >= 0.5]
            true = f"{mean(similar > 0.8 for similar in backed):.0%} of {len(backed)}"
            wanted = unmixing.ROWS[name].wanted.items()
            aims = [f"{v}" + (f" above {k}" if k[0] == "0" else "") for k, v in wanted]
            rows.append(
                [
                    title + claim,
                    f"{counts} ({short(one['expected'])}; {one['threshold']:.2f})",
                    " / ".join(short(one[str(level)]) for level in unmixing.LEVELS),
                    short(one["0.8 held out"]),
                    true,
                    short(means(entries)["seconds"]),
                    f"{short(rival['0.8'])} / {short(rival['0.9'])}",
                    ", ".join(aims),
                ]
            )
    head = "surface | recovered, per victim (chance; threshold) | NCC > 0.7 / 0.8 / 0.9 / 0.95"
    rest = "held out > 0.8 | found by half of the runs: > 0.8 | seconds | stationarity > 0.8 / 0.9 | aimed at"
    return grid(f"{head} | {rest}", rows)


STATIONARY = {
    "cifar-500": "CIFAR n=500",
    "cifar-1000": "CIFAR n=1000",
    "mnist-500": "MNIST n=500",
    "cifar-200": "CIFAR n=200",
    "cifar-100-default": "CIFAR n=100, default start",
    "cifar-100-ten": "CIFAR n=100, ten classes",
    "cifar-100-gd": "CIFAR n=100, gradient descent, 1e4 epochs",
    "cifar-100-gd-long": "CIFAR n=100, gradient descent, 1e5 epochs",
    "cifar-100-batches": "CIFAR n=100, batches of 50",
    "cifar-100-decay": "CIFAR n=100, weight decay 1e-3",
}
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
def stationarity() -> str:
    """What the attack chooses by itself, beside the published settings and beside none of the terms."""
    rows = []
    for name, title in STATIONARY.items():
        row = stationary.ROWS[name]
        sizes = f"{row.attack['restarts']} x {row.attack.get('candidates', 2 * row.n)}"
        for arm, entries in arms_of(name).items():
            one = means(entries)
            victims = f"{len(entries)} victims" if len(entries) > 1 else "**one victim**"
            ssim = f"{with_chance(one, 'ssim3')}; {one['top10']:.2f}" if "ssim3" in one else ""
            rows.append(
                [
                    f"{title}; {sizes}; {victims}",
                    ARMS[arm],
                    ssim,
                    with_chance(one, "0.7", "0.8", "0.9"),
                    f"{short(one['recovered'])} ({short(one['expected'])})",
                    f"{one['seconds']:.0f}",
                    ", ".join(f"{k}: {v}" for k, v in row.wanted.items()) if arm == "all" else "",
                ]
            )
    head = "victims | attack | ssim3 > 0.4; top ten | NCC > 0.7 / 0.8 / 0.9"
    return grid(f"{head} | recovered (chance) | seconds | aimed at", once(rows), left=2)


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


# Real images on one GPU, and steps.

EXPERIMENTS = (
    "cifar-50",
    "cifar-100",
    "cifar-500",
    "mnist-50",
    "mnist-500",
    "multiclass-cifar-500",
)


@table
def reconstruction() -> str:
    """The default attack of the time, without prior and margins, every seed."""
    rows = []
    for name in EXPERIMENTS:
        seeds = read(f"reconstruction-{name}")["seeds"]
        scores = [one["scores"] for one in seeds]
        ncc, ssim = ([one["metrics"][metric] for one in scores] for metric in ("ncc", "ssim3"))
        restarts = len(seeds[0]["status"])
        above = [
            f"{one['above_published_threshold']} ({one['above_published_threshold_holdout']})"
            for one in ssim
        ]
        rows.append(
            [
                name,
                f"{restarts} x {scores[0]['m'] // restarts}",
                f"{each(ncc, 'recovered')} ({ncc[0]['expected_by_chance']:.1f})",
                each(ncc, "threshold_null99", ".2f"),
                " ".join(above),
                each(ssim, "top10_mean", ".2f"),
                each(scores, "ncc_above_0.9"),
                f"{mean(one['attack_seconds'] for one in seeds):.1f}",
            ]
        )
    head = "victim | restarts x m | recovered, every seed (chance) | NCC above"
    return grid(f"{head} | ssim3 > 0.4 (held out) | top ten | NCC > 0.9 | seconds", rows)


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
def bars() -> str:
    """Speed against the published way, both in one run."""
    names = ("margin-cpu", "certificate-cpu", "step-cpu", "rowspace-cpu", "step-h200")
    files = {name: read(name) for name in names}
    return grid(
        "benchmark | compared | ratio | bar",
        [
            [
                f"`{n}`",
                f["what"],
                f"{f['ratio']:.3g}" if f["ratio"] < 999 else f"{f['ratio']:.0f}",
                short(f["bar"]),
            ]
            for n, f in files.items()
        ],
        left=2,
    )
