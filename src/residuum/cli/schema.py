"""``residuum schema``: the JSON Schema of result.json, exposure.json, a scan, a difference or a dry run.

Examples:

residuum schema > result.schema.json

residuum schema scan > scan.schema.json

residuum schema exposure > exposure.schema.json
"""

from __future__ import annotations

from typing import Annotated

import typer

from residuum.cli.options import Voice
from residuum.cli.output import print_json
from residuum.errors import require_known


def command(
    of: Annotated[
        str,
        typer.Argument(metavar="OF", help="result (an audit's), scan, exposure, diff or dry-run."),
    ] = "result",
    *,
    voice: Voice,
) -> None:
    """Print a JSON Schema, that of result.json by default; --json changes nothing, it is JSON anyway."""
    require_known(of, ("result", "scan", "exposure", "diff", "dry-run"), "No schema")
    if of == "scan":
        from residuum.scanning.scan import scan_schema as schema
    elif of == "exposure":
        from residuum.report.exposure import exposure_schema as schema
    elif of == "diff":
        from residuum.auditing.comparing import diff_schema as schema
    elif of == "dry-run":
        from residuum.auditing.dryrun import dry_run_schema as schema
    else:
        from residuum.auditing.artifacts import result_schema as schema
    if not voice.quiet:
        print_json(schema())
