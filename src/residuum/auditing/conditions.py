"""Read the conditions of ``--fail-on``: grades of a leak, and comparisons such as ``recovered>=5``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from residuum.auditing.outcomes import GRADES
from residuum.auditing.verdict import EXIT_CODES, LEAK, Verdict
from residuum.errors import InputError, require_known

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_COMPARISON = re.compile(rf"\s*([a-z_]+)\s*(>=|<=|==|>|<)\s*({_NUMBER})\s*")
_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq}
_COMPARE |= {">": operator.gt, "<": operator.lt}


def _share(verdict: Verdict) -> float | None:
    return verdict.recovered / verdict.n if verdict.recovered is not None and verdict.n else None


def _excess(verdict: Verdict) -> float | None:
    if verdict.recovered is None or verdict.expected_by_chance is None:
        return None
    return verdict.recovered - verdict.expected_by_chance


QUANTITIES: dict[str, Callable[[Verdict], float | None]] = {
    "recovered": lambda verdict: verdict.recovered,
    "expected": lambda verdict: verdict.expected_by_chance,
    "excess": _excess,
    "share": _share,
    "p_value": lambda verdict: verdict.p_value,
    "named": lambda verdict: verdict.named,
    "inferred": lambda verdict: verdict.inferred,
}


@dataclass(frozen=True)
class Comparison:
    """A comparison such as ``recovered>=5``. If the audit has no such number, the comparison does not hold.

    Attributes:
        text: The comparison as the user wrote it.
        name: Name of the number in the verdict, such as ``recovered``.
        compare: The comparison operator.
        bound: The number on the right side.
    """

    text: str
    name: str
    compare: Callable[[float, float], bool]
    bound: float

    def holds(self, verdict: Verdict) -> bool:
        """Return True if the comparison holds for the numbers in the verdict of an audit."""
        audit_value = QUANTITIES[self.name](verdict)
        return audit_value is not None and self.compare(audit_value, self.bound)


def read_conditions(texts: Sequence[str]) -> tuple[str, list[Comparison]]:
    """Read the values of ``--fail-on``.

    A text that is neither a grade nor a comparison raises an ``InputError``.

    Args:
        texts: Grades and comparisons. ``leak`` means a leak of any grade.

    Returns:
        The weakest grade in the texts, "" if they name no grade, and the comparisons.
    """
    order, grades, comparisons = [*GRADES], [], []
    for text in (text.strip() for text in texts):
        if text == LEAK:
            grades.append(order[-1])
        elif text in GRADES:
            grades.append(text)
        else:
            comparisons.append(_read_comparison(text))
    return max(grades, key=order.index) if grades else "", comparisons


def exit_code(verdict: Verdict, comparisons: Sequence[Comparison], only: bool = False) -> int:
    """Return the exit code of an audit if the user passed comparisons with ``--fail-on``.

    Args:
        verdict: The verdict of the audit.
        comparisons: Comparisons. If one of them holds, the exit code is 1.
        only: Whether a leak for which no comparison holds gives the exit code 0.

    Returns:
        1 if a comparison holds. Otherwise 0 if ``only`` is True and the verdict is a leak, else the exit code
        of the verdict.
    """
    if any(comparison.holds(verdict) for comparison in comparisons):
        return EXIT_CODES[LEAK]
    return 0 if only and verdict.outcome == LEAK else verdict.exit_code


def _read_comparison(text: str) -> Comparison:
    comparison_match = _COMPARISON.fullmatch(text)
    if comparison_match is None or not math.isfinite(bound := float(comparison_match[3])):
        raise InputError(
            "The value of --fail-on must be a grade of leaks or a comparison such as recovered>=5; got "
            f"{text[:60]!r}.",
            f"Pass one of the grades {', '.join(GRADES)}, or a comparison with one of the numbers "
            f"{', '.join(QUANTITIES)}.",
        )
    name, operator_text, _ = comparison_match.groups()
    require_known(name[:40], QUANTITIES, "--fail-on knows no")
    return Comparison(text, name, _COMPARE[operator_text], bound)
