"""A sweep: trials are drawn, handed to an engine, remembered, ranked and pooled.

Ranking looks at the weights alone: the first-layer residual, and agreement between restarts. What is
remembered is an Optuna study, in a journal in the run directory or wherever its URL says: settings and
figures, never a candidate; those stay in the run directory. A trial is written once, when it has ended,
its candidates first, then its line in the storage; so a sweep that is stopped at any moment goes on
without repeating a finished trial, a file without its line gets the line, and a trial that was under
way has left no trace and is drawn again, with the same settings.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from residuum.attacks import AttackConfig
from residuum.attacks.registry import ATTACKS
from residuum.attacks.run import resolve
from residuum.attacks.stationarity.attack import prepare
from residuum.errors import InputError, require_known
from residuum.io.checkpoints import as_network
from residuum.io.release import open_release
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, write_atomic, write_json
from residuum.records.inputs import samples_file
from residuum.records.rundir import digest, environment, sha256
from residuum.surfaces.surface import SURFACES
from residuum.sweeping import executors, space
from residuum.sweeping.executors import (
    ENGINES,
    Engine,
    Job,
    Outcome,
    Resources,
    Task,
    judged,
    outcomes,
)
from residuum.sweeping.pooling import pooled
from residuum.sweeping.scoring import Sweep, SweepRun, page, ranked, rankings
from residuum.sweeping.space import COMPLETE, FAILED, PRUNED, STATES, Params, Plan, Trial

JOURNAL, POOLED = "study.journal", "reconstruction.safetensors"
REPORT, ATTACK, RANKINGS = "report.html", "attack.json", "rankings.json"
PLAN, FACTS = "residuum:plan", "residuum:trial"


@dataclass(frozen=True)
class SweepProgress:
    """done of total trials ended, ``fresh`` of them in this session; best: what ranks the best one."""

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
    plan: Plan | None = None,
    *,
    out: str | Path | None = None,
    data: Dataset | str | Path | None = None,
    holdout: Dataset | str | Path | None = None,
    arch: str | None = None,
    engine: str = "local",
    resources: Resources | None = None,
    storage: str | None = None,
    watch: Watcher | None = None,
) -> Sweep:
    """Try many settings of an attack; rank them and pool what they find by the weights alone.

    plan: how many trials of which settings, those that have not ended yet are run.
    out: run directory, taken up again where it holds this sweep, and written to.
    data, holdout: read once the ranking is fixed, to score it.
    engine: local, processes or ray.
    storage: a database's URL as Optuna takes it, by default a journal in ``out``.
    """
    require_known(engine, ENGINES, "No engine")
    release = open_release(model) if isinstance(model, str | Path) else None
    released, knowledge = as_network(release or model, arch), knowledge or Knowledge()
    plan, resources = plan or Plan(), resources or Resources()
    hashed = {} if release is None else {"checkpoint_sha256": release.sha256}
    request = {**hashed, "arch": released.arch}
    config = resolve(released, knowledge, plan.config)
    _check(released, knowledge, config)
    task = Task(released, knowledge, config, resources.cpus)
    with ExitStack() as stack:
        out = Path(out or stack.enter_context(TemporaryDirectory()))
        folder = stack.enter_context(SweepRun.open(out))
        whole = {
            **request,
            "plan": plan.to_json(),
            "threads": resources.cpus,
            "weights": digest(*released.theta.values()),
            "knowledge": knowledge.digest,
        }
        folder.claim(whole)
        study = Study(plan, stack.enter_context(opened(out / JOURNAL, storage)), whole)
        driver = Driver(plan, task, folder, study, resources, watch)
        driver.run(engine, stack)
        done = driver.result(request, engine)
        subject = Path(str(model)).name if release else released.arch
        _write(out, done, request, subject)
        if data is not None and done.found is not None:
            train = _samples(data, "train.npz")
            control = None if holdout is None else _samples(holdout, "holdout.npz")
            done = dataclasses.replace(done, scored=rankings(done, out, train, control))
            _write(out, done, request, subject)
    return done


def _check(released: Network, knowledge: Knowledge, config: AttackConfig) -> None:
    """What no trial can work with is said once, before the first one: on the CPU, with two candidates."""
    if not space.unmixes(config):
        prepare(
            released, knowledge, dataclasses.replace(config, device="cpu", restarts=1, candidates=2)
        )
        return
    method = ATTACKS[config.objective]
    if why := method.why_not(SURFACES[method.surface](released, knowledge), knowledge):
        raise InputError(f"{method.name} does not apply: {why}.", "Sweep another attack.")


def _samples(data: Dataset | str | Path, name: str) -> Dataset:
    """Read no sooner than here."""
    return data if isinstance(data, Dataset) else Dataset.from_npz(samples_file(Path(data), name))


def _write(out: Path, done: Sweep, request: dict[str, Any], subject: str) -> None:
    """The summary last, before it the report, and what ``residuum score`` reads."""
    if done.found is not None:
        asked = {"settings": done.found.settings, **request}
        files = {POOLED: sha256(out / POOLED)}
        write_json(out / ATTACK, {**done.found.to_json(), "request": asked, "sha256": files})
    if done.scored is not None:
        write_json(out / RANKINGS, done.scored.to_json())
    write_atomic(out / REPORT, page(done, subject))
    write_json(out / SweepRun.summary, done.said)


class Study:
    """Trials of a sweep: an Optuna study in memory, asked for them and told how they ended, and a line
    in the storage for each that has ended.

    A wave is asked for as a whole, after the waves before it were told and before any of its own trials
    is, by a sampler of its own seed. So it depends on the plan and on earlier waves alone: not on who
    finished first, nor on a restart, nor on the machines, and any session draws it again.
    """

    def __init__(
        self, plan: Plan, storage: Any = None, request: dict[str, Any] | None = None
    ) -> None:
        """storage: Optuna's, by default forgetful; request: names the study, so that sweeps can share one."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._plan, self.trials = optuna, plan, dict[int, Trial]()
        self._space = {name: setting.distribution() for name, setting in plan.space.items()}
        directions = space.DIRECTIONS[: len(plan.objectives)]
        self._memory = optuna.create_study(directions=directions)
        self._lines = optuna.create_study(
            storage=storage,
            study_name=f"residuum-{digest(request)[:16]}",
            directions=directions,
            load_if_exists=True,
        )
        if PLAN not in self._lines.user_attrs:
            self._lines.set_user_attr(PLAN, json.dumps(request, sort_keys=True))
        for one in self._lines.get_trials(deepcopy=False):
            if facts := one.user_attrs.get(FACTS):  # else somebody else's trial in the same study
                facts = facts | {"params": dict(one.params), "values": tuple(facts["values"])}
                self.trials[facts["number"]] = Trial(**facts)

    def ask(self, wave: range) -> dict[int, Params]:
        """Settings of the next trials, by number."""
        own = np.random.SeedSequence((self._plan.seed, wave.start)).generate_state(1)
        self._memory.sampler = self._sampler(int(own[0]))
        drawn = {number: dict(self._memory.ask(self._space).params) for number in wave}
        for number in drawn.keys() & self.trials.keys():
            self._told(self.trials[number])
        return drawn

    def _sampler(self, seed: int) -> Any:
        from optuna.samplers import QMCSampler, RandomSampler, TPESampler

        whole = self._space
        if self._plan.sampler == "random":
            return RandomSampler(seed=seed)
        if self._plan.sampler == "tpe":
            return TPESampler(seed=seed, constant_liar=True)

        class Sobol(QMCSampler):
            """Optuna's, which would else learn the space from a first trial drawn at random."""

            def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
                return whole

        with warnings.catch_warnings(action="ignore"):  # Optuna calls it experimental
            return Sobol(seed=seed, scramble=True)

    def tell(self, trial: Trial) -> None:
        """How a trial that was asked for ended."""
        facts, made = trial.to_json(), self._optuna.trial
        line = made.create_trial(
            state=made.TrialState[STATES[trial.state]],
            values=list(trial.values) or None,
            params=facts.pop("params"),
            distributions=self._space,
            user_attrs={FACTS: facts},
        )
        self._lines.add_trial(line)
        self.trials[trial.number] = trial
        self._told(trial)

    def _told(self, trial: Trial) -> None:
        state = self._optuna.trial.TrialState[STATES[trial.state]]
        self._memory.tell(trial.number, list(trial.values) or None, state)

    @property
    def front(self) -> list[int]:
        """Numbers of the complete trials that no other one beats, in the order of the first value."""
        best = sorted(self._memory.best_trials, key=lambda one: (one.values[0], one.number))
        return [one.number for one in best]


