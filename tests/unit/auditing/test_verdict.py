"""The table of verdicts, what keeps a verdict open, the exit codes, and how often a verdict is wrong."""

from __future__ import annotations

import itertools
import json
import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import residuum as rs
from residuum.attacks import Auto, attack
from residuum.auditing.conditions import QUANTITIES, Comparison, exit_code, read_conditions
from residuum.auditing.controls import SampleSets
from residuum.auditing.durations import duration, seconds_of
from residuum.auditing.outcomes import (
    ATTRIBUTE,
    CLASS_LEVEL,
    GRADES,
    MEMBERSHIP,
    NEAR_COPY,
    RESEMBLANCE,
    VERBATIM,
    AttackOutcome,
    Findings,
)
from residuum.auditing.power import PositiveControls
from residuum.auditing.published import publish
from residuum.auditing.questions import NO, UNKNOWN, YES
from residuum.auditing.request import AuditRequest
from residuum.auditing.run import CHOSEN, QUICK, restriction
from residuum.auditing.scores import findings as findings_of
from residuum.auditing.scores import run_tests
from residuum.auditing.verdict import (
    EXIT_CODES,
    INCONCLUSIVE,
    LEAK,
    MOMENT_ATTACKED,
    NO_LEAK_FOUND,
    Checks,
    Verdict,
    decide,
    reaches,
    reasons_to_stay_open,
)
from residuum.errors import InputError
from residuum.evaluation.null import format_p
from residuum.evaluation.scoring import all_candidates
from residuum.records import Dataset, Reconstruction
from residuum.records.attribute_test import AttributeTest
from tests.verdict_inputs import (
    FIT,
    LOSS_ABSENT,
    LOSS_SHOWN,
    LOSS_UNCLEAR,
    RECORDS,
    SOUND,
    controls,
    findings,
    membership,
    ran,
    stored,
    survivor,
)
from tests.victims import knowledge, leaky

CODES = {LEAK: 1, NO_LEAK_FOUND: 0, INCONCLUSIVE: 3}
UNFIT = FIT.replace(train=0.74)
WEAK = {"grades": {CLASS_LEVEL: 3}}

# Findings, rows of attacks, checks, membership, other arguments, outcome, exit code, and a part of a reason.
TABLE: list[tuple[Findings | None, list[AttackOutcome], Checks, Any, dict[str, Any], str, int, str]]
TABLE = [
    # Stored records come first, whatever else holds.
    (None, [stored()], Checks(), None, {}, LEAK, 1, "KDTree at data"),
    (
        None,
        [stored()],
        Checks(),
        None,
        {"why_not_compared": "no samples"},
        LEAK,
        1,
        "KDTree at data",
    ),
    (findings(), [stored(), ran()], Checks(("broken",)), None, {}, LEAK, 1, "KDTree at data"),
    (None, [stored()], Checks(fit=UNFIT), None, {"limit": VERBATIM}, LEAK, 1, "KDTree at data"),
    (None, [stored(decides=False)], SOUND, membership(), {}, NO_LEAK_FOUND, 0, "memorize"),
    # Inputs that cannot be judged.
    (None, [ran()], SOUND, None, {"why_not_compared": "few held out"}, INCONCLUSIVE, 3, "few held"),
    (
        findings(3),
        [survivor()],
        Checks(("a control failed",)),
        membership(3),
        {},
        INCONCLUSIVE,
        3,
        "a control failed",
    ),
    (
        findings(3),
        [survivor()],
        SOUND.replace(fit=UNFIT),
        membership(3),
        {},
        INCONCLUSIVE,
        3,
        "the network as read hardly fits these samples (accuracy",
    ),
    (
        findings(),
        [ran()],
        SOUND.replace(fit=FIT.replace(train=0.75)),
        membership(),
        {},
        NO_LEAK_FOUND,
        0,
        "",
    ),
    # A finding of at least the limit, although other reasons would keep the verdict open.
    (findings(3), [survivor()], Checks(), None, {}, LEAK, 1, "recovers 3 of 20"),
    (findings(3), [survivor()], SOUND, membership(), {"limit": NEAR_COPY}, LEAK, 1, "recovers 3"),
    (findings(), [ran()], Checks(), membership(3), {}, LEAK, 1, "3 of 20 training records"),
    (
        findings(3, **WEAK),
        [survivor()],
        SOUND,
        membership(),
        {"limit": CLASS_LEVEL},
        LEAK,
        1,
        "recovers 3",
    ),
    # Nothing can be ruled out. A weaker finding does not change this.
    (findings(), [ran()], Checks(), membership(), {}, INCONCLUSIVE, 3, "nothing shows that these"),
    (
        findings(3, **WEAK),
        [survivor()],
        Checks(),
        membership(),
        {"limit": NEAR_COPY},
        INCONCLUSIVE,
        3,
        "nothing shows that these",
    ),
    # A finding below the limit.
    (
        findings(3, **WEAK),
        [survivor()],
        SOUND,
        membership(),
        {"limit": RESEMBLANCE},
        LEAK,
        0,
        "recovers 3",
    ),
    (
        findings(),
        [ran()],
        SOUND,
        membership(3),
        {"limit": CLASS_LEVEL},
        LEAK,
        0,
        "3 of 20 training records",
    ),
    # Otherwise no leak was found.
    (findings(), [ran()], SOUND, membership(), {}, NO_LEAK_FOUND, 0, "that memorize 20 samples"),
]


