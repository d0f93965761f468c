"""Compute a lower bound on epsilon from one training run with canaries (Steinke, Nasr and Jagielski 2023).

Each of m canaries is inserted into the training set with probability 1/2, independently. A guesser sees the
network and all canaries, but not which canaries were inserted. The guesser guesses r canaries, abstains from
the others, and v guesses are right. If the training is (epsilon, delta)-differentially private, then with
q = e^eps / (1 + e^eps) and W ~ Binomial(r, q) (their Theorem 5.2)

    P(at least v right)  <=  P(W >= v) + 2 m delta max_{1 <= i <= v} P(v > W >= v - i) / i

The bound is the largest epsilon whose right side is below 1 - confidence. The guesser calls the r/2 canaries
with the highest statistic inserted and the r/2 with the lowest statistic omitted. If canaries tie at the edge
of these guesses, the guesser abstains from all of them. The order of the file must not decide, because files
often list one kind of canary first. The best number of guesses and the best statistic are not known in
advance. Therefore every share in ``GUESSES`` is tried with every statistic, and 1 - confidence is divided
equally among these trials.
"""

from __future__ import annotations

import math

from scipy.stats import binom, binomtest
from torch import Tensor

from residuum.errors import DataError
from residuum.evaluation.matching import as_array
from residuum.evaluation.null import count_interval
from residuum.evaluation.roc import area_under_curve, true_positive_rate
from residuum.records.exposure import CanaryBound, Operating

GUESSES = (1.0, 0.5, 0.25, 0.1)  # shares of the canaries about which the guesser guesses
RATES = (0.01, 0.001)  # false positive rates at which a true positive rate is reported
MIN_CANARIES = 10  # smallest number of inserted canaries, and of omitted canaries
MIN_COIN_P_VALUE = (
    1e-3  # below this p-value, the number of inserted canaries contradicts fair coins
)


def compute_p_value(m: int, r: int, v: int, epsilon: float, delta: float = 0.0) -> float:
    """Return an upper bound on the probability of at least v right guesses if the training is private.

    Args:
        m: Number of canaries.
        r: Number of guesses about canaries.
        v: Number of right guesses.
        epsilon: Epsilon of the (epsilon, delta)-differential privacy that is assumed.
        delta: Delta of the (epsilon, delta)-differential privacy that is assumed.

    Returns:
        The upper bound on the probability.
    """
    q = 1 / (1 + math.exp(-epsilon))
    upper_tail = float(binom.sf(v - 1, r, q))
    if delta == 0:
        return upper_tail
    largest_slope = probability_below = 0.0
    for i in range(1, v + 1):
        probability_below += float(binom.pmf(v - i, r, q))  # P(v > W >= v - i)
        largest_slope = max(largest_slope, probability_below / i)
    return min(1.0, upper_tail + 2 * m * delta * largest_slope)


def compute_epsilon_bound(m: int, r: int, v: int, confidence: float, delta: float = 0.0) -> float:
    """Return the largest epsilon that v right guesses about canaries rule out.

    Args:
        m: Number of canaries.
        r: Number of guesses.
        v: Number of right guesses.
        confidence: Probability with which the lower bound on epsilon holds, such as 0.95.
        delta: Delta of the (epsilon, delta)-differential privacy.

    Returns:
        The lower bound on epsilon, 0 if no epsilon is ruled out.
    """
    error_probability = 1 - confidence
    if compute_p_value(m, r, v, 0.0, delta) >= error_probability:
        return 0.0
    low, high = 0.0, 1.0
    while compute_p_value(m, r, v, high, delta) < error_probability:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if compute_p_value(m, r, v, middle, delta) < error_probability
            else (low, middle)
        )
    return low


def count_guesses(statistic: Tensor, inserted: Tensor, share: float) -> tuple[int, int]:
    """Count the guesses about canaries, and the right guesses.

    Half of the guesses call the canaries with the highest statistic inserted. The other half call the
    canaries with the lowest statistic omitted. A canary that ties with one of the rest is not guessed.

    Args:
        statistic: Values (m,) that are larger for canaries that seem inserted.
        inserted: Which canaries were inserted, (m,) bool.
        share: Share of the canaries about which a guess is made.

    Returns:
        The number of guesses r and the number of right guesses v.
    """
    half = max(1, int(share * len(statistic) / 2))
    ascending = statistic.sort().values
    highest = statistic > ascending[-half - 1]
    lowest = statistic < ascending[half]
    right = int(inserted[highest].sum()) + int((~inserted[lowest]).sum())
    return int(highest.sum() + lowest.sum()), right


def find_best_bound(
    statistics: dict[str, Tensor], inserted: Tensor, confidence: float, delta: float
) -> CanaryBound:
    """Return the largest lower bound on epsilon over all statistics and numbers of guesses.

    The error probability 1 - confidence is divided equally among these trials.

    Args:
        statistics: One value per canary (m,) by name of the statistic, larger if the canary seems inserted.
        inserted: Which canaries were inserted, (m,) bool.
        confidence: Probability with which the lower bound on epsilon holds, such as 0.95.
        delta: Delta of the (epsilon, delta)-differential privacy.

    Returns:
        The largest lower bound, with the guesses that prove it.

    Raises:
        DataError: If too few canaries were inserted or omitted.
    """
    m, inserted_count = len(inserted), int(inserted.sum())
    if min(inserted_count, m - inserted_count) < MIN_CANARIES:
        raise DataError(
            f"A bound on epsilon needs at least {MIN_CANARIES} inserted and {MIN_CANARIES} omitted canaries; "
            f"got {inserted_count} and {m - inserted_count}.",
            "Before training, toss a coin for each canary. List inserted and omitted canaries in the file.",
        )
    confidence_of_each = 1 - (1 - confidence) / (len(GUESSES) * len(statistics))
    bounds = []
    for name, statistic in statistics.items():
        auc = area_under_curve(as_array(statistic), as_array(inserted))
        for share in GUESSES:
            r, v = count_guesses(statistic, inserted, share)
            bounds.append(
                (compute_epsilon_bound(m, r, v, confidence_of_each, delta), auc, r, v, name)
            )
    epsilon, auc, r, v, name = max(bounds)
    coin_p_value = binomtest(inserted_count, m).pvalue
    notes: tuple[str, ...] = ()
    if coin_p_value < MIN_COIN_P_VALUE:
        notes = (
            f"{inserted_count} of {m} canaries were inserted; fair coins are that uneven with probability "
            f"{coin_p_value:.1g}",
        )
    points = tuple(_operating(statistics[name], inserted, rate) for rate in RATES)
    return CanaryBound(
        m, inserted_count, epsilon, confidence, delta, r, v, name, points, auc, notes
    )


def _operating(statistic: Tensor, inserted: Tensor, rate: float) -> Operating:
    """Return the share of inserted canaries above a threshold that a share ``rate`` of the omitted exceed."""
    inserted_count = int(inserted.sum())
    max_false_positives = int(rate * (len(inserted) - inserted_count))
    share = true_positive_rate(as_array(statistic), as_array(inserted), rate)
    low, high = count_interval(round(share * inserted_count), inserted_count)
    return Operating(
        rate, max_false_positives, share, (low / inserted_count, high / inserted_count)
    )
