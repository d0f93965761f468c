"""Repeats inside a restart and their two chance levels, against counting every case."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from residuum.reproduce.refael2025.measures import compare, repeats

# Restart 0 found sample 0 twice and 1 once; restart 1 found 0 once and 2 three times.
WHICH = torch.tensor([0, 0, 1, 0, 2, 2, 2])
RUN = torch.tensor([0, 0, 0, 1, 1, 1, 1])


def spare(samples) -> int:
    return len(samples) - len(set(samples))


def test_repeats_are_counted_inside_each_restart():
    found = repeats(WHICH, RUN, 10)
    assert found["matched_per_restart"] == [3, 4]
    assert found["repeats"] == 1 + 2  # pooled they would be 4
    assert repeats(WHICH, torch.zeros(7), 10)["repeats"] == 4


def test_uniform_chance_is_the_mean_over_all_sequences():
    n = 3
    naive = sum(
        sum(spare(sequence) for sequence in product(range(n), repeat=size)) / n**size
        for size in (3, 4)
    )
    assert repeats(WHICH, RUN, n)["repeats_by_chance"] == pytest.approx(naive, rel=1e-12)


def test_exchanged_chance_is_the_mean_over_all_assignments():
    samples = WHICH.tolist()
    cases = []
    for first in combinations(range(7), 3):
        second = [i for i in range(7) if i not in first]
        cases.append(spare([samples[i] for i in first]) + spare([samples[i] for i in second]))
    got = repeats(WHICH, RUN, 10)["repeats_if_exchanged"]
    assert got == pytest.approx(sum(cases) / len(cases), rel=1e-12)


def test_samples_found_once_by_every_restart_are_no_repeats():
    """Pooled counting calls these 20 matches of ten easy samples ten repeats."""
    easy = torch.arange(10).repeat(2)
    run = torch.arange(2).repeat_interleave(10)
    found = repeats(easy, run, 100)
    assert found["repeats"] == 0
    assert repeats(easy, torch.zeros(20), 100)["repeats"] == 10
    assert found["repeats_if_exchanged"] > 4  # restarts that avoid repeats are below this chance


def test_planted_repeats_exceed_both_chances():
    which = torch.tensor([0] * 5 + [1] * 5)
    found = repeats(which, torch.arange(2).repeat_interleave(5), 100)
    assert found["repeats"] == 8
    assert found["repeats_by_chance"] < 0.3
    assert found["repeats_if_exchanged"] < 8  # 7: both restarts would find both samples


def test_matches_drawn_independently_agree_with_the_exchanged_chance_alone():
    """Three samples of a hundred are easy: the uniform chance is exceeded, the other one is not."""
    rng = torch.Generator().manual_seed(0)
    gap = []
    for _ in range(200):
        which = torch.randint(3, (12,), generator=rng)
        found = repeats(which, torch.arange(2).repeat_interleave(6), 100)
        assert found["repeats"] > found["repeats_by_chance"]
        gap.append(found["repeats"] - found["repeats_if_exchanged"])
    mean, error = torch.tensor(gap).mean(), torch.tensor(gap).std() / 200**0.5
    assert abs(mean) < 3 * error


def test_without_two_restarts_there_is_nothing_to_exchange():
    assert repeats(WHICH, torch.zeros(7), 10)["repeats_if_exchanged"] is None
    none = repeats(WHICH[:0], RUN[:0], 10)
    assert (none["repeats"], none["repeats_by_chance"]) == (0, 0)


def test_compare_counts_matched_candidates_alone():
    rng = torch.Generator().manual_seed(1)
    images, held = torch.randn(2, 6, 40, generator=rng, dtype=torch.float64)
    noise = 0.01 * torch.randn(6, 40, generator=rng, dtype=torch.float64)
    stray = torch.randn(2, 40, generator=rng, dtype=torch.float64)
    x = torch.cat([images[[0, 0, 1, 0, 2, 2]] + noise, stray])
    run = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1])
    row = compare(x, run, images, held)
    assert row["matched_per_restart"] == [3, 3]
    assert row["repeats"] == 2
    assert (row["above_0.8_train"], row["above_0.8_holdout"]) == (3, 0)
    assert compare(x, run, held, images)["repeats"] == 0
