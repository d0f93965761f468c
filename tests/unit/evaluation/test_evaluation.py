"""Metrics and matchings against naive references, and the fields of a score."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from residuum import similarity
from residuum.errors import DataError, InconclusiveError, InputError
from residuum.evaluation import MATCHINGS, METRICS, Metric, calibrate, score
from residuum.evaluation.matching import (
    MAX_HOLDOUT,
    display,
    greedy,
    match_greedily_in_sets,
    nearest,
    published_search,
)
from residuum.evaluation.scoring import (
    CandidatePool,
    PermutationTestCost,
    all_candidates,
    join_pools,
    margins,
    selected_candidates,
)
from residuum.records import Dataset, Knowledge, Reconstruction, same
from residuum.records.reconstruction import Selection
from residuum.records.scores import Scores

SHAPE = (1, 8, 8)


def images(seed: int, rows: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, *shape, generator=generator, dtype=torch.float64)


def noise(seed: int, rows: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return images(seed, rows, shape) - 0.5


def victim(seed: int, n: int = 20, pool: int = 200) -> tuple[Dataset, Dataset]:
    """Training and held-out images with alternating labels, centered by the training mean."""
    x = images(seed, n + pool)
    y = torch.arange(n + pool) % 2 * 2 - 1
    mean = x[:n].mean(0)
    return Dataset(x[:n] - mean, y[:n], mean), Dataset(x[n:] - mean, y[n:], mean)


# metrics


def naive_ssim(a: torch.Tensor, b: torch.Tensor, window: int) -> float:
    """Mean SSIM of two (c, h, w) images, pixel by pixel, borders reflected."""
    r = window // 2
    taps = [math.exp(-(t**2) / (2 * 1.5**2)) for t in range(-r, r + 1)]
    weight = [[u * v / sum(taps) ** 2 for u in taps] for v in taps]
    _, h, w = a.shape
    total = 0.0
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        for i in range(h):
            for j in range(w):
                weighted_pixels = [
                    (
                        weight[p + r][q + r],
                        x[mirror(i + p, h)][mirror(j + q, w)],
                        y[mirror(i + p, h)][mirror(j + q, w)],
                    )
                    for p in range(-r, r + 1)
                    for q in range(-r, r + 1)
                ]
                mu_x = sum(g * u for g, u, _ in weighted_pixels)
                mu_y = sum(g * v for g, _, v in weighted_pixels)
                s_x = sum(g * (u - mu_x) ** 2 for g, u, _ in weighted_pixels)
                s_y = sum(g * (v - mu_y) ** 2 for g, _, v in weighted_pixels)
                s_xy = sum(g * (u - mu_x) * (v - mu_y) for g, u, v in weighted_pixels)
                c1, c2 = 0.01**2, 0.03**2
                total += ((2 * mu_x * mu_y + c1) * (2 * s_xy + c2)) / (
                    (mu_x**2 + mu_y**2 + c1) * (s_x + s_y + c2)
                )
    return total / a.numel()


def mirror(i: int, size: int) -> int:
    i = abs(i)
    return i if i < size else 2 * (size - 1) - i


def pairwise(metric: Metric, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Scores of all pairs: by the closed form where there is one, else pair by pair."""
    if metric.search_is_score:
        return metric.search(a, b)
    index = torch.cartesian_prod(torch.arange(len(a)), torch.arange(len(b)))
    return metric.pairs(a, b, index).reshape(len(a), len(b))


@pytest.mark.parametrize(("name", "window"), [("ssim3", 3), ("ssim", 11)])
def test_ssim_equals_the_loop(name, window):
    a, b = images(0, 2, (3, 7, 8)), images(1, 2, (3, 7, 8))
    expected = [naive_ssim(x, y, window) for x, y in zip(a, b, strict=True)]
    torch.testing.assert_close(METRICS[name].score(a, b), torch.tensor(expected).double())
    torch.testing.assert_close(pairwise(METRICS[name], a, b).diagonal(), METRICS[name].score(a, b))


