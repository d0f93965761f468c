"""How long the checks of an audit may take, and what is missing if there is no time for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import residuum as rs
from residuum.auditing.budget import CHECK_SHARE, Allowance, Batch, TimeBudget
from residuum.auditing.controls import Claim, ControlRow, run_controls
from residuum.auditing.listener import AuditListener
from residuum.auditing.request import AuditRequest
from residuum.auditing.schedule import AttackSchedule
from residuum.auditing.summary import next_step
from residuum.auditing.verdict import INCONCLUSIVE
from residuum.records import Knowledge
from tests.victims import knowledge, tight

BATCH = (Batch("binary-kkt", 4, 400, 0),)


class Clock:
    """Tells a later time at every look, by so much."""

    def __init__(self, tick: float = 0.0) -> None:
        self.tick, self.now = tick, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def audited(**options: Any) -> rs.AuditResult:
    checkpoint, split = tight()
    known = options.pop("known", knowledge(split))
    return rs.audit(
        checkpoint,
        data=split.train,
        holdout=split.holdout,
        knowledge=known,
        budget=5,
        batches=BATCH,
        steps=400,
        baselines=False,
        **options,
    )


def test_an_allowance_counts_what_runs_inside_it_and_nothing_else() -> None:
    clock = Clock()
    allowance = Allowance(10.0, clock)
    clock.now = 5.0
    assert allowance.left == 10.0
    with allowance:
        clock.now = 8.0
        assert allowance.left == 7.0
    clock.now = 100.0
    assert allowance.left == 7.0
    with allowance:
        clock.now = 108.0
    assert (allowance.spent, allowance.left) == (11.0, -1.0)


@pytest.mark.parametrize(
    ("out_in", "said"),
    [
        ("negative controls", "was not tried, for want of time"),
        ("permuted target", "what it leaves on a permuted target is not known: no time was left"),
        ("positive controls", "the positive control was not run: no time was left for it"),
    ],
)
def test_what_there_is_no_time_for_is_said_and_never_passes(
    monkeypatch: pytest.MonkeyPatch, out_in: str, said: str
) -> None:
    clock = Clock()

    class OutOfTime(AuditListener):
        def stage(self, name: str) -> None:
            clock.tick = 1e6 if name == out_in else 0.0

    monkeypatch.setattr(TimeBudget, "checks", Allowance(CHECK_SHARE * 5, clock))
    found = audited(listener=OutOfTime())
    assert found.verdict.outcome == INCONCLUSIVE
    assert found.exit_code == 3
    assert any(said in reason for reason in found.verdict.reasons), found.verdict.reasons
    if out_in == "negative controls":
        assert any("longer --budget" in reason for reason in found.verdict.reasons)
    else:
        assert "more time" in next_step(found).text


def test_controls_are_tried_in_turn_until_the_time_is_over() -> None:
    split = tight()[1]
    claim, known = Claim(split.train, split.holdout), knowledge(split)
    every = run_controls(claim, known, 0)
    assert len(every.rows) == 4
    assert not every.failures
    # A control looks at this clock three times, and looking is all that takes time.
    for seconds, tried, missing in ((0.0, 0, 5), (8.0, 1, 4), (10.0, 2, 3), (30.0, 4, 0)):
        with Allowance(seconds, Clock(1.0)) as allowance:
            found = run_controls(claim, known, 0, allowance=allowance)
        assert len(found.rows) == tried
        assert len(found.failures) == missing  # of four controls and a classifier
        assert all("for want of time" in why for why in found.failures)


def test_one_subset_clears_a_control_and_no_more_are_drawn() -> None:
    split = tight()[1]
    found = run_controls(Claim(split.train, split.holdout), Knowledge(), 0)
    assert [row.subsets for row in found.rows] == [200]
    copies = split.holdout.replace(
        x=torch.cat([split.train.x + 1e-4, split.holdout.x]),
        y=torch.cat([split.train.y, split.holdout.y]),
    )
    order = np.random.default_rng((0, 5)).permutation(len(copies))  # as the control draws them
    placed = copies.replace(
        x=copies.x[np.argsort(order, kind="stable")], y=copies.y[np.argsort(order, kind="stable")]
    )
    (row, *_) = run_controls(Claim(split.train, placed), Knowledge(), 0).rows
    assert row.subsets == 1000  # 200 could not have said 0.1%
    assert row.failed
    assert row.p_value == pytest.approx(1 / 1001)
    assert ControlRow("few", 1, 1, 0.0, 1 / 201, subsets=200).undecided
    assert not ControlRow("few", 1, 1, 0.0, 2 / 201, subsets=200).undecided


def test_a_permuted_target_that_the_clock_cuts_short_says_nothing() -> None:
    checkpoint, split = tight()
    schedule = AttackSchedule(checkpoint, knowledge(split), AuditRequest(steps=400, budget="5s"))
    assert schedule.residual_on_permuted("binary-kkt", 400, 1e-9) is None
    assert schedule.residual_on_permuted("binary-kkt", 25, 1e9) is not None


def test_a_twin_cut_short_or_of_a_part_of_the_samples_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = AttackSchedule.repeat

    def cut(self: AttackSchedule, name: str, batch: Batch | None, seconds: float) -> Any:
        return original(self, name, batch, 1e-9 if batch is not None else seconds)

    monkeypatch.setattr(AttackSchedule, "repeat", cut)
    (found, *_) = audited(known=knowledge(tight()[1]).replace(sample_count=30)).checks.twins
    assert "holds these 20 alone, where the audited network holds 30 samples" in found.sentence
    assert any("(1 of 4 restarts, 1 of 400 steps)" in one for one in found.attacked)
    assert "1 of 400 steps" in found.sentence
    assert [batch.steps for batch in found.batches] == [1]
