"""The held-out control against its definition, and that it neither cries wolf nor sleeps."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from residuum import similarity
from residuum.errors import InputError
from residuum.evaluation import Calibration, calibrate, score
from residuum.evaluation.matching import why_not_calibrated
from residuum.evaluation.null import (
    count_interval,
    draw_sets,
    smallest_significant,
    step_down,
)
from residuum.records import Dataset
from tests.unit.evaluation.test_evaluation import naive_greedy, noise, victim


def control(candidates: torch.Tensor, train: Dataset, holdout: Dataset, seed: int) -> Calibration:
    gain = similarity.ncc(candidates, torch.cat([train.x, holdout.x])).numpy()
    return calibrate(gain, len(train), subsets=200, rng=np.random.default_rng(seed))


def naive_percentile(pairs: list[tuple[int, float]]) -> float:
    """The value of rank ceil(0.99 (N + 1)) / N among the matched ones of N distinct samples."""
    pool = len({sample for sample, _ in pairs})
    values = sorted(value for _, value in pairs if value > -math.inf)
    position = math.ceil(len(values) * Fraction(math.ceil(Fraction(99, 100) * (pool + 1)), pool))
    return values[position - 1] if 0 < position <= len(values) else math.inf


def naive_control(gain, value, mixed, held_out):
    """Recovered, expected count and p as ``null`` defines them, one set and one value at a time."""

    def outcome(columns):
        chosen = naive_greedy(gain[:, columns])
        return [
            (s, value[c, s] if c >= 0 else -math.inf) for s, c in zip(columns, chosen, strict=True)
        ]

    def strength(matches):
        """T: how far the values of a set lie beyond the percentile of all outsiders."""
        inside = {sample for sample, _ in matches}
        bar = naive_percentile(
            [pair for matches_of_set in union for pair in matches_of_set if pair[0] not in inside]
        )
        return sum(value - bar for _, value in matches if value > bar)

    def beats_the_others(sample, value):
        return value > naive_percentile([pair for pair in control if pair[0] != sample])

    union = [outcome(columns) for columns in mixed]
    control = [pair for columns in held_out for pair in outcome(columns)]
    recovered = [value > naive_percentile(control) for _, value in union[0]]
    chance = sum(beats_the_others(*pair) for pair in control)
    strengths = [strength(matches) for matches in union]
    as_strong = sum(value >= strengths[0] for value in strengths)  # the observed set among them
    p = Fraction(as_strong, len(union)) if any(recovered) else Fraction(1)
    return recovered, Fraction(chance, len(held_out)), p, strengths


@pytest.mark.parametrize(
    ("planted", "m", "other", "strata"),
    [
        (0, 8, False, False),
        (0, 8, True, True),
        (1, 8, False, True),
        (1, 8, True, False),
        (1, 3, True, True),
        (1, 3, False, False),
        (2, 8, False, False),
        (2, 8, True, True),
        (4, 8, False, True),
        (4, 8, True, False),
    ],
)
def test_the_control_equals_its_definition(planted, m, other, strata):
    n, rng = 5, np.random.default_rng(planted)
    gain = rng.standard_normal((m, n + 110))
    gain[np.arange(planted), np.arange(planted)] += 5
    value = gain + 0.3 * rng.standard_normal(gain.shape) if other else gain
    labels = (np.arange(n + 110) % 7 < 2).astype(int)  # two of the five, 31 of the 110
    seen = labels if strata else np.zeros_like(labels)
    calibration = calibrate(
        gain,
        n,
        value=(lambda candidate, column: value[candidate, column]) if other else None,
        strata=labels if strata else None,
        subsets=200,
        rng=np.random.default_rng(9),
    )
    rng = np.random.default_rng(9)
    mixed = [list(range(n)), *draw_sets(seen, seen[:n], 200, rng).tolist()]
    held_out = (n + draw_sets(seen[n:], seen[:n], 200, rng)).tolist()
    recovered, by_chance, p, strengths = naive_control(gain, value, mixed, held_out)
    assert calibration.recovered.tolist() == recovered
    assert calibration.expected_by_chance == float(by_chance)
    assert calibration.p_value == float(p)
    np.testing.assert_allclose(calibration.excess, strengths, rtol=1e-12, atol=1e-12)
    assert (calibration.p_value <= 0.01) == (planted > 1)


def false_alarms(calibrations: list[Calibration], level: float = 0.01) -> int:
    return sum(calibration.p_value <= level for calibration in calibrations)


@pytest.mark.parametrize(("n", "pool", "m"), [(50, 100, 100), (20, 400, 40), (20, 200, 1)])
def test_noise_is_called_a_leak_no_more_often_than_stated(n, pool, m):
    """At 1%, more than 4 of 100 would happen by chance once in 290 tests; more than 31 at 20% once in 320."""
    calibrations = [control(noise(500 + s, m), *victim(s, n, pool), s) for s in range(100)]
    assert false_alarms(calibrations) <= 4
    assert false_alarms(calibrations, 0.2) <= 31
    recovered = np.mean([calibration.recovered.sum() for calibration in calibrations])
    expected = np.mean([calibration.expected_by_chance for calibration in calibrations])
    assert recovered <= 0.01 * n + 0.2
    assert recovered == pytest.approx(expected, abs=0.2)
    assert expected == pytest.approx(0.01 * n, abs=0.12)


def test_images_like_the_held_out_ones_are_no_leak():
    calibrations = []
    for seed in range(100):
        train, holdout = victim(seed, 20, 240)
        candidates_near = holdout.x[:40]
        holdout_rest = holdout.replace(x=holdout.x[40:], y=holdout.y[40:])
        calibrations.append(
            control(candidates_near + 0.1 * noise(500 + seed, 40), train, holdout_rest, seed)
        )
    assert false_alarms(calibrations) <= 4


def test_planted_copies_are_always_found():
    for seed in range(20):
        train, holdout = victim(seed)
        copies = train.x[:8] + 0.5 * noise(900 + seed, 8)
        candidates = torch.cat([copies, noise(500 + seed, 32)])
        scores = score(candidates, train, holdout, metrics=(), subsets=200)
        assert scores.p_value < 0.01
        assert scores.recovered >= 8
        assert [row.matches["ncc"].candidate for row in scores.per_sample[:8]] == list(range(8))


def test_adding_the_training_mean_would_turn_noise_into_a_leak():
    """Each training sample is 1/n of the mean, so the mean resembles it and no held-out one."""
    with_mean, without = [], []
    for seed in range(20):
        train, holdout = victim(seed)
        junk = 0.1 * noise(700 + seed, 40)
        raw = [data.replace(x=data.images, mean=None) for data in (train, holdout)]
        with_mean.append(control(junk + train.mean, *raw, seed))
        without.append(control(junk, train, holdout, seed))
    assert false_alarms(with_mean) >= 15
    assert false_alarms(without) <= 2


def naive_step_down(rows: list[list[float]]) -> list[float]:
    """Westfall and Young's step-down max-T in plain Python, one test and one set at a time."""
    scaled = []
    for row in rows:
        mean = sum(row) / len(row)
        spread = math.sqrt(sum((value - mean) ** 2 for value in row) / len(row))
        scaled.append([(value - mean) / spread for value in row])
    open_tests, adjusted, worst = list(range(len(rows))), {}, 0.0
    while open_tests:
        strongest = max(open_tests, key=lambda k: scaled[k][0])
        observed = scaled[strongest][0]
        beaten = sum(max(scaled[k][b] for k in open_tests) >= observed for b in range(len(rows[0])))
        worst = max(worst, beaten / len(rows[0]))
        adjusted[strongest] = worst
        open_tests.remove(strongest)
    return [adjusted[k] for k in range(len(rows))]


