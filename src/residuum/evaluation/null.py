"""The held-out control: what would these candidates score against samples nobody trained on?

The statistic of a set A of n samples is the value of every sample's match, candidates given out
one-to-one within A (greedily, the best pair first). Three questions are asked of it.

**Which samples are recovered?** Those whose value beats the 99th percentile of the statistic over
random held-out sets of size n. The percentile is the conformal one: the rank ceil(0.99 (N + 1)) of
N, so that a sample outside the pool of N beats it with probability at most 1%, not merely 1% of
the pool itself. No N below 99 has such a rank; hence the smallest pool.

**Are there more than chance gives?** Comparing with the counts of held-out sets alone makes the
null too narrow: those sets overlap and share the pool's best samples, which bound their counts but
not the training set's. On digits with noise as candidates, n = 50 and N = 100, such a test called a
leak at 1% in 32% of the cases. Instead: when nothing leaks, training and held-out samples are
exchangeable, so the training set A_0 is one more random n-subset of their union, beside A_1..A_B.

    T(A) = sum over A of how far values lie beyond the percentile of the samples OUTSIDE A,
    p = (1 + #{b: T(A_b) >= T(A_0)}) / (B + 1).

The values that outsiders take come from all of A_0..A_B alike, so T treats them alike and p is
valid at any pool size. The price is candour about small pools: k recovered samples among n cannot
be more surprising than (n/(n + N))^k, see ``smallest_significant``.

**Which of several tests find more?** All share the sets A_0..A_B. Each test's T is standardized over
them, and :func:`step_down` compares the largest with the largest of every A_b (Westfall and Young):
the level holds over all tests together, and the smallest p stays 1/(B + 1) however many there are.

Only values near or beyond the percentile matter, and greedy matching settles the best pairs first: what
pairs below some floor do cannot change what lies above it. So pairs below a floor that a few sets show
to be safe are never looked at, and all are where it turns out not to be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from residuum.errors import InputError
from residuum.evaluation.matching import STATE, Array, greedy_in_sets, why_not_calibrated

ONE_IN = 100  # one false positive in this many
SIGNIFICANCE = 0.01  # of a verdict
MIN_SUBSETS, SUBSETS = (200, 2000)  # the least p is 1 / (subsets + 1), to be well below
PILOT = 16  # held-out sets by which a floor is chosen
SAFE = 5  # the best 1 in 20 are looked at, where 1 in 100 decides


@dataclass(frozen=True)
class Calibration:
    """What the control says of n training samples; values are oriented, higher is better.

    candidate, value: (n,) each sample's one-to-one match, -1 and -inf for none.
    threshold: the 99th percentile of chance.
    recovered: (n,) beyond it.
    excess: (B + 1,) the statistic T of the training set, then of the permuted sets.
    own_excess: (n,) what each training sample adds to its T.
    chance: (B, n) which samples of held-out sets beat the others' percentile.
    reference: (n,) columns of one held-out set.
    smallest_significant: the least count that the pool's size lets reach 1%.
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
        """Mean count of a held-out set, each sample judged by the percentile of the others."""
        return float(self.chance.sum() / len(self.chance))

    @property
    def p_value(self) -> float:
        """Of the permutation test; a leak of no sample is no leak, whatever outsiders say."""
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
    """Judge the matches of the first ``n`` columns of ``gain`` by the columns after them.

    gain: (m, n + N) oriented similarities, training samples first, held-out pool after.
    value: maps k candidates and k columns to k oriented scores where matches are scored by
        something other than ``gain``.
    strata: (n + N,) labels; subsets then hold as many samples of each as the training set.
    """
    pool = gain.shape[1] - n
    if reason := why_not_calibrated(n, pool):
        raise InputError(f"{reason}.", "Give a larger held-out set.")
    if subsets < MIN_SUBSETS:
        said = f"A control needs at least {MIN_SUBSETS} subsets; got {subsets}."
        raise InputError(said, "Say subsets=2000.")
    labels = np.zeros(gain.shape[1], dtype=int) if strata is None else strata
    mixed = np.concatenate([np.arange(n)[None], draw_sets(labels, labels[:n], subsets, rng)])
    held_out = n + draw_sets(labels[n:], labels[:n], subsets, rng)
    own = greedy_in_sets(gain, mixed[:1])
    floor = safe_floor(gain, value, held_out[:PILOT])
    while True:
        union = _Outcomes(gain, value, mixed, floor)
        control = _Outcomes(gain, value, held_out, floor)
        bars = union.percentiles_without(mixed)
        nobody = np.zeros((1, 0), dtype=int)
        threshold = float(control.percentiles_without(nobody)[0])
        chance = control.beyond_the_others()
        if not (np.isnan(bars).any() or np.isnan(threshold) or chance is None):
            break
        floor = -np.inf  # not safe after all
    values = matched_values(gain, value, own, mixed[:1])[0]
    beyond = np.maximum(union.values - bars[:, None], 0.0)
    return Calibration(
        candidate=own[0],
        value=values,
        threshold=threshold,
        recovered=values > threshold,
        excess=beyond.sum(1),
        own_excess=beyond[0],
        chance=chance,
        reference=held_out[0],
        smallest_significant=smallest_significant(n, pool),
    )


