"""Compare reconstructions (candidates) with training and held-out samples, by every metric.

Candidates, training samples and held-out samples are compared as the network receives them. If the training
mean were added to a candidate, the candidate would move closer to every training sample, because each
training sample contributes to the mean. Noise would then count as a leak. Only SSIM is computed on images
with the mean added, so that its values can be compared with published values. SSIM never decides a verdict.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from residuum.errors import DataError, InputError, require_known
from residuum.evaluation.matching import (
    MATCHINGS,
    METRICS,
    Array,
    Matching,
    Metric,
    ScoringData,
    are_class_labels,
    as_array,
    greedy,
    match_greedily_in_sets,
    prepare_scoring_data,
)
from residuum.evaluation.null import (
    MIN_SUBSETS,
    Calibration,
    calibrate,
    count_interval,
    estimate_floor,
    score_matches,
    smallest_significant,
)
from residuum.records.inputs import Dataset
from residuum.records.reconstruction import Reconstruction
from residuum.records.scores import MetricScore, SampleMatch, SampleScore, Scores, ScoreSlice

DECIDING = "ncc"  # the metric that decides a verdict, because it ignores brightness and contrast
BINS = 5  # the training samples are sorted by margin and divided into this number of equal parts
# Number of random sets that are matched with the candidates to estimate the duration of a permutation test.
PILOT = 16


@dataclass(frozen=True)
class _Verdict:
    """The result for one metric: counts, values, and the match of every training sample."""

    figures: MetricScore
    matches: tuple[SampleMatch, ...]


def score(
    candidates: Tensor,
    train: Dataset,
    holdout: Dataset | None,
    *,
    metrics: Sequence[str] | None = None,
    outputs: Tensor | None = None,
    multipliers: Tensor | None = None,
    match_labels: bool = True,
    seed: int = 0,
    subsets: int = 500,
    seconds: float = math.inf,
    calibration: Calibration | None = None,
    deciding: Metric = METRICS[DECIDING],
) -> Scores:
    """Score reconstructed candidates against the training set, with a held-out set as the chance level.

    Args:
        candidates: (m, *shape) candidates as the network receives them, without an added mean.
        train: Training set.
        holdout: Held-out set, or None.
        metrics: Keys of ``METRICS``. By default all metrics that can score these samples. The deciding metric
            is always included.
        outputs: (n,) or (n, k) outputs of the network for the training samples, to compute their margins.
        multipliers: (m,) or (m, k) multipliers of the candidates, the weights of their gradients in the KKT
            conditions.
        match_labels: Whether random subsets have the label counts of the training set, if possible.
        seed: Seed of the random subsets.
        subsets: Number of random subsets for the permutation test.
        seconds: Time budget. If it is too short, the deciding metric draws fewer subsets and other metrics
            are skipped.
        calibration: Chance level of the same candidates under the deciding metric, if it is already known.
        deciding: The metric that decides whether a sample is recovered.

    Returns:
        The scores under every metric, for every sample, class and slice by margin.
    """
    start_time = time.monotonic()
    subset_count = subsets
    notes: list[str] = []
    chosen_metrics = _select_metrics(metrics, train.shape, notes, deciding)
    scoring_data = prepare_scoring_data(
        candidates,
        train,
        holdout,
        notes,
        seed=seed,
        match_labels=match_labels,
    )
    verdicts: dict[str, _Verdict] = {}
    for metric in chosen_metrics:
        if metric.name != deciding.name and time.monotonic() - start_time >= seconds:
            notes.append(f"{metric.name} skipped: time budget exhausted")
            continue
        try:
            similarities = scoring_data.gain(metric)
            if calibration is not None and metric.name == deciding.name:
                verdicts[deciding.name] = _judge(metric, scoring_data, similarities, calibration)
                subset_count = len(calibration.chance)
                continue
            cost = (
                _cost(metric, scoring_data, similarities, seed)
                if seconds < math.inf
                else PermutationTestCost(0.0, 0.0)
            )
            remaining_seconds = seconds - (time.monotonic() - start_time)
            if metric.name == deciding.name:
                subset_count = cost.count_subsets(subsets, remaining_seconds)
                if subset_count < subsets:
                    notes.append(
                        f"{subset_count} of {subsets} subsets drawn: time budget exhausted"
                    )
            elif cost.seconds_for(subset_count) > remaining_seconds:
                estimated_time = f"{cost.seconds_for(subset_count):.0f} s"
                notes.append(f"{metric.name} skipped: it needs about {estimated_time}")
                continue
            chance_level = (
                calibrate_metric(metric, scoring_data, similarities, seed, subset_count)
                if scoring_data.holdout_size
                else None
            )
            verdicts[metric.name] = _judge(metric, scoring_data, similarities, chance_level)
        except Exception as problem:
            if not metric.is_plugin:
                raise
            notes.append(f"{metric.name} failed: {type(problem).__name__}: {problem}"[:300])
    sample_scores = _per_sample(train, verdicts, outputs, multipliers, deciding.name)
    return Scores(
        n=len(train),
        m=len(candidates),
        calibrated=scoring_data.holdout_size > 0,
        reason=scoring_data.reason,
        deciding=deciding.name,
        metrics={name: verdict.figures for name, verdict in verdicts.items()},
        per_sample=sample_scores,
        classes=by_class(train, sample_scores, deciding.name),
        margins=by_margin(sample_scores, deciding.name),
        pool=scoring_data.holdout_size,
        subsets=subset_count if scoring_data.holdout_size else 0,
        smallest_significant=smallest_significant(scoring_data.n, scoring_data.holdout_size)
        if scoring_data.holdout_size
        else None,
        seed=seed,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class PermutationTestCost:
    """The time that a permutation test takes.

    A test with B random subsets matches 2 B sets: B random subsets of all samples and B random held-out sets.

    Attributes:
        setup: Seconds before the first set is matched.
        per_set: Seconds for the matching of one set.
    """

    setup: float
    per_set: float

    def seconds_for(self, subsets: int) -> float:
        """Return the seconds that a test with this number of random subsets takes."""
        return self.setup + 2 * subsets * self.per_set

    def count_subsets(self, subsets: int, seconds: float) -> int:
        """Return how many random subsets fit into a time budget, but never fewer than a test needs.

        Args:
            subsets: Maximum number of subsets.
            seconds: Time budget.

        Returns:
            The number of subsets.
        """
        if self.seconds_for(subsets) <= seconds:
            return subsets
        # On a busy machine, matching several sets may seem no slower than matching one set. Then the time per
        # set is unknown and stored as 0, so the smallest number of subsets is used.
        affordable_subsets = (
            int((seconds - self.setup) / (2 * self.per_set)) if self.per_set > 0 else MIN_SUBSETS
        )
        return min(subsets, max(MIN_SUBSETS, affordable_subsets))


def count_affordable_subsets(
    problems: Sequence[tuple[Metric, ScoringData, Array]],
    seed: int,
    subsets: int,
    seconds: float,
) -> int:
    """Return the number of random subsets for which several permutation tests have enough time.

    Args:
        problems: Metric, data and (m, n + N) similarities of every permutation test. All tests use the same
            subsets.
        seed: Seed of the sets that are matched to measure the time.
        subsets: Maximum number of subsets.
        seconds: Time budget of all tests together.

    Returns:
        The number of subsets, never fewer than a permutation test needs.
    """
    if seconds == math.inf:
        return subsets
    costs = [_cost(metric, data, gain, seed) for metric, data, gain in problems]
    total_cost = PermutationTestCost(
        sum(cost.setup for cost in costs), sum(cost.per_set for cost in costs)
    )
    return total_cost.count_subsets(subsets, seconds)


def _cost(metric: Metric, data: ScoringData, gain: Array, seed: int) -> PermutationTestCost:
    """Estimate how long a permutation test takes, by measuring the time for a few random held-out sets."""
    if not data.holdout_size:
        return PermutationTestCost(0.0, 0.0)
    rng, durations = np.random.default_rng((seed, 3)), []
    value, similarity_floor = data.value_of(metric), -np.inf
    # Measure the time to match one random set, and then 1 + ``PILOT`` sets. The difference gives the time
    # for each set.
    for count in (1, 1 + PILOT):
        start_time = time.monotonic()
        random_keys = rng.random((count, data.holdout_size))
        sets = data.n + np.argsort(random_keys, axis=1)[:, : data.n]
        similarity_floor = estimate_floor(gain, value, sets) if count == 1 else similarity_floor
        score_matches(gain, value, match_greedily_in_sets(gain, sets, similarity_floor), sets)
        durations.append(time.monotonic() - start_time)
    return PermutationTestCost(durations[0], max(0.0, durations[1] - durations[0]) / PILOT)


def calibrate_metric(
    metric: Metric, data: ScoringData, gain: Array, seed: int, subsets: int
) -> Calibration:
    """Compute from held-out samples how well the candidates match samples by chance.

    Args:
        metric: The metric to score by.
        data: Candidates, training samples and held-out samples.
        gain: (m, n + N) similarities from :meth:`ScoringData.gain`.
        seed: Seed of the random subsets. The same seed draws the same subsets for all candidates.
        subsets: Number of random subsets.

    Returns:
        The matches, the chance level and the permutation test.
    """
    value, rng = data.value_of(metric), np.random.default_rng(seed)
    return calibrate(gain, data.n, value=value, strata=data.strata, subsets=subsets, rng=rng)


def _judge(
    metric: Metric, data: ScoringData, gain: Array, calibration: Calibration | None
) -> _Verdict:
    """Return a summary of one metric, and the match of every training sample under this metric.

    Samples are matched twice: by the matching of the paper that introduced the metric, and one-to-one.
    """
    all_sample_indices = np.arange(data.n)
    match_as_published = MATCHINGS[metric.published_matching]
    published_matches = data.match_and_score(metric, gain, all_sample_indices, match_as_published)
    metric_summary = _summarize_matches(metric, published_matches)
    if calibration is None:
        one_to_one_matches = data.match_and_score(metric, gain, all_sample_indices, greedy)
        return _Verdict(
            metric_summary, _matches(metric, data, one_to_one_matches, published_matches, None)
        )
    holdout_summary = _summarize_matches(
        metric, data.match_and_score(metric, gain, calibration.reference, match_as_published)
    )
    recovered_count = int(calibration.recovered.sum())
    metric_summary = metric_summary.replace(
        recovered=recovered_count,
        expected_by_chance=calibration.expected_by_chance,
        interval=count_interval(recovered_count, data.n),
        p_value=calibration.p_value,
        threshold_null99=_number(metric, calibration.threshold),
        above_published_threshold_holdout=holdout_summary.above_published_threshold,
    )
    one_to_one_matches = Matching(calibration.candidate, calibration.value)
    return _Verdict(
        metric_summary,
        _matches(metric, data, one_to_one_matches, published_matches, calibration.recovered),
    )


def _summarize_matches(metric: Metric, matching: Matching) -> MetricScore:
    """Summarize the values of matches: count beyond the published threshold, best value, mean and median."""
    sorted_values = np.sort(matching.value[matching.value > -np.inf])[::-1]
    threshold, count_above_threshold = metric.published_threshold, None
    if threshold is not None:
        count_above_threshold = int(
            (sorted_values > (threshold if metric.higher_is_better else -threshold)).sum()
        )
    top_best_and_median = (
        [sorted_values[:10].mean(), sorted_values[0], np.median(sorted_values)]
        if len(sorted_values)
        else [np.nan] * 3
    )
    top, best, median = (_number(metric, value) for value in top_best_and_median)
    name_and_description = metric.name, metric.description, metric.higher_is_better
    return MetricScore(*name_and_description, threshold, count_above_threshold, top, best, median)


def _matches(
    metric: Metric,
    data: ScoringData,
    one_to_one: Matching,
    published: Matching,
    recovered: Array | None,
) -> tuple[SampleMatch, ...]:
    return tuple(
        SampleMatch(
            score=_number(metric, one_to_one.value[i]),
            candidate=data.find_original(one_to_one.candidate[i]),
            recovered=None if recovered is None else bool(recovered[i]),
            nearest=_number(metric, published.value[i]),
            nearest_candidate=data.find_original(published.candidate[i]),
        )
        for i in range(data.n)
    )


def _per_sample(
    train: Dataset,
    verdicts: dict[str, _Verdict],
    outputs: Tensor | None,
    multipliers: Tensor | None,
    deciding: str,
) -> tuple[SampleScore, ...]:
    sample_margins = None if outputs is None else margins(outputs, train.y)
    candidate_multipliers = (
        None if multipliers is None else as_array(multipliers.reshape(len(multipliers), -1).sum(1))
    )
    labels = train.y.long().tolist() if are_class_labels(train.y) else None
    row_numbers, rows = train.rows, []
    for i in range(len(train)):
        deciding_match = verdicts[deciding].matches[i]
        candidate = deciding_match.candidate
        rows.append(
            SampleScore(
                index=row_numbers[i],
                id=train.record_ids[i] if train.record_ids else "",
                label=None if labels is None else labels[i],
                margin=None if sample_margins is None else float(sample_margins[i]),
                multiplier=None
                if candidate_multipliers is None or candidate is None
                else float(candidate_multipliers[candidate]),
                recovered=deciding_match.recovered,
                matches={name: verdict.matches[i] for name, verdict in verdicts.items()},
            )
        )
    return tuple(rows)


def _select_metrics(
    names: Sequence[str] | None, shape: tuple[int, ...], notes: list[str], deciding: Metric
) -> tuple[Metric, ...]:
    """Return the metric that decides the verdict, followed by the metrics with the given names.

    If ``names`` is None, all metrics that can score samples of this shape are returned.

    Raises:
        InputError: If a named metric does not exist or cannot score samples of this shape.
    """
    for name in names or ():
        require_known(name, METRICS, "There is no metric")
        if reason := METRICS[name].why_not(shape):
            raise InputError(
                f"Each metric in the argument 'metrics' must suit the samples. The metric {name!r} cannot "
                f"be used: it {reason}.",
                f"Remove {name!r} from 'metrics'.",
            )
    if names is None:
        reasons_to_skip = {name: metric.why_not(shape) for name, metric in METRICS.items()}
        notes += [
            f"{name} skipped: it {reason}" for name, reason in reasons_to_skip.items() if reason
        ]
        names = [name for name, reason in reasons_to_skip.items() if not reason]
    return (deciding, *(METRICS[name] for name in dict.fromkeys(names) if name != deciding.name))


def _number(metric: Metric, oriented: float) -> float | None:
    """Return the value of a metric with its original sign, None if it is not finite."""
    if not np.isfinite(oriented):
        return None
    return float(oriented if metric.higher_is_better else -oriented)


def margins(outputs: Tensor, y: Tensor) -> Tensor | None:
    """Return the margins of samples, i.e. how clearly the network decides each sample.

    With one output, the margin is the output times the label, where labels 0/1 are read as -1/+1. With
    several outputs, it is the output of the sample's class minus the largest other output.

    Args:
        outputs: (n,) or (n, k) outputs of the network.
        y: (n,) labels.

    Returns:
        (n,) margins, or None for regression targets.

    Raises:
        DataError: If outputs and labels do not fit together.
    """
    outputs, y = outputs.detach().cpu().double(), y.cpu()
    if len(outputs) != len(y):
        raise DataError(
            f"The argument 'outputs' (outputs of the network) must have one row for each training sample; "
            f"got {len(outputs)} rows for {len(y)} samples.",
            "Pass the outputs of the network for the samples 'train.x'.",
        )
    if not are_class_labels(y):
        return None
    outputs = outputs.reshape(len(outputs), -1)
    if outputs.shape[1] == 1:
        signs = torch.where(y > 0, 1.0, -1.0)
        return signs * outputs[:, 0] if len(y.unique()) <= 2 else None
    if y.min() < 0 or y.max() >= outputs.shape[1]:
        raise DataError(
            f"Labels must be class numbers from 0 to {outputs.shape[1] - 1}, one for each output of the "
            f"network; got labels from {int(y.min())} to {int(y.max())}.",
            "Number the classes from 0 in the order of the outputs.",
        )
    is_own_class = torch.zeros_like(outputs, dtype=torch.bool)
    is_own_class[torch.arange(len(y)), y.long()] = True
    return outputs[is_own_class] - outputs.masked_fill(is_own_class, -torch.inf).amax(1)


def by_class(train: Dataset, rows: tuple[SampleScore, ...], metric: str) -> tuple[ScoreSlice, ...]:
    """Summarize the scores of the training samples of each label.

    Args:
        train: Training set.
        rows: Scores of the training samples.
        metric: Name of the metric.

    Returns:
        A summary for each label, in ascending order. There are none for regression targets.
    """
    labels = sorted({row.label for row in rows if row.label is not None})
    rows_by_label = [[row for row in rows if row.label == label] for label in labels]
    label_names = [label_name(label, train) for label in labels]
    names_and_rows = zip(label_names, rows_by_label, strict=True)
    return tuple(_slice(name, members, metric) for name, members in names_and_rows)


def label_name(label: float | int, train: Dataset) -> str:
    """Return the name of a class, or its number if the training set has no class names.

    Args:
        label: Class index, or -1/+1 for two classes.
        train: Training set.

    Returns:
        The name or the number of the class.
    """
    class_index = int(label > 0) if len(train.classes) == 2 and label in (-1, 1) else int(label)
    return train.classes[class_index] if 0 <= class_index < len(train.classes) else f"{label:g}"


def by_margin(rows: tuple[SampleScore, ...], metric: str) -> tuple[ScoreSlice, ...]:
    """Summarize the scores of equally large slices of the training samples, smallest margins first.

    Args:
        rows: Scores of the training samples.
        metric: Name of the metric.

    Returns:
        A summary for each slice. There are none if the margins of the samples are unknown.
    """
    ordered_rows = sorted(
        (row for row in rows if row.margin is not None), key=lambda row: row.margin or 0
    )
    if not ordered_rows:
        return ()
    slice_positions = np.array_split(np.arange(len(ordered_rows)), min(BINS, len(ordered_rows)))
    slices = []
    for positions in slice_positions:
        rows_in_slice = [ordered_rows[i] for i in positions]
        margin_range = f"{rows_in_slice[0].margin:.4g} .. {rows_in_slice[-1].margin:.4g}"
        slices.append(_slice(margin_range, rows_in_slice, metric))
    return tuple(slices)


def _slice(name: str, rows: list[SampleScore], metric: str) -> ScoreSlice:
    recovered_flags = [row.recovered for row in rows if row.recovered is not None]
    scores = [match.score for row in rows if (match := row.matches[metric]).score is not None]
    count, rate = (
        (sum(recovered_flags), sum(recovered_flags) / len(rows))
        if recovered_flags
        else (None, None)
    )
    return ScoreSlice(name, len(rows), count, rate, float(np.median(scores)) if scores else None)


class CandidatePool(NamedTuple):
    """Candidates of one or more attacks, with their multipliers (weights of their gradients).

    Attributes:
        x: (m, *shape) candidates.
        lam: (m,) sum of the multipliers of each candidate.
    """

    x: Tensor
    lam: Tensor


def all_candidates(reconstruction: Reconstruction) -> CandidatePool:
    """Collect all candidates (guesses of samples) of an attack, and the means of similar ones."""
    x, lam = reconstruction.x, reconstruction.weight
    if (selection := reconstruction.selection) is not None:
        is_group_mean = selection.members > 1
        x = torch.cat([x, selection.x[is_group_mean].to(x)])
        lam = torch.cat([lam, selection.lam[is_group_mean].to(lam)])
    return CandidatePool(x, lam)


def selected_candidates(reconstruction: Reconstruction) -> CandidatePool:
    """Return the selected candidates of a reconstruction that several restarts (runs) found.

    If no candidate was found by several restarts, all selected candidates are returned.
    """
    selection = reconstruction.selection
    if selection is None:
        return CandidatePool(reconstruction.x[:0], reconstruction.weight[:0])
    is_supported = selection.support > 1
    is_selected = is_supported if bool(is_supported.any()) else torch.ones_like(is_supported)
    return CandidatePool(selection.x[is_selected], selection.lam[is_selected])


def join_pools(pools: list[CandidatePool]) -> CandidatePool:
    """Combine the candidates (guesses of samples) of several attacks, so that one test judges them."""
    return CandidatePool(
        torch.cat([pool.x.double() for pool in pools]),
        torch.cat([pool.lam.double() for pool in pools]),
    )
