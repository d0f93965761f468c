"""The held-out control: what would these candidates score against samples nobody trained on?

The statistic of a set A of n samples is the value of every sample's match, candidates given out
one-to-one within A (greedily, the best pair first). Two questions are asked of it.

**Which samples are recovered?** Those whose value beats the 99th percentile of the statistic over
random held-out sets of size n. The percentile is the conformal one: the rank ceil(0.99 (N + 1)) of
N, so that a sample outside the pool of N beats it with probability at most 1%, not merely 1% of
the pool itself. No N below 99 has such a rank; hence the smallest pool.

**Are there more than chance gives?** Comparing with the counts of held-out sets alone makes the
null too narrow: those sets overlap and share the pool's best samples, which bound their counts but
not the training set's. On digits with noise as candidates, n = 50 and N = 100, such a test called a
leak at 1% in 32% of the cases. Instead: when nothing leaks, training and held-out samples are
exchangeable, so the training set A_0 is one more random n-subset of their union, beside A_1..A_B.

    T(A) = (count, excess) of the values of A beyond the percentile of the samples OUTSIDE A,
    p = (1 + #{b: T(A_b) >= T(A_0)}) / (B + 1), compared count first, excess to break ties.

The values that outsiders take come from all of A_0..A_B alike, so T treats them alike and p is
valid at any pool size. The price is candour about small pools: k recovered samples among n cannot
be more surprising than (n/(n + N))^k, see ``smallest_significant``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from residuum.errors import InputError
from residuum.evaluation.matching import Array, greedy_in_sets, why_not_calibrated

ONE_IN = 100  # one false positive in this many
SIGNIFICANCE = 0.01
MIN_SUBSETS = 200


@dataclass(frozen=True)
class Calibration:
    """What the control says of n training samples; values are oriented, higher is better.

    candidate, value: (n,) each sample's one-to-one match, -1 and -inf for none; threshold: the 99th
    percentile of chance; recovered: (n,) beyond it; expected_by_chance: mean count of a held-out set,
    each sample judged by the others; p_value: of the permutation test; reference: (n,) columns of
    one held-out set; smallest_significant: the least count that the pool's size lets reach 1%.
    """

    candidate: Array
    value: Array
    threshold: float
    recovered: Array
    expected_by_chance: float
    p_value: float
    reference: Array
    smallest_significant: int | None


def calibrate(
    gain: Array,
    n: int,
    *,
    value: Callable[[Array, Array], Array] | None = None,
    strata: Array | None = None,
    subsets: int = 500,
    rng: np.random.Generator,
) -> Calibration:
    """Judge the matches of the first ``n`` columns of ``gain`` by the columns after them.

    gain: (m, n + N) oriented similarities, training samples first, held-out pool after; value: maps
    k candidates and k columns to k oriented scores where matches are scored by something other than
    ``gain``; strata: (n + N,) labels; subsets then hold as many samples of each as the training set.
    """
    pool = gain.shape[1] - n
    if reason := why_not_calibrated(n, pool):
        raise InputError(f"{reason}.", "Give a larger held-out set.")
    if subsets < MIN_SUBSETS:
        raise InputError(
            f"A control needs at least {MIN_SUBSETS} subsets; got {subsets}.", "Say subsets=500."
        )
    labels = np.zeros(gain.shape[1], dtype=int) if strata is None else strata
    mixed = draw_sets(labels, labels[:n], subsets, rng)
    held_out = n + draw_sets(labels[n:], labels[:n], subsets, rng)
    sets = np.concatenate([np.arange(n)[None], mixed, held_out])
    candidate = greedy_in_sets(gain, sets)
    values = matched_values(gain, value, candidate, sets)

    control = _Outcomes(values[1 + subsets :], held_out, gain.shape[1])
    threshold = control.percentile_without(np.array([], dtype=int))
    recovered = values[0] > threshold
    union = _Outcomes(values[: 1 + subsets], sets[: 1 + subsets], gain.shape[1])
    # A leak of no sample is no leak, whatever the outsiders of the union say.
    p_value = _permutation_p_value(union) if recovered.any() else 1.0
    return Calibration(
        candidate=candidate[0],
        value=values[0],
        threshold=threshold,
        recovered=recovered,
        expected_by_chance=_expected_count(control),
        p_value=p_value,
        reference=held_out[0],
        smallest_significant=smallest_significant(n, pool),
    )


def percentile(ascending: Array, pool: int) -> float:
    """The conformal 99th percentile of matched values that stem from ``pool`` samples.

    Samples without a match are left out, which can only raise it. Without any match it is +inf.
    """
    rank = pool + 1 - (pool + 1) // ONE_IN  # ceil(0.99 (pool + 1))
    position = -(-len(ascending) * rank // pool)
    return float(ascending[position - 1]) if 0 < position <= len(ascending) else float("inf")


def draw_sets(labels: Array, like: Array, count: int, rng: np.random.Generator) -> Array:
    """``count`` random sets of positions in ``labels`` with the label counts of ``like``. (count, n)."""
    parts = []
    for label, size in zip(*np.unique(like, return_counts=True), strict=True):
        where = np.flatnonzero(labels == label)
        if len(where) < size:
            raise InputError(
                f"Subsets need {size} held-out samples of label {label}; there are {len(where)}.",
                "Give more of them, or do not match labels.",
            )
        keys = rng.random((count, len(where)))
        parts.append(where[np.argpartition(keys, size - 1, axis=1)[:, :size]])
    return np.concatenate(parts, axis=1)


def count_interval(count: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Naive interval of a count: Clopper-Pearson as if the samples were independent trials.

    Matches are one-to-one, so they are not; and chance is not subtracted.
    """
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else betaincinv(count, n - count + 1, tail)
    high = 1.0 if count == n else betaincinv(count + 1, n - count, 1 - tail)
    return n * float(low), n * float(high)


