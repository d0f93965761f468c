"""Exposure: the risk that each training record is recovered, and a lower bound on the privacy loss.

Canaries are records that were inserted into the training set to test the privacy of the training.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from residuum import notebook
from residuum.records.attribute_test import AttributeTest
from residuum.records.base import Record, plain, table_rows
from residuum.records.exposure_tables import tables_of
from residuum.records.published import OPTIONAL, Count, SchemaRule, Share
from residuum.terminal import print_line, print_notes, print_table

# Share of all expected recoveries. A summary says how few records together make up this share.
HALF = 0.5
SCHEMA_VERSION = "2.1"  # version of the fields of exposure.json
# A spreadsheet treats a text that starts with one of these characters as a formula.
FORMULAS = ("=", "+", "-", "@", "\t", "\r")
NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, eq=False)
class Operating(Record):
    """The share of canaries (records that test the training) that are detected at a false positive rate.

    Attributes:
        rate: The false positive rate.
        false: Number of canaries outside the training set that are permitted above the detection threshold.
            It is 0 if there are too few such canaries for the rate.
        true_rate: Share of the inserted canaries that exceed the threshold.
        interval: 95% confidence interval of ``true_rate``.
    """

    rate: float
    false: int
    true_rate: float
    interval: tuple[float, float]

    @property
    def line(self) -> str:
        """Text with the share of detected canaries (test records) and the false positive rate."""
        low, high = self.interval
        note = "" if self.false else ", with none of them above the threshold"
        return f"{self.true_rate:.0%} ({low:.0%} to {high:.0%}) at {self.rate:.1%} false positives{note}"


@dataclass(frozen=True, eq=False)
class CanaryBound(Record):
    """A lower bound on the privacy loss epsilon of the training, proved by guessing inserted canaries.

    Attributes:
        canaries: Number of canaries.
        inserted: Number of canaries in the training set.
        epsilon: Lower bound on epsilon.
        confidence: Confidence of the bound.
        delta: The delta of (epsilon, delta)-differential privacy.
        guesses: Number of guesses whether a canary was inserted.
        right: Number of correct guesses.
        statistic: The statistic by which inserted canaries were guessed.
        points: Shares of detected canaries at several false positive rates.
        auc: Area under the ROC curve over all canaries.
        notes: Remarks on what limits the bound.
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
        """Sentences about the lower bound on epsilon (privacy loss) and the canaries (test records)."""
        return (
            f"canaries: epsilon at least {self.epsilon:.3g} at delta {self.delta:g} with confidence "
            f"{self.confidence:.0%}, because {self.right} of {self.guesses} guesses were right "
            f"({self.statistic})",
            "canaries: true positives " + ", ".join(point.line for point in self.points),
            *(f"canaries: {note}" for note in self.notes),
        )


