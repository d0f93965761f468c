"""Write the files of a finished audit, and read its result again.

``result.json`` is written last, so a folder with this file holds a complete audit. :mod:`.published` defines
the content of ``result.json``.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from residuum.auditing.config import write_config
from residuum.auditing.published import SCHEMA_VERSION, PublishedAudit, publish
from residuum.auditing.result import AuditResult
from residuum.errors import InputError
from residuum.io.checkpoints import save_checkpoint
from residuum.io.release_knowledge import remove_stored_knowledge
from residuum.records import Certificate, Reconstruction, Scores, Uniqueness
from residuum.records.published import published_form
from residuum.records.rundir import sha256, write_atomic, write_json
from residuum.report.html import model_card, render
from residuum.report.sarif import sarif

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
SCORES, CERTIFICATE = "scores.json", "certificate.json"
REPORT, SARIF, CARD = "report.html", "report.sarif", "model_card.md"
AUDIT, KNOWLEDGE, MODEL = "audit.safetensors", "knowledge.safetensors", "model.safetensors"
DAMAGED = "{!r} must be the folder of a finished audit; its {} is missing or damaged."
RUN_AUDIT = "Run residuum audit CHECKPOINT --out RUN."
RESULT, MAIN = "result.json", "reconstruction.safetensors"


def write_artifacts(
    out: Path,
    result: AuditResult,
    *,
    request: dict[str, Any] | None = None,
    sources: dict[str, str] | None = None,
    file: str = MODEL,
    blur: bool = False,
) -> dict[str, Any]:
    """Write every file of a finished audit, ``result.json`` last.

    A file that cannot be written raises an ``OutputError``.

    Args:
        out: The folder to write to, which must exist.
        result: The result of the audit.
        request: Settings of the audit and hashes of its inputs. If an audit is started again in this folder,
            these values show whether it is the same audit.
        sources: Paths of the input files, which are written to ``config.toml``. If no checkpoint is among
            them, the weights are written to the folder.
        file: Path of the checkpoint as the user passed it, which is written to the SARIF file.
        blur: Blur the images of the report until the reader asks for them.

    Returns:
        The content of ``result.json``.
    """
    tensor_files = []
    for i, reconstruction in enumerate(result.reconstructions):
        tensor_files.append(
            f"reconstruction-{i}-{reconstruction.attack}.safetensors" if i else MAIN
        )
        reconstruction.save(out / tensor_files[-1])
    result.save_record(out / AUDIT)
    remove_stored_knowledge(result.knowledge).save(out / KNOWLEDGE)
    input_files = dict(sources or {})
    if "checkpoint" not in input_files and result.checkpoint.theta:
        save_checkpoint(result.checkpoint, out / MODEL)
        input_files["checkpoint"] = MODEL
        tensor_files.append(MODEL)
        result.hashes.setdefault("checkpoint", sha256(out / MODEL))
    seed_hashes_and_time = {
        "seed": result.settings["seed"],
        "sha256": result.hashes,
        "created": result.created,
    }
    certificate_content = {
        "of": result.certificate_of,
        "kkt": _plain(result.certificate),
        "uniqueness": _plain(result.uniqueness),
        "uniqueness_reason": result.uniqueness_reason,
    }
    sarif_fields: dict[str, Any] = {
        "tool_version": version("residuum"),
        "exit_code": result.exit_code,
    }
    sarif_fields["sha256"] = result.hashes.get("checkpoint", "")
    text_by_file = {
        CONFIG: _config(result, input_files),
        REPORT: render(result, blur=blur),
        CARD: model_card(result),
        ENVIRONMENT: _json({**result.environment, **seed_hashes_and_time}),
        SCORES: _json(_scores(result)),
        CERTIFICATE: _json(certificate_content),
        SARIF: _json(sarif(result.verdict, file=file, **sarif_fields)),
    }
    for name, content in text_by_file.items():
        write_atomic(out / name, content)
    file_names = sorted([*tensor_files, *text_by_file, AUDIT, KNOWLEDGE])
    published_result = publish(
        result, request, {name: sha256(out / name) for name in file_names}
    ).to_json()
    published_form(PublishedAudit).model_validate(
        published_result
    )  # raise an error before an invalid file is written
    write_json(out / RESULT, published_result)
    return published_result


def read_result(path: Path) -> dict[str, Any]:
    """Return the content of ``result.json`` of a finished audit."""
    try:
        result_content: dict[str, Any] = json.loads((path / RESULT).read_text())
    except (OSError, ValueError, RecursionError) as problem:
        raise InputError(DAMAGED.format(str(path), RESULT), RUN_AUDIT) from problem
    schema_version = (
        result_content.get("schema_version") if isinstance(result_content, dict) else None
    )
    if isinstance(schema_version, str) and schema_version != SCHEMA_VERSION:
        raise InputError(
            f"The files of an audit must have the schema version that this version of residuum reads; "
            f"{str(path)!r} has schema version {schema_version[:20]}, and {SCHEMA_VERSION} can be read.",
            "Run the audit again.",
        )
    try:
        published_form(PublishedAudit).model_validate(result_content)
        return result_content
    except (ValueError, RecursionError) as problem:
        raise InputError(DAMAGED.format(str(path), RESULT), RUN_AUDIT) from problem


def load_artifacts(path: Path) -> tuple[Path, tuple[Reconstruction, ...]]:
    """Return the path of the file ``audit.safetensors`` and the reconstructions of a finished audit.

    Raises:
        InputError: If a file is missing, or if its hash differs from the hash in ``result.json``.
    """
    hash_by_file = read_result(path)["artifacts"]
    reconstruction_files = sorted(
        name for name in hash_by_file if name.startswith("reconstruction")
    )
    for name in (AUDIT, *reconstruction_files):
        if Path(name).name != name or not (path / name).is_file():
            raise InputError(
                f"The folder of a finished audit must have all of its files; {str(path)!r} lacks "
                f"{name[:60]!r}.",
                "Run the audit again.",
            )
        if sha256(path / name) != hash_by_file.get(name):
            raise InputError(
                f"The files of a finished audit must not be changed; {name!r} in {str(path)!r} has "
                f"changed since the audit wrote it.",
                "Run the audit again.",
            )
    sorted_files = (
        [MAIN, *(name for name in reconstruction_files if name != MAIN)]
        if MAIN in reconstruction_files
        else reconstruction_files
    )
    return path / AUDIT, tuple(Reconstruction.load(path / name) for name in sorted_files)


def _config(result: AuditResult, sources: dict[str, str]) -> str:
    requested_settings = result.settings["requested"]
    config_values = {
        **sources,
        **requested_settings,
        "knowledge": KNOWLEDGE,
        "sha256": {name: digest for name, digest in result.hashes.items() if digest},
    }
    return write_config(config_values, needs_code="model_code" in requested_settings)


def _scores(result: AuditResult) -> dict[str, Any]:
    if result.scores is None:
        return {"calibrated": False, "reason": result.verdict.reasons[0], "selected": None}
    return {**result.scores.to_json(), "selected": _plain(result.selected)}


def _plain(record: Scores | Certificate | Uniqueness | None) -> dict[str, Any] | None:
    return None if record is None else record.to_json()


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"
