"""True samples beside the alternative ones that explain the weights as well."""

from __future__ import annotations

from torch import Tensor

from residuum.report import drawing
from residuum.report.drawing import Cell

SHOWN = 10
PANELS = 8


def alternatives_figure(
    true: Tensor, alternative: Tensor, parents: tuple[tuple[int, ...], ...], mean: Tensor | None = None
) -> bytes | None:  # fmt: skip
    """Columns of one true sample and its two halves, or of two true samples and their mean.

    true: (n, *shape); alternative: (k, *shape); parents[j]: rows of ``true`` behind alternative j.
    The columns moved farthest come first; None where nothing was changed.
    """
    merged = any(len(rows) > 1 for rows in parents)
    columns = _merged(true, alternative, parents) if merged else _split(true, alternative, parents)
    if not columns:
        return None
    names = ("true", "true", "merged") if merged else ("true", "half", "half")
    columns.sort(key=lambda column: -_moved(column))
    shift = 0 if mean is None else mean
    shown = [tuple(image + shift for image in column) for column in columns]
    captions = [f"moved {_moved(column):.3g}" for column in columns]
    what = (
        "merged groups: two of the samples, and the one that stands for all"
        if merged
        else "samples, and the two that stand for each"
    )
    if drawing.is_image(tuple(true.shape[1:])):
        cells = [Cell(c, text) for c, text in zip(shown[:SHOWN], captions, strict=False)]
        return drawing.image_grid(_title(len(columns), SHOWN, what), cells, names)
    new = "merged" if merged else "one half"  # the other half is its mirror image
    panels = [
        (text, {"true": c[0].flatten().numpy(), new: c[2].flatten().numpy()})
        for c, text in zip(shown[:PANELS], captions, strict=False)
    ]
    return drawing.line_panels(_title(len(columns), PANELS, what), panels)


def _title(count: int, most: int, what: str) -> str:
    return f"{min(count, most)} of {count} {what}; both explain the weights alike"


def _split(
    true: Tensor, alternative: Tensor, parents: tuple[tuple[int, ...], ...]
) -> list[tuple[Tensor, ...]]:
    pairs = [(j, rows[0]) for j, rows in enumerate(parents[:-1]) if rows == parents[j + 1]]
    return [(true[i], alternative[j], alternative[j + 1]) for j, i in pairs]


def _merged(
    true: Tensor, alternative: Tensor, parents: tuple[tuple[int, ...], ...]
) -> list[tuple[Tensor, ...]]:
    """Two of the samples behind each mean: the pair that lies farthest apart comes first."""
    return [
        (true[rows[0]], true[rows[1]], alternative[j])
        for j, rows in enumerate(parents)
        if len(rows) > 1
    ]


def _moved(column: tuple[Tensor, ...]) -> float:
    """Largest distance of the others from the first image."""
    return max(float((other - column[0]).norm()) for other in column[1:])
