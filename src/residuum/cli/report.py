"""``residuum report``: the report of a finished audit, written again.

Examples:

residuum report runs/a --redact

residuum report runs/a --blur --out for-review.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from residuum.cli.options import Voice, option
from residuum.cli.output import print_line, print_wrapped


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished audit.")],
    *,
    redact: bool = option("Without any image.", False, "--redact"),
    blur: bool = option("Images are blurred until asked for.", False, "--blur"),
    out: Path | None = option(
        "File to write (default: report-again.html or report-redacted.html in RUN)."
    ),
    open_report: bool = option("Open it in a browser.", False, "--open"),
    voice: Voice,
) -> None:
    """Write the HTML report of a finished audit again, redacted or blurred where asked."""
    from residuum.auditing import AuditResult
    from residuum.errors import InputError
    from residuum.records import write_atomic

    result = AuditResult.load(run)
    try:
        text = result.html(blur=blur, redact=redact)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as problem:
        raise InputError(
            f"{str(run)!r} holds an audit that cannot be drawn ({type(problem).__name__}).",
            "Audit again with this version.",
        ) from problem
    target = out if out is not None else run / f"report-{'redacted' if redact else 'again'}.html"
    write_atomic(target, text)
    summary = {
        "report": str(target),
        "verdict": result.verdict.outcome,
        "redacted": redact,
        "newer": list(result.newer),
    }
    voice.answer(summary, lambda: _show(target, result.newer))
    if open_report:
        import webbrowser

        webbrowser.open(target.resolve().as_uri())


def _show(target: Path, newer: tuple[str, ...]) -> None:
    """Where it is; and that a new audit would try more, where it would."""
    for line in newer:
        print_wrapped(
            f"note: this version of residuum has {line}. Audit again to run them.", rest="  "
        )
    print_line(f"report: {target}")
