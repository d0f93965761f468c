"""Compute a lower bound on epsilon from one training run with canaries (Steinke, Nasr and Jagielski 2023).

A canary is a sample that is inserted into the training set with probability 1/2. Each of m canaries is
inserted or omitted independently of the others. From the network and all canaries we guess for r canaries
whether they were inserted, and v of these r guesses are right. If the training is (epsilon,
delta)-differentially private, then with q = e^eps / (1 + e^eps) and W ~ Binomial(r, q) (their Theorem 5.2)

    P(at least v right)  <=  P(W >= v) + 2 m delta max_{1 <= i <= v} P(v > W >= v - i) / i

The lower bound is the largest epsilon for which this right-hand side is below 1 - confidence.

A statistic is a number per canary that is larger if the canary seems inserted. We guess "inserted" for the
r/2 canaries with the highest statistic, and "omitted" for the r/2 canaries with the lowest statistic. If
several canaries tie at the edge of these guesses, we make no guess about any of them. Otherwise the order of
the canaries in the file would decide, and files often list the inserted canaries first.

The best number of guesses and the best statistic are not known in advance. Therefore every share in
``GUESSES`` is tried with every statistic, and 1 - confidence is divided equally among these trials.
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

# Canaries are test records that were inserted into the training set or left out at random. We guess only
# for the clearest canaries whether they were inserted. Each of these shares is tried.
GUESSES = (1.0, 0.5, 0.25, 0.1)
RATES = (0.01, 0.001)  # false positive rates at which a true positive rate is reported
MIN_CANARIES = 10  # a bound needs this many inserted canaries, and this many omitted canaries
# Each canary should be inserted with probability 1/2. A note warns the user if a binomial test of this
# probability has a p-value below this limit.
MIN_COIN_P_VALUE = 1e-3


def compute_p_value(m: int, r: int, v: int, epsilon: float, delta: float = 0.0) -> float:
    """Return an upper bound on the probability of at least v right guesses under differential privacy.

    A guess says whether a canary (a sample inserted with probability 1/2) was in the training set.

    Args:
        m: Number of canaries.
        r: Number of guesses about canaries.
        v: Number of right guesses.
        epsilon: Epsilon of the (epsilon, delta)-differential privacy that is assumed.
        delta: Delta of the (epsilon, delta)-differential privacy that is assumed.

    Returns:
        The upper bound on the probability.
    """
    # If delta is 0, a guess whether a canary was inserted is right with probability at most q.
    guess_probability = 1 / (1 + math.exp(-epsilon))
    upper_tail = float(binom.sf(v - 1, r, guess_probability))
    if delta == 0:
        return upper_tail
    # The bound in the docstring of this module needs the maximum of P(v > W >= v - i) / i over all i.
    largest_ratio = probability_below = 0.0
    for i in range(1, v + 1):
        probability_below += float(binom.pmf(v - i, r, guess_probability))  # P(v > W >= v - i)
        largest_ratio = max(largest_ratio, probability_below / i)
    return min(1.0, upper_tail + 2 * m * delta * largest_ratio)


def compute_epsilon_bound(m: int, r: int, v: int, confidence: float, delta: float = 0.0) -> float:
    """Return a lower bound on the privacy loss epsilon: smaller values make v right guesses improbable.

    A guess says whether a canary (a sample inserted with probability 1/2) was in the training set.

    Args:
        m: Number of canaries.
        r: Number of guesses.
        v: Number of right guesses.
        confidence: Probability with which the lower bound on epsilon holds, such as 0.95.
        delta: Delta of the (epsilon, delta)-differential privacy.

    Returns:
        The lower bound on epsilon. It is 0 if v right guesses are not improbable even under epsilon 0.
    """
    error_probability = 1 - confidence
    if compute_p_value(m, r, v, 0.0, delta) >= error_probability:
        return 0.0
    low_epsilon, high_epsilon = 0.0, 1.0
    while compute_p_value(m, r, v, high_epsilon, delta) < error_probability:
        low_epsilon, high_epsilon = high_epsilon, 2 * high_epsilon
    for _ in range(50):
        middle_epsilon = (low_epsilon + high_epsilon) / 2
        low_epsilon, high_epsilon = (
            (middle_epsilon, high_epsilon)
            if compute_p_value(m, r, v, middle_epsilon, delta) < error_probability
            else (low_epsilon, middle_epsilon)
        )
    return low_epsilon


def count_guesses(statistic: Tensor, inserted: Tensor, share: float) -> tuple[int, int]:
    """Guess which canaries were inserted, and count the guesses and the right guesses.

    Half of the guesses say "inserted", for the canaries with the highest statistic. The other half say
    "omitted", for the canaries with the lowest statistic. If a canary with a guess has the same statistic as
    a canary without a guess, both get no guess.

    Args:
        statistic: Values (m,) that are larger for canaries that seem inserted.
        inserted: Which canaries were inserted, (m,) bool.
        share: Share of the canaries about which a guess is made.

    Returns:
        The number of guesses r and the number of right guesses v.
    """
    guesses_per_side = max(1, int(share * len(statistic) / 2))
    sorted_statistic = statistic.sort().values
    seems_inserted = statistic > sorted_statistic[-guesses_per_side - 1]
    seems_omitted = statistic < sorted_statistic[guesses_per_side]
    right_count = int(inserted[seems_inserted].sum()) + int((~inserted[seems_omitted]).sum())
    return int(seems_inserted.sum() + seems_omitted.sum()), right_count


def find_best_bound(
    statistics: dict[str, Tensor], inserted: Tensor, confidence: float, delta: float
) -> CanaryBound:
    """Return the best lower bound on the privacy loss epsilon over several ways to guess canaries.

    Canaries are test records, and a guess says whether a canary was in the training set. All statistics and
    all shares in ``GUESSES`` are tried.

    The error probability 1 - confidence is divided equally among all these bounds.

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
            f"A lower bound on epsilon (the privacy loss) needs at least {MIN_CANARIES} canaries (test "
            f"records) in the training set and at least {MIN_CANARIES} canaries that were left out; got "
            f"{inserted_count} and {m - inserted_count}.",
            "Before the training, decide for each canary at random whether to insert it. List all "
            "canaries in the file.",
        )
    confidence_of_each = 1 - (1 - confidence) / (len(GUESSES) * len(statistics))
    epsilon_bounds = []
    for name, statistic in statistics.items():
        auc = area_under_curve(as_array(statistic), as_array(inserted))
        for share in GUESSES:
            r, v = count_guesses(statistic, inserted, share)
            epsilon_bounds.append(
                (compute_epsilon_bound(m, r, v, confidence_of_each, delta), auc, r, v, name)
            )
    epsilon, auc, r, v, name = max(epsilon_bounds)
    coin_p_value = binomtest(inserted_count, m).pvalue
    notes: tuple[str, ...] = ()
    if coin_p_value < MIN_COIN_P_VALUE:
        notes = (
            f"{inserted_count} of {m} canaries were inserted; if fair coins decide, a split at least this "
            f"uneven has probability {coin_p_value:.1g}",
        )
    # Each operating point is a pair of a false positive rate and the true positive rate that is reached at
    # it.
    operating_points = tuple(
        _measure_operating_point(statistics[name], inserted, rate) for rate in RATES
    )
    return CanaryBound(
        m, inserted_count, epsilon, confidence, delta, r, v, name, operating_points, auc, notes
    )


def _measure_operating_point(statistic: Tensor, inserted: Tensor, rate: float) -> Operating:
    """Return which share of inserted canaries a statistic detects at a false positive rate.

    A canary counts as inserted if its statistic exceeds a threshold. The threshold is chosen such that at
    most a share ``rate`` of the omitted canaries exceeds it. The true positive rate is the share of the
    inserted canaries above the threshold.
    """
    inserted_count = int(inserted.sum())
    max_false_positives = int(rate * (len(inserted) - inserted_count))
    true_positives = true_positive_rate(as_array(statistic), as_array(inserted), rate)
    low, high = count_interval(round(true_positives * inserted_count), inserted_count)
    return Operating(
        rate, max_false_positives, true_positives, (low / inserted_count, high / inserted_count)
    )
