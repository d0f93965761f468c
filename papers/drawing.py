"""Draw the results of figures. matplotlib and pillow are imported only when they are used."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from papers.runs import Array, Outcome
from residuum.report import drawing as base
from residuum.report.drawing import BLUE, CYCLE, GREY, INK, ORANGE, Cell

STYLE = {"axes.titlesize": 8.5, "axes.labelsize": 8, "legend.fontsize": 7, "legend.frameon": False}
STYLE |= {"lines.linewidth": 1.1, "lines.markersize": 4, "xtick.labelsize": 7, "ytick.labelsize": 7}
COLUMNS = 15  # images per line
COLORS, LEVELS = 256, 32
FEW = 2000  # photographs have more colors at 32 levels; lines, points and gray images have fewer
GOOD = 0.4  # ssim3 above which Haim et al. 2022 call a reconstruction good
ARMS = {"none": ("without splitting", ORANGE), "split": ("with splitting", BLUE)}
Band = tuple[str, list[Cell]]


def picture(draw: Callable[[Outcome], bytes], outcome: Outcome) -> bytes:
    """Draw an outcome as a small PNG.

    A picture with few colors has a palette, any other picture has 32 levels per channel. A palette would
    change the hues of photographs. The exact pixels are in the arrays of the outcome.

    Args:
        draw: A drawing function.
        outcome: The outcome.

    Returns:
        The PNG.
    """
    import matplotlib
    from PIL import Image

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        image = Image.open(io.BytesIO(draw(outcome))).convert("RGB")
    step = 255 / (LEVELS - 1)
    coarse = image.point([round(round(v / step) * step) for v in range(256)] * 3)
    has_few_colors = coarse.getcolors(FEW) is not None
    # Dithering would add noise to flat areas and make the file larger.
    return _png(image.quantize(COLORS, dither=Image.Dither.NONE) if has_few_colors else coarse)


def stacked(
    bands: Sequence[Band | None], rows: tuple[str, ...] = ("found", "train"), across: int = 1
) -> bytes:
    """Draw grids of images with titles.

    Args:
        bands: Titles and cells of the grids. None leaves a place empty.
        rows: Names of the images of a cell, from top to bottom.
        across: Number of grids per line.

    Returns:
        The PNG.
    """
    from PIL import Image

    grids = (band and base.draw_image_grid(*band, rows, COLUMNS) for band in bands)
    images = [grid and Image.open(io.BytesIO(grid)).convert("RGB") for grid in grids]
    lines = [images[i : i + across] for i in range(0, len(images), across)]
    heights = [max(image.height for image in line if image) for line in lines]
    width = max(image.width for image in images if image)
    sheet = Image.new("RGB", (across * width, sum(heights)), "white")
    for i, line in enumerate(lines):
        for k, image in enumerate(line):
            if image:
                sheet.paste(image, (k * width, sum(heights[:i])))
    return _png(sheet)


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _cells(*rows: Array, captions: Sequence[str]) -> list[Cell]:
    """Return the cells of a grid from the rows of its images."""
    columns = zip(*rows, strict=True)
    images = [tuple(map(torch.from_numpy, column)) for column in columns]
    return [Cell(column, text) for column, text in zip(images, captions, strict=True)]


def _pairs(outcome: Outcome, key: str) -> list[Cell]:
    arrays = outcome.arrays
    reconstructions, samples = arrays[f"{key}/found"], arrays[f"{key}/true"]
    captions = [f"{value:.2f}" for value in arrays[f"{key}/score"]]
    return _cells(reconstructions, samples, captions=captions)


def _count(attack: dict[str, Any]) -> str:
    """Return in words how many samples were recovered, and how many are expected by chance."""
    ncc = attack["ncc"]
    recovered = f"recovered {ncc['recovered']} (NCC > {ncc['threshold_null99']:.2g})"
    return f"{recovered}, by chance {ncc['expected_by_chance']:.1f}"


def _band(outcome: Outcome, key: str, name: str, attack: str, limit: int) -> Band:
    run, cells = outcome.details["runs"][name], _pairs(outcome, key)[:limit]
    title = f"{key.replace('/', ', ')} ({run['data']}, {run['n']} samples): "
    title += f"{_count(run['attacks'][attack])}; best {len(cells)} by {run['metric']}"
    return title, cells


def grids(outcome: Outcome) -> bytes:
    """Draw the reconstructions of every run above the training images, best first."""
    return stacked([_band(outcome, run, run, "residuum", 45) for run in outcome.details["runs"]])


def methods(outcome: Outcome) -> bytes:
    """Draw a grid of images for every attack on every run."""
    runs = outcome.details["runs"].items()
    pairs = [(name, attack) for name, run in runs for attack in run["attacks"]]
    return stacked([_band(outcome, f"{run}/{by}", run, by, COLUMNS) for run, by in pairs])


def shifts(outcome: Outcome) -> bytes:
    """Draw the five best pairs of every shift, with rewritten biases left and new training right."""
    bands: list[Band | None] = []
    for name in dict.fromkeys(key.rsplit("/", 1)[0] for key in outcome.arrays):
        what = f"{name}: NCC of the five best"
        measured, chance = (outcome.column(column)[what] for column in ("measured", "chance"))
        title = f"{what}, mean {measured:.2f} (held out {chance:.2f})"
        bands.append((title, _pairs(outcome, name)))
    return stacked([*bands[:1], None, *bands[1:]], across=2)


def tops(outcome: Outcome) -> bytes:
    """Draw reconstructions without and with splitting above the training samples, for every case."""
    bands = []
    for name in outcome.details["cases"]:
        rows = [outcome.arrays[f"{name}/{key}"] for key in ("none/top", "split/top", "top_true")]
        rule = f"{name}: best 25, improved by splitting"
        measured, control = (outcome.column(column)[rule] for column in ("measured", "chance"))
        title = (
            f"{name}: the best {len(rows[0])} of both attacks; better with splitting {measured}, "
        )
        title += f"with another seed instead {control}"
        if measured.endswith(" of 0"):
            title = f"{name}: none within the threshold; the nearest"
        bands.append((title, _cells(*rows, captions=[""] * len(rows[0]))))
    return stacked(bands, ("without", "with", "train"))


def stories(outcome: Outcome) -> bytes:
    """Draw the nearest candidate over the steps, for the samples that gained most by splitting."""
    bands, arrays = [], outcome.arrays
    for name in outcome.details["cases"]:
        steps, frames = (arrays[f"{name}/none/{key}"] for key in ("steps", "frame_steps"))
        indices = np.searchsorted(steps, frames)
        for k, sample in enumerate(arrays[f"{name}/followed"]):
            none, split = (arrays[f"{name}/{arm}/followed"][indices, k] for arm in ARMS)
            distances = zip(frames, none, split, strict=True)
            captions = [f"{step}: {a:.1f} {b:.1f}" for step, a, b in distances]
            candidates = [arrays[f"{name}/{arm}/story{k}"] for arm in ARMS]
            true = arrays[f"{name}/followed_true"][k][None].repeat(len(frames), 0)
            cells = _cells(*candidates, true, captions=captions)
            bands.append((f"{name}, sample {sample}; step: L2 without and with splitting", cells))
    return stacked(bands, ("without", "with", "train"))


def _panels(count: int, width: float, height: float, columns: int = 3) -> tuple[Any, list[Any]]:
    """Return a figure with panels of a size."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = base.new_figure(width * columns + 0.2, height * rows + 0.3)
    panels = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def _finish(figure: Any, panels: Sequence[Any], shared: bool = True) -> bytes:
    """Finish the panels, with a common legend below them or a legend in each panel."""
    for axes in panels:
        base.tidy(axes)
        if not shared and axes.get_legend_handles_labels()[1]:
            axes.legend()
    if shared:
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=min(4, len(handles[1])))
    return base.encode_png(figure)


