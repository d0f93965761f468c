"""``rs.sweep``: draw the settings of the trials, run the trials, and record, rank and pool their results.

The ranking uses the weights alone: the first-layer residual, and the agreement between restarts.

A finished trial is written in two steps: first a file with its candidates, then a record in the study
(the list of all trials). So a sweep that was stopped at any moment continues without repeating a finished
trial. If a trial has a file but no record in the study, the record is added. A trial that was running when
the sweep stopped leaves no file. This trial runs again with the same settings.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from torch import nn

from residuum.attacks import Attack
from residuum.attacks.stationarity.attack import Stationarity
from residuum.errors import InputError, require_known
from residuum.io.checkpoints import as_network
from residuum.io.release import open_release
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, write_atomic, write_json
from residuum.records.inputs import find_samples_file
from residuum.records.rundir import digest, environment, sha256
from residuum.surfaces.surface import SURFACES
from residuum.sweeping.executors import (
    ENGINES,
    MEMORY,
    Engine,
    Job,
    Outcome,
    Task,
    judge_trial,
    paused_value,
    run_jobs,
    split_into_jobs,
)
from residuum.sweeping.pooling import pool_trials
from residuum.sweeping.scoring import Sweep, SweepRun, rank_trials, render_report, score_rankings
from residuum.sweeping.space import (
    COMPLETE,
    ETA,
    FAILED,
    PRUNED,
    Params,
    SweepOptions,
    SweepRequest,
    Trial,
)
from residuum.sweeping.study import Study, open_storage

JOURNAL, POOLED = "study.journal", "reconstruction.safetensors"
REPORT, ATTACK, RANKINGS = "report.html", "attack.json", "rankings.json"


@dataclass(frozen=True)
class SweepProgress:
    """The progress of a sweep (an attack that is run with many settings).

    Attributes:
        done: Number of finished trials.
        total: Number of all trials.
        fresh: Number of trials that finished since the sweep was started or continued.
        failed: Number of failed trials.
        best: Best value so far of the statistic by which trials are ranked. None if no trial is complete.
        seconds: Time since the sweep was started or continued.
    """

    done: int
    total: int
    fresh: int
    failed: int
    best: float | None
    seconds: float


Watcher = Callable[[SweepProgress], None]


def sweep(
    model: Network | nn.Module | str | Path,
    knowledge: Knowledge | None = None,
    *,
    out: str | Path | None = None,
    data: Dataset | str | Path | None = None,
    holdout: Dataset | str | Path | None = None,
    arch: str | None = None,
    watch: Watcher | None = None,
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Run an attack with many settings (trials). Rank the trials, and combine their reconstructions.

    An ``InputError`` is raised if an option is not valid or if the attack does not apply.

    Args:
        model: The released network, or its file.
        knowledge: What the attacker knows in addition to the weights.
        out: Folder to write. An interrupted sweep there is continued.
        data: Training samples, to measure how good the ranking is. The samples are read after the ranking
            is fixed.
        holdout: Samples that the network never saw, to compare the number of matches with chance.
        arch: Architecture of the network, if the file of the weights does not hold the architecture.
        watch: Function that receives the progress after every trial.
        **options: Settings of :class:`SweepRequest`, such as ``trials=32``.

    Returns:
        The ranked trials and the pooled reconstruction.

    Example:
        >>> rs.sweep("model.safetensors", trials=32, sampler="sobol", out="runs/s").order[0].params
    """
    request, knowledge = SweepRequest(**options), knowledge or Knowledge()
    require_known(request.engine, ENGINES, "There is no engine")
    release = open_release(model) if isinstance(model, str | Path) else None
    network = as_network(release or model, arch)
    subject = Path(str(model)).name if release else network.arch
    network_source = {"arch": network.arch}
    if release is not None:
        network_source = {"checkpoint_sha256": release.sha256, **network_source}
    attack = request.attack.resolve_settings(network, knowledge)
    _check(network, knowledge, attack)
    task = Task(network, knowledge, attack, request.cpus)
    with ExitStack() as stack:
        out = Path(out or stack.enter_context(TemporaryDirectory()))
        sweep_run = stack.enter_context(SweepRun.open(out))
        sweep_identity = {
            **network_source,
            "plan": request.plan(),
            "threads": request.cpus,
            "weights": digest(*network.theta.values()),
            "knowledge": knowledge.digest,
        }
        sweep_run.begin(sweep_identity)
        storage = stack.enter_context(open_storage(out / JOURNAL, request.storage))
        driver = Driver(request, task, sweep_run, Study(request, storage, sweep_identity), watch)
        driver.run()
        finished_sweep = driver.result(network_source)
        _write(out, finished_sweep, network_source, subject)
        if data is not None and finished_sweep.reconstruction is not None:
            training_samples = _samples(data, "train.npz")
            holdout_samples = None if holdout is None else _samples(holdout, "holdout.npz")
            finished_sweep = dataclasses.replace(
                finished_sweep,
                scored=score_rankings(finished_sweep, out, training_samples, holdout_samples),
            )
            _write(out, finished_sweep, network_source, subject)
    return finished_sweep


