"""Grids of reconstructions above their training images, and scores against outputs."""

from __future__ import annotations

import math
from typing import Any

import torch

from residuum.report import drawing
from residuum.report.drawing import BLUE, INK, ORANGE, Cell
from residuum.reproduce.outcome import Array, Outcome
from residuum.reproduce.pictures.sheets import COLUMNS, Band, stacked

GOOD = 0.4  # ssim3 above which the paper calls a reconstruction good


def grids(outcome: Outcome) -> bytes:
    """Every run of the figure: reconstructions above training images, best first."""
    bands: list[Band | None] = []
    for name, run in outcome.details["runs"].items():
        attack = "residuum" if "residuum" in run["attacks"] else next(iter(run["attacks"]))
        cells = _cells(outcome, name)
        bands.append((_title(name, run, attack, len(cells)), cells))
    return stacked(bands)


def methods(outcome: Outcome) -> bytes:
    """Every attack on every run, a band each."""
    bands: list[Band | None] = []
    for name, run in outcome.details["runs"].items():
        for attack in run["attacks"]:
            cells = _cells(outcome, f"{name}/{attack}")[:COLUMNS]
            bands.append((_title(f"{name}, {attack}", run, attack, len(cells)), cells))
    return stacked(bands)


def shifts(outcome: Outcome) -> bytes:
    """Five best pairs of every shift; rewritten biases at the left, trained again at the right."""
    names = list(dict.fromkeys(key.rsplit("/", 1)[0] for key in outcome.arrays))
    bands: list[Band | None] = []
    for name in names:
        what = f"{name}: NCC of the five best"
        found, held = (outcome.value(what, column) for column in ("measured", "chance"))
        bands.append((f"{what}, mean {found:.2f} (held out {held:.2f})", _cells(outcome, name)))
    return stacked([*bands[:1], None, *bands[1:]], across=2)


def scatters(outcome: Outcome) -> bytes:
    """Score against output, a panel per run; recovered samples are filled."""
    runs = outcome.details["runs"]
    columns = min(len(runs), 4 if len(runs) > 6 else 3)
    rows = math.ceil(len(runs) / columns)
    figure = drawing.new_figure(2.9 * columns, 2.5 * rows + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(runs) :]:
        axes.set_visible(False)
    for axes, (name, run) in zip(panels, runs.items(), strict=False):
        _points(axes, outcome, name)
        if run["metric"] == "ssim3":
            axes.axhline(GOOD, color=INK, lw=0.8, ls=":")
        axes.set_ylim(0, 1)
        axes.set_title(f"{name}\n{_count(run['attacks']['residuum'])}", fontsize=8)
        axes.set_xlabel("network output", fontsize=7.5)
        axes.set_ylabel(run["metric"], fontsize=7.5)
        drawing.tidy(axes)
    drawing.legend_below(figure, panels[0])
    return drawing.png(figure)


def _points(axes: Any, outcome: Outcome, name: str) -> None:
    """Every sample of a run; recovered ones above the others."""
    output, score, found = (outcome.arrays[f"{name}/{k}"] for k in ("output", "score", "recovered"))
    for mask, style in (
        (~found, {"color": ORANGE, "label": "not recovered", "marker": "x", "linewidth": 0.7}),
        (found, {"color": BLUE, "label": "recovered (by NCC)", "marker": "o", "linewidth": 0}),
    ):
        axes.scatter(output[mask], score[mask], s=9, alpha=0.6, **style)


def _count(attack: dict[str, Any]) -> str:
    """How many came back, beyond which NCC (older files do not say), how many by chance."""
    found = attack["ncc"]
    beyond = f" (NCC > {found['threshold']:.2g})" if "threshold" in found else ""
    return f"recovered {found['recovered']}{beyond}, by chance {found['expected_by_chance']:.1f}"


def _title(name: str, run: dict[str, Any], attack: str, shown: int) -> str:
    """The run, its count beside chance, and what is shown of it."""
    count = _count(run["attacks"][attack])
    return f"{name} ({run['data']}, {run['n']} samples): {count}; best {shown} by {run['metric']}"


def _cells(outcome: Outcome, key: str) -> list[Cell]:
    return cells(*(outcome.arrays[f"{key}/{part}"] for part in ("found", "true", "score")))


def cells(found: Array, true: Array, score: Array) -> list[Cell]:
    """A pair of images each, captioned by its score."""
    triples = zip(found, true, score, strict=True)
    return [
        Cell((torch.from_numpy(a), torch.from_numpy(b)), f"{float(s):.2f}") for a, b, s in triples
    ]