def _two(axes: Any, x: Array, y: Array, good: Array, names: tuple[str, str]) -> None:
    """Draw points of two kinds in different colors and shapes."""
    for mask, color, marker, name in ((~good, ORANGE, "x", names[1]), (good, BLUE, "o", names[0])):
        look = {"color": color, "marker": marker, "label": name}
        axes.scatter(x[mask], y[mask], s=10, alpha=0.7, lw=0.8, **look)


def outputs(outcome: Outcome) -> bytes:
    """Draw score against output in a panel per run. Recovered samples have another marker."""
    runs = outcome.details["runs"]
    figure, panels = _panels(len(runs), 2.9, 2.5, 4 if len(runs) > 6 else 3)
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        keys = ("output", "score", "recovered")
        x, y, is_recovered = (outcome.arrays[f"{name}/{key}"] for key in keys)
        _two(axes, x, y, is_recovered, ("recovered (by NCC)", "not recovered"))
        if run["metric"] == "ssim3":
            axes.axhline(GOOD, color=INK, lw=0.8, ls=":")
        axes.set(title=f"{name}\n{_count(run['attacks']['residuum'])}", ylim=(0, 1))
        axes.set(xlabel="network output", ylabel=run["metric"])
    return _finish(figure, panels)


def pairs(outcome: Outcome) -> bytes:
    """Draw the metric of every sample with splitting against the metric without it."""
    cases = outcome.details["cases"]
    figure, panels = _panels(len(cases), 3.1, 3.3)
    for axes, (name, case) in zip(panels, cases.items(), strict=True):
        before, after = (outcome.arrays[f"{name}/{key}"] for key in ("before", "after"))
        metric = case["metric"]
        better = after > before if metric == "ssim3" else after < before
        values = np.stack([before, after])
        ends = [float(values.min()), float(values.max())]
        axes.plot(ends, ends, color=GREY, lw=0.8)
        for line in (axes.axhline, axes.axvline):  # threshold of a reconstruction
            line(abs(case["threshold"]), color=INK, lw=0.7, ls=":")
        _two(axes, before, after, better, ("better", "not better"))
        axes.set(title=f"{name}\nbetter: {int(better.sum())} of {len(better)}")
        axes.set(xlabel=f"{metric} without splitting", ylabel=f"{metric} with splitting")
    return _finish(figure, panels)


