"""Tables of exposure: its ranking by kind of data, and every other claim beside what was wanted."""

from __future__ import annotations

from statistics import mean, median

import numpy as np

from benchmarks.exposure import EPSILONS, KINK_RECORDS, LEFT_OUT, area, has_ranking, outcomes
from benchmarks.markdown import Figures, grid, read, table

ALL = "all (wanted: 0.90, at most 0.02 below the margin)"
DATA = ("digits", "mnist", "cifar", "cancer", "diabetes", "")  # the last one: all of them


@table
def exposure_ranking() -> str:
    """Areas of score and margin for "recovered by the strongest attack", means of victims."""
    rows = []
    for name in DATA:
        cases = [v for k, v in read("exposure-ranking")["cases"].items() if k.startswith(name)]
        ranked = [case for case in cases if has_ranking(outcomes(case)["strongest"])]
        told = [case for case in cases if has_ranking(outcomes(case, told=True)["strongest"])]
        found = sum(int(outcomes(case)["strongest"].sum()) for case in ranked)
        areas = [
            mean(area_of(case, "score") for case in ranked),
            mean(area_of(case, "margin", -1) for case in ranked),
            mean(area_of(case, "score", told=True) for case in told),
        ]
        counts = f"{found} of {sum(case['n'] for case in ranked)}"
        shown = [f"{value:.3f}" for value in areas]
        if not name:
            shown[0] = f"**{shown[0]}**"
        rows.append(
            [
                name or "all (wanted: 0.90, at most 0.02 below the margin)",
                "**one victim**" if len(ranked) == 1 else len(ranked),
                counts,
                *shown,
            ]
        )
    head = "data | victims | recovered | AUC of the score | of the margin"
    return grid(f"{head} | of the score, signs as told", rows)


def area_of(case: Figures, figure: str, sign: int = 1, told: bool = False) -> float:
    """Of a figure of the records for who is recovered."""
    return area(case["records"][figure], outcomes(case, told)["strongest"], sign)


@table
def exposure_claims() -> str:
    """Kinks, records left out, bounds of epsilon and cost."""
    rows = [*kinks(), *left_out(), *bounds(), *cost()]
    return grid("claim | wanted | measured", rows, left=3)


def kinks() -> list[list[str]]:
    """Who is called by the neurons that switch at a record."""
    cases = list(read("exposure-kinks")["cases"].values())
    called = [case["members called"] / KINK_RECORDS for case in cases]
    wrong = [
        case["half: strangers called"]
        / max(1, case["half: strangers called"] + case["half: members called"])
        for case in cases
    ]
    alarms = sum(case["strangers called"] > 0 for case in cases)
    span = f"{min(called):.0%} to {max(called):.0%}"
    networks = f"{len(cases)} CIFAR networks, n=100"
    return [
        [f"training images called, {networks}", "45%", f"{mean(called):.1%} ({span})"],
        ["false calls where half are others", "at most 7%", f"{mean(wrong):.1%}"],
        ["networks that call images never seen", "at most 3", f"{alarms} of {len(cases)}"],
    ]


def left_out() -> list[list[str]]:
    """The score of a record when in, against the same record appended after training without it."""
    rows = []
    for name in (*LEFT_OUT, ""):
        some = [v for k, v in read("exposure-leftout")["cases"].items() if k.startswith(name)]
        inside, outside = (
            np.concatenate([case[side]["score"] for case in some]) for side in ("in", "out")
        )
        upper = np.concatenate(
            [np.array(case["in"]["score"]) >= np.median(case["in"]["score"]) for case in some]
        )
        areas = []
        for chosen in (np.ones(len(inside), bool), upper):
            values = np.concatenate([inside[chosen], outside[chosen]])
            areas.append(area(values.tolist(), np.arange(len(values)) < chosen.sum()))
        what = f"left out, {name or 'all'}, {len(some)} networks: AUC, of the upper half"
        rows.append([what, "" if name else "0.85, 0.95", f"{areas[0]:.3f}, {areas[1]:.3f}"])
    return rows


def bounds() -> list[list[str]]:
    """Epsilon from canaries, per training."""
    rows = []
    for epsilon in EPSILONS:
        runs = read("exposure-epsilon")["cases"].items()
        some = [case for key, case in runs if key.split("/")[0] == f"{epsilon:g}"]
        found = [case["bound"] for case in some]
        private = np.isfinite(epsilon)
        below = sum(case["bound"] <= case["spent"] for case in some) if private else 0
        said = f"median {median(found):.2f}, {min(found):.2f} to {max(found):.2f}"
        rows.append(
            [
                f"bound, {f'DP-SGD at epsilon {epsilon:g}' if private else 'no privacy'}",
                "below it in 19 of 20" if private else "above 0.5",
                said + (f"; below in {below} of {len(some)}" if private else ""),
            ]
        )
    return rows


def cost() -> list[list[str]]:
    """Seconds of one exposure, on two cores and on a GPU."""
    slow, fast = (read(f"exposure-speed-{device}")["cases"] for device in ("cpu", "cuda"))
    wanted = ("20 s, 2 s", "15 min")
    return [
        [
            f"cost, {key}: two cores, one H200",
            aim,
            f"{slow[key]['seconds']:.0f} s ({slow[key]['peak_gb']:.1f} GB), {fast[key]['seconds']:.1f} s",
        ]
        for key, aim in zip(slow, wanted, strict=True)
    ]