@pytest.mark.parametrize(
    ("counts", "attacks", "checks", "members", "options", "outcome", "code", "reason"), TABLE
)
def test_every_row_of_the_table(
    counts: Findings | None,
    attacks: list[AttackOutcome],
    checks: Checks,
    members: Any,
    options: dict[str, Any],
    outcome: str,
    code: int,
    reason: str,
) -> None:
    verdict = decide(counts, tuple(attacks), checks, members, **options)
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)
    assert any(reason in text for text in verdict.reasons), verdict.reasons


def test_the_first_row_that_holds_decides() -> None:
    """All combinations of the conditions, against the table as a chain of conditions."""
    order = [*GRADES]
    cases = itertools.product(
        (False, True),  # stored records
        ("", "no held-out samples"),
        (False, True),  # a control fails
        (False, True),  # the network does not fit
        ("", NEAR_COPY, CLASS_LEVEL, MEMBERSHIP),
        (NEAR_COPY, MEMBERSHIP),  # the limit
        (False, True),  # a reason to stay open
    )
    outcomes = set()
    for has_records, not_compared, fails, misfits, grade, limit, is_open in cases:
        checks = (Checks(fit=FIT) if is_open else SOUND).replace(
            failures=("a control failed",) if fails else (), fit=UNFIT if misfits else FIT
        )
        count = 3 if grade in (NEAR_COPY, CLASS_LEVEL) else 0
        rows = (survivor() if count else ran(), *([stored()] if has_records else []))
        verdict = decide(
            findings(count, grades={grade: count} if count else {}),
            rows,
            checks,
            membership(3 if grade == MEMBERSHIP else 0),
            why_not_compared=not_compared,
            limit=limit,
        )
        if has_records:
            expected = LEAK, 1
        elif not_compared or fails or misfits:
            expected = INCONCLUSIVE, 3
        elif grade and order.index(grade) <= order.index(limit):
            expected = LEAK, 1
        elif is_open:
            expected = INCONCLUSIVE, 3
        elif grade:
            expected = LEAK, 0
        else:
            expected = NO_LEAK_FOUND, 0
        assert (verdict.outcome, verdict.exit_code) == expected
        outcomes.add(expected)
    assert len(outcomes) == 4


def test_records_that_cannot_be_counted_are_a_leak() -> None:
    """A damaged array of records has no number of rows."""
    row = stored(candidates=0, recovered=None, sample_count=None, expected_by_chance=None)
    verdict = decide(None, (row,), why_not_compared="no samples")
    assert (verdict.outcome, verdict.grade, verdict.exit_code) == (LEAK, VERBATIM, 1)
    assert verdict.headline == "Leak found: stored records"


# What keeps a verdict open

QUICK_PLAN = restriction(AuditRequest(effort="quick"))
OPEN: dict[str, tuple[dict[str, Any], str]] = {
    "quick effort": ({"checks": SOUND.replace(restricted=QUICK_PLAN)}, QUICK),
    "chosen attacks": (
        {"checks": SOUND.replace(restricted=restriction(AuditRequest(attacks=["kkt"])))},
        CHOSEN.format("attacks"),
    ),
    "left-out restarts": (
        {"attacks": (ran(unfinished="3 of 8 restarts ran"),)},
        "the budget was too small for all work of binary-kkt: 3 of 8 restarts ran",
    ),
    "left-out attack": (
        {"attacks": (ran(), ran(name="ntk", ran=False, unfinished="a restart takes 1h"))},
        "the budget was too small for all work of ntk: a restart takes 1h",
    ),
    "clock": (
        {"checks": SOUND.replace(stopped="the time limit stopped the audit after 13s")},
        "the time limit stopped the audit after 13s",
    ),
    "set-aside match": (
        {
            "counts": findings(set_aside_matches=(4,)),
            "checks": SOUND.replace(set_aside=(4, 9)),
        },
        "1 of the 2 samples that were not judged, because they also occur in the held-out set, matches a "
        "reconstruction (rows 4)",
    ),
    "optimizer state": ({"attacks": (ran(), ran(surface="moment"))}, MOMENT_ATTACKED),
    "membership untestable": (
        {"members": membership(reason="naming 3 of 20 needs 133 held-out records.")},
        "membership could not be tested: naming 3 of 20 needs 133 held-out records",
    ),
    "memorization": (
        {"members": membership(loss=LOSS_SHOWN)},
        "the model memorizes its training samples. By their losses, members are "
        "separated from non-members with an AUC of 0.90",
    ),
    "no controls": (
        {"checks": SOUND.replace(positive_controls=())},
        "nothing shows that these tests would detect a leak",
    ),
    "no control detected": (
        {
            "checks": SOUND.replace(
                positive_controls=(PositiveControls("reconstruction", reason="no time was left"),)
            )
        },
        "nothing shows that these tests would detect a leak. No positive controls of reconstruction "
        "were run: no time was left",
    ),
    "small controls": (
        {
            "checks": SOUND.replace(positive_controls=(controls(9),)),
            "members": membership(loss=LOSS_UNCLEAR),
        },
        "the losses do not show whether the network memorizes its samples, and a leak is detected only in "
        "networks that memorize at most 9 samples, which is less than half of the 20 training samples",
    ),
    "small controls without losses": (
        {
            "checks": SOUND.replace(positive_controls=(controls(9),)),
            "members": membership(loss=None),
        },
        "the losses do not show whether the network memorizes",
    ),
}


