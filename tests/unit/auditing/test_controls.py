"""Whether a comparison is sound: repeats, composition, attacker knowledge, levels, tests and grades."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from residuum.auditing.case import load_case
from residuum.auditing.control_training import descend
from residuum.auditing.controls import (
    STRICT_LEVEL,
    ControlRow,
    Controls,
    SampleSets,
    compare_distributions,
    compare_losses,
    explain_by_knowledge,
    make_candidates_from_knowledge,
    run_controls,
    set_aside_repeats,
)
from residuum.auditing.outcomes import CLASS_LEVEL, NEAR_COPY, RESEMBLANCE
from residuum.auditing.positive_control import split_holdout
from residuum.auditing.request import AuditRequest
from residuum.auditing.scores import (
    AttackTest,
    findings,
    grades,
    match_set_aside,
    run_tests,
    strongest_test,
)
from residuum.auditing.training_recipe import TrainingRecipe
from residuum.auditing.verdict import LEAK, NO_LEAK_FOUND, decide
from residuum.errors import InputError
from residuum.evaluation.null import SIGNIFICANCE, fewest_beyond_chance, step_down
from residuum.evaluation.scoring import CandidatePool
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from tests.verdict_inputs import SOUND, membership, ran
from tests.victims import leaky, tight, untrained


def digits(seed: int, n: int, pool: int, kinds: tuple[int, ...] = ()) -> tuple[Dataset, Dataset]:
    """n digits (of these kinds alone, where said) and others, labels by parity, less the first's mean."""
    images, digit = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    members = order[np.isin(digit[order], kinds or range(10))][:n]
    nonmembers = order[~np.isin(order, members)][:pool]
    x, y = torch.from_numpy(images / 16).reshape(-1, 1, 8, 8), torch.from_numpy(digit % 2 * 2 - 1)
    mean = x[members].mean(0)
    return tuple(Dataset(x[rows] - mean, y[rows], mean) for rows in (members, nonmembers))


def pool_of(x: torch.Tensor) -> CandidatePool:
    return CandidatePool(x, torch.ones(len(x)))


def recovered(x: torch.Tensor, claim: SampleSets) -> int:
    tests, _ = run_tests({"some": pool_of(x)}, claim, 0, 300, math.inf)
    return findings(tests, len(claim.train)).recovered


def test_near_repeats_hide_nothing_and_are_left_out_in_pairs() -> None:
    train, pool = digits(0, 50, 480)
    copies = train.x[:5] + 0.001 * torch.randn(5, 1, 8, 8, generator=torch.manual_seed(0))
    crowded = pool.replace(x=torch.cat([pool.x, copies]), y=torch.cat([pool.y, train.y[:5]]))
    candidates = train.x[:10] + 0.15 * torch.randn(10, 1, 8, 8, generator=torch.manual_seed(1))
    claim = set_aside_repeats(train, crowded)
    assert claim.repeats == tuple(range(5))
    assert (len(claim.train), len(claim.holdout or ())) == (45, 480)
    assert "5 of 50 training samples also occur in the held-out set" in claim.notes[0]
    assert not claim.failure
    assert recovered(candidates, claim) >= 4  # of the five that nobody repeats


@pytest.mark.parametrize(("factor", "shift"), [(0.9, 0.0), (0.5, 0.2), (1.0, -0.3)])
def test_copies_in_another_brightness_are_repeats(factor: float, shift: float) -> None:
    train, pool = digits(3, 50, 480)
    copies = factor * train.x[7:11] + shift
    crowded = pool.replace(x=torch.cat([copies, pool.x]), y=torch.cat([train.y[7:11], pool.y]))
    claim = set_aside_repeats(train, crowded)
    assert claim.repeats == (7, 8, 9, 10)
    assert torch.equal((claim.holdout or pool).x, pool.x)


