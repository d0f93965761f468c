"""``residuum schema``: the JSON Schema of result.json, or of what a scan prints.

Examples:

residuum schema > result.schema.json

residuum schema scan > scan.schema.json
"""

from __future__ import annotations

from typing import Annotated

import typer

from residuum.cli.options import Voice
from residuum.cli.output import print_json
from residuum.errors import require_known


def command(
    of: Annotated[
        str, typer.Argument(metavar="OF", help="result (an audit's) or scan.")
    ] = "result",
    *,
    voice: Voice,
) -> None:
    """Print a JSON Schema, that of result.json by default; --json changes nothing, it is JSON anyway."""
    require_known(of, ("result", "scan"), "No schema")
    if of == "scan":
        from residuum.verbs.scanning import scan_schema as schema
    else:
        from residuum.auditing.schema import result_schema as schema
    if not voice.quiet:
        print_json(schema())