def opened(
    counts: Findings | None = None,
    attacks: tuple[AttackOutcome, ...] = (ran(),),
    checks: Checks = SOUND,
    members: Any = None,
) -> tuple[Any, ...]:
    return counts or findings(), attacks, checks, members or membership()


@pytest.mark.parametrize("case", OPEN)
def test_each_of_these_reasons_alone_keeps_a_verdict_open(case: str) -> None:
    changes, reason = OPEN[case]
    arguments = opened(**changes)
    assert [reason in text for text in reasons_to_stay_open(*arguments)] == [True]
    verdict = decide(*arguments)
    assert (verdict.outcome, verdict.exit_code) == (INCONCLUSIVE, 3)
    assert reason in verdict.reasons[0]
    assert reason[-40:] in verdict.sentence


def test_controls_that_were_not_needed_are_no_further_reason() -> None:
    checks = SOUND.replace(restricted=QUICK, positive_controls=())
    for loss in (None, LOSS_UNCLEAR, LOSS_ABSENT):
        reasons = reasons_to_stay_open(*opened(checks=checks, members=membership(loss=loss)))
        assert reasons == [QUICK]
    tried = checks.replace(positive_controls=(PositiveControls("reconstruction", reason="x"),))
    assert len(reasons_to_stay_open(*opened(checks=tried))) == 2


def test_nothing_else_keeps_a_verdict_open() -> None:
    for changes in (
        {},
        {"checks": SOUND.replace(positive_controls=(controls(10),))},  # half of 20
        {
            "checks": SOUND.replace(positive_controls=(controls(10),)),
            "members": membership(loss=LOSS_UNCLEAR),
        },
        {"checks": SOUND.replace(positive_controls=(controls(1),))},  # the losses show nothing
        {"checks": SOUND.replace(set_aside=(4, 9), told_apart=0.7)},
        {"attacks": (ran(), ran(name="model-inversion", decides=False, unfinished="cut"))},
        {"attacks": (ran(), ran(name="moment", surface="moment", ran=False))},
        {"attacks": (ran(residual=0.9, diverged=2),)},
        # Activation boundaries do not exist in a smooth network. Its losses and reconstructions decide.
        {"members": membership(neurons=0, reason="no piecewise linear activation")},
    ):
        arguments = opened(**changes)
        assert reasons_to_stay_open(*arguments) == []
        assert decide(*arguments).outcome == NO_LEAK_FOUND


def test_settings_that_change_the_attacks_are_named() -> None:
    for options, reason in (
        ({}, ""),
        ({"budget": "5s", "seed": 4, "subsets": 500, "fail_on": "verbatim"}, ""),
        ({"effort": "thorough"}, ""),
        ({"effort": "quick", "steps": 9}, QUICK),
        ({"steps": 9}, CHOSEN.format("steps")),
        (
            {"attacks": ["kkt"], "preset": "loo2024", "surface": "weights"},
            CHOSEN.format("preset, attacks, surface"),
        ),
    ):
        assert restriction(AuditRequest(**options)) == reason


# Findings and their grades


def test_grades_are_ordered() -> None:
    order = [VERBATIM, NEAR_COPY, RESEMBLANCE, ATTRIBUTE, CLASS_LEVEL, MEMBERSHIP]
    assert [*GRADES] == order
    for i, grade in enumerate(order):
        assert [reaches(grade, limit) for limit in order] == [i <= j for j in range(6)]