def test_rows_of_a_raw_table_are_not_repeats_because_one_column_dominates() -> None:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    data = Dataset(torch.from_numpy(x), torch.from_numpy(y))
    train, pool = data.take(torch.arange(100)), data.take(torch.arange(100, 500))
    assert set_aside_repeats(train, pool).set_aside is None
    crowded = data.take(torch.tensor([*range(100, 500), 3, 50]))
    assert set_aside_repeats(train, crowded).repeats == (3, 50)


def test_a_tenth_of_the_training_set_may_be_set_aside_and_no_more() -> None:
    train, pool = digits(4, 30, 500)
    for count, ok in ((3, True), (4, False)):
        copies = train.take(torch.arange(count))
        crowded = pool.replace(x=torch.cat([pool.x, copies.x]), y=torch.cat([pool.y, copies.y]))
        claim = set_aside_repeats(train, crowded)
        assert bool(claim.failure) is not ok
        assert len(claim.train) == (30 - count if ok else 30)


def test_samples_that_were_set_aside_are_compared_with_the_reconstructions() -> None:
    train, pool = digits(5, 40, 480)
    crowded = pool.replace(x=torch.cat([pool.x, train.x[:4]]), y=torch.cat([pool.y, train.y[:4]]))
    claim = set_aside_repeats(train, crowded)
    noise = torch.randn(40, 1, 8, 8, generator=torch.manual_seed(0)).double()
    for samples_shown, expected in (
        (train.x[2:3], (2,)),
        (train.x[:4], (0, 1, 2, 3)),
        (noise[:1], ()),
    ):
        pools = {"a": pool_of(torch.cat([samples_shown, noise]))}
        tests, _ = run_tests(pools, claim, 0, 300, math.inf)
        assert match_set_aside(claim.set_aside, pools, tests) == expected


def test_an_ordinary_pool_repeats_nothing() -> None:
    train, pool = digits(1, 50, 500)
    claim = set_aside_repeats(train, pool)
    assert claim.train is train
    assert claim.holdout is pool
    assert set_aside_repeats(train, None).holdout is None


def test_a_pool_that_repeats_the_training_set_is_no_control() -> None:
    train, pool = digits(2, 50, 300)
    crowded = pool.replace(x=torch.cat([pool.x, train.x]), y=torch.cat([pool.y, train.y]))
    claim = set_aside_repeats(train, crowded)
    assert "50 of 50 training samples also occur in the held-out set" in claim.failure
    assert claim.failure in run_controls(claim, Knowledge(), 0, 1000).failures


@pytest.mark.parametrize("seed", range(3))
def test_zeros_and_ones_among_all_digits_are_distinguished_and_others_are_not(seed: int) -> None:
    zeros_and_ones = run_controls(
        SampleSets(*digits(seed, 40, 500, (0, 1))), Knowledge(), seed, 1000
    )
    assert zeros_and_ones.auc is not None
    assert zeros_and_ones.auc >= 0.8
    assert any("do not come from the same source" in failure for failure in zeros_and_ones.failures)
    all_digits = run_controls(SampleSets(*digits(seed, 40, 500)), Knowledge(), seed, 1000)
    assert all_digits.failures == ()
    assert "matched by label" in all_digits.notes[0]


def test_few_samples_do_not_scatter_into_an_alarm() -> None:
    rng = np.random.default_rng(0)
    train, pool = digits(0, 10, 300)
    auc, _ = compare_distributions(train, pool, rng)
    assert auc is not None
    assert not (auc.value >= 0.8 and auc.is_significant)
    assert compare_distributions(*digits(0, 9, 300), rng) == (None, None)


def test_known_facts_make_candidates_and_nothing_else_does() -> None:
    train, pool = digits(0, 20, 300)
    rng = np.random.default_rng(0)
    assert make_candidates_from_knowledge(train, pool, Knowledge(), rng) == []
    names = [
        name for name, _ in make_candidates_from_knowledge(train, pool, knowledge_of(train), rng)
    ]
    assert len(names) == 3
    direction = dict(make_candidates_from_knowledge(train, pool, knowledge_of(train), rng))[
        names[1]
    ].mean(0)
    expected = -pool.x.mean(0)  # samples are centered by the granted mean already
    assert (
        float(torch.corrcoef(torch.stack([direction.flatten(), expected.flatten()]))[0, 1]) > 0.99
    )


