"""What equal pairs keep of a reconstruction: restart agreement and the uniqueness certificate together.

Per reconstruction, from top to bottom: the image; the least image of a pair that explains the weights
as well; how far each pixel of a pair can move. Each is stretched to its own range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from residuum.records.uniqueness import Uniqueness
from residuum.report import drawing
from residuum.report.drawing import Cell

SHOWN = 30
PANELS = 12


def ambiguity_figure(
    x: Tensor, found: Uniqueness, mean: Tensor | None = None, agreement: Sequence[str] | None = None
) -> bytes | None:
    """x: (m, *shape) the candidates certified; agreement: per candidate, such as "3/4" restarts."""
    if not len(found):
        return None
    index = found.index[:SHOWN].tolist()
    shift = (
        torch.zeros(()) if mean is None else mean.reshape(x.shape[1:]) if mean.numel() > 1 else mean
    )
    images, least = x[index].double() + shift, found.least[:SHOWN] + shift
    captions = [_caption(found, k, agreement, i) for k, i in enumerate(index)]
    shown = f"{len(index)} of {len(found)} reconstructions"
    if drawing.is_image(tuple(x.shape[1:])):
        moves, top = _shade(found.pixels[:SHOWN])
        title = (
            f"{shown}: share that pairs keep (attained), radius / size"
            f"{', restarts' if agreement else ''}; a pixel moves up to {top}"
        )
        cells = [
            Cell((a, b, c), text)
            for a, b, c, text in zip(images, least, moves, captions, strict=True)
        ]
        return drawing.image_grid(title, cells, ("found", "pairs keep", "free"))
    panels = [
        (text, {"reconstruction": a.flatten().numpy(), "pairs keep": b.flatten().numpy()})
        for a, b, text in zip(images[:PANELS], least, captions, strict=False)
    ]
    return drawing.line_panels(f"{shown}: share that pairs keep (attained), radius / size", panels)


def _caption(found: Uniqueness, k: int, agreement: Sequence[str] | None, i: int) -> str:
    share = float(found.radius[k] / found.size[k])
    radius = "free" if math.isinf(share) else f"{share:.2g}"
    support = f"  {agreement[i]}" if agreement is not None else ""
    return f"{float(found.determined_energy[k]):.2f}  {radius}{support}"


def _shade(pixels: Tensor) -> tuple[Tensor, str]:
    """Movements with what is unbounded set to the largest finite one, and that one in words."""
    finite = pixels[pixels.isfinite()]
    top = float(finite.max()) if len(finite) and float(finite.max()) > 0 else 1.0
    return (pixels / top).clamp(max=1), f"{top:.2g}" + (
        "" if len(finite) == pixels.numel() else " or free"
    )
