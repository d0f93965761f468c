"""The chance level: what the same candidates score on samples that nobody trained on.

A set A of n samples is matched with the candidates one-to-one, greedily, the best pair first. The value of a
sample is the similarity to its candidate. These values answer three questions.

**Which samples are recovered?** A sample is recovered if its value exceeds the 99th percentile of the values
in random held-out sets of size n. The percentile is the conformal one, of rank ceil(0.99 (N + 1)) for N
held-out samples. So a sample that nobody trained on exceeds it with probability at most 1%. A held-out set
with N below 99 has no such rank, which explains the minimum size.

**Are there more than expected by chance?** A comparison with the counts of held-out sets alone makes the
null distribution too narrow. Those sets overlap and share the best held-out samples, which bound their
counts but not the count of the training set. On digits with noise as candidates, n = 50 and N = 100,
such a test reported a leak at the 1% level in 32% of the cases. Instead we use that training and held-out
samples are exchangeable if nothing leaks. Then the training set A_0 is a random n-subset of the union of
training and held-out samples, like B random subsets A_1..A_B.

    T(A) = sum over A of how far values exceed the percentile of the samples OUTSIDE A,
    p = (1 + #{b: T(A_b) >= T(A_0)}) / (B + 1).

The values of samples outside A are taken from all of A_0..A_B. So T treats all sets alike, and p is valid
at any size of the held-out set. In exchange the test says openly what a small held-out set cannot show: k
recovered samples among n cannot be more surprising than (n/(n + N))^k, see ``smallest_significant``.

**Which of several tests find more than chance?** All tests share the sets A_0..A_B. Each test's T is
standardized over these sets, and :func:`step_down` compares the largest with the largest of every A_b
(Westfall and Young). The significance level holds over all tests together, and the smallest p-value stays
1/(B + 1) for any number of tests.

Only values close to the percentile or above it matter, and greedy matching settles the best pairs first.
Pairs with a small similarity cannot change the better pairs. So a lower limit of the similarity, called the
floor, is chosen from a few sets, and pairs below the floor are skipped. If the floor turns out to be too
high, everything is computed again without a floor.
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

ONE_IN = 100  # by chance, one in this many samples counts as recovered
SIGNIFICANCE = 0.01  # significance level of all tests of a verdict
# A test draws at least and by default this many subsets, because its smallest p-value is 1 / (subsets + 1).
MIN_SUBSETS, SUBSETS = (200, 2000)
PILOT = 16  # number of held-out sets from which the floor of the similarities is estimated
# The floor leaves this many times more values than the 1 in 100 that decide, i.e. the best 1 in 20.
SAFE = 5


@dataclass(frozen=True)
class Calibration:
    """The matches of n training samples, compared with the matches of held-out samples.

    A match is a pair of a sample and a candidate. Its value is their similarity, with the sign such that
    higher is better.

    Attributes:
        candidate: (n,) candidate of each training sample, matched one-to-one. It is -1 for a sample without
            a candidate.
        value: (n,) value of each training sample's match. It is -inf for a sample without a candidate.
        threshold: The 99th percentile of the values of held-out samples.
        recovered: (n,) whether the value exceeds the threshold.
        excess: (B + 1,) test statistic of the training set, then of B random sets of training and held-out
            samples. The statistic adds up how far values exceed the percentile of all other samples.
        own_excess: (n,) contribution of each training sample to its statistic.
        chance: (B, n) which samples of random held-out sets exceed the percentile of the other held-out
            samples.
        reference: (n,) column numbers of the samples of one held-out set.
        smallest_significant: The smallest number of recovered samples that can be significant at 1% with a
            held-out set of this size, or None if no number can.
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
        """The mean number of samples in a held-out set that count as recovered."""
        return float(self.chance.sum() / len(self.chance))

    @property
    def p_value(self) -> float:
        """The p-value of the permutation test, or 1 if no training sample is recovered."""
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
    """Compare how well candidates match n training samples with how well they match held-out samples.

    Args:
        gain: (m, n + N) similarities of m candidates with n training samples and then N held-out samples.
            Higher is better.
        n: Number of training samples.
        value: Function from k candidates and k columns to k scores, if matches are not scored by ``gain``.
            Higher is better.
        strata: (n + N,) labels of the samples, or None. With labels, random sets have the label counts of the
            training set.
        subsets: Number of random sets.
        rng: Random generator that draws the sets.

    Returns:
        The matches, the chance level and the permutation test.

    Raises:
        InputError: If the held-out set is too small, or if there are too few random sets.
    """
    holdout_size = gain.shape[1] - n
    if reason := why_not_calibrated(n, holdout_size):
        raise InputError(f"{reason}.", "Pass a larger held-out set.")
    if subsets < MIN_SUBSETS:
        message = f"A permutation test needs at least {MIN_SUBSETS} random subsets; got {subsets}."
        raise InputError(message, "Pass subsets=2000.")
    labels = np.zeros(gain.shape[1], dtype=int) if strata is None else strata
    union_sets = np.concatenate([np.arange(n)[None], draw_sets(labels, labels[:n], subsets, rng)])
    holdout_sets = n + draw_sets(labels[n:], labels[:n], subsets, rng)
    training_match = match_greedily_in_sets(gain, union_sets[:1])
    floor = estimate_floor(gain, value, holdout_sets[:PILOT])
    while True:
        union_outcomes = _Outcomes(gain, value, union_sets, floor)
        holdout_outcomes = _Outcomes(gain, value, holdout_sets, floor)
        percentiles = union_outcomes.percentiles_without(union_sets)
        no_exclusions = np.zeros((1, 0), dtype=int)
        threshold = float(holdout_outcomes.percentiles_without(no_exclusions)[0])
        chance = holdout_outcomes.beyond_the_others()
        if not (np.isnan(percentiles).any() or np.isnan(threshold) or chance is None):
            break
        floor = (
            -np.inf
        )  # a percentile lies below the floor: compute all values again without a floor
    training_values = score_matches(gain, value, training_match, union_sets[:1])[0]
    excess_by_sample = np.maximum(union_outcomes.values - percentiles[:, None], 0.0)
    return Calibration(
        candidate=training_match[0],
        value=training_values,
        threshold=threshold,
        recovered=training_values > threshold,
        excess=excess_by_sample.sum(1),
        own_excess=excess_by_sample[0],
        chance=chance,
        reference=holdout_sets[0],
        smallest_significant=smallest_significant(n, holdout_size),
    )


