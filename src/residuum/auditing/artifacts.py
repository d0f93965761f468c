"""The run directory of an audit: its batches while it runs, every file of a finished one, reading back.

A folder belongs to an audit when it holds ``work/`` (one that can go on) or ``result.json`` (one that
is complete, written last). ``config.toml`` is all that was asked for and the batches that repeat it.
``result.json`` is the published form of an audit (:mod:`.published`).
"""

from __future__ import annotations

import json
import shutil
import tomllib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from residuum.auditing.budget import Batch
from residuum.auditing.published import PublishedAudit, publish
from residuum.auditing.result import AuditResult
from residuum.errors import InputError, OutputError
from residuum.io.checkpoints import save_checkpoint
from residuum.records import Certificate, Reconstruction, Scores, Uniqueness
from residuum.records.published import published_form
from residuum.records.rundir import RunDir, read_json, sha256, write_atomic, write_json
from residuum.report.html import model_card, render
from residuum.report.sarif import sarif

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
SCORES, CERTIFICATE = "scores.json", "certificate.json"
REPORT, SARIF, CARD = "report.html", "report.sarif", "model_card.md"
AUDIT, KNOWLEDGE, MODEL = "audit.safetensors", "knowledge.safetensors", "model.safetensors"
MAX_BYTES = 1 << 20  # of a configuration file: far beyond what somebody would write
Positive = Annotated[int, Field(ge=1, le=10**9)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
WORK, RESULT, STATE, PLAN = "work", "result.json", "state", "plan.json"
MAIN = "reconstruction.safetensors"
# Settings of an audit that are neither files nor facts nor what the network is.
HOW = ["budget", "preset", "steps", "seed", "subsets", "device", "task", "baselines"]
HOW += ["vouch", "twin", "recipe", "surface"]


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

    request: what identifies the audit to the command that resumes it.
    sources: names of the files that were read, for config.toml; without them the weights are kept
        in the folder.
    file: the checkpoint as the caller names it, for SARIF.
    """
    out = folder.path
    written = []
    for i, part in enumerate(result.reconstructions):
        written.append(f"reconstruction-{i}-{part.attack}.safetensors" if i else MAIN)
        part.save(out / written[-1])
    result.save_record(out / AUDIT)
    result.knowledge.save(out / KNOWLEDGE)
    if not sources or not sources.get("checkpoint"):
        save_checkpoint(result.checkpoint, out / MODEL)
        sources, written = {**(sources or {}), "checkpoint": MODEL}, [*written, MODEL]
        result.hashes.setdefault("checkpoint", sha256(out / MODEL))
    made = {"seed": result.settings["seed"], "sha256": result.hashes, "created": result.created}
    certificates = {
        "of": result.certificate_of,
        "kkt": _plain(result.certificate),
        "uniqueness": _plain(result.uniqueness),
        "uniqueness_reason": result.uniqueness_reason,
    }
    scanned: dict[str, Any] = {"tool_version": version("residuum"), "exit_code": result.exit_code}
    scanned["sha256"] = result.hashes.get("checkpoint", "")
    texts = {
        CONFIG: _config(result, sources),
        REPORT: render(result, blur=blur),
        CARD: model_card(result),
        ENVIRONMENT: _json({**result.environment, **made}),
        SCORES: _json(_scores(result)),
        CERTIFICATE: _json(certificates),
        SARIF: _json(sarif(result.verdict, file=file, **scanned)),
    }
    for name, content in texts.items():
        write_atomic(out / name, content)
    names = sorted([*written, *texts, AUDIT, KNOWLEDGE])
    summary = publish(result, request, {name: sha256(out / name) for name in names}).to_json()
    published_form(PublishedAudit).model_validate(summary)  # a bug is noticed before it is written
    write_json(out / RESULT, summary)
    folder.finish()
    return summary


def read_result(path: Path) -> dict[str, Any]:
    """What ``result.json`` of a finished audit says."""
    try:
        values: dict[str, Any] = json.loads((path / RESULT).read_text())
        published_form(PublishedAudit).model_validate(values)
        return values
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
            said = f"{name!r} in {str(path)!r} has changed since the audit wrote it."
            raise InputError(said, "Audit again.")
    order = [MAIN, *(name for name in names if name != MAIN)] if MAIN in names else names
    return path / AUDIT, tuple(Reconstruction.load(path / name) for name in order)


def _config(result: AuditResult, sources: dict[str, Any]) -> str:
    # The batches take the budget's place; the uniqueness certificate still has its share of it.
    settings = {name: result.settings[name] for name in ("task", "preset", *HOW)}
    hashes = {name: digest for name, digest in result.hashes.items() if digest}
    model = result.settings.get("model")
    network = {"model": model} if model else {"arch": result.settings["arch"]}
    values = {
        **sources,
        **settings,
        **network,
        "knowledge": KNOWLEDGE,
        "sha256": hashes,
        "batches": [vars(batch) for batch in result.batches],
    }
    present = {name: value for name, value in values.items() if value is not None}
    comment = "# Repeats this audit: residuum audit --config config.toml --out ANOTHER_RUN"
    comment += " --trust-code" if model else ""
    text = f"{comment}\n{tomli_w.dumps(present)}"
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        line = text[: problem.end].splitlines()[-1]
        raise OutputError(
            f"Names in a configuration must be Unicode text; {line!r} is not.", "Rename the file."
        ) from problem
    return text


def _scores(result: AuditResult) -> dict[str, Any]:
    if result.scores is None:
        return {"calibrated": False, "reason": result.verdict.reasons[0], "selected": None}
    return {**result.scores.to_json(), "selected": _plain(result.selected)}


def _plain(record: Scores | Certificate | Uniqueness | None) -> dict[str, Any] | None:
    return None if record is None else record.to_json()


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


class AuditRun(RunDir):
    """An open run directory, which keeps finished batches so that an interrupted audit goes on."""

    what, own, summary, asked = "an audit", (WORK, RESULT), RESULT, f"{WORK}/request.json"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.work = self.path / WORK

    @property
    def started(self) -> bool:
        """Whether a batch is finished or under way."""
        return any(self.work.glob("*.safetensors"))

    def forget(self) -> None:
        """Drop the plan of a request that came to nothing."""
        (self.work / PLAN).unlink(missing_ok=True)

    def refuse_other_results(self) -> None:
        """Nothing that another audit left is written over."""
        if self.complete or self.work.exists():
            said = f"{str(self.path)!r} holds an audit already."
            raise OutputError(said, "Choose another folder, or remove that one.")

    def load(self, batch: Batch) -> Reconstruction | None:
        """The finished batch; one that cannot be read is run again."""
        return Reconstruction.load_or_none(self._file(batch))

    def save(self, batch: Batch, found: Reconstruction) -> None:
        """Keep a finished batch; its state is of no more use."""
        found.save(self._file(batch))
        self.state(batch).unlink(missing_ok=True)

    def state(self, batch: Batch) -> Path:
        """Where the batch under way is kept: one that a stop left behind is nobody else's."""
        return self.work / f"{STATE}-{self._file(batch).name}"

    def planned(self, attack: str) -> Batch | None:
        """The first batch of ``attack`` as planned before the interruption."""
        plan = read_json(self.work / PLAN).get(attack)
        with suppress(TypeError):
            return Batch(**plan) if isinstance(plan, dict) else None
        return None

    def plan(self, batch: Batch) -> None:
        """Keep the plan of an attack."""
        write_json(self.work / PLAN, {**read_json(self.work / PLAN), batch.attack: vars(batch)})

    def finish(self) -> None:
        """Drop what only an unfinished audit needs."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _file(self, batch: Batch) -> Path:
        name = f"{batch.attack}-{batch.seed}-{batch.restarts}x{batch.steps}.safetensors"
        return self.work / name


def _possible(batch: Batch) -> Batch:
    """A batch that somebody could run."""
    if not (1 <= batch.restarts <= 10**9 and 1 <= batch.steps <= 10**9 and 0 <= batch.seed < 2**31):
        raise ValueError("restarts and steps of a batch start at 1, its seed at 0")
    return batch


class AuditSettings(BaseModel):
    """The options of ``residuum audit`` under their names; paths are relative to the file.

    knowledge: a file with all that is granted, in place of shape, value_range and so on.
    batches: what to run in place of a budget.
    sha256: of the files that were read, refused when they differ.
    """

    model_config = ConfigDict(extra="forbid")
    checkpoint: str | None = None
    data: str | None = None
    holdout: str | None = None
    arch: str | None = None
    model: str | None = None
    task: str | None = None
    preset: str | None = None
    budget: str | float | None = None
    steps: Positive | None = None
    seed: Seed | None = None
    subsets: Annotated[int, Field(ge=200, le=100_000)] | None = None
    device: str | None = None
    baselines: bool | None = None
    vouch: bool | None = None
    twin: bool | None = None
    recipe: str | None = None
    knowledge: str | None = None
    shape: str | None = None
    value_range: str | None = None
    mean: str | None = None
    mean_provenance: Literal["user", "train", "holdout", "release"] | None = None
    sample_count: Positive | None = None
    label_balance: str | None = None
    init: str | None = None
    base: str | None = None
    adapter: str | None = None
    surface: str | None = None
    loss: str | None = None
    weight_decay: float | None = None
    columns: str | None = None
    sha256: dict[str, str] = Field(default_factory=dict)
    batches: Annotated[
        list[Annotated[Batch, AfterValidator(_possible)]], Field(max_length=10_000)
    ] = Field(default_factory=list)


def read_settings(path: Path) -> AuditSettings:
    """The settings in a TOML file, checked; file names in it are made relative to its folder."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"A configuration file has at most {MAX_BYTES} bytes.", "Shorten it.")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        found = AuditSettings.model_validate(values)
    except (OSError, ValueError, RecursionError) as problem:
        raise InputError(
            f"{str(path)!r} must be a configuration of residuum audit; reading it failed "
            f"({_reason(problem)}).",
            "Take config.toml of a finished run as a pattern.",
        ) from problem
    names = ("checkpoint", "data", "holdout", "knowledge", "mean", "init", "base", "adapter")
    placed = {name: _beside(path, getattr(found, name)) for name in names}
    return found.model_copy(update=placed)


def _beside(path: Path, name: str | None) -> str | None:
    """A file beside the configuration where there is one of that name; anything else as it is."""
    if name is None or Path(name).is_absolute():
        return name
    beside = path.parent / name
    return str(beside) if beside.exists() else name


def _reason(problem: Exception) -> str:
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        return f"{'.'.join(map(str, first['loc']))[:60]}: {first['msg']}"
    return str(problem).splitlines()[0][:120] if str(problem) else type(problem).__name__
