"""What an audit asks of itself: repeats, composition, what was granted, the permuted target, the twin."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import residuum as rs
from residuum.attacks.stationarity.objectives import OBJECTIVES, permuted
from residuum.auditing.budget import Batch
from residuum.auditing.control_training import descend
from residuum.auditing.controls import (
    Claim,
    ControlRow,
    Controls,
    brought_by_grant,
    granted_candidates,
    run_controls,
    tell_apart,
    told_by_network,
    without_repeats,
)
from residuum.auditing.positive_control import bundled_digits, split_holdout
from residuum.auditing.scores import (
    AttackTest,
    findings,
    grades,
    matches_among,
    run_tests,
    strongest_of,
)
from residuum.auditing.training_recipe import TrainingRecipe
from residuum.auditing.verdict import CLASS_LIKE, INCONCLUSIVE, NEAR_COPY, NO_LEAK_FOUND, RESEMBLES
from residuum.errors import InputError
from residuum.evaluation.scoring import CandidatePool
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.records.base import same
from tests.victims import knowledge, leaky, tight, untrained


def digits(seed: int, n: int, pool: int, kinds: tuple[int, ...] = ()) -> tuple[Dataset, Dataset]:
    """n digits (of these kinds alone, where said) and others, labels by parity, less the first's mean."""
    images, digit = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    mine = order[np.isin(digit[order], kinds or range(10))][:n]
    rest = order[~np.isin(order, mine)][:pool]
    x, y = torch.from_numpy(images / 16).reshape(-1, 1, 8, 8), torch.from_numpy(digit % 2 * 2 - 1)
    mean = x[mine].mean(0)
    return tuple(Dataset(x[rows] - mean, y[rows], mean) for rows in (mine, rest))


def pool_of(x: torch.Tensor) -> CandidatePool:
    return CandidatePool(x, torch.ones(len(x)))


def recovered(x: torch.Tensor, claim: Claim) -> int:
    tests, _ = run_tests({"some": pool_of(x)}, claim, 0, 300, math.inf)
    return findings(tests, len(claim.train)).recovered


def test_near_repeats_hide_nothing_and_are_left_out_in_pairs() -> None:
    train, pool = digits(0, 50, 480)
    copies = train.x[:5] + 0.001 * torch.randn(5, 1, 8, 8, generator=torch.manual_seed(0))
    crowded = pool.replace(x=torch.cat([pool.x, copies]), y=torch.cat([pool.y, train.y[:5]]))
    candidates = train.x[:10] + 0.15 * torch.randn(10, 1, 8, 8, generator=torch.manual_seed(1))
    claim = without_repeats(train, crowded)
    assert claim.repeats == tuple(range(5))
    assert (len(claim.train), len(claim.pool or ())) == (45, 480)
    assert "5 of 50 training samples also occur in the held-out set" in claim.notes[0]
    assert not claim.failure
    assert recovered(candidates, claim) >= 4  # of the five that nobody repeats


@pytest.mark.parametrize(("factor", "shift"), [(0.9, 0.0), (0.5, 0.2), (1.0, -0.3)])
def test_copies_in_another_brightness_are_repeats(factor: float, shift: float) -> None:
    train, pool = digits(3, 50, 480)
    copies = factor * train.x[7:11] + shift
    crowded = pool.replace(x=torch.cat([copies, pool.x]), y=torch.cat([train.y[7:11], pool.y]))
    claim = without_repeats(train, crowded)
    assert claim.repeats == (7, 8, 9, 10)
    assert torch.equal((claim.pool or pool).x, pool.x)


def test_rows_of_a_raw_table_are_not_repeats_because_one_column_dominates() -> None:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    data = Dataset(torch.from_numpy(x), torch.from_numpy(y))
    train, pool = data.take(torch.arange(100)), data.take(torch.arange(100, 500))
    assert without_repeats(train, pool).set_aside is None
    crowded = data.take(torch.tensor([*range(100, 500), 3, 50]))
    assert without_repeats(train, crowded).repeats == (3, 50)


