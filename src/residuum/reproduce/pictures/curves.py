"""Distances over the initial radius (Refael et al. 2025, Fig. 2a)."""

from __future__ import annotations

import numpy as np

from residuum.report import drawing
from residuum.report.drawing import BLUE, GREEN, GREY
from residuum.reproduce.outcome import Outcome

KINDS = (
    ("five_best_raw_train", BLUE, "o-", "as published"),
    ("five_best_projected_train", GREEN, "s-", "projected on row(W1)"),
    ("five_best_raw_holdout", GREY, "^:", "held-out points, as published"),
    ("five_best_projected_holdout", GREY, "v--", "held-out points, projected"),
)


def radii(outcome: Outcome) -> bytes:
    """Mean and range over runs of the mean distance of the five best, a panel per initialisation."""
    arrays = outcome.arrays
    inits = [str(name) for name in arrays["inits"]]
    figure = drawing.new_figure(4.4 * len(inits), 3.6)
    panels = figure.subplots(1, len(inits), squeeze=False, sharey=True)[0]
    for i, (axes, init) in enumerate(zip(panels, inits, strict=True)):
        for name, colour, style, label in KINDS:
            values = arrays[name][i]
            mean = values.mean(1)
            spread = np.abs([mean - values.min(1), values.max(1) - mean])
            axes.errorbar(
                arrays["radii"],
                mean,
                spread,
                fmt=style,
                color=colour,
                label=label,
                lw=1.1,
                markersize=4,
                capsize=2,
            )
        axes.set(xscale="log", xlabel="initial radius of the candidates")
        axes.set_title(f"{init} initialisation", fontsize=9)
        axes.set_xticks(arrays["radii"], [f"{r:g}" for r in arrays["radii"]])
        axes.minorticks_off()
        drawing.tidy(axes)
    panels[0].set_ylabel("mean distance of the five best", fontsize=8.5)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize=7.5,
        frameon=False,
    )
    return drawing.png(figure)