@pytest.mark.parametrize(
    ("grades", "grade"),
    [
        ({NEAR_COPY: 1}, NEAR_COPY),
        ({RESEMBLANCE: 1}, RESEMBLANCE),
        ({CLASS_LEVEL: 3}, CLASS_LEVEL),
        ({NEAR_COPY: 1, CLASS_LEVEL: 9}, NEAR_COPY),
        ({}, CLASS_LEVEL),
    ],
)
def test_the_grade_of_a_finding_is_the_strongest_that_chance_does_not_explain(
    grades: dict[str, int], grade: str
) -> None:
    few = findings(3, grades=grades)
    assert few.grade == grade
    by_chance = {**grades, CLASS_LEVEL: 9}
    assert few.replace(expected_by_chance=1.0, grades=by_chance).grade == CLASS_LEVEL
    assert few.replace(survivors=()).grade == ""


def test_grades_add_up() -> None:
    """Two near-copies and two resemblances are four resemblances: more than the 2.5 that chance gives."""
    few = findings(4, grades={NEAR_COPY: 2, RESEMBLANCE: 2}, expected_by_chance=2.5)
    assert few.grade == RESEMBLANCE
    verdict = decide(few, (survivor(),), SOUND, membership())
    assert verdict.grades == {
        RESEMBLANCE: 4
    }  # near-copies that chance may explain count as the grade


def test_all_grades_of_a_finding_are_counted_the_strongest_first() -> None:
    few = findings(5, grades={CLASS_LEVEL: 1, NEAR_COPY: 1, RESEMBLANCE: 3})
    verdict = decide(few, (survivor(), stored()), SOUND, membership(4))
    assert [*verdict.grades.items()] == [
        (VERBATIM, RECORDS),
        (NEAR_COPY, 1),
        (RESEMBLANCE, 3),
        (CLASS_LEVEL, 1),
        (MEMBERSHIP, 4),
    ]
    assert verdict.grade == VERBATIM
    assert verdict.headline == (
        "Leak found: 20 stored records, 1 near-copy, 3 resemblances, 1 class-level match, 4 named members"
    )


def test_a_membership_finding_needs_the_level_of_the_audit() -> None:
    members = membership(3, group_p=0.002)  # adjusted 0.004
    assert decide(findings(), (ran(),), SOUND, members).outcome == LEAK
    strict = SOUND.replace(level=0.001)
    assert decide(findings(), (ran(),), strict, members).outcome == NO_LEAK_FOUND
    half = members.replace(group_p=0.0008)  # adjusted 0.0016
    assert decide(findings(), (ran(),), strict, half).outcome == NO_LEAK_FOUND
    strongest = members.replace(group_p=0.0005)
    assert decide(findings(), (ran(),), strict, strongest).outcome == LEAK
    assert decide(findings(), (ran(),), SOUND, members.replace(is_finding=False)).grade == ""


def test_a_significant_baseline_is_named_and_decides_nothing() -> None:
    for counts, attacks, checks, members, options, *_ in TABLE:
        for p_value in [0.002, 0.01, 0.011, None]:
            baseline = AttackOutcome(
                "first-layer-weights",
                False,
                True,
                True,
                "",
                recovered=None if p_value is None else 5,
                expected_by_chance=None if p_value is None else 0.28,
                p_value=p_value,
            )
            verdict = decide(counts, (*attacks, baseline), checks, members, **options)
            plain = decide(counts, tuple(attacks), checks, members, **options)
            assert (verdict.outcome, verdict.exit_code) == (plain.outcome, plain.exit_code)
            added = [text for text in verdict.reasons if text not in plain.reasons]
            if p_value is not None and p_value <= 0.01:
                (line,) = added
                assert line.startswith(
                    "the baseline first-layer-weights matches 5 samples (0.28 expected by chance, p"
                )
                assert "does not enter the verdict" in line
            else:
                assert added == []


def test_a_test_that_rejects_only_by_itself_is_named() -> None:
    alone = survivor(name="ntk", adjusted=0.03)
    verdict = decide(findings(), (ran(), alone), SOUND, membership())
    assert verdict.outcome == NO_LEAK_FOUND
    line = "ntk matches 3 samples (0.2 expected by chance, p < 0.001) by itself, but not over all tests"
    assert line in verdict.reasons


def test_an_attack_that_was_not_run_has_no_figures() -> None:
    idle = AttackOutcome("ntk", True, False, False, "needs the initial weights")
    assert idle.restarts == idle.steps == idle.candidates == idle.diverged == idle.seconds == 0
    assert idle.residual is idle.recovered is idle.p_value is idle.adjusted is None
    assert not idle.survives


