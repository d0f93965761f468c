"""The verdict of an audit and its exit code.

The rows of this table are checked in order. The first row whose case is true gives the verdict:

| case | verdict | exit code |
|---|---|---|
| training records are stored in the file | leak, verbatim | 1 |
| the inputs cannot be judged: too few held-out samples, a negative control fails, too many repeated samples, the network that was read does not fit the samples | inconclusive | 3 |
| a finding of at least the grade ``--fail-on`` (default: membership) | leak, with the grade | 1 |
| the audit cannot rule out a leak, for one of the reasons in ``reasons_to_stay_open`` | inconclusive | 3 |
| a weaker finding | leak, below the limit | 0 |
| otherwise | no leak found by these tests | 0 |

Stored records show a leak without a test. Two tests can also show a leak: the test of the reconstructions
(step-down max-T over all attacks, ``evaluation/null.py``) and the test of membership
(``risk/membership.py``). Attributes are tested only if the test of membership rejects, so they need no part of
the significance level. The significance level of an audit is 1%, and each test uses half of it. If
training and held-out samples differ in distribution, or if there are fewer than ten training samples, the
significance level is 0.1%.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from residuum.auditing.outcomes import (
    ATTRIBUTE,
    GRADES,
    MEMBERSHIP,
    VERBATIM,
    AttackOutcome,
    Findings,
)
from residuum.auditing.power import PositiveControls, covered_samples
from residuum.auditing.questions import NOTHING_STORED, Answer, answer_questions, plural
from residuum.evaluation.adapting import Fit
from residuum.evaluation.null import SIGNIFICANCE, format_p
from residuum.evaluation.targets import TargetTest
from residuum.io.metadata import METADATA_SAYS
from residuum.networks.network import Network
from residuum.records import Knowledge, Record, Scores
from residuum.records.attribute_test import AttributeTest
from residuum.records.published import SchemaRule, Share
from residuum.risk.membership import ABSENT, SHOWN, MembershipTest
from residuum.risk.moved_rows import MovedRows
from residuum.surfaces.inspection import Inspection

LEAK, NO_LEAK_FOUND, INCONCLUSIVE = "leak", "no-leak-found", "inconclusive"
OUTCOMES = (LEAK, NO_LEAK_FOUND, INCONCLUSIVE)
EXIT_CODES = {NO_LEAK_FOUND: 0, LEAK: 1, INCONCLUSIVE: 3}
HEADLINES = {
    LEAK: "Leak found",
    NO_LEAK_FOUND: "No leak found by these tests",
    INCONCLUSIVE: "Inconclusive",
}
# If the losses do not show whether the network memorizes, the audit can rule out a leak only with large
# positive controls. The tests must detect a leak in controls whose number of samples is at least this share
# of the number of training samples.
COVERED_SHARE = 0.5
MOMENT_ATTACKED = (
    "the file holds optimizer state, for which there is no positive control, so finding nothing there "
    "proves nothing"
)
UPDATE_ATTACKED = (
    "the file holds an update, for which there is no positive control, so finding nothing there proves "
    "nothing"
)
CAVEAT = "This is evidence from the tests that ran. It is no guarantee of privacy."


@dataclass(frozen=True, eq=False)
class Checks(Record):
    """The checks that decide whether an audit that found nothing can rule out a leak.

    Attributes:
        failures: Reasons why the inputs cannot be judged, such as a negative control that fails.
        level: The largest adjusted p-value that shows a leak.
        fit: How well the network that was read from the file fits the samples.
        told_apart: P-value of the test whether the losses of training and held-out samples differ, None if
            the losses were not tested.
        positive_controls: The positive controls (networks known to memorize their samples) for membership and
            for reconstruction, () if no positive controls were needed.
        set_aside: Rows of training samples that were not judged, because they also occur in the held-out
            set.
        stopped: A sentence that says when the time limit stopped the audit, "" if the audit was not stopped.
        restricted: Why an audit with these settings cannot rule out a leak, "" if it can.
        budget_needed: Budget in reference seconds that would be large enough for all planned work, None if no
            work was left out.
        why_no_attack: Why residuum has no attack on this kind of model, "" if it has one.
    """

    failures: tuple[str, ...] = ()
    level: float = SIGNIFICANCE
    fit: Fit | None = None
    told_apart: float | None = None
    positive_controls: tuple[PositiveControls, ...] = ()
    set_aside: tuple[int, ...] = ()
    stopped: str = ""
    restricted: str = ""
    budget_needed: float | None = None
    why_no_attack: str = ""

    @property
    def covered(self) -> int:
        """Largest size of positive controls (networks that memorize) whose leaks are detected."""
        return covered_samples(self.positive_controls)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Why nothing shows that the model was trained on the passed training samples.

        The tuple is empty if the losses show that the model was trained on them.
        """
        reasons = []
        if self.told_apart is None:
            reasons.append(
                "there are no labels or held-out samples with which losses can be compared"
            )
        elif self.told_apart > SIGNIFICANCE:
            p_text = format_p(self.told_apart)
            reasons.append(
                f"the losses on these samples do not differ from the losses on held-out samples ({p_text})"
            )
        unproven_text = "nothing shows that the model was trained on these samples"
        return tuple(f"{unproven_text}: {reason}" for reason in reasons)