def knowledge_of(train: Dataset) -> Knowledge:
    return Knowledge(mean=train.mean, value_range=(0.0, 1.0))


def test_samples_that_the_grant_brings_back_alone_say_nothing_of_the_network() -> None:
    row = ControlRow("the mean", 80, 3, 0.2, 0.004, (1, 2, 3), granted=True)
    assert explain_by_knowledge(Controls((row,)), (1, 2, 9, 8)) != ()
    assert explain_by_knowledge(Controls((row,)), (1, 7, 9, 8)) == ()
    assert explain_by_knowledge(Controls((row.replace(granted=False),)), (1, 2)) == ()
    assert explain_by_knowledge(Controls((row,)), ()) == ()


def test_what_knowledge_alone_reveals_is_reported_and_held_out_candidates_decide() -> None:
    rng = torch.Generator().manual_seed(0)
    granted_mean_samples = torch.randn(40, generator=rng) + 0.5 * torch.randn(20, 40, generator=rng)
    labels = torch.tensor([-1.0, 1.0])
    train = Dataset(granted_mean_samples.double(), labels.repeat(10))
    pool = Dataset(torch.randn(300, 40, generator=rng).double(), labels.repeat(150))
    outcome = run_controls(
        SampleSets(train, pool), Knowledge(mean=granted_mean_samples.double().mean(0)), 0
    )
    assert any("are recovered" in note for note in outcome.notes)
    assert not any("are recovered" in failure for failure in outcome.failures)
    copies = pool.replace(x=pool.x[:100], y=pool.y[:100])
    outcome = run_controls(SampleSets(copies, pool), Knowledge(), 0)
    assert any("held-out samples as candidates" in failure for failure in outcome.failures)


def test_losses_that_agree_tell_samples_apart_though_their_mean_does_not() -> None:
    """At a margin all training samples have one loss, neither least nor largest."""
    rng = np.random.default_rng(0)
    theta = {
        "layers.0.weight": torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64),
        "layers.0.bias": torch.zeros(2, dtype=torch.float64),
        "layers.1.weight": torch.tensor([[1.0, -1.0]], dtype=torch.float64),
    }
    network = Network(theta, "mlp:2-2-1", task="binary")  # outputs its first input

    def samples(margin: np.ndarray) -> Dataset:
        y = np.where(np.arange(len(margin)) % 2, 1.0, -1.0)
        x = np.stack([y * margin, rng.normal(size=len(margin))], 1)
        return Dataset(torch.from_numpy(x), torch.from_numpy(y))

    spread = rng.normal(1.0, 2.0, 400)
    pool = samples(spread)
    typical = -np.log(np.expm1(np.log1p(np.exp(-spread)).mean()))  # the margin of the mean loss
    p = compare_losses(network, samples(np.full(30, typical)), pool, "binary", 0)
    assert p is not None
    assert p <= 0.01
    other_tests = [
        compare_losses(network, samples(rng.normal(1.0, 2.0, 30)), pool, "binary", 0) or 0.0
        for _ in range(5)
    ]
    assert (
        sum(value > 0.01 for value in other_tests) >= 4
    )  # each is below 1% in one case of a hundred


def test_a_trained_network_tells_its_samples_from_others_and_a_random_one_does_not() -> None:
    p_values = []
    for victim in (leaky, tight, untrained):
        checkpoint, split = victim()
        p = compare_losses(checkpoint, split.train, split.holdout, "binary", 0)
        blind = split.holdout.replace(y=torch.zeros(len(split.holdout)))
        without = compare_losses(checkpoint, split.train, blind, "binary", 0)
        assert p is not None
        assert without is not None
        p_values.append((p <= 0.01, without <= 0.01))
    assert p_values == [(True, True), (True, True), (False, False)]
    checkpoint, split = leaky()
    assert compare_losses(checkpoint, split.train, None, "binary", 0) is None