def test_a_tenth_of_the_training_set_may_be_set_aside_and_no_more() -> None:
    train, pool = digits(4, 30, 500)
    for count, ok in ((3, True), (4, False)):
        copies = train.take(torch.arange(count))
        crowded = pool.replace(x=torch.cat([pool.x, copies.x]), y=torch.cat([pool.y, copies.y]))
        claim = without_repeats(train, crowded)
        assert bool(claim.failure) is not ok
        assert len(claim.train) == (30 - count if ok else 30)


def test_samples_that_were_set_aside_are_compared_with_the_reconstructions() -> None:
    train, pool = digits(5, 40, 480)
    crowded = pool.replace(x=torch.cat([pool.x, train.x[:4]]), y=torch.cat([pool.y, train.y[:4]]))
    claim = without_repeats(train, crowded)
    noise = torch.randn(40, 1, 8, 8, generator=torch.manual_seed(0)).double()
    for shown, expected in ((train.x[2:3], (2,)), (train.x[:4], (0, 1, 2, 3)), (noise[:1], ())):
        pools = {"a": pool_of(torch.cat([shown, noise]))}
        tests, _ = run_tests(pools, claim, 0, 300, math.inf)
        assert matches_among(claim.set_aside, pools, tests) == expected


def test_an_ordinary_pool_repeats_nothing() -> None:
    train, pool = digits(1, 50, 500)
    claim = without_repeats(train, pool)
    assert claim.train is train
    assert claim.pool is pool
    assert without_repeats(train, None).pool is None


def test_a_pool_that_repeats_the_training_set_is_no_control() -> None:
    train, pool = digits(2, 50, 300)
    crowded = pool.replace(x=torch.cat([pool.x, train.x]), y=torch.cat([pool.y, train.y]))
    claim = without_repeats(train, crowded)
    assert "50 of 50 training samples also occur in the held-out set" in claim.failure
    assert claim.failure in run_controls(claim, Knowledge(), 0, 1000).failures


@pytest.mark.parametrize("seed", range(3))
def test_zeros_and_ones_among_all_digits_are_told_apart_and_others_are_not(seed: int) -> None:
    apart = run_controls(Claim(*digits(seed, 40, 500, (0, 1))), Knowledge(), seed, 1000)
    assert apart.auc is not None
    assert apart.auc >= 0.8
    assert any("not of one kind" in failure for failure in apart.failures)
    alike = run_controls(Claim(*digits(seed, 40, 500)), Knowledge(), seed, 1000)
    assert alike.failures == ()
    assert "matched by label" in alike.notes[0]


def test_few_samples_do_not_scatter_into_an_alarm() -> None:
    rng = np.random.default_rng(0)
    train, pool = digits(0, 10, 300)
    auc, _ = tell_apart(train, pool, rng)
    assert auc is not None
    assert not (auc.value >= 0.8 and auc.clear)
    assert tell_apart(*digits(0, 9, 300), rng) == (None, None)


def test_what_was_granted_makes_candidates_and_nothing_else_does() -> None:
    train, pool = digits(0, 20, 300)
    rng = np.random.default_rng(0)
    assert granted_candidates(train, pool, Knowledge(), rng) == []
    names = [name for name, _ in granted_candidates(train, pool, knowledge_of(train), rng)]
    assert len(names) == 3
    direction = dict(granted_candidates(train, pool, knowledge_of(train), rng))[names[1]].mean(0)
    wanted = -pool.x.mean(0)  # samples are centred by the granted mean already
    assert float(torch.corrcoef(torch.stack([direction.flatten(), wanted.flatten()]))[0, 1]) > 0.99


def knowledge_of(train: Dataset) -> Knowledge:
    return Knowledge(mean=train.mean, value_range=(0.0, 1.0))


