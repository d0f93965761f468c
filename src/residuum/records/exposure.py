"""Exposure: which training records are at risk, groups of records, and what canaries prove."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from residuum.records.base import Record, plain, table_rows
from residuum.records.published import OPTIONAL, Count, SchemaRule, Share

HALF = 0.5  # of the exposure, that few records may carry
SCHEMA_VERSION = "2.0"  # of exposure.json
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for one
NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, eq=False)
class Operating(Record):
    """Canaries told apart at a false positive rate.

    false: canaries left out that may exceed the threshold, 0 where the list is too short for the rate;
    true_rate: share of the inserted ones that do, with its 95% interval.
    """

    rate: float
    false: int
    true_rate: float
    interval: tuple[float, float]

    @property
    def line(self) -> str:
        """In a few words."""
        low, high = self.interval
        few = "" if self.false else ", above all that were left out"
        return f"{self.true_rate:.0%} ({low:.0%} to {high:.0%}) at {self.rate:.1%} false ones{few}"


@dataclass(frozen=True, eq=False)
class CanaryBound(Record):
    """What canaries prove: training was not (epsilon, delta)-private, with this confidence.

    canaries, inserted: how many.
    guesses, right: of the share of guesses that gave the bound.
    statistic: by which inserted ones were told.
    points: operating points.
    auc: over all canaries.
    """

    canaries: int
    inserted: int
    epsilon: float
    confidence: float
    delta: float
    guesses: int
    right: int
    statistic: str
    points: tuple[Operating, ...]
    auc: float
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The bound, and the operating points."""
        return (
            f"canaries: epsilon at least {self.epsilon:.3g} at delta {self.delta:g} with confidence "
            f"{self.confidence:.0%}, by {self.right} of {self.guesses} guesses right ({self.statistic})",
            "canaries: true positives " + ", ".join(point.line for point in self.points),
            *(f"canaries: {note}" for note in self.notes),
        )


@dataclass(frozen=True, eq=False)
class GroupExposure(Record):
    """A class, or the records that share a value of a column.

    score: mean score of its records.
    expected: records of it expected to be recovered. None where the probability is not calibrated.
    probability: their mean probability, None likewise.
    interval: 95% bootstrap interval of that mean over records, None likewise.
    called: by their kinks, None where there are none.
    """

    name: str
    records: int
    score: float
    expected: float | None
    probability: float | None
    interval: tuple[float, float] | None
    called: int | None


@dataclass(frozen=True, eq=False)
class ExposedRecord(Record):
    """One row of the table and of the CSV. A figure that does not apply is null, and a note says why.

    Attributes:
        index: of the record in the data, from 0
        probability: of being recovered by the attacks named above; null where it is not calibrated
        score: log odds, by which records are ranked
        reach: largest cosine for attacks in the row space
        reach_ncc: largest NCC for attacks in the row space
        found_ncc: of an attack that was handed over
    """

    rank: Annotated[int, SchemaRule(minimum=1)]
    index: Count
    group: str | None
    label: float | tuple[float, ...]
    probability: Share | None
    score: float
    heard: Share | None
    own_over_misfit: float
    multiplier: float
    reach: Share | None
    reach_ncc: Share | None
    informed_ncc: float | None
    kinks: Count | None
    kink_p: Share | None
    kink_q: Share | None
    kink_called: bool | None
    dual: Share | None
    dual_p: Share | None
    margin: float | None
    loss: float
    found_ncc: Share | None


COLUMNS = tuple(column.name for column in fields(ExposedRecord))


@dataclass(frozen=True, eq=False)
class ExposureSummary(Record):
    """What holds for all records of an exposure together.

    Attributes:
        attacks: whose recoveries the probability is of, at which budget
        level: false discovery rate at which kinks call a record
        uncalibrated: why the score is no probability; empty where it is one
    """

    schema_version: Annotated[str, SchemaRule(enum=[SCHEMA_VERSION])]
    arch: str
    surface: str
    task: str
    holdout: Count
    layers: tuple[str, ...]
    attacks: str
    rank: Count | None
    misfit: float
    gap: float
    records: Count
    level: Share
    expected: float | None
    carry_half: Count | None
    called: Count | None
    largest_probability: Share | None
    uncalibrated: str
    kink_layers: Count
    grouped_by: str
    groups: tuple[GroupExposure, ...]
    canaries: CanaryBound | None
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PublishedExposure(ExposureSummary):
    """Everything that ``exposure.json`` holds."""

    per_record: tuple[ExposedRecord, ...]
    request: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    environment: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, eq=False, kw_only=True)
