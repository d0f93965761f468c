"""Membership by loss and margin: a naive twin, exact cases, and a verdict that it never changes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import residuum as rs
from residuum.auditing.controls import Claim, Membership, membership, separation
from residuum.networks import MLP
from residuum.records import Dataset


def naive_auc(mine: np.ndarray, others: np.ndarray) -> float:
    return float(np.mean([(b > a) + 0.5 * (b == a) for a in mine for b in others]))


def naive_rate(mine: np.ndarray, others: np.ndarray, rate: float) -> float:
    """The best share of training samples below any threshold with so few false positives."""
    thresholds = [*others, math.inf]
    allowed = [t for t in thresholds if (others < t).mean() <= rate]
    return max(float((mine < t).mean()) for t in allowed)


def test_separation_is_that_of_the_naive_loops() -> None:
    rng = np.random.default_rng(0)
    mine, others = rng.normal(-0.5, 1, 70).round(1), rng.normal(0, 1, 1100).round(1)
    tied = separation("loss", mine.round(), others.round())  # many at the threshold itself
    assert tied.auc == pytest.approx(naive_auc(mine.round(), others.round()), abs=1e-12)
    assert tied.at_1 == naive_rate(mine.round(), others.round(), 0.01)
    found = separation("loss", mine, others)
    assert found.auc == pytest.approx(naive_auc(mine, others), abs=1e-12)
    assert found.at_1 == naive_rate(mine, others, 0.01)
    assert found.at_01 == naive_rate(mine, others, 0.001)
    small = separation("loss", mine, others[:900])
    assert small.at_01 is None  # no false positive is one in a thousand of 900
    assert small.at_1 == naive_rate(mine, others[:900], 0.01)
    assert "at 1.0% false positives" in found.line
    assert "at 0.1%" not in small.line


def test_apart_and_alike() -> None:
    rng = np.random.default_rng(1)
    apart = separation("loss", rng.random(50), 2 + rng.random(2000))
    assert (apart.auc, apart.at_1, apart.at_01) == (1, 1, 1)
    assert separation("loss", np.zeros(20), np.zeros(200)).auc == 0.5
    areas = [separation("loss", rng.random(50), rng.random(400)) for _ in range(200)]
    z = np.array([(one.auc - 0.5) / one.error for one in areas])
    assert abs(z.mean()) < 3 / math.sqrt(200)
    assert 0.85 < z.std() < 1.15  # the standard error is one
    assert np.mean([one.at_1 for one in areas]) == pytest.approx(0.01, abs=0.004)


def test_a_loss_without_a_number_counts_as_a_large_loss() -> None:
    rng = np.random.default_rng(2)
    members, others = rng.random(30), 0.5 + rng.random(200)
    finite = separation("loss", np.append(members, 9), np.append(others, 8))
    for unbounded in (math.inf, math.nan):
        extreme = separation("loss", np.append(members, unbounded), np.append(others, 8))
        assert (extreme.auc, extreme.at_1) == (finite.auc, finite.at_1)


def samples(task: str) -> tuple[Dataset, Dataset]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 6, generator=generator)
    y = {
        "binary": torch.arange(150) % 2,
        "multiclass": torch.arange(150) % 3,
        "regression": torch.randn(150, generator=generator),
    }[task]
    return Dataset(x[:30], y[:30]), Dataset(x[30:], y[30:])


@pytest.mark.parametrize(("task", "outputs"), [("binary", 1), ("multiclass", 3), ("regression", 1)])
def test_losses_and_margins_are_those_of_the_outputs(task: str, outputs: int) -> None:
    torch.manual_seed(0)
    checkpoint = rs.checkpoint_from_module(MLP((6, 9, outputs)), task=task)
    train, pool = samples(task)
    found = membership(checkpoint, Claim(train, pool))
    assert found is not None
    model = checkpoint.copy_module(torch.float64)
    losses, gaps = [], []
    for data in (train, pool):
        for x, y in zip(data.x.double(), data.y, strict=True):
            out = model(x[None])[0].tolist()
            if task == "regression":
                losses.append((out[0] - float(y)) ** 2)
            elif task == "binary":
                gaps.append((2 * int(y) - 1) * out[0])
                losses.append(math.log1p(math.exp(-gaps[-1])))
            else:
                own = out[int(y)]
                gaps.append(own - max(v for c, v in enumerate(out) if c != int(y)))
                losses.append(math.log(sum(math.exp(v) for v in out)) - own)
    assert found.loss.auc == pytest.approx(
        naive_auc(np.array(losses[:30]), np.array(losses[30:])), abs=1e-12
    )
    if task == "regression":
        assert found.margin is None
    else:
        assert found.margin is not None
        gap = -np.array(gaps)
        assert found.margin.auc == pytest.approx(naive_auc(gap[:30], gap[30:]), abs=1e-12)


def test_without_held_out_labels_nothing_is_said() -> None:
    checkpoint = rs.checkpoint_from_module(MLP((6, 9, 1)))
    train, pool = samples("binary")
    assert membership(checkpoint, Claim(train, None)) is None
    assert membership(checkpoint, Claim(train, pool.replace(y=torch.zeros(120)))) is None
    few = pool.replace(x=pool.x[:5], y=pool.y[:5])
    assert membership(checkpoint, Claim(train, few)) is None


def test_a_network_that_knows_its_samples_by_heart_is_said_to_and_the_verdict_is_as_without(
    tmp_path: Path,
) -> None:
    """Random labels: nothing but the samples themselves can be learned."""
    torch.manual_seed(0)
    train, pool = samples("binary")
    pool = pool.replace(y=pool.y[torch.randperm(120)])
    model = MLP((6, 60, 1))
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    y = 2.0 * train.y - 1
    for _ in range(500):
        optimiser.zero_grad()
        torch.nn.functional.softplus(-y * model(train.x)[:, 0]).mean().backward()
        optimiser.step()
    known = {"budget": 1, "steps": 5, "subsets": 200, "baselines": False}
    result = rs.audit(model, data=train, holdout=pool, **known)
    assert result.membership is not None
    loss = result.membership.loss
    assert loss.auc - 0.5 > 2.5 * loss.error
    assert result.verdict.outcome == "inconclusive"  # five steps explain nothing
    assert not any("membership" in reason for reason in result.verdict.reasons)
    result.save(tmp_path / "run")
    back = rs.AuditResult.load(tmp_path / "run")
    assert isinstance(back.membership, Membership)
    assert back.membership.loss.auc == result.membership.loss.auc
    text = result.membership.lines[0]
    assert text in (tmp_path / "run/report.html").read_text()
    assert text in (tmp_path / "run/model_card.md").read_text().replace("\\", "")
    fresh = membership(rs.checkpoint_from_module(MLP((6, 60, 1))), Claim(train, pool))
    assert fresh is not None
    assert abs(fresh.loss.auc - 0.5) < 2.5 * fresh.loss.error