def test_psnr_equals_its_definition_and_stays_finite():
    a, b = images(0, 3), images(1, 3)
    expected = [-10 * math.log10(((x - y) ** 2).mean()) for x, y in zip(a, b, strict=True)]
    torch.testing.assert_close(METRICS["psnr"].score(a, b), torch.tensor(expected).double())
    assert pairwise(METRICS["psnr"], a, a).diagonal().eq(100).all()


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_every_metric_knows_its_direction_and_agrees_with_itself(metric):
    samples = images(0, 4)
    close, unlike = samples + 0.02 * noise(1, 4), images(2, 4)
    better = metric.score(close, samples) - metric.score(unlike, samples)
    assert (better > 0 if metric.higher_is_better else better < 0).all()
    index = torch.tensor([[0, 1], [3, 2], [3, 3]])
    matrix = pairwise(metric, close, samples)
    torch.testing.assert_close(
        metric.pairs(close, samples, index), matrix[index[:, 0], index[:, 1]]
    )
    torch.testing.assert_close(pairwise(metric, close, samples[:1]), matrix[:, :1])
    assert not metric.why_not(SHAPE)
    assert bool(metric.why_not((64,))) == metric.needs_images


def test_ssim_says_why_it_does_not_apply():
    with pytest.raises(InputError, match="needs images"):
        METRICS["ssim"].pairs(torch.zeros(1, 9), torch.zeros(1, 9), torch.zeros(1, 2).long())
    assert METRICS["ssim"].why_not((1, 5, 5))
    assert not METRICS["ssim3"].why_not((28, 28))


def test_published_search_halves_color_images_only():
    color, gray = images(0, 3, (3, 8, 8)), images(0, 3)
    assert not torch.equal(published_search(color, color[:1]), similarity.ncc(color, color[:1]))
    assert torch.equal(published_search(gray, gray[:1]), similarity.ncc(gray, gray[:1]))


def test_display_stretches_each_candidate_and_survives_constants():
    displayed = display(torch.stack([noise(0, 1)[0], torch.zeros(SHAPE)]), torch.full(SHAPE, 0.3))
    assert displayed[0].min() == 0
    assert displayed[0].max() == 1
    assert displayed[1].eq(0).all()


# matching


def naive_greedy(values: np.ndarray) -> list[int]:
    values = values.copy()
    chosen = [-1] * values.shape[1]
    for _ in range(min(values.shape)):
        i, j = np.unravel_index(values.argmax(), values.shape)
        chosen[j] = int(i)
        values[i, :] = values[:, j] = -np.inf
    return chosen


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), m=st.integers(1, 9), n=st.integers(1, 9))
def test_greedy_equals_the_loop_and_never_beats_the_best_assignment(seed, m, n):
    values = np.random.default_rng(seed).standard_normal((m, n))
    matching = greedy(values)
    best = values[linear_sum_assignment(values, maximize=True)]
    assert matching.candidate.tolist() == naive_greedy(values)
    is_matched = matching.value > -np.inf
    assert is_matched.sum() == min(m, n)
    assert matching.value[is_matched].sum() <= best.sum() + 1e-12
    assert (nearest(values).value >= matching.value).all()


@pytest.mark.parametrize("state", [1, 100, 1 << 24])  # one set at a time, three, all
@pytest.mark.parametrize("m", [30, 12, 7])  # with fewer than 12 it is candidates that propose
def test_hubs_and_many_sets_at_once(m, state, monkeypatch):
    """One candidate that everybody wants is the worst case of deferred acceptance."""
    # Sets that fill more than one block of the real size take more than 128 MiB.
    monkeypatch.setattr("residuum.evaluation.matching.MATCHING_CHUNK", state)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((m, 1)) + 0.01 * rng.standard_normal((m, 40))
    sets = np.stack([rng.permutation(40)[:12] for _ in range(25)])
    expected = np.array([naive_greedy(values[:, columns]) for columns in sets])
    assert match_greedily_in_sets(values, sets).tolist() == expected.tolist()
    floor = float(np.median(values))
    above = values[expected, sets] >= floor
    assert (expected >= 0).sum() == 25 * min(m, 12)
    floored = match_greedily_in_sets(values, sets, floor)
    assert (floored[above & (expected >= 0)] == expected[above & (expected >= 0)]).all()
    assert (floored[~above] == -1).all()


