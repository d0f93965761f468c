"""The cards of the report's gallery: which are shown, their pictures, and what they sort by.

Samples are small PNG data URIs, or numbers where they are no images. Reconstruction and training
sample are each stretched to their own range, as published figures are. The difference is taken after
the reconstruction's scale and offset are fitted to the sample, because the deciding metric (NCC)
ignores both; what it shows is what that metric sees.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from residuum.evaluation.scoring import joined, whole_pool
from residuum.records.data import with_mean
from residuum.report.drawing import is_image, pixels
from residuum.similarity import cosine

if TYPE_CHECKING:
    from residuum.auditing.result import AuditResult
    from residuum.records import Reconstruction

MAX_CARDS = 120
PNG = "data:image/png;base64,"
MAX_CANDIDATES = 60  # cards without data
MAX_BYTES = 6_000_000  # of pictures in one file: it is mailed, and opened on phones
BEYOND = 1e300
MAX_SIDE = 160  # pixels; larger images are reduced, a report is for looking, not for keeping them
MIN_SIDE = (
    56  # enlarged pixel by pixel: printers and mail programs smooth what the browser would not
)
MAX_VALUES = 6  # of a vector that is no image
LOW, MIDDLE, HIGH = (0, 114, 178), (250, 250, 250), (213, 94, 0)  # Okabe and Ito: blue, orange
FIXED, LOOSE = (250, 250, 250), (110, 40, 130)
# What the equal pairs in the place of a reconstruction keep of it; "" when no certificate was computed.
DETERMINED, PARTLY, FREE = "pairs keep it", "pairs keep a part", "pairs lose it"
SAME = 0.9  # cosine above which a certified candidate stands for another one
# Shares of an image's energy: pairs keep it where the bound says so, and lose it where one does.
KEPT, LOST = 0.9, 0.5
SORTED = {
    "margin": "margin",
    "confidence": "confidence",
    "determined_energy": "energy that pairs keep",
    "radius": "certificate radius",
}
Array = np.ndarray[Any, Any]
Colour = tuple[int, int, int]
Content = tuple[str, tuple[str, ...]]  # a data URI, or numbers


@dataclass(frozen=True)
class Item:
    """One card of the gallery: with data a training sample and its match, without data a candidate.

    number: how the card is called (index of the training sample, or rank of the candidate); found:
    the reconstruction and nearest: the training sample, both in sample shape, the mean added where
    known; scores: by metric name; recovered: beyond chance, None when nothing is calibrated; margin:
    y Phi(x); support: restarts that hold it, of ``restarts``; determined_energy (attained),
    determined_at_least (bound), radius, certificate (``DETERMINED`` and so on) and ambiguity (sample
    shape, 0 where pairs fix a value, 1 where they leave it free): of the uniqueness certificate;
    notes: anything else, one line each. No field holds markup.
    """

    number: int
    found: Array | None
    nearest: Array | None = None
    label: str = ""
    attack: str = ""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    recovered: bool | None = None
    margin: float | None = None
    output: float | None = None
    confidence: float | None = None
    support: int | None = None
    restarts: int | None = None
    multiplier: float | None = None
    determined_energy: float | None = None
    determined_at_least: float | None = None
    radius: float | None = None
    certificate: str = ""
    ambiguity: Array | None = None
    notes: tuple[str, ...] = ()

    @property
    def matched(self) -> bool:
        """Whether it was compared with the data; true of redacted ones too."""
        return self.nearest is not None or any(v is not None for v in self.scores.values())


@dataclass(frozen=True)
class Picture:
    """One frame of a card: an image as ``uri``, or ``values`` as text; alt says what it shows."""

    caption: str
    alt: str
    uri: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Card:
    """An item, what it is called, and its pictures."""

    item: Item
    title: str
    pictures: tuple[Picture, ...]


def items(result: AuditResult) -> tuple[Item, ...]:
    """One per training sample with a match, best first; without data one per candidate."""
    return tuple(_matched(result) if result.evidence is not None else _ranked(result))


def total(result: AuditResult) -> int:
    """How many items there are, shown or not."""
    if result.scores is not None:
        return result.scores.n
    return sum(len(part.selection) for part in result.reconstructions if part.selection)


def redacted(shown: Iterable[Item]) -> tuple[Item, ...]:
    """The items without any array that shows a sample."""
    return tuple(replace(item, found=None, nearest=None, ambiguity=None) for item in shown)


def cards(
    items: Sequence[Item], shape: tuple[int, ...], noun: Callable[[Item], str] | None = None
) -> tuple[Card, ...]:
    """The first items, as many as a file to be mailed has room for; noun: what one is called."""
    made: list[Card] = []
    room = MAX_BYTES
    for item in items[:MAX_CARDS]:
        kind = noun(item) if noun else "sample" if item.matched else "candidate"
        title = f"{kind} {item.number}"
        pictures = frames(item, shape, title)
        room -= sum(len(picture.uri) for picture in pictures)
        if room < 0 and made:
            break
        made.append(Card(item, title, pictures))
    return tuple(made)


def keys(item: Item) -> dict[str, Any]:
    """What the script sorts and filters by; what is no number is null."""
    return {
        "number": item.number,
        "label": item.label,
        "certificate": item.certificate,
        "recovered": item.recovered,
        "scores": {name: _finite(value) for name, value in item.scores.items()},
        **{name: _finite(getattr(item, name)) for name in SORTED},
    }


def sort_keys(shown: Sequence[Item]) -> list[tuple[str, str]]:
    """(key, name) of every order that some card has a value for, the page's own order first."""
    metrics = dict.fromkeys(name for item in shown for name in item.scores)
    known = [
        (key, name)
        for key, name in SORTED.items()
        if any(getattr(item, key) is not None for item in shown)
    ]
    return [
        ("order", "best first"), *((f"scores:{name}", name) for name in metrics), *known,
        ("number", "number"),
    ]  # fmt: skip