def _check(network: Network, knowledge: Knowledge, attack: Attack) -> None:
    """Raise an error before a sweep starts if its attack does not apply to the network."""
    if isinstance(attack, Stationarity):
        # The solver checks the inputs when it is created. With two candidates on the CPU, this is fast.
        attack.changed(device="cpu", restarts=1, candidates=2).solver(network, knowledge)
        return
    if reason := attack.why_not(SURFACES[attack.surface](network, knowledge), knowledge):
        raise InputError(
            f"The attack '{attack.name}' does not apply to this network: {reason}.",
            "Run the sweep with another attack.",
        )


def _samples(data: Dataset | str | Path, name: str) -> Dataset:
    return (
        data if isinstance(data, Dataset) else Dataset.from_npz(find_samples_file(Path(data), name))
    )


def _write(out: Path, done: Sweep, source: dict[str, Any], subject: str) -> None:
    """Write the summary of the attack (for ``residuum score``), the report and the summary of the sweep."""
    if done.reconstruction is not None:
        attack_summary = {
            **done.reconstruction.to_json(),
            "request": {"settings": done.reconstruction.settings, **source},
            "sha256": {POOLED: sha256(out / POOLED)},
        }
        write_json(out / ATTACK, attack_summary)
    if done.scored is not None:
        write_json(out / RANKINGS, done.scored.to_json())
    write_atomic(out / REPORT, render_report(done, subject))
    write_json(out / SweepRun.summary, done.summary)