def test_the_status_of_an_attack() -> None:
    for outcome, status in [
        (ran(), "ran"),
        (ran(residual=0.01), "ran"),
        (survivor(), "found"),
        (survivor(adjusted=0.011), "ran"),
        (survivor(level=0.0005), "ran"),
        (survivor(decides=False), "baseline"),
        (stored(), "found"),
        (ran(ran=False), "not run"),
        (ran(ran=False, applies=False), "not applicable"),
        (ran(ran=False, decides=False), "not run"),
    ]:
        assert outcome.status == status


def test_assumptions_and_facts_that_nobody_checked_are_printed_and_decide_nothing() -> None:
    verdict = decide(findings(), (ran(),), SOUND, membership(), assumed=("assumed: ReLU",))
    assert verdict.outcome == NO_LEAK_FOUND
    assert verdict.reasons[-1] == "assumed: ReLU"
    text = "nothing shows that the model was trained on these samples"
    for p, ending in (
        (None, ": there are no labels or held-out samples with which losses can be compared"),
        (
            0.02,
            ": the losses on these samples do not differ from the losses on held-out samples (p = 0.02)",
        ),
    ):
        checks = SOUND.replace(told_apart=p)
        assert checks.unproven == (text + ending,)
        assert decide(findings(), (ran(),), checks, membership()).outcome == NO_LEAK_FOUND
    assert SOUND.replace(told_apart=0.01).unproven == ()


# The three answers


def test_answers_show_the_counts_of_the_findings() -> None:
    for recovered, named, records in itertools.product((0, 3, 7), (0, 3, 11), (None, 0, 5)):
        counts = findings(recovered, grades={CLASS_LEVEL: recovered} if recovered else {})
        rows = (survivor(recovered=recovered) if recovered else ran(),)
        if records is not None:
            rows += (stored(recovered=records, decides=records > 0),)
        verdict = decide(counts, rows, SOUND, membership(named))
        files, attacks, members = verdict.answers
        assert (files.key, attacks.key, members.key) == ("stored", "reconstruction", "membership")
        assert attacks.count == counts.recovered == verdict.grades.get(CLASS_LEVEL, 0)
        assert members.count == verdict.named == named == verdict.grades.get(MEMBERSHIP, 0)
        assert (files.count or 0) == verdict.grades.get(VERBATIM, 0) == (records or 0)
        assert (attacks.n, members.n) == (RECORDS, RECORDS)
        assert attacks.expected_by_chance == counts.expected_by_chance
        assert [a.answer for a in verdict.answers] == [
            YES if count else NO for count in (records, recovered, named)
        ]
        for answer in verdict.answers:
            if answer.count:
                assert f"{answer.count} of 20 training samples" in answer.evidence
        assert verdict.recovered == (records if records else recovered)


def test_an_answer_no_has_the_power_and_an_answer_yes_has_not() -> None:
    files, attacks, members = decide(findings(), (ran(),), SOUND, membership()).answers
    assert files.power == ""
    assert attacks.power.startswith("On three networks of the same architecture that memorize 20")
    assert members.power.startswith("On ten networks of the same architecture that memorize 20")
    answers = decide(findings(3), (survivor(),), SOUND, membership(3)).answers
    assert {answer.power for answer in answers} == {""}


@pytest.mark.parametrize(
    ("arguments", "options", "answers", "evidence"),
    [
        (
            (None, (), Checks(), None),
            {"why_not_compared": "x"},
            (NO, UNKNOWN, UNKNOWN),
            "tested: x",
        ),
        ((None, (), SOUND, membership()), {}, (NO, UNKNOWN, NO), "no attack applies"),
        ((None, (ran(),), SOUND, membership()), {}, (NO, UNKNOWN, NO), "could not be compared"),
        (
            (findings(reason="too few"), (ran(),), SOUND, membership()),
            {},
            (NO, UNKNOWN, NO),
            "Not tested: too few",
        ),
        (
            (findings(), (ran(),), SOUND, membership(reason="too few.")),
            {},
            (NO, NO, UNKNOWN),
            "Membership could not be tested: too few.",
        ),
        (
            (findings(), (ran(),), SOUND, membership(loss=LOSS_SHOWN)),
            {},
            (NO, NO, UNKNOWN),
            "the losses of the training samples show that the network memorizes these samples",
        ),
        (
            (findings(), (ran(),), SOUND, membership(named=2, is_finding=False)),
            {},
            (NO, NO, NO),
            "2 of 20 training samples are named at a false discovery rate of 5%. A finding needs at least 3",
        ),
        (
            (None, (stored(recovered=None, sample_count=None),), Checks(), None),
            {"why_not_compared": "no samples"},
            (YES, UNKNOWN, UNKNOWN),
            "The file stores 20 records (KDTree at data).",
        ),
        (
            (None, (stored(recovered=None, decides=False),), Checks(), None),
            {"why_not_compared": "no samples"},
            (UNKNOWN, UNKNOWN, UNKNOWN),
            "we cannot tell whether the stored records are training records",
        ),
        (
            (findings(), (stored(recovered=0), ran()), SOUND, membership()),
            {},
            (YES, NO, NO),
            "none of which is one of your training samples",
        ),
    ],
)
def test_answers_say_what_is_not_known(
    arguments: tuple[Any, ...],
    options: dict[str, str],
    answers: tuple[str, str, str],
    evidence: str,
) -> None:
    verdict = decide(*arguments, **options)
    assert tuple(answer.answer for answer in verdict.answers) == answers
    assert any(evidence in answer.evidence for answer in verdict.answers)


