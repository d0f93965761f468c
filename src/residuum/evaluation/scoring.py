"""Candidates against the training set and its held-out control, under every metric.

Candidates, training and held-out samples are compared as the network receives them. Adding the
training mean to a candidate would bring it closer to every training sample, each of which is part
of that mean, and so count noise as a leak. Only the published SSIM figures are computed on
displayed images, mean added, to stand beside the published numbers; they never decide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from residuum.errors import InputError, did_you_mean
from residuum.evaluation.field import Field, lay_out
from residuum.evaluation.matching import (
    MATCHINGS,
    Array,
    Matching,
    as_array,
    greedy,
    greedy_in_sets,
)
from residuum.evaluation.metrics import METRICS, Metric
from residuum.evaluation.null import (
    MIN_SUBSETS,
    calibrate,
    count_interval,
    matched_values,
    smallest_significant,
)
from residuum.evaluation.slices import by_class, by_margin, discrete, margins
from residuum.records.data import Dataset
from residuum.records.scores import MetricScore, SampleMatch, SampleScore, Scores

DECIDING = "ncc"
PILOT = 16  # sets that a control is timed on before it is drawn


@dataclass(frozen=True)
class _Verdict:
    """One metric's row, and its match for every training sample."""

    figures: MetricScore
    matches: tuple[SampleMatch, ...]


