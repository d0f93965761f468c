"""When a pipeline fails: a leak, one of a grade, or a comparison such as ``recovered>=5``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from residuum.auditing.verdict import GRADES, INCONCLUSIVE, LEAK, Verdict
from residuum.errors import InputError, did_you_mean

LEAK_FOUND = 1
_FORM = re.compile(r"\s*([a-z_]+)\s*(>=|<=|==|>|<)\s*([-+0-9.eE]+)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Condition:
    """One condition of failure; a quantity that is not known fulfils none.

    text: ``leak``, a grade (a leak of that grade or a worse one), or a comparison; nothing is evaluated.
    """

    text: str
    name: str = ""
    compare: Callable[[float, float], bool] | None = None
    bound: float = 0.0

    def holds(self, verdict: Verdict) -> bool:
        """Whether the verdict fulfils it."""
        if self.compare is None:
            return verdict.outcome == LEAK and verdict.grade in (*_at_least(self.text), "")
        value = QUANTITIES[self.name](verdict)
        return value is not None and self.compare(value, self.bound)


def read_condition(text: str) -> Condition:
    """``leak``, a grade of one, or NAME with >=, >, <=, < or == and a number."""
    if text.strip() in (LEAK, *GRADES):
        return Condition(text.strip())
    found = _FORM.fullmatch(text)
    try:
        bound = float(found[3]) if found else math.nan
    except ValueError:
        bound = math.nan
    if found is None or not math.isfinite(bound):
        raise InputError(
            f"--fail-on takes leak, a grade or a comparison such as recovered>=5; got {text[:60]!r}.",
            f"Grades: {', '.join(GRADES)}; quantities: {', '.join(QUANTITIES)}.",
        )
    if found[1] not in QUANTITIES:
        raise InputError(
            f"--fail-on knows no {found[1][:40]!r}.", did_you_mean(found[1], tuple(QUANTITIES))
        )
    return Condition(text.strip(), found[1], _COMPARE[found[2]], bound)


def _at_least(grade: str) -> tuple[str, ...]:
    """The grade and those worse than it; all of them for any leak."""
    worst_first = tuple(GRADES)
    return worst_first if grade == LEAK else worst_first[: worst_first.index(grade) + 1]


def exit_code(verdict: Verdict, conditions: list[Condition]) -> int:
    """1 when a condition holds, else 3 when the verdict is inconclusive, else 0."""
    if any(condition.holds(verdict) for condition in conditions):
        return LEAK_FOUND
    return verdict.exit_code if verdict.outcome == INCONCLUSIVE else 0


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
}
