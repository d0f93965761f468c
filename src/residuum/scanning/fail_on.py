"""Read the values of ``--fail-on``: a severity, or kinds of findings."""

from __future__ import annotations

from collections.abc import Iterable

from residuum.errors import require_known
from residuum.scanning.finding import KINDS, SEVERITIES, Finding

HIGH = "high"
NONE = "none"  # no finding makes a scan fail


def check_limits(fail_on: str | Iterable[str]) -> tuple[str, ...]:
    """Return the severities and kinds that ``fail_on`` names.

    Args:
        fail_on: A severity, kinds of findings, or "none". A text may name several, separated by commas.

    Returns:
        The names without repetitions, () for "none".
    """
    names = fail_on.split(",") if isinstance(fail_on, str) else fail_on
    limits = tuple(dict.fromkeys(name.strip() for name in names))
    if limits == (NONE,):
        return ()
    for name in limits:
        require_known(name, (*SEVERITIES, *KINDS), "No severity or kind of finding")
    return limits


def select_failing(findings: Iterable[Finding], limits: tuple[str, ...]) -> list[Finding]:
    """Return the findings of a kind in ``limits``, or of at least a severity in ``limits``.

    Args:
        findings: The findings of a scan.
        limits: The result of :func:`check_limits`.

    Returns:
        The findings that make a scan fail.
    """
    severity_ranks = [SEVERITIES.index(name) for name in limits if name in SEVERITIES]
    weakest_rank = max(severity_ranks, default=-1)
    return [
        finding
        for finding in findings
        if finding.kind in limits or SEVERITIES.index(finding.severity) <= weakest_rank
    ]