def score(
    candidates: Tensor,
    train: Dataset,
    holdout: Dataset | None,
    *,
    candidate_labels: Tensor | None = None,
    metrics: Sequence[str] | None = None,
    outputs: Tensor | None = None,
    multipliers: Tensor | None = None,
    match_labels: bool = True,
    same_label: bool = False,
    seed: int = 0,
    subsets: int = 500,
    seconds: float = math.inf,
    before: Scores | None = None,
) -> Scores:
    """Score ``candidates`` (m, *shape), given as the network receives them: no mean added.

    metrics: keys of ``METRICS``, all that apply by default, always with the deciding one; outputs:
    (n,) or (n, k) what the network says of the training samples, for their margins; multipliers:
    (m,) or (m, k) of the candidates; match_labels: held-out subsets have the training set's label
    counts, where the pool allows; same_label: a candidate matches samples of its own label only;
    seconds: the deciding metric draws fewer subsets where all would take longer, and other metrics
    are left out; before: scores of the same candidates by the deciding metric alone, kept as they are.
    """
    start = time.monotonic()
    notes: list[str] = []
    chosen = _choose(metrics, train.shape, notes)
    field = lay_out(
        candidates,
        train,
        holdout,
        candidate_labels=candidate_labels,
        match_labels=match_labels,
        same_label=same_label,
        seed=seed,
        notes=notes,
    )
    judged: dict[str, _Verdict] = {}
    if before is not None:
        matches = tuple(row.matches[DECIDING] for row in before.per_sample)
        judged[DECIDING], subsets = _Verdict(before.metrics[DECIDING], matches), before.subsets
        notes[:] = before.notes
    for metric in chosen[len(judged) :]:
        try:
            gain = field.gain(metric)
            cost = _cost(metric, field, gain, seed) if seconds < math.inf else _Cost(0.0, 0.0)
            left = seconds - (time.monotonic() - start)
            if metric.name == DECIDING:
                wanted, subsets = subsets, cost.affordable(subsets, left)
                if subsets < wanted:
                    notes.append(f"{subsets} of {wanted} subsets drawn, for want of time")
            elif cost.of(subsets) > left:
                notes.append(
                    f"{metric.name} left out, for want of time: about {cost.of(subsets):.0f} s"
                )
                continue
            judged[metric.name] = _judge(metric, field, gain, seed, subsets)
        except Exception as problem:
            if not metric.outside:
                raise
            notes.append(f"{metric.name} failed: {type(problem).__name__}: {problem}"[:300])
    per_sample = _per_sample(train, judged, outputs, multipliers)
    return Scores(
        n=len(train),
        m=len(candidates),
        calibrated=field.pool > 0,
        reason=field.reason,
        deciding=DECIDING,
        metrics={name: verdict.figures for name, verdict in judged.items()},
        per_sample=per_sample,
        classes=by_class(train, per_sample, DECIDING),
        margins=by_margin(per_sample, DECIDING),
        pool=field.pool,
        subsets=subsets if field.pool else 0,
        smallest_significant=smallest_significant(field.n, field.pool) if field.pool else None,
        seed=seed,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Cost:
    """Seconds of a control: once, and for every set that is matched (two sets to a subset)."""

    once: float
    each: float

    def of(self, subsets: int) -> float:
        return self.once + 2 * subsets * self.each

    def affordable(self, subsets: int, seconds: float) -> int:
        """As many subsets as fit, never fewer than a control needs."""
        if self.of(subsets) <= seconds:
            return subsets
        # On a busy machine a few sets can take no longer than the first: then nothing is known.
        fit = int((seconds - self.once) / (2 * self.each)) if self.each > 0 else MIN_SUBSETS
        return min(subsets, max(MIN_SUBSETS, fit))


def _cost(metric: Metric, field: Field, gain: Array, seed: int) -> _Cost:
    """Timed on one held-out set and on a few."""
    if not field.pool:
        return _Cost(0.0, 0.0)
    rng, took = np.random.default_rng((seed, 3)), []
    for count in (1, 1 + PILOT):
        start = time.monotonic()
        keys = rng.random((count, field.pool))
        sets = field.n + np.argsort(keys, axis=1)[:, : field.n]
        matched_values(gain, field.value_of(metric), greedy_in_sets(gain, sets), sets)
        took.append(time.monotonic() - start)
    return _Cost(took[0], max(0.0, took[1] - took[0]) / PILOT)


def _judge(metric: Metric, field: Field, gain: Array, seed: int, subsets: int) -> _Verdict:
    """Match by one metric, the published way and the calibrated way."""
    everyone = np.arange(field.n)
    published = MATCHINGS[metric.published_matching]
    nearest = field.scored(metric, gain, everyone, published)
    figures = _published(metric, nearest)
    if not field.pool:
        own = field.scored(metric, gain, everyone, greedy)
        return _Verdict(figures, _matches(metric, field, own, nearest, None))
    control = calibrate(
        gain,
        field.n,
        value=field.value_of(metric),
        strata=field.strata,
        subsets=subsets,
        rng=np.random.default_rng(seed),  # the same subsets for every metric
    )
    chance = _published(metric, field.scored(metric, gain, control.reference, published))
    count = int(control.recovered.sum())
    figures = figures.replace(
        recovered=count,
        expected_by_chance=control.expected_by_chance,
        interval=count_interval(count, field.n),
        p_value=control.p_value,
        threshold_null99=_number(metric, control.threshold),
        above_published_threshold_holdout=chance.above_published_threshold,
    )
    own = Matching(control.candidate, control.value)
    return _Verdict(figures, _matches(metric, field, own, nearest, control.recovered))


def _published(metric: Metric, nearest: Matching) -> MetricScore:
    """The figures that need no control."""
    values = np.sort(nearest.value[nearest.value > -np.inf])[::-1]
    bar = metric.published_threshold
    oriented_bar = bar if bar is None or metric.higher_is_better else -bar
    return MetricScore(
        name=metric.name,
        description=metric.description,
        higher_is_better=metric.higher_is_better,
        published_threshold=bar,
        above_published_threshold=None
        if oriented_bar is None
        else int((values > oriented_bar).sum()),
        top10_mean=_number(metric, values[:10].mean()) if len(values) else None,
        best=_number(metric, values[0]) if len(values) else None,
        median=_number(metric, np.median(values)) if len(values) else None,
    )


def _matches(
    metric: Metric, field: Field, own: Matching, nearest: Matching, recovered: Array | None
) -> tuple[SampleMatch, ...]:
    return tuple(
        SampleMatch(
            score=_number(metric, own.value[i]),
            candidate=field.original(own.candidate[i]),
            recovered=None if recovered is None else bool(recovered[i]),
            nearest=_number(metric, nearest.value[i]),
            nearest_candidate=field.original(nearest.candidate[i]),
        )
        for i in range(field.n)
    )


def _per_sample(
    train: Dataset,
    judged: dict[str, _Verdict],
    outputs: Tensor | None,
    multipliers: Tensor | None,
) -> tuple[SampleScore, ...]:
    margin = None if outputs is None else margins(outputs, train.y)
    lam = (
        None if multipliers is None else as_array(multipliers.reshape(len(multipliers), -1).sum(1))
    )
    label = train.y.long().tolist() if discrete(train.y) else None
    rows = []
    for i in range(len(train)):
        decided = judged[DECIDING].matches[i]
        taken = decided.candidate
        rows.append(
            SampleScore(
                index=i,
                label=None if label is None else label[i],
                margin=None if margin is None else float(margin[i]),
                multiplier=None if lam is None or taken is None else float(lam[taken]),
                recovered=decided.recovered,
                matches={name: verdict.matches[i] for name, verdict in judged.items()},
            )
        )
    return tuple(rows)


def _choose(
    names: Sequence[str] | None, shape: tuple[int, ...], notes: list[str]
) -> tuple[Metric, ...]:
    """The metrics asked for, the deciding one among them; by default all that apply."""
    for name in names or ():
        if name not in METRICS:
            raise InputError(f"There is no metric {name!r}.", did_you_mean(name, list(METRICS)))
        if why := METRICS[name].why_not(shape):
            raise InputError(f"Metric {name!r} {why}.", "Leave it out of metrics=(...).")
    if names is None:
        notes += [f"{name} left out: it {why}" for name, why in _reasons(shape).items() if why]
        names = [name for name, why in _reasons(shape).items() if not why]
    return tuple(METRICS[name] for name in dict.fromkeys([DECIDING, *names]))


def _reasons(shape: tuple[int, ...]) -> dict[str, str]:
    return {name: metric.why_not(shape) for name, metric in METRICS.items()}


def _number(metric: Metric, oriented: float) -> float | None:
    """A value in the metric's own direction again; None where there was none."""
    if not np.isfinite(oriented):
        return None
    return float(oriented if metric.higher_is_better else -oriented)
