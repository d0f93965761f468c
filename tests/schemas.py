"""The published JSON Schemas, as users of the package find them."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import jsonschema


def schema(name: str) -> dict[str, Any]:
    """The schema of one kind of output, read from the package."""
    document: dict[str, Any] = json.loads(
        files("residuum").joinpath(f"schemas/{name}.json").read_text("utf-8")
    )
    return document


def check(name: str, values: Any) -> None:
    """Fail if the values do not fit their published schema."""
    jsonschema.Draft202012Validator(schema(name)).validate(values)
