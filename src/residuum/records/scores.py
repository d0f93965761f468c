"""Scores: how many training samples the reconstructions of an attack match, compared with chance."""

from __future__ import annotations

from dataclasses import dataclass

from residuum.records.base import Record

# Columns of the table of scores. The first columns count matches of reconstructions and samples, compared
# with held-out samples. From "published" on, the columns count as in the paper that introduced the metric.
HEAD = ["metric", "recovered", "by chance", "p", "threshold"]
HEAD += ["published", "train", "held-out", "top 10", "best"]


@dataclass(frozen=True, eq=False)
class MetricScore(Record):
    """Numbers of recovered samples according to one metric.

    Values that need a held-out set are None without a held-out set.

    Attributes:
        name: Name of the metric.
        description: The metric in words.
        higher_is_better: Whether larger values are better.
        published_threshold: Threshold for a recovered sample in the paper that introduced the metric.
        above_published_threshold: Number of training samples beyond ``published_threshold``, with the
            matching in this paper.
        top10_mean: Mean of the ten best values with the matching in the paper that introduced the metric.
        best: Best value with the matching in the paper that introduced the metric.
        median: Median of the values with the matching in the paper that introduced the metric.
        recovered: Number of samples whose one-to-one match is better than ``threshold_null99``.
        expected_by_chance: Number of samples expected to be recovered by chance.
        interval: Naive 95% Clopper-Pearson interval of ``recovered``. It treats samples as independent and
            does not subtract chance.
        p_value: p-value of the permutation test of training samples against held-out samples.
        threshold_null99: Threshold for a recovered sample: the 99th percentile of matches expected by chance.
        above_published_threshold_holdout: Number of held-out samples beyond ``published_threshold``, in a
            set as large as the training set. This is the chance level of ``above_published_threshold``.
    """

    # ``Scores.metrics`` maps names to metrics, so the JSON of a metric does not repeat the name.
    unpublished = ("name",)

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
        """The condition for a recovered sample, such as "> 0.83", or "-" without held-out samples."""
        if self.threshold_null99 is None:
            return "-"
        return f"{'>' if self.higher_is_better else '<'} {self.threshold_null99:.3g}"

    @property
    def rule(self) -> str:
        """The condition for a recovered sample, such as "ncc > 0.83", or "" without a held-out set."""
        return "" if self.threshold_null99 is None else f"{self.name} {self.threshold}"


@dataclass(frozen=True, eq=False)
class SampleMatch(Record):
    """The reconstructions that match one training sample best, according to one metric.

    Attributes:
        score: Value of the one-to-one match, or None if the sample has no match.
        candidate: Index of the candidate of the one-to-one match, or None if the sample has no match.
        recovered: Whether the one-to-one match is better than expected by chance.
        nearest: Value of the nearest candidate. Several samples may have the same nearest candidate.
        nearest_candidate: Index of the nearest candidate.
    """

    score: float | None
    candidate: int | None
    recovered: bool | None
    nearest: float | None
    nearest_candidate: int | None


@dataclass(frozen=True, eq=False)
class SampleScore(Record):
    """The scores of a training sample.

    Attributes:
        index: Row of the sample in the user's file, counted from 0.
        label: Label of the sample.
        margin: Margin of the sample: how clearly the network decides its class.
        multiplier: Multiplier of the candidate that matches the sample: the weight of the candidate's
            gradient in the sum that equals the network's weights.
        recovered: Whether the sample is recovered according to the deciding metric.
        matches: Matches of the sample by metric.
        id: Identifier of the sample from an ID column, or "" without such a column.
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
    """The number of recovered samples among those of one class, or with margins in one range."""

    name: str
    samples: int
    recovered: int | None
    rate: float | None
    median: float | None


@dataclass(frozen=True, eq=False)
class Scores(Record):
    """How many of n training samples the m candidates recover, compared with chance.

    Attributes:
        n: Number of training samples.
        m: Number of candidates.
        calibrated: Whether the counts are compared with a held-out set.
        reason: Reason why the counts are not calibrated, or "" if they are.
        deciding: The metric that decides the verdict.
        metrics: Counts by metric.
        per_sample: Scores of every training sample.
        classes: Counts by class.
        margins: Counts by quintile of the margin, smallest first.
        pool: Size of the held-out set.
        subsets: Number of random sets that the permutation test draws.
        smallest_significant: The smallest count that is significant at 1% with this held-out set.
        seed: Seed of the random subsets.
        notes: Remarks on what was omitted or could not be measured.
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
        """Number of recovered samples by the deciding metric, or None without a held-out set."""
        return self.metrics[self.deciding].recovered

    @property
    def rule(self) -> str:
        """The condition for a recovered sample, such as "ncc > 0.83", or "" without a held-out set."""
        return self.metrics[self.deciding].rule

    @property
    def expected_by_chance(self) -> float | None:
        """Number of samples that are expected to be recovered by chance.

        None without a held-out set.
        """
        return self.metrics[self.deciding].expected_by_chance

    @property
    def p_value(self) -> float | None:
        """The p-value of the number of recovered samples, None without held-out samples."""
        return self.metrics[self.deciding].p_value

    def table(self) -> str:
        """Return a text table with a row per metric.

        The first columns compare the number of recovered samples with chance. The last columns use
        the threshold and the matching of the paper that introduced the metric.
        """
        table_lines = [HEAD]
        for name, metric in self.metrics.items():
            comparison_sign = ">" if metric.higher_is_better else "<"
            published_threshold = metric.published_threshold
            counts_beyond_threshold = (
                metric.above_published_threshold,
                metric.above_published_threshold_holdout,
            )
            table_lines.append(
                [
                    f"{name} *" if name == self.deciding else name,
                    _cell(metric.recovered, f"/{self.n}"),
                    *map(_cell, (metric.expected_by_chance, metric.p_value)),
                    metric.threshold,
                    "-"
                    if published_threshold is None
                    else f"{comparison_sign} {published_threshold:g}",
                    *map(_cell, (*counts_beyond_threshold, metric.top10_mean, metric.best)),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*table_lines, strict=True)]
        padded_lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table_lines]
        return "\n".join([*padded_lines, "* decides", *([self.reason] if self.reason else [])])


def _cell(value: float | int | None, suffix: str = "") -> str:
    if value is None:
        return "-"
    return f"{value}{suffix}" if isinstance(value, int) else f"{value:.3g}{suffix}"
