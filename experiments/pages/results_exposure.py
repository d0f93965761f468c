"""Tables of ``docs/results.md`` about exposure: its ranking by kind of data, and every other claim."""

from __future__ import annotations

from statistics import mean, median

import numpy as np

from experiments.exposure_epsilon import EPSILONS
from experiments.exposure_kinks import KINK_RECORDS
from experiments.exposure_left_out import LEFT_OUT
from experiments.exposure_ranking import area, has_ranking, outcomes
from experiments.pages.tables import Figures, grid, read, table

DATA = ("digits", "mnist", "cifar", "cancer", "diabetes", "")  # the last one: all of them


@table
def exposure_ranking() -> str:
    """List the mean areas under the curve of score and margin for "recovered by the strongest attack"."""
    rows = []
    for name in DATA:
        cases = [v for k, v in read("exposure_ranking")["cases"].items() if k.startswith(name)]
        ranked = [case for case in cases if has_ranking(outcomes(case)["strongest"])]
        signed = [
            case for case in cases if has_ranking(outcomes(case, known_sign=True)["strongest"])
        ]
        recovered = sum(int(outcomes(case)["strongest"].sum()) for case in ranked)
        areas = [
            mean(area_of(case, "score") for case in ranked),
            mean(area_of(case, "margin", -1) for case in ranked),
            mean(area_of(case, "score", known_sign=True) for case in signed),
        ]
        counts = f"{recovered} of {sum(case['n'] for case in ranked)}"
        cells = [f"{value:.3f}" for value in areas]
        if not name:
            cells[0] = f"**{cells[0]}**"
        rows.append(
            [
                name or "all (wanted: 0.90, at most 0.02 below the margin)",
                "**one victim**" if len(ranked) == 1 else len(ranked),
                counts,
                *cells,
            ]
        )
    head = "data | victims | recovered | AUC of the score | of the margin"
    return grid(f"{head} | of the score, signs as told", rows)


def area_of(case: Figures, figure: str, sign: int = 1, known_sign: bool = False) -> float:
    """Return the area under the curve of a figure of the records for "recovered"."""
    return area(case["records"][figure], outcomes(case, known_sign)["strongest"], sign)


@table
def exposure_claims() -> str:
    """List the claims about activation boundaries, records left out, bounds of epsilon and cost."""
    rows = [*kinks(), *left_out(), *bounds(), *cost()]
    return grid("claim | wanted | measured", rows, text_columns=3)


def kinks() -> list[list[str]]:
    """Count the records that are flagged by the neurons that switch at them."""
    cases = list(read("exposure_kinks")["cases"].values())
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
    """Compare the scores of records that were trained on with scores of the same records left out."""
    rows = []
    for name in (*LEFT_OUT, ""):
        networks = [v for k, v in read("exposure_left_out")["cases"].items() if k.startswith(name)]
        inside, outside = (
            np.concatenate([case[side]["score"] for case in networks]) for side in ("in", "out")
        )
        upper = np.concatenate(
            [np.array(case["in"]["score"]) >= np.median(case["in"]["score"]) for case in networks]
        )
        areas = []
        for chosen in (np.ones(len(inside), bool), upper):
            values = np.concatenate([inside[chosen], outside[chosen]])
            areas.append(area(values.tolist(), np.arange(len(values)) < chosen.sum()))
        what = f"left out, {name or 'all'}, {len(networks)} networks: AUC, of the upper half"
        rows.append([what, "" if name else "0.85, 0.95", f"{areas[0]:.3f}, {areas[1]:.3f}"])
    return rows


def bounds() -> list[list[str]]:
    """List the bounds of epsilon from canaries, for each kind of training."""
    rows = []
    for epsilon in EPSILONS:
        runs = read("exposure_epsilon")["cases"].items()
        networks = [case for key, case in runs if key.split("/")[0] == f"{epsilon:g}"]
        values = [case["bound"] for case in networks]
        private = np.isfinite(epsilon)
        below = sum(case["bound"] <= case["spent"] for case in networks) if private else 0
        text = f"median {median(values):.2f}, {min(values):.2f} to {max(values):.2f}"
        rows.append(
            [
                f"bound, {f'DP-SGD at epsilon {epsilon:g}' if private else 'no privacy'}",
                "below it in 19 of 20" if private else "above 0.5",
                text + (f"; below in {below} of {len(networks)}" if private else ""),
            ]
        )
    return rows


def cost() -> list[list[str]]:
    """List the seconds of one exposure, on two cores and on a GPU."""
    slow, fast = (read(f"exposure-{device}")["cases"] for device in ("cpu", "cuda"))
    aims = ("20 s, 2 s", "15 min")
    return [
        [
            f"cost, {key}: two cores, one H200",
            aim,
            f"{slow[key]['seconds']:.0f} s ({slow[key]['peak_gb']:.1f} GB), {fast[key]['seconds']:.1f} s",
        ]
        for key, aim in zip(slow, aims, strict=True)
    ]
