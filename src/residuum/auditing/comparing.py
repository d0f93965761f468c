"""Compare two audits, such as before and after a defense or another training.

Counts stand next to what is expected by chance and to their intervals, so that nobody takes a difference
for a change that chance can explain. If the two audits were not made alike (samples, attacker knowledge,
budget, attacks), the comparison says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from residuum.auditing.durations import duration, seconds_of
from residuum.auditing.result import AuditResult
from residuum.auditing.verdict import GRADES, INCONCLUSIVE, LEAK, NO_LEAK_FOUND, Verdict
from residuum.records import Record
from residuum.records.published import SchemaRule

BETTER, WORSE, ALIKE = "better", "worse", "alike"
ORDER = (NO_LEAK_FOUND, INCONCLUSIVE, LEAK)  # the best first


@dataclass(frozen=True, eq=False)
class Row(Record):
    """One figure of both audits."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, eq=False)
class Comparison(Record):
    """What changed from one audit to another.

    Args:
        before: Name of the audit before.
        after: Name of the audit after.
        change: "better", "worse" or "alike".
        sentence: The change in words.
        rows: Figures of both audits.
        gone: Training samples that only the audit before recovered, None if the samples differ.
        came: Training samples that only the audit after recovered, None if the samples differ.
        unlike: In what the audits were not made alike, so that their figures compare only with care.
    """

    before: str
    after: str
    change: Annotated[str, SchemaRule(enum=[BETTER, WORSE, ALIKE])]
    sentence: str
    rows: tuple[Row, ...]
    gone: tuple[int, ...] | None = None
    came: tuple[int, ...] | None = None
    unlike: tuple[str, ...] = ()


def compare(before: AuditResult | str | Path, after: AuditResult | str | Path) -> Comparison:
    """Compare two audits.

    Args:
        before: The result of the audit before, or its folder.
        after: The result of the audit after, or its folder.

    Returns:
        What changed, with the figures of both.

    Raises:
        InputError: If a folder does not hold a finished audit.
    """
    a, b = (x if isinstance(x, AuditResult) else AuditResult.load(x) for x in (before, after))
    change, sentence = _change(a.verdict, b.verdict)
    unlike = _unlike(a, b)
    gone = came = None
    same_data = not any("data" in one for one in unlike)
    if a.findings is not None and b.findings is not None and same_data:
        first, second = set(a.findings.samples), set(b.findings.samples)
        gone, came = tuple(sorted(first - second)), tuple(sorted(second - first))
    first_name, second_name = (
        x.subject if isinstance(x, AuditResult) else str(x) for x in (before, after)
    )
    return Comparison(first_name, second_name, change, sentence, _rows(a, b), gone, came, unlike)


def _change(a: Verdict, b: Verdict) -> tuple[str, str]:
    """The word and the sentence: by outcome, then grade, then counts beyond their intervals."""
    undecided = "nothing that could be decided"
    names = {LEAK: "a leak", NO_LEAK_FOUND: "no leak", INCONCLUSIVE: undecided}
    if a.outcome != b.outcome:
        better = ORDER.index(b.outcome) < ORDER.index(a.outcome)
        said = (
            f"The audit before found {names[a.outcome]}. The audit after found {names[b.outcome]}."
        )
        if b.outcome == INCONCLUSIVE:
            said += " That the leak is gone is not shown." if a.outcome == LEAK else ""
            return (ALIKE if a.outcome == LEAK else WORSE), said
        return (BETTER if better else WORSE), said
    if a.outcome != LEAK:
        return ALIKE, f"Both audits found {names[a.outcome]}."
    worst = list(GRADES)
    if a.grade != b.grade and a.grade in worst and b.grade in worst:
        better = worst.index(b.grade) > worst.index(a.grade)
        said = f"Both audits found a leak. Its grade went from {a.grade} to {b.grade}."
        return (BETTER if better else WORSE), said
    if a.interval is None or b.interval is None or a.n != b.n:
        return ALIKE, "Both audits found a leak."
    if b.interval[1] < a.interval[0]:
        return (
            BETTER,
            "Both audits found a leak. The audit after recovers fewer samples, beyond chance.",
        )
    if b.interval[0] > a.interval[1]:
        return (
            WORSE,
            "Both audits found a leak. The audit after recovers more samples, beyond chance.",
        )
    return ALIKE, "Both audits found a leak. Chance may explain that their counts differ."


def _rows(a: AuditResult, b: AuditResult) -> tuple[Row, ...]:
    rows = [Row("verdict", a.verdict.headline, b.verdict.headline)]

    def row(what: str, of: Any) -> None:
        first, second = of(a), of(b)
        if first or second:
            rows.append(Row(what, first or "–", second or "–"))

    row("came back", lambda x: _count(x.verdict))
    row("by chance", lambda x: _figure(x.verdict.expected_by_chance))
    row(
        "beyond chance, 99% confidence",
        lambda x: (i := x.verdict.interval) and f"{i[0]:.1f} to {i[1]:.1f}",
    )
    row("p", lambda x: _figure(x.verdict.p_value))
    row("right on training samples", lambda x: x.fit and x.fit.figure(x.fit.train))
    seen = "right on held-out samples"
    row(seen, lambda x: x.fit and x.fit.holdout is not None and x.fit.figure(x.fit.holdout))
    counted = [one.name for x in (a, b) for one in x.attacks if one.recovered is not None]
    for name in dict.fromkeys(counted):
        row(f"by {name}", lambda x, name=name: _of(x, name))
    row(
        "from positive controls",
        lambda x: (
            ", ".join(f"{t.recovered} of {t.n}" for t in x.checks.twins if not t.reason) or None
        ),
    )
    row("membership, AUC by loss", lambda x: x.membership and f"{x.membership.loss.auc:.2f}")
    return tuple(rows)


def _of(result: AuditResult, name: str) -> str:
    for one in result.attacks:
        if one.name == name and one.recovered is not None:
            return f"{one.recovered} ({_figure(one.expected_by_chance)} by chance)"
    return ""


def _count(verdict: Verdict) -> str:
    return "" if verdict.recovered is None else f"{verdict.recovered} of {verdict.n}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _unlike(a: AuditResult, b: AuditResult) -> tuple[str, ...]:
    """In what the audits were not made alike, one sentence each."""
    said = []
    for name, what in (("data", "training data"), ("holdout", "held-out data")):
        first, second = a.hashes.get(name, ""), b.hashes.get(name, "")
        if first != second:
            said.append(f"the {what} are not the same")
    if a.knowledge.digest != b.knowledge.digest:
        both = f"{a.knowledge.line}; {b.knowledge.line}"
        said.append(f"the attackers were told different things: {both}")
    budgets = [duration(seconds_of(x.settings.get("budget") or "1min")) for x in (a, b)]
    if budgets[0] != budgets[1]:
        said.append(f"the budgets differ: {budgets[0]} and {budgets[1]}")
    if (a.suite, a.suite_attacks) != (b.suite, b.suite_attacks):
        said.append(f"the attack suites differ: versions {a.suite} and {b.suite}")
    return tuple(said)
