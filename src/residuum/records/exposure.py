"""Which records are at risk: a row of figures per record, groups of them, and what canaries prove."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.records.base import Record, plain

HALF = 0.5
SCHEMA_VERSION = "1.0"
FORMULAS = ("=", "+", "-", "@", "\t", "\r")
NUMBER = re.compile(r"-?\d+(\.\d+)?")
# Columns of the table and of the CSV, in this order; each is a field of ``Exposure`` but the first three.
COLUMNS = (
    "rank", "index", "group", "label", "probability", "score", "heard", "own_over_misfit", "multiplier",
    "reach", "reach_ncc", "informed_ncc", "kinks", "kink_p", "kink_q", "kink_called", "dual", "dual_p",
    "margin", "loss", "found_ncc",
)  # fmt: skip


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

    canaries, inserted: how many; guesses, right: of the share of guesses that gave the bound;
    statistic: by which inserted ones were told; points: operating points; auc: over all canaries.
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

    expected: records of it expected to be recovered; probability: their mean probability, interval:
    its 95% bootstrap interval over records; called: by their kinks, None where there are none.
    """

    name: str
    records: int
    expected: float
    probability: float
    interval: tuple[float, float]
    called: int | None


@dataclass(frozen=True, eq=False)
class Exposure(Record):
    """The exposure of n records in one network. What does not apply is NaN, and says why in the notes.

    probability: (n,) of being recovered by ``attacks``, calibrated on other networks; score: (n,) its log
    odds, by which records are ranked; heard, own_over_misfit: (n,) what it is made of; multiplier: (n,)
    sum over the rows of a record; misfit: of the layers explained, over their norm; gap: how far the
    multipliers are from optimal; rank: clean directions of the layer on the input, None without one;
    reach, reach_ncc: (n,) most that an attack in their span can have as cosine and as NCC; informed_ncc:
    (n,) of the estimate of one who knows all other records; kinks: (n, layers); kink_p, kink_q: (n,)
    p-value and least false discovery rate at which it is called; dual, dual_p: (n,) statistic and its
    p-value by rank among held-out records; margin, loss: (n,); found_ncc: (n,) best candidate of an attack
    that was handed over; top: (k,) indices of the records shown, with their images, informed estimates
    and what the attack found, (k, *shape) each, none of which is in the JSON.
    """

    arch: str
    surface: str
    task: str
    holdout: int
    layers: tuple[str, ...]
    attacks: str
    rank: int | None
    misfit: float
    gap: float
    level: float
    labels: Tensor
    groups: tuple[str, ...]
    grouped_by: str
    probability: Tensor
    score: Tensor
    heard: Tensor
    own_over_misfit: Tensor
    multiplier: Tensor
    reach: Tensor
    reach_ncc: Tensor
    informed_ncc: Tensor
    kinks: Tensor
    kink_p: Tensor
    kink_q: Tensor
    dual: Tensor
    dual_p: Tensor
    margin: Tensor
    loss: Tensor
    found_ncc: Tensor
    by_group: tuple[GroupExposure, ...]
    canaries: CanaryBound | None
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
    def expected(self) -> float:
        """Records expected to be recovered."""
        return float(self.probability.sum())

    @property
    def carry_half(self) -> int:
        """Fewest records that carry half of the exposure, the sum of all probabilities."""
        shares = self.probability.sort(descending=True).values.cumsum(0)
        return int((shares < HALF * shares[-1]).sum()) + 1

    @property
    def called(self) -> int | None:
        """Records whose kinks betray them at the level; None without kinks."""
        return None if bool(self.kink_q.isnan().all()) else int((self.kink_q <= self.level).sum())

    @property
    def lines(self) -> tuple[str, ...]:
        """What holds for all records together, one sentence each."""
        said = [
            f"expected to be recovered: {self.expected:.3g} of {len(self)}; {self.carry_half} records "
            "carry half of the exposure",
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
        columns: dict[str, Any] = {"rank": range(1, len(order) + 1), "index": order.tolist()}
        columns["group"] = [self.groups[i] if self.groups else None for i in order.tolist()]
        labels = self.labels[order]
        columns["label"] = plain(labels if labels.ndim == 1 else labels.squeeze(1))
        for name in COLUMNS[4:]:
            if name == "kinks":
                columns[name] = self.kinks[order].sum(1).tolist() if self.kinks.numel() else None
            elif name == "kink_called":
                q = self.kink_q[order]
                called = [None if v != v else v <= self.level for v in q.tolist()]
                columns[name] = called
            else:
                columns[name] = plain(getattr(self, name)[order])
            columns[name] = [None] * len(order) if columns[name] is None else columns[name]
        return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def summary(self) -> dict[str, Any]:
        """Everything that is not of one record."""
        names = ("arch", "surface", "task", "holdout", "layers", "attacks", "rank", "misfit", "gap")
        said = {name: plain(getattr(self, name)) for name in names}
        return {
            "schema_version": SCHEMA_VERSION,
            **said,
            "records": len(self),
            "level": self.level,
            "expected": self.expected,
            "carry_half": self.carry_half,
            "called": self.called,
            "largest_probability": float(self.probability.max()),
            "kink_layers": self.kinks.shape[1] if self.kinks.numel() else 0,
            "grouped_by": self.grouped_by,
            "groups": plain(self.by_group),
            "canaries": plain(self.canaries),
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def to_json(self) -> dict[str, Any]:
        """The published form (``residuum exposure --json``), without images."""
        return {**self.summary(), "per_record": self.rows()}

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
