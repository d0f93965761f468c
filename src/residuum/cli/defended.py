"""The run directory of ``residuum defend``: one folder per trial, finished ones never repeated.

``trials/NAME/`` holds what may be released and what was found, ``private/`` the owner's secrets;
``result.json`` is written last. Which defenses are tried does not matter to the folder: another one
can be added to a finished run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residuum.defenses import Defense, Outcome, Setting

Trial = tuple[str, "Defense | None", float | None]


def try_all(out: Path, setting: Setting, trials: list[Trial], watch: Any) -> list[Outcome]:
    """Every trial that is not finished yet; what is finished is kept whatever happens."""
    from residuum.auditing.folder import open_folder

    with open_folder(out) as folder:
        request = _request(setting)
        folder.claim(request)
        outcomes = []
        for done, trial in enumerate(trials):
            if watch is not None:
                watch(done, len(trials), label(trial))
            outcomes.append(
                _finished(out, trial) or _try(out, setting, trial, watch, done, len(trials))
            )
        _write(out, outcomes, request, setting.device)
        folder.finish()
    return outcomes


def _try(out: Path, setting: Setting, trial: Trial, watch: Any, done: int, of: int) -> Outcome:
    from residuum.checkpoints import save_checkpoint
    from residuum.defenses import run_trial
    from residuum.records import make_directory, write_json

    def stage(text: str) -> None:
        if watch is not None:
            watch(done, of, f"{label(trial)}: {text}")

    outcome, checkpoint, secret = run_trial(setting, *trial, stage)
    folder = out / "trials" / _slug(trial)
    save_checkpoint(checkpoint, folder / "released.safetensors")
    private = make_directory(out / "private")
    private.chmod(0o700)
    write_json(private / f"{_slug(trial)}.json", secret.to_json())
    outcome.save(folder / "outcome.safetensors")  # last: its being there says that all is
    return outcome


def _finished(out: Path, trial: Trial) -> Outcome | None:
    """What a trial found; a damaged one is tried again."""
    from residuum.defenses import Outcome

    return Outcome.load_or_none(out / "trials" / _slug(trial) / "outcome.safetensors")


def _write(out: Path, outcomes: list[Outcome], request: dict[str, Any], device: str) -> None:
    from residuum.records import write_atomic, write_json
    from residuum.records.environment import environment
    from residuum.report import defenses as report

    picture = report.compared(outcomes)
    if picture is not None:
        write_atomic(out / "comparison.png", picture)
    write_atomic(out / "report.html", report.page(outcomes, picture))
    write_atomic(out / "report.md", report.markdown(outcomes))
    write_json(out / "result.json", {
        "request": request,
        "defenses": [outcome.to_json() for outcome in outcomes],
        "notes": report.notes(outcomes),
        "environment": environment(device),
    })  # fmt: skip


def _request(setting: Setting) -> dict[str, Any]:
    """What decides whether two runs are the same; which defenses are tried does not."""
    import hashlib
    from importlib.metadata import version

    digest = hashlib.sha256()
    for part in (setting.split.train, setting.split.holdout):
        for tensor in (part.x, part.y):
            digest.update(tensor.detach().double().contiguous().numpy().tobytes())
    return {
        "version": version("residuum"), "arch": setting.arch, "task": setting.task,
        "data_sha256": digest.hexdigest(), "training": setting.training.config.to_json(),
        "descent": setting.training.descent.to_json(), "attack": setting.attack.to_json(),
        "knowledge": dict(setting.knowledge.provenance), "seed": setting.seed,
        "value_range": list(setting.knowledge.value_range or ()), "subsets": setting.subsets,
        "releases": setting.releases, "uniqueness": setting.certify,
    }  # fmt: skip


def label(trial: Trial) -> str:
    """NAME:STRENGTH."""
    return trial[0] if trial[2] is None else f"{trial[0]}:{trial[2]:g}"


def _slug(trial: Trial) -> str:
    return trial[0] if trial[2] is None else f"{trial[0]}-{trial[2]!r}"
