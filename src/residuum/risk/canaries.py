"""Compute a lower bound on epsilon from one training run with canaries (Steinke, Nasr and Jagielski 2023).

Each of m canaries is inserted into the training set with probability 1/2, independently. A guesser sees the
network and all canaries, but not which of them were inserted. The guesser guesses r of them, abstains from
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

GUESSES = (1.0, 0.5, 0.25, 0.1)  # shares of all canaries that are guessed
RATES = (0.01, 0.001)  # false positive rates of the operating points
MIN_CANARIES = 10  # of each kind
MIN_COIN_P_VALUE = 1e-3  # with a smaller p-value, the coins were hardly fair


def compute_p_value(m: int, r: int, v: int, epsilon: float, delta: float = 0.0) -> float:
    """Return a bound on the probability of at least v right guesses if the training is private.

    Args:
        m: Number of canaries.
        r: Number of guesses.
        v: Number of right guesses.
        epsilon: Epsilon of the privacy definition.
        delta: Delta of the privacy definition.

    Returns:
        The bound.
    """
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(v - 1, r, q))
    if delta == 0:
        return tail
    steepest = below = 0.0
    for i in range(1, v + 1):
        below += float(binom.pmf(v - i, r, q))  # P(v > W >= v - i)
        steepest = max(steepest, below / i)
    return min(1.0, tail + 2 * m * delta * steepest)


def compute_epsilon_bound(m: int, r: int, v: int, confidence: float, delta: float = 0.0) -> float:
    """Return the largest epsilon that v right guesses rule out.

    Args:
        m: Number of canaries.
        r: Number of guesses.
        v: Number of right guesses.
        confidence: Confidence of the bound.
        delta: Delta of the privacy definition.

    Returns:
        The bound, 0 if no epsilon is ruled out.
    """
    level = 1 - confidence
    if compute_p_value(m, r, v, 0.0, delta) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while compute_p_value(m, r, v, high, delta) < level:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if compute_p_value(m, r, v, middle, delta) < level else (low, middle)
        )
    return low


def count_guesses(statistic: Tensor, inserted: Tensor, share: float) -> tuple[int, int]:
    """Count guesses and right guesses, half of them at each end of the statistic.

    Canaries that tie with the first one outside of an end are not guessed.

    Args:
        statistic: Values (m,) that are larger for canaries that seem inserted.
        inserted: Which canaries were inserted, (m,) bool.
        share: Share of the canaries that are guessed.

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
    """Return the best bound of all statistics and shares of guesses, each at its share of the level.

    Args:
        statistics: Values (m,) by name that are larger for canaries that seem inserted.
        inserted: Which canaries were inserted, (m,) bool.
        confidence: Confidence of the bound.
        delta: Delta of the privacy definition.

    Returns:
        The bound.

    Raises:
        DataError: If too few canaries were inserted or omitted.
    """
    m, count = len(inserted), int(inserted.sum())
    if min(count, m - count) < MIN_CANARIES:
        raise DataError(
            f"A bound needs at least {MIN_CANARIES} inserted and {MIN_CANARIES} omitted canaries; got "
            f"{count} and {m - count}.",
            "Before training, toss a coin for each canary. List both kinds in the file.",
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
    chance = binomtest(count, m).pvalue
    notes: tuple[str, ...] = ()
    if chance < MIN_COIN_P_VALUE:
        notes = (
            f"{count} of {m} canaries were inserted; fair coins are that uneven with probability "
            f"{chance:.1g}",
        )
    points = tuple(_operating(statistics[name], inserted, rate) for rate in RATES)
    return CanaryBound(m, count, epsilon, confidence, delta, r, v, name, points, auc, notes)


def _operating(statistic: Tensor, inserted: Tensor, rate: float) -> Operating:
    """Return the true positive rate at a threshold that at most ``rate`` of omitted canaries exceed."""
    total = int(inserted.sum())
    allowed = int(rate * (len(inserted) - total))
    share = true_positive_rate(as_array(statistic), as_array(inserted), rate)
    low, high = count_interval(round(share * total), total)
    return Operating(rate, allowed, share, (low / total, high / total))
