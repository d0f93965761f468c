"""Shen et al. 2026, Data Reconstruction: Identifiability and Optimization with Sample Splitting."""

from __future__ import annotations

from functools import partial

from residuum.reproduce.figure import Figure, drawn
from residuum.reproduce.shen2026.cases import Case
from residuum.reproduce.shen2026.figures import cases
from residuum.reproduce.shen2026.polynomial import aggregates, theorem41


def _figure(title: str, picture: str, *runs: Case) -> Figure:
    return Figure(title, partial(cases, runs=runs), drawn(f"growth.{picture}"))


_LOO = {data: Case("loo", data, 100, 30) for data in ("cifar10", "mnist")}
_HAIM = {
    "cifar 500": Case("haim", "cifar10", 500, 200),
    "cifar 100": Case("haim", "cifar10", 100, 40),
    "mnist 500": Case("haim", "mnist", 500, 200),
}
_DECAY = {
    "cifar 500": Case("buzaglo", "cifar10", 500, 200),
    "cifar 100": Case("buzaglo", "cifar10", 100, 40),
    "mnist 500": Case("buzaglo", "mnist", 500, 200),
}

FIGURES: dict[str, Figure] = {
    "fig1": _figure("best 25 with and without splitting, NTK n=100", "tops", *_LOO.values()),
    "fig2": _figure("sample by sample, NTK n=100", "scatters", *_LOO.values()),
    "fig3": _figure(
        "loss and metric for several k, KKT n=500",
        "sweeps",
        *(Case("haim", "mnist", 500, k) for k in (50, 100, 200, 400)),
    ),
    "fig4": _figure("one sample over the steps, weight decay", "stories", _DECAY["cifar 500"]),
    "fig5": _figure("sample by sample, KKT", "scatters", *_HAIM.values()),
    "fig6": _figure("samples over the steps, KKT MNIST", "stories", _HAIM["mnist 500"]),
    "fig7": _figure("best 30, KKT", "tops", *_HAIM.values()),
    "fig8": _figure("sample by sample, weight decay", "scatters", *_DECAY.values()),
    "fig9": _figure(
        "loss over the steps, weight decay CIFAR",
        "dynamics",
        _DECAY["cifar 500"],
        _DECAY["cifar 100"],
    ),
    "fig10": _figure("best 15, weight decay", "tops", *_DECAY.values()),
    "fig11": _figure(
        "loss and metric against k, NTK n=100",
        "sweeps",
        *(Case("loo", "mnist", 100, k) for k in (15, 30, 50, 100)),
    ),
    "fig12": _figure("sample by sample at k=30 per class, NTK", "scatters", *_LOO.values()),
    "fig13": _figure("best 30, NTK", "tops", *_LOO.values()),
    "fig14": _figure("samples over the steps, NTK", "stories", *_LOO.values()),
    "theorem41": Figure("rank condition and error of exact recovery, cubic networks", theorem41),
    "aggregates": Figure("what degree 1 and 2 determine", aggregates),
}
