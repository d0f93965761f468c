"""JSON Schemas of the JSON that residuum writes: one file for each kind of output.

The files are derived from the records. ``python -m residuum.schemas`` writes them again after a record
changed, and a test compares them with the records.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent


def derived_schemas() -> dict[str, str]:
    """Return the text of every schema file, as the records give it.

    Returns:
        The texts, by the name of the file.
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
    return {f"{one['$id'].split(':')[2]}.json": json.dumps(one, indent=2) + "\n" for one in schemas}


def write_schemas() -> None:
    """Write every schema file into this folder."""
    for name, text in derived_schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