@pytest.mark.parametrize("name", MATCHINGS)
def test_forbidden_pairs_stay_unmatched(name):
    values = np.array([[0.9, -np.inf, -np.inf], [0.8, 0.1, -np.inf]])
    matching = MATCHINGS[name](values)
    assert matching.candidate.tolist()[1:] == [1, -1]
    assert matching.value[2] == -np.inf


# scoring


def planted(seed: int = 0) -> tuple[torch.Tensor, Dataset, Dataset]:
    train, holdout = victim(seed)
    return torch.cat([train.x[:6] + 0.05 * noise(9, 6), noise(10, 24)]), train, holdout


@pytest.mark.parametrize("pool", [None, 60])
def test_without_a_fit_control_nothing_is_claimed(pool):
    candidates, train, holdout = planted()
    holdout = None if pool is None else holdout.replace(x=holdout.x[:pool], y=holdout.y[:pool])
    scores = score(candidates, train, holdout)
    assert not scores.calibrated
    assert scores.reason.startswith("the chance level is unknown: ")
    assert scores.reason in scores.table()
    for figures in scores.to_json()["metrics"].values():
        assert figures["recovered"] is figures["expected_by_chance"] is figures["p_value"] is None
        assert figures["best"] is not None
    assert all(row.recovered is None for row in scores.per_sample)


def test_the_threshold_is_shown_with_every_count():
    measured = score(*planted(), subsets=200)
    head, *lines = measured.table().splitlines()
    assert head.split()[:2] == ["metric", "recovered"]
    for line, metric in zip(lines, measured.metrics.values(), strict=False):
        sign = ">" if metric.higher_is_better else "<"
        assert f"{metric.recovered}/20 " in line
        assert f" {sign} {metric.threshold_null99:.3g} " in line
        scores = [row.matches[metric.name].score for row in measured.per_sample]
        beyond = [s is not None and (s > metric.threshold_null99) == (sign == ">") for s in scores]
        assert sum(beyond) == metric.recovered
    assert measured.rule == f"ncc > {measured.metrics['ncc'].threshold_null99:.3g}"
    assert score(*planted()[:2], None).rule == ""


def test_without_time_only_the_deciding_metric_is_drawn_with_the_fewest_subsets():
    short = score(*planted(), subsets=900, seconds=0.0)
    all_metrics = score(*planted(), subsets=200, metrics=["ncc"])
    assert list(short.metrics) == ["ncc"]
    assert short.subsets == 200
    assert same(short.replace(notes=all_metrics.notes), all_metrics)  # nothing else differs
    left_out = [note for note in short.notes if "skipped: time budget exhausted" in note]
    assert len(left_out) == len(METRICS) - 1
    assert "200 of 900 subsets drawn: time budget exhausted" in short.notes


def test_other_metrics_can_follow_the_deciding_one():
    candidates, train, holdout = planted()
    gain = similarity.ncc(candidates, torch.cat([train.x, holdout.x])).numpy()
    strata = torch.cat([train.y, holdout.y]).numpy()
    first = calibrate(gain, 20, subsets=200, strata=strata, rng=np.random.default_rng(0))
    assert same(score(*planted(), calibration=first), score(*planted(), subsets=200))


def test_scores_hold_what_they_promise(tmp_path):
    candidates, train, holdout = planted()
    outputs = torch.linspace(-1, 3, 20) * train.y
    lam = torch.arange(30.0)
    options = {"outputs": outputs, "multipliers": lam, "subsets": 200, "seed": 7}
    scores = score(candidates, train, holdout, **options)
    text = scores.to_json()
    json.dumps(text, allow_nan=False)
    assert {
        "n": 20,
        "m": 30,
        "calibrated": True,
        "deciding": "ncc",
        "seed": 7,
    }.items() <= text.items()
    assert list(scores.metrics) == list(METRICS)
    assert scores.recovered >= 6
    assert text["metrics"]["ssim3"]["above_published_threshold"] >= 6
    assert text["metrics"]["ssim3"]["above_published_threshold_holdout"] <= 2
    first = text["per_sample"][2]
    assert (first["label"], first["multiplier"], first["recovered"]) == (-1, 2.0, True)
    assert first["matches"]["l2"]["candidate"] == 2
    assert [margin_slice.samples for margin_slice in scores.margins] == [4] * 5
    assert scores.margins[0].rate == 1
    assert [(class_row.name, class_row.samples) for class_row in scores.classes] == [
        ("-1", 10),
        ("1", 10),
    ]
    assert same(Scores.load(scores.save(tmp_path / "scores.safetensors")), scores)
    assert same(score(candidates, train, holdout, **options), scores)