def smallest_significant(n: int, pool: int) -> int | None:
    """Least k such that k given samples all fall into a random n-subset with probability <= 1%."""
    probability = 1.0
    for k in range(n):
        probability *= (n - k) / (n + pool - k)
        if probability <= SIGNIFICANCE:
            return k + 1
    return None


class _Outcomes:
    """Values of many sets of samples, sorted once so that percentiles of parts of them are cheap."""

    def __init__(self, values: Array, sets: Array, samples: int) -> None:
        self.values, self.sets = values, sets
        self.drawn = np.zeros(samples, dtype=bool)
        self.drawn[sets] = True
        matched = values > -np.inf
        order = np.argsort(values[matched])
        self.ascending = values[matched][order]
        self.sample = sets[matched][order]

    def percentile_without(self, some: Array) -> float:
        """The percentile of chance by all samples of all sets but ``some``."""
        others = self.drawn.copy()
        others[some] = False
        return percentile(self.ascending[others[self.sample]], int(others.sum()))


def matched_values(
    gain: Array, value: Callable[[Array, Array], Array] | None, candidate: Array, sets: Array
) -> Array:
    """Scores of all matches; each distinct pair is scored once."""
    values = np.full(sets.shape, -np.inf)
    matched = candidate >= 0
    c, s = candidate[matched], sets[matched]
    if value is None:
        values[matched] = gain[c, s]
    else:
        pair, back = np.unique(c * gain.shape[1] + s, return_inverse=True)
        values[matched] = value(*np.divmod(pair, gain.shape[1]))[back]
    return values


def _permutation_p_value(union: _Outcomes) -> float:
    """p of the first set among all; see the module's head."""
    beyond = [
        np.maximum(values - union.percentile_without(inside), 0.0)
        for values, inside in zip(union.values, union.sets, strict=True)
    ]
    count = np.array([np.count_nonzero(row) for row in beyond])
    excess = np.array([row.sum() for row in beyond])
    as_strong = (count > count[0]) | ((count == count[0]) & (excess >= excess[0]))
    return float(as_strong.mean())


def _expected_count(control: _Outcomes) -> float:
    """Mean count of a held-out set, each sample judged by the percentile of the other samples."""
    total = len(control.ascending)
    if not total:
        return 0.0
    # The k-th least value of a part is at least the k-th least of the whole: no sample below this
    # floor can beat the others' percentile, so only the few above it are looked at.
    least_left = total - np.bincount(control.sample).max()
    floor = control.ascending[max(0, least_left - least_left // ONE_IN - 1)]
    suspects = np.unique(control.sample[control.ascending >= floor])
    count = sum(
        np.count_nonzero(control.values[control.sets == one] > control.percentile_without(one))
        for one in suspects
    )
    return float(count / len(control.sets))