@dataclass(frozen=True, eq=False)
class Verdict(Record):
    """The outcome of an audit with the numbers that decide it.

    Attributes:
        outcome: "leak", "no-leak-found" or "inconclusive".
        reasons: The reasons for the outcome, one sentence each.
        answers: The answers to the questions: Are training records stored in the file? Can attacks
            reconstruct training samples? Can training samples be told from non-members? If it was tested:
            Can an attacker infer a missing value of a training record?
        grade: The strongest grade of the findings, "" without a finding.
        grades: Number of samples of each grade, the strongest first.
        limit: The weakest grade of a leak that ends in exit code 1.
        n: Number of training samples that were judged.
        recovered: Number of training samples that attacks recovered or that are stored in the file.
        expected_by_chance: Number of recovered samples expected by chance.
        interval: 99% confidence interval of the number of recovered samples in excess of chance.
        p_value: P-value of the test of reconstruction, adjusted for all tests.
        level: The largest adjusted p-value that shows a leak.
        metric: The similarity of image and reconstruction by which the tests decide, such as "ncc".
        rule: The condition under which a sample counts as recovered, such as "ncc > 0.83".
        tests: Number of attacks whose candidates were tested.
        named: Number of training samples that the membership test names as members.
        inferred: Number of training records of which an attacker can infer a missing value, null if this was
            not tested.
        stored: What the file stores, "" if it stores no training records.
        not_judged: Number of training samples that were not judged, because they also occur in the held-out
            set.
    """

    derived = ("exit_code", "headline", "sentence", "significance")

    outcome: Annotated[str, SchemaRule(enum=[*OUTCOMES])]
    reasons: tuple[str, ...] = ()
    answers: tuple[Answer, ...] = ()
    grade: str = ""
    grades: dict[str, int] = field(default_factory=dict)
    limit: str = MEMBERSHIP
    n: int | None = None
    recovered: int | None = None
    expected_by_chance: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    level: float = SIGNIFICANCE
    metric: str = ""
    rule: str = ""
    tests: int = 0
    named: int | None = None
    inferred: int | None = None
    stored: str = ""
    not_judged: int = 0

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"A verdict is one of {OUTCOMES}; got {self.outcome!r}.")

    @property
    def is_below_limit(self) -> bool:
        """Whether the leak is weaker than ``limit``, the weakest grade that ends in exit code 1."""
        return bool(self.grade) and not reaches(self.grade, self.limit)

    @property
    def exit_code(self) -> Annotated[int, SchemaRule(enum=[*EXIT_CODES.values()])]:
        """The exit code with which the command ``residuum audit`` ends."""
        if self.outcome == LEAK and self.is_below_limit:
            return EXIT_CODES[NO_LEAK_FOUND]
        return EXIT_CODES[self.outcome]

    @property
    def significance(self) -> Share:
        """Significance level: the largest adjusted p-value that shows a leak."""
        return self.level

    @property
    def headline(self) -> str:
        """The outcome in a few words, with the number of leaking samples of each grade."""
        headline_text = HEADLINES[self.outcome]
        if self.outcome == LEAK and self.is_below_limit:
            headline_text += f", below your limit ({self.limit})"
        if self.grade:
            grade_text = ", ".join(
                _counted(grade, count, of_records=bool(self.inferred))
                for grade, count in self.grades.items()
            )
            headline_text += (
                f": {grade_text or self.grade}"
                if self.outcome == LEAK
                else f" (found: {grade_text})"
            )
        return f"{headline_text} ({self.coverage})" if self.coverage else headline_text

    @property
    def coverage(self) -> str:
        """A text that says how many training samples were not judged, "" if all were judged."""
        if not self.not_judged or self.n is None:
            return ""
        verb = "was" if self.not_judged == 1 else "were"
        return f"{self.not_judged} of {self.n + self.not_judged} samples {verb} not judged"

    @property
    def sentence(self) -> str:
        """The result of the audit in one or two sentences."""
        if self.outcome == INCONCLUSIVE:
            main_reason = self.reasons[0] if self.reasons else "the audit could not decide"
            result_text = (
                f"This audit neither shows a leak nor rules one out: {main_reason.rstrip('.')}."
            )
            if self.grade:
                result_text = f"{main_reason[:1].upper()}{main_reason[1:].rstrip('.')}."
        elif self.outcome == LEAK:
            result_text = " ".join(
                a.evidence.partition(" By their losses")[0]
                for a in self.answers
                if a.answer == "yes"
            )
        else:
            power_sentences = [
                answer.power for answer in self.answers if answer.power.startswith("On ")
            ]
            result_text = " ".join(power_sentences) or "Positive controls were not needed."
        return f"{result_text} {self.not_judged_note}".rstrip()

    @property
    def not_judged_note(self) -> str:
        """A sentence that says why some samples were not judged, "" if all samples were judged."""
        note = "Training samples that were not judged also occur in the held-out set."
        return note if self.coverage else ""


