"""The lower limit of how many samples leak: a naive reference, its agreement with the test, its level."""

from __future__ import annotations

import numpy as np
import pytest

from residuum.evaluation.null import SIGNIFICANCE, calibrate, fewest_beyond_chance, step_down


def naive(
    excess: np.ndarray, own_excess: np.ndarray, test: int, level: float = SIGNIFICANCE
) -> int:
    """Remove the largest contributions one by one until single-step max-T no longer rejects."""
    standard = [(row - row.mean()) / (row.std() or 1.0) for row in excess]
    subsets = excess.shape[1] - 1
    contributions = sorted(own_excess.tolist(), reverse=True)
    for removed in range(len(contributions) + 1):
        statistic = excess[test, 0] - sum(contributions[:removed])
        statistic = (statistic - excess[test].mean()) / (excess[test].std() or 1.0)
        above = sum(max(row[b] for row in standard) >= statistic for b in range(1, subsets + 1))
        if (1 + above) / (subsets + 1) > level:
            return removed
    return len(contributions)


@pytest.mark.parametrize("seed", range(30))
def test_the_limit_equals_its_naive_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tests, n, subsets = int(rng.integers(1, 4)), 12, 250
    own_excess = rng.exponential(1.0, (tests, n)) * (rng.random((tests, n)) < 0.5)
    own_excess[0] += rng.choice([0.0, 3.0]) * (np.arange(n) < 5)
    excess = np.concatenate(
        [own_excess.sum(1, keepdims=True), rng.gamma(3.0, 1.0, (tests, subsets))], 1
    )
    for test in range(tests):
        assert fewest_beyond_chance(excess, own_excess[test], test) == naive(
            excess, own_excess[test], test
        )
        for level in (0.005, 0.05):  # each of two questions has half of the level of an audit
            limit = fewest_beyond_chance(excess, own_excess[test], test, level)
            assert limit == naive(excess, own_excess[test], test, level)


def leaking(k: int, rng: np.random.Generator) -> np.ndarray:
    """Similarities of 30 candidates to 25 training and 200 held-out samples; k samples leak."""
    gain = rng.normal(0.0, 0.2, (30, 225))
    gain[np.arange(k), np.arange(k)] = rng.uniform(0.8, 1.0, k)
    return gain


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_the_limit_is_above_zero_if_and_only_if_the_test_rejects(k: int) -> None:
    for seed in range(10):
        rng = np.random.default_rng((seed, k))
        calibration = calibrate(leaking(k, rng), 25, subsets=400, rng=rng)
        p = float(step_down(calibration.excess[None])[0])
        limit = fewest_beyond_chance(calibration.excess[None], calibration.own_excess, 0)
        assert (limit > 0) == (p <= SIGNIFICANCE)


def test_the_limit_exceeds_the_truth_in_at_most_one_case_in_a_hundred_or_so() -> None:
    """300 networks with 3 leaking samples of 25. At 1%, more than 9 wrong limits have chance 0.1%."""
    wrong = reached = 0
    for seed in range(300):
        rng = np.random.default_rng((seed, 99))
        calibration = calibrate(leaking(3, rng), 25, subsets=200, rng=rng)
        limit = fewest_beyond_chance(calibration.excess[None], calibration.own_excess, 0)
        wrong += limit > 3
        reached += limit >= 1
    assert wrong <= 9
    assert reached >= 200  # the limit is not 0 throughout