def step_down(excess: Array) -> Array:
    """Return p-values that are valid over several tests together.

    This is the step-down max-T procedure of Westfall and Young. The strongest test is compared with the
    strongest test of every random set, the next test with the strongest of the remaining tests, and so on.

    Args:
        excess: (tests, B + 1) test statistics of the training set (first column) and of B random sets.

    Returns:
        (tests,) adjusted p-values.
    """
    spreads = excess.std(1, keepdims=True)
    standardized = (excess - excess.mean(1, keepdims=True)) / np.where(spreads > 0, spreads, 1.0)
    order = np.argsort(-standardized[:, 0], kind="stable")
    largest_statistics = np.maximum.accumulate(standardized[order[::-1]])[
        ::-1
    ]  # the largest of each test and all weaker tests
    unordered_p_values = (largest_statistics >= standardized[order, :1]).mean(1)
    adjusted: Array = np.empty(len(standardized))
    adjusted[order] = np.maximum.accumulate(unordered_p_values)
    return adjusted


def fewest_beyond_chance(
    excess: Array, own_excess: Array, test: int, level: float = SIGNIFICANCE
) -> int:
    """Return a lower confidence limit of the number of training samples that leak.

    If at most k training samples leak, the test statistic without its k largest contributions is no larger
    than the statistic of a random set, except with probability ``level``. So the limit is the number of
    samples, largest contribution first, that must be removed until the test no longer rejects. The limit is 0
    if and only if the test, corrected for all tests at once, does not reject.

    Args:
        excess: (tests, B + 1) test statistics of the training set (first column) and of B random sets.
        own_excess: (n,) contributions of the training samples to the statistic of one test.
        test: Row of this test in ``excess``.
        level: Probability that the limit is wrong.

    Returns:
        The limit, from 0 to n.
    """
    mean, spread = excess.mean(1, keepdims=True), excess.std(1, keepdims=True)
    spread = np.where(spread > 0, spread, 1.0)
    largest_statistics = ((excess - mean) / spread).max(0)[1:]
    remaining_excess = excess[test, 0] - np.concatenate(
        [[0.0], np.cumsum(np.sort(own_excess)[::-1])]
    )
    remaining_statistics = (remaining_excess - mean[test]) / spread[test]
    p_values = (1 + (largest_statistics >= remaining_statistics[:, None]).sum(1)) / (
        len(largest_statistics) + 1
    )
    rejects = p_values <= level
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
        labels: (N,) labels of the samples to draw from.
        like: (n,) labels whose counts every set must have.
        count: Number of sets to draw.
        rng: Random generator that draws the sets.

    Returns:
        (count, n) positions in ``labels``, one set in each row.

    Raises:
        InputError: If ``labels`` has too few samples of a label.
    """
    positions = []
    for label, size in zip(*np.unique(like, return_counts=True), strict=True):
        with_label = np.flatnonzero(labels == label)
        if len(with_label) < size:
            raise InputError(
                f"Label-matched subsets need {size} held-out samples of label {label}; the held-out set has "
                f"{len(with_label)}.",
                "Add held-out samples of this label, or pass match_labels=False.",
            )
        random_keys = rng.random((count, len(with_label)))
        positions.append(with_label[np.argpartition(random_keys, size - 1, axis=1)[:, :size]])
    return np.concatenate(positions, axis=1)


def count_interval(count: int, n: int) -> tuple[float, float]:
    """Return the 95% Clopper-Pearson interval of the number of recovered samples.

    The interval is naive: it assumes independent samples, although matches are one-to-one, and it does not
    subtract the matches that are expected by chance.

    Args:
        count: Number of recovered samples.
        n: Number of training samples.

    Returns:
        The lower and upper limit of the count.
    """
    from scipy.stats import binomtest

    interval = binomtest(count, n).proportion_ci(0.95, method="exact")
    return n * float(interval.low), n * float(interval.high)


def smallest_significant(n: int, holdout_size: int) -> int | None:
    """Return the smallest number of recovered samples that can be significant at 1%.

    This is the smallest number k of samples that are all in a random set of n training and held-out samples
    with probability at most 1%.

    Args:
        n: Number of training samples.
        holdout_size: Number of held-out samples.

    Returns:
        The number k, or None if even n recovered samples cannot be significant.
    """
    probability = 1.0
    for k in range(n):
        probability *= (n - k) / (n + holdout_size - k)
        if probability <= SIGNIFICANCE:
            return k + 1
    return None


class _Outcomes:
    """The values of the matches in many sets of samples, sorted once for cheap percentiles.

    Values below ``floor`` are stored as -inf, because only their number matters.
    """

    def __init__(
        self, gain: Array, value: Callable[[Array, Array], Array] | None, sets: Array, floor: float
    ) -> None:
        self.sets, self.samples, self.floor = sets, gain.shape[1], floor
        self.values = score_matches(gain, value, match_greedily_in_sets(gain, sets, floor), sets)
        seen = self.values > -np.inf
        matched = (
            np.ones_like(seen) if floor > -np.inf else seen
        )  # with a floor, all samples have a match
        self.occurrences = np.bincount(sets[matched], minlength=self.samples)
        self.is_drawn = np.bincount(sets.ravel(), minlength=self.samples) > 0
        order = np.argsort(-self.values[seen], kind="stable")
        self.descending, self.sample = self.values[seen][order], sets[seen][order]

    def percentiles_without(self, excluded: Array) -> Array:
        """Return the 99th percentiles of the values of all samples except the excluded samples.

        Args:
            excluded: Array of k rows. Each row has the samples that are excluded for one percentile.

        Returns:
            (k,) percentiles, NaN for a percentile below the floor.
        """
        chunk_size = max(1, MATCHING_CHUNK // max(1, len(self.sample)))
        blocks = [
            self._percentiles(excluded[i : i + chunk_size])
            for i in range(0, len(excluded), chunk_size)
        ]
        return np.concatenate(blocks) if blocks else np.zeros(0)

    def beyond_the_others(self) -> Array | None:
        """Return which samples of each set exceed the 99th percentile of all other samples.

        Returns:
            A mask like ``sets``, or None if a percentile lies below the floor.
        """
        percentiles = np.full(self.samples, np.inf)
        # Excluding a sample moves the percentile down by at most the number of values of this sample.
        # So a sample that never comes near the percentile of all samples exceeds no percentile.
        relevant_count = (
            _from_the_top(self.occurrences.sum(), self.is_drawn.sum() - 1)
            + 1
            + self.occurrences.max()
        )
        if self.floor > -np.inf and len(self.sample) < relevant_count:
            return None
        relevant_samples = np.unique(self.sample[: max(0, relevant_count)])
        percentiles[relevant_samples] = self.percentiles_without(relevant_samples[:, None])
        return None if np.isnan(percentiles).any() else self.values > percentiles[self.sets]

    def _percentiles(self, excluded: Array) -> Array:
        """Return the 99th percentiles of the values of all samples except the excluded samples.

        Values are sorted once for all rows of ``excluded``. The percentile of a row has a known place from
        the top among the values of the samples that are not in the row. We count down the sorted values to
        this place, over a prefix that grows until all rows are done.

        Args:
            excluded: Array of k rows. Each row has the samples that are excluded for one percentile.

        Returns:
            (k,) percentiles, NaN for a percentile below all stored values, i.e. below the floor.
        """
        is_excluded = np.zeros((len(excluded), self.samples), dtype=bool)
        is_excluded[np.arange(len(excluded))[:, None], excluded] = True
        value_counts = self.occurrences.sum() - is_excluded @ self.occurrences
        places = _from_the_top(value_counts, (self.is_drawn & ~is_excluded).sum(1))
        percentiles = np.where(places < 0, np.inf, np.nan)
        open_rows = np.flatnonzero(places >= 0)
        prefix_length = int(2 * places.max(initial=0)) + 64
        while len(open_rows) and len(self.sample):
            remaining_counts = np.cumsum(
                ~is_excluded[np.ix_(open_rows, self.sample[:prefix_length])], axis=1
            )
            is_reached = remaining_counts[:, -1] > places[open_rows]
            first_positions = np.argmax(
                remaining_counts[is_reached] > places[open_rows[is_reached], None], axis=1
            )
            percentiles[open_rows[is_reached]] = self.descending[first_positions]
            open_rows = open_rows[~is_reached]
            if prefix_length >= len(self.sample):
                break
            prefix_length *= 4
        return percentiles


def _from_the_top(length: Array | int, sample_count: Array | int) -> Array:
    """Return the place of the conformal 99th percentile among sorted values.

    Args:
        length: Number of values.
        sample_count: Number of samples that have these values. A sample may have several values.

    Returns:
        The place, 0 for the largest value, or -1 if the percentile exceeds all values.
    """
    length, sample_count = np.asarray(length), np.maximum(np.asarray(sample_count), 1)
    rank = sample_count + 1 - (sample_count + 1) // ONE_IN  # equals ceil(0.99 (sample_count + 1))
    place_from_below = -(-length * rank // sample_count)
    return np.where(
        (place_from_below > 0) & (place_from_below <= length), length - place_from_below, -1
    )


def estimate_floor(
    gain: Array, value: Callable[[Array, Array], Array] | None, sets: Array
) -> float:
    """Estimate a floor: pairs with a smaller similarity cannot change the 99th percentile.

    Args:
        gain: (m, n + N) similarities of candidates and samples. Higher is better.
        value: Function that scores matches, or None if the similarity is the score.
        sets: (s, n) samples of a few held-out sets.

    Returns:
        The floor. It is -inf if ``value`` scores matches or if some samples get no candidate.
    """
    if value is not None or len(gain) < sets.shape[1] or not np.isfinite(gain).all():
        return -np.inf
    values = score_matches(gain, None, match_greedily_in_sets(gain, sets), sets)
    return float(np.quantile(values, 1 - SAFE / ONE_IN))


def score_matches(
    gain: Array, value: Callable[[Array, Array], Array] | None, candidate: Array, sets: Array
) -> Array:
    """Score the matches of samples and candidates in several sets. Each distinct pair is scored once.

    Args:
        gain: (m, n + N) similarities of candidates and samples. Higher is better.
        value: Function that scores matches, or None if the similarity is the score.
        candidate: (s, n) candidate of each sample, -1 for a sample without a candidate.
        sets: (s, n) column of each sample in ``gain``, with one set in each row.

    Returns:
        (s, n) scores, -inf for samples without a candidate. Higher is better.
    """
    values = np.full(sets.shape, -np.inf)
    is_matched = candidate >= 0
    matched_candidates, matched_samples = candidate[is_matched], sets[is_matched]
    if value is None:
        values[is_matched] = gain[matched_candidates, matched_samples]
    else:
        pairs, inverse = np.unique(
            matched_candidates * gain.shape[1] + matched_samples, return_inverse=True
        )
        values[is_matched] = value(*np.divmod(pairs, gain.shape[1]))[inverse]
    return values