@pytest.mark.parametrize(
    ("y", "names"),
    [
        ([-1, 1] * 10, ["even", "odd"]),
        ([1] * 20, ["odd"]),
        ([0, 1] * 10, ["even", "odd"]),
        ([0, 1, 2, 1] * 5, ["even", "odd", "2"]),
    ],
)
def test_classes_are_called_by_their_names(y, names):
    candidates, train, _ = planted()
    y = torch.tensor(y)
    scores = score(candidates, train.replace(y=y, classes=("even", "odd")), None, metrics=())
    assert [class_row.name for class_row in scores.classes] == names
    assert [class_row.samples for class_row in scores.classes] == [
        int((y == v).sum()) for v in y.unique()
    ]
    assert {(class_row.recovered, class_row.rate) for class_row in scores.classes} == {(None, None)}
    for class_scores, label in zip(scores.classes, y.unique(), strict=True):
        values = [row.matches["ncc"].score for row in scores.per_sample if row.label == label]
        assert class_scores.median == pytest.approx(float(np.median(values)))


def test_slices_by_margin_are_equally_large_and_in_order():
    """Margins 9 down to -10; the six planted samples are those from 9 to 4."""
    candidates, train, holdout = planted()
    outputs = torch.arange(9, -11, -1) * train.y
    slices = score(candidates, train, holdout, metrics=(), subsets=200, outputs=outputs).margins
    names = ["-10 .. -7", "-6 .. -3", "-2 .. 1", "2 .. 5", "6 .. 9"]
    assert [margin_slice.name for margin_slice in slices] == names
    assert [margin_slice.samples for margin_slice in slices] == [4] * 5
    assert [margin_slice.recovered for margin_slice in slices] == [0, 0, 0, 2, 4]
    assert [margin_slice.rate for margin_slice in slices] == [0, 0, 0, 0.5, 1]
    three = train.replace(x=train.x[:3], y=train.y[:3])
    few = score(candidates, three, None, metrics=(), outputs=outputs[:3]).margins
    assert [margin_slice.name for margin_slice in few] == ["7 .. 7", "8 .. 8", "9 .. 9"]


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_published_figures_equal_their_definition(metric):
    """Each sample's best candidate, by the metric itself or by NCC; SSIM on images as displayed."""
    candidates, train, holdout = planted()
    scores = score(candidates, train, holdout, metrics=(metric.name,), subsets=200)
    figures, rows = scores.metrics[metric.name], [r.matches[metric.name] for r in scores.per_sample]
    if metric.needs_images:
        chosen = similarity.ncc(candidates, train.x).argmax(0)
        images_shown = display(candidates, train.mean)[chosen]
        values = metric.score(images_shown, train.images).tolist()
    elif metric.published_matching == "greedy":
        chosen = torch.tensor(naive_greedy(-similarity.l2(candidates, train.x).numpy()))
        values = metric.score(candidates[chosen], train.x).tolist()
    else:
        chosen = metric.search(candidates, train.x).argmax(0)
        values = metric.score(candidates[chosen], train.x).tolist()
    assert [row.nearest_candidate for row in rows] == chosen.tolist()
    assert [row.nearest for row in rows] == pytest.approx(values, rel=1e-5)
    best_first = sorted(values, reverse=metric.higher_is_better)
    assert figures.best == pytest.approx(best_first[0], rel=1e-5)
    assert figures.median == pytest.approx(sum(best_first[9:11]) / 2, rel=1e-5)
    assert figures.top10_mean == pytest.approx(sum(best_first[:10]) / 10, rel=1e-5)
    assert figures.higher_is_better == metric.higher_is_better
    bar = figures.published_threshold
    assert bar == {"ssim3": 0.4, "l2": 2.5}.get(metric.name)
    if bar is not None:
        good = [value > bar if metric.higher_is_better else value < bar for value in values]
        assert figures.above_published_threshold == sum(good)
        assert 0 < sum(good) < 20


