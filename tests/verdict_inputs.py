"""What a verdict rests on, made up for tests: findings, rows of attacks, membership tests, controls."""

from __future__ import annotations

from typing import Any

import torch

from residuum.auditing.outcomes import NEAR_COPY, STORED, AttackOutcome, Findings
from residuum.auditing.power import NETWORKS, ControlSize, PositiveControls
from residuum.auditing.verdict import Checks
from residuum.evaluation.adapting import Fit
from residuum.risk.membership import LossSeparation, MembershipTest

FIT = Fit("accuracy", 1.0, 0.9, 0.5)
RECORDS = 20  # training samples of every made-up audit
LOSS_ABSENT = LossSeparation(0.5, 0.4, 0.6, 0.0, 0.5)
LOSS_UNCLEAR = LossSeparation(0.6, 0.5, 0.7, 0.0, 0.5)
LOSS_SHOWN = LossSeparation(0.9, 0.8, 1.0, 0.5, 1e-6)


def controls(samples: int = RECORDS, question: str = "reconstruction") -> PositiveControls:
    """Positive controls that were all detected at one number of samples."""
    counts = (samples,) * NETWORKS[question]
    return PositiveControls(question, (ControlSize(samples, counts, len(counts), 1e-4),))


SOUND = Checks(
    fit=FIT, told_apart=0.001, positive_controls=(controls(), controls(question="membership"))
)


def findings(recovered: int = 0, **changes: Any) -> Findings:
    """Tests of one attack that recovered so many samples, all of them near-copies."""
    row = Findings(
        RECORDS,
        recovered=recovered,
        expected_by_chance=0.2,
        interval=(2.0 if recovered else 0.0, float(recovered)),
        p_value=0.001 if recovered else 1.0,
        metric="ncc",
        rule="ncc > 0.8",
        tests=1,
        survivors=("binary-kkt",) if recovered else (),
        samples=tuple(range(recovered)),
        grades={NEAR_COPY: recovered} if recovered else {},
    )
    return row.replace(**changes)


def ran(**changes: Any) -> AttackOutcome:
    """The row of an attack that ran and recovered nothing."""
    row = AttackOutcome("binary-kkt", True, True, True, "", surface="weights", restarts=2)
    return row.replace(**changes)


def survivor(**changes: Any) -> AttackOutcome:
    """The row of an attack that recovered three samples."""
    figures = {"recovered": 3, "expected_by_chance": 0.2, "p_value": 0.0005, "adjusted": 0.001}
    return ran(rule="ncc > 0.8", **figures).replace(**changes)


def stored(**changes: Any) -> AttackOutcome:
    """The row of a file that stores all training samples."""
    row = AttackOutcome("stored outright", True, True, True, "KDTree at data", surface=STORED)
    figures = {"candidates": RECORDS, "recovered": RECORDS, "sample_count": RECORDS}
    return row.replace(expected_by_chance=0.0, **figures).replace(**changes)


def membership(named: int = 0, **changes: Any) -> MembershipTest:
    """A test of membership that names so many records, a finding if there are any."""
    unit = torch.zeros(RECORDS, dtype=torch.float64)
    row = MembershipTest(
        records=RECORDS,
        rows=tuple(range(RECORDS)),
        holdout=400,
        holdout_needed=133,
        layers=1,
        neurons=30,
        statistic=unit,
        holdout_statistic=torch.zeros(400, dtype=torch.float64),
        boundaries=torch.zeros(RECORDS, dtype=torch.long),
        holdout_boundaries=torch.zeros(400, dtype=torch.long),
        p=unit + (1 / 401 if named else 1.0),
        q=unit + (0.01 if named else 1.0),
        above_tail=named,
        group_p=1e-6 if named else 1.0,
        named=torch.arange(named),
        is_finding=named > 0,
        reason="",
        decoy_p=unit + 1.0,
        decoy_named=torch.arange(named),
        loss=LOSS_ABSENT,
    )
    return row.replace(**changes)