def test_a_network_that_never_saw_the_samples_is_flagged_no_more_often_than_stated() -> None:
    """At 1%, more than 3 of 40 would happen by chance once in 1500."""
    checkpoint, split = leaky()
    order = torch.randperm(400, generator=torch.manual_seed(1)).reshape(40, 10)
    alarms = 0
    for k, members in enumerate(order):
        nonmembers = torch.cat([order[:k].flatten(), order[k + 1 :].flatten()])
        claim, pool = (
            split.holdout.replace(x=split.holdout.x[rows], y=split.holdout.y[rows])
            for rows in (members, nonmembers)
        )
        p = compare_losses(checkpoint, claim, pool, "binary", k)
        alarms += p is not None and p <= 0.01
    assert alarms <= 3


def test_grades_compare_with_the_nearest_held_out_sample_and_the_mean_of_the_class() -> None:
    train, pool = digits(0, 20, 400)
    mean = {int(y): pool.x[pool.y == y].mean(0) for y in (-1, 1)}
    candidates = torch.stack([train.x[0], 0.5 * train.x[1] + 0.5 * mean[int(train.y[1])]])
    tests, _ = run_tests({"some": pool_of(candidates)}, SampleSets(train, pool), 0, 300, math.inf)
    test = tests["some"]
    grades_found = grades(test, test.field.strata)
    assert grades_found[0] == NEAR_COPY
    for i, grade in grades_found.items():  # the definition, one sample at a time
        distance = 1 - test.control.value[i]
        nearest = max(float(ncc(train.x[i], sample)) for sample in pool.x)
        typical = float(ncc(train.x[i], mean[int(train.y[i])]))
        expected = (
            NEAR_COPY
            if distance <= 0.75 * (1 - max(nearest, typical))
            else RESEMBLANCE
            if distance <= 0.75 * (1 - typical)
            else CLASS_LEVEL
        )
        assert grade == expected


def ncc(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("", TrainingRecipe()),
        ("optimizer=sgd,rate=0.01,epochs=100,batch=50", TrainingRecipe("sgd", 0.01, 100, 50)),
        (" start=small , frozen=a+b ", TrainingRecipe(start="small", frozen=("a", "b"))),
    ],
)
def test_recipes(text: str, recipe: TrainingRecipe) -> None:
    assert TrainingRecipe.parse(text) == recipe


@pytest.mark.parametrize(
    "text", ["rate=fast", "lr=0.1", "optimizer=magic", "epochs=-1", "start=", "rate=nan", "batch"]
)
def test_other_recipes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="recipe"):
        TrainingRecipe.parse(text)


def test_a_control_takes_its_samples_from_the_held_out_set_with_the_labels_of_the_training_set() -> (
    None
):
    split = tight()[1]
    control_samples, remaining = split_holdout(split.holdout, split.train, 0)
    assert sorted(control_samples.y.tolist()) == sorted(split.train.y.tolist())
    assert len(control_samples) + len(remaining) == len(split.holdout)
    all_samples = torch.cat([control_samples.x, remaining.x]).flatten(1)
    assert len(all_samples.unique(dim=0)) == len(split.holdout.x.flatten(1).unique(dim=0))


def test_a_control_trained_in_batches_is_the_same_whatever_was_drawn_before() -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
    y = torch.where(x[:, 0] > 0, 1.0, -1.0).double()
    controls = []
    for seed, before in ((0, 1), (0, 2), (1, 1)):
        model = torch.nn.Linear(4, 1).double()
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        torch.manual_seed(before)
        recipe = TrainingRecipe.parse("optimizer=sgd,rate=0.5,epochs=3,batch=7")
        limits = {"target_loss": 0.0, "seconds": math.inf}
        descend(model, x, y, loss="logistic", recipe=recipe, seed=seed, **limits)
        controls.append(model.weight.detach().clone())
    assert torch.equal(controls[0], controls[1])
    assert not torch.equal(controls[0], controls[2])


