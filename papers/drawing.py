"""Pictures of what figures found. matplotlib and pillow are imported where they are used."""

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
COLUMNS = 15  # images in a line
COLORS, LEVELS = 256, 32
FEW = 2000  # lines, points and gray images have fewer colors of 32 levels, photographs more
GOOD = 0.4  # ssim3 above which Haim et al. 2022 call a reconstruction good
ARMS = {"none": ("without splitting", ORANGE), "split": ("with splitting", BLUE)}
Band = tuple[str, list[Cell]]


def picture(draw: Callable[[Outcome], bytes], outcome: Outcome) -> bytes:
    """The PNG of a drawing in the common style and few bytes: a palette where there are few colors,
    else 32 levels a channel. A palette would change the hues of photographs; exact pixels are in arrays.
    """
    import matplotlib
    from PIL import Image

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        image = Image.open(io.BytesIO(draw(outcome))).convert("RGB")
    step = 255 / (LEVELS - 1)
    coarse = image.point([round(round(v / step) * step) for v in range(256)] * 3)
    few = coarse.getcolors(FEW) is not None
    # Without dithering, which would make noise of flat areas and the file larger.
    return _png(image.quantize(COLORS, dither=Image.Dither.NONE) if few else coarse)


def stacked(
    bands: Sequence[Band | None], rows: tuple[str, ...] = ("found", "train"), across: int = 1
) -> bytes:
    """Grids under their titles, ``across`` in a line; None leaves a place empty.

    rows: what the images of a cell are, from top to bottom.
    """
    from PIL import Image

    grids = (band and base.draw_image_grid(*band, rows, COLUMNS) for band in bands)
    drawn = [grid and Image.open(io.BytesIO(grid)).convert("RGB") for grid in grids]
    lines = [drawn[i : i + across] for i in range(0, len(drawn), across)]
    heights = [max(part.height for part in line if part) for line in lines]
    width = max(part.width for part in drawn if part)
    sheet = Image.new("RGB", (across * width, sum(heights)), "white")
    for i, line in enumerate(lines):
        for k, part in enumerate(line):
            if part:
                sheet.paste(part, (k * width, sum(heights[:i])))
    return _png(sheet)


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _cells(*parts: Array, captions: Sequence[str]) -> list[Cell]:
    """Images of several rows that belong together, column by column."""
    columns = zip(*parts, strict=True)
    images = [tuple(map(torch.from_numpy, column)) for column in columns]
    return [Cell(column, text) for column, text in zip(images, captions, strict=True)]


def _pairs(outcome: Outcome, key: str) -> list[Cell]:
    found, true, score = (outcome.arrays[f"{key}/{part}"] for part in ("found", "true", "score"))
    return _cells(found, true, captions=[f"{value:.2f}" for value in score])


def _count(attack: dict[str, Any]) -> str:
    """How many came back, and how many would by chance."""
    found = attack["ncc"]
    beyond = f"recovered {found['recovered']} (NCC > {found['threshold_null99']:.2g})"
    return f"{beyond}, by chance {found['expected_by_chance']:.1f}"


def _band(outcome: Outcome, key: str, name: str, attack: str, most: int) -> Band:
    run, cells = outcome.details["runs"][name], _pairs(outcome, key)[:most]
    title = f"{key.replace('/', ', ')} ({run['data']}, {run['n']} samples): "
    title += f"{_count(run['attacks'][attack])}; best {len(cells)} by {run['metric']}"
    return title, cells


def grids(outcome: Outcome) -> bytes:
    """Every run of the figure: reconstructions above training images, best first."""
    return stacked([_band(outcome, run, run, "residuum", 45) for run in outcome.details["runs"]])


def methods(outcome: Outcome) -> bytes:
    """Every attack on every run, a band each."""
    runs = outcome.details["runs"].items()
    pairs = [(name, attack) for name, run in runs for attack in run["attacks"]]
    return stacked([_band(outcome, f"{run}/{by}", run, by, COLUMNS) for run, by in pairs])


def shifts(outcome: Outcome) -> bytes:
    """Five best pairs of every shift; rewritten biases at the left, trained again at the right."""
    bands: list[Band | None] = []
    for name in dict.fromkeys(key.rsplit("/", 1)[0] for key in outcome.arrays):
        what = f"{name}: NCC of the five best"
        found, held = (outcome.column(column)[what] for column in ("measured", "chance"))
        bands.append((f"{what}, mean {found:.2f} (held out {held:.2f})", _pairs(outcome, name)))
    return stacked([*bands[:1], None, *bands[1:]], across=2)


