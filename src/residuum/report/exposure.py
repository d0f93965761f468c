"""Exposure in pictures."""

from __future__ import annotations

from torch import Tensor

from residuum.records import Dataset
from residuum.records.exposure import Exposure
from residuum.records.inputs import with_mean
from residuum.report import drawing
from residuum.report.drawing import Cell

BINS = 20  # of probabilities, 5% each


def top_figure(found: Exposure, data: Dataset) -> bytes | None:
    """The most exposed records: each above its informed estimate and what an attack found."""
    if not len(found.top):
        return None
    image = drawing.is_image(data.shape)
    mean = data.mean if image else None
    parts: dict[str, Tensor] = {"record": found.images, "informed": found.informed}
    parts["attack"] = found.found
    shown = {name: with_mean(x, mean).nan_to_num() for name, x in parts.items() if len(x)}
    cells = [
        Cell(
            tuple(x[k] for x in shown.values()),
            f"#{int(i)}" + ("" if found.uncalibrated else f"  {float(found.probability[i]):.2f}"),
            framed=bool(found.kink_q[i] <= found.level),
        )
        for k, i in enumerate(found.top)
    ]
    label = "number" if found.uncalibrated else "number, probability of being recovered"
    title = f"Most exposed records: {label}; framed: named by activation boundaries"
    return drawing.side_by_side(title, cells, tuple(shown), tuple(shown))


def histogram_figure(found: Exposure) -> bytes:
    """Draw how many records have which probability of being recovered, or which score without one."""
    figure = drawing.new_figure(5.5, 2.8)
    axes = figure.subplots()
    if found.uncalibrated:
        values, limits = found.score.numpy(), None
        label = "score (ranking only, no probability)"
        title = f"Scores of {len(found)} records"
    else:
        values, limits = found.probability.numpy(), (0.0, 1.0)
        label = "probability of being recovered"
        half = f"{found.carry_half} of {len(found)} records carry half of the exposure"
        title = f"{found.expected:.3g} expected to be recovered; {half}"
    axes.hist(values, bins=BINS, range=limits, color=drawing.BLUE, alpha=0.85)
    axes.set_xlabel(label, fontsize=8.5)
    axes.set_ylabel("records", fontsize=8.5)
    axes.set_title(title, fontsize=9)
    drawing.tidy(axes)
    return drawing.png(figure)