def step_down(excess: Array) -> Array:
    """Adjusted p of every test, valid over all of them together. excess: (tests, B + 1) -> (tests,).

    The training set's statistic is in the first column. Step-down max-T: the strongest test is held
    against the strongest of every permuted set, the next against the strongest of those left.
    """
    spread = excess.std(1, keepdims=True)
    t = (excess - excess.mean(1, keepdims=True)) / np.where(spread > 0, spread, 1.0)
    order = np.argsort(-t[:, 0], kind="stable")
    largest_left = np.maximum.accumulate(t[order[::-1]])[::-1]  # of each test and those after it
    p = (largest_left >= t[order, :1]).mean(1)
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


def count_interval(count: int, n: int) -> tuple[float, float]:
    """Naive 95% interval of a count: Clopper-Pearson as if the samples were independent trials.

    Matches are one-to-one, so they are not; and chance is not subtracted.
    """
    from scipy.stats import binomtest

    share = binomtest(count, n).proportion_ci(0.95, method="exact")
    return n * float(share.low), n * float(share.high)


def smallest_significant(n: int, pool: int) -> int | None:
    """Least k such that k given samples all fall into a random n-subset with probability <= 1%."""
    probability = 1.0
    for k in range(n):
        probability *= (n - k) / (n + pool - k)
        if probability <= SIGNIFICANCE:
            return k + 1
    return None


class _Outcomes:
    """Values of many sets of samples, sorted once so that percentiles of parts of them are cheap.

    Values below ``floor`` are -inf here: how many there are is known, which suffices.
    """

    def __init__(
        self, gain: Array, value: Callable[[Array, Array], Array] | None, sets: Array, floor: float
    ) -> None:
        self.sets, self.samples, self.floor = sets, gain.shape[1], floor
        self.values = matched_values(gain, value, greedy_in_sets(gain, sets, floor), sets)
        seen = self.values > -np.inf
        matched = np.ones_like(seen) if floor > -np.inf else seen  # above a floor all get a match
        self.times = np.bincount(sets[matched], minlength=self.samples)
        self.drawn = np.bincount(sets.ravel(), minlength=self.samples) > 0
        order = np.argsort(-self.values[seen], kind="stable")
        self.descending, self.sample = self.values[seen][order], sets[seen][order]

    def percentiles_without(self, some: Array) -> Array:
        """The percentile of chance by all samples but those in each row of ``some``. (k, any) -> (k,).

        NaN where it lies below the floor.
        """
        step = max(1, STATE // max(1, len(self.sample)))
        parts = [self._percentiles(some[i : i + step]) for i in range(0, len(some), step)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def beyond_the_others(self) -> Array | None:
        """Whether each sample of each set beats the percentile of the other samples; None below the floor."""
        bar = np.full(self.samples, np.inf)
        # Without one sample the percentile sinks by the places that its own values may have held: who
        # is never among so many of the best beats nobody.
        places = _from_the_top(self.times.sum(), self.drawn.sum() - 1) + 1 + self.times.max()
        if self.floor > -np.inf and len(self.sample) < places:
            return None
        suspects = np.unique(self.sample[: max(0, places)])
        bar[suspects] = self.percentiles_without(suspects[:, None])
        return None if np.isnan(bar).any() else self.values > bar[self.sets]

    def _percentiles(self, some: Array) -> Array:
        """(k,) the percentile of what is left when the samples in each row of ``some`` are taken out.

        Values are sorted once for all rows. A row's percentile lies so many places from the top among
        the values of samples that are not in it: its place is counted down the common order, over a
        stretch that grows until all rows have found theirs. NaN: below everything that was kept, i.e.
        below the floor.
        """
        inside = np.zeros((len(some), self.samples), dtype=bool)
        inside[np.arange(len(some))[:, None], some] = True
        length = self.times.sum() - inside @ self.times
        place = _from_the_top(length, (self.drawn & ~inside).sum(1))
        found = np.where(place < 0, np.inf, np.nan)
        left = np.flatnonzero(place >= 0)
        look = int(2 * place.max(initial=0)) + 64
        while len(left) and len(self.sample):
            outside = np.cumsum(~inside[np.ix_(left, self.sample[:look])], axis=1)
            reached = outside[:, -1] > place[left]
            at = np.argmax(outside[reached] > place[left[reached], None], axis=1)
            found[left[reached]] = self.descending[at]
            left = left[~reached]
            if look >= len(self.sample):
                break
            look *= 4
        return found


def _from_the_top(length: Array | int, pool: Array | int) -> Array:
    """Place of the percentile among ``length`` values of ``pool`` samples, 0 the best; -1: beyond all."""
    length, pool = np.asarray(length), np.maximum(np.asarray(pool), 1)
    rank = pool + 1 - (pool + 1) // ONE_IN  # ceil(0.99 (pool + 1))
    position = -(-length * rank // pool)
    return np.where((position > 0) & (position <= length), length - position, -1)


def safe_floor(gain: Array, value: Callable[[Array, Array], Array] | None, sets: Array) -> float:
    """A gain that matches may lie below without changing any percentile, by a few held-out sets.

    None is safe where matches are scored by something else or some samples get no candidate.
    """
    if value is not None or len(gain) < sets.shape[1] or not np.isfinite(gain).all():
        return -np.inf
    values = matched_values(gain, None, greedy_in_sets(gain, sets), sets)
    return float(np.quantile(values, 1 - SAFE / ONE_IN))


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
