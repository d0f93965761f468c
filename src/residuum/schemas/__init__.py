"""JSON Schemas of the JSON that residuum writes: one file for each kind of output.

The files are derived from the records. If you change a record, run ``python -m residuum.schemas`` to write
the files again. A test compares the files with the records.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent


def derive_schemas() -> dict[str, str]:
    """Derive the text of every schema file from the records.

    Returns:
        The texts by file name.
    """
    from residuum.auditing import published
    from residuum.auditing.comparing import Comparison
    from residuum.auditing.dryrun import DryRun
    from residuum.records import exposure
    from residuum.records.published import json_schema
    from residuum.scanning import scan

    schemas = (
        json_schema(published.PublishedAudit, "result", published.SCHEMA_VERSION),
        json_schema(DryRun, "dry-run", "1.0"),
        json_schema(Comparison, "comparison", "1.0"),
        json_schema(scan.Scan, "scan", scan.SCHEMA_VERSION),
        json_schema(exposure.PublishedExposure, "exposure", exposure.SCHEMA_VERSION),
    )
    return {
        f"{schema['$id'].split(':')[2]}.json": json.dumps(schema, indent=2) + "\n"
        for schema in schemas
    }


def write_schemas() -> None:
    """Write all schema files into the folder of this package."""
    for name, text in derive_schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
