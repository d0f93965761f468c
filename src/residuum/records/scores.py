"""Scores: how many training samples the candidates recover, beyond what is expected by chance."""

from __future__ import annotations

from dataclasses import dataclass

from residuum.records.base import Record

HEAD = ["metric", "recovered", "by chance", "p", "threshold"]  # against the held-out control
HEAD += ["published", "train", "held-out", "top 10", "best"]  # as published


@dataclass(frozen=True, eq=False)
class MetricScore(Record):
    """The counts under one metric.

    recovered: samples whose one-to-one match beats threshold_null99, the 99th percentile of chance.
    interval: naive 95% Clopper-Pearson of that count, as if samples were independent, chance not
        subtracted.
    p_value: permutation test against held-out samples.
    above_published_threshold: samples beyond published_threshold, matched as its source does.
    above_published_threshold_holdout: the same of one held-out set of equal size, its chance level.
    top10_mean, best, median: of the values under the published matching. What needs a held-out
        control is None without one.
    """

    unpublished = ("name",)  # the key of the metric in the JSON

    name: str
    description: str
    higher_is_better: bool
    published_threshold: float | None
    above_published_threshold: int | None
    top10_mean: float | None
    best: float | None
    median: float | None
    recovered: int | None = None
    expected_by_chance: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    threshold_null99: float | None = None
    above_published_threshold_holdout: int | None = None

    @property
    def threshold(self) -> str:
        """What a recovered sample had to beat, such as "> 0.83"; a dash without a control."""
        if self.threshold_null99 is None:
            return "-"
        return f"{'>' if self.higher_is_better else '<'} {self.threshold_null99:.3g}"

    @property
    def rule(self) -> str:
        """What counts as recovered, to stand beside a count: "ncc > 0.83"; "" without a control."""
        return "" if self.threshold_null99 is None else f"{self.name} {self.threshold}"


@dataclass(frozen=True, eq=False)
class SampleMatch(Record):
    """One sample under one metric.

    score, candidate: of its one-to-one match, None when it got none.
    recovered: beyond chance.
    nearest, nearest_candidate: under the published matching, mostly with repeats.
    """

    score: float | None
    candidate: int | None
    recovered: bool | None
    nearest: float | None
    nearest_candidate: int | None


@dataclass(frozen=True, eq=False)
class SampleScore(Record):
    """One training sample: its margin, the multiplier of its candidate, its match by every metric.

    index: its row in the file that the user gave, counted from 0.
    id: the user's own identifier, "" if the data has no ID column.
    """

    index: int
    label: float | int | None
    margin: float | None
    multiplier: float | None
    recovered: bool | None
    matches: dict[str, SampleMatch]
    id: str = ""


@dataclass(frozen=True, eq=False)
class ScoreSlice(Record):
    """Recovered samples in a part of the training set: a class, or a range of margins."""

    name: str
    samples: int
    recovered: int | None
    rate: float | None
    median: float | None


@dataclass(frozen=True, eq=False)
class Scores(Record):
    """How many of n training samples the m candidates recover, beyond what chance explains.

    deciding: the metric of the verdict.
    reason: why nothing is calibrated, "" when it is.
    pool, subsets: size of the held-out control, and sets drawn from it.
    smallest_significant: the least count that this pool could call significant at 1%.
    margins: slices by quintile of the margin, smallest first.
    metrics: counts by metric.
    per_sample: each training sample with its match.
    classes: slices by label.
    notes: what was left out, or could not be measured.
    """

    derived = ("recovered", "expected_by_chance", "p_value")

    n: int
    m: int
    calibrated: bool
    reason: str
    deciding: str
    metrics: dict[str, MetricScore]
    per_sample: tuple[SampleScore, ...]
    classes: tuple[ScoreSlice, ...] = ()
    margins: tuple[ScoreSlice, ...] = ()
    pool: int = 0
    subsets: int = 0
    smallest_significant: int | None = None
    seed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def recovered(self) -> int | None:
        """Recovered samples by the deciding metric; None when nothing is calibrated."""
        return self.metrics[self.deciding].recovered

    @property
    def rule(self) -> str:
        """What counts as recovered by the deciding metric: "ncc > 0.83"; "" without a control."""
        return self.metrics[self.deciding].rule

    @property
    def expected_by_chance(self) -> float | None:
        """Samples that chance recovers by the deciding metric."""
        return self.metrics[self.deciding].expected_by_chance

    @property
    def p_value(self) -> float | None:
        """Of the permutation test by the deciding metric."""
        return self.metrics[self.deciding].p_value

    def table(self) -> str:
        """Calibrated and published numbers side by side, one metric per row, as plain text."""
        rows = [HEAD]
        for name, metric in self.metrics.items():
            sign = ">" if metric.higher_is_better else "<"
            bar = metric.published_threshold
            above = metric.above_published_threshold, metric.above_published_threshold_holdout
            rows.append(
                [
                    f"{name} *" if name == self.deciding else name,
                    _cell(metric.recovered, f"/{self.n}"),
                    *map(_cell, (metric.expected_by_chance, metric.p_value)),
                    metric.threshold,
                    "-" if bar is None else f"{sign} {bar:g}",
                    *map(_cell, (*above, metric.top10_mean, metric.best)),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "* decides", *([self.reason] if self.reason else [])])


def _cell(value: float | int | None, suffix: str = "") -> str:
    if value is None:
        return "-"
    return f"{value}{suffix}" if isinstance(value, int) else f"{value:.3g}{suffix}"
