"""``residuum report``: the report of a finished audit, written again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from residuum.cli.options import Json, Quiet
from residuum.cli.output import print_json, print_line

EXAMPLES = """Examples:

residuum report runs/a --redact

residuum report runs/a --blur --out for-review.html
"""


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished audit.", show_default=False)
    ],
    redact: Annotated[bool, typer.Option("--redact", help="Without any image.")] = False,
    blur: Annotated[
        bool, typer.Option("--blur", help="Images are blurred until asked for.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write (default: report-again.html or report-redacted.html in RUN).",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
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
    if json:
        print_json({"report": str(target), "verdict": result.verdict.outcome, "redacted": redact})
    elif not quiet:
        print_line(f"report: {target}")
