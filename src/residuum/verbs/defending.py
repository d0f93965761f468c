"""``rs.defend``: train a network with and without each defense, attack all of them, and compare.

In the folder of the result, ``trials/NAME/`` holds the network that may be released and the results of the
attacks. ``private/`` holds the secrets of the owner. ``result.json`` is written last. You can add a defense
to a finished run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, Unpack

from residuum.attacks import Auto
from residuum.datasets import load_dataset
from residuum.defenses import (
    Conditions,
    Defense,
    Outcome,
    Secret,
    Training,
    parse_defense,
    run_trial,
)
from residuum.errors import InputError
from residuum.io.checkpoints import save_checkpoint
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Knowledge, Split, make_directory, write_atomic, write_json
from residuum.records.rundir import RunDir, digest, environment
from residuum.report import defenses as report
from residuum.settings import DefenseRequest
from residuum.theory.rows import choose_task
from residuum.training import TrainingConfig
from residuum.verbs.attacking import write_figures

IMAGES = ("digits", "mnist", "cifar10")  # datasets whose pixel values are between 0 and 1
RESULT, WORK = "result.json", "work"
Trial = tuple[str, Defense | None, float | None]
Watcher = Callable[[int, int, str], None]


class DefenseRun(RunDir):
    """The folder of a comparison of defenses, opened for writing."""

    what, files, summary, request_file = "a defense", (WORK, RESULT), RESULT, f"{WORK}/request.json"

    @property
    def has_work(self) -> bool:
        """Whether the test of at least one defense is finished."""
        return (self.path / "trials").exists()

    def finished(self, trial: Trial) -> Outcome | None:
        """Load the outcome of the test of a defense, None if its file is missing, damaged or too old."""
        return Outcome.load_or_none(self._folder(trial) / "outcome.safetensors")

    def write_trial(self, trial: Trial, outcome: Outcome, network: Network, secret: Secret) -> None:
        """Write the files of a finished trial. The file of the outcome is written after all other files.

        Args:
            trial: Name, defense and strength of the trial.
            outcome: Outcome of the trial.
            network: The network that may be released.
            secret: What the owner keeps secret.
        """
        save_checkpoint(network, self._folder(trial) / "released.safetensors")
        private_folder = make_directory(self.path / "private")
        private_folder.chmod(0o700)
        write_json(private_folder / f"{_slug(trial)}.json", secret.to_json())
        outcome.save(self._folder(trial) / "outcome.safetensors")

    def finish(self, outcomes: list[Outcome], request: dict[str, Any], device: str) -> None:
        """Write the reports, the picture, and last the summary, which marks the comparison as complete.

        Args:
            outcomes: Outcomes of all trials.
            request: Values that identify this comparison, with its settings and the hash of the data.
            device: Device on which the trials were computed.
        """
        picture = report.draw_comparison(outcomes)
        write_figures(self.path, {"comparison.png": picture})
        write_atomic(self.path / "report.html", report.render_page(outcomes, picture))
        write_atomic(self.path / "report.md", report.render_markdown(outcomes))
        result_summary = {
            "request": request,
            "defenses": [outcome.to_json() for outcome in outcomes],
            "notes": report.make_notes(outcomes),
            "environment": environment(device),
        }
        write_json(self.path / RESULT, result_summary)
        shutil.rmtree(self.path / WORK, ignore_errors=True)

    def _folder(self, trial: Trial) -> Path:
        return self.path / "trials" / _slug(trial)


class DefenseOptions(TypedDict, total=False):
    """Names and types of the fields of :class:`DefenseRequest`, for editors and type checkers."""

    arch: str | None
    n: int | None
    data_root: Path | None
    data_seed: int | None
    holdout: int | None
    task: str
    steps: int
    gd_steps: int
    lr: float
    attack_steps: int
    restarts: int
    releases: int
    value_range: tuple[float, float] | None
    subsets: int
    uniqueness: bool
    seed: int
    device: str


def defend(
    data: str | Split,
    defenses: Sequence[str],
    *,
    out: str | Path | None = None,
    watch: Watcher | None = None,
    **options: Unpack[DefenseOptions],
) -> list[Outcome]:
    """Train a network on your data with and without each defense, and attack all of them.

    An ``InputError`` is raised if a defense, a strength or a setting is not valid.

    Args:
        data: Name of a dataset, path of an .npz or a folder, or training and held-out samples as a split.
        defenses: Each defense as text of the form NAME:STRENGTH, such as "noise:0.5".
        out: Folder to write. Defenses that are finished in this folder do not run again.
        watch: Function that receives the number of finished trials, the number of all trials, and a line of
            text about the current trial.
        **options: Settings of :class:`DefenseRequest`, such as ``steps=400``.

    Returns:
        The outcome of the undefended network, then the outcome of each defense.

    Example:
        >>> rs.defend("digits", ["noise:0.5", "shift-rewrite:5"], n=100, out="runs/d")
    """
    request = DefenseRequest(**options)
    trials = _trials(defenses)
    conditions = _conditions(data, request)
    outcomes = []
    with DefenseRun.open(out) if out is not None else nullcontext() as run:
        run_identity = _identity(conditions)
        if run is not None:
            run.begin(run_identity)
        for index, trial in enumerate(trials):

            def stage(text: str, index: int = index, name: str = label(trial)) -> None:
                if watch is not None:
                    watch(index, len(trials), f"{name}: {text}" if text else name)

            stage("")
            outcome = run.finished(trial) if run is not None else None
            if outcome is None:
                outcome, network, secret = run_trial(conditions, *trial, stage)
                if run is not None:
                    run.write_trial(trial, outcome, network, secret)
            outcomes.append(outcome)
        if run is not None:
            run.finish(outcomes, run_identity, request.device)
    return outcomes


def _conditions(data: str | Split, request: DefenseRequest) -> Conditions:
    """Collect the data and settings that all tests of defenses share, with the attacker's knowledge."""
    seed, arch = request.seed, request.arch
    task = choose_task(request.task, Architecture.parse(arch).outputs if arch else 1)
    split = data if isinstance(data, Split) else _load(data, request, task)
    train = split.train
    value_range = request.value_range
    if value_range is None and data in IMAGES:
        value_range = (0.0, 1.0)
    known_mean = train.mean if value_range is not None else None
    descent_settings = TrainingConfig(
        method="gd", steps=request.gd_steps, lr=request.lr, momentum=0.9, seed=seed
    )
    attack = Auto(
        steps=request.attack_steps,
        restarts=request.restarts,
        seed=seed,
        device=request.device,
    )
    return Conditions(
        arch=str(Architecture.parse(arch or f"mlp:{train.x[0].numel()}-100-100-1")),
        split=split,
        task=task,
        training=Training(
            TrainingConfig(steps=request.steps, seed=seed), descent_settings, len(train)
        ),
        attack=attack,
        knowledge=Knowledge(
            shape=train.shape,
            value_range=value_range,
            mean=known_mean,
            sample_count=len(train),
            provenance={} if known_mean is None else {"mean": "train"},
        ),
        seed=seed,
        subsets=request.subsets,
        releases=request.releases,
        device=request.device,
        certify=request.uniqueness,
    )


