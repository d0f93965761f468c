"""Pictures of the experiments on uniqueness, drawn from the JSON files they wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from residuum.report.drawing import CYCLE, GREY, MARKERS, new_figure, png, tidy

Rows = list[dict[str, Any]]


def draw_all(results: Path, figures: Path) -> None:
    """One PNG for every experiment that has a file."""
    figures.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        path = results / f"uniqueness-{name}.json"
        if path.is_file():
            (figures / f"uniqueness-{name}.png").write_bytes(draw(json.loads(path.read_text())))
            print(f"drawn: uniqueness-{name}.png")


def sphere(found: dict[str, Any]) -> bytes:
    figure = new_figure(11, 3.4)
    panels = figure.subplots(1, 3)
    rows = found["rows"]
    for axes, init in zip(panels, ("default", "small"), strict=False):
        mine = [r for r in rows if r["init"] == init]
        for k, (key, label) in enumerate((
            ("five_best_raw_train", "candidates as found"),
            ("five_best_projected_train", "projected on row(W1)"),
            ("five_best_raw_holdout", "as found, held-out points"),
            ("five_best_projected_holdout", "projected, held-out points"),
        )):  # fmt: skip
            style = "-" if "train" in key else ":"
            _line(axes, mine, "radius", key, label, CYCLE[k % 2], MARKERS[k], style)
        axes.set_title(f"{init} first-layer init, rank(W1) {mine[0]['rank']}", fontsize=8.5)
        axes.set_ylabel("mean distance of the 5 best", fontsize=8)
        axes.set(xscale="log", xlabel="radius candidates start at")
    axes = panels[2]
    for k, init in enumerate(("default", "small")):
        mine = [r for r in rows if r["init"] == init]
        before = found["victims"][init]["initial_squared_norms"]["layers.0"]
        _line(axes, mine, "radius", "objective", f"{init} init", CYCLE[k], MARKERS[k], "-")
        axes.axhline(before, color=CYCLE[k], ls=":", lw=1, label=f"||W1, b1||² at {init} init")
    axes.set_ylabel("objective at the end, all layers", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="radius candidates start at")
    return _finish(figure, panels)


def shift(found: dict[str, Any]) -> bytes:
    figure = new_figure(11, 3.6)
    panels = figure.subplots(1, 3)
    rows = found["rows"]
    names = [r["shift"] + (f" {r['per_pixel']:g}" if r["per_pixel"] else "") for r in rows]
    _bars(panels[0], names, rows, {"five_best_ncc_train": "training", "five_best_ncc_holdout": "held-out"},
          "NCC, mean of the 5 best")  # fmt: skip
    _bars(panels[1], names, rows, {
        "single_ncc_train": "best single, training", "mixture_ncc_train": "mixture of 5, training",
        "single_ncc_holdout": "best single, held-out", "mixture_ncc_holdout": "mixture of 5, held-out",
    }, "NCC of a candidate, median")  # fmt: skip
    _bars(panels[2], names, rows, {"duplicates": "found", "duplicates_by_chance": "by chance"},
          "candidates that repeat a sample")  # fmt: skip
    return _finish(figure, panels)


def length(found: dict[str, Any]) -> bytes:
    figure = new_figure(11, 3.4)
    panels = figure.subplots(1, 3)
    rows = found["rows"]
    _line(panels[0], rows, "length", "recovered", "recovered", CYCLE[0], "o", "-")
    _line(panels[0], rows, "length", "expected_by_chance", "by chance", GREY, "s", ":")
    _line(panels[0], rows, "length", "capacity", "leak capacity", CYCLE[1], "^", "--")
    panels[0].set_ylabel(f"samples of {found['n']}", fontsize=8)
    _line(panels[1], rows, "length", "residual_plain", "at the true samples", CYCLE[0], "o", "-")
    _line(
        panels[1],
        rows,
        "length",
        "first_layer_residual",
        "attack, first layer",
        CYCLE[1],
        "^",
        "--",
    )
    panels[1].set(yscale="log")
    panels[1].set_ylabel("relative KKT residual", fontsize=8)
    _line(panels[2], rows, "length", "budget_over_norm", "median budget / |x|", CYCLE[0], "o", "-")
    panels[2].set(yscale="log")
    panels[2].set_ylabel("exact budget, last direction of W1", fontsize=8)
    for axes in panels:
        axes.set(xscale="log", xlabel="training steps")
    return _finish(figure, panels)


def spectrum(found: dict[str, Any]) -> bytes:
    figure = new_figure(8, 3.4)
    panels = figure.subplots(1, 2)
    rows = found["rows"]
    _line(panels[0], rows, "sigma_d", "exact_median", "exact budget", CYCLE[0], "o", "")
    _line(panels[0], rows, "sigma_d", "theorem8_median", "Theorem 8", CYCLE[1], "^", "")
    panels[0].set(yscale="log")
    panels[0].set_ylabel("budget along the last singular vector", fontsize=8)
    for key, label, colour, marker in (
        ("five_best_raw_train", "as found", CYCLE[0], "o"),
        ("five_best_projected_train", "on row(W1)", CYCLE[1], "^"),
        ("five_best_raw_holdout", "as found, held-out", GREY, "s"),
    ):
        _line(panels[1], rows, "sigma_d", key, label, colour, marker, "")
    panels[1].set_ylabel("mean distance of the 5 best", fontsize=8)
    for axes in panels:
        axes.set_xlabel("lowest singular value of the data")
    return _finish(figure, panels)


def convnet(found: dict[str, Any]) -> bytes:
    figure = new_figure(5.2, 3.4)
    axes = figure.subplots()
    for k, row in enumerate(found["rows"]):
        shares = sorted(float(key.rpartition("_")[2]) for key in row if key.startswith("change_at"))
        values = [max(row[f"change_at_{s}"], 1e-17) for s in shares]
        axes.plot(shares, values, color=CYCLE[k], marker=MARKERS[k], label=f"seed {row['seed']}")
    axes.axvline(1, color=GREY, ls=":", label="exact budget")
    axes.set(xscale="log", yscale="log", xlabel="length of the split over the budget")
    axes.set_ylabel("change of the relative residual", fontsize=8)
    return _finish(figure, [axes])


def partial(found: dict[str, Any]) -> bytes:
    figure = new_figure(7.5, 3.6)
    axes = figure.subplots()
    names = list(dict.fromkeys(r["access"] for r in found["rows"]))
    rows = [
        {key: float(np.mean([r[key] for r in found["rows"] if r["access"] == name]))
         for key in ("recovered", "expected_by_chance", "capacity")}
        for name in names
    ]  # fmt: skip
    _bars(axes, names, rows, {"recovered": "recovered", "expected_by_chance": "by chance",
                              "capacity": "leak capacity"}, f"samples of {found['n']}")  # fmt: skip
    return _finish(figure, [axes])


def _line(
    axes: Any, rows: Rows, x: str, y: str, label: str, colour: str, marker: str, style: str
) -> None:
    """Mean over rows with the same x, every row as a faint point."""
    kept = [(r[x], r[y]) for r in rows if r[y] is not None and math.isfinite(r[y])]
    if not kept:
        return
    values = sorted({a for a, _ in kept})
    axes.scatter(*zip(*kept, strict=True), s=8, color=colour, alpha=0.35)
    means = [float(np.mean([b for a, b in kept if a == v])) for v in values]
    axes.plot(values, means, style or "", color=colour, marker=marker, ms=4, lw=1.2, label=label)


def _bars(axes: Any, names: list[str], rows: Rows, keys: dict[str, str], title: str) -> None:
    width = 0.8 / len(keys)
    places = np.arange(len(names))
    for k, (key, label) in enumerate(keys.items()):
        hatch = "//" if "held-out" in label or "chance" in label else None
        axes.bar(places + k * width, [r[key] for r in rows], width, label=label, color=CYCLE[k], hatch=hatch,
                 edgecolor="white")  # fmt: skip
    axes.set_xticks(places + 0.4 - width / 2, names, rotation=25, ha="right")
    axes.set_ylabel(title, fontsize=8)


def _finish(figure: Any, panels: Any) -> bytes:
    from matplotlib.ticker import NullFormatter

    for axes in panels:
        tidy(axes)
        axes.xaxis.label.set_size(8)
        if axes.get_xscale() == "log":
            axes.xaxis.set_minor_formatter(NullFormatter())
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=6.5, frameon=False)
    return png(figure)


FIGURES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "sphere": sphere,
    "shift": shift,
    "length": length,
    "spectrum": spectrum,
    "convnet": convnet,
    "partial": partial,
}