@contextmanager
def opened(path: Path, url: str | None) -> Iterator[Any]:
    """An Optuna storage, where ``url`` says or in a journal at ``path``."""
    if url is None:
        yield _journal(path)
        return
    database = _database(url)
    try:
        yield database
    finally:
        database.engine.dispose()


def _journal(path: Path) -> Any:
    """Lines in a file. The run directory is one driver's: a lock in it is of one that was killed, and
    the end of a line that is missing was lost with the power, or to a full disk.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.is_file() and not (held := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, held.rfind(b"\n") + 1)
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except ValueError as problem:
        raise InputError(
            f"The journal {str(path)!r} must be lines of JSON, and is not ({problem}).",
            "Remove it: the files of the trials give their lines back.",
        ) from problem


def _database(url: str) -> Any:
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    except (SQLAlchemyError, ImportError) as problem:
        shown = re.sub("//.*@", "//***@", url)[:80]  # nobody's password
        raise InputError(
            f"The storage must be the URL of a database that answers; {shown!r} does not "
            f"({type(problem).__name__}).",
            "Example: --storage postgresql+psycopg://user@host/name; leave it out for a file.",
        ) from problem


@dataclass
class Driver:
    """One session of a sweep."""

    plan: Plan
    task: Task
    folder: SweepRun
    study: Study
    resources: Resources
    watch: Watcher | None

    def __post_init__(self) -> None:
        self.start, self.fresh, self.compute = time.monotonic(), 0, 0.0
        self.trials = self.study.trials

    def run(self, name: str, stack: ExitStack) -> None:
        """All waves; the engine of this name is started only where a trial is left to run.

        stack: on its way out the engine's end is waited for.
        """
        engine: Engine | None = None
        try:
            for wave in self.plan.waves:
                params = self.study.ask(wave)
                self._adopt(params)
                if params.keys() <= self.trials.keys():
                    continue
                if engine is None:
                    engine = ENGINES[name](self.task, self.resources)
                    stack.callback(engine.ended)
                for until in self.plan.pauses:
                    self._advance(engine, params, until)
                    self._halve(params, until)
                self._advance(engine, params)
        finally:
            if engine is not None:
                engine.close()

    def result(self, request: dict[str, Any], engine: str) -> Sweep:
        """Ranked and pooled, the pooled reconstruction written, and what ``sweep.json`` says of it:
        trials in the order of their numbers, the ranking beside them.
        """
        trials, plan = tuple(trial for _, trial in sorted(self.trials.items())), self.plan
        order = ranked(trials)
        parts = (found for trial in order if (found := self.folder.load(trial.number)) is not None)
        settings = {**self.task.config.to_json(), "sweep": plan.to_json()}
        found, pool = pooled(parts, self.task.knowledge, settings)
        if found is not None:
            found.save(self.folder.path / POOLED)
        states = Counter(trial.state for trial in trials)
        said = {
            "plan": plan.to_json(),
            "request": request,
            "engine": engine,
            "trials": [trial.to_json() for trial in trials],
            "counts": {state: states[state] for state in (COMPLETE, PRUNED, FAILED)},
            "ranking": [trial.number for trial in order],
            "front": self.study.front,
            "best": order[0].to_json() if order else None,
            "failures": dict(Counter(t.reason for t in trials if t.state == FAILED)),
            "pooled": {
                "runs": pool.runs,
                "candidates": pool.candidates,
                "groups": len(pool),
                "groups_dropped": pool.dropped,
                "consensus": 0 if found is None else found.to_json()["consensus"],
            },
            "session": {
                "trials": self.fresh,
                "seconds": time.monotonic() - self.start,
                "compute_seconds": self.compute,
            },
            "environment": environment(plan.config.device),
        }
        return Sweep(plan, self.task, trials, found, pool, said)

    def _adopt(self, params: dict[int, Params]) -> None:
        """Candidates whose line was not written before the sweep was stopped, with the settings that
        they were found with: another version of Optuna may draw others.
        """
        for number in params.keys() - self.trials.keys():
            if (found := self.folder.load(number)) is not None:
                own = {name: found.settings[name] for name in self.plan.space}
                self.study.tell(judged(number, own, found, self.plan.objectives))

    def _advance(self, engine: Engine, params: dict[int, Params], until: int = 0) -> None:
        """Living trials of a wave up to a step, or to their end; a job that ran out of memory is
        tried again in two halves.
        """
        left = {
            number: own
            for number, own in params.items()
            if number not in self.trials
            and (not until or executors.paused_value(self.folder.state(number))[0] < until)
        }
        todo = executors.jobs(left, self.plan.seed, self.plan.batch)
        while todo:
            smaller: list[Job] = []
            resumed = (self._resumed(job, until) for job in todo)
            for outcome in outcomes(engine, resumed, self.resources.retries):
                self.compute += outcome.seconds
                if outcome.state is not None:
                    write_atomic(self.folder.state(outcome.job.numbers[0]), outcome.state)
                elif executors.MEMORY in outcome.reason and len(outcome.job.numbers) > 1:
                    smaller += outcome.job.halves()
                else:
                    self._end(outcome)
            todo = smaller

    def _resumed(self, job: Job, until: int) -> Job:
        """The job with the state it paused in, read when its turn comes."""
        path = self.folder.state(job.numbers[0])
        state = path.read_bytes() if len(job.numbers) == 1 and path.is_file() else None
        return dataclasses.replace(job, state=state, until=until)

    def _halve(self, params: dict[int, Params], until: int) -> None:
        """The best of a wave that paused at a step go on, the others end.

        Optuna's pruners judge a trial by those that reported before it, so that whom they end would
        depend on the engine; and they know no two objectives.
        """
        reached = {
            number: math.inf if value is None else value
            for number in params.keys() - self.trials.keys()
            for value in (executors.paused_value(self.folder.state(number))[1],)
        }
        # Trials that an earlier session ended at this rung count among those it began with.
        before = (self.trials[number] for number in params.keys() & self.trials.keys())
        ended = [t for t in before if t.state == PRUNED and t.step == until]
        kept = math.ceil((len(reached) + len(ended)) / space.ETA)
        for number in sorted(reached, key=lambda n: (reached[n], n))[kept:]:
            value = reached[number] if math.isfinite(reached[number]) else None
            why = f"not among the best at step {until}"
            own = params[number]
            self._record(Trial(number, own, PRUNED, residual=value, step=until, reason=why))

    def _end(self, outcome: Outcome) -> None:
        """Candidates first, then the line in the storage."""
        own = outcome.job.params
        if not outcome.found:
            seconds = outcome.seconds / len(own)
            for number, params in own.items():
                self._record(Trial(number, params, FAILED, reason=outcome.reason, seconds=seconds))
            return
        for (number, params), found in zip(own.items(), outcome.found, strict=True):
            trial = judged(number, params, found, self.plan.objectives)
            if trial.state == COMPLETE:
                found.save(self.folder.trial(number))
            self._record(trial)

    def _record(self, trial: Trial) -> None:
        self.study.tell(trial)
        self.folder.state(trial.number).unlink(missing_ok=True)
        self.fresh += 1
        if self.watch is not None:
            values = [t.values[0] for t in self.trials.values() if t.state == COMPLETE]
            failed = sum(t.state == FAILED for t in self.trials.values())
            best, spent = abs(min(values)) if values else None, time.monotonic() - self.start
            done = len(self.trials), self.plan.trials, self.fresh
            self.watch(SweepProgress(*done, failed, best, spent))
