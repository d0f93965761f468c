"""``rs.defend``: the same network with and without each defense, attacked in every way, in a directory.

``trials/NAME/`` holds what may be released and what was found, ``private/`` the owner's secrets;
``result.json`` is written last. Which defenses are tried does not matter to the folder: another one
can be added to a finished run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from residuum.attacks import PRESETS
from residuum.datasets import load_dataset
from residuum.defenses import Conditions, Defense, Outcome, Training, find, run_trial
from residuum.errors import InputError
from residuum.evaluation.null import MIN_SUBSETS
from residuum.io.checkpoints import save_checkpoint
from residuum.networks import Architecture
from residuum.records import Knowledge, Split, make_directory, write_atomic, write_json
from residuum.records.rundir import RunDir, digest, environment
from residuum.report import defenses as report
from residuum.theory.rows import choose_task
from residuum.training import TrainingConfig
from residuum.verbs.attacking import write_figures

IMAGES = ("digits", "mnist", "cifar10")  # pixels between 0 and 1, as anybody may know
RESULT, WORK = "result.json", "work"
Trial = tuple[str, Defense | None, float | None]
Watcher = Callable[[int, int, str], None]


class DefenseRun(RunDir):
    """An open directory of tried defenses."""

    what, own, summary, asked = "a defense", (WORK, RESULT), RESULT, f"{WORK}/request.json"

    @property
    def started(self) -> bool:
        """Whether a trial is finished."""
        return (self.path / "trials").exists()

    def finished(self, trial: Trial) -> Outcome | None:
        """What a trial found; a damaged one, or one of an earlier form, is tried again."""
        return Outcome.load_or_none(self._folder(trial) / "outcome.safetensors")

    def keep(self, trial: Trial, outcome: Outcome, checkpoint: Any, secret: Any) -> None:
        """A finished trial, its outcome last: its being there says that all is."""
        save_checkpoint(checkpoint, self._folder(trial) / "released.safetensors")
        private = make_directory(self.path / "private")
        private.chmod(0o700)
        write_json(private / f"{_slug(trial)}.json", secret.to_json())
        outcome.save(self._folder(trial) / "outcome.safetensors")

    def finish(self, outcomes: list[Outcome], request: dict[str, Any], device: str) -> None:
        """Tables, pictures and the summary, which completes the run."""
        picture = report.compared(outcomes)
        write_figures(self.path, {"comparison.png": picture})
        write_atomic(self.path / "report.html", report.page(outcomes, picture))
        write_atomic(self.path / "report.md", report.markdown(outcomes))
        tried = [outcome.to_json() for outcome in outcomes]
        said = {"request": request, "defenses": tried, "notes": report.notes(outcomes)}
        write_json(self.path / RESULT, {**said, "environment": environment(device)})
        shutil.rmtree(self.path / WORK, ignore_errors=True)

    def _folder(self, trial: Trial) -> Path:
        return self.path / "trials" / _slug(trial)


def defend(
    data: str | Split,
    defenses: Sequence[str],
    *,
    out: str | Path | None = None,
    arch: str | None = None,
    n: int | None = None,
    data_root: Path | None = None,
    data_seed: int | None = None,
    holdout: int | None = None,
    task: str = "auto",
    steps: int = 800,
    gd_steps: int = 3000,
    lr: float = 0.5,
    attack_steps: int = 800,
    restarts: int = 2,
    releases: int = 16,
    value_range: tuple[float, float] | None = None,
    subsets: int = 500,
    uniqueness: bool = True,
    seed: int = 0,
    device: str = "cpu",
    watch: Watcher | None = None,
) -> list[Outcome]:
    """Try defenses on a network of your data: what comes back before, after, and at which price.

    data: as :func:`load_dataset` takes it, or a split.
    defenses: NAME:STRENGTH each, beside the undefended network, which comes first.
    arch: by default two hidden layers of 100.
    steps: of margin maximisation.
    gd_steps, lr: of gradient descent where a defense needs it.
    releases: noisy ones that an attacker who knows averages.
    value_range: granted to attackers, with the training mean.
    uniqueness: certify what other sets keep.
    out: folder, in which finished defenses are kept.
    """
    trials = _trials(defenses)
    if releases < 1 or subsets < MIN_SUBSETS:
        raise InputError(
            f"--releases starts at 1 and --subsets at {MIN_SUBSETS}; got {releases} and {subsets}.",
            "Correct them.",
        )
    config = TrainingConfig(steps=steps, seed=seed)
    descent = TrainingConfig(method="gd", steps=gd_steps, lr=lr, momentum=0.9, seed=seed)
    task = choose_task(task, Architecture.parse(arch).outputs if arch else 1)
    chosen: dict[str, Any] = {"seed": data_seed, "root": data_root, "holdout": holdout}
    split = data if isinstance(data, Split) else load_dataset(data, n, task=task, **chosen)
    if value_range is None and data in IMAGES:
        value_range = (0.0, 1.0)
    mean = split.train.mean if value_range is not None else None
    # The strongest usual attacker: range, training mean and number of samples are granted.
    knowledge = Knowledge(
        shape=split.train.shape,
        value_range=value_range,
        mean=mean,
        sample_count=len(split.train),
        provenance={} if mean is None else {"mean": "train"},
    )
    attack = replace(PRESETS["residuum"], steps=attack_steps, restarts=restarts)
    attack = replace(attack, seed=seed, device=device)
    name = str(Architecture.parse(arch or f"mlp:{split.train.x[0].numel()}-100-100-1"))
    training = Training(config, descent, len(split.train))
    setting = Conditions(name, split, task, training, attack, knowledge, seed, subsets, releases)
    setting = replace(setting, device=device, certify=uniqueness)
    return _try_all(setting, trials, out, watch)


def _try_all(
    setting: Conditions, trials: list[Trial], out: str | Path | None, watch: Watcher | None
) -> list[Outcome]:
    """Every trial that is not finished yet; what is finished is kept whatever happens."""
    request = _request(setting)
    outcomes = []
    with DefenseRun.open(out) if out is not None else nullcontext() as run:
        if run is not None:
            run.claim(request)
        for done, trial in enumerate(trials):

            def stage(text: str, at: int = done, name: str = label(trial)) -> None:
                if watch is not None:
                    watch(at, len(trials), f"{name}: {text}" if text else name)

            stage("")
            outcome = run.finished(trial) if run is not None else None
            if outcome is None:
                outcome, checkpoint, secret = run_trial(setting, *trial, stage)
                if run is not None:
                    run.keep(trial, outcome, checkpoint, secret)
            outcomes.append(outcome)
        if run is not None:
            run.finish(outcomes, request, setting.device)
    return outcomes


def _request(setting: Conditions) -> dict[str, Any]:
    """What decides whether two runs are the same; which defenses are tried does not."""
    train, holdout = setting.split.train, setting.split.holdout
    return {
        "version": version("residuum"),
        "arch": setting.arch,
        "task": setting.task,
        "data_sha256": digest(train.x, train.y, holdout.x, holdout.y),
        "training": setting.training.config.to_json(),
        "descent": setting.training.descent.to_json(),
        "attack": setting.attack.to_json(),
        "knowledge": dict(setting.knowledge.provenance),
        "seed": setting.seed,
        "value_range": list(setting.knowledge.value_range or ()),
        "subsets": setting.subsets,
        "releases": setting.releases,
        "uniqueness": setting.certify,
    }


def _trials(defenses: Sequence[str]) -> list[Trial]:
    """The undefended network first, then every defense once."""
    trials: list[Trial] = [("none", None, None)]
    for part in defenses:
        found = find(part)
        if found in trials:
            raise InputError(f"{part!r} is named twice.", "Name every defense and strength once.")
        trials.append(found)
    if len(trials) == 1:
        raise InputError("--defenses names no defense.", "Example: --defenses noise:0.5,sgd:10.")
    return trials


def label(trial: Trial) -> str:
    """NAME:STRENGTH."""
    return trial[0] if trial[2] is None else f"{trial[0]}:{trial[2]:g}"


def _slug(trial: Trial) -> str:
    return trial[0] if trial[2] is None else f"{trial[0]}-{trial[2]!r}"
