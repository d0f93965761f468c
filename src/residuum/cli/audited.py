"""An audit of files into a run directory: what the commands audit and demo share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from residuum import plugins
from residuum.cli.options import check_mean, grant
from residuum.errors import InputError

if TYPE_CHECKING:
    from residuum.auditing import Verdict
    from residuum.auditing.artifacts import AuditSettings
    from residuum.records import Checkpoint, Dataset, Knowledge

FACTS = ("shape", "value_range", "sample_count", "label_balance", "init", "loss", "weight_decay")


def audit_into(
    out: Path,
    settings: AuditSettings,
    *,
    watch: Callable[[str], Any] | None,
    blur: bool,
    stage: Callable[[str], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], Verdict]:
    """Run, resume or show again the audit of ``settings`` in the folder ``out``."""
    from residuum.auditing import AuditResult, audit
    from residuum.auditing.artifacts import AuditRun, read_result, write_artifacts
    from residuum.auditing.inputs import check_fit, scale_notes
    from residuum.checkpoints import locate

    inputs, options = _read_inputs(settings), _options(settings)
    check_fit(inputs.released, inputs.train, inputs.control, options["task"])
    scale_notes(inputs.train, inputs.control, inputs.knowledge)  # refuses before a folder is there
    with AuditRun.open(out) as folder:
        request = _request(settings, inputs.hashes, inputs.knowledge)
        folder.claim(request)
        if folder.complete:
            folder.finish()
            summary = read_result(out)
            if say is not None and summary["fit"] is not None:
                say(summary["fit"]["line"])
            return summary, AuditResult.load(out).verdict
        result = audit(
            inputs.released, data=inputs.train, holdout=inputs.control, knowledge=inputs.knowledge,
            hashes=inputs.hashes, store=folder, watch=watch, stage=stage, say=say,
            **options,
        ).replace(subject=inputs.path.name)  # fmt: skip
        summary = write_artifacts(
            folder, result, request=request, sources=inputs.sources,
            file=str(locate(inputs.path)), blur=blur,
        )  # fmt: skip
    return summary, result.verdict


@dataclass(frozen=True)
class _Inputs:
    """What was read; sources: the files it came from; hashes: of these."""

    path: Path
    released: Checkpoint
    train: Dataset | None
    control: Dataset | None
    knowledge: Knowledge
    sources: dict[str, str | None]
    hashes: dict[str, str]


def _read_inputs(settings: AuditSettings) -> _Inputs:
    from residuum.checkpoints import load_checkpoint

    assert settings.checkpoint is not None
    path = Path(settings.checkpoint)
    released = load_checkpoint(path, settings.arch)
    train, train_file = _read(settings.data, "train.npz")
    control, control_file = _read(settings.holdout, "holdout.npz")
    hashes = _hashes(path, train_file, control_file)
    _check_hashes(settings.sha256, hashes)
    knowledge = _knowledge(path, released, settings, train, control)
    files = {"checkpoint": path, "data": train_file, "holdout": control_file}
    sources = {name: None if file is None else str(file.resolve()) for name, file in files.items()}
    return _Inputs(path, released, train, control, knowledge, sources, hashes)


def _options(settings: AuditSettings) -> dict[str, Any]:
    """Arguments of ``audit``; what is wrong is refused before anything is written."""
    from residuum.auditing.budget import seconds_of
    from residuum.auditing.run import attack_config

    found: dict[str, Any] = {
        "budget": 60.0 if settings.budget is None else settings.budget,
        "preset": settings.preset or "residuum", "steps": settings.steps,
        "seed": settings.seed or 0, "subsets": settings.subsets or 500,
        "device": settings.device or "cpu", "task": settings.task or "auto",
        "baselines": settings.baselines is not False,
        "batches": tuple(settings.batches),
    }  # fmt: skip
    seconds_of(found["budget"])
    attack_config(found["preset"], found["steps"], found["seed"], found["device"])
    return found


def _read(name: str | None, own: str) -> tuple[Dataset | None, Path | None]:
    from residuum.records import Dataset
    from residuum.records.data import samples_file

    if name is None:
        return None, None
    path = samples_file(Path(name), own)
    return Dataset.from_npz(path), path


def _knowledge(
    path: Path,
    released: Checkpoint,
    settings: AuditSettings,
    train: Dataset | None,
    control: Dataset | None,
) -> Knowledge:
    """What is granted: a file of it, or the options; "train" and "holdout" name a stored mean."""
    facts = {name: getattr(settings, name) for name in FACTS}
    if settings.knowledge is not None:
        if settings.mean is not None or any(value is not None for value in facts.values()):
            raise InputError(
                "A configuration with a file of knowledge grants exactly that.",
                "Remove its line `knowledge`, or the other facts.",
            )
        return read_knowledge(settings.knowledge)
    source = {"train": train, "holdout": control}
    if settings.mean not in source:
        return grant(path, released, **facts, mean=settings.mean)
    data = source[settings.mean]
    if data is None or data.mean is None:
        raise InputError(
            f"--mean {settings.mean} grants the mean stored in that file; there is none.",
            "Save the mean that was subtracted as array 'mean', or leave --mean out.",
        )
    knowledge = grant(path, released, **facts)
    provenance = {**knowledge.provenance, "mean": settings.mean}
    return knowledge.replace(mean=data.mean.double(), provenance=provenance)


def read_knowledge(path: str) -> Knowledge:
    """A saved Knowledge whose facts are of their own kind, whatever wrote the file."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    from residuum.records import Knowledge

    found = Knowledge.load(path)
    rule = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, strict=True)
    kinds = get_type_hints(Knowledge)
    for name in found.granted:
        try:
            TypeAdapter(kinds[name], config=rule).validate_python(getattr(found, name))
        except ValidationError as problem:
            raise InputError(
                f"{path!r} must hold what an attacker is granted; its {name} is no such thing.",
                "Take knowledge.safetensors of a finished audit.",
            ) from problem
    check_mean(found)
    return found


def _hashes(path: Path, *data: Path | None) -> dict[str, str]:
    from residuum.checkpoints import weights_hash
    from residuum.records.rundir import sha256

    found = {"checkpoint": weights_hash(path)}
    for name, part in zip(("data", "holdout"), data, strict=True):
        if part is not None:
            found[name] = sha256(part)
    return found


def _check_hashes(wanted: dict[str, str], found: dict[str, str]) -> None:
    for name, digest in wanted.items():
        if found.get(name, digest) != digest:
            raise InputError(
                f"The {name} is not the one that this configuration was written for.",
                "Name that file, or remove its line under [sha256].",
            )


def _request(
    settings: AuditSettings, hashes: dict[str, str], knowledge: Knowledge
) -> dict[str, Any]:
    """What decides whether two audits are the same: settings, inputs and knowledge, not paths."""
    from importlib.metadata import version

    from residuum.records.knowledge import TENSORS

    names = ("budget", "preset", "steps", "seed", "subsets", "device", "task", "baselines", "arch")
    plugged = {one.name: one.version for one in plugins.load()}
    return {
        "version": version("residuum"),
        **({"plugins": plugged} if plugged else {}),
        **{name: getattr(settings, name) for name in names},
        **{f"{name}_sha256": digest for name, digest in hashes.items()},
        "batches": [vars(row) for row in settings.batches],
        "knowledge": {name: str(getattr(knowledge, name))[:80] for name in knowledge.granted
                      if name not in TENSORS},
        "provenance": dict(knowledge.provenance),
        "knowledge_sha256": knowledge.digest,
    }  # fmt: skip