def test_of_tests_with_the_least_p_the_one_with_most_to_show_is_shown() -> None:
    def make_test(count: int, adjusted: float) -> Any:
        control = SimpleNamespace(p_value=adjusted, recovered=np.arange(9) < count)
        return AttackTest(None, None, control, adjusted)  # type: ignore[arg-type]

    assert strongest_test({"few": make_test(2, 0.0005), "many": make_test(5, 0.0005)}) == "many"
    assert strongest_test({"few": make_test(2, 0.0005), "many": make_test(5, 0.001)}) == "few"


# Levels


def with_zeros(share: float, count: int = 100) -> SampleSets:
    """Digits of which a share are zeros, where one in ten is among the held-out ones."""
    images, digit = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    zeros, other_digits = order[digit[order] == 0], order[digit[order] != 0]
    rows = np.concatenate([zeros[: int(share * count)], other_digits[: count - int(share * count)]])
    remaining = order[~np.isin(order, rows)][:600]
    x, y = torch.from_numpy(images / 16).reshape(-1, 1, 8, 8), torch.from_numpy(digit % 2 * 2 - 1)
    return SampleSets(Dataset(x[rows], y[rows]), Dataset(x[remaining], y[remaining]))


def test_a_difference_in_distribution_makes_the_level_stricter() -> None:
    train, pool = digits(0, 50, 480)
    cases = {
        "alike": (with_zeros(0.1), SIGNIFICANCE),
        "energy test": (with_zeros(0.2), STRICT_LEVEL),
        "classifier": (SampleSets(train.replace(x=1.1 * train.x), pool), STRICT_LEVEL),
    }
    energies = {}
    for name, (claim, level) in cases.items():
        controls = run_controls(claim, Knowledge(), 0)
        assert controls.failures == ()  # no reason to judge nothing
        assert controls.level == level
        assert controls.energy is not None
        energies[name] = controls.energy <= 0.01
        note = f"a leak needs an adjusted p-value of {STRICT_LEVEL}"
        assert any(note in text for text in controls.notes) == (level == STRICT_LEVEL)
    assert energies == {"alike": False, "energy test": True, "classifier": False}
    assert STRICT_LEVEL == SIGNIFICANCE / 10


@pytest.mark.parametrize(("count", "level"), [(9, STRICT_LEVEL), (10, SIGNIFICANCE)])
def test_fewer_than_ten_samples_need_a_stricter_level(count: int, level: float) -> None:
    train, pool = digits(0, count, 400)
    assert run_controls(SampleSets(train, pool), Knowledge(), 0).level == level


def test_a_finding_at_one_percent_is_none_at_the_stricter_level() -> None:
    train, pool = digits(0, 30, 300)
    noise = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    pools = {"some": pool_of(torch.cat([train.x[:8], noise]))}
    verdicts = []
    for level in (SIGNIFICANCE, STRICT_LEVEL):
        # With 400 subsets the smallest adjusted p-value is 2/401, between the two levels.
        tests, _ = run_tests(pools, SampleSets(train, pool), 0, 400, math.inf, level=level)
        assert tests["some"].adjusted == pytest.approx(2 / 401)
        summary = findings(tests, len(train))
        assert summary.level == level
        checks = SOUND.replace(level=level)
        verdicts.append(decide(summary, (ran(),), checks, membership()).outcome)
        assert (summary.interval is not None and summary.interval[0] > 0) == (level == SIGNIFICANCE)
    assert verdicts == [LEAK, NO_LEAK_FOUND]