@dataclass(frozen=True, eq=False)
class GroupExposure(Record):
    """The exposure (risk of being recovered) of a class, or of the records that share a value of a column.

    Attributes:
        name: Name of the group.
        records: Number of records.
        score: Mean score (log odds of being recovered) of the records.
        expected: Number of records expected to be recovered, or None if probabilities are not calibrated.
        probability: Mean probability of being recovered, or None if probabilities are not calibrated.
        interval: 95% bootstrap interval of the mean probability, or None if probabilities are not calibrated.
        called: Number of records flagged because activation boundaries (kinks) pass through them, or None if
            the network has no kinks.
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
    """The exposure (risk of being recovered) of one record: a row of the table and of the CSV file.

    A number that does not apply is null, and a note of the exposure gives the reason. The weights of the
    network are fitted by a weighted sum of the records' gradients. The residual is the error of this fit.

    Attributes:
        index: Index of the record in the data, counted from 0.
        probability: Probability of being recovered by the attacks of the exposure, or null if it is not
            calibrated.
        score: Log odds of being recovered, by which records are ranked.
        heard: Signal share: how much of the record the row space of the first layer contains, from 0 to 1.
        own_over_misfit: Signal-to-residual ratio: the norm of the record's term in the weighted sum of
            gradients, divided by the norm of the residual.
        reach: Largest cosine with the record that a candidate in the row space of the first layer can have.
        reach_ncc: Largest normalized cross-correlation (NCC) with the record that a candidate in the row
            space of the first layer can have.
        kink_called: Whether the record is flagged because activation boundaries (kinks) pass through it.
        found_ncc: NCC of the nearest candidate of an attack, null if no attack was given.
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
    """The part of a risk ranking (exposure) that describes all records together.

    Attributes:
        attacks: The attacks, and their computing budget, for which the probability of being recovered is
            calibrated.
        level: False discovery rate at which records are flagged by activation boundaries (kinks).
        uncalibrated: Reason why scores are not probabilities, or "" if they are.
        attributes: The test whether missing values of records can be inferred, or null if it was not run.
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
    attributes: AttributeTest | None
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PublishedExposure(ExposureSummary):
    """The content of the file ``exposure.json``, which holds a risk ranking of training records."""

    per_record: tuple[ExposedRecord, ...]
    request: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    environment: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, eq=False, kw_only=True)
class OutputFigures(Record):
    """The margin and the loss of the network at each of n records, as simple measures of risk."""

    margin: Tensor
    loss: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class FitFigures(Record):
    """How well a weighted sum of the records' gradients fits the weights of the released network.

    The multipliers are the weights of this sum. The residual is the error of the fit.

    Attributes:
        multiplier: Sum of the multipliers of each record, (n,).
        own_over_misfit: Signal-to-residual ratio, (n,): the norm of the record's term in the weighted sum of
            gradients, divided by the norm of the residual.
        misfit: Norm of the residual over the norm of the vector that the weighted sum is fitted to.
        gap: Largest violation of the optimality conditions by the fitted multipliers, relative to the
            violation at zero multipliers.
        informed_ncc: NCC between each record and the estimate of an attacker who knows all other records,
            (n,).
    """

    multiplier: Tensor
    own_over_misfit: Tensor
    misfit: float
    gap: float
    informed_ncc: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class RowSpaceFigures(Record):
    """How much of each of n records the row space of the first layer's weight contains.

    Attributes:
        rank: Number of right singular vectors of the first layer's weight whose singular value exceeds the
            noise that random initial weights cause. None if the row space was not measured.
        heard: Signal share, (n,): how much of each record the row space contains, from 0 to 1.
        reach: Largest cosine with each record that a candidate in the row space can have, (n,).
        reach_ncc: Largest NCC with each record that a candidate in the row space can have, (n,).
        dual: Dual-vector statistic, (n,): the absolute NCC between each record and its estimate from the
            first layer's rows.
        dual_p: p-value of the dual-vector statistic by rank among held-out records, (n,).
    """

    rank: int | None = None
    heard: Tensor
    reach: Tensor
    reach_ncc: Tensor
    dual: Tensor
    dual_p: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class KinkFigures(Record):
    """Numbers of activation boundaries (kinks) that pass through each of n records.

    The boundary of a ReLU passes through a record if the input of the ReLU is zero at the record.

    Attributes:
        kinks: Number of boundaries through each record by layer, (n, layers).
        kink_p: p-value of the number of boundaries by rank among held-out records, (n,).
        kink_q: Smallest false discovery rate at which each record is flagged, (n,).
    """

    kinks: Tensor
    kink_p: Tensor
    kink_q: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Exposure(OutputFigures, FitFigures, RowSpaceFigures, KinkFigures):
    """The exposure (risk of being recovered by attacks) of n training records of a network.

    Numbers that do not apply are NaN, and a note gives the reason.

    Attributes:
        arch: Architecture string.
        surface: The attack surface (the released tensors that are attacked, such as the final weights).
        task: Task of the network.
        holdout: Number of held-out records.
        layers: Layers in which the weighted sum of the records' gradients is fitted to the weights.
        attacks: The attacks for which the probability of being recovered is calibrated.
        level: False discovery rate at which records are flagged by activation boundaries (kinks).
        labels: Labels of the records, (n,) or (n, k).
        groups: Name of the group of every record.
        grouped_by: What defines the groups.
        by_group: Exposure of each group.
        score: Log odds of being recovered, by which records are ranked, (n,).
        probability: Probability of being recovered by ``attacks``, (n,). It is NaN for a network that differs
            from the networks of the calibration.
        uncalibrated: Reason why scores are not probabilities, or "" if they are.
        canaries: Lower bound on epsilon by canaries, or None without canaries.
        found_ncc: NCC between each record and the nearest candidate of an attack, (n,).
        top: Indices of the displayed records, (k,).
        images: Images of the displayed records, (k, *shape). The JSON omits the images.
        informed: Estimates of the displayed records by an attacker who knows all other records, (k, *shape).
            The JSON omits the estimates.
        nearest: The candidate of an attack that is nearest to each displayed record, (k, *shape). The JSON
            omits the candidates.
        seconds: Run time in seconds.
        notes: Remarks on what limits these numbers.
        attributes: The test whether missing values of records can be inferred, or None if it was not run.
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
    nearest: Tensor
    seconds: float
    notes: tuple[str, ...] = ()
    attributes: AttributeTest | None = None

    def __len__(self) -> int:
        return len(self.score)

    @property
    def order(self) -> Tensor:
        """Indices of the n records, those with the highest risk first."""
        return self.score.argsort(descending=True, stable=True)

    @property
    def expected(self) -> float | None:
        """Expected number of records that attacks recover, None if probabilities are not calibrated."""
        return None if self.uncalibrated else float(self.probability.sum())

    @property
    def carry_half(self) -> int | None:
        """Smallest number of records that together account for half of the expected recovered records.

        None if probabilities are not calibrated.
        """
        if self.uncalibrated:
            return None
        cumulative_probabilities = self.probability.sort(descending=True).values.cumsum(0)
        return int((cumulative_probabilities < HALF * cumulative_probabilities[-1]).sum()) + 1

    @property
    def called(self) -> int | None:
        """Number of records that lie on conspicuously many activation boundaries, None without boundaries."""
        return None if bool(self.kink_q.isnan().all()) else int((self.kink_q <= self.level).sum())

    @property
    def lines(self) -> tuple[str, ...]:
        """Sentences that summarize the exposure of all records."""
        if self.uncalibrated:
            sentences = [
                "ranking only: scores are not probabilities here. "
                f"{self.uncalibrated[:1].upper()}{self.uncalibrated[1:]}"
            ]
        else:
            sentences = [
                f"expected to be recovered: {self.expected:.3g} of {len(self)}; {self.carry_half} "
                "records carry half of the exposure",
                f"probability: {self.attacks}",
            ]
        if self.called is not None:
            sentences.append(
                f"kinks flag {self.called} of {len(self)} records at a false discovery rate of "
                f"{self.level:.0%} (chance level: {self.holdout} held-out records)"
            )
        if self.canaries is not None:
            sentences += self.canaries.lines
        if self.attributes is not None:
            sentences.append(self.attributes.line)
        return (*sentences, "no guarantee: only differential privacy gives one")

    def rows(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return one dictionary (a row of the table) for each of the ``limit`` records at highest risk."""
        shown_order = self.order[:limit]
        indices = shown_order.tolist()
        labels = self.labels[shown_order]
        kinks = (
            self.kinks[shown_order].sum(1).tolist()
            if self.kinks.numel()
            else [None] * len(shown_order)
        )
        discovery_rates = plain(self.kink_q[shown_order])
        computed_columns = {
            "rank": range(1, len(shown_order) + 1),
            "index": indices,
            "group": [self.groups[i] if self.groups else None for i in indices],
            "label": plain(labels if labels.ndim == 1 else labels.squeeze(1)),
            "kinks": kinks,
            "kink_called": [
                None if value is None else value <= self.level for value in discovery_rates
            ],
        }
        copied_names = [name for name in COLUMNS if name not in computed_columns]
        columns = {
            name: plain(getattr(self, name)[shown_order]) for name in copied_names
        } | computed_columns
        return table_rows({name: columns[name] for name in COLUMNS})

    def summary(self) -> ExposureSummary:
        """Return the part of the risk ranking that describes all records together."""
        return ExposureSummary.from_attributes(
            self,
            schema_version=SCHEMA_VERSION,
            records=len(self),
            largest_probability=None if self.uncalibrated else float(self.probability.max()),
            kink_layers=self.kinks.shape[1] if self.kinks.numel() else 0,
            groups=self.by_group,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of ``exposure.json`` (:class:`PublishedExposure`), without images."""
        return {**self.summary().to_json(), "per_record": self.rows()}

    def show(self) -> None:
        """Print the most exposed records and the groups, as the command ``residuum exposure`` does."""
        for table in tables_of(self):
            print_table(*table)
        for line in self.lines:
            print_line(line)
        print_notes(self.notes)

    def _repr_html_(self) -> str:
        records = f"{len(self)} record" if len(self) == 1 else f"{len(self)} records"
        lines = (*self.lines, *(f"note: {note}" for note in self.notes))
        return notebook.render(f"exposure of {records}, {self.arch}", tables_of(self), lines)

    def to_csv(self) -> str:
        """Return the ranking as CSV text, with a row for each record, those at highest risk first."""
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in self.rows():
            group_name = str(row["group"] or "")
            # A leading quote makes a spreadsheet read a formula as text. A number such as -1 is no formula.
            if group_name.startswith(FORMULAS) and not NUMBER.fullmatch(group_name):
                row["group"] = f"'{group_name}"
            writer.writerow(row)
        return buffer.getvalue()


def not_applicable(n: int) -> Tensor:
    """Return a vector of n NaN values, which stand for measurements that do not apply."""
    return torch.full((n,), torch.nan, dtype=torch.float64)
