"""SARIF 2.1.0, the format code-scanning services read: one rule, one result per audit.

The subject is a file of weights, not of source; its location is the file, without a region. Counts
stand in the message and, as numbers, in the result's property bag. Images are never part of it.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from residuum.auditing.verdict import Verdict

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
RULE = "training-data-reconstruction"
# kind and level of a result; SARIF ties any level but "none" to the kind "fail".
KINDS = {"leak": ("fail", "error"), "inconclusive": ("open", "none")}
PASSED = ("pass", "none")
NUMBERS = {name: name for name in ("outcome", "recovered", "n", "metric", "rule")}
NUMBERS |= {"expectedByChance": "expected_by_chance", "pValue": "p_value"}
HELP = (
    "An attack that sees nothing but the weights brought back training samples more often than "
    "chance explains. Do not release these weights; retrain with a defense, or on data that may be "
    "known. The run's report.html shows what came back."
)


def sarif(
    verdict: Verdict, *, file: str, tool_version: str, sha256: str = "", exit_code: int
) -> dict[str, Any]:
    """The log of one audit. file: the checkpoint's path as the pipeline names it; sha256: its hash."""
    kind, level = KINDS.get(verdict.outcome, PASSED)
    location = {"uri": _uri(file)}
    reasons = [f"{reason[:1].upper()}{reason[1:]}." for reason in verdict.reasons]
    numbers = {name: getattr(verdict, field) for name, field in NUMBERS.items()}
    artifact: dict[str, Any] = {"location": location, "roles": ["analysisTarget"]}
    if sha256:
        artifact["hashes"] = {"sha-256": sha256}
    result = {
        "ruleId": RULE,
        "ruleIndex": 0,
        "kind": kind,
        "level": level,
        "message": {"text": " ".join([f"{verdict.headline}.", verdict.sentence, *reasons])},
        "locations": [{"physicalLocation": {"artifactLocation": {**location, "index": 0}}}],
        "partialFingerprints": {"checkpoint/v1": sha256 or file},
        "properties": {k: v for k, v in numbers.items() if v is not None and v != ""},
    }
    run = {
        "tool": {"driver": _driver(tool_version)},
        "invocations": [{"executionSuccessful": True, "exitCode": exit_code}],
        "artifacts": [artifact],
        "results": [result],
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _driver(version: str) -> dict[str, Any]:
    return {
        "name": "residuum",
        "version": version,
        "rules": [
            {
                "id": RULE,
                "name": "TrainingDataReconstruction",
                "shortDescription": {"text": "Training samples can be read off the weights."},
                "fullDescription": {"text": HELP},
                "help": {"text": HELP},
                "defaultConfiguration": {"level": "error"},
                "properties": {"tags": ["privacy", "machine-learning"], "security-severity": "7.5"},
            }
        ],
    }


def _uri(file: str) -> str:
    """Relative to the place the command ran in, as code scanning wants it; else a file URI."""
    path = PurePosixPath(file.replace("\\", "/"))
    return path.as_uri() if path.is_absolute() else quote(str(path), safe="/")
