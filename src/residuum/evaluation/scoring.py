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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from residuum.errors import DataError, InputError, require_known
from residuum.evaluation.matching import (
    MATCHINGS,
    METRICS,
    Array,
    Field,
    Matching,
    Metric,
    as_array,
    discrete,
    greedy,
    greedy_in_sets,
    lay_out,
)
from residuum.evaluation.null import (
    MIN_SUBSETS,
    Calibration,
    calibrate,
    count_interval,
    matched_values,
    safe_floor,
    smallest_significant,
)
from residuum.records.inputs import Dataset
from residuum.records.reconstruction import Reconstruction
from residuum.records.scores import MetricScore, SampleMatch, SampleScore, Scores, ScoreSlice

DECIDING = "ncc"  # of the verdict: ignores brightness and contrast
BINS = 5  # equally large slices of the samples, by margin
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
    metrics: Sequence[str] | None = None,
    outputs: Tensor | None = None,
    multipliers: Tensor | None = None,
    match_labels: bool = True,
    seed: int = 0,
    subsets: int = 500,
    seconds: float = math.inf,
    before: Calibration | None = None,
) -> Scores:
    """Score ``candidates`` (m, *shape), given as the network receives them: no mean added.

    metrics: keys of ``METRICS``, all that apply by default, always with the deciding one.
    outputs: (n,) or (n, k) what the network says of the training samples, for their margins.
    multipliers: (m,) or (m, k) of the candidates.
    match_labels: held-out subsets have the training set's label counts, where the pool allows.
    seconds: the deciding metric draws fewer subsets where all would take longer, and other metrics
        are left out.
    before: what the control said of the same candidates by the deciding metric.
    """
    start = time.monotonic()
    notes: list[str] = []
    chosen = _choose(metrics, train.shape, notes)
    field = lay_out(
        candidates,
        train,
        holdout,
        notes,
        seed=seed,
        match_labels=match_labels,
    )
    judged: dict[str, _Verdict] = {}
    for metric in chosen:
        if metric.name != DECIDING and time.monotonic() - start >= seconds:
            notes.append(f"{metric.name} left out, for want of time")
            continue
        try:
            gain = field.gain(metric)
            if before is not None and metric.name == DECIDING:
                judged[DECIDING], subsets = _judge(metric, field, gain, before), len(before.chance)
                continue
            cost = _cost(metric, field, gain, seed) if seconds < math.inf else _Cost(0.0, 0.0)
            left = seconds - (time.monotonic() - start)
            if metric.name == DECIDING:
                wanted, subsets = subsets, cost.affordable(subsets, left)
                if subsets < wanted:
                    notes.append(f"{subsets} of {wanted} subsets drawn, for want of time")
            elif cost.of(subsets) > left:
                about = f"about {cost.of(subsets):.0f} s"
                notes.append(f"{metric.name} left out, for want of time: {about}")
                continue
            control = control_of(metric, field, gain, seed, subsets) if field.pool else None
            judged[metric.name] = _judge(metric, field, gain, control)
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


def affordable(
    parts: Sequence[tuple[Metric, Field, Array]],
    seed: int,
    subsets: int,
    seconds: float,
) -> int:
    """As many common subsets as all parts can be judged by within ``seconds``.

    Never fewer than a control needs.
    """
    if seconds == math.inf:
        return subsets
    costs = [_cost(*part, seed) for part in parts]
    total = _Cost(sum(one.once for one in costs), sum(one.each for one in costs))
    return total.affordable(subsets, seconds)


def _cost(metric: Metric, field: Field, gain: Array, seed: int) -> _Cost:
    """Timed on one held-out set and on a few."""
    if not field.pool:
        return _Cost(0.0, 0.0)
    rng, took = np.random.default_rng((seed, 3)), []
    value, floor = field.value_of(metric), -np.inf
    for count in (1, 1 + PILOT):
        start = time.monotonic()
        keys = rng.random((count, field.pool))
        sets = field.n + np.argsort(keys, axis=1)[:, : field.n]
        floor = safe_floor(gain, value, sets) if count == 1 else floor
        matched_values(gain, value, greedy_in_sets(gain, sets, floor), sets)
        took.append(time.monotonic() - start)
    return _Cost(took[0], max(0.0, took[1] - took[0]) / PILOT)


def control_of(metric: Metric, field: Field, gain: Array, seed: int, subsets: int) -> Calibration:
    """What the held-out pool says of the candidates; one seed draws the same subsets for all."""
    value, rng = field.value_of(metric), np.random.default_rng(seed)
    return calibrate(gain, field.n, value=value, strata=field.strata, subsets=subsets, rng=rng)