@pytest.mark.parametrize("seed", range(6))
def test_several_tests_equal_their_definition(seed):
    rng = np.random.default_rng(seed)
    excess = rng.exponential(rng.uniform(0.1, 9, (7, 1)), (7, 301))
    excess[:2, 0] += 4 * excess[:2].std(1)
    assert step_down(excess).tolist() == pytest.approx(naive_step_down(excess.tolist()), abs=1e-12)


def test_the_smallest_p_does_not_grow_with_the_number_of_tests():
    rng = np.random.default_rng(0)
    excess = rng.exponential(1.0, (12, 2001))
    excess[3, 0] = 100.0
    adjusted = step_down(excess)
    assert adjusted[3] == pytest.approx(1 / 2001)
    assert (np.delete(adjusted, 3) > 0.01).all()
    assert step_down(np.zeros((2, 300))).tolist() == [1.0, 1.0]  # nothing beyond anything


def test_the_level_holds_over_all_tests():
    """At 5% over 6 tests, more than 22 of 200 would happen by chance once in 2500."""
    rng = np.random.default_rng(0)
    alarms = sum(step_down(rng.exponential(1.0, (6, 200))).min() <= 0.05 for _ in range(200))
    assert alarms <= 22


def test_one_finding_among_many_tests_is_found():
    """8 of 40 are recovered in one of 12 tests; pooled with eleven that find nothing they could drown."""
    for seed in range(8):
        train, holdout = victim(seed, 40, 400)
        rows = [
            train.x[:8] + 0.5 * noise(900 + seed, 8),
            *[noise(500 + 20 * seed + k, 80) for k in range(11)],
        ]
        calibrations = [control(candidates, train, holdout, seed) for candidates in rows]
        adjusted = step_down(np.stack([calibration.excess for calibration in calibrations]))
        assert adjusted[0] <= 0.01


