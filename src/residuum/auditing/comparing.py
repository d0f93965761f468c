"""Compare two audits, such as an audit before a defense and an audit after the defense.

Every count is shown with the count expected by chance and a confidence interval, so that a chance difference
is not mistaken for a change. If the audits differ in samples, attacker knowledge, budget or attacks, the
comparison lists the differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from residuum.auditing.outcomes import GRADES
from residuum.auditing.result import AuditResult
from residuum.auditing.verdict import INCONCLUSIVE, LEAK, NO_LEAK_FOUND, Verdict
from residuum.records import Record
from residuum.records.published import SchemaRule

BETTER, WORSE, ALIKE = "better", "worse", "alike"
ORDER = (NO_LEAK_FOUND, INCONCLUSIVE, LEAK)  # outcomes, the best first


@dataclass(frozen=True, eq=False)
class Row(Record):
    """A row of the comparison: one result of both audits.

    Attributes:
        what: Name of the result, such as "named members".
        before: The result in the earlier audit, as text.
        after: The result in the later audit, as text.
    """

    what: str
    before: str
    after: str


@dataclass(frozen=True, eq=False)
class Comparison(Record):
    """The comparison of two audits: what changed from the earlier to the later audit.

    Attributes:
        before: Name of the earlier audit.
        after: Name of the later audit.
        change: "better", "worse" or "alike".
        sentence: The change in words.
        rows: Results of both audits, side by side.
        only_before: Samples that only the earlier audit recovered, None if the audits used different samples.
        only_after: Samples that only the later audit recovered, None if the audits used different samples.
        unlike: Differences in samples, attacker knowledge, settings or attacks, one sentence each.
    """

    before: str
    after: str
    change: Annotated[str, SchemaRule(enum=[BETTER, WORSE, ALIKE])]
    sentence: str
    rows: tuple[Row, ...]
    only_before: tuple[int, ...] | None = None
    only_after: tuple[int, ...] | None = None
    unlike: tuple[str, ...] = ()


def compare(before: AuditResult | str | Path, after: AuditResult | str | Path) -> Comparison:
    """Compare two audits.

    A folder without a finished audit raises an ``InputError``.

    Args:
        before: The result of the earlier audit, or its folder.
        after: The result of the later audit, or its folder.

    Returns:
        What changed, with the results of both audits.
    """
    a, b = (x if isinstance(x, AuditResult) else AuditResult.load(x) for x in (before, after))
    change, sentence = _change(a.verdict, b.verdict)
    differences = _list_differences(a, b)
    only_before = only_after = None
    has_same_data = not any("data" in difference for difference in differences)
    if a.findings is not None and b.findings is not None and has_same_data:
        recovered_before, recovered_after = set(a.findings.samples), set(b.findings.samples)
        only_before, only_after = (
            tuple(sorted(recovered_before - recovered_after)),
            tuple(sorted(recovered_after - recovered_before)),
        )
    name_before, name_after = (
        x.subject if isinstance(x, AuditResult) else str(x) for x in (before, after)
    )
    return Comparison(
        before=name_before,
        after=name_after,
        change=change,
        sentence=sentence,
        rows=_rows(a, b),
        only_before=only_before,
        only_after=only_after,
        unlike=differences,
    )


def _change(a: Verdict, b: Verdict) -> tuple[str, str]:
    """Return how the verdict changed from audit ``a`` to audit ``b``, as one word and as a sentence.

    The outcomes are compared first. If both audits found a leak, the grades of the leaks are compared. If the
    grades are equal, the numbers of recovered samples are compared.
    """
    inconclusive_text = "nothing that could be decided"
    outcome_texts = {LEAK: "a leak", NO_LEAK_FOUND: "no leak", INCONCLUSIVE: inconclusive_text}
    if a.outcome != b.outcome:
        sentence = (
            f"The audit before found {outcome_texts[a.outcome]}. "
            f"The audit after found {outcome_texts[b.outcome]}."
        )
        if b.outcome == INCONCLUSIVE and a.outcome == LEAK:
            return ALIKE, f"{sentence} This does not show that the leak was fixed."
        is_better = ORDER.index(b.outcome) < ORDER.index(a.outcome)
        return (BETTER if is_better else WORSE), sentence
    if a.outcome != LEAK:
        return ALIKE, f"Both audits found {outcome_texts[a.outcome]}."
    grades_worst_first = list(GRADES)
    if a.grade != b.grade and a.grade in grades_worst_first and b.grade in grades_worst_first:
        is_better = grades_worst_first.index(b.grade) > grades_worst_first.index(a.grade)
        sentence = f"Both audits found a leak. Its grade went from {a.grade} to {b.grade}."
        return (BETTER if is_better else WORSE), sentence
    if a.interval is None or b.interval is None or a.n != b.n:
        return ALIKE, "Both audits found a leak."
    opening = "Both audits found a leak. The audit after recovers significantly"
    if b.interval[1] < a.interval[0]:
        return BETTER, f"{opening} fewer samples."
    if b.interval[0] > a.interval[1]:
        return WORSE, f"{opening} more samples."
    return ALIKE, "Both audits found a leak. The difference of their counts may be due to chance."


def _rows(a: AuditResult, b: AuditResult) -> tuple[Row, ...]:
    """Return one row of the comparison for every result that one or both of the audits have."""
    attack_names = [row.name for x in (a, b) for row in x.attacks if row.recovered is not None]
    before, after = (_figures(x, tuple(dict.fromkeys(attack_names))) for x in (a, b))
    comparison_rows = [
        Row(name, before.get(name) or "–", after.get(name) or "–") for name in before | after
    ]
    return tuple(row for row in comparison_rows if (row.before, row.after) != ("–", "–"))


def _figures(result: AuditResult, attacks: tuple[str, ...]) -> dict[str, str]:
    """Return the results of an audit as texts, by name of the result. A missing result is ""."""
    verdict, fit, membership = result.verdict, result.fit, result.membership
    result_texts = {
        "verdict": verdict.headline,
        "reconstructed": "" if verdict.recovered is None else f"{verdict.recovered} of {verdict.n}",
        "by chance": _number(verdict.expected_by_chance),
        "in excess of chance, 99% confidence": "",
        "p": _number(verdict.p_value),
        "right on training samples": fit.figure(fit.train) if fit else "",
        "right on held-out samples": "",
    }
    if verdict.interval:
        low, high = verdict.interval
        result_texts["in excess of chance, 99% confidence"] = f"{low:.1f} to {high:.1f}"
    if fit and fit.holdout is not None:
        result_texts["right on held-out samples"] = fit.figure(fit.holdout)
    tested_rows = {row.name: row for row in result.attacks if row.recovered is not None}
    for name in attacks:
        attack_row = tested_rows.get(name)
        count_text = (
            attack_row
            and f"{attack_row.recovered} ({_number(attack_row.expected_by_chance)} by chance)"
        )
        result_texts[f"by {name}"] = count_text or ""
    if result.attributes is not None:
        result_texts["records with an inferable value"] = (
            f"{len(result.attributes.rows)} of {result.attributes.records}"
        )
    result_texts["named members"] = (
        f"{len(membership.named)} of {membership.records}" if membership else ""
    )
    loss_test = None if membership is None else membership.loss
    result_texts["AUC of the losses"] = "" if loss_test is None else f"{loss_test.auc:.2f}"
    for control in result.checks.positive_controls:
        detected_text = f"{control.samples} samples" if control.samples else "not detected"
        result_texts[f"positive controls of {control.question}"] = detected_text
    return result_texts


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _list_differences(a: AuditResult, b: AuditResult) -> tuple[str, ...]:
    """Return one sentence for each difference in samples, attacker knowledge, settings or attacks."""
    differences = []
    for name, what in (("data", "training data"), ("holdout", "held-out data")):
        first, second = a.hashes.get(name, ""), b.hashes.get(name, "")
        if first != second:
            differences.append(f"the {what} are not the same")
    if a.knowledge.digest != b.knowledge.digest:
        differences.append(
            f"the attackers have different knowledge: {a.knowledge.line}; {b.knowledge.line}"
        )
    for name in ("effort", "budget"):
        first, second = (str(x.settings.get(name) or "default") for x in (a, b))
        if first != second:
            differences.append(f"the settings of {name} differ: {first} and {second}")
    if (a.suite, a.suite_attacks) != (b.suite, b.suite_attacks):
        differences.append(f"the attack suites differ: versions {a.suite} and {b.suite}")
    return tuple(differences)
