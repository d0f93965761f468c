"""The driver of a sweep: draws trials, hands them to an engine, remembers, ranks and pools.

Ranking looks at the weights alone: the first-layer residual, and agreement between restarts. Order of
writing: a trial's candidates, then its line in the storage; so a sweep that is stopped at any moment
goes on without repeating a finished trial, and a file without its line gets the line.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residuum.attacks.run import prepare, resolve
from residuum.records import Checkpoint, Knowledge, Reconstruction, write_atomic
from residuum.records.rundir import digest
from residuum.sweeping.engines import Engine, Resources, open_engine
from residuum.sweeping.plan import ETA, Plan
from residuum.sweeping.pooling import Pool, pooled
from residuum.sweeping.space import Params, draw
from residuum.sweeping.study import POOLED, Study, SweepRun, front, open_study, ranked
from residuum.sweeping.trials import (
    COMPLETE,
    FAILED,
    MEMORY,
    PRUNED,
    Job,
    Outcome,
    Task,
    Trial,
    job_of,
    jobs,
    judged,
    paused_value,
)

if TYPE_CHECKING:
    from residuum.sweeping.scoring import Rankings


@dataclass(frozen=True)
class Progress:
    """done of total trials ended, ``fresh`` of them in this session; best: least residual so far."""

    done: int
    total: int
    fresh: int
    failed: int
    best: float | None
    seconds: float

    @property
    def per_minute(self) -> float:
        """Trials per minute in this session."""
        return 60 * self.fresh / max(self.seconds, 1e-9)

    @property
    def remaining(self) -> float | None:
        """Estimated seconds to the end; None before the first trial has ended."""
        return self.seconds / self.fresh * (self.total - self.done) if self.fresh else None


Watcher = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class Sweep:
    """A finished sweep. order: complete trials, best first, by weights alone; compute: seconds of
    all workers together in this session, seconds: of the wall clock; said: what ``sweep.json`` says;
    scored: both rankings, where data was given.
    """

    plan: Plan
    task: Task
    trials: tuple[Trial, ...]
    found: Reconstruction | None
    pool: Pool
    seconds: float
    compute: float
    fresh: int
    said: dict[str, Any] = field(default_factory=dict)
    scored: Rankings | None = None

    @property
    def order(self) -> list[Trial]:
        """Complete trials, least residual first."""
        return ranked(self.trials)

    @property
    def front(self) -> list[Trial]:
        """Trials that none beats: one, or several where two objectives compete."""
        return front(self.trials)


def run_trials(
    checkpoint: Checkpoint,
    knowledge: Knowledge | None = None,
    plan: Plan | None = None,
    *,
    out: str | Path,
    engine: str = "local",
    resources: Resources | None = None,
    storage: str | None = None,
    identity: dict[str, Any] | None = None,
    watch: Watcher | None = None,
) -> Sweep:
    """Run the trials of ``plan`` that have not ended yet, then rank and pool all of them.

    out: run directory, taken up again where it holds this sweep; storage: an Optuna URL, by default
    a SQLite file in it; identity: more that tells sweeps apart, such as a hash of the checkpoint.
    """
    knowledge, plan, resources = knowledge or Knowledge(), plan or Plan(), resources or Resources()
    config = resolve(checkpoint, knowledge, plan.config)
    # What no trial can work with is said once, before the first one: on the CPU, with two candidates.
    prepare(
        checkpoint, knowledge, dataclasses.replace(config, device="cpu", restarts=1, candidates=2)
    )
    task = Task(checkpoint, knowledge, config, resources.cpus)
    request = {
        "plan": plan.to_json(), "arch": checkpoint.arch, "threads": resources.cpus,
        "weights": digest(*checkpoint.theta.values()), "knowledge": knowledge.digest,
        **(identity or {}),
    }  # fmt: skip
    with SweepRun.open(out) as folder:
        folder.claim(request)
        study = open_study(plan, request, folder.path, storage)
        try:
            driver = Driver(plan, task, folder, study, watch)
            driver.run(lambda: open_engine(engine, task, resources))
            return driver.result()
        finally:
            study.close()


class Driver:
    """One session of a sweep."""

    def __init__(
        self, plan: Plan, task: Task, folder: SweepRun, study: Study, watch: Watcher | None
    ) -> None:
        self.plan, self.task, self.folder, self.study = plan, task, folder, study
        self.watch, self.start = watch, time.monotonic()
        self.fresh, self.compute = 0, 0.0

    def run(self, connect: Callable[[], Engine]) -> None:
        """All waves; an engine is started only where a trial is left to run."""
        engine: Engine | None = None
        try:
            for wave in self.plan.waves:
                told = [t for t in self.study.ended() if t.number < wave.start]
                drawn = draw(self.plan.sampler, self.plan.space, wave, self.plan.seed, told)
                params = dict(zip(wave, drawn, strict=True))
                self._adopt(params)
                left = [number for number in wave if number not in self.study.trials]
                if not left:
                    continue
                engine = engine or connect()
                for until in self.plan.pauses:
                    self._rung(engine, params, until)
                left = [number for number in wave if number not in self.study.trials]
                self._finish(engine, self._jobs(left, params))
        finally:
            if engine is not None:
                engine.close()

    def result(self) -> Sweep:
        """Ranked and pooled; the pooled reconstruction is written."""
        order = ranked(self.study.ended())
        parts = (found for trial in order if (found := self.folder.load(trial.number)) is not None)
        settings = {**self.task.config.to_json(), "sweep": self.plan.to_json()}
        found, pool = pooled(parts, self.task.knowledge, settings)
        if found is not None:
            found.save(self.folder.path / POOLED)
        return Sweep(
            self.plan, self.task, tuple(self.study.ended()), found, pool,
            time.monotonic() - self.start, self.compute, self.fresh,
        )  # fmt: skip

    def _jobs(self, numbers: list[int], params: dict[int, Params]) -> list[Job]:
        return jobs(numbers, [params[n] for n in numbers], self.plan.seed, self.plan.batch)

    def _adopt(self, params: dict[int, Params]) -> None:
        """Files whose line was not written before the sweep was stopped."""
        for number, own in params.items():
            if number not in self.study.trials:
                found = self.folder.load(number)
                if found is not None:
                    self.study.record(judged(number, own, found, self.plan.objectives))

    def _finish(self, engine: Engine, todo: list[Job]) -> None:
        """Run jobs to their end; one that ran out of memory is tried again in two halves."""
        while todo:
            smaller: list[Job] = []
            for outcome in engine.run(map(self._resumed, todo)):
                self.compute += outcome.seconds
                if outcome.reason.startswith(MEMORY) and len(outcome.job.numbers) > 1:
                    smaller += _halves(outcome.job, self.plan.seed)
                else:
                    self._end(outcome)
            todo = smaller

    def _resumed(self, job: Job, until: int = 0) -> Job:
        """The job with the state it paused in, read when its turn comes."""
        path = self.folder.state(job.numbers[0])
        state = path.read_bytes() if len(job.numbers) == 1 and path.is_file() else None
        return dataclasses.replace(job, state=state, until=until)

    def _rung(self, engine: Engine, params: dict[int, Params], until: int) -> None:
        """All living trials of a wave up to a step; the best of them go on, the others end."""
        reached: dict[int, float] = {}
        todo = []
        for number in params:
            if number in self.study.trials:
                continue
            path = self.folder.state(number)
            step, value = paused_value(path) if path.is_file() else (0, None)
            if step >= until:
                reached[number] = math.inf if value is None else value
            else:
                todo.append(number)
        for outcome in engine.run(self._resumed(job, until) for job in self._jobs(todo, params)):
            self.compute += outcome.seconds
            if outcome.state is None:  # it crashed, or all its restarts diverged
                self._end(outcome)
                continue
            number = outcome.job.numbers[0]
            path = write_atomic(self.folder.state(number), outcome.state)
            value = paused_value(path)[1]
            reached[number] = math.inf if value is None else value
        self._halve(reached, params, until)

    def _halve(self, reached: dict[int, float], params: dict[int, Params], until: int) -> None:
        # Trials that an earlier session ended at this rung count among those it began with.
        ended = [t for t in self.study.ended(PRUNED) if t.step == until and t.number in params]
        kept = math.ceil((len(reached) + len(ended)) / ETA)
        for number in sorted(reached, key=lambda n: (reached[n], n))[kept:]:
            value = reached[number] if math.isfinite(reached[number]) else None
            trial = Trial(number, params[number], PRUNED, residual=value, step=until)
            self._record(dataclasses.replace(trial, reason=f"not among the best at step {until}"))

    def _end(self, outcome: Outcome) -> None:
        """Candidates first, then the line in the storage."""
        job = outcome.job
        if not outcome.found:
            for number, own in zip(job.numbers, job.params, strict=True):
                seconds = outcome.seconds / len(job.numbers)
                self._record(Trial(number, own, FAILED, reason=outcome.reason, seconds=seconds))
            return
        for number, own, found in zip(job.numbers, job.params, outcome.found, strict=True):
            trial = judged(number, own, found, self.plan.objectives)
            if trial.state == COMPLETE:
                found.save(self.folder.trial(number))
            self._record(trial)

    def _record(self, trial: Trial) -> None:
        self.study.record(trial)
        self.folder.state(trial.number).unlink(missing_ok=True)
        self.fresh += 1
        if self.watch is not None:
            ended = self.study.trials.values()
            values = [t.values[0] for t in ended if t.state == COMPLETE]
            failed = sum(t.state == FAILED for t in ended)
            self.watch(
                Progress(
                    len(self.study.trials), self.plan.trials, self.fresh, failed,
                    min(values, default=None), time.monotonic() - self.start,
                )
            )  # fmt: skip


def _halves(job: Job, seed: int) -> list[Job]:
    """The job in two."""
    size = -(-len(job.numbers) // 2)
    parts = (slice(0, size), slice(size, None))
    return [job_of(job.numbers[part], job.params[part], seed) for part in parts]