def test_answers_of_an_audit_are_the_counts_of_its_findings() -> None:
    checkpoint, split = leaky()
    result = rs.audit(
        checkpoint,
        data=split.train,
        holdout=split.holdout,
        knowledge=knowledge(split),
        attacks=[{"attack": "binary-kkt", "steps": 600, "restarts": 2}],
        baselines=False,
        subsets=500,
    )
    published = json.loads(json.dumps(publish(result, None, {}).to_json()))
    files, attacks, members = published["verdict"]["answers"]
    assert (result.verdict.outcome, attacks["answer"]) == (LEAK, YES)
    counts = result.findings
    assert counts is not None
    assert (
        attacks["count"] == counts.recovered == len(counts.samples) == sum(counts.grades.values())
    )
    assert attacks["count"] == published["verdict"]["recovered"] > 0
    (row,) = (row for row in result.attacks if row.survives)
    assert row.recovered == counts.recovered  # of the only attack
    assert result.membership is not None
    assert members["count"] == len(result.membership.named) == published["verdict"]["named"]
    assert members["count"] == published["membership"]["named_count"]
    assert (files["answer"], files["count"]) == (NO, None)
    grades = published["verdict"]["grades"]
    counted = sum(count for grade, count in grades.items() if grade != MEMBERSHIP)
    assert counted == attacks["count"]
    assert grades.get(MEMBERSHIP, 0) == (members["count"] if members["answer"] == YES else 0)


# Words


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (0.0004, "p < 0.001"),
        (0.0075, "p = 0.0075"),
        (0.01, "p = 0.01"),
        (0.00999, "p = 0.00999"),
        (0.01046, "p = 0.0105"),
        (0.010004, "p = 0.010004"),
        (0.014, "p = 0.014"),
        (0.5, "p = 0.5"),
        (1.0, "p = 1"),
    ],
)
def test_a_p_value_shows_on_which_side_of_the_level_it_lies(p: float, text: str) -> None:
    assert format_p(p) == text


def test_the_wording_of_every_outcome() -> None:
    few = findings(6, grades={NEAR_COPY: 2, RESEMBLANCE: 4})
    leak = decide(few, (survivor(),), SOUND, membership())
    assert leak.headline == "Leak found: 2 near-copies, 4 resemblances"
    assert leak.sentence == (
        "6 of 20 training samples were reconstructed (2 near-copies, 4 resemblances; 0.2 expected by chance, "
        "p = 0.001)."
    )
    partial = decide(few, (survivor(),), SOUND.replace(set_aside=(4, 9)), membership())
    assert partial.headline.endswith("(2 of 22 samples were not judged)")
    assert partial.sentence.endswith(
        "Training samples that were not judged also occur in the held-out set."
    )
    assert partial.replace(not_judged=1).coverage == "1 of 21 samples was not judged"
    below = decide(findings(), (ran(),), SOUND, membership(3), limit=NEAR_COPY)
    assert below.headline == "Leak found, below your limit (near-copy): 3 named members"
    clean = decide(findings(), (ran(),), SOUND, membership())
    assert clean.headline == "No leak found by these tests"
    assert clean.sentence == (
        "On three networks of the same architecture that memorize 20 samples, the tests recovered 20 of "
        "them. On ten networks of the same architecture that memorize 20 samples, the tests named 20 of "
        "them."
    )
    undecided = decide(findings(), (ran(),), Checks(restricted=QUICK), membership())
    assert undecided.headline == "Inconclusive"
    assert undecided.sentence == (f"This audit neither shows a leak nor rules one out: {QUICK}.")
    weak = decide(findings(), (ran(),), Checks(restricted=QUICK), membership(3), limit=NEAR_COPY)
    assert weak.headline == "Inconclusive (found: 3 named members)"
    assert weak.sentence == f"The{QUICK[3:]}."
    with pytest.raises(ValueError, match="A verdict is one of"):
        Verdict("safe")


def test_every_outcome_is_in_the_table() -> None:
    assert {row[5] for row in TABLE} == set(EXIT_CODES)
    assert EXIT_CODES == CODES


# Conditions of --fail-on