def _judge(metric: Metric, field: Field, gain: Array, control: Calibration | None) -> _Verdict:
    """Match by one metric, the published way and the calibrated way."""
    everyone = np.arange(field.n)
    published = MATCHINGS[metric.published_matching]
    nearest = field.scored(metric, gain, everyone, published)
    figures = _published(metric, nearest)
    if control is None:
        own = field.scored(metric, gain, everyone, greedy)
        return _Verdict(figures, _matches(metric, field, own, nearest, None))
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
    bar, above = metric.published_threshold, None
    if bar is not None:
        above = int((values > (bar if metric.higher_is_better else -bar)).sum())
    of = [values[:10].mean(), values[0], np.median(values)] if len(values) else [np.nan] * 3
    top, best, median = (_number(metric, value) for value in of)
    about = metric.name, metric.description, metric.higher_is_better
    return MetricScore(*about, bar, above, top, best, median)


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
    train: Dataset, judged: dict[str, _Verdict], outputs: Tensor | None, multipliers: Tensor | None
) -> tuple[SampleScore, ...]:
    margin = None if outputs is None else margins(outputs, train.y)
    lam = (
        None if multipliers is None else as_array(multipliers.reshape(len(multipliers), -1).sum(1))
    )
    label = train.y.long().tolist() if discrete(train.y) else None
    numbers, rows = train.rows, []
    for i in range(len(train)):
        decided = judged[DECIDING].matches[i]
        taken = decided.candidate
        rows.append(
            SampleScore(
                index=numbers[i],
                id=train.record_ids[i] if train.record_ids else "",
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
        require_known(name, METRICS, "There is no metric")
        if why := METRICS[name].why_not(shape):
            raise InputError(f"Metric {name!r} {why}.", "Leave it out of metrics=(...).")
    if names is None:
        reasons = {name: metric.why_not(shape) for name, metric in METRICS.items()}
        notes += [f"{name} left out: it {why}" for name, why in reasons.items() if why]
        names = [name for name, why in reasons.items() if not why]
    return tuple(METRICS[name] for name in dict.fromkeys([DECIDING, *names]))


def _number(metric: Metric, oriented: float) -> float | None:
    """A value in the metric's own direction again; None where there was none."""
    if not np.isfinite(oriented):
        return None
    return float(oriented if metric.higher_is_better else -oriented)


def margins(outputs: Tensor, y: Tensor) -> Tensor | None:
    """How clearly the network decides each sample; None for regression targets. (n,).

    One output: m_i = y_i Phi(x_i), y in -1/+1 (0/1 is read as such). Several: the output of the
    sample's class less the largest other one.
    """
    outputs, y = outputs.detach().cpu().double(), y.cpu()
    if len(outputs) != len(y):
        raise DataError(
            f"outputs need one row per training sample; got {len(outputs)} for {len(y)}.",
            "Give what the network says of train.x.",
        )
    if not discrete(y):
        return None
    outputs = outputs.reshape(len(outputs), -1)
    if outputs.shape[1] == 1:
        signs = torch.where(y > 0, 1.0, -1.0)
        return signs * outputs[:, 0] if len(y.unique()) <= 2 else None
    if y.min() < 0 or y.max() >= outputs.shape[1]:
        raise DataError(
            f"Labels must index the {outputs.shape[1]} outputs; they run from {int(y.min())} "
            f"to {int(y.max())}.",
            "Number the classes from 0.",
        )
    own = torch.zeros_like(outputs, dtype=torch.bool)
    own[torch.arange(len(y)), y.long()] = True
    return outputs[own] - outputs.masked_fill(own, -torch.inf).amax(1)


def by_class(train: Dataset, rows: tuple[SampleScore, ...], metric: str) -> tuple[ScoreSlice, ...]:
    """One slice per label, in order; none for regression targets."""
    labels = sorted({row.label for row in rows if row.label is not None})
    parts = [[row for row in rows if row.label == label] for label in labels]
    named = [label_name(label, train) for label in labels]
    return tuple(_slice(*part, metric) for part in zip(named, parts, strict=True))


def label_name(label: float | int, train: Dataset) -> str:
    """The class's own name where the data has one."""
    at = int(label > 0) if len(train.classes) == 2 and label in (-1, 1) else int(label)
    return train.classes[at] if 0 <= at < len(train.classes) else f"{label:g}"


def by_margin(rows: tuple[SampleScore, ...], metric: str) -> tuple[ScoreSlice, ...]:
    """Equally large slices by margin, smallest margins first; none where margins are unknown."""
    known = sorted((row for row in rows if row.margin is not None), key=lambda row: row.margin or 0)
    if not known:
        return ()
    parts = np.array_split(np.arange(len(known)), min(BINS, len(known)))
    slices = []
    for part in parts:
        some = [known[i] for i in part]
        name = f"{some[0].margin:.4g} .. {some[-1].margin:.4g}"
        slices.append(_slice(name, some, metric))
    return tuple(slices)


def _slice(name: str, rows: list[SampleScore], metric: str) -> ScoreSlice:
    flags = [row.recovered for row in rows if row.recovered is not None]
    values = [m.score for row in rows if (m := row.matches[metric]).score is not None]
    count, rate = (sum(flags), sum(flags) / len(rows)) if flags else (None, None)
    return ScoreSlice(name, len(rows), count, rate, float(np.median(values)) if values else None)


class CandidatePool(NamedTuple):
    """Candidates (m, *shape) with their total multipliers (m,)."""

    x: Tensor
    lam: Tensor


def whole_pool(reconstruction: Reconstruction) -> CandidatePool:
    """Return every candidate, as the published counts pool them, and the means of groups of them."""
    x, lam = reconstruction.x, reconstruction.weight
    if (selection := reconstruction.selection) is not None:
        is_mean = selection.members > 1
        x = torch.cat([x, selection.x[is_mean].to(x)])
        lam = torch.cat([lam, selection.lam[is_mean].to(lam)])
    return CandidatePool(x, lam)


def selected_pool(reconstruction: Reconstruction) -> CandidatePool:
    """Return the attack's own choice: what several restarts hold, or all it ranked if none agree."""
    selection = reconstruction.selection
    if selection is None:
        return CandidatePool(reconstruction.x[:0], reconstruction.weight[:0])
    agreed = selection.support > 1
    chosen = agreed if bool(agreed.any()) else torch.ones_like(agreed)
    return CandidatePool(selection.x[chosen], selection.lam[chosen])


def joined(pools: list[CandidatePool]) -> CandidatePool:
    """Return the candidates of several attacks as one pool, so that one test judges them together."""
    return CandidatePool(
        torch.cat([pool.x.double() for pool in pools]),
        torch.cat([pool.lam.double() for pool in pools]),
    )