def reaches(grade: str, limit: str) -> bool:
    """Return True if a leak is at least as strong as the limit that the user set by ``--fail-on``.

    Args:
        grade: The grade of the finding.
        limit: The weakest grade of a leak that ends in exit code 1.

    Returns:
        Whether the grade reaches the limit.
    """
    grades_strongest_first = [*GRADES]
    return grades_strongest_first.index(grade) <= grades_strongest_first.index(limit)


def decide(
    findings: Findings | None,
    attacks: tuple[AttackOutcome, ...],
    checks: Checks | None = None,
    membership: MembershipTest | None = None,
    *,
    why_not_compared: str = "",
    limit: str = MEMBERSHIP,
    assumed: tuple[str, ...] = (),
    targets: TargetTest | None = None,
    nothing_stored: str = NOTHING_STORED,
    moved_rows: MovedRows | None = None,
    attributes: AttributeTest | None = None,
    why_not_searched: str = "",
) -> Verdict:
    """Decide the outcome of an audit by the table at the top of this file.

    The first row of the table whose case is true gives the outcome.

    Args:
        findings: The tests of all attacks together, None if no attack was tested.
        attacks: One row per attack, and one row for stored records if there are any.
        checks: Checks that decide whether an audit without a finding can rule out a leak.
        membership: The test of membership, None if it was not run.
        why_not_compared: Why training and held-out samples could not be compared, "" if they could.
        limit: The weakest grade of a leak that ends in exit code 1.
        assumed: Assumptions about network and samples, which are added to the reasons.
        targets: The test of recovered targets, None if the release holds no forest.
        nothing_stored: What the search for stored records found if ``attacks`` has no row about it.
        moved_rows: The embedding rows that training moved, None without a base.
        attributes: The test whether missing values of training records can be inferred, None if it was not
            run.
        why_not_searched: Why stored records were not searched for, "" if they were.

    Returns:
        The verdict with its reasons.
    """
    checks = checks or Checks()
    stored_row = next((row for row in attacks if row.surface == "records in the file"), None)
    is_member_finding = _is_member_finding(membership, checks)
    attribute_finding = (
        attributes if _is_attribute_finding(attributes, membership, checks) else None
    )
    target_finding = targets if targets and targets.is_finding(checks.level) else None
    answers = answer_questions(
        stored_row,
        findings,
        membership,
        checks.positive_controls,
        is_member_finding=is_member_finding,
        has_failures=bool(checks.failures),
        why_not_compared=why_not_compared,
        attacks=attacks,
        why_no_attack=checks.why_no_attack,
        targets=targets,
        is_target_finding=target_finding is not None,
        nothing_stored=nothing_stored,
        moved_rows=moved_rows,
        attributes=attributes,
        is_attribute_finding=attribute_finding is not None,
        why_not_searched=why_not_searched,
    )
    significant_membership = membership if is_member_finding else None
    grades = _grades(
        stored_row, findings, significant_membership, target_finding, attribute_finding
    )
    outcome, reasons = _row(grades, findings, attacks, checks, membership, why_not_compared, limit)
    if target_finding is not None and outcome == LEAK:
        reasons = (*reasons, target_finding.line)
    if attribute_finding is not None and outcome == LEAK:
        reasons = (*reasons, attribute_finding.line)
    is_stored = stored_row is not None and stored_row.is_stored
    tested_findings = None if findings is None or findings.reason else findings
    result_with_count = stored_row if is_stored and stored_row is not None else tested_findings
    stored_text = (
        f"{stored_row.candidates} records"
        if is_stored and stored_row and stored_row.candidates
        else "records"
    )
    return Verdict(
        outcome,
        (*reasons, *_without_effect(attacks), *assumed),
        answers=answers,
        grade=next(iter(grades), ""),
        grades=grades,
        limit=limit,
        n=_sample_count(stored_row if is_stored else None, findings, membership),
        recovered=None if result_with_count is None else result_with_count.recovered,
        expected_by_chance=None
        if result_with_count is None
        else result_with_count.expected_by_chance,
        interval=None if findings is None else findings.interval,
        p_value=None if result_with_count is None else result_with_count.p_value,
        level=checks.level,
        metric="" if findings is None else findings.metric,
        rule="" if result_with_count is None else result_with_count.rule,
        tests=0 if findings is None else findings.tests,
        named=None if membership is None else len(membership.named),
        inferred=None if attributes is None else len(attributes.rows),
        stored=stored_text if is_stored else "",
        not_judged=0 if is_stored else len(checks.set_aside),
    )