def test_samples_that_the_grant_brings_back_alone_say_nothing_of_the_network() -> None:
    row = ControlRow("the mean", 80, 3, 0.2, 0.004, (1, 2, 3), granted=True)
    assert brought_by_grant(Controls((row,)), (1, 2, 9, 8)) != ()
    assert brought_by_grant(Controls((row,)), (1, 7, 9, 8)) == ()
    assert brought_by_grant(Controls((row.replace(granted=False),)), (1, 2)) == ()
    assert brought_by_grant(Controls((row,)), ()) == ()


def test_what_a_grant_gives_away_alone_is_said_and_held_out_candidates_decide() -> None:
    rng = torch.Generator().manual_seed(0)
    near = torch.randn(40, generator=rng) + 0.5 * torch.randn(20, 40, generator=rng)
    labels = torch.tensor([-1.0, 1.0])
    train = Dataset(near.double(), labels.repeat(10))
    pool = Dataset(torch.randn(300, 40, generator=rng).double(), labels.repeat(150))
    found = run_controls(Claim(train, pool), Knowledge(mean=near.double().mean(0)), 0)
    assert any('"come back"' in note for note in found.notes)
    assert not any('"come back"' in failure for failure in found.failures)
    copies = pool.replace(x=pool.x[:100], y=pool.y[:100])
    found = run_controls(Claim(copies, pool), Knowledge(), 0)
    assert any("held-out samples as candidates" in failure for failure in found.failures)


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
    p = told_by_network(network, samples(np.full(30, typical)), pool, "binary", 0)
    assert p is not None
    assert p <= 0.01
    others = [
        told_by_network(network, samples(rng.normal(1.0, 2.0, 30)), pool, "binary", 0) or 0.0
        for _ in range(5)
    ]
    assert sum(value > 0.01 for value in others) >= 4  # each is below 1% in one case of a hundred


def test_a_trained_network_tells_its_samples_from_others_and_a_random_one_does_not() -> None:
    found = []
    for victim in (leaky, tight, untrained):
        checkpoint, split = victim()
        p = told_by_network(checkpoint, split.train, split.holdout, "binary", 0)
        blind = split.holdout.replace(y=torch.zeros(len(split.holdout)))
        without = told_by_network(checkpoint, split.train, blind, "binary", 0)
        assert p is not None
        assert without is not None
        found.append((p <= 0.01, without <= 0.01))
    assert found == [(True, True), (True, True), (False, False)]
    checkpoint, split = leaky()
    assert told_by_network(checkpoint, split.train, None, "binary", 0) is None


def test_a_network_that_never_saw_the_claim_is_told_no_more_often_than_stated() -> None:
    """At 1%, more than 3 of 40 would happen by chance once in 1500."""
    checkpoint, split = leaky()
    order = torch.randperm(400, generator=torch.manual_seed(1)).reshape(40, 10)
    alarms = 0
    for k, mine in enumerate(order):
        rest = torch.cat([order[:k].flatten(), order[k + 1 :].flatten()])
        claim, pool = (
            split.holdout.replace(x=split.holdout.x[rows], y=split.holdout.y[rows])
            for rows in (mine, rest)
        )
        p = told_by_network(checkpoint, claim, pool, "binary", k)
        alarms += p is not None and p <= 0.01
    assert alarms <= 3


def test_grades_compare_with_the_nearest_held_out_sample_and_the_mean_of_the_class() -> None:
    train, pool = digits(0, 20, 400)
    mean = {int(y): pool.x[pool.y == y].mean(0) for y in (-1, 1)}
    candidates = torch.stack([train.x[0], 0.5 * train.x[1] + 0.5 * mean[int(train.y[1])]])
    tests, _ = run_tests({"some": pool_of(candidates)}, Claim(train, pool), 0, 300, math.inf)
    test = tests["some"]
    found = grades(test, test.field.strata)
    assert found[0] == NEAR_COPY
    for i, grade in found.items():  # the definition, one sample at a time
        left = 1 - test.control.value[i]
        near = max(float(ncc(train.x[i], one)) for one in pool.x)
        typical = float(ncc(train.x[i], mean[int(train.y[i])]))
        wanted = (
            NEAR_COPY
            if left <= 0.75 * (1 - max(near, typical))
            else RESEMBLES
            if left <= 0.75 * (1 - typical)
            else CLASS_LIKE
        )
        assert grade == wanted


