"""Every file of a finished audit, and reading one back. ``result.json`` comes last: it completes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from residuum.auditing.folder import RESULT, AuditRun
from residuum.auditing.published import Result, publish
from residuum.auditing.result import AuditResult
from residuum.auditing.settings import write_toml
from residuum.checkpoints import save_checkpoint
from residuum.errors import InputError
from residuum.records import Reconstruction, write_atomic, write_json
from residuum.records.rundir import sha256
from residuum.report.html import render
from residuum.report.model_card import model_card
from residuum.report.sarif import sarif

CONFIG, ENVIRONMENT, SCORES, CERTIFICATE = (
    "config.toml", "environment.json", "scores.json", "certificate.json",
)  # fmt: skip
REPORT, SARIF, CARD = "report.html", "report.sarif", "model_card.md"
AUDIT, KNOWLEDGE, MODEL = "audit.safetensors", "knowledge.safetensors", "model.safetensors"
MAIN = "reconstruction.safetensors"


def write_artifacts(
    folder: AuditRun,
    result: AuditResult,
    *,
    request: dict[str, Any] | None = None,
    sources: dict[str, Any] | None = None,
    file: str = MODEL,
    blur: bool = False,
) -> dict[str, Any]:
    """Write everything and return what ``result.json`` says.

    request: what identifies the audit to the command that resumes it; sources: names of the files
    that were read, for config.toml; without them the weights are kept in the folder; file: the
    checkpoint as the caller names it, for SARIF.
    """
    out = folder.path
    written = [_reconstruction_file(part, i) for i, part in enumerate(result.reconstructions)]
    for name, part in zip(written, result.reconstructions, strict=True):
        part.save(out / name)
    result.save_record(out / AUDIT)
    result.knowledge.save(out / KNOWLEDGE)
    if not sources or not sources.get("checkpoint"):
        save_checkpoint(result.checkpoint, out / MODEL)
        sources, written = {**(sources or {}), "checkpoint": MODEL}, [*written, MODEL]
        result.hashes.setdefault("checkpoint", sha256(out / MODEL))
    texts = {
        CONFIG: _config(result, sources),
        REPORT: render(result, blur=blur),
        CARD: model_card(result),
        ENVIRONMENT: _json({**result.environment, "seed": result.settings["seed"],
                            "sha256": result.hashes, "created": result.created}),
        SCORES: _json(_scores(result)),
        CERTIFICATE: _json(_certificate(result)),
        SARIF: _json(_sarif(result, file)),
    }  # fmt: skip
    for name, content in texts.items():
        write_atomic(out / name, content)
    names = sorted([*written, *texts, AUDIT, KNOWLEDGE])
    found = publish(result, request, {name: sha256(out / name) for name in names})
    summary = found.model_dump(mode="json")
    write_json(out / RESULT, summary)
    folder.finish()
    return summary


def read_result(path: Path) -> dict[str, Any]:
    """What ``result.json`` of a finished audit says."""
    try:
        values = json.loads((path / RESULT).read_text())
        return Result.model_validate(values).model_dump(mode="json")
    except (OSError, ValueError, RecursionError) as problem:
        raise InputError(
            f"{str(path)!r} must be the folder of a finished audit; its {RESULT} is missing or "
            "damaged.",
            "Write one with residuum audit CKPT --out RUN.",
        ) from problem


def load_parts(path: Path) -> tuple[Path, tuple[Reconstruction, ...]]:
    """The record's file and the reconstructions of a finished audit, known to be as written."""
    hashes = read_result(path)["artifacts"]
    names = sorted(name for name in hashes if name.startswith("reconstruction"))
    for name in (AUDIT, *names):
        if Path(name).name != name or not (path / name).is_file():
            raise InputError(f"{str(path)!r} lacks {name[:60]!r}.", "Audit again.")
        if sha256(path / name) != hashes.get(name):
            raise InputError(
                f"{name!r} in {str(path)!r} has changed since the audit wrote it.", "Audit again."
            )
    order = [MAIN, *(name for name in names if name != MAIN)] if MAIN in names else names
    return path / AUDIT, tuple(Reconstruction.load(path / name) for name in order)


def _reconstruction_file(part: Reconstruction, place: int) -> str:
    return MAIN if place == 0 else f"reconstruction-{place}-{part.attack}.safetensors"


def _config(result: AuditResult, sources: dict[str, Any]) -> str:
    settings = {
        name: result.settings[name]
        for name in ("task", "preset", "budget", "steps", "seed", "subsets", "device", "baselines")
    }  # the batches take the budget's place; the uniqueness certificate still has its share of it
    hashes = {name: digest for name, digest in result.hashes.items() if digest}
    values = {
        **sources, **settings, "arch": result.checkpoint.arch, "knowledge": KNOWLEDGE,
        "sha256": hashes, "batches": [vars(batch) for batch in result.batches],
    }  # fmt: skip
    comment = "Repeats this audit: residuum audit --config config.toml --out ANOTHER_RUN"
    return write_toml(values, (comment,))


def _scores(result: AuditResult) -> dict[str, Any]:
    if result.scores is None:
        return {"calibrated": False, "reason": result.verdict.reasons[0], "selected": None}
    selected = None if result.selected is None else result.selected.to_json()
    return {**result.scores.to_json(), "selected": selected}


def _certificate(result: AuditResult) -> dict[str, Any]:
    return {
        "of": result.certificate_of,
        "kkt": None if result.certificate is None else result.certificate.to_json(),
        "uniqueness": None if result.uniqueness is None else result.uniqueness.to_json(),
        "uniqueness_reason": result.uniqueness_reason,
    }


def _sarif(result: AuditResult, file: str) -> dict[str, Any]:
    from importlib.metadata import version

    return sarif(
        result.verdict, file=file, tool_version=version("residuum"),
        sha256=result.hashes.get("checkpoint", ""), exit_code=result.exit_code,
    )  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"