def dynamics(outcome: Outcome) -> bytes:
    """Draw the loss and the mean distance of the best 25 over the steps. Dotted lines mark rounds."""
    cases = [(name, key) for key in ("loss", "best25") for name in outcome.details["cases"]]
    figure, panels = _panels(len(cases), 4.0, 2.6, len(outcome.details["cases"]))
    for axes, (name, key) in zip(panels, cases, strict=True):
        for arm, (label, color) in ARMS.items():
            steps, values = (outcome.arrays[f"{name}/{arm}/{kind}"] for kind in ("steps", key))
            axes.plot(steps, values, color=color, label=label)
        counts = outcome.arrays[f"{name}/split/counts"]
        for step in steps[1:][np.diff(counts) > 0][:40]:
            axes.axvline(step, color=INK, lw=0.5, ls=":", alpha=0.6)
        if key == "loss":
            axes.set(yscale="log", title=name, xlabel="step", ylabel="loss")
        else:
            axes.set(xlabel="step", ylabel="mean distance, best 25")
    return _finish(figure, panels)


def sweeps(outcome: Outcome) -> bytes:
    """Draw the loss over the steps, and the final metric against the number of candidates."""
    cases = outcome.details["cases"]
    figure, (loss_panel, metric_panel) = _panels(2, 4.4, 3.6)
    for color, name in zip(CYCLE, cases, strict=False):
        for arm, style in (("none", "--"), ("split", "-")):
            steps, loss = (outcome.arrays[f"{name}/{arm}/{key}"] for key in ("steps", "loss"))
            label = f"{name.rsplit(' ', 1)[1]} {ARMS[arm][0]}"
            loss_panel.plot(steps, loss, style, color=color, lw=0.8, label=label)
    starts = [case["candidates"][0] for case in cases.values()]
    for key, (label, color) in (("before", ARMS["none"]), ("after", ARMS["split"])):
        means = [float(outcome.arrays[f"{name}/{key}"].mean()) for name in cases]
        metric_panel.plot(starts, means, "o-", color=color, label=label)
    loss_panel.set(yscale="log", xlabel="step", ylabel="loss")
    metric = next(iter(cases.values()))["metric"]
    metric_panel.set(xticks=starts, xlabel="candidates at the start", ylim=(0, None))
    metric_panel.set(ylabel=f"mean {metric} of all samples at the end")
    return _finish(figure, (loss_panel, metric_panel), shared=False)


