"""Haim et al. 2022, Reconstructing Training Data from Trained Neural Networks (arXiv 2206.07758)."""

from __future__ import annotations

from functools import partial

from residuum.reproduce.figure import Figure, drawn
from residuum.reproduce.haim2022.circle import circle
from residuum.reproduce.haim2022.figures import baselines, grids, scatter, training_table
from residuum.reproduce.haim2022.runs import TABLE1, TABLE2

_GRID, _SCATTER, _METHODS = drawn("images.grids"), drawn("images.scatters"), drawn("images.methods")
_FIRST, _SECOND = (tuple(run.name for run in part) for part in (TABLE1, TABLE2))
# The runs of Fig. 4 that no earlier figure shows, one grid each.
_GRIDS = ("n=100", "n=1000", *_FIRST[4:])

FIGURES: dict[str, Figure] = {
    "fig1": Figure("best reconstructions, CIFAR n=50", partial(grids, runs=("n=50",)), _GRID),
    "fig2": Figure("20 points on a circle, with both filters", circle, drawn("plane.circle")),
    "fig3": Figure(
        "best reconstructions, CIFAR and MNIST n=500",
        partial(grids, runs=("CIFAR", "MNIST"), published=True),
        _GRID,
    ),
    "fig4": Figure(
        "score against output for four n and four architectures",
        partial(scatter, runs=_FIRST),
        _SCATTER,
    ),
    "fig5": Figure(
        "against model inversion and first-layer weights, CIFAR n=500",
        partial(baselines, runs=("CIFAR",), attacks=("residuum", "model-inversion", "weights")),
        _METHODS,
    ),
    **{
        f"fig{6 + i}": Figure(f"best 45, CIFAR, {name}", partial(grids, runs=(name,)), _GRID)
        for i, name in enumerate(_GRIDS)
    },
    **{
        f"fig{12 + i}": Figure(
            f"{attack}, {data} n=500", partial(baselines, runs=(data,), attacks=(attack,)), _METHODS
        )
        for i, (attack, data) in enumerate(
            (a, d) for a in ("model-inversion", "weights") for d in ("CIFAR", "MNIST")
        )
    },
    "fig16": Figure(
        "score against output: standard init, mini-batches, few epochs",
        partial(scatter, runs=_SECOND),
        _SCATTER,
    ),
    **{
        f"fig{17 + i}": Figure(f"best 45, {name}", partial(grids, runs=(name,)), _GRID)
        for i, name in enumerate(_SECOND)
    },
    "table1": Figure(
        "loss and accuracy of the networks of Fig. 4", partial(training_table, table="table1")
    ),
    "table2": Figure(
        "loss and accuracy of the networks of Fig. 16", partial(training_table, table="table2")
    ),
}
