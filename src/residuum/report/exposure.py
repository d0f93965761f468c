"""Draw the figures of an exposure, which ranks the training records by their risk."""

from __future__ import annotations

from torch import Tensor

from residuum.records import Dataset
from residuum.records.exposure import Exposure
from residuum.records.inputs import add_mean
from residuum.report import drawing
from residuum.report.drawing import Cell

BINS = 20  # number of bins of a histogram of probabilities, so that each bin is 5% wide


def top_figure(exposure: Exposure, data: Dataset) -> bytes | None:
    """Draw the most exposed records with two images below each record.

    The first image is the informed estimate, the estimate of an attacker who knows all other records. The
    second image is the nearest candidate of an attack.

    Args:
        exposure: The exposure.
        data: The training records.

    Returns:
        A PNG, None without records.
    """
    if not len(exposure.top):
        return None
    is_image = drawing.is_image(data.shape)
    added_mean = data.mean if is_image else None
    images: dict[str, Tensor] = {"record": exposure.images, "informed": exposure.informed}
    images["attack"] = exposure.nearest
    images_to_draw = {
        name: add_mean(x, added_mean).nan_to_num() for name, x in images.items() if len(x)
    }
    grid_cells = [
        Cell(
            tuple(x[k] for x in images_to_draw.values()),
            f"#{int(i)}"
            + ("" if exposure.uncalibrated else f"  {float(exposure.probability[i]):.2f}"),
            framed=bool(exposure.kink_q[i] <= exposure.level),
        )
        for k, i in enumerate(exposure.top)
    ]
    caption_content = (
        "number" if exposure.uncalibrated else "number, probability of being recovered"
    )
    title = f"Most exposed records: {caption_content}; framed: flagged by activation boundaries"
    return drawing.draw_cells(title, grid_cells, tuple(images_to_draw), tuple(images_to_draw))


def histogram_figure(exposure: Exposure) -> bytes:
    """Draw a histogram of the probabilities of being recovered, or of scores if there are none."""
    figure = drawing.new_figure(5.5, 2.8)
    axes = figure.subplots()
    if exposure.uncalibrated:
        values, limits = exposure.score.numpy(), None
        label = "score (ranking only, no probability)"
        title = f"Scores of {len(exposure)} records"
    else:
        values, limits = exposure.probability.numpy(), (0.0, 1.0)
        label = "probability of being recovered"
        half_text = f"{exposure.carry_half} of {len(exposure)} records carry half of the exposure"
        title = f"{exposure.expected:.3g} expected to be recovered; {half_text}"
    axes.hist(values, bins=BINS, range=limits, color=drawing.BLUE, alpha=0.85)
    axes.set_xlabel(label, fontsize=8.5)
    axes.set_ylabel("records", fontsize=8.5)
    axes.set_title(title, fontsize=9)
    drawing.tidy(axes)
    return drawing.encode_png(figure)