@pytest.mark.parametrize("metric", METRICS)
def test_the_order_of_candidates_does_not_matter(metric):
    candidates, train, holdout = planted()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    a, b = (
        score(pool_order, train, holdout, metrics=(metric,), subsets=200).metrics[metric].to_json()
        for pool_order in (candidates, candidates[order])
    )
    for key, value in a.items():
        approximately = pytest.approx(b[key], rel=1e-6) if isinstance(value, float) else b[key]
        assert value == approximately, key


def test_broken_and_constant_candidates_do_not_stop_a_score():
    candidates, train, holdout = planted()
    broken = torch.cat([candidates[:1], torch.zeros(1, *SHAPE), candidates])
    broken[0, 0, 3, 5] = torch.nan  # one pixel is enough
    scores = score(broken, train, holdout, subsets=200)
    assert scores.m == 32
    assert scores.per_sample[0].matches["ncc"].candidate == 2
    assert "1 candidates are not finite" in scores.notes[0]
    with pytest.raises(InconclusiveError, match="diverged"):
        score(broken[:1], train, holdout)


def test_a_single_candidate_serves_a_single_sample():
    candidates, train, holdout = planted()
    scores = score(candidates[3:4], train, holdout, metrics=("ncc", "ssim3"), subsets=200)
    assert [row.matches["ncc"].candidate for row in scores.per_sample].count(0) == 1
    assert scores.per_sample[3].recovered
    assert scores.recovered == 1
    assert scores.p_value > 0.01  # one sample cannot be significant against ten times as many
    assert scores.per_sample[0].matches["ncc"].nearest_candidate == 0


def test_samples_that_get_no_candidate_are_in_no_figure():
    candidates, train, holdout = planted()
    few, lam = candidates[:12], torch.arange(24.0).reshape(12, 2)
    scores = score(few, train, holdout, multipliers=lam, metrics=(), subsets=200)
    chosen = [row.matches["ncc"].candidate for row in scores.per_sample]
    assert sorted(candidate for candidate in chosen if candidate is not None) == list(range(12))
    for row, candidate in zip(scores.per_sample, chosen, strict=True):
        match = row.matches["ncc"]
        assert row.multiplier == (None if candidate is None else 4 * candidate + 1)  # 2k + (2k + 1)
        assert (match.score is None) == (candidate is None)
        assert match.nearest is not None
    (class_one,) = (class_row for class_row in scores.classes if class_row.name == "1")
    values = [row.matches["ncc"].score for row in scores.per_sample if row.label == 1]
    scored = [value for value in values if value is not None]
    assert class_one.median == pytest.approx(float(np.median(scored)))


def test_candidates_that_resemble_one_label_are_no_leak_of_a_set_with_more_of_it():
    """12 of 30 training samples and 15 of 800 held-out ones show a pattern; so do all candidates."""
    pattern = 2 * noise(3, 1)
    y = torch.cat([torch.arange(30) < 12, torch.arange(800) < 15]).long()
    x = noise(4, 830) + y[:, None, None, None] * pattern
    train, holdout = Dataset(x[:30], y[:30]), Dataset(x[30:], y[30:])
    matched, ignored = (
        score(noise(5, 40) + pattern, train, holdout, metrics=(), match_labels=match, subsets=200)
        for match in (True, False)
    )
    assert matched.p_value > 0.01 >= ignored.p_value
    assert matched.notes == ()


def test_regression_targets_have_no_strata_and_no_slices():
    candidates, train, holdout = planted()
    train, holdout = (
        data.replace(y=data.y + 0.01 * data.x[:, 0, 0, 0]) for data in (train, holdout)
    )
    options = {"outputs": torch.zeros(20), "subsets": 200, "metrics": ()}
    scores = score(candidates, train, holdout, **options)
    assert same(score(candidates, train, holdout, match_labels=False, **options), scores)
    assert scores.notes == ()
    assert scores.classes == scores.margins == ()
    assert {(row.label, row.margin) for row in scores.per_sample} == {(None, None)}


