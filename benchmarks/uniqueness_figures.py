"""Pictures of the experiments on uniqueness, drawn from the JSON files they wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from residuum.report.drawing import CYCLE, GREY, INK, MARKERS, new_figure, png, tidy

Rows = list[dict[str, Any]]
PUBLISHED = (330, 332)  # objective of the sphere attack, Refael et al. 2025
ACCESS = {
    "first layer, signs known": "W1, b1 and\nsigns of v",
    "first layer alone": "W1, b1 and\nguessed signs",
}


def draw_all(results: Path, figures: Path) -> None:
    """One PNG for every experiment that has a file."""
    figures.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        path = results / f"uniqueness-{name}.json"
        if path.is_file():
            (figures / f"uniqueness-{name}.png").write_bytes(draw(json.loads(path.read_text())))
            print(f"drawn: uniqueness-{name}.png")


def sphere(found: dict[str, Any]) -> bytes:
    figure = new_figure(11.5, 3.8)
    panels = figure.subplots(1, 3)
    rows = found["rows"]
    radii = sorted({r["radius"] for r in rows})
    for axes, init in zip(panels, ("default", "small"), strict=False):
        mine = [r for r in rows if r["init"] == init]
        for k, (key, label) in enumerate((
            ("five_best_raw_train", "as found: training"),
            ("five_best_projected_train", "projected on row(W1): training"),
            ("five_best_raw_holdout", "as found: held-out"),
            ("five_best_projected_holdout", "projected: held-out"),
        )):  # fmt: skip
            style = "-" if "train" in key else ":"
            _line(axes, mine, "radius", key, label, CYCLE[k % 2], MARKERS[k], style)
        apart = [math.hypot(r, 1) for r in radii]
        axes.plot(radii, apart, color=GREY, ls="--", lw=1, label="sqrt(r² + 1): unrelated points")
        axes.set_title(f"victim from {init} first layer: rank(W1) = {mine[0]['rank']}", fontsize=9)
        axes.set_ylabel("mean distance of the 5 best", fontsize=8)
        axes.set(
            xscale="log", yscale="log", xlabel="radius r that candidates start at", ylim=(0.3, 25)
        )
        _ticks(axes.yaxis, (0.5, 1, 2, 5, 10, 20))
    axes = panels[2]
    for k, init in enumerate(("default", "small")):
        mine = [r for r in rows if r["init"] == init]
        before = found["victims"][init]["initial_squared_norms"]["layers.0"]
        _line(axes, mine, "radius", "objective", f"{init}: at the end", CYCLE[k], MARKERS[k], "-")
        axes.axhline(
            before, color=CYCLE[k], ls=":", lw=1.2, label=f"{init}: |W1, b1|² before training"
        )
    axes.axhspan(*PUBLISHED, color=INK, label="published: 330 to 332 (line at the top)")
    axes.set_title("objective of the attack", fontsize=9)
    axes.set_ylabel("squared residual, both layers", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="radius r that candidates start at")
    for axes in panels:
        _ticks(axes.xaxis, radii)
    return _finish(figure, panels)


def shift(found: dict[str, Any]) -> bytes:
    figure = new_figure(11.5, 3.9)
    panels = figure.subplots(1, 3)
    rows = found["rows"]
    names = [_shifted(r) for r in rows]
    _bars(panels[0], names, rows, {"above_0.8_train": "training", "above_0.8_holdout": "held-out"},
          f"images of {found['n']}", numbers=True)  # fmt: skip
    panels[0].set_title("images with a candidate at NCC > 0.8", fontsize=9)
    _bars(panels[1], names, rows, {"five_best_ncc_train": "training", "five_best_ncc_holdout": "held-out"},
          "NCC")  # fmt: skip
    panels[1].set_title("NCC, mean of the 5 best images", fontsize=9)
    _bars(panels[2], names, rows, {
        "single_ncc_train": "best single, training", "mixture_ncc_train": "mixture of up to 5, training",
        "single_ncc_holdout": "best single, held-out", "mixture_ncc_holdout": "mixture of up to 5, held-out",
    }, "NCC")  # fmt: skip
    panels[2].set_title("fit of a typical candidate (median)", fontsize=9)
    for axes in panels[1:]:
        axes.set_ylim(0, 1.15)
    return _finish(figure, panels)


def _shifted(row: dict[str, Any]) -> str:
    name = f"{row['shift']}\n+{row['per_pixel']:g}" if row["per_pixel"] else "not\nshifted"
    return name + ("\n(not\nseparated)" if row["margin"] <= 0 else "")


def length(found: dict[str, Any]) -> bytes:
    figure = new_figure(11.5, 3.6)
    panels = figure.subplots(1, 3)
    rows = found["rows"]
    for axes, lines in zip(panels, (
        (("recovered", "recovered", 0, "-"),
         ("expected_by_chance", "expected by chance", 6, ":")),
        (("residual_plain", "true samples, all layers", 0, "-"),
         ("first_layer_residual", "attack, first layer", 1, "--")),
        (("budget_over_norm", "median over samples", 0, "-"),),
    ), strict=True):  # fmt: skip
        for key, label, k, style in lines:
            _line(axes, rows, "length", key, label, CYCLE[k], MARKERS[k], style)
    panels[0].set_ylabel(f"samples of {found['n']}", fontsize=8)
    panels[0].set_title("recovered samples", fontsize=9)
    panels[0].set_ylim(-1, found["n"])
    panels[1].set(yscale="log")
    panels[1].set_ylabel("relative residual", fontsize=8)
    panels[1].set_title("KKT residual", fontsize=9)
    _ticks(panels[1].yaxis, (0.05, 0.1, 0.2, 0.5, 1))
    panels[2].set(yscale="log")
    panels[2].set_ylabel("exact budget / |x|", fontsize=8)
    panels[2].set_title("how far a true sample can be split", fontsize=9)
    for axes in panels:
        axes.set(xscale="log", xlabel="training steps")
        _ticks(axes.xaxis, sorted({r["length"] for r in rows}))
    return _finish(figure, panels)


def spectrum(found: dict[str, Any]) -> bytes:
    figure = new_figure(9.5, 3.8)
    panels = figure.subplots(1, 2)
    rows = found["rows"]
    for k, seed in enumerate(sorted({r["seed"] for r in rows})):
        mine = [r for r in rows if r["seed"] == seed]
        for key, label, style in (
            ("exact_median", "exact", "-"),
            ("theorem8_median", "Theorem 8", ":"),
        ):
            _line(
                panels[0],
                mine,
                "sigma_d",
                key,
                f"{label}, seed {seed}",
                CYCLE[k],
                MARKERS[k],
                style,
            )
    panels[0].set(yscale="log", ylim=(1e-8, 100))
    panels[0].set_ylabel("budget along the last singular vector", fontsize=8)
    panels[0].set_title("budget, median over samples with a multiplier", fontsize=9)
    for k, (key, label) in enumerate((
        ("raw", "as found"), ("projected", "projected on row(W1)"),
    )):  # fmt: skip
        for kind, style, marker in (("train", "-", "o"), ("holdout", ":", "s")):
            said = f"{label}: {'training' if kind == 'train' else 'held-out'}"
            _line(
                panels[1], rows, "factor", f"five_best_{key}_{kind}", said, CYCLE[k], marker, style
            )
    panels[1].set(ylim=(0, 1.4))
    panels[1].set_ylabel("mean distance of the 5 best", fontsize=8)
    panels[1].set_title("attack, both seeds", fontsize=9)
    for axes, ticks, name in (
        (panels[0], (0, 0.01, 0.03, 0.1, 0.3), "lowest singular value of the data"),
        (panels[1], (0, 0.03, 0.1, 0.3, 1), "factor on half of the coordinates"),
    ):
        axes.set_xscale("symlog", linthresh=0.01)
        axes.set_xlabel(f"{name} (logarithmic above 0.01)")
        _ticks(axes.xaxis, ticks)
    panels[0].set_xlim(-0.002, 0.7)
    panels[1].set_xlim(-0.002, 1.5)
    return _finish(figure, panels)


def convnet(found: dict[str, Any]) -> bytes:
    figure = new_figure(5.8, 3.6)
    axes = figure.subplots()
    for k, row in enumerate(found["rows"]):
        shares = sorted(float(key.rpartition("_")[2]) for key in row if key.startswith("change_at"))
        values = [max(row[f"change_at_{s}"], 1e-17) for s in shares]
        label = f"seed {row['seed']}: budget = {row['budget_median'] / row['norm']:.1g} |x|"
        axes.plot(shares, values, color=CYCLE[k], marker=MARKERS[k], ms=4, lw=1.2, label=label)
    axes.axvline(1, color=GREY, ls=":", label="exact budget")
    axes.set(xscale="log", yscale="log", xlabel="length of the split / exact budget")
    _ticks(axes.xaxis, (0.5, 1, 2, 5))
    axes.set_ylabel("change of the relative KKT residual", fontsize=8)
    axes.set_title("three samples of a trained convnet split at once", fontsize=9)
    return _finish(figure, [axes])


def partial(found: dict[str, Any]) -> bytes:
    figure = new_figure(8.5, 3.8)
    axes = figure.subplots()
    names = list(dict.fromkeys(r["access"] for r in found["rows"]))
    groups = [[r for r in found["rows"] if r["access"] == name] for name in names]
    keys = ("recovered", "expected_by_chance")
    rows = [{key: float(np.mean([r[key] for r in group])) for key in keys} for group in groups]
    labels = [ACCESS.get(name, f"{group[0]['neurons']}\nneurons")
              for name, group in zip(names, groups, strict=True)]  # fmt: skip
    _bars(axes, labels, rows, {
        "recovered": "recovered", "expected_by_chance": "expected by chance",
    }, f"samples of {found['n']}")  # fmt: skip
    for place, group in enumerate(groups):
        axes.scatter(
            [place] * len(group), [r["recovered"] for r in group], s=9, color=INK, zorder=3
        )
    axes.set_title("known part of the weights (mean; dots: each victim)", fontsize=9)
    axes.set_ylim(0, 1.45 * max(r["recovered"] for r in rows))
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
    axes.plot(values, means, style, color=colour, marker=marker, ms=4, lw=1.2, label=label)


def _bars(
    axes: Any, names: list[str], rows: Rows, keys: dict[str, str], title: str, numbers: bool = False
) -> None:
    width = 0.8 / len(keys)
    places = np.arange(len(names))
    for k, (key, label) in enumerate(keys.items()):
        hatch = "//" if "held-out" in label or "chance" in label else None
        bars = axes.bar(places + k * width, [r[key] for r in rows], width, label=label, color=CYCLE[k],
                        hatch=hatch, edgecolor="white")  # fmt: skip
        if numbers:
            axes.bar_label(bars, fontsize=7)
    axes.set_xticks(places + 0.4 - width / 2, names)
    axes.set_ylabel(title, fontsize=8)


def _ticks(axis: Any, values: Sequence[float]) -> None:
    """These numbers and no others, written out."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _finish(figure: Any, panels: Any) -> bytes:
    for axes in panels:
        tidy(axes)
        axes.tick_params(labelsize=7)
        axes.xaxis.label.set_size(8)
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
