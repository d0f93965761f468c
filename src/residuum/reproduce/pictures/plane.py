"""Figures in the plane: the circle and its filters; regions, a merge and a split."""

from __future__ import annotations

from typing import Any

import numpy as np

from residuum.report import drawing
from residuum.report.drawing import BLUE, GREEN, GREY, INK, ORANGE, PURPLE
from residuum.reproduce.outcome import Outcome


def circle(outcome: Outcome) -> bytes:
    """All candidates, after the multiplier filter, after duplicates; model inversion last."""
    arrays = outcome.arrays
    found, inverted = (f"{outcome.value(w)} recovered" for w in ("recovered", "model inversion"))
    panels = (
        (f"{len(arrays['all'])} candidates", arrays["all"]),
        (f"multiplier filter: {len(arrays['heavy'])}", arrays["heavy"]),
        (f"without duplicates: {len(arrays['kept'])}; {found}", arrays["kept"]),
        (f"model inversion: {inverted}", arrays["inverted"]),
    )
    figure = drawing.new_figure(11.0, 3.3)
    for axes, (title, points) in zip(figure.subplots(1, 4), panels, strict=True):
        for label, colour, name in ((-1, BLUE, "label -1"), (1, ORANGE, "label +1")):
            mine = arrays["train"][arrays["labels"] == label]
            axes.scatter(
                mine[:, 0], mine[:, 1], s=70, facecolors="none", edgecolors=colour, label=name
            )
        axes.scatter(
            points[:, 0], points[:, 1], s=12, color=INK, marker="x", lw=0.9, label="candidates"
        )
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
        axes.set_title(title, fontsize=9)
        drawing.tidy(axes)
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return drawing.png(figure)


def regions(outcome: Outcome) -> bytes:
    """Activation regions of the network, its samples, and what stands for them after a merge or split."""
    arrays = outcome.arrays
    panels = (
        ("training set", arrays["x"], arrays["y"]),
        ("two samples merged", arrays["merged"], arrays["merged_y"]),
        ("one sample split", arrays["split"], arrays["split_y"]),
    )
    figure = drawing.new_figure(10.0, 4.1)
    for axes, (title, x, y) in zip(figure.subplots(1, 3), panels, strict=True):
        _shade(axes, arrays["weight"], arrays["bias"])
        old = arrays["x"]
        axes.scatter(
            old[:, 0], old[:, 1], s=60, facecolors="none", edgecolors=GREY, label="training sample"
        )
        for sign, colour, marker in ((1, ORANGE, "o"), (-1, BLUE, "s")):
            mine = x[y == sign]
            axes.scatter(
                mine[:, 0], mine[:, 1], s=24, color=colour, marker=marker, label=f"label {sign:+d}"
            )
        for ends in (*_nearest(x, old), *_nearest(old, x)):
            axes.plot(*zip(*ends, strict=True), color=PURPLE, lw=0.9)
        axes.set_title(title, fontsize=9)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    return drawing.png(figure)


def _nearest(points: Any, others: Any) -> list[tuple[Any, Any]]:
    """Every point with the nearest of the others: where it came from, or went to."""
    return [(p, others[np.linalg.norm(others - p, axis=1).argmin()]) for p in points]


def _shade(axes: Any, weight: Any, bias: Any, reach: float = 5.0) -> None:
    """One shade per activation pattern; boundaries where a neuron switches."""
    grid = np.linspace(-reach, reach, 400)
    points = np.stack(np.meshgrid(grid, grid), -1)
    on = points @ weight.T + bias > 0
    pattern = (on * 2 ** np.arange(len(bias))).sum(-1)
    axes.imshow(
        pattern,
        extent=(-reach, reach, -reach, reach),
        origin="lower",
        cmap="Pastel2",
        alpha=0.55,
        vmin=0,
        vmax=7,
        interpolation="nearest",
    )
    for k in range(len(bias)):
        axes.contour(
            grid, grid, points @ weight[k] + bias[k], levels=[0], colors=[GREEN], linewidths=0.8
        )
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axes.tick_params(labelsize=7)