def leak(grade: str, limit: str = MEMBERSHIP, recovered: int = 6) -> Verdict:
    return Verdict(
        LEAK,
        grade=grade,
        grades={grade: recovered},
        limit=limit,
        n=20,
        recovered=recovered,
        expected_by_chance=0.5,
        p_value=0.001,
        named=2,
    )


def nothing(outcome: str, recovered: int | None = 0, p_value: float | None = 0.5) -> Verdict:
    by_chance = None if recovered is None else 0.5
    return Verdict(
        outcome, n=20, recovered=recovered, expected_by_chance=by_chance, p_value=p_value
    )


def code_of(verdict: Verdict, conditions: list[str]) -> int:
    """Return the exit code as ``residuum audit --fail-on`` computes it."""
    grade, comparisons = read_conditions(conditions)
    verdict = verdict.replace(limit=grade or MEMBERSHIP)
    return exit_code(verdict, comparisons, only=bool(comparisons) and not grade)


@pytest.mark.parametrize(
    ("conditions", "verdict", "code"),
    [
        ([], leak(MEMBERSHIP), 1),
        (["leak"], leak(MEMBERSHIP), 1),
        (["near-copy"], leak(NEAR_COPY), 1),
        (["near-copy"], leak(VERBATIM), 1),
        (["near-copy"], leak(RESEMBLANCE), 0),
        (["resemblance"], leak(NEAR_COPY), 1),
        (["resemblance"], leak(CLASS_LEVEL), 0),
        (["class-level"], leak(CLASS_LEVEL), 1),
        (["class-level"], leak(MEMBERSHIP), 0),
        (["verbatim"], leak(NEAR_COPY), 0),
        (["near-copy", "class-level"], leak(CLASS_LEVEL), 1),  # the weakest grade is the limit
        (["class-level", "near-copy"], leak(CLASS_LEVEL), 1),
        (["near-copy"], nothing(INCONCLUSIVE), 3),
        (["leak"], nothing(NO_LEAK_FOUND), 0),
        (["leak"], nothing(INCONCLUSIVE, None), 3),
        (["recovered>=7"], leak(NEAR_COPY), 0),
        (["recovered>=6"], leak(NEAR_COPY), 1),
        (["leak", "recovered>=7"], leak(NEAR_COPY), 1),
        (["near-copy", "recovered>=6"], leak(CLASS_LEVEL), 1),
        (["near-copy", "recovered>=7"], leak(CLASS_LEVEL), 0),
        (["recovered > 6"], leak(NEAR_COPY), 0),
        (["recovered==6"], leak(NEAR_COPY), 1),
        (["named>=2"], leak(NEAR_COPY), 1),
        (["named>2"], leak(NEAR_COPY), 0),
        (["p_value<=0.05"], nothing(NO_LEAK_FOUND, 1, 0.04), 1),
        (["p_value<0.04"], nothing(NO_LEAK_FOUND, 1, 0.04), 0),
        (["share>=0.3"], leak(NEAR_COPY), 1),
        (["excess>5.4"], leak(NEAR_COPY), 1),
        (["expected<1"], nothing(NO_LEAK_FOUND), 1),
        (["recovered>=0"], nothing(INCONCLUSIVE, None), 3),
        (["recovered>=1"], nothing(INCONCLUSIVE, 1), 1),
    ],
)
def test_conditions_and_their_exit_codes(
    conditions: list[str], verdict: Verdict, code: int
) -> None:
    assert code_of(verdict, conditions) == code


def read_comparison(text: str) -> Comparison:
    ((comparison,), grade) = reversed(read_conditions([text]))
    assert grade == ""
    return comparison


@pytest.mark.parametrize(
    "text",
    [
        "",
        "recoverd>=5",
        "recovered",
        "recovered>=",
        ">=5",
        "recovered>=five",
        "recovered=>5",
        "recovered>=1e999",
        "recovered>=nan",
        "__import__('os')>=1",
        "recovered>=5 or 1",
        "p_value!=1",
        "resembles",
    ],
)
def test_other_conditions_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--fail-on"):
        read_conditions([text])


@given(st.text(max_size=40))
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    try:
        grade, comparisons = read_conditions([text])
    except InputError:
        return
    assert grade in {"", *GRADES}
    assert {comparison.name for comparison in comparisons} <= {*QUANTITIES}


def test_a_number_that_is_not_known_fulfils_nothing() -> None:
    unknown = Verdict(INCONCLUSIVE, ())
    for name in QUANTITIES:
        for sign in (">=", "<", "=="):
            assert not read_comparison(f"{name}{sign}0").holds(unknown)


# Lengths of time


def test_budgets() -> None:
    for text, seconds in [
        *[("90s", 90), ("10min", 600), ("1.5h", 5400), ("2m", 120), (30, 30), ("1m30s", 90)],
        *[("5 minutes", 300), ("1h 2min 3s", 3723), ("0.5 hours", 1800), (".5", 0.5)],
    ]:
        assert seconds_of(text) == seconds


