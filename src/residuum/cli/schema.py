"""``residuum schema``: the JSON Schema of result.json."""

from __future__ import annotations

from residuum.cli.options import Json, Quiet
from residuum.cli.output import print_json

EXAMPLES = """Examples:

residuum schema > result.schema.json
"""


def command(json: Json = False, quiet: Quiet = False) -> None:
    """Print the JSON Schema of result.json; --json changes nothing, it is JSON anyway."""
    from residuum.auditing.schema import result_schema

    if not quiet:
        print_json(result_schema())