@dataclass
class Driver:
    """Runs all unfinished trials (attacks with different settings) of a sweep, and records the results."""

    request: SweepRequest
    task: Task
    folder: SweepRun
    study: Study
    watch: Watcher | None

    def __post_init__(self) -> None:
        self.start, self.fresh, self.compute = time.monotonic(), 0, 0.0
        self.trials = self.study.trials

    def run(self) -> None:
        """Run all trials in waves (groups of trials whose settings are drawn together).

        The engine is started only if a trial remains to be run.
        """
        with ExitStack() as stack:
            engine: Engine | None = None
            for wave in self.request.waves:
                params = self.study.ask(wave)
                self._restore_records(params)
                if params.keys() <= self.trials.keys():
                    continue
                if engine is None:
                    engine = ENGINES[self.request.engine](self.task, self.request)
                    stack.callback(engine.close)
                for until in self.request.pauses:
                    self._advance(engine, params, until)
                    self._halve(params, until)
                self._advance(engine, params)

    def result(self, source: dict[str, Any]) -> Sweep:
        """Rank the trials (attacks with different settings), combine their results, and return the sweep."""
        trials = tuple(trial for _, trial in sorted(self.trials.items()))
        order, plan = rank_trials(trials), self.request.plan()
        saved_results = (self.folder.load(trial.number) for trial in order)
        reconstructions = (result for result in saved_results if result is not None)
        settings = {**self.task.attack.to_json(), "sweep": plan}
        consensus, pool = pool_trials(reconstructions, self.task.knowledge, settings)
        if consensus is not None:
            consensus.save(self.folder.path / POOLED)
        state_counts = Counter(trial.state for trial in trials)
        sweep_summary = {
            "plan": plan,
            "request": source,
            "engine": self.request.engine,
            "trials": [trial.to_json() for trial in trials],
            "counts": {state: state_counts[state] for state in (COMPLETE, PRUNED, FAILED)},
            "ranking": [trial.number for trial in order],
            "front": self.study.front,
            "best": order[0].to_json() if order else None,
            "failures": dict(Counter(t.reason for t in trials if t.state == FAILED)),
            "pooled": {
                "runs": pool.runs,
                "candidates": pool.candidates,
                "groups": len(pool),
                "groups_dropped": pool.dropped,
                "consensus": 0 if consensus is None else consensus.to_json()["consensus"],
            },
            "session": {
                "trials": self.fresh,
                "seconds": time.monotonic() - self.start,
                "compute_seconds": self.compute,
            },
            "environment": environment(self.request.attack.device),
        }
        return Sweep(self.request, self.task, trials, consensus, pool, sweep_summary)

    def _restore_records(self, params: dict[int, Params]) -> None:
        """Record finished trials that have a file of candidates but are missing in the study.

        Such trials exist if the sweep was stopped after it wrote the file of a trial, and before it recorded
        the trial in the study. The settings of a trial are read from its file, because another version of
        Optuna may draw other settings.
        """
        for number in params.keys() - self.trials.keys():
            if (saved := self.folder.load(number)) is not None:
                varied_settings = {name: saved.settings[name] for name in self.request.space}
                self.study.tell(
                    judge_trial(number, varied_settings, saved, self.request.objectives)
                )

    def _advance(self, engine: Engine, params: dict[int, Params], until: int = 0) -> None:
        """Run the trials in ``params`` until the step ``until`` of the attack, or to their end if it is 0.

        If a job with several trials runs out of memory, the job is split into two smaller jobs.
        """
        waiting_params = {
            number: values
            for number, values in params.items()
            if number not in self.trials
            and (not until or paused_value(self.folder.state(number))[0] < until)
        }
        waiting_jobs = split_into_jobs(waiting_params, self.request.seed, self.request.batch)
        while waiting_jobs:
            smaller_jobs: list[Job] = []
            resumed_jobs = (self._resume(job, until) for job in waiting_jobs)
            for outcome in run_jobs(engine, resumed_jobs, self.request.retries):
                self.compute += outcome.seconds
                if outcome.state is not None:
                    write_atomic(self.folder.state(outcome.job.numbers[0]), outcome.state)
                elif MEMORY in outcome.reason and len(outcome.job.numbers) > 1:
                    smaller_jobs += outcome.job.split_in_halves()
                else:
                    self._end(outcome)
            waiting_jobs = smaller_jobs

    def _resume(self, job: Job, until: int) -> Job:
        """Create a job that continues the saved state of a trial to the step ``until``."""
        state_file = self.folder.state(job.numbers[0])
        saved_state = (
            state_file.read_bytes() if len(job.numbers) == 1 and state_file.is_file() else None
        )
        return dataclasses.replace(job, state=saved_state, until=until)

    def _halve(self, params: dict[int, Params], until: int) -> None:
        """Stop the worst trials among those in ``params``, which have paused at the step ``until``.

        We do not use the pruners of Optuna. A pruner compares a trial with the trials that reported before
        this trial, so the result would depend on the order in which trials end. Pruners also do not support
        two objectives.
        """
        residual_by_trial = {
            number: paused_value(self.folder.state(number))[1]
            for number in params.keys() - self.trials.keys()
        }
        # Also count the trials that the sweep had stopped at this step before it was interrupted.
        recorded_trials = (self.trials[number] for number in params.keys() & self.trials.keys())
        stopped_count = sum(t.state == PRUNED and t.step == until for t in recorded_trials)
        survivor_count = math.ceil((len(residual_by_trial) + stopped_count) / ETA)
        numbers_best_first = sorted(
            residual_by_trial,
            key=lambda number: (
                math.inf if residual_by_trial[number] is None else residual_by_trial[number],
                number,
            ),
        )
        reason = f"not among the best at step {until}"
        for number in numbers_best_first[survivor_count:]:
            trial = Trial(
                number,
                params[number],
                PRUNED,
                residual=residual_by_trial[number],
                step=until,
                reason=reason,
            )
            self._record(trial)

    def _end(self, outcome: Outcome) -> None:
        """Save the reconstructed samples of finished trials (attacks), and record the trials as finished."""
        params = outcome.job.params
        if not outcome.reconstructions:
            seconds = outcome.seconds / len(params)
            for number, values in params.items():
                trial = Trial(number, values, FAILED, reason=outcome.reason, seconds=seconds)
                self._record(trial)
            return
        for number, reconstruction in zip(params, outcome.reconstructions, strict=True):
            trial = judge_trial(number, params[number], reconstruction, self.request.objectives)
            if trial.state == COMPLETE:
                reconstruction.save(self.folder.trial(number))
            self._record(trial)

    def _record(self, trial: Trial) -> None:
        self.study.tell(trial)
        self.folder.state(trial.number).unlink(missing_ok=True)
        self.fresh += 1
        if self.watch is not None:
            completed_values = [t.values[0] for t in self.trials.values() if t.state == COMPLETE]
            progress = SweepProgress(
                done=len(self.trials),
                total=self.request.trials,
                fresh=self.fresh,
                failed=sum(t.state == FAILED for t in self.trials.values()),
                best=abs(min(completed_values)) if completed_values else None,
                seconds=time.monotonic() - self.start,
            )
            self.watch(progress)