def test_a_control_that_is_no_control_is_noticed():
    candidates, train, holdout = planted()
    mixed = holdout.replace(x=torch.cat([train.x, holdout.x]), y=torch.cat([train.y, holdout.y]))
    scores = score(candidates, train, mixed, metrics=(), subsets=200)
    assert "20 held-out samples are also training samples" in scores.notes[0]
    one_label = holdout.replace(y=torch.ones(200).long())
    assert "not label-matched" in score(candidates, train, one_label, metrics=()).notes[0]
    with pytest.raises(DataError, match="same mean"):
        score(candidates, train, holdout.replace(mean=holdout.mean + 0.1))
    with pytest.raises(DataError, match="shape"):
        score(candidates, train, Dataset(torch.zeros(100, 3), torch.zeros(100)))
    with pytest.raises(DataError, match="shape"):
        score(torch.zeros(2, 7), train, holdout)


@pytest.mark.parametrize(
    ("n", "pool", "size"),
    [
        (20, MAX_HOLDOUT, MAX_HOLDOUT),
        (20, MAX_HOLDOUT + 1, MAX_HOLDOUT),
        (20, MAX_HOLDOUT + 80, MAX_HOLDOUT),
        (MAX_HOLDOUT // 4 + 5, MAX_HOLDOUT + 80, MAX_HOLDOUT + 20),
    ],
)
def test_a_large_held_out_set_is_sampled(n, pool, size):
    """As many as the limit, or four for each training sample where that is more."""
    train, holdout = victim(0, n, pool)
    first, second = (
        score(train.x[:6] + 0.05 * noise(9, 6), train, holdout, metrics=(), subsets=200)
        for _ in range(2)
    )
    assert first.pool == size
    note = f"{size} of {pool} held-out samples are used, drawn at random"
    assert first.notes == ((note,) if size < pool else ())
    assert same(first, second)


def test_a_control_is_cut_to_the_time_there_is_and_no_further_than_it_may():
    cost = PermutationTestCost(setup=1.0, per_set=0.01)
    assert cost.seconds_for(500) == pytest.approx(11)
    assert cost.count_subsets(500, 11.1) == 500
    assert cost.count_subsets(500, 9.05) == 402  # 1 + 2 x 402 x 0.01 = 9.04
    assert cost.count_subsets(500, 0.5) == 200
    assert cost.count_subsets(150, 0.5) == 150
    assert (
        PermutationTestCost(5.0, 0.0).count_subsets(300, 1.0) == 200
    )  # a pilot that says nothing buys nothing
    assert PermutationTestCost(0.5, 0.0).count_subsets(300, 1.0) == 300


def test_what_a_set_costs_is_timed_beforehand(monkeypatch):
    """A clock that only the pilot moves: half a second a call, a quarter for each set."""
    clock = [0.0]

    def matched(gain, sets, floor):
        clock[0] += 0.5 + 0.25 * len(sets)
        return match_greedily_in_sets(gain, sets, floor)

    # Durations on a real machine cannot be predicted to a set.
    monkeypatch.setattr("residuum.evaluation.scoring.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("residuum.evaluation.scoring.match_greedily_in_sets", matched)
    scores = score(*planted(), metrics=(), seconds=150.0)
    # The pilot takes 0.75 s for one set, 4.75 s for 17; left are 144.5 s: 0.75 + 2 x 287 x 0.25.
    assert scores.subsets == 287
    assert "287 of 500 subsets drawn: time budget exhausted" in scores.notes


def test_metrics_are_chosen_by_name_and_by_shape():
    candidates, train, holdout = planted()
    flat = [data.replace(x=data.x.flatten(1), mean=None) for data in (train, holdout)]
    scores = score(candidates.flatten(1), *flat, subsets=200)
    assert list(scores.metrics) == ["ncc", "l2", "psnr"]
    assert scores.notes[0].startswith("ssim3 skipped: it needs images")
    with pytest.raises(InputError, match="Did you mean 'psnr'"):
        score(candidates, train, holdout, metrics=("psrn",))
    with pytest.raises(InputError, match="needs images"):
        score(candidates.flatten(1), *flat, metrics=("ssim",))


def test_margins_of_each_kind_of_task():
    outputs = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 5.0]])
    assert margins(outputs, torch.tensor([0, 1])).tolist() == [1, -4]
    assert margins(torch.tensor([2.0, 3.0]), torch.tensor([-1, 1])).tolist() == [-2, 3]
    assert margins(torch.tensor([2.0, 3.0]), torch.tensor([0, 1])).tolist() == [-2, 3]
    assert margins(torch.tensor([2.0, 3.0]), torch.tensor([0.3, 1.7])) is None
    with pytest.raises(DataError, match="one row for each training sample"):
        margins(torch.zeros(3), torch.ones(2))
    with pytest.raises(DataError, match="class numbers from 0 to 2, one for each output"):
        margins(outputs, torch.tensor([0, 3]))


