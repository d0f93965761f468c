"""The chance level: what the same candidates score on samples that nobody trained on.

The statistic of a set A of n samples is the value of every sample's match. Candidates are matched
one-to-one within A, greedily, the best pair first. The statistic answers three questions.

**Which samples are recovered?** A sample is recovered if its value exceeds the 99th percentile of the
statistic over random held-out sets of size n. The percentile is the conformal one, of rank
ceil(0.99 (N + 1)) among N. So a sample outside the held-out set of size N exceeds it with probability at
most 1%. A held-out set with N below 99 has no such rank, which explains the minimum size.

**Are there more than expected by chance?** A comparison with the counts of held-out sets alone makes the
null distribution too narrow. Those sets overlap and share the best held-out samples, which bound their
counts but not the count of the training set. On digits with noise as candidates, n = 50 and N = 100,
such a test reported a leak at the 1% level in 32% of the cases. Instead we use that training and held-out
samples are exchangeable if nothing leaks. Then the training set A_0 is a random n-subset of the union of
both, like A_1..A_B.

    T(A) = sum over A of how far values exceed the percentile of the samples OUTSIDE A,
    p = (1 + #{b: T(A_b) >= T(A_0)}) / (B + 1).

The values of samples outside A are taken from all of A_0..A_B. So T treats all sets alike, and p is valid
at any size of the held-out set. In exchange the test says openly what a small held-out set cannot show: k
recovered samples among n cannot be more surprising than (n/(n + N))^k, see ``smallest_significant``.

**Which of several tests find more?** All tests share the sets A_0..A_B. Each test's T is standardized over
these sets, and :func:`step_down` compares the largest with the largest of every A_b (Westfall and Young).
The level holds over all tests together, and the smallest p stays 1/(B + 1) for any number of tests.

Only values close to the percentile or above it matter, and greedy matching settles the best pairs first.
Pairs below a floor cannot change what lies above it. So the floor is chosen from a few sets, and pairs
below it are skipped. If the floor turns out to be too high, everything is computed again without a floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from residuum.errors import InputError
from residuum.evaluation.matching import (
    MATCHING_CHUNK,
    Array,
    match_greedily_in_sets,
    why_not_calibrated,
)

ONE_IN = 100  # one false positive in this many samples
SIGNIFICANCE = 0.01  # level of a verdict
# The smallest p is 1 / (subsets + 1), which must be well below the significance level.
MIN_SUBSETS, SUBSETS = (200, 2000)
PILOT = 16  # held-out sets that choose a floor
SAFE = 5  # the best 1 in 20 values are computed, although 1 in 100 decides


@dataclass(frozen=True)
class Calibration:
    """The result of the comparison with the held-out set. Values are oriented: higher is better.

    Attributes:
        candidate: (n,) candidate of each training sample, matched one-to-one, -1 for none.
        value: (n,) value of that match, -inf for none.
        threshold: The 99th percentile of chance.
        recovered: (n,) whether the value exceeds the threshold.
        excess: (B + 1,) the statistic T of the training set, then of the permuted sets.
        own_excess: (n,) contribution of each training sample to T.
        chance: (B, n) which samples of held-out sets exceed the percentile of the other held-out samples.
        reference: (n,) columns of one held-out set.
        smallest_significant: The smallest count that can reach 1% with a held-out set of this size.
    """

    candidate: Array
    value: Array
    threshold: float
    recovered: Array
    excess: Array
    own_excess: Array
    chance: Array
    reference: Array
    smallest_significant: int | None

    @property
    def expected_by_chance(self) -> float:
        """The mean count of a held-out set, if each sample is judged by the percentile of the others."""
        return float(self.chance.sum() / len(self.chance))

    @property
    def p_value(self) -> float:
        """The p-value of the permutation test. It is 1 if no sample is recovered."""
        return float((self.excess >= self.excess[0]).mean()) if self.recovered.any() else 1.0


def calibrate(
    gain: Array,
    n: int,
    *,
    value: Callable[[Array, Array], Array] | None = None,
    strata: Array | None = None,
    subsets: int = SUBSETS,
    rng: np.random.Generator,
) -> Calibration:
    """Compare the matches of the first ``n`` columns of ``gain`` with those of the remaining columns.

    Args:
        gain: (m, n + N) oriented similarities, training samples first, held-out samples after them.
        n: Number of training samples.
        value: Function from k candidates and k columns to k oriented scores. Pass it if matches are not
            scored by ``gain``.
        strata: (n + N,) labels. If given, subsets have the label counts of the training set.
        subsets: Number B of random subsets.
        rng: Random generator that draws the subsets.

    Returns:
        The chance level and the test.

    Raises:
        InputError: If the held-out set is too small, or if there are too few subsets.
    """
    holdout_size = gain.shape[1] - n
    if reason := why_not_calibrated(n, holdout_size):
        raise InputError(f"{reason}.", "Pass a larger held-out set.")
    if subsets < MIN_SUBSETS:
        message = f"A calibration needs at least {MIN_SUBSETS} subsets; got {subsets}."
        raise InputError(message, "Pass subsets=2000.")
    labels = np.zeros(gain.shape[1], dtype=int) if strata is None else strata
    mixed = np.concatenate([np.arange(n)[None], draw_sets(labels, labels[:n], subsets, rng)])
    held_out = n + draw_sets(labels[n:], labels[:n], subsets, rng)
    training_match = match_greedily_in_sets(gain, mixed[:1])
    floor = estimate_floor(gain, value, held_out[:PILOT])
    while True:
        union_outcomes = _Outcomes(gain, value, mixed, floor)
        holdout_outcomes = _Outcomes(gain, value, held_out, floor)
        percentiles = union_outcomes.percentiles_without(mixed)
        excluded_none = np.zeros((1, 0), dtype=int)
        threshold = float(holdout_outcomes.percentiles_without(excluded_none)[0])
        chance = holdout_outcomes.beyond_the_others()
        if not (np.isnan(percentiles).any() or np.isnan(threshold) or chance is None):
            break
        floor = -np.inf  # the floor was too high
    values = score_matches(gain, value, training_match, mixed[:1])[0]
    beyond = np.maximum(union_outcomes.values - percentiles[:, None], 0.0)
    return Calibration(
        candidate=training_match[0],
        value=values,
        threshold=threshold,
        recovered=values > threshold,
        excess=beyond.sum(1),
        own_excess=beyond[0],
        chance=chance,
        reference=held_out[0],
        smallest_significant=smallest_significant(n, holdout_size),
    )


def step_down(excess: Array) -> Array:
    """Return the (tests,) adjusted p-values, valid over all tests, of statistics (tests, B + 1).

    The first column of ``excess`` is the training set. Step-down max-T: the strongest test is compared with
    the strongest test of every permuted set, the next with the strongest of the remaining tests.

    Args:
        excess: (tests, B + 1) statistics T, the training set first.

    Returns:
        (tests,) adjusted p-values.
    """
    spread = excess.std(1, keepdims=True)
    t = (excess - excess.mean(1, keepdims=True)) / np.where(spread > 0, spread, 1.0)
    order = np.argsort(-t[:, 0], kind="stable")
    largest = np.maximum.accumulate(t[order[::-1]])[::-1]  # of each test and all weaker tests
    p = (largest >= t[order, :1]).mean(1)
    adjusted: Array = np.empty(len(t))
    adjusted[order] = np.maximum.accumulate(p)
    return adjusted


def fewest_beyond_chance(
    excess: Array, own_excess: Array, test: int, level: float = SIGNIFICANCE
) -> int:
    """Return a lower confidence limit of the number of samples that go beyond chance.

    If at most k training samples leak, the statistic without its k largest contributions is no larger
    than that of an ordinary set, except with probability ``level``. So the limit is the number of samples,
    largest contribution first, that must be removed until the test no longer rejects. It is 0 if and
    only if the test, corrected for all tests at once, does not reject.

    Args:
        excess: (tests, B + 1) statistics T, the training set first, as for :func:`step_down`.
        own_excess: (n,) contributions of the training samples to T of ``test``.
        test: Row of the test in ``excess``.
        level: Probability that the limit is wrong.

    Returns:
        The limit, from 0 to n.
    """
    mean, spread = excess.mean(1, keepdims=True), excess.std(1, keepdims=True)
    spread = np.where(spread > 0, spread, 1.0)
    largest = ((excess - mean) / spread).max(0)[1:]
    remaining = excess[test, 0] - np.concatenate([[0.0], np.cumsum(np.sort(own_excess)[::-1])])
    statistic = (remaining - mean[test]) / spread[test]
    p = (1 + (largest >= statistic[:, None]).sum(1)) / (len(largest) + 1)
    rejects = p <= level
    return int(np.argmin(rejects)) if not rejects.all() else len(own_excess)


def format_p(p: float) -> str:
    """Return a p-value with enough digits to see on which side of the significance level it lies."""
    if p < 0.001:
        return "p < 0.001"
    for digits in range(2, 17):
        text = f"{p:.{digits}g}"
        if (float(text) <= SIGNIFICANCE) == (p <= SIGNIFICANCE) and (
            float(text) != SIGNIFICANCE or p == SIGNIFICANCE
        ):
            return f"p = {text}"
    return f"p = {p!r}"


def draw_sets(labels: Array, like: Array, count: int, rng: np.random.Generator) -> Array:
    """Draw random sets of positions in ``labels`` that have the label counts of ``like``.

    Args:
        labels: (N,) labels to choose from.
        like: (n,) labels whose counts every set has.
        count: Number of sets.
        rng: Random generator.

    Returns:
        (count, n) positions.

    Raises:
        InputError: If ``labels`` has too few samples of a label.
    """
    positions = []
    for label, size in zip(*np.unique(like, return_counts=True), strict=True):
        matching_label = np.flatnonzero(labels == label)
        if len(matching_label) < size:
            raise InputError(
                f"Subsets need {size} held-out samples of label {label}; there are {len(matching_label)}.",
                "Pass more of them, or pass match_labels=False.",
            )
        keys = rng.random((count, len(matching_label)))
        positions.append(matching_label[np.argpartition(keys, size - 1, axis=1)[:, :size]])
    return np.concatenate(positions, axis=1)


def count_interval(count: int, n: int) -> tuple[float, float]:
    """Return a naive 95% confidence interval of a count: Clopper-Pearson for independent trials.

    Matches are one-to-one, so the trials are not independent. Chance is not subtracted.

    Args:
        count: Number of recovered samples.
        n: Number of training samples.

    Returns:
        The lower and upper limit of the count.
    """
    from scipy.stats import binomtest

    share = binomtest(count, n).proportion_ci(0.95, method="exact")
    return n * float(share.low), n * float(share.high)


def smallest_significant(n: int, holdout_size: int) -> int | None:
    """Return the smallest number of recovered samples that can be significant at 1%.

    This is the smallest k such that k given samples are all in a random n-subset with probability at most
    1%.

    Args:
        n: Number of training samples.
        holdout_size: Number of held-out samples.

    Returns:
        The number k, or None if no k up to n suffices.
    """
    probability = 1.0
    for k in range(n):
        probability *= (n - k) / (n + holdout_size - k)
        if probability <= SIGNIFICANCE:
            return k + 1
    return None


class _Outcomes:
    """Values of many sets of samples, sorted once so that percentiles of their subsets are cheap.

    Values below ``floor`` are stored as -inf. Their number is known, which suffices.
    """

    def __init__(
        self, gain: Array, value: Callable[[Array, Array], Array] | None, sets: Array, floor: float
    ) -> None:
        self.sets, self.samples, self.floor = sets, gain.shape[1], floor
        self.values = score_matches(gain, value, match_greedily_in_sets(gain, sets, floor), sets)
        seen = self.values > -np.inf
        matched = np.ones_like(seen) if floor > -np.inf else seen  # a floor implies that all match
        self.occurrences = np.bincount(sets[matched], minlength=self.samples)
        self.is_drawn = np.bincount(sets.ravel(), minlength=self.samples) > 0
        order = np.argsort(-self.values[seen], kind="stable")
        self.descending, self.sample = self.values[seen][order], sets[seen][order]

    def percentiles_without(self, excluded: Array) -> Array:
        """Return (k,) percentiles of chance over all samples except those in each row of ``excluded``.

        A percentile below the floor is NaN.

        Args:
            excluded: (k, any) samples.

        Returns:
            (k,) percentiles.
        """
        step = max(1, MATCHING_CHUNK // max(1, len(self.sample)))
        blocks = [self._percentiles(excluded[i : i + step]) for i in range(0, len(excluded), step)]
        return np.concatenate(blocks) if blocks else np.zeros(0)

    def beyond_the_others(self) -> Array | None:
        """Return which samples exceed the percentile of the other samples, or None below the floor."""
        bar = np.full(self.samples, np.inf)
        # If a sample is excluded, the percentile sinks by at most as many places as the sample has
        # values. So a sample that is never among that many of the best exceeds no percentile.
        places = (
            _from_the_top(self.occurrences.sum(), self.is_drawn.sum() - 1)
            + 1
            + self.occurrences.max()
        )
        if self.floor > -np.inf and len(self.sample) < places:
            return None
        relevant = np.unique(self.sample[: max(0, places)])
        bar[relevant] = self.percentiles_without(relevant[:, None])
        return None if np.isnan(bar).any() else self.values > bar[self.sets]

    def _percentiles(self, excluded: Array) -> Array:
        """Return (k,) percentiles of the remaining samples if the samples in each row are excluded.

        Values are sorted once for all rows. The percentile of a row has a known place from the top among the
        values of samples that are not in the row. We count down the common order to this place, over a
        stretch that grows until all rows are done. NaN means below all stored values, i.e. below the floor.

        Args:
            excluded: (k, any) samples.

        Returns:
            (k,) percentiles.
        """
        inside = np.zeros((len(excluded), self.samples), dtype=bool)
        inside[np.arange(len(excluded))[:, None], excluded] = True
        length = self.occurrences.sum() - inside @ self.occurrences
        place = _from_the_top(length, (self.is_drawn & ~inside).sum(1))
        percentiles = np.where(place < 0, np.inf, np.nan)
        open_rows = np.flatnonzero(place >= 0)
        depth = int(2 * place.max(initial=0)) + 64
        while len(open_rows) and len(self.sample):
            outside = np.cumsum(~inside[np.ix_(open_rows, self.sample[:depth])], axis=1)
            reached = outside[:, -1] > place[open_rows]
            first = np.argmax(outside[reached] > place[open_rows[reached], None], axis=1)
            percentiles[open_rows[reached]] = self.descending[first]
            open_rows = open_rows[~reached]
            if depth >= len(self.sample):
                break
            depth *= 4
        return percentiles


def _from_the_top(length: Array | int, sample_count: Array | int) -> Array:
    """Return the place of the percentile among ``length`` values of ``sample_count`` samples.

    0 is the best. -1 means that the percentile exceeds all values.

    Args:
        length: Number of values.
        sample_count: Number of samples that have these values.

    Returns:
        The place.
    """
    length, sample_count = np.asarray(length), np.maximum(np.asarray(sample_count), 1)
    rank = sample_count + 1 - (sample_count + 1) // ONE_IN  # ceil(0.99 (sample_count + 1))
    position = -(-length * rank // sample_count)
    return np.where((position > 0) & (position <= length), length - position, -1)


def estimate_floor(
    gain: Array, value: Callable[[Array, Array], Array] | None, sets: Array
) -> float:
    """Estimate from a few held-out sets below which gain matches cannot change any percentile.

    Args:
        gain: (m, n + N) oriented similarities.
        value: Function that scores matches, or None if the gain is the score.
        sets: (s, n) held-out sets.

    Returns:
        The floor. It is -inf if matches are not scored by the gain or if some samples get no candidate.
    """
    if value is not None or len(gain) < sets.shape[1] or not np.isfinite(gain).all():
        return -np.inf
    values = score_matches(gain, None, match_greedily_in_sets(gain, sets), sets)
    return float(np.quantile(values, 1 - SAFE / ONE_IN))


def score_matches(
    gain: Array, value: Callable[[Array, Array], Array] | None, candidate: Array, sets: Array
) -> Array:
    """Score all matches, each distinct pair once.

    Args:
        gain: (m, n + N) oriented similarities.
        value: Function that scores matches, or None if the gain is the score.
        candidate: (s, n) candidate of every sample, -1 for none.
        sets: (s, n) columns of the samples.

    Returns:
        (s, n) oriented scores, -inf for samples without a candidate.
    """
    values = np.full(sets.shape, -np.inf)
    matched = candidate >= 0
    c, s = candidate[matched], sets[matched]
    if value is None:
        values[matched] = gain[c, s]
    else:
        pair, inverse = np.unique(c * gain.shape[1] + s, return_inverse=True)
        values[matched] = value(*np.divmod(pair, gain.shape[1]))[inverse]
    return values
