"""Samples as small PNG data URIs, or as numbers where they are no images.

Reconstruction and training sample are each stretched to their own range, as published figures are. The
difference is taken after the reconstruction's scale and offset are fitted to the sample, because
the deciding metric (NCC) ignores both; what it shows is what that metric sees.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
import torch

from residuum.report.drawing import is_image, pixels
from residuum.report.page import Array, Item

MAX_SIDE = 160  # pixels; larger images are reduced, a report is for looking, not for keeping them
MIN_SIDE = (
    56  # enlarged pixel by pixel: printers and mail programs smooth what the browser would not
)
MAX_VALUES = 6  # of a vector that is no image
LOW, MIDDLE, HIGH = (0, 114, 178), (250, 250, 250), (213, 94, 0)  # Okabe and Ito: blue, orange
FIXED, LOOSE = (250, 250, 250), (110, 40, 130)
Colour = tuple[int, int, int]
Content = tuple[str, tuple[str, ...]]  # a data URI, or numbers


@dataclass(frozen=True)
class Picture:
    """One frame of a card: an image as ``uri``, or ``values`` as text; alt says what it shows."""

    caption: str
    alt: str
    uri: str = ""
    values: tuple[str, ...] = ()


def frames(item: Item, shape: tuple[int, ...], what: str) -> tuple[Picture, ...]:
    """Reconstruction, training sample, difference and ambiguity, as many of them as are known."""
    if item.found is None:
        return ()
    found = _shaped(item.found, shape)
    shown = [Picture("found", f"Reconstruction, {what}", *_grey_or_colour(found))]
    if item.nearest is not None:
        nearest = _shaped(item.nearest, shape)
        shown.append(Picture("training", f"Training sample of {what}", *_grey_or_colour(nearest)))
        shown.append(Picture("difference", f"Difference, {what}", *_difference(found, nearest)))
    if item.ambiguity is not None:
        free = np.clip(_shaped(item.ambiguity, shape), 0, 1)
        alt = f"Parts that equal pairs leave free, {what}"
        shown.append(Picture("left free", alt, *_between(free, FIXED, LOOSE)))
    return tuple(shown)


def fitted(found: Array, sample: Array) -> Array:
    """``a found + b`` with the a >= 0 and b that come closest to the sample."""
    centred = found - found.mean()
    power = float((centred**2).sum())
    slope = max(float((centred * (sample - sample.mean())).sum()) / power, 0.0) if power else 0.0
    return slope * centred + sample.mean()


def data_uri(values: Array) -> str:
    """(h, w) or (h, w, 3) in [0, 1] as a PNG data URI, no side above ``MAX_SIDE``."""
    from PIL import Image

    image = Image.fromarray(np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8))
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BOX)
    image = image.resize([side * -(-MIN_SIDE // max(image.size)) for side in image.size], 0)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=9)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _shaped(values: Array, shape: tuple[int, ...]) -> Array:
    """Finite numbers in the shape of a sample."""
    array = np.nan_to_num(np.asarray(values, dtype=float), posinf=0.0, neginf=0.0)
    return array.reshape(shape) if shape and array.size == np.prod(shape) else array


def _grey_or_colour(values: Array) -> Content:
    if not is_image(values.shape):
        return "", _numbers(values)
    return data_uri(pixels(torch.from_numpy(values))), ()


def _difference(found: Array, sample: Array) -> Content:
    """Signed: orange above, blue below the sample, full colour at the sample's own range."""
    if found.shape != sample.shape:
        return "", ("–",)
    if not is_image(found.shape):
        return "", _numbers(found - sample)
    signed = (fitted(found, sample) - sample) / (np.ptp(sample) or 1.0)
    signed = signed.mean(0) if signed.ndim == 3 else signed
    above, below = (_mixed(np.clip(part, 0, 1), MIDDLE, end)
                    for part, end in ((signed, HIGH), (-signed, LOW)))  # fmt: skip
    return data_uri(np.where(signed[..., None] > 0, above, below)), ()


def _between(share: Array, none: Colour, full: Colour) -> Content:
    if not is_image(share.shape):
        return "", _numbers(share)
    return data_uri(_mixed(share.mean(0) if share.ndim == 3 else share, none, full)), ()


def _mixed(share: Array, none: Colour, full: Colour) -> Array:
    start, end = np.array(none) / 255, np.array(full) / 255
    return start + share[..., None] * (end - start)


def _numbers(values: Array) -> tuple[str, ...]:
    flat = values.ravel()
    rest = (f"… {flat.size} values",) if flat.size > MAX_VALUES else ()
    return (*(f"{value:.3f}" for value in flat[:MAX_VALUES]), *rest)
