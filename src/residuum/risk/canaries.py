"""A lower bound on epsilon from one training run with canaries (Steinke, Nasr and Jagielski 2023).

Of m canaries each was inserted into the training set with probability 1/2, independently. A guesser who
sees the network and every canary, but not which were inserted, guesses r of them and abstains from the
others; v guesses are right. Were the training (epsilon, delta)-differentially private, then, with
q = e^eps / (1 + e^eps) and W ~ Binomial(r, q) (their Theorem 5.2),

    P(at least v right)  <=  P(W >= v) + 2 m delta max_{1 <= i <= v} P(v > W >= v - i) / i

The bound is the largest epsilon whose right side stays below 1 - confidence. The guesser calls the r/2
canaries of the highest statistic inserted and the r/2 of the lowest left out. If canaries tie at the edge
of these guesses, the guesser abstains from all of them. The order of the file must not decide, because files
often list one kind of canary first. The best number of guesses and the best statistic are not known
beforehand. So every share in ``GUESSES`` is tried with every statistic, and each gets its share of
1 - confidence.
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
RATES = (0.01, 0.001)  # false positives, of the operating points
MIN_CANARIES = 10  # of either kind
UNFAIR = 1e-3  # p-value below which the coins were hardly fair


def p_value(m: int, r: int, v: int, epsilon: float, delta: float = 0.0) -> float:
    """Return the probability of at least v right guesses of r, of m canaries, under (epsilon, delta)."""
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(v - 1, r, q))
    if delta == 0:
        return tail
    steepest = below = 0.0
    for i in range(1, v + 1):
        below += float(binom.pmf(v - i, r, q))  # P(v > W >= v - i)
        steepest = max(steepest, below / i)
    return min(1.0, tail + 2 * m * delta * steepest)


def epsilon_bound(m: int, r: int, v: int, confidence: float, delta: float = 0.0) -> float:
    """Return the largest epsilon that v right guesses of r rule out with ``confidence``; 0 if none."""
    level = 1 - confidence
    if p_value(m, r, v, 0.0, delta) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(m, r, v, high, delta) < level:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(m, r, v, middle, delta) < level else (low, middle)
    return low


def guessed(statistic: Tensor, inserted: Tensor, share: float) -> tuple[int, int]:
    """Count guesses and right guesses (r, v), half of them at each end of the statistic.

    Canaries that tie with the first one outside of an end are not guessed.
    """
    half = max(1, int(share * len(statistic) / 2))
    ascending = statistic.sort().values
    highest = statistic > ascending[-half - 1]
    lowest = statistic < ascending[half]
    right = int(inserted[highest].sum()) + int((~inserted[lowest]).sum())
    return int(highest.sum() + lowest.sum()), right


def bound(
    statistics: dict[str, Tensor], inserted: Tensor, confidence: float, delta: float
) -> CanaryBound:
    """Return the best bound of all statistics and shares of guesses, each at its share of the level.

    Args:
        statistics: By name, (m,) values that are larger for canaries that seem inserted.
        inserted: Which canaries were inserted, (m,) bool.
        confidence: Of the bound.
        delta: Of the privacy definition.

    Raises:
        DataError: If too few canaries were inserted or left out.
    """
    m, count = len(inserted), int(inserted.sum())
    if min(count, m - count) < MIN_CANARIES:
        raise DataError(
            f"A bound needs {MIN_CANARIES} canaries inserted and {MIN_CANARIES} left out at least; got "
            f"{count} and {m - count}.",
            "Before training toss a coin for each canary, and list both kinds in the file.",
        )
    each = 1 - (1 - confidence) / (len(GUESSES) * len(statistics))
    bounds = []
    for name, statistic in statistics.items():
        auc = area_under_curve(as_array(statistic), as_array(inserted))
        for share in GUESSES:
            r, v = guessed(statistic, inserted, share)
            bounds.append((epsilon_bound(m, r, v, each, delta), auc, r, v, name))
    epsilon, auc, r, v, name = max(bounds)
    chance = binomtest(count, m).pvalue
    notes: tuple[str, ...] = ()
    if chance < UNFAIR:
        notes = (
            f"{count} of {m} canaries inserted: fair coins are that uneven in {chance:.1g} of cases",
        )
    points = tuple(_operating(statistics[name], inserted, rate) for rate in RATES)
    return CanaryBound(m, count, epsilon, confidence, delta, r, v, name, points, auc, notes)


def _operating(statistic: Tensor, inserted: Tensor, rate: float) -> Operating:
    """Return the true positives at a threshold that at most the share ``rate`` of the omitted exceeds."""
    total = int(inserted.sum())
    allowed = int(rate * (len(inserted) - total))
    share = true_positive_rate(as_array(statistic), as_array(inserted), rate)
    low, high = count_interval(round(share * total), total)
    return Operating(rate, allowed, share, (low / total, high / total))
