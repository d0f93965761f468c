"""Exposure in pictures, and the schema of its JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from residuum.records import Dataset
from residuum.records.base import json_schema
from residuum.records.inputs import with_mean
from residuum.records.results import SCHEMA_VERSION, CanaryBound, Exposure, GroupExposure
from residuum.report import drawing
from residuum.report.drawing import Cell

BINS = 20  # of probabilities, 5% each
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ExposedRecord(_Model):
    """One record; a figure that does not apply is null, and a note says why."""

    rank: Annotated[int, Field(ge=1)]
    index: Count = Field(description="of the record in the data, from 0")
    group: str | None
    label: float | list[float]
    probability: Share | None = Field(
        description="of being recovered by the attacks named above; null where it is not calibrated"
    )
    score: float = Field(description="log odds, by which records are ranked")
    heard: Share | None
    own_over_misfit: float
    multiplier: float
    reach: Share | None = Field(description="largest cosine for attacks in the row space")
    reach_ncc: Share | None = Field(description="largest NCC for attacks in the row space")
    informed_ncc: float | None
    kinks: Count | None
    kink_p: Share | None
    kink_q: Share | None
    kink_called: bool | None
    dual: Share | None
    dual_p: Share | None
    margin: float | None
    loss: float
    found_ncc: Share | None = Field(description="of an attack that was handed over")


class Published(_Model):
    """The whole of ``exposure.json``."""

    schema_version: Literal["2.0"]
    arch: str
    surface: str
    task: str
    holdout: Count
    layers: list[str]
    attacks: str = Field(description="whose recoveries the probability is of, at which budget")
    rank: Count | None
    misfit: float
    gap: float
    records: Count
    level: Share = Field(description="false discovery rate at which kinks call a record")
    expected: float | None
    carry_half: Count | None
    called: Count | None
    largest_probability: Share | None
    uncalibrated: str = Field(description="why the score is no probability; empty where it is one")
    kink_layers: Count
    grouped_by: str
    groups: list[GroupExposure]
    canaries: CanaryBound | None
    seconds: float
    notes: list[str]
    per_record: list[ExposedRecord]
    request: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None


def exposure_schema() -> dict[str, Any]:
    """The JSON Schema of ``exposure.json``."""
    return json_schema(Published, "exposure", SCHEMA_VERSION)


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
    title = f"Most exposed records: {label}; framed: called by kinks"
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