class OutputFigures(Record):
    """Margin (NaN for a regression) and loss of every record, (n,) each: the plain baselines."""

    margin: Tensor
    loss: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class FitFigures(Record):
    """How the records explain what training left in the release.

    multiplier: (n,) sum over the rows of a record.
    own_over_misfit: (n,) signal-to-residual ratio.
    misfit: norm of the residual over that of what is explained.
    gap: how far the multipliers are from optimal.
    informed_ncc: (n,) NCC of the estimate of an attacker who knows all other records.
    """

    multiplier: Tensor
    own_over_misfit: Tensor
    misfit: float
    gap: float
    informed_ncc: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class RowSpaceFigures(Record):
    """What the layer on the input has seen of every record.

    rank: number of clean directions, None without a row space.
    heard: (n,) signal share.
    reach, reach_ncc: (n,) largest cosine and NCC of a candidate in the row space.
    dual, dual_p: (n,) dual-vector statistic and its p-value by rank among held-out records.
    """

    rank: int | None = None
    heard: Tensor
    reach: Tensor
    reach_ncc: Tensor
    dual: Tensor
    dual_p: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class KinkFigures(Record):
    """Activation boundaries through every record.

    kinks: (n, layers) counts.
    kink_p, kink_q: (n,) p-value by rank among held-out records, and the least false discovery rate at
        which the record is flagged.
    """

    kinks: Tensor
    kink_p: Tensor
    kink_q: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Exposure(OutputFigures, FitFigures, RowSpaceFigures, KinkFigures):
    """The exposure of n records in one network. What does not apply is NaN, and says why in the notes.

    surface: what of the release was explained.
    layers: whose gradients must explain it.
    attacks: whose recoveries the probability is of.
    holdout: how many held-out records there were.
    level: false discovery rate at which kinks flag a record.
    score: (n,) log odds, by which records are ranked.
    probability: (n,) of being recovered by ``attacks``. NaN for a network unlike those on which it was
        checked.
    uncalibrated: why the score is no probability here, "" if it is one.
    groups, grouped_by, by_group: name of each record's group, by what, and the figures of each.
    canaries: the bound on epsilon that they give, None without any.
    found_ncc: (n,) NCC of the nearest candidate of an attack.
    top: (k,) indices of the records shown, with their images, informed estimates and what the
        attack found, (k, *shape) each, none of which is in the JSON.
    """

    arch: str
    surface: str
    task: str
    holdout: int
    layers: tuple[str, ...]
    attacks: str
    level: float
    labels: Tensor
    groups: tuple[str, ...]
    grouped_by: str
    by_group: tuple[GroupExposure, ...]
    score: Tensor
    probability: Tensor
    uncalibrated: str
    canaries: CanaryBound | None
    found_ncc: Tensor
    top: Tensor
    images: Tensor
    informed: Tensor
    found: Tensor
    seconds: float
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.score)

    @property
    def order(self) -> Tensor:
        """(n,) records, most exposed first."""
        return self.score.argsort(descending=True, stable=True)

    @property
    def expected(self) -> float | None:
        """Return how many records are expected to be recovered, None where that is not calibrated."""
        return None if self.uncalibrated else float(self.probability.sum())

    @property
    def carry_half(self) -> int | None:
        """Return the fewest records that carry half of the expected number, None where there is none."""
        if self.uncalibrated:
            return None
        shares = self.probability.sort(descending=True).values.cumsum(0)
        return int((shares < HALF * shares[-1]).sum()) + 1

    @property
    def called(self) -> int | None:
        """Records whose kinks betray them at the level; None without kinks."""
        return None if bool(self.kink_q.isnan().all()) else int((self.kink_q <= self.level).sum())

    @property
    def lines(self) -> tuple[str, ...]:
        """What holds for all records together, one sentence each."""
        if self.uncalibrated:
            said = [
                "ranking only: scores are not probabilities here. "
                f"{self.uncalibrated[:1].upper()}{self.uncalibrated[1:]}"
            ]
        else:
            said = [
                f"expected to be recovered: {self.expected:.3g} of {len(self)}; {self.carry_half} "
                "records carry half of the exposure",
                f"probability: {self.attacks}",
            ]
        if self.called is not None:
            said.append(
                f"kinks call {self.called} of {len(self)} at a false discovery rate of {self.level:.0%} "
                f"(chance level: {self.holdout} held-out records)"
            )
        if self.canaries is not None:
            said += self.canaries.lines
        return (*said, "none of this is a guarantee: only differential privacy gives one")

    def rows(self, most: int | None = None) -> list[dict[str, Any]]:
        """One per record, most exposed first, with the names of ``COLUMNS``."""
        order = self.order[:most]
        indices = order.tolist()
        labels = self.labels[order]
        kinks = self.kinks[order].sum(1).tolist() if self.kinks.numel() else [None] * len(order)
        q = plain(self.kink_q[order])
        computed = {
            "rank": range(1, len(order) + 1),
            "index": indices,
            "group": [self.groups[i] if self.groups else None for i in indices],
            "label": plain(labels if labels.ndim == 1 else labels.squeeze(1)),
            "kinks": kinks,
            "kink_called": [None if value is None else value <= self.level for value in q],
        }
        copied = [name for name in COLUMNS if name not in computed]
        columns = {name: plain(getattr(self, name)[order]) for name in copied} | computed
        return table_rows({name: columns[name] for name in COLUMNS})

    def summary(self) -> ExposureSummary:
        """Return what holds for all records together."""
        return ExposureSummary.from_attributes(
            self,
            schema_version=SCHEMA_VERSION,
            records=len(self),
            largest_probability=None if self.uncalibrated else float(self.probability.max()),
            kink_layers=self.kinks.shape[1] if self.kinks.numel() else 0,
            groups=self.by_group,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the published form (:class:`PublishedExposure`), without images."""
        return {**self.summary().to_json(), "per_record": self.rows()}

    def to_csv(self) -> str:
        """One line per record, most exposed first; an empty cell where a figure does not apply."""
        text = io.StringIO()
        table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        table.writeheader()
        for row in self.rows():
            named = str(row["group"] or "")
            # A spreadsheet would compute a formula; a label such as -1 is a number to it already.
            if named.startswith(FORMULAS) and not NUMBER.fullmatch(named):
                row["group"] = f"'{named}"
            table.writerow(row)
        return text.getvalue()


def missing(n: int) -> Tensor:
    """(n,) figures that do not apply."""
    return torch.full((n,), torch.nan, dtype=torch.float64)