# pools


def reconstruction(support: list[int] | None) -> Reconstruction:
    """Four candidates; of three groups the second is a mean of two, held by ``support`` restarts."""
    x, lam = torch.arange(8.0).reshape(4, 2), torch.tensor([[1.0, -2], [3, 4], [0, 5], [6, 0]])
    groups = None
    if support is not None:
        groups = Selection(
            x=torch.tensor([[0.0, 1], [3, 4], [6, 7]]),
            labels=torch.tensor([1, 1, -1]),
            lam=torch.tensor([3.0, 12, 6]),
            support=torch.tensor(support),
            members=torch.tensor([1, 2, 1]),
            confidence=torch.ones(3),
            features=torch.ones(3, 5),
            index=torch.tensor([0, 1, 3]),
        )
    return Reconstruction(
        "binary-kkt",
        x,
        torch.tensor([1, 1, 1, -1]),
        lam,
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([10]),
        torch.ones(2, 1),
        torch.ones(2, 1, 1),
        ("layers.0",),
        ("finished", "finished"),
        Knowledge(),
        selection=groups,
    )


def as_lists(pool: CandidatePool) -> list[list[object]]:
    return [tensor.tolist() for tensor in pool]


def test_all_candidates_and_the_means_of_groups_are_one_pool():
    members_x = [[0, 1], [2, 3], [4, 5], [6, 7]], [3, 7, 5, 6]
    assert as_lists(all_candidates(reconstruction(None))) == list(members_x)
    mean = [3, 4], 12  # groups of one are among the candidates already
    expected = [[*row, mean_value] for row, mean_value in zip(members_x, mean, strict=True)]
    assert as_lists(all_candidates(reconstruction([1, 2, 1]))) == expected


@pytest.mark.parametrize(
    ("support", "indices"), [([1, 2, 1], [1]), ([3, 1, 2], [0, 2]), ([1, 1, 1], [0, 1, 2])]
)
def test_what_several_restarts_hold_is_chosen_and_all_where_none_agree(support, indices):
    reconstructed = reconstruction(support)
    groups = reconstructed.selection
    expected = [tensor[indices].tolist() for tensor in (groups.x, groups.lam)]
    assert as_lists(selected_candidates(reconstructed)) == expected


def test_an_attack_that_chose_nothing_has_an_empty_choice():
    pool = selected_candidates(reconstruction(None))
    assert [tuple(tensor.shape) for tensor in pool] == [(0, 2), (0,)]


def test_pools_are_joined_in_order_and_in_double_precision():
    all_pool = all_candidates(reconstruction(None))
    two = selected_candidates(reconstruction([1, 2, 1]))
    joined = join_pools([all_pool, two])
    assert as_lists(joined) == [
        [*a, *b] for a, b in zip(*map(as_lists, (all_pool, two)), strict=True)
    ]
    assert {tensor.dtype for tensor in joined} == {torch.float64}


def test_scoring_imports_without_kornia():
    code = (
        "import sys; sys.modules['kornia'] = None; import residuum.evaluation; "
        "assert not {'sklearn', 'rich', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
