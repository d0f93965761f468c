"""``residuum schema``: the JSON Schema of result.json.

Examples:

residuum schema > result.schema.json
"""

from __future__ import annotations

from residuum.cli.options import Voice
from residuum.cli.output import print_json


def command(voice: Voice) -> None:
    """Print the JSON Schema of result.json; --json changes nothing, it is JSON anyway."""
    from residuum.auditing.schema import result_schema

    if not voice.quiet:
        print_json(result_schema())
