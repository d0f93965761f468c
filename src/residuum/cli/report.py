"""``residuum report``: write the report of a finished audit again, or compare two audits.

Examples:
residuum report runs/a --redact

residuum report runs/a --blur --out for-review.html

residuum report runs/after --against runs/before --fail-if-worse
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import print_line, print_notes, print_table, print_wrapped
from residuum.errors import InputError

if TYPE_CHECKING:
    from residuum.auditing.comparing import Comparison
    from residuum.auditing.result import AuditResult


app = options.command_app("report", __doc__)


@app.default
def _command(
    run: Annotated[Path, Parameter(name="RUN", help="Folder of a finished audit.")],
    /,
    *,
    against: Annotated[
        Path | None,
        Parameter(
            help="Folder of an earlier audit. The report then compares the earlier audit with the audit "
            "in RUN.",
            metavar="OTHER",
        ),
    ] = None,
    fail_if_worse: Annotated[
        bool,
        Parameter(
            help="With --against: end with exit code 1 if the audit in RUN shows a worse leak "
            "than the earlier audit."
        ),
    ] = False,
    redact: Annotated[bool, Parameter(help="Leave all images out of the report.")] = False,
    blur: Annotated[
        bool, Parameter(help="Blur the images in the report until a reader asks for them.")
    ] = False,
    out: Annotated[
        Path | None,
        Parameter(
            help="File for the report. By default a file in the folder RUN: report-again.html, or "
            "report-redacted.html without images. With --against: comparison.html or "
            "comparison-redacted.html."
        ),
    ] = None,
    open_report: Annotated[
        bool, Parameter(name="--open", help="Open the report in a browser.")
    ] = False,
    output: options.Output = options.OUTPUT,
) -> int:
    """Write the HTML report of a finished audit again, or compare it with another audit."""
    from residuum.auditing.comparing import WORSE
    from residuum.auditing.result import AuditResult
    from residuum.records import write_atomic

    if against is None and fail_if_worse:
        raise InputError(
            "The option --fail-if-worse compares two audits; got one audit.",
            "Pass --against OTHER.",
        )
    audit_result = AuditResult.load(run)
    is_worse = False
    if against is None:
        report_file = out or run / f"report-{'redacted' if redact else 'again'}.html"
        write_atomic(report_file, _draw(run, lambda: audit_result.html(blur=blur, redact=redact)))
        report_summary = {
            "report": str(report_file),
            "verdict": audit_result.verdict.outcome,
            "redacted": redact,
            "newer": list(audit_result.newer_attacks),
        }
        output.print_result(report_summary, lambda: _show(report_file, audit_result.newer_attacks))
    else:
        report_file = out or run / f"comparison{'-redacted' if redact else ''}.html"
        comparison, page = _compare(against, run, audit_result, blur, redact)
        write_atomic(report_file, page)
        output.print_result(comparison.to_json(), lambda: _show_comparison(comparison, report_file))
        is_worse = comparison.change == WORSE
    if open_report:
        import webbrowser

        webbrowser.open(report_file.resolve().as_uri())
    return 1 if fail_if_worse and is_worse else 0


def _compare(
    before: Path, after: Path, result: AuditResult, blur: bool, redact: bool
) -> tuple[Comparison, str]:
    """Compare two audits, ``before`` and ``after``. Return the comparison and its HTML page."""
    from residuum.auditing.comparing import compare
    from residuum.auditing.result import AuditResult
    from residuum.report.html import render_comparison

    audit_results = AuditResult.load(before), result
    comparison = compare(*audit_results).replace(before=str(before), after=str(after))
    page = _draw(
        after, lambda: render_comparison(comparison, audit_results, blur=blur, redact=redact)
    )
    return comparison, page


def _draw(run: Path, draw: Callable[[], str]) -> str:
    """Call ``draw``, which returns an HTML page. Raise an error if the audit in ``run`` is damaged."""
    try:
        return draw()
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as problem:
        raise InputError(
            f"The folder {str(run)!r} must hold an audit from which a report can be made; making the "
            f"report failed ({type(problem).__name__}).",
            "Run the audit again with this version of residuum.",
        ) from problem


def _show(target: Path, newer: tuple[str, ...]) -> None:
    """Print the path of the report, and notes about attacks that are newer than the audit."""
    for line in newer:
        print_wrapped(
            f"note: this version of residuum has {line}. Audit again to run them.",
            later_indent="  ",
        )
    print_line(f"report: {target}")


def _show_comparison(comparison: Comparison, target: Path) -> None:
    print_wrapped(f"{comparison.change.upper()}: {comparison.sentence}")
    table_rows = [(row.what, row.before, row.after) for row in comparison.rows]
    title = f"before: {comparison.before}, after: {comparison.after}"
    print_table(title, ("what", "before", "after"), table_rows)
    for name, samples in (
        ("no longer recovered", comparison.only_before),
        ("newly recovered", comparison.only_after),
    ):
        if samples:
            print_wrapped(", ".join(map(str, samples)), f"{name}: samples ", "  ")
    print_notes(comparison.unlike)
    print_line(f"report: {target}")
