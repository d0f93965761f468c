"""How the report writes numbers and what a KKT certificate says, as text: a dash stands for "not known"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from residuum.theory.kkt import EXACT, NEAR

if TYPE_CHECKING:
    from residuum.auditing.result import AuditResult
    from residuum.auditing.verdict import Verdict

Row = tuple[str, Any, str]  # of a list of figures: its name, its value, what it means
STATUS = {  # of a KKT certificate, in words
    "kkt": f"Clarke residual at most {EXACT:g}: a KKT point up to rounding",
    "near_kkt": f"Clarke residual at most {NEAR:g}: near a KKT point",
    "far_from_kkt": f"Clarke residual above {NEAR:g}: far from a KKT point, which the KKT attack "
    "assumes; the verdict does not rest on it",
    "not_separated": "some sample is on the wrong side of its margin: not a KKT point",
}


def shown(value: float | int | None, digits: int = 3) -> str:
    """A number for reading: integers whole, others to ``digits`` significant ones, a dash for none."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "–"
    return f"{value}" if isinstance(value, int) else f"{value:.{digits}g}"


def fixed(value: float | None) -> str:
    """A number for columns: three decimals where that is enough, a power of ten otherwise."""
    if value is None or np.isnan(value):
        return "–"
    if np.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def p_text(value: float | None) -> str:
    """A p value for a column."""
    return "< 0.001" if value is not None and value < 0.001 else shown(value)


def verdict_figures(verdict: Verdict) -> tuple[tuple[str, str], ...]:
    """The numbers of a verdict, named; empty when nothing was calibrated."""
    if verdict.recovered is None or verdict.n is None:
        return ()
    interval = verdict.interval
    return (
        ("recovered", f"{verdict.recovered} of {verdict.n}"),
        ("threshold", verdict.rule or "–"),
        ("expected by chance", shown(verdict.expected_by_chance)),
        ("naive 95% interval", f"{interval[0]:.1f} – {interval[1]:.1f}" if interval else "–"),
        ("p value", p_text(verdict.p_value)),
    )


def certificate_rows(result: AuditResult) -> tuple[Row, ...]:
    """The KKT certificate, or why there is none, and the directions of the first layer."""
    found = result.certificate
    directions = ("directions of the first layer", *result.directions)
    if found is None:
        return (("KKT certificate", None, result.certificate_of), directions)
    free = f"gates free at {found.kinks_freed} of {found.kinks} kinks"
    return (
        ("samples", found.samples, result.certificate_of),
        ("KKT residual, plain", found.residual_plain, "norm over the weights' norm"),
        ("KKT residual, Clarke", found.residual_clarke, free),
        ("margin", found.margin, "least y Phi(x)"),
        ("normalised margin", found.normalized_margin, "over ||theta||^L"),
        ("delta", found.delta, "complementary slackness"),
        ("balance gap", found.balance, "0 at a KKT point"),
        directions,
        ("status", found.status, "; ".join((STATUS[found.status], *found.notes))),
    )
