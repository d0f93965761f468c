"""Distances over the initial radius (Refael et al. 2025, Fig. 2a)."""

from __future__ import annotations

import numpy as np

from residuum.report import drawing
from residuum.report.drawing import BLUE, GREEN, GREY, ORANGE
from residuum.reproduce.outcome import Outcome

KINDS = (
    ("five_best_raw_train", BLUE, "o-", "training points, as published"),
    ("five_best_raw_holdout", ORANGE, "^:", "held-out points, as published"),
    ("five_best_projected_train", GREEN, "s-", "training points, candidates projected on row(W1)"),
    ("five_best_projected_holdout", GREY, "v--", "held-out points, projected"),
)
ASIDE = (0.94, 0.98, 1.02, 1.06)  # of the radius, so that equal values do not cover each other


def radii(outcome: Outcome) -> bytes:
    """Mean and range over runs of the mean distance of the five best, a panel per initialisation."""
    arrays = outcome.arrays
    inits = [str(name) for name in arrays["inits"]]
    figure = drawing.new_figure(4.4 * len(inits), 3.6)
    panels = figure.subplots(1, len(inits), squeeze=False, sharey=True)[0]
    for i, (axes, init) in enumerate(zip(panels, inits, strict=True)):
        for aside, (name, colour, style, label) in zip(ASIDE, KINDS, strict=True):
            values = arrays[name][i]
            mean = values.mean(1)
            spread = np.abs([mean - values.min(1), values.max(1) - mean])
            axes.errorbar(
                aside * arrays["radii"],
                mean,
                spread,
                fmt=style,
                color=colour,
                label=label,
                lw=0.9,
                markersize=3.5,
                capsize=2,
            )
        axes.set_xscale("log")
        axes.set_xlabel("initial radius of the candidates", fontsize=8.5)
        axes.set_title(f"first layer: {init} initialisation", fontsize=9)
        axes.set_xticks(arrays["radii"], [f"{r:g}" for r in arrays["radii"]])
        axes.minorticks_off()
        drawing.tidy(axes)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("mean distance of the five best", fontsize=8.5)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize=7.5,
        frameon=False,
    )
    return drawing.png(figure)