def test_a_floor_changes_nothing_and_gives_way_where_it_is_not_safe(monkeypatch):
    rng = np.random.default_rng(3)
    gain = rng.standard_normal((60, 40 + 120))
    gain[np.arange(40), np.arange(40)] += 6  # the whole training set comes back
    calibrations = [calibrate(gain, 40, subsets=200, rng=np.random.default_rng(1))]
    for floor in (-np.inf, 1e9):  # an estimated floor is almost always safe
        monkeypatch.setattr(
            "residuum.evaluation.null.estimate_floor", lambda *_, floor=floor: floor
        )
        calibrations.append(calibrate(gain, 40, subsets=200, rng=np.random.default_rng(1)))
    for calibration in calibrations[1:]:
        assert calibration.threshold == calibrations[0].threshold
        np.testing.assert_array_equal(calibration.excess, calibrations[0].excess)
        np.testing.assert_array_equal(calibration.chance, calibrations[0].chance)


def test_the_naive_percentile_is_conformal():
    for pool, percentile in ((100, 99.0), (1000, 990.0), (98, math.inf)):
        assert naive_percentile([(sample, float(sample)) for sample in range(pool)]) == percentile
    assert naive_percentile([(sample, -math.inf) for sample in range(100)]) == math.inf


def test_subsets_have_the_label_counts_asked_for():
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    sets = draw_sets(labels, np.array([0, 0, 2]), 300, np.random.default_rng(0))
    assert (np.sort(labels[sets], axis=1) == [0, 0, 2]).all()
    assert len(np.unique(sets)) == 70
    with pytest.raises(InputError, match="label 2"):
        draw_sets(labels, np.full(21, 2), 5, np.random.default_rng(0))


def test_every_subset_is_as_likely_as_every_other():
    sets = draw_sets(np.zeros(6), np.zeros(2), 15_000, np.random.default_rng(0))
    pairs, counts = np.unique(np.sort(sets, axis=1), axis=0, return_counts=True)
    assert len(pairs) == 15
    assert abs(counts - 1000).max() < 150  # five standard deviations


def test_two_thousand_subsets_are_drawn_unless_said_otherwise():
    gain = noise(0, 4, (120,)).numpy()
    default, explicit = (
        calibrate(gain, 10, rng=np.random.default_rng(0), **subsets)
        for subsets in ({}, {"subsets": 2000})
    )
    assert default.expected_by_chance == explicit.expected_by_chance > 0
    np.testing.assert_array_equal(default.reference, explicit.reference)


def test_interval_and_smallest_significant_count():
    assert count_interval(0, 20) == pytest.approx((0, 3.3687), abs=1e-3)  # published tables
    assert count_interval(10, 20) == pytest.approx((5.4393, 14.5607), abs=1e-3)
    assert count_interval(20, 20)[1] == 20
    assert smallest_significant(1, 100) == 1
    assert smallest_significant(50, 100) == 5
    assert smallest_significant(2, 3) is None


def test_too_small_a_pool_is_not_calibrated():
    assert "no held-out set" in why_not_calibrated(20, None)
    assert "at least 100 samples" in why_not_calibrated(20, 99)
    assert "at least 100 samples" in why_not_calibrated(100, 99)
    assert "at least 150 samples, as many as the training set; it has 120" in why_not_calibrated(
        150, 120
    )
    assert why_not_calibrated(20, 100) == ""
    with pytest.raises(InputError, match="the chance level is unknown"):
        calibrate(np.zeros((3, 30)), 20, rng=np.random.default_rng(0))
    with pytest.raises(InputError, match="at least 200 random subsets"):
        calibrate(np.zeros((3, 300)), 20, subsets=50, rng=np.random.default_rng(0))
