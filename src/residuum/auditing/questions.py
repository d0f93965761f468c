"""Answer three questions from the results of an audit, with the evidence for each answer.

1. Are training records stored in the file?
2. Can attacks reconstruct training samples?
3. Can training samples be told from non-members?

If the samples are rows of a table and the third test shows a leak, there is a fourth question:

4. Can an attacker infer a missing value of a training record?

Terminal, report, JSON, SARIF and model card show these answers, so all of them show the same counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from residuum.auditing.outcomes import AttackOutcome, Findings
from residuum.auditing.power import PositiveControls
from residuum.evaluation.null import format_p
from residuum.evaluation.targets import TargetTest
from residuum.records import Record
from residuum.records.attribute_test import AttributeTest
from residuum.risk.membership import (
    BOUNDARIES,
    MIN_SHARE,
    MOVED_ROWS,
    SHOWN,
    MembershipTest,
    min_named,
)
from residuum.risk.moved_rows import MovedRows

STORED, RECONSTRUCTION, MEMBERSHIP = "stored", "reconstruction", "membership"
ATTRIBUTES = "attributes"
NOTHING_STORED = "No array in the file is known to hold training records."
QUESTIONS = {
    STORED: "Are training records stored in the file?",
    RECONSTRUCTION: "Can attacks reconstruct training samples?",
    MEMBERSHIP: "Can training samples be told from non-members?",
    ATTRIBUTES: "Can an attacker infer a missing value of a training record?",
}
# Name of the part of a model that an attack on a forest reads. The report says what this attack recovered,
# even if there are no training samples to compare with.
TREES = "trees"
YES, NO, UNKNOWN = "yes", "no", "unknown"
WHY_NAMED = {
    BOUNDARIES: "activation boundaries pass through them",
    MOVED_ROWS: "training moved the embedding rows of all their tokens",
}
# Statistical tests answer two of the questions: reconstruction and membership. Each test uses half of the
# significance level (Bonferroni).
QUESTIONS_OF_TESTS = 2


@dataclass(frozen=True, eq=False)
class Answer(Record):
    """The answer to one of the questions of an audit.

    Attributes:
        key: Name of the question: "stored", "reconstruction", "membership" or "attributes".
        question: The question in words.
        answer: "yes", "no" or "unknown".
        evidence: The result of the test with its chance level, or why the answer is unknown.
        power: If the answer is "no", how large a leak the test detects in positive controls. "" if no
            positive controls were run.
        count: Number of training samples that leak.
        n: Number of training samples that were tested.
        expected_by_chance: Number of samples expected by chance.
    """

    key: str
    question: str
    answer: str
    evidence: str
    power: str = ""
    count: int | None = None
    n: int | None = None
    expected_by_chance: float | None = None


def answer_questions(
    stored: AttackOutcome | None,
    findings: Findings | None,
    membership: MembershipTest | None,
    controls: Sequence[PositiveControls] = (),
    *,
    is_member_finding: bool = False,
    has_failures: bool = False,
    why_not_compared: str = "",
    attacks: Sequence[AttackOutcome] = (),
    why_no_attack: str = "",
    targets: TargetTest | None = None,
    is_target_finding: bool = False,
    nothing_stored: str = NOTHING_STORED,
    moved_rows: MovedRows | None = None,
    attributes: AttributeTest | None = None,
    is_attribute_finding: bool = False,
    why_not_searched: str = "",
) -> tuple[Answer, ...]:
    """Answer the questions of an audit: stored records, reconstruction, membership and attributes.

    Args:
        stored: The search for stored records, None if the file stores none.
        findings: The tests of the attacks, None if the candidates of no attack were tested.
        membership: The test of membership, None if it was not run.
        controls: The positive controls of each question.
        is_member_finding: Whether the membership test shows a leak.
        has_failures: Whether the samples cannot be compared, because a negative control fails.
        why_not_compared: Why training and held-out samples could not be compared, "" if they could.
        attacks: One row per attack.
        why_no_attack: Why residuum has no attack on this kind of model, "" if it has one.
        targets: The test of recovered targets, None if the release holds no forest.
        is_target_finding: Whether more targets were recovered than expected by chance.
        nothing_stored: The evidence for the first question if ``stored`` is None.
        moved_rows: The embedding rows that training moved, None without a base.
        attributes: The test whether missing values can be inferred, None if it was not run.
        is_attribute_finding: Whether the test of attributes shows a leak.
        why_not_searched: Why stored records were not searched for, "" if they were.

    Returns:
        The answers, in the order of ``QUESTIONS``. The last question has an answer only if it was tested.
    """
    controls_by_question = {control.question: control for control in controls}
    reconstruction_answer = _reconstruction(findings, why_not_compared, attacks, why_no_attack)
    if targets is not None and not why_not_compared:
        reconstruction_answer = _with_targets(reconstruction_answer, targets, is_target_finding)
    membership_answer = _membership(membership, is_member_finding, why_not_compared)
    if moved_rows is not None:
        evidence = f"{membership_answer.evidence} {moved_rows.line}"
        membership_answer = membership_answer.replace(evidence=evidence)
    return (
        _answer(STORED, UNKNOWN, why_not_searched)
        if why_not_searched
        else _stored(stored, nothing_stored),
        _judged(reconstruction_answer, controls_by_question.get(RECONSTRUCTION), has_failures),
        _judged(membership_answer, controls_by_question.get(MEMBERSHIP), has_failures),
        *(
            ()
            if attributes is None
            else (_judged(_attributes(attributes, is_attribute_finding), None, has_failures),)
        ),
    )


def _judged(answer: Answer, controls: PositiveControls | None, has_failures: bool) -> Answer:
    """Change an answer to "unknown" if a control shows that the tests are not reliable.

    "yes" becomes "unknown" if a negative control fails, because the samples then cannot be compared. "no"
    becomes "unknown" if the tests do not detect a leak in the positive controls.

    Args:
        answer: The answer of the test alone.
        controls: The positive controls of the question, None if they were not run.
        has_failures: Whether a negative control fails.

    Returns:
        The corrected answer, with a sentence about how large a leak the tests detect.
    """
    if answer.answer == YES:
        return answer.replace(answer=UNKNOWN) if has_failures else answer
    if controls is None:
        return answer
    answer = answer.replace(power=controls.sentence)
    has_no_power = bool(controls.sizes) and not controls.samples
    return answer.replace(answer=UNKNOWN) if has_no_power else answer


def _answer(key: str, answer: str, evidence: str, **values: object) -> Answer:
    return Answer(key, QUESTIONS[key], answer, evidence, **values)  # type: ignore[arg-type]


def _stored(row: AttackOutcome | None, nothing_stored: str) -> Answer:
    if row is None:
        return _answer(STORED, NO, nothing_stored)
    if row.recovered is None:
        answer = YES if row.is_stored else UNKNOWN
        evidence = f"The file stores {row.candidates or 'some'} records ({row.reason})."
        if answer == UNKNOWN:
            evidence += (
                " Without training samples we cannot tell whether the stored records are training "
                "records."
            )
        return _answer(STORED, answer, evidence, count=row.candidates or None)
    chance_text = (
        ""
        if row.expected_by_chance is None
        else f", {row.expected_by_chance:.3g} expected by chance"
    )
    evidence = f"{row.recovered} of {row.sample_count} training samples are stored in the file{chance_text}."
    if row.is_stored and not row.recovered:
        evidence = (
            f"The file stores {row.candidates or 'some'} records ({row.reason}), none of which is one of "
            "your training samples."
        )
    # A few matches that held-out samples explain are neither a leak nor a reason to say no.
    is_unclear = not row.is_stored and bool(row.recovered) and not row.expected_by_chance
    if is_unclear:
        evidence += " So few matches can be chance. Run residuum scan --data to see where they are."
    count_fields = {
        "count": row.recovered,
        "n": row.sample_count,
        "expected_by_chance": row.expected_by_chance,
    }
    answer = YES if row.is_stored else UNKNOWN if is_unclear else NO
    return _answer(STORED, answer, evidence, **count_fields)


def _reconstruction(
    findings: Findings | None,
    why_not: str,
    attacks: Sequence[AttackOutcome],
    why_no_attack: str,
) -> Answer:
    if why_no_attack:
        return _answer(RECONSTRUCTION, UNKNOWN, f"Not tested: {why_no_attack}.")
    if why_not:
        recovery_texts = [row.reason for row in attacks if row.ran and row.surface == TREES]
        reason = " ".join((*recovery_texts, f"Not tested: {why_not}."))
        return _answer(RECONSTRUCTION, UNKNOWN, reason)
    if findings is None or findings.reason:
        has_run_attack = any(row.decides and row.ran and not row.is_stored for row in attacks)
        reason = "no attack applies to this network"
        if findings is not None:
            reason = findings.reason
        elif has_run_attack:
            reason = "the candidates could not be compared"
        return _answer(RECONSTRUCTION, UNKNOWN, f"Not tested: {reason}.")
    chance_text = f"{findings.expected_by_chance:.2g} expected by chance"
    count_fields = {"n": findings.n, "expected_by_chance": findings.expected_by_chance}
    if findings.survivors:
        grade_text = grade_split(findings)
        evidence = (
            f"{findings.recovered} of {findings.n} training samples were reconstructed ({grade_text}; "
            f"{chance_text}, {format_p(findings.p_value)})."
        )
        return _answer(RECONSTRUCTION, YES, evidence, count=findings.recovered, **count_fields)
    attack_text = f"{findings.tests} attack{'' if findings.tests == 1 else 's'}"
    counts = [row.recovered or 0 for row in attacks if row.decides and not row.is_stored]
    largest_count = max(counts, default=0)
    chance_text = (
        f"{'' if findings.tests == 1 else 'at most '}{largest_count} of them, {chance_text}"
    )
    evidence = (
        f"{attack_text} reconstructed no more of the {findings.n} training samples than chance does "
        f"({chance_text}, {format_p(findings.p_value)})."
    )
    return _answer(RECONSTRUCTION, NO, evidence, count=0, **count_fields)


def _with_targets(answer: Answer, targets: TargetTest, is_finding: bool) -> Answer:
    """Return the answer about reconstruction with further evidence: the test of recovered targets.

    If the test of the recovered targets shows a leak, the answer becomes "yes".
    """
    replaces_evidence = is_finding and answer.answer == UNKNOWN
    evidence = targets.line if replaces_evidence else f"{answer.evidence} {targets.line}"
    answer = answer.replace(evidence=evidence)
    if not is_finding or answer.answer == YES:
        return answer
    return answer.replace(
        answer=YES,
        count=targets.recovered,
        n=targets.n,
        expected_by_chance=targets.expected_by_chance,
    )


def _membership(test: MembershipTest | None, is_finding: bool, why_not: str) -> Answer:
    if test is None:
        why_not_tested = why_not or "no test of membership applies to this file"
        return _answer(MEMBERSHIP, UNKNOWN, f"Not tested: {why_not_tested}.")
    loss_text = "" if test.loss is None else f" {test.loss.line}"
    count_fields = {"n": test.records, "count": len(test.named)}
    if is_finding:
        evidence = (
            f"{len(test.named)} of {test.records} training samples are named, at a false discovery rate of "
            f"5%, because {WHY_NAMED[test.signal]} ({format_p(test.adjusted_p)})."
        )
        return _answer(MEMBERSHIP, YES, evidence + loss_text, **count_fields)
    if test.reason:
        evidence = f"Membership could not be tested: {test.reason.rstrip('.')}."
        if not test.holdout and len(test.decoy_named):
            evidence += (
                f" Compared with noisy copies instead, {len(test.decoy_named)} of {test.records} training "
                "samples stand out."
            )
        return _answer(MEMBERSHIP, UNKNOWN, evidence + loss_text, n=test.records)
    needed_text = ""
    if len(test.named):
        needed_text = (
            f" A finding needs at least {min_named(test.records)} named samples ({MIN_SHARE:.0%} of all "
            "training samples, but at least three)."
        )
    evidence = (
        f"{len(test.named)} of {test.records} training samples are named at a false discovery rate of "
        f"5%.{needed_text}"
    )
    if test.loss is not None and test.loss.memorization == SHOWN:
        evidence += (
            " But the losses of the training samples show that the network memorizes these samples."
        )
    answer = UNKNOWN if test.loss is not None and test.loss.memorization == SHOWN else NO
    return _answer(MEMBERSHIP, answer, evidence + loss_text, **count_fields)


def _attributes(test: AttributeTest, is_finding: bool) -> Answer:
    count_fields = {"n": test.records, "count": len(test.rows)}
    # The test can show a leak at a higher significance level than that of this audit.
    answer = UNKNOWN if test.is_finding else NO
    return _answer(ATTRIBUTES, YES if is_finding else answer, test.short_line, **count_fields)


def grade_split(findings: Findings) -> str:
    """Describe how exactly samples were recovered, such as "2 near-copies, 4 resemblances"."""
    return ", ".join(plural(count, grade) for grade, count in findings.grades.items() if count)


def plural(count: int, grade: str) -> str:
    """Return a number of recovered samples with their grade in words, in singular or plural.

    Args:
        count: Number of samples.
        grade: Grade of these samples, such as "near-copy".

    Returns:
        Text such as "2 near-copies".
    """
    singular_and_plural = {
        "near-copy": ("near-copy", "near-copies"),
        "resemblance": ("resemblance", "resemblances"),
        "class-level": ("class-level match", "class-level matches"),
        "attribute": ("recovered value", "recovered values"),
    }
    singular, several = singular_and_plural.get(grade, (grade, grade))
    return f"{count} {singular if count == 1 else several}"
