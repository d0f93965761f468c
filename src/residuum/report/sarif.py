"""Write SARIF 2.1.0, the format that code-scanning services read.

The log of an audit has one rule and one result. The log of a scan has several rules and results. The subject
is a file of weights, so a location is a file without line numbers. The message has the headline and the three
answers, in at most 40 words. Numbers are in the property bag of the result. A log never contains images.
``sarif.json`` is a template of a log with the tool and the rule of audits.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from residuum.auditing.verdict import Verdict

RULE = "training-data-leak"
MAX_WORDS = 40  # largest number of words in a message; services show messages in a list
SUBJECTS = {  # names of the three questions in a message
    "stored": "stored records",
    "reconstruction": "reconstruction",
    "membership": "membership",
    "attributes": "missing values",
}
# Kind and level of a SARIF result by outcome of the audit. SARIF accepts levels other than "none" only for
# the kind "fail".
KINDS = {"leak": ("fail", "error"), "inconclusive": ("open", "none")}
# Kind and level of a leak whose grade is below the limit of the user.
BELOW_LIMIT = ("fail", "note")
PASSED = ("pass", "none")
# Attributes of the verdict that the log contains, by name in the log.
NUMBERS = {
    name: name
    for name in ("outcome", "recovered", "n", "metric", "rule", "grade", "tests", "named")
}
NUMBERS |= {"expectedByChance": "expected_by_chance", "pValue": "p_value"}


def sarif(
    verdict: Verdict, *, file: str, tool_version: str, sha256: str = "", exit_code: int
) -> dict[str, Any]:
    """Return the SARIF log of an audit.

    Args:
        verdict: The verdict.
        file: Path of the audited file as the pipeline names it.
        tool_version: Version of residuum.
        sha256: Hash of the file, "" if it is not known.
        exit_code: Exit code of the audit.

    Returns:
        The log as JSON values.
    """
    kind, level = KINDS.get(verdict.outcome, PASSED)
    if kind == "fail" and verdict.is_below_limit:
        kind, level = BELOW_LIMIT
    location = {"uri": _uri(file)}
    verdict_values = {name: getattr(verdict, field) for name, field in NUMBERS.items()}
    properties: dict[str, Any] = {
        k: v for k, v in verdict_values.items() if v is not None and v != ""
    }
    properties["answers"] = {answer.key: answer.answer for answer in verdict.answers}
    if verdict.grades:
        properties["grades"] = dict(verdict.grades)
    artifact: dict[str, Any] = {"location": location, "roles": ["analysisTarget"]}
    if sha256:
        artifact["hashes"] = {"sha-256": sha256}
    sarif_result = {
        "ruleId": RULE,
        "ruleIndex": 0,
        "kind": kind,
        "level": level,
        "message": {"text": format_message(verdict)},
        "locations": [{"physicalLocation": {"artifactLocation": {**location, "index": 0}}}],
        "partialFingerprints": {"checkpoint/v1": sha256 or file},
        "properties": properties,
    }
    invocation = {"executionSuccessful": True, "exitCode": exit_code}
    return _log({"version": tool_version}, invocation, [artifact], [sarif_result])


def format_message(verdict: Verdict) -> str:
    """Return the headline and the answers to the three questions, at most ``MAX_WORDS`` words."""
    answer_texts = [
        f"{SUBJECTS.get(answer.key, answer.key)}: {answer.answer}" for answer in verdict.answers
    ]
    answers_sentence = f"{', '.join(answer_texts)}.".capitalize() if answer_texts else ""
    headline_words = verdict.headline.split()
    words_for_headline = MAX_WORDS - len(answers_sentence.split())
    if len(headline_words) > words_for_headline:
        headline_words = [*headline_words[: words_for_headline - 1], "…"]
    return f"{' '.join(headline_words)}. {answers_sentence}".strip()


# Level and security severity of a SARIF result by severity of the finding.
LEVELS = {"high": ("error", "8.0"), "medium": ("warning", "5.0"), "low": ("note", "2.0")}


def scan_sarif(scan: dict[str, Any]) -> dict[str, Any]:
    """Return the SARIF log of a scan: a rule for each kind of finding, a result for each finding.

    Args:
        scan: The JSON of the scan.

    Returns:
        The log as JSON values.
    """
    subject = PurePosixPath(scan["subject"])
    is_folder = len(scan["files"]) + len(scan["unread"]) > 1
    rules: dict[str, dict[str, Any]] = {}
    results, artifacts = [], []
    for file in scan["files"]:
        is_subject = not is_folder and file["file"] == scan["subject"]
        location = {"uri": _uri(file["file"] if is_subject else str(subject / file["file"]))}
        artifacts.append({"location": location, "roles": ["analysisTarget"]})
        for finding in file["findings"]:
            level, severity = LEVELS[finding["severity"]]
            rule_id = f"release-{finding['kind']}"
            rule_properties = rules.setdefault(rule_id, _rule(rule_id, finding, severity))[
                "properties"
            ]
            rule_properties["security-severity"] = max(
                rule_properties["security-severity"], severity
            )
            message_text = (
                f"{finding['what']} at {finding['where']}: {finding['reason']}. {finding['remedy']}"
            )
            physical_location = {"artifactLocation": {**location, "index": len(artifacts) - 1}}
            fingerprint = f"{finding['kind']}:{finding['what']}:{finding['where']}"
            finding_counts = {k: finding[k] for k in ("places", "count") if finding[k] is not None}
            results.append(
                {
                    "ruleId": rule_id,
                    "ruleIndex": list(rules).index(rule_id),
                    "kind": "fail",
                    "level": level,
                    "message": {"text": message_text},
                    "locations": [{"physicalLocation": physical_location}],
                    "partialFingerprints": {"surface/v1": fingerprint},
                    "properties": finding_counts,
                }
            )
    unread_files = [f"{file['file']}: {file['reason']}" for file in scan["unread"]]
    notifications = [
        {"level": "error", "message": {"text": message_text}} for message_text in unread_files
    ]
    invocation = {"executionSuccessful": not notifications, "exitCode": scan["exit_code"]}
    invocation |= {"toolExecutionNotifications": notifications} if notifications else {}
    driver = {"version": scan["tool"]["version"], "rules": list(rules.values())}
    return _log(driver, invocation, artifacts, results)


def _log(
    driver: dict[str, Any],
    invocation: dict[str, Any],
    artifacts: list[dict[str, Any]],
    results: list[dict[str, Any]],
) -> dict[str, Any]:
    """Fill the template ``sarif.json`` of a SARIF log with the values of a run."""
    log: dict[str, Any] = json.loads((Path(__file__).parent / "sarif.json").read_text("utf-8"))
    log_run = log["runs"][0]
    log_run["tool"]["driver"] |= driver
    log_run |= {"invocations": [invocation], "artifacts": artifacts, "results": results}
    return log


def _rule(name: str, finding: dict[str, Any], severity: str) -> dict[str, Any]:
    return {
        "id": name,
        "name": "".join(word.capitalize() for word in name.split("-")),
        "shortDescription": {
            "text": f"A file can reveal training data. Kind of finding: {finding['kind']}."
        },
        "help": {"text": f"{finding['reason']}. {finding['remedy']}"},
        "properties": {"tags": ["privacy", "machine-learning"], "security-severity": severity},
    }


def _uri(file: str) -> str:
    """Return a URI relative to the working folder, as code scanning requires, or a file URI."""
    path = PurePosixPath(file.replace("\\", "/"))
    return path.as_uri() if path.is_absolute() else quote(str(path), safe="/")