def tops(outcome: Outcome) -> bytes:
    """Reconstruction without, reconstruction with splitting, training sample; a band per case."""
    bands = []
    for name in outcome.details["cases"]:
        parts = [outcome.arrays[f"{name}/{key}"] for key in ("none/top", "split/top", "top_true")]
        rule = f"{name}: best 25, improved by splitting"
        found, control = (outcome.column(column)[rule] for column in ("measured", "chance"))
        title = f"{name}: the best {len(parts[0])} of both attacks; better with splitting {found}, "
        title += f"with another seed instead {control}"
        if found.endswith(" of 0"):
            title = f"{name}: none within the threshold; the nearest"
        bands.append((title, _cells(*parts, captions=[""] * len(parts[0]))))
    return stacked(bands, ("without", "with", "train"))


def stories(outcome: Outcome) -> bytes:
    """The samples that gained most: nearest candidate over the steps, its distance without and with."""
    bands, arrays = [], outcome.arrays
    for name in outcome.details["cases"]:
        steps, frames = (arrays[f"{name}/none/{key}"] for key in ("steps", "frame_steps"))
        at = np.searchsorted(steps, frames)
        for k, sample in enumerate(arrays[f"{name}/followed"]):
            none, split = (arrays[f"{name}/{arm}/followed"][at, k] for arm in ARMS)
            distances = zip(frames, none, split, strict=True)
            captions = [f"{step}: {a:.1f} {b:.1f}" for step, a, b in distances]
            parts = [arrays[f"{name}/{arm}/story{k}"] for arm in ARMS]
            true = arrays[f"{name}/followed_true"][k][None].repeat(len(frames), 0)
            cells = _cells(*parts, true, captions=captions)
            bands.append((f"{name}, sample {sample}; step: L2 without and with splitting", cells))
    return stacked(bands, ("without", "with", "train"))