def _is_member_finding(membership: MembershipTest | None, checks: Checks) -> bool:
    return (
        membership is not None and membership.is_finding and membership.adjusted_p <= checks.level
    )


def _is_attribute_finding(
    attributes: AttributeTest | None, membership: MembershipTest | None, checks: Checks
) -> bool:
    """Return True if values can be inferred and the group test of membership rejects.

    Attributes have no part of the significance level of an audit. The test of membership keeps the level.
    """
    return (
        attributes is not None
        and attributes.is_finding
        and membership is not None
        and membership.adjusted_p <= checks.level
    )


def _grades(
    stored: AttackOutcome | None,
    findings: Findings | None,
    members: MembershipTest | None,
    targets: TargetTest | None = None,
    attributes: AttributeTest | None = None,
) -> dict[str, int]:
    """Return how many training samples leak with each grade, the strongest grade first."""
    count_by_grade: dict[str, int] = {}
    if stored is not None and stored.is_stored:
        count_by_grade[VERBATIM] = stored.recovered or stored.candidates
    if findings is not None and findings.survivors:
        strongest_index = [*GRADES].index(findings.grade)
        for grade, count in findings.grades.items():
            # A single recovered sample may look more like the original than the others by chance. So no
            # sample counts with a stronger grade than all findings together.
            counted_grade = grade if [*GRADES].index(grade) >= strongest_index else findings.grade
            count_by_grade[counted_grade] = count_by_grade.get(counted_grade, 0) + count
        if not findings.grades:
            count_by_grade[findings.grade] = findings.recovered
    if targets is not None:
        count_by_grade[ATTRIBUTE] = targets.recovered
    if attributes is not None:
        count_by_grade[ATTRIBUTE] = len(attributes.rows)
    if members is not None:
        count_by_grade[MEMBERSHIP] = len(members.named)
    # If an array of stored records is damaged, the records cannot be counted. The count of 0 is kept, because
    # stored records are a leak in any case.
    return {
        g: count_by_grade[g]
        for g in GRADES
        if count_by_grade.get(g) or (g == VERBATIM and g in count_by_grade)
    }


def _row(
    grades: dict[str, int],
    findings: Findings | None,
    attacks: tuple[AttackOutcome, ...],
    checks: Checks,
    membership: MembershipTest | None,
    why_not_compared: str,
    limit: str,
) -> tuple[str, tuple[str, ...]]:
    """Return the outcome of an audit, and the reasons for it.

    They come from the first row whose case is true, in the table at the top of this file.
    """
    evidence = _evidence(findings, attacks, checks, membership)
    if VERBATIM in grades:
        stored_row = next(row for row in attacks if row.is_stored)
        return LEAK, (stored_row.reason, *evidence)
    if why_not_compared:
        return INCONCLUSIVE, (why_not_compared,)
    if checks.failures:
        return INCONCLUSIVE, (*checks.failures, *evidence)
    if checks.fit is not None and checks.fit.is_doubtful:
        return INCONCLUSIVE, (
            f"the network as read hardly fits these samples ({checks.fit.line})",
            *evidence,
        )
    if any(reaches(grade, limit) for grade in grades):
        return LEAK, evidence
    if reasons := reasons_to_stay_open(findings, attacks, checks, membership):
        return INCONCLUSIVE, (*reasons, *evidence)
    if grades:
        return LEAK, evidence
    return NO_LEAK_FOUND, tuple(control.sentence for control in checks.positive_controls)


