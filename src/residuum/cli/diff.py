"""``residuum diff``: two audits side by side, as before and after a defense.

Examples:

residuum diff runs/a runs/b

residuum diff runs/a runs/b --out difference.html --fail-if-worse
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residuum.cli.options import Voice, option
from residuum.cli.output import print_line, print_notes, print_table, print_wrapped

if TYPE_CHECKING:
    from residuum.auditing.comparing import Difference


def command(
    before: Annotated[Path, typer.Argument(metavar="A", help="Folder of a finished audit.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Folder of another, made later.")],
    *,
    out: Path | None = option("A page to write, with the best matches of both.", metavar="FILE"),
    redact: bool = option("The page without any image.", False, "--redact"),
    fail_if_worse: bool = option("Exit code 1 where B is worse than A.", False, "--fail-if-worse"),
    voice: Voice,
) -> None:
    """Compare two audits: what came back before and after, beside chance."""
    from residuum.auditing import AuditResult
    from residuum.auditing.comparing import WORSE, diff
    from residuum.records import write_atomic
    from residuum.report.html import render_difference

    results = AuditResult.load(before), AuditResult.load(after)
    found = diff(*results).replace(before=str(before), after=str(after))
    if out is not None:
        write_atomic(out, render_difference(found, results, redact=redact))
    voice.answer(found.to_json(), lambda: _show(found, out))
    raise typer.Exit(1 if fail_if_worse and found.change == WORSE else 0)


def _show(found: Difference, out: Path | None) -> None:
    print_wrapped(f"{found.change.upper()}: {found.sentence}")
    rows = [(row.what, row.before, row.after) for row in found.rows]
    print_table(f"{found.before} and {found.after}", ("what", "before", "after"), rows)
    for title, samples in (("no longer recovered", found.gone), ("newly recovered", found.came)):
        if samples:
            print_wrapped(", ".join(map(str, samples)), f"{title}: samples ", "  ")
    print_notes(found.unlike)
    if out is not None:
        print_line(f"page: {out}")