def test_adjusted_p_values_are_doubled_because_two_questions_share_the_level() -> None:
    train, pool = digits(0, 30, 300)
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(60, 1, 8, 8, generator=generator).double() for _ in range(3)]
    noise[0][:2] = train.x[:2]
    noise[1][0] = 0.5 * train.x[5] + noise[1][0] / 10
    pools = {str(k): pool_of(x) for k, x in enumerate(noise)}
    tests, _ = run_tests(pools, SampleSets(train, pool), 0, 500, math.inf)
    together = step_down(np.stack([test.control.excess for test in tests.values()]))
    for test, p in zip(tests.values(), together, strict=True):
        expected = min(1.0, 2 * float(p)) if test.control.recovered.any() else 1.0
        assert test.adjusted == pytest.approx(expected)
    assert min(test.adjusted for test in tests.values()) == pytest.approx(2 / 501)
    members = membership(3, group_p=0.004)
    assert members.adjusted_p == 0.008
    assert members.replace(group_p=0.7).adjusted_p == 1.0


@pytest.mark.parametrize("planted", [0, 1, 2, 5])
def test_the_interval_begins_above_zero_if_and_only_if_a_test_survives(planted: int) -> None:
    for seed in range(4):
        train, pool = digits(seed, 30, 300)
        noise = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).double()
        noise[:planted] = train.x[:planted]
        tests, _ = run_tests({"some": pool_of(noise)}, SampleSets(train, pool), seed, 400, math.inf)
        summary = findings(tests, len(train))
        assert summary.interval is not None
        assert (summary.interval[0] > 0) == bool(summary.survivors)
        assert summary.interval[1] == summary.recovered
        assert bool(summary.recovered) == bool(summary.survivors)


def test_the_interval_holds_at_half_of_the_level_because_two_questions_share_it() -> None:
    limits = set()
    for seed in range(6):
        train, pool = digits(seed, 30, 300)
        noise = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).double()
        noise[:6] = train.x[:6] + 0.3 * noise[:6]
        tests, _ = run_tests(
            {"some": pool_of(noise)}, SampleSets(train, pool), seed, 1000, math.inf
        )
        summary, control = findings(tests, len(train)), tests["some"].control
        assert summary.interval is not None
        limits_by_level = [
            fewest_beyond_chance(control.excess[None], control.own_excess, 0, level)
            for level in (SIGNIFICANCE / 2, SIGNIFICANCE)
        ]
        assert summary.interval[0] == limits_by_level[0]
        limits.add(tuple(limits_by_level))
    assert any(half < full_limit for half, full_limit in limits)


# Fewer held-out samples than training samples


@pytest.mark.parametrize(("count", "pool_size"), [(150, 120), (300, 299), (100, 100), (40, 120)])
def test_attacks_are_compared_with_as_many_training_samples_as_are_held_out(
    count: int, pool_size: int
) -> None:
    train, pool = digits(0, count, pool_size)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5), torch.nn.ReLU())
    model.append(torch.nn.Linear(5, 1))
    case = load_case(model, train, pool, Knowledge(), AuditRequest())
    assert case is not None
    assert case.sample_sets is not None
    assert case.balanced_sets is not None
    all_samples, compared = case.sample_sets, case.balanced_sets
    assert len(all_samples.train) == count  # membership is tested on all of them
    assert all_samples.holdout is not None
    assert compared.holdout is all_samples.holdout
    if pool_size >= count:
        assert compared is all_samples
        return
    assert len(compared.train) == pool_size
    assert len({*compared.train.rows}) == pool_size
    assert [*compared.train.rows] == sorted(compared.train.rows)
    for i, row in enumerate(compared.train.rows):
        assert torch.equal(compared.train.x[i], all_samples.train.x[row])
    assert compared.notes[-1] == (
        f"Attacks were compared with a random {pool_size} of {count} training samples, because there are no "
        "more held-out samples"
    )
    second = load_case(model, train, pool, Knowledge(), AuditRequest(seed=5))
    assert second is not None
    assert second.balanced_sets is not None
    assert second.balanced_sets.train.rows == compared.train.rows