def reasons_to_stay_open(
    findings: Findings | None,
    attacks: tuple[AttackOutcome, ...],
    checks: Checks,
    membership: MembershipTest | None,
) -> list[str]:
    """Return the reasons why an audit without a finding cannot rule out a leak.

    Args:
        findings: The tests of all attacks together.
        attacks: One row per attack.
        checks: Checks that decide whether an audit without a finding can rule out a leak.
        membership: The test of membership, None if it was not run.

    Returns:
        The reasons, the most useful first, or [] if the audit can rule out a leak.
    """
    loss_test = None if membership is None else membership.loss
    memorization_reasons = []
    if loss_test is not None and loss_test.memorization == SHOWN:
        memorization_reasons = [
            f"the model memorizes its training samples. {loss_test.line.rstrip('.')}"
        ]
    if checks.why_no_attack:
        return [*memorization_reasons, f"{checks.why_no_attack}, so finding nothing proves nothing"]
    reasons = [checks.restricted] if checks.restricted else []
    reasons += unfinished(attacks)
    reasons += [checks.stopped] if checks.stopped else []
    if findings is not None and findings.set_aside_matches:
        reasons.append(_matches_among_set_aside(findings, checks))
    if any(attack.ran and attack.surface == "moment" for attack in attacks):
        reasons.append(MOMENT_ATTACKED)
    if any(attack.ran and attack.surface == "update" for attack in attacks):
        reasons.append(UPDATE_ATTACKED)
    if membership is not None and membership.neurons and membership.reason:
        reasons.append(f"membership could not be tested: {membership.reason.rstrip('.')}")
    reasons += memorization_reasons
    if not checks.covered:
        # If there is another reason to be inconclusive, positive controls were not run, because they cannot
        # change the verdict. Missing positive controls are then not given as a reason.
        if checks.positive_controls or not reasons:
            sentences = [control.sentence.rstrip(".") for control in checks.positive_controls]
            no_power_text = "nothing shows that these tests would detect a leak"
            reasons.append(
                f"{no_power_text}. {' '.join(f'{s}.' for s in sentences)}".strip().rstrip(".")
            )
    elif loss_test is None or loss_test.memorization != ABSENT:
        train_count = 0 if membership is None else membership.records
        if checks.covered < COVERED_SHARE * train_count:
            unclear_text = "the losses do not show whether the network memorizes its samples"
            reasons.append(
                f"{unclear_text}, and a leak is detected only in networks that memorize at most "
                f"{checks.covered} samples, which is less than half of the {train_count} training samples"
            )
    return reasons


def unfinished(attacks: tuple[AttackOutcome, ...]) -> list[str]:
    """Describe, in one sentence each, the attacks that could not run as planned within the budget."""
    return [
        f"the budget was too small for all work of {attack.name}: {attack.unfinished}"
        for attack in attacks
        if attack.decides and attack.unfinished
    ]


def _matches_among_set_aside(findings: Findings, checks: Checks) -> str:
    row_text = ", ".join(map(str, findings.set_aside_matches[:20]))
    match_count = len(findings.set_aside_matches)
    return (
        f"{match_count} of the {len(checks.set_aside)} samples that were not judged, because they also occur "
        f"in the held-out set, {'matches' if match_count == 1 else 'match'} a reconstruction "
        f"(rows {row_text})"
    )


def _evidence(
    findings: Findings | None,
    attacks: tuple[AttackOutcome, ...],
    checks: Checks,
    membership: MembershipTest | None,
) -> tuple[str, ...]:
    """Describe every test that shows a leak, in one sentence each."""
    sentences = [
        f"{attack.name} recovers {attack.recovered} of {findings.n} training samples ({attack.rule}; "
        f"{attack.expected_by_chance:.2g} expected by chance), adjusted {format_p(attack.adjusted or 0.0)} "
        f"over all tests, where {attack.level:g} shows a leak"
        for attack in attacks
        if findings is not None and attack.survives
    ]
    if membership is not None and _is_member_finding(membership, checks):
        sentences.append(membership.line)
    return tuple(sentences)