def ncc(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]


def test_a_permuted_target_keeps_its_entries_layer_by_layer_and_loses_their_order() -> None:
    checkpoint, _ = tight()
    plain = OBJECTIVES["binary-kkt"]().surface_of(checkpoint.theta, Knowledge())
    one, same = (
        permuted(OBJECTIVES["binary-kkt"], 3)().surface_of(checkpoint.theta, Knowledge())
        for _ in range(2)
    )
    other = permuted(OBJECTIVES["binary-kkt"], 4)().surface_of(checkpoint.theta, Knowledge())
    for name, t in plain.target.items():
        assert torch.equal(one.target[name].flatten().sort()[0], t.flatten().sort()[0])
        assert torch.equal(one.target[name], same.target[name])
    first = next(iter(plain.target))
    assert not torch.equal(one.target[first], plain.target[first])
    assert not torch.equal(one.target[first], other.target[first])


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("", TrainingRecipe()),
        ("optimiser=sgd,rate=0.01,epochs=100,batch=50", TrainingRecipe("sgd", 0.01, 100, 50)),
        (" start=small , frozen=a+b ", TrainingRecipe(start="small", frozen=("a", "b"))),
    ],
)
def test_recipes(text: str, recipe: TrainingRecipe) -> None:
    assert TrainingRecipe.parse(text) == recipe


@pytest.mark.parametrize(
    "text", ["rate=fast", "lr=0.1", "optimiser=magic", "epochs=-1", "start=", "rate=nan", "batch"]
)
def test_other_recipes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="recipe"):
        TrainingRecipe.parse(text)


def test_a_twin_takes_its_samples_out_of_the_pool_with_the_labels_of_the_training_set() -> None:
    split = tight()[1]
    mine, rest = split_holdout(split.holdout, split.train, 0)
    assert sorted(mine.y.tolist()) == sorted(split.train.y.tolist())
    assert len(mine) + len(rest) == len(split.holdout)
    both = torch.cat([mine.x, rest.x]).flatten(1)
    assert len(both.unique(dim=0)) == len(split.holdout.x.flatten(1).unique(dim=0))


def test_without_a_large_pool_a_twin_is_of_bundled_digits_in_the_same_shape() -> None:
    checkpoint, split = tight()
    for shape in ((1, 8, 8), (64,)):
        like = split.train.replace(x=split.train.x.reshape(-1, *shape), mean=None)
        mine, rest = bundled_digits(like, checkpoint, Knowledge(value_range=(0.0, 1.0)), 0)
        assert mine.shape == shape
        assert len(mine) == len(like)
        assert len(rest) >= len(mine) + 100
        assert 0 <= float(mine.x.min()) < float(mine.x.max()) <= 1
        assert set(mine.y.tolist()) == {-1, 1}


# A plan under which all three positive controls are noticed.
PLAN: dict[str, Any] = {
    "steps": 1500,
    "batches": (Batch("binary-kkt", 24, 1500, 0),),
    "seed": 2,
    "baselines": False,
}