def ascending(result: AuditResult) -> list[str]:
    """Sort keys whose least value comes first: samples on the margin, lowest distances."""
    metrics = () if result.scores is None else result.scores.metrics.values()
    lowest = [f"scores:{row.name}" for row in metrics if not row.higher_is_better]
    return ["number", "margin", *lowest]


def _matched(result: AuditResult) -> Iterator[Item]:
    """One card per training sample with a match, best first."""
    evidence, scores = result.evidence, result.scores
    assert evidence is not None
    assert scores is not None
    pool = joined([whole_pool(part) for part in result.reconstructions])
    outputs = evidence.outputs if evidence.output_name == "network output" else None
    for place, index in enumerate(evidence.index.tolist()):
        row = scores.per_sample[index]
        taken = row.matches[scores.deciding].candidate
        if taken is None:
            continue
        yield Item(
            number=index,
            found=_image(pool.x[taken], evidence.mean, result.shape),
            nearest=_image(evidence.x[place], evidence.mean, result.shape),
            label=evidence.labels[index],
            scores={name: match.score for name, match in row.matches.items()},
            recovered=row.recovered,
            margin=row.margin,
            output=None if outputs is None else float(outputs[index]),
            multiplier=row.multiplier,
            **_group(result, pool.x[taken]),
            **_certified(result, pool.x[taken]),
        )


def _ranked(result: AuditResult) -> Iterator[Item]:
    """One card per chosen candidate, most confident first."""
    chosen = [
        Item(
            number=number, found=_image(part.selection.x[i], part.knowledge.mean, result.shape),
            label=f"{float(part.selection.labels[i]):g}", **_standing(part, i),
            multiplier=float(part.selection.lam[i]), **_certified(result, part.selection.x[i]),
        )
        for number, (part, i) in enumerate(result.ranked[:MAX_CANDIDATES])
        if part.selection is not None
    ]  # fmt: skip
    yield from sorted(chosen, key=lambda item: -(item.confidence or 0.0))


def _group(result: AuditResult, x: Tensor) -> dict[str, Any]:
    """Standing of the group that a candidate belongs to: the nearest chosen one."""
    best: tuple[float, dict[str, Any]] = (-1.0, {})
    for part in result.reconstructions:
        if part.selection:
            near = cosine(x[None].double(), part.selection.x.double())[0]
            i = int(near.argmax())
            if float(near[i]) > best[0]:
                best = float(near[i]), _standing(part, i)
    return best[1]


def _standing(part: Reconstruction, i: int) -> dict[str, Any]:
    """Confidence and support of a chosen candidate."""
    assert part.selection is not None
    return {
        "attack": part.attack, "restarts": part.restarts,
        "confidence": float(part.selection.confidence[i]), "support": int(part.selection.support[i]),
    }  # fmt: skip


def _certified(result: AuditResult, x: Tensor) -> dict[str, Any]:
    """What the uniqueness certificate says of the nearest certified candidate, where one is near."""
    unique = result.uniqueness
    if unique is None or not len(unique):
        return {}
    near = cosine(x[None].double(), result.reconstructions[0].x[unique.index].double())[0]
    i = int(near.argmax())
    if float(near[i]) < SAME:
        return {}
    energy, least = float(unique.determined_energy[i]), float(unique.determined_at_least[i])
    radius = float(unique.radius[i])
    low, high = result.knowledge.value_range or (0.0, 1.0)
    known: dict[str, Any] = {
        "determined_energy": energy,
        "determined_at_least": least,
        "radius": radius if math.isfinite(radius) else None,
        "certificate": DETERMINED if least >= KEPT else PARTLY if energy >= LOST else FREE,
        "ambiguity": (unique.pixels[i].double() / (high - low)).clamp(0, 1).numpy(),
    }
    if not math.isfinite(radius):
        known["notes"] = ("an equally good pair lies at any distance",)
    return known


def _image(x: Tensor, mean: Tensor | None, shape: tuple[int, ...]) -> Array:
    x = with_mean(x.double(), mean)
    return (x.reshape(shape) if shape else x).numpy()


def _finite(value: float | None) -> float | None:
    """JSON has no infinity; an unbounded radius still sorts as the largest."""
    if value is None or math.isnan(value):
        return None
    return max(-BEYOND, min(BEYOND, float(value)))


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
    return PNG + base64.b64encode(buffer.getvalue()).decode()


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
