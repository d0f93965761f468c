"""Grids of images put together on one sheet, and pictures made small enough to be kept."""

from __future__ import annotations

import io

from residuum.report import drawing
from residuum.report.drawing import Cell

COLUMNS = 15
COLOURS, LEVELS = 256, 32
FEW = 2000  # lines, points and grey images have fewer colours of 32 levels, photographs more
Band = tuple[str, list[Cell]]


def stacked(
    bands: list[Band | None],
    rows: tuple[str, ...] = ("found", "train"),
    across: int = 1,
) -> bytes:
    """Grids under their titles, ``across`` in a line; None leaves a place empty.

    rows: what the images of a cell are, from top to bottom.
    """
    from PIL import Image

    pictures = [
        None
        if band is None
        else Image.open(io.BytesIO(drawing.image_grid(*band, rows, COLUMNS))).convert("RGB")
        for band in bands
    ]
    lines = [pictures[i : i + across] for i in range(0, len(pictures), across)]
    heights = [max(p.height for p in line if p is not None) for line in lines]
    width = max(p.width for p in pictures if p is not None)
    sheet = Image.new("RGB", (across * width, sum(heights)), "white")
    for i, line in enumerate(lines):
        for k, picture in enumerate(line):
            if picture is not None:
                sheet.paste(picture, (k * width, sum(heights[:i])))
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    return buffer.getvalue()


def compact(picture: bytes) -> bytes:
    """The same PNG in fewer bytes: a palette where there are few colours, else 32 levels a channel.

    A palette for photographs would change their hues; exact pixels are in arrays.npz.
    """
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    step = 255 / (LEVELS - 1)
    coarse = image.point([round(round(v / step) * step) for v in range(256)] * 3)
    few = coarse.getcolors(FEW) is not None
    # Without dithering, which would make noise of flat areas and the file larger.
    small = image.quantize(COLOURS, dither=Image.Dither.NONE) if few else coarse
    buffer = io.BytesIO()
    small.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