def _load(data: str, request: DefenseRequest, task: str) -> Split:
    seed, root, holdout = request.data_seed, request.data_root, request.holdout
    return load_dataset(data, request.n, seed=seed, root=root, holdout=holdout, task=task)


def _identity(conditions: Conditions) -> dict[str, Any]:
    """Return the values that identify a comparison.

    Defenses are not among them, so you can add some later.
    """
    train, holdout = conditions.split.train, conditions.split.holdout
    return {
        "version": version("residuum"),
        "arch": conditions.arch,
        "task": conditions.task,
        "data_sha256": digest(train.x, train.y, holdout.x, holdout.y),
        "training": conditions.training.config.to_json(),
        "descent": conditions.training.descent.to_json(),
        "attack": conditions.attack.to_json(),
        "knowledge": dict(conditions.knowledge.provenance),
        "seed": conditions.seed,
        "value_range": list(conditions.knowledge.value_range or ()),
        "subsets": conditions.subsets,
        "releases": conditions.releases,
        "uniqueness": conditions.certify,
    }


def _trials(defenses: Sequence[str]) -> list[Trial]:
    """List the networks to train and attack: first without a defense, then with each defense."""
    trials: list[Trial] = [("none", None, None)]
    for text in defenses:
        trial = parse_defense(text)
        if trial in trials:
            raise InputError(
                f"Each defense with its strength must be named only once; got {text!r} twice.",
                f"Pass {text!r} once.",
            )
        trials.append(trial)
    if len(trials) == 1:
        raise InputError(
            "The option --defenses must name at least one defense; got no defense.",
            "Example: --defenses noise:0.5,sgd:10.",
        )
    return trials


def label(trial: Trial) -> str:
    """Return the name and the strength of a defense as text, such as "noise:0.5"."""
    return trial[0] if trial[2] is None else f"{trial[0]}:{trial[2]:g}"


def _slug(trial: Trial) -> str:
    return trial[0] if trial[2] is None else f"{trial[0]}-{trial[2]!r}"
