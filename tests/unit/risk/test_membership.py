"""Membership by loss: naive references, exact classes of memorization, and what it does to a verdict."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import residuum as rs
from residuum.auditing.questions import UNKNOWN
from residuum.auditing.verdict import INCONCLUSIVE
from residuum.conformal import group_p_value
from residuum.evaluation.roc import area_under_curve, true_positive_rate
from residuum.networks import MLP
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.risk.membership import (
    ABSENT,
    GROUP_LEVEL,
    MAX_AUC,
    MAX_TRUE_POSITIVE_RATE,
    SHOWN,
    UNCLEAR,
    LossSeparation,
    MembershipTest,
    measure_membership,
    separate_by_loss,
)

Values = np.ndarray


def naive_auc(members: Values, nonmembers: Values) -> float:
    return float(np.mean([(b > a) + 0.5 * (b == a) for a in members for b in nonmembers]))


def naive_rate(members: Values, nonmembers: Values, rate: float) -> float:
    """The largest share of members below any threshold with so few false positives."""
    thresholds = [*nonmembers, math.inf]
    allowed = [t for t in thresholds if (nonmembers < t).mean() <= rate]
    return max(float((members < t).mean()) for t in allowed)


def scores_of(members: Values, nonmembers: Values) -> tuple[Values, Values]:
    """Return scores that are large for small values, and which of them belong to members."""
    return -np.concatenate([members, nonmembers]), np.repeat(
        [True, False], [len(members), len(nonmembers)]
    )


@pytest.mark.parametrize("digits", [0, 1, 9])  # with many ties, with some, and with none
@pytest.mark.parametrize("pool", [1100, 900, 120])
def test_the_curve_is_that_of_the_naive_loops(digits: int, pool: int) -> None:
    rng = np.random.default_rng(digits)
    members = rng.normal(-0.5, 1, 70).round(digits)
    nonmembers = rng.normal(0, 1, pool).round(digits)
    scores = scores_of(members, nonmembers)
    assert area_under_curve(*scores) == pytest.approx(naive_auc(members, nonmembers), abs=1e-12)
    for rate in (0.01, 0.1):
        assert true_positive_rate(*scores, rate) == naive_rate(members, nonmembers, rate)


def test_values_apart_and_alike() -> None:
    rng = np.random.default_rng(1)
    separated = scores_of(rng.random(50), 2 + rng.random(2000))
    assert area_under_curve(*separated) == true_positive_rate(*separated, 0.01) == 1
    assert area_under_curve(*scores_of(np.zeros(20), np.zeros(200))) == 0.5
    rates = [
        true_positive_rate(*scores_of(rng.random(50), rng.random(400)), 0.01) for _ in range(200)
    ]
    assert np.mean(rates) == pytest.approx(0.01, abs=0.004)


def test_a_value_that_is_no_number_counts_as_a_large_loss() -> None:
    rng = np.random.default_rng(2)
    members, nonmembers = rng.random(30), 0.5 + rng.random(200)
    finite = scores_of(np.append(members, 9), np.append(nonmembers, 8))
    for unbounded in (math.inf, math.nan):
        extreme = scores_of(np.append(members, unbounded), np.append(nonmembers, 8))
        assert area_under_curve(*extreme) == area_under_curve(*finite)
        assert true_positive_rate(*extreme, 0.01) == true_positive_rate(*finite, 0.01)


def samples(task: str, count: int = 150) -> tuple[Dataset, Dataset]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator)
    y = {
        "binary": torch.arange(count) % 2,
        "multiclass": torch.arange(count) % 3,
        "regression": torch.randn(count, generator=generator),
    }[task]
    return Dataset(x[:30], y[:30]), Dataset(x[30:], y[30:])


@pytest.mark.parametrize(("task", "outputs"), [("binary", 1), ("multiclass", 3), ("regression", 1)])
def test_losses_are_those_of_the_outputs(task: str, outputs: int) -> None:
    torch.manual_seed(0)
    checkpoint = rs.checkpoint_from_module(MLP((6, 9, outputs)), task=task)
    train, pool = samples(task)
    measured = separate_by_loss(checkpoint, train, pool)
    model = checkpoint.copy_module(torch.float64)
    losses = []
    for data in (train, pool):
        for x, y in zip(data.x.double(), data.y, strict=True):
            out = model(x[None])[0].tolist()
            if task == "regression":
                losses.append((out[0] - float(y)) ** 2)
            elif task == "binary":
                losses.append(math.log1p(math.exp(-(2 * int(y) - 1) * out[0])))
            else:
                losses.append(math.log(sum(math.exp(v) for v in out)) - out[int(y)])
    members, nonmembers = np.array(losses[:30]), np.array(losses[30:])
    assert measured.auc == pytest.approx(naive_auc(members, nonmembers), abs=1e-12)
    assert measured.true_positive_rate == pytest.approx(naive_rate(members, nonmembers, 0.01))
    tail = group_p_value(torch.from_numpy(-members), torch.from_numpy(-nonmembers))
    assert measured.tail_p == pytest.approx(tail)
    beaten = np.array([[(b > a) + 0.5 * (b == a) for b in nonmembers] for a in members])
    variance = beaten.mean(1).var(ddof=1) / 30 + beaten.mean(0).var(ddof=1) / 120
    margin = norm.ppf(0.95) * math.sqrt(variance)
    assert measured.auc_lower == pytest.approx(max(0.0, measured.auc - margin))
    assert measured.auc_upper == pytest.approx(min(1.0, measured.auc + margin))


def one_input(values: Values) -> Dataset:
    y = torch.where(torch.arange(len(values)) % 2 > 0, 1.0, -1.0).double()
    return Dataset((y * torch.from_numpy(values))[:, None], y)


def test_the_limits_hold_in_95_of_100_cases() -> None:
    """The output is minus the input, so the loss of a sample y v with label y grows with v.

    At 5%, more than 32 or fewer than 7 of 400 misses have a probability of 0.5%.
    """
    theta = {
        "layers.0.weight": torch.tensor([[1.0], [-1.0]], dtype=torch.float64),
        "layers.0.bias": torch.zeros(2, dtype=torch.float64),
        "layers.1.weight": torch.tensor([[-1.0, 1.0]], dtype=torch.float64),
    }
    checkpoint = Network(theta, "mlp:1-2-1", task="binary")
    rng, misses = np.random.default_rng(0), [0, 0]
    true_auc = float(norm.cdf(0.5 / math.sqrt(2)))  # of N(-1/2, 1) against N(0, 1)
    for _ in range(400):
        members, nonmembers = rng.normal(-0.5, 1, 40), rng.normal(0, 1, 200)
        train, pool = (one_input(values) for values in (members, nonmembers))
        measured = separate_by_loss(checkpoint, train, pool)
        misses[0] += measured.auc_lower > true_auc
        misses[1] += measured.auc_upper < true_auc
    assert all(7 <= count <= 32 for count in misses), misses


# The classes of memorization


CLASSES = [
    # AUC limits far above the limit, and on it.
    (LossSeparation(0.9, 0.8, 1.0, 0.0, 1.0), SHOWN),
    (LossSeparation(0.7, 0.6501, 0.75, None, 1.0), SHOWN),
    (LossSeparation(0.7, 0.65, 0.75, 0.0, 1.0), UNCLEAR),
    # Many records in the tail, by more than chance.
    (LossSeparation(0.5, 0.4, 0.6, 0.05, 0.005), SHOWN),
    (LossSeparation(0.5, 0.4, 0.6, 0.3, 1e-9), SHOWN),
    (LossSeparation(0.5, 0.4, 0.6, 0.05, 0.00501), UNCLEAR),  # perhaps by chance
    (LossSeparation(0.5, 0.4, 0.6, 0.0499, 1e-9), ABSENT),  # more than chance, but few
    # Absent needs the upper limit of the AUC below 0.65, and few records in the tail.
    (LossSeparation(0.5, 0.4, 0.6, 0.0, 1.0), ABSENT),
    (LossSeparation(0.6, 0.55, 0.6499, 0.0, 1.0), ABSENT),
    (LossSeparation(0.6, 0.55, 0.65, 0.0, 1.0), UNCLEAR),
    (LossSeparation(0.6, 0.5, 0.7, 0.0, 1.0), UNCLEAR),
    (LossSeparation(0.5, 0.4, 0.6, None, 1.0), UNCLEAR),  # fewer than 100 held-out records
    (LossSeparation(0.2, 0.1, 0.3, 0.0, 1.0), ABSENT),  # larger losses of training records
]


@pytest.mark.parametrize(("separation", "memorization"), CLASSES)
def test_classes_of_memorization(separation: LossSeparation, memorization: str) -> None:
    assert separation.memorization == memorization


def test_the_limits_are_those_that_were_fixed_in_advance() -> None:
    assert (MAX_AUC, MAX_TRUE_POSITIVE_RATE, GROUP_LEVEL) == (0.65, 0.05, 0.005)
    assert {memorization for _, memorization in CLASSES} == {SHOWN, ABSENT, UNCLEAR}


def test_the_figures_in_a_sentence() -> None:
    line = LossSeparation(0.9, 0.84, 0.96, 0.256, 0.0).line
    assert line == (
        "By their losses, members are separated from non-members with an AUC of 0.90 (95% limits "
        "0.84 and 0.96, chance: 0.5), and 25.6% of them are found (chance: 1%)."
    )
    assert LossSeparation(0.9, 0.84, 0.96, None, 0.0).line.endswith("chance: 0.5).")


def test_fewer_than_a_hundred_held_out_records_have_no_rate() -> None:
    checkpoint = rs.checkpoint_from_module(MLP((6, 9, 1)))
    train, pool = samples("binary")
    few = pool.take(torch.arange(99))
    assert separate_by_loss(checkpoint, train, few).true_positive_rate is None
    enough = pool.take(torch.arange(100))
    assert separate_by_loss(checkpoint, train, enough).true_positive_rate is not None


@pytest.mark.parametrize(("task", "outputs"), [("binary", 1), ("multiclass", 3)])
def test_held_out_records_without_labels_say_nothing_by_their_losses(
    task: str, outputs: int
) -> None:
    """Read as one class, records without labels would have large losses, and members small ones."""
    checkpoint = rs.checkpoint_from_module(MLP((6, 9, outputs)), task=task)
    train, pool = samples(task)
    assert measure_membership(checkpoint, train, pool).loss is not None
    blind = measure_membership(checkpoint, train, pool.replace(y=torch.zeros(120)))
    assert blind.loss is None
    assert blind.holdout == 120  # activation boundaries need no labels
    assert torch.equal(blind.statistic, measure_membership(checkpoint, train, pool).statistic)
    assert measure_membership(checkpoint, train).loss is None


# In an audit


def memorizing() -> tuple[nn.Module, Dataset, Dataset]:
    """A smooth network that learned random labels: nothing but the samples can be learned."""
    torch.manual_seed(0)
    train, pool = samples("binary", 350)
    pool = pool.replace(y=pool.y[torch.randperm(320)])
    model = nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    y = 2.0 * train.y - 1
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.softplus(-y * model(train.x)[:, 0]).mean().backward()
        optimizer.step()
    return model, train, pool


def test_memorization_keeps_a_verdict_open_and_never_shows_a_leak(tmp_path: Path) -> None:
    model, train, pool = memorizing()
    options = {
        "attacks": [{"attack": "kkt", "steps": 2, "restarts": 1}],
        "subsets": 200,
        "baselines": False,
    }
    result = rs.audit(model, data=train, holdout=pool, **options)
    assert result.membership is not None
    loss = result.membership.loss
    assert loss is not None
    assert loss.memorization == SHOWN
    assert (result.verdict.outcome, result.exit_code) == (INCONCLUSIVE, 3)
    assert any(
        reason.startswith("the model memorizes its training samples")
        for reason in result.verdict.reasons
    )
    answer = result.verdict.answers[2]
    assert answer.answer == UNKNOWN
    assert loss.line in answer.evidence
    result.save(tmp_path / "run")
    repeated = rs.AuditResult.load(tmp_path / "run")
    assert isinstance(repeated.membership, MembershipTest)
    assert repeated.membership.loss is not None
    assert repeated.membership.loss.to_json() == loss.to_json()
    assert f"AUC of {loss.auc:.2f}" in (tmp_path / "run/report.html").read_text()
    untrained = separate_by_loss(rs.checkpoint_from_module(MLP((6, 60, 1))), train, pool)
    assert untrained.auc_lower < 0.5 < untrained.auc_upper
