"""Figures of Shen et al. 2026: samples with and without splitting, curves, stories, dependence on k."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from residuum.report import drawing
from residuum.report.drawing import BLUE, CYCLE, GREY, INK, ORANGE, Cell
from residuum.reproduce.outcome import Outcome
from residuum.reproduce.pictures.sheets import Band, stacked
from residuum.reproduce.shen2026.paired import TOP

ARMS = {"none": ("without splitting", ORANGE), "split": ("with splitting", BLUE)}


def tops(outcome: Outcome) -> bytes:
    """Training sample, reconstruction without, reconstruction with splitting; a band per case."""
    bands: list[Band | None] = []
    for name in outcome.details["cases"]:
        parts = [outcome.arrays[f"{name}/{key}"] for key in ("none/top", "split/top", "top_true")]
        images = [_cell(group) for group in zip(*parts, strict=True)]
        rule = f"{name}: best {TOP}, improved by splitting"
        found, control = (outcome.value(rule, column) for column in ("measured", "chance"))
        title = f"{name}: the best {len(images)} of both attacks; better with splitting {found}"
        bands.append((f"{title}, with another seed instead {control}", images))
    return stacked(bands, ("without", "with", "train"))


def scatters(outcome: Outcome) -> bytes:
    """Every sample: metric without splitting against metric with it."""
    figure, panels = _panels(outcome, 3.1, 3.3)
    for axes, (name, case) in zip(panels, outcome.details["cases"].items(), strict=False):
        before, after = (outcome.arrays[f"{name}/{key}"] for key in ("before", "after"))
        better = after > before if case["metric"] == "ssim3" else after < before
        low, high = float(min(before.min(), after.min())), float(max(before.max(), after.max()))
        axes.plot([low, high], [low, high], color=GREY, lw=0.8)
        for line in (axes.axhline, axes.axvline):  # the bar of a reconstruction
            line(abs(case["threshold"]), color=INK, lw=0.7, ls=":")
        for mask, colour, marker, label in (
            (better, BLUE, "o", "better"),
            (~better, ORANGE, "x", "not better"),
        ):
            axes.scatter(
                before[mask], after[mask], s=12, color=colour, marker=marker, lw=0.8, label=label
            )
        axes.set_xlabel(f"{case['metric']} without splitting", fontsize=8)
        axes.set_ylabel(f"{case['metric']} with splitting", fontsize=8)
        axes.set_title(f"{name}\nbetter: {int(better.sum())} of {len(better)}", fontsize=8.5)
    return _finish(figure, panels)


def dynamics(outcome: Outcome) -> bytes:
    """Loss and mean distance of the best 25 over the steps; rounds are dotted."""
    names = list(outcome.details["cases"])
    figure = drawing.new_figure(4.0 * len(names) + 0.3, 5.2)
    grid = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        for row, key in enumerate(("loss", "best25")):
            axes = grid[row][column]
            for arm, (label, colour) in ARMS.items():
                steps, values = (outcome.arrays[f"{name}/{arm}/{part}"] for part in ("steps", key))
                axes.plot(steps, values, color=colour, lw=1.1, label=label)
            _rounds(axes, outcome, name)
            axes.set_xlabel("step", fontsize=8)
            axes.set_ylabel("loss" if key == "loss" else "mean distance, best 25", fontsize=8)
            if key == "loss":
                axes.set_yscale("log")
                axes.set_title(name, fontsize=8.5)
            drawing.tidy(axes)
    return _finish(figure, list(grid.ravel()))


def sweeps(outcome: Outcome) -> bytes:
    """Loss over the steps for every k, and the metric at the end against k, with and without splitting."""
    names = list(outcome.details["cases"])
    figure = drawing.new_figure(8.8, 3.7)
    left, right = figure.subplots(1, 2)
    for colour, name in zip(CYCLE, names, strict=False):
        for arm, style in (("none", "--"), ("split", "-")):
            steps, loss = (outcome.arrays[f"{name}/{arm}/{part}"] for part in ("steps", "loss"))
            label = f"{name.rsplit(' ', 1)[1]} {ARMS[arm][0]}"
            left.plot(steps, loss, style, color=colour, lw=0.8, label=label)
    left.set_yscale("log")
    starts = [outcome.details["cases"][name]["candidates"][0] for name in names]
    for key, (label, colour) in (("before", ARMS["none"]), ("after", ARMS["split"])):
        means = [float(outcome.arrays[f"{name}/{key}"].mean()) for name in names]
        right.plot(starts, means, "o-", color=colour, label=label, lw=1.1)
    metric = outcome.details["cases"][names[0]]["metric"]
    right.set_xticks(starts)
    right.set_ylim(bottom=0)
    texts = (
        ("step", "loss"),
        ("candidates at the start", f"mean {metric} of all samples at the end"),
    )
    for axes, (below, beside) in zip((left, right), texts, strict=True):
        drawing.tidy(axes)
        axes.set_xlabel(below, fontsize=8)
        axes.set_ylabel(beside, fontsize=8)
        axes.legend(fontsize=6.5, frameon=False)
    return drawing.png(figure)


def stories(outcome: Outcome) -> bytes:
    """The samples that gained most: nearest candidate over the steps, with and without splitting."""
    names = list(outcome.details["cases"])
    followed = len(outcome.arrays[f"{names[0]}/followed"])
    frames = outcome.arrays[f"{names[0]}/none/frame_steps"]
    rows = [(name, k) for name in names for k in range(followed)]
    columns = len(frames) + 1
    figure = drawing.new_figure(0.85 * columns + 3.4, 1.9 * len(rows))
    grid = figure.add_gridspec(2 * len(rows), columns + 3)
    for i, (name, k) in enumerate(rows):
        axes = figure.add_subplot(grid[2 * i : 2 * i + 2, :3])
        for arm, (label, colour) in ARMS.items():
            steps, values = (
                outcome.arrays[f"{name}/{arm}/{part}"] for part in ("steps", "followed")
            )
            axes.plot(steps, values[:, k], color=colour, lw=1.0, label=label)
        _rounds(axes, outcome, name)
        axes.set_title(f"{name}, sample {int(outcome.arrays[f'{name}/followed'][k])}", fontsize=7)
        axes.set_ylabel("nearest candidate, L2", fontsize=6)
        axes.tick_params(labelsize=6)
        if i == 0:
            axes.legend(fontsize=6, frameon=False)
        for j, arm in enumerate(ARMS):
            images = [
                *outcome.arrays[f"{name}/{arm}/story{k}"],
                outcome.arrays[f"{name}/followed_true"][k],
            ]
            labels = [*map(str, outcome.arrays[f"{name}/{arm}/frame_steps"]), "true"]
            for c, (image, text) in enumerate(zip(images, labels, strict=True)):
                _image(figure.add_subplot(grid[2 * i + j, 3 + c]), image, text if j == 0 else "")
    return drawing.png(figure)


def _image(axes: Any, image: Any, text: str) -> None:
    axes.imshow(
        drawing.pixels(torch.from_numpy(image)),
        cmap="gray",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    axes.set_title(text, fontsize=6)
    axes.set_axis_off()


def _rounds(axes: Any, outcome: Outcome, name: str) -> None:
    """Steps at which candidates were added."""
    steps, counts = (outcome.arrays[f"{name}/split/{part}"] for part in ("steps", "counts"))
    for step in steps[1:][np.diff(counts) > 0][:40]:
        axes.axvline(step, color=INK, lw=0.5, ls=":", alpha=0.6)


def _panels(outcome: Outcome, width: float, height: float) -> tuple[Any, list[Any]]:
    count = len(outcome.details["cases"])
    columns = min(3, count)
    rows = math.ceil(count / columns)
    figure = drawing.new_figure(width * columns + 0.2, height * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels


def _finish(figure: Any, panels: list[Any]) -> bytes:
    for axes in panels:
        drawing.tidy(axes)
    drawing.legend_below(figure, panels[0])
    return drawing.png(figure)


def _cell(images: Any) -> Cell:
    return Cell(tuple(torch.from_numpy(image) for image in images))