def circle(outcome: Outcome) -> bytes:
    """Draw all candidates, the candidates after each filter, and those of model inversion."""
    arrays, measured = outcome.arrays, outcome.column("measured")
    titles = {
        "all": f"{len(arrays['all'])} candidates",
        "heavy": f"multiplier filter: {len(arrays['heavy'])}",
        "kept": f"without duplicates: {len(arrays['kept'])}; {measured['recovered']} recovered",
        "inverted": f"model inversion: {measured['model inversion']} recovered",
    }
    figure, panels = _panels(4, 2.75, 3.0, 4)
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for label, color in ((-1, BLUE), (1, ORANGE)):
            samples = arrays["train"][arrays["labels"] == label]
            rings = {"s": 70, "facecolors": "none", "edgecolors": color}
            axes.scatter(*samples.T, label=f"label {label:+d}", **rings)
        axes.scatter(*arrays[name].T, s=12, color=INK, marker="x", lw=0.9, label="candidates")
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title=title)
    return _finish(figure, panels)


def regions(outcome: Outcome) -> bytes:
    """Draw the activation regions of a network, and its samples before and after a merge and a split."""
    arrays = outcome.arrays
    weight, bias, old = (arrays[name] for name in ("weight", "bias", "x"))
    titles = {"x": "training set", "merged": "two samples merged", "split": "one sample split"}
    figure, panels = _panels(3, 3.3, 3.8)
    grid = np.linspace(-5, 5, 400)
    inner = np.stack(np.meshgrid(grid, grid), -1) @ weight.T + bias
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        pattern = ((inner > 0) * 2 ** np.arange(len(bias))).sum(-1)  # one shade each
        shades = {"cmap": "Pastel2", "alpha": 0.55, "vmin": 0, "vmax": 7}
        axes.imshow(pattern, extent=(-5, 5, -5, 5), origin="lower", **shades)
        for k in range(len(bias)):
            axes.contour(grid, grid, inner[..., k], levels=[0], colors=[base.GREEN], linewidths=0.8)
        rings = {"facecolors": "none", "edgecolors": GREY, "label": "training sample"}
        axes.scatter(*old.T, s=60, **rings)
        x, y = arrays[name], arrays[f"{name}_y"]
        for sign, color, marker in ((1, ORANGE, "o"), (-1, BLUE, "s")):
            samples = x[y == sign]
            axes.scatter(*samples.T, s=24, color=color, marker=marker, label=f"label {sign:+d}")
        for points, targets in ((x, old), (old, x)):  # lines connect samples before and after
            for point in points:
                nearest = targets[np.linalg.norm(targets - point, axis=1).argmin()]
                axes.plot(*np.stack([point, nearest], 1), color=base.PURPLE, lw=0.9)
        axes.set(title=title, aspect="equal")
    return _finish(figure, panels)


def curves(outcome: Outcome, x: str, keys: str, by: str = "", scale: str = "linear") -> bytes:
    """Draw numbers of an experiment against one of its settings.

    Lines connect means, and faint points are the rows. Dotted lines are the chance level.

    Args:
        outcome: The outcome.
        x: The setting.
        keys: Names of the numbers, separated by spaces. Each has a panel.
        by: A setting whose values have separate lines.
        scale: Scale of the x axis.

    Returns:
        The PNG.
    """
    rows, names = outcome.details["rows"], keys.split()
    figure, panels = _panels(len(names), 3.3, 3.3, 4)
    for axes, name in zip(panels, names, strict=True):
        chance = "expected_by_chance" if name == "recovered" else name.replace("_train", "_holdout")
        line_keys = [name] if chance == name else [name, chance]
        lines = itertools.product(dict.fromkeys(row.get(by) for row in rows), line_keys)
        values = [0.0]
        for (group, key), color, marker in zip(lines, CYCLE, base.MARKERS, strict=False):
            selected = [row for row in rows if row.get(by) == group and row[key] is not None]
            look = {"color": color, "marker": marker}
            xs, ys = ([row[column] for row in selected] for column in (x, key))
            axes.scatter(xs, ys, s=8, alpha=0.35, **look)
            positions = list(dict.fromkeys(xs))
            means = [
                float(np.mean([row[key] for row in selected if row[x] == v])) for v in positions
            ]
            label = f"{group or ''} {key.replace('_', ' ')}"
            axes.plot(positions, means, "-" if key == name else ":", label=label, **look)
            values += means
        axes.set(title=name.replace("_", " "), xlabel=x)
        if isinstance(rows[0][x], str):
            axes.tick_params(axis="x", rotation=30)
        else:
            axes.set_xscale(scale, **({"linthresh": 0.01} if scale == "symlog" else {}))
        least, most = min(values[1:], default=0.0), max(values)
        axes.set_yscale("log" if most > 30 * least > 0 else "linear")
    return _finish(figure, panels, shared=False)