def _panels(count: int, width: float, height: float, columns: int = 3) -> tuple[Any, list[Any]]:
    """A figure of so many panels of this size."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = base.new_figure(width * columns + 0.2, height * rows + 0.3)
    panels = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def _finish(figure: Any, panels: Sequence[Any], shared: bool = True) -> bytes:
    """Tidy panels; one legend below all of them, or one in each."""
    for axes in panels:
        base.tidy(axes)
        if not shared and axes.get_legend_handles_labels()[1]:
            axes.legend()
    if shared:
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=min(4, len(handles[1])))
    return base.encode_png(figure)


def _two(axes: Any, x: Array, y: Array, good: Array, names: tuple[str, str]) -> None:
    """Points of two kinds, told apart by color and shape."""
    for mask, color, marker, name in ((~good, ORANGE, "x", names[1]), (good, BLUE, "o", names[0])):
        look = {"color": color, "marker": marker, "label": name}
        axes.scatter(x[mask], y[mask], s=10, alpha=0.7, lw=0.8, **look)


def outputs(outcome: Outcome) -> bytes:
    """Score against output, a panel per run; recovered samples are filled."""
    runs = outcome.details["runs"]
    figure, panels = _panels(len(runs), 2.9, 2.5, 4 if len(runs) > 6 else 3)
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        x, y, found = (outcome.arrays[f"{name}/{key}"] for key in ("output", "score", "recovered"))
        _two(axes, x, y, found, ("recovered (by NCC)", "not recovered"))
        if run["metric"] == "ssim3":
            axes.axhline(GOOD, color=INK, lw=0.8, ls=":")
        axes.set(title=f"{name}\n{_count(run['attacks']['residuum'])}", ylim=(0, 1))
        axes.set(xlabel="network output", ylabel=run["metric"])
    return _finish(figure, panels)


def pairs(outcome: Outcome) -> bytes:
    """Every sample: metric without splitting against metric with it."""
    cases = outcome.details["cases"]
    figure, panels = _panels(len(cases), 3.1, 3.3)
    for axes, (name, case) in zip(panels, cases.items(), strict=True):
        before, after = (outcome.arrays[f"{name}/{key}"] for key in ("before", "after"))
        metric = case["metric"]
        better = after > before if metric == "ssim3" else after < before
        both = np.stack([before, after])
        ends = [float(both.min()), float(both.max())]
        axes.plot(ends, ends, color=GREY, lw=0.8)
        for line in (axes.axhline, axes.axvline):  # the bar of a reconstruction
            line(abs(case["threshold"]), color=INK, lw=0.7, ls=":")
        _two(axes, before, after, better, ("better", "not better"))
        axes.set(title=f"{name}\nbetter: {int(better.sum())} of {len(better)}")
        axes.set(xlabel=f"{metric} without splitting", ylabel=f"{metric} with splitting")
    return _finish(figure, panels)


def dynamics(outcome: Outcome) -> bytes:
    """Loss and mean distance of the best 25 over the steps; rounds are dotted."""
    cases = [(name, key) for key in ("loss", "best25") for name in outcome.details["cases"]]
    figure, panels = _panels(len(cases), 4.0, 2.6, len(outcome.details["cases"]))
    for axes, (name, key) in zip(panels, cases, strict=True):
        for arm, (label, color) in ARMS.items():
            steps, values = (outcome.arrays[f"{name}/{arm}/{part}"] for part in ("steps", key))
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
    """Loss over the steps for every k, and the metric at the end against k, with and without splitting."""
    cases = outcome.details["cases"]
    figure, (left, right) = _panels(2, 4.4, 3.6)
    for color, name in zip(CYCLE, cases, strict=False):
        for arm, style in (("none", "--"), ("split", "-")):
            steps, loss = (outcome.arrays[f"{name}/{arm}/{part}"] for part in ("steps", "loss"))
            label = f"{name.rsplit(' ', 1)[1]} {ARMS[arm][0]}"
            left.plot(steps, loss, style, color=color, lw=0.8, label=label)
    starts = [case["candidates"][0] for case in cases.values()]
    for key, (label, color) in (("before", ARMS["none"]), ("after", ARMS["split"])):
        means = [float(outcome.arrays[f"{name}/{key}"].mean()) for name in cases]
        right.plot(starts, means, "o-", color=color, label=label)
    left.set(yscale="log", xlabel="step", ylabel="loss")
    metric = next(iter(cases.values()))["metric"]
    right.set(xticks=starts, xlabel="candidates at the start", ylim=(0, None))
    right.set(ylabel=f"mean {metric} of all samples at the end")
    return _finish(figure, (left, right), shared=False)


def circle(outcome: Outcome) -> bytes:
    """All candidates, after the multiplier filter, after duplicates; model inversion last."""
    arrays, found = outcome.arrays, outcome.column("measured")
    titles = {
        "all": f"{len(arrays['all'])} candidates",
        "heavy": f"multiplier filter: {len(arrays['heavy'])}",
        "kept": f"without duplicates: {len(arrays['kept'])}; {found['recovered']} recovered",
        "inverted": f"model inversion: {found['model inversion']} recovered",
    }
    figure, panels = _panels(4, 2.75, 3.0, 4)
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for label, color in ((-1, BLUE), (1, ORANGE)):
            mine = arrays["train"][arrays["labels"] == label]
            rings = {"s": 70, "facecolors": "none", "edgecolors": color}
            axes.scatter(*mine.T, label=f"label {label:+d}", **rings)
        axes.scatter(*arrays[name].T, s=12, color=INK, marker="x", lw=0.9, label="candidates")
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title=title)
    return _finish(figure, panels)


def regions(outcome: Outcome) -> bytes:
    """Activation regions of the network, its samples, and what stands for them after a merge or split."""
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
            mine = x[y == sign]
            axes.scatter(*mine.T, s=24, color=color, marker=marker, label=f"label {sign:+d}")
        for points, others in ((x, old), (old, x)):  # where each came from, or went to
            for point in points:
                near = others[np.linalg.norm(others - point, axis=1).argmin()]
                axes.plot(*np.stack([point, near], 1), color=base.PURPLE, lw=0.9)
        axes.set(title=title, aspect="equal")
    return _finish(figure, panels)


def curves(outcome: Outcome, x: str, keys: str, by: str = "", scale: str = "linear") -> bytes:
    """Numbers of an experiment against one of its settings: means, and every row as a faint point.

    keys: of the rows, a panel each, what chance brings dotted; by: lines of their own for its values.
    """
    rows, names = outcome.details["rows"], keys.split()
    figure, panels = _panels(len(names), 3.3, 3.3, 4)
    for axes, name in zip(panels, names, strict=True):
        chance = "expected_by_chance" if name == "recovered" else name.replace("_train", "_holdout")
        shown = [name] if chance == name else [name, chance]
        lines = itertools.product(dict.fromkeys(row.get(by) for row in rows), shown)
        values = [0.0]
        for (group, key), color, marker in zip(lines, CYCLE, base.MARKERS, strict=False):
            mine = [row for row in rows if row.get(by) == group and row[key] is not None]
            look = {"color": color, "marker": marker}
            xs, ys = ([row[name] for row in mine] for name in (x, key))
            axes.scatter(xs, ys, s=8, alpha=0.35, **look)
            at = list(dict.fromkeys(xs))
            means = [float(np.mean([row[key] for row in mine if row[x] == v])) for v in at]
            label = f"{group or ''} {key.replace('_', ' ')}"
            axes.plot(at, means, "-" if key == name else ":", label=label, **look)
            values += means
        axes.set(title=name.replace("_", " "), xlabel=x)
        if isinstance(rows[0][x], str):
            axes.tick_params(axis="x", rotation=30)
        else:
            axes.set_xscale(scale, **({"linthresh": 0.01} if scale == "symlog" else {}))
        least, most = min(values[1:], default=0.0), max(values)
        axes.set_yscale("log" if most > 30 * least > 0 else "linear")
    return _finish(figure, panels, shared=False)