def _sample_count(
    stored: AttackOutcome | None, findings: Findings | None, membership: MembershipTest | None
) -> int | None:
    if stored is not None:
        return stored.sample_count
    if membership is not None:
        return membership.records
    return None if findings is None else findings.n


def _counted(grade: str, count: int, *, of_records: bool = False) -> str:
    """Return a count of a grade in words. For attributes, it can count records or values."""
    if grade == VERBATIM:
        return f"{count or ''} stored record{'' if count == 1 else 's'}".lstrip()
    if grade == ATTRIBUTE and of_records:
        return f"{count} record{'' if count == 1 else 's'} with an inferable value"
    if grade == MEMBERSHIP:
        return f"{count} named member{'' if count == 1 else 's'}"
    return plural(count, grade)


def _without_effect(attacks: tuple[AttackOutcome, ...]) -> tuple[str, ...]:
    """Return one sentence for each attack whose matches are significant, but do not enter the verdict.

    Such an attack is a baseline, or its p-value is significant only before the adjustment for all tests.
    """
    sentences = []
    for attack in attacks:
        is_by_chance = not attack.recovered or (attack.p_value or 1.0) > SIGNIFICANCE
        if (
            is_by_chance
            or attack.is_stored
            or attack.survives
            or attack.surface == "records in the file"
        ):
            continue
        match_text = (
            f"{attack.name} matches {attack.recovered} samples ({attack.expected_by_chance:.2g} expected by "
            f"chance, {format_p(attack.p_value or 0.0)})"
        )
        if attack.decides:
            sentences.append(f"{match_text} by itself, but not over all tests")
        else:
            sentences.append(f"the baseline {match_text}, which does not enter the verdict")
    return tuple(sentences)


def opening(network: Network, fit: Fit | None) -> tuple[str, ...]:
    """Return the lines of text that an audit prints before its attacks run.

    Args:
        network: The network.
        fit: How well the network fits the samples, None if there are no samples.

    Returns:
        A line about the fit, and one line per assumption about the network.
    """
    unchecked_text = "there are no training samples, so the network as read cannot be checked"
    return (unchecked_text if fit is None else fit.line, *network.assumptions)


def assumptions(network: Network, inspection: Inspection) -> tuple[str, ...]:
    """Return what the attacks assume about this network and the samples.

    Args:
        network: The network.
        inspection: Facts that were measured from the weights.

    Returns:
        One sentence per assumption.
    """
    if inspection.homogeneity_order is None:
        homogeneity_note = (
            "The network is not homogeneous, so the theorem behind the KKT attack "
            "does not cover it."
        )
    else:
        homogeneity_note = (
            f"The network is homogeneous of order {inspection.homogeneity_order:g}. The KKT attack "
            "assumes that training came near a KKT point of its margin problem."
        )
    samples_note = "The given samples are the training samples."
    exchangeability_note = (
        "The held-out samples come from the distribution of the training samples and were prepared in the "
        "same way."
    )
    file_notes = (
        note if note.startswith(METADATA_SAYS) else f"Assumed when the file was read: {note}"
        for note in network.assumptions
    )
    return (samples_note, exchangeability_note, homogeneity_note, *file_notes)


def limitations(
    verdict: Verdict, scores: Scores | None, knowledge: Knowledge, *, is_network: bool = True
) -> tuple[str, ...]:
    """Return what a reader must not conclude from an audit.

    Args:
        verdict: The verdict.
        scores: Scores of the strongest attack, None without samples.
        knowledge: What the attacker knows.
        is_network: Whether the audited model is a network.

    Returns:
        One sentence per limitation.
    """
    limitation_texts = [
        CAVEAT,
        "A sample counts as recovered if its match is closer than the 99% chance level. The grade says how "
        "much closer the match is than held-out samples.",
        "Membership is tested by activation boundaries and losses of this one network. An attacker with "
        "shadow networks may find more members."
        if is_network
        else "Losses of this one model are compared. An attacker with shadow models may find more members.",
    ]
    if scores is not None and scores.smallest_significant is not None:
        limitation_texts.append(
            f"With {scores.pool} held-out samples, a finding needs at least {scores.smallest_significant} "
            "recovered samples."
        )
    if "train" in knowledge.provenance.values():
        limitation_texts.append(
            "The attacker knows facts from the training set, which makes the strongest attacker. A real "
            "attacker may know less."
        )
    return tuple(limitation_texts)