def test_other_budgets_are_refused() -> None:
    for text in [
        "",
        "fast",
        "-1min",
        "0",
        "1e999h",
        "10 parsecs",
        "nan",
        "2s1min",
        "1min2",
        "5 minuets",
    ]:
        with pytest.raises(InputError, match="A time budget must be a duration"):
            seconds_of(text)


@given(st.text(max_size=20))
def test_any_text_is_a_budget_or_refused(text: str) -> None:
    with suppress(InputError):
        assert 0 < seconds_of(text) < float("inf")


@given(st.integers(1, 10**6))
def test_a_duration_is_read_back(seconds: int) -> None:
    assert seconds_of(duration(seconds)) == seconds


# False alarms and power. ``experiments/false_leaks.py`` measures the same on 3,600 sets of samples.


@pytest.fixture(scope="module")
def reconstruction() -> Reconstruction:
    checkpoint, split = leaky()
    return attack(checkpoint, knowledge(split), Auto(restarts=2, steps=600))


def judged(reconstruction: Reconstruction, train: Dataset, holdout: Dataset) -> Verdict:
    pools = {reconstruction.attack: all_candidates(reconstruction)}
    tests, _ = run_tests(pools, SampleSets(train, holdout), 0, 500, math.inf)
    return decide(findings_of(tests, len(train)), ())


def test_the_training_samples_are_a_leak(reconstruction: Reconstruction) -> None:
    split = leaky()[1]
    verdict = judged(reconstruction, split.train, split.holdout)
    assert verdict.outcome == LEAK
    assert verdict.recovered is not None
    assert verdict.expected_by_chance is not None
    assert verdict.recovered > 3 * verdict.expected_by_chance


def test_samples_that_the_network_never_saw_are_rarely_a_leak(
    reconstruction: Reconstruction,
) -> None:
    """20 disjoint sets of 20 unseen digits. More than 2 alarms at 1% have a probability of 0.1%."""
    pool = leaky()[1].holdout
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
    alarms = 0
    for rows in order.reshape(20, 20):
        nonmembers = order[~torch.isin(order, rows)]
        train, holdout = (pool.replace(x=pool.x[i], y=pool.y[i]) for i in (rows, nonmembers))
        alarms += judged(reconstruction, train, holdout).outcome == LEAK
    assert alarms <= 2


INFERABLE = AttributeTest(
    RECORDS, 10, 0.05, reported=40, right=39, rows=tuple(range(7)), holdout_cells=200
)


def test_inferable_values_are_a_leak_of_the_grade_attribute() -> None:
    verdict = decide(findings(), (ran(),), SOUND, membership(3), attributes=INFERABLE)
    assert (verdict.outcome, verdict.grade, verdict.inferred) == (LEAK, ATTRIBUTE, 7)
    assert verdict.grades == {ATTRIBUTE: 7, MEMBERSHIP: 3}
    assert verdict.headline == "Leak found: 7 records with an inferable value, 3 named members"
    assert verdict.answers[3].answer == YES
    assert verdict.answers[3].evidence == INFERABLE.short_line
    assert INFERABLE.line in verdict.reasons
    weaker = decide(
        findings(), (ran(),), SOUND, membership(3), attributes=INFERABLE, limit=RESEMBLANCE
    )
    assert weaker.is_below_limit


def test_attributes_need_a_finding_and_a_test_of_membership_that_rejects() -> None:
    """An audit at the level of 0.1% does not count attributes if membership rejects only at 1%."""
    few = INFERABLE.replace(rows=(1, 2))
    verdict = decide(findings(), (ran(),), SOUND, membership(), attributes=few)
    assert verdict.outcome == NO_LEAK_FOUND
    assert (verdict.answers[3].answer, verdict.inferred) == (NO, 2)
    rejects = membership().replace(group_p=0.004)
    for checks, outcome in ((SOUND, LEAK), (SOUND.replace(level=0.001), NO_LEAK_FOUND)):
        verdict = decide(findings(), (ran(),), checks, rejects, attributes=INFERABLE)
        assert verdict.outcome == outcome
    assert decide(findings(), (ran(),), SOUND, None, attributes=INFERABLE).grade == ""
    failed = SOUND.replace(failures=("a control failed",))
    verdict = decide(findings(), (ran(),), failed, membership(3), attributes=INFERABLE)
    assert (verdict.outcome, verdict.answers[3].answer) == (INCONCLUSIVE, UNKNOWN)


def test_there_is_no_answer_about_attributes_if_they_were_not_tested() -> None:
    verdict = decide(findings(), (ran(),), SOUND, membership(3))
    assert len(verdict.answers) == 3
    assert verdict.inferred is None
