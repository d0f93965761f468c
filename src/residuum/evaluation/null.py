"""The chance level: how well the same reconstructions match samples that were not used for training.

A set A of n samples is matched with the candidates one-to-one, greedily, the best pair first. The value of a
sample is the similarity to its candidate. These values answer three questions.

**Which samples are recovered?** A sample is recovered if its value exceeds the 99th percentile of the values
in random held-out sets of size n. For N held-out samples, we use the percentile of conformal prediction: the
value of rank ceil(0.99 (N + 1)). A sample that nobody trained on exceeds this percentile with probability at
most 1%. If N is below 99, the rank would be larger than N. So a held-out set has a minimum size.

**Are there more than expected by chance?** If the count of the training set is compared only with the counts
of held-out sets, the null distribution is too narrow. The held-out sets overlap and share the best held-out
samples. These samples limit the counts of the held-out sets but not the count of the training set. On digits
with noise as candidates, n = 50 and N = 100, this comparison reported a leak at the 1% level in 32% of the
cases. Instead we use a permutation test: training and held-out samples are exchangeable if nothing leaks.
Then the training set A_0 is a random n-subset of the union of training and held-out samples, like B random
subsets A_1..A_B.

    T(A) = sum over A of how far values exceed the percentile of the samples OUTSIDE A,
    p = (1 + #{b: T(A_b) >= T(A_0)}) / (B + 1).

The values of samples outside A are taken from all of A_0..A_B. So T treats all sets alike, and p is valid
at any size of the held-out set. The test also tells what a small held-out set cannot show. The p-value of k
recovered samples among n cannot be smaller than about (n/(n + N))^k, see ``smallest_significant``.

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

ONE_IN = 100  # at most one in 100 samples that nobody trained on counts as recovered
SIGNIFICANCE = 0.01  # significance level of all tests of a verdict
# Minimum and default number of random subsets of a permutation test. The smallest possible p-value is
# 1 / (subsets + 1).
MIN_SUBSETS, SUBSETS = (200, 2000)
# To save time, pairs with a similarity below a limit are skipped. The limit is estimated from this number
# of random sets of held-out samples.
PILOT = 16
# To save time, pairs with a low similarity are skipped. The result, a 99th percentile, depends only on the
# best 1% of the values. For safety, the best 5% (this factor times 1%) are computed.
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
        excess: (B + 1,) test statistic T of the training set, then of B random sets of training and held-out
            samples. T(A) is the sum over the samples of A of how far their values exceed the 99th percentile
            of all samples outside A.
        own_excess: (n,) contribution of each training sample to the test statistic of the training set.
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
        """The p-value of the permutation test, which is 1 if no training sample is recovered."""
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
        raise InputError(
            f"{reason}.",
            "Pass more held-out samples.",
        )
    if subsets < MIN_SUBSETS:
        raise InputError(
            f"A permutation test needs at least {MIN_SUBSETS} random subsets; got {subsets}.",
            "Pass subsets=2000.",
        )
    labels = np.zeros(gain.shape[1], dtype=int) if strata is None else strata
    training_and_random_sets = np.concatenate(
        [np.arange(n)[None], draw_sets(labels, labels[:n], subsets, rng)]
    )
    holdout_sets = n + draw_sets(labels[n:], labels[:n], subsets, rng)
    training_match = match_greedily_in_sets(gain, training_and_random_sets[:1])
    similarity_floor = estimate_floor(gain, value, holdout_sets[:PILOT])
    while True:
        match_values = _MatchValues(gain, value, training_and_random_sets, similarity_floor)
        holdout_match_values = _MatchValues(gain, value, holdout_sets, similarity_floor)
        percentiles = match_values.percentiles_without(training_and_random_sets)
        no_exclusions = np.zeros((1, 0), dtype=int)
        threshold = float(holdout_match_values.percentiles_without(no_exclusions)[0])
        is_recovered_by_chance = holdout_match_values.beyond_the_others()
        if not (
            np.isnan(percentiles).any() or np.isnan(threshold) or is_recovered_by_chance is None
        ):
            break
        # A percentile is unknown, because too many pairs with a low similarity were skipped. So compute all
        # values again without skipping.
        similarity_floor = -np.inf
    training_values = score_matches(gain, value, training_match, training_and_random_sets[:1])[0]
    excess_by_sample = np.maximum(match_values.values - percentiles[:, None], 0.0)
    return Calibration(
        candidate=training_match[0],
        value=training_values,
        threshold=threshold,
        recovered=training_values > threshold,
        excess=excess_by_sample.sum(1),
        own_excess=excess_by_sample[0],
        chance=is_recovered_by_chance,
        reference=holdout_sets[0],
        smallest_significant=smallest_significant(n, holdout_size),
    )


def step_down(excess: Array) -> Array:
    """Return p-values that are valid over several tests together.

    This is the step-down max-T procedure of Westfall and Young. Statistics are standardized over the sets.
    The test with the largest statistic on the training set is compared with the largest statistic of any test
    on each random set. The next test is compared with the largest statistic of the remaining tests, etc.

    Args:
        excess: (tests, B + 1) test statistics of the training set (first column) and of B random sets.

    Returns:
        (tests,) adjusted p-values.
    """
    standard_deviations = excess.std(1, keepdims=True)
    standardized_statistics = (excess - excess.mean(1, keepdims=True)) / np.where(
        standard_deviations > 0, standard_deviations, 1.0
    )
    strongest_first = np.argsort(-standardized_statistics[:, 0], kind="stable")
    # Row i holds, for each random subset, the largest statistic among test i and all tests with smaller
    # statistics.
    largest_statistics = np.maximum.accumulate(standardized_statistics[strongest_first[::-1]])[::-1]
    p_values_before_step_down = (
        largest_statistics >= standardized_statistics[strongest_first, :1]
    ).mean(1)
    adjusted: Array = np.empty(len(standardized_statistics))
    adjusted[strongest_first] = np.maximum.accumulate(p_values_before_step_down)
    return adjusted


def fewest_beyond_chance(
    excess: Array, own_excess: Array, test: int, level: float = SIGNIFICANCE
) -> int:
    """Return a lower confidence limit of the number of training samples that leak into the candidates.

    The test statistic is a sum of contributions of the training samples. We remove the largest contributions
    one by one until the test no longer rejects. The number of removed contributions is the limit. If at most
    k training samples leak, the test without the k largest contributions rejects with probability at most
    ``level``. So the limit exceeds the true number with probability at most ``level``. The limit is 0 if and
    only if the test, corrected for all tests at once, does not reject.

    Args:
        excess: (tests, B + 1) test statistics of the training set (first column) and of B random sets.
        own_excess: (n,) contributions of the training samples to the statistic of one test.
        test: Row of this test in ``excess``.
        level: Probability that the limit is wrong.

    Returns:
        The limit, from 0 to n.
    """
    mean, standard_deviation = excess.mean(1, keepdims=True), excess.std(1, keepdims=True)
    standard_deviation = np.where(standard_deviation > 0, standard_deviation, 1.0)
    largest_statistics = ((excess - mean) / standard_deviation).max(0)[1:]
    remaining_excess = excess[test, 0] - np.concatenate(
        [[0.0], np.cumsum(np.sort(own_excess)[::-1])]
    )
    remaining_statistics = (remaining_excess - mean[test]) / standard_deviation[test]
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
        rounded_text = f"{p:.{digits}g}"
        if (float(rounded_text) <= SIGNIFICANCE) == (p <= SIGNIFICANCE) and (
            float(rounded_text) != SIGNIFICANCE or p == SIGNIFICANCE
        ):
            return f"p = {rounded_text}"
    return f"p = {p!r}"


def draw_sets(labels: Array, like: Array, count: int, rng: np.random.Generator) -> Array:
    """Draw random subsets of samples in which each label is as frequent as in ``like``.

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
        positions_with_label = np.flatnonzero(labels == label)
        if len(positions_with_label) < size:
            raise InputError(
                f"Random subsets of held-out samples that have the same labels as the training set need "
                f"{size} samples with label {label}; the held-out set has {len(positions_with_label)}.",
                "Add held-out samples with this label, or pass match_labels=False.",
            )
        random_keys = rng.random((count, len(positions_with_label)))
        positions.append(
            positions_with_label[np.argpartition(random_keys, size - 1, axis=1)[:, :size]]
        )
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

    If nothing leaks, the training set is a random subset of n of all n + N training and held-out samples. The
    p-value of k recovered samples cannot be smaller than the probability that a random subset of n samples
    contains these k samples. The result is the smallest k for which this probability is at most 1%.

    Args:
        n: Number of training samples.
        holdout_size: Number of held-out samples.

    Returns:
        The number k, or None if even n recovered samples cannot be significant.
    """
    containment_probability = 1.0
    for k in range(n):
        containment_probability *= (n - k) / (n + holdout_size - k)
        if containment_probability <= SIGNIFICANCE:
            return k + 1
    return None


class _MatchValues:
    """The values of the matches in many sets of samples, sorted once so that percentiles are fast to compute.

    The value of a match is the similarity of a sample and its candidate. Pairs with a similarity below
    ``floor`` are skipped, so smaller values are stored as -inf. A percentile above ``floor`` depends only on
    how many values are smaller.
    """

    def __init__(
        self, gain: Array, value: Callable[[Array, Array], Array] | None, sets: Array, floor: float
    ) -> None:
        self.sets, self.samples, self.floor = sets, gain.shape[1], floor
        self.values = score_matches(gain, value, match_greedily_in_sets(gain, sets, floor), sets)
        is_known = self.values > -np.inf
        # Pairs below the floor are skipped only if there are enough candidates for all samples of a set.
        # Then every sample has a match, and the value -inf stands for a match below the floor.
        is_matched = np.ones_like(is_known) if floor > -np.inf else is_known
        self.occurrences = np.bincount(sets[is_matched], minlength=self.samples)
        self.is_drawn = np.bincount(sets.ravel(), minlength=self.samples) > 0
        descending_order = np.argsort(-self.values[is_known], kind="stable")
        self.descending, self.sample = (
            self.values[is_known][descending_order],
            sets[is_known][descending_order],
        )

    def percentiles_without(self, excluded: Array) -> Array:
        """Compute 99th percentiles of the values (match qualities) of all samples that are not excluded.

        Args:
            excluded: Array of k rows. Each row has the samples that are excluded for one percentile.

        Returns:
            (k,) percentiles. A percentile is NaN if it lies below ``self.floor``, because smaller values are
            not stored.
        """
        rows_per_block = max(1, MATCHING_CHUNK // max(1, len(self.sample)))
        percentile_blocks = [
            self._percentiles(excluded[i : i + rows_per_block])
            for i in range(0, len(excluded), rows_per_block)
        ]
        return np.concatenate(percentile_blocks) if percentile_blocks else np.zeros(0)

    def beyond_the_others(self) -> Array | None:
        """Return which samples have a value (match quality) above the 99th percentile of all other samples.

        Returns:
            A mask in the shape of ``sets``, or None if a percentile is unknown. A percentile below
            ``self.floor`` is unknown, because smaller values are not stored.
        """
        percentiles = np.full(self.samples, np.inf)
        # If one sample is excluded, the percentile of the other samples moves down in the sorted list of
        # values by at most the number of values of this sample. So a sample can exceed this percentile only
        # if one of its values is among the ``top_count`` largest values.
        top_count = (
            _percentile_rank_from_top(self.occurrences.sum(), self.is_drawn.sum() - 1)
            + 1
            + self.occurrences.max()
        )
        if self.floor > -np.inf and len(self.sample) < top_count:
            return None
        samples_at_the_top = np.unique(self.sample[: max(0, top_count)])
        percentiles[samples_at_the_top] = self.percentiles_without(samples_at_the_top[:, None])
        return None if np.isnan(percentiles).any() else self.values > percentiles[self.sets]

    def _percentiles(self, excluded: Array) -> Array:
        """Compute 99th percentiles of the values (match qualities) of all samples that are not excluded.

        For each row of ``excluded``, the percentile is the value with a known rank (from the largest) among
        the values of the samples that are not excluded. To find this value, we count the values that are not
        excluded in a prefix of the sorted values. The prefix grows until every row has reached its rank.

        Args:
            excluded: Array of k rows. Each row has the samples that are excluded for one percentile.

        Returns:
            (k,) percentiles. A percentile is NaN if it lies below ``self.floor``, because smaller values are
            not stored.
        """
        is_excluded = np.zeros((len(excluded), self.samples), dtype=bool)
        is_excluded[np.arange(len(excluded))[:, None], excluded] = True
        value_counts = self.occurrences.sum() - is_excluded @ self.occurrences
        ranks_from_the_top = _percentile_rank_from_top(
            value_counts, (self.is_drawn & ~is_excluded).sum(1)
        )
        percentiles = np.where(ranks_from_the_top < 0, np.inf, np.nan)
        unfinished_rows = np.flatnonzero(ranks_from_the_top >= 0)
        prefix_length = int(2 * ranks_from_the_top.max(initial=0)) + 64
        while len(unfinished_rows) and len(self.sample):
            counts_of_not_excluded = np.cumsum(
                ~is_excluded[np.ix_(unfinished_rows, self.sample[:prefix_length])], axis=1
            )
            is_rank_reached = counts_of_not_excluded[:, -1] > ranks_from_the_top[unfinished_rows]
            percentile_positions = np.argmax(
                counts_of_not_excluded[is_rank_reached]
                > ranks_from_the_top[unfinished_rows[is_rank_reached], None],
                axis=1,
            )
            percentiles[unfinished_rows[is_rank_reached]] = self.descending[percentile_positions]
            unfinished_rows = unfinished_rows[~is_rank_reached]
            if prefix_length >= len(self.sample):
                break
            prefix_length *= 4
        return percentiles


def _percentile_rank_from_top(length: Array | int, sample_count: Array | int) -> Array:
    """Return the rank of the 99th percentile among values that are sorted from the largest to the smallest.

    The percentile is defined as in conformal prediction. If each of s samples has one value, the percentile
    has the rank ceil(0.99 (s + 1)), counted from the smallest value. If the samples have several values, this
    rank is multiplied by the mean number of values of a sample, and rounded up.

    Args:
        length: Number of values.
        sample_count: Number of samples that have these values. A sample may have several values.

    Returns:
        The rank from the top, 0 for the largest value, or -1 if the percentile exceeds all values.
    """
    length, sample_count = np.asarray(length), np.maximum(np.asarray(sample_count), 1)
    # The rank of the 99th percentile among one value per sample, which equals ceil(0.99 (sample_count +
    # 1)).
    rank_among_samples = sample_count + 1 - (sample_count + 1) // ONE_IN
    rank_from_below = -(-length * rank_among_samples // sample_count)
    return np.where(
        (rank_from_below > 0) & (rank_from_below <= length), length - rank_from_below, -1
    )


def estimate_floor(
    gain: Array, value: Callable[[Array, Array], Array] | None, sets: Array
) -> float:
    """Estimate a floor: a similarity below which pairs of a candidate and a sample can be skipped.

    The floor lies well below the 99th percentile of the values of matches. Greedy matching matches the best
    pairs first, so the skipped pairs change neither the better pairs nor a percentile above the floor.

    Args:
        gain: (m, n + N) similarities of candidates and samples. Higher is better.
        value: Function that scores matches, or None if the similarity is the score.
        sets: (s, n) samples of a few held-out sets.

    Returns:
        The floor. It is -inf if ``value`` scores matches, if a set has more samples than there are
        candidates, or if a similarity is not finite.
    """
    if value is not None or len(gain) < sets.shape[1] or not np.isfinite(gain).all():
        return -np.inf
    match_values = score_matches(gain, None, match_greedily_in_sets(gain, sets), sets)
    return float(np.quantile(match_values, 1 - SAFE / ONE_IN))


def score_matches(
    gain: Array, value: Callable[[Array, Array], Array] | None, candidate: Array, sets: Array
) -> Array:
    """Score the matches of samples and reconstructions in several sets. Each pair is scored once.

    Args:
        gain: (m, n + N) similarities of candidates and samples. Higher is better.
        value: Function that scores matches, or None if the similarity is the score.
        candidate: (s, n) candidate of each sample, -1 for a sample without a candidate.
        sets: (s, n) column of each sample in ``gain``, with one set in each row.

    Returns:
        (s, n) scores, -inf for samples without a candidate. Higher is better.
    """
    scores = np.full(sets.shape, -np.inf)
    is_matched = candidate >= 0
    matched_candidates, matched_samples = candidate[is_matched], sets[is_matched]
    if value is None:
        scores[is_matched] = gain[matched_candidates, matched_samples]
    else:
        pairs, inverse = np.unique(
            matched_candidates * gain.shape[1] + matched_samples, return_inverse=True
        )
        scores[is_matched] = value(*np.divmod(pairs, gain.shape[1]))[inverse]
    return scores