def test_no_leak_found_needs_three_positive_controls_and_says_what_they_gave() -> None:
    checkpoint, split = tight()
    given = {
        "data": split.train,
        "holdout": split.holdout,
        "knowledge": knowledge(split),
        "budget": 5,
    }
    found = rs.audit(checkpoint, **given, **PLAN)
    again = rs.audit(checkpoint, **given, **PLAN)
    without = rs.audit(checkpoint, **given, **PLAN, twin=False)
    assert found.verdict.outcome == NO_LEAK_FOUND
    assert len(found.checks.twins) == 3
    assert len({control.made for control in found.checks.twins}) == 3  # three different networks
    for control, repeated in zip(found.checks.twins, again.checks.twins, strict=True):
        assert control.noticed
        assert control.recovered >= 3
        assert f"{control.recovered} of 20" in " ".join(found.verdict.reasons)
        assert same(repeated.replace(seconds=0.0), control.replace(seconds=0.0))
        assert {name.split()[0] for name in control.attacked} == {
            row.name for row in found.attacks if row.ran and row.decides
        }
        assert not control.left_out
    assert without.verdict.outcome == INCONCLUSIVE
    assert any("--no-twin" in reason for reason in without.verdict.reasons)
    (row,) = [row for row in found.attacks if row.ran and not row.silent]
    assert row.explained
    assert row.permuted is not None
    assert row.residual <= row.permuted / 2
    assert "controls, permuted target and positive controls took" in found.notes[-1]


def test_a_small_pool_makes_a_weaker_twin_and_says_so() -> None:
    checkpoint, split = tight()
    few = split.holdout.replace(x=split.holdout.x[:130], y=split.holdout.y[:130])
    found = rs.audit(
        checkpoint,
        data=split.train,
        holdout=few,
        knowledge=knowledge(split),
        budget=5,
        **PLAN,
    )
    assert "weaker" in found.checks.twins[0].made


def test_steps_or_restarts_that_are_missing_never_pass() -> None:
    """Truth review 1.2: leaking networks passed because their attacks were cut short."""
    checkpoint, split = tight()
    given = {"data": split.train, "holdout": split.holdout, "knowledge": knowledge(split)}
    for batch, plan, said in (
        (Batch("binary-kkt", 4, 399, 0), 400, "each restart ran 399 of 400 steps"),
        (Batch("binary-kkt", 3, 400, 0), 400, "3 of 4 restarts ran all 400 steps"),
        (Batch("binary-kkt", 4, 400, 0), None, "each restart ran 400 of 3000 steps"),
    ):
        found = rs.audit(
            checkpoint,
            **given,
            batches=(batch,),
            steps=plan,
            budget=5,
            baselines=False,
            twin=False,
        )
        assert found.exit_code == 3
        assert any(said in reason for reason in found.verdict.reasons), found.verdict.reasons


def test_vouching_is_a_note_in_every_artifact(tmp_path) -> None:
    checkpoint, split = untrained()
    found = rs.audit(
        checkpoint,
        data=split.train,
        holdout=split.holdout,
        knowledge=knowledge(split),
        vouch=True,
        batches=(Batch("binary-kkt", 1, 20, 0),),
        baselines=False,
        subsets=200,
    )
    assert found.checks.vouched
    assert not any("was trained on these records" in reason for reason in found.verdict.reasons)
    found.save(tmp_path / "run")
    for name in ("report.html", "model_card.md", "result.json", "report.sarif"):
        assert "vouch" in (tmp_path / "run" / name).read_text(), name


def test_a_twin_trained_in_batches_is_the_same_whatever_was_drawn_before() -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
    y = torch.where(x[:, 0] > 0, 1.0, -1.0).double()
    found = []
    for seed, before in ((0, 1), (0, 2), (1, 1)):
        model = torch.nn.Linear(4, 1).double()
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        torch.manual_seed(before)
        recipe = TrainingRecipe.parse("optimiser=sgd,rate=0.5,epochs=3,batch=7")
        limits = {"target_loss": 0.0, "seconds": math.inf}
        descend(model, x, y, loss="logistic", recipe=recipe, seed=seed, **limits)
        found.append(model.weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_of_tests_with_the_least_p_the_one_with_most_to_show_is_shown() -> None:
    def one(count: int, adjusted: float) -> Any:
        control = SimpleNamespace(p_value=adjusted, recovered=np.arange(9) < count)
        return AttackTest(None, None, control, adjusted)  # type: ignore[arg-type]

    assert strongest_of({"few": one(2, 0.0005), "many": one(5, 0.0005)}) == "many"
    assert strongest_of({"few": one(2, 0.0005), "many": one(5, 0.001)}) == "few"
