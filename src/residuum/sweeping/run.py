"""A sweep: trials are drawn, handed to an engine, remembered, ranked and pooled.

Ranking looks at the weights alone: the first-layer residual, and agreement between restarts. The
memory is an Optuna study, in SQLite by default or wherever its URL says: settings and figures, never
a candidate; those stay in the run directory. A trial is written once, when it has ended, under its own
number, its candidates first, then its line in the storage; so a sweep that is stopped at any moment
goes on without repeating a finished trial, a file without its line gets the line, and a trial that
was under way has left no trace and is drawn again, with the same settings.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from residuum.attacks import AttackConfig
from residuum.attacks.run import ATTACKS, prepare, resolve
from residuum.checkpoints import as_checkpoint, weights_hash
from residuum.checkpoints.surfaces import SURFACES
from residuum.errors import InputError
from residuum.records import Checkpoint, Dataset, Knowledge, write_atomic, write_json
from residuum.records.data import samples_file
from residuum.records.rundir import digest, environment, sha256
from residuum.sweeping import executors, space
from residuum.sweeping.executors import Engine, Job, Outcome, Resources, Task, judged
from residuum.sweeping.pooling import pooled
from residuum.sweeping.scoring import Sweep, SweepRun, front, page, ranked, rankings
from residuum.sweeping.space import COMPLETE, FAILED, PRUNED, Params, Plan, Trial

DATABASE, POOLED = "study.db", "reconstruction.safetensors"
REPORT, ATTACK, RANKINGS = "report.html", "attack.json", "rankings.json"
PLAN, FACTS = "residuum:plan", "residuum:trial"


@dataclass(frozen=True)
class Progress:
    """done of total trials ended, ``fresh`` of them in this session; best: what ranks the best one."""

    done: int
    total: int
    fresh: int
    failed: int
    best: float | None
    seconds: float


Watcher = Callable[[Progress], None]


def sweep(
    model: Checkpoint | nn.Module | str | Path,
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

    plan: how many trials of which settings, those that have not ended yet are run; out: run
    directory, taken up again where it holds this sweep, and written to; data, holdout: read once the
    ranking is fixed, to score it; engine: local, processes or ray; storage: an Optuna URL, by default
    a SQLite file in ``out``.
    """
    released, knowledge = as_checkpoint(model, arch), knowledge or Knowledge()
    plan, resources = plan or Plan(), resources or Resources()
    named = isinstance(model, str | Path)
    hashed = {"checkpoint_sha256": weights_hash(str(model))} if named else {}
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
        study = Study(plan, whole, out, storage)
        stack.callback(study.close)
        driver = Driver(plan, task, folder, study, watch)
        driver.run(lambda: executors.open_engine(engine, task, resources))
        done = driver.result(request, engine)
        subject = Path(str(model)).name if named else released.arch
        _write(out, done, request, subject)
        if data is not None and done.found is not None:
            train = _samples(data, "train.npz")
            control = None if holdout is None else _samples(holdout, "holdout.npz")
            done = dataclasses.replace(done, scored=rankings(done, out, train, control))
            _write(out, done, request, subject)
    return done


def _check(released: Checkpoint, knowledge: Knowledge, config: AttackConfig) -> None:
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
    """The trials that have ended, by number, in the Optuna study that ``request`` describes.

    One study per checkpoint and plan, so that sweeps can share a server.
    """

    def __init__(
        self, plan: Plan, request: dict[str, Any], folder: Path, storage: str | None
    ) -> None:
        import optuna
        from sqlalchemy.exc import SQLAlchemyError

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        url = storage or f"sqlite:///{(folder / DATABASE).resolve()}"
        try:
            self._store = optuna.storages.RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
            self._study = optuna.create_study(
                storage=self._store,
                study_name=f"residuum-{digest(request)[:16]}",
                directions=space.DIRECTIONS[: len(plan.objectives)],
                load_if_exists=True,
            )
        except (SQLAlchemyError, ImportError) as problem:
            raise InputError(
                f"The storage must be the URL of a database that answers; {_without_password(url)!r} "
                f"does not ({type(problem).__name__}).",
                "Example: --storage postgresql+psycopg://user@host/name; leave it out for SQLite.",
            ) from problem
        self._hasten()
        if PLAN not in self._study.user_attrs:
            self._study.set_user_attr(PLAN, json.dumps(request, sort_keys=True))
        self._distributions = {name: s.distribution() for name, s in plan.space.items()}
        self.trials: dict[int, Trial] = {}
        for one in self._study.get_trials(deepcopy=False):
            facts = one.user_attrs.get(FACTS)
            if isinstance(facts, dict):  # else somebody else's trial in the same study
                facts = facts | {"params": dict(one.params), "values": tuple(facts["values"])}
                self.trials[facts["number"]] = Trial(**facts)

    def _hasten(self) -> None:
        """SQLite without waiting for the disk at every trial.

        A kill loses nothing; a power cut may lose the last lines, which the trials' files give back.
        """
        from sqlalchemy import event

        def connected(connection: Any, _: Any) -> None:
            connection.execute("pragma journal_mode=wal")
            connection.execute("pragma synchronous=normal")

        if self._store.engine.name == "sqlite":
            event.listen(self._store.engine, "connect", connected)
            self._store.engine.dispose()

    def record(self, trial: Trial) -> None:
        """Write an ended trial; a number is written once."""
        import optuna

        if trial.number in self.trials:
            return
        facts, state = trial.to_json(), "FAIL" if trial.state == FAILED else trial.state.upper()
        self._study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState[state],
                values=list(trial.values) or None,
                params=facts.pop("params"),
                distributions=self._distributions,
                user_attrs={FACTS: facts},
            )
        )
        self.trials[trial.number] = trial

    def close(self) -> None:
        """Leave the database, its file whole."""
        self._store.engine.dispose()

    def ended(self, state: str | None = None) -> list[Trial]:
        """In the order of their numbers."""
        found = (trial for _, trial in sorted(self.trials.items()))
        return [trial for trial in found if state in (None, trial.state)]


def _without_password(url: str) -> str:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url[:60]


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
                drawn = space.draw(self.plan.sampler, self.plan.space, wave, self.plan.seed, told)
                params = dict(zip(wave, drawn, strict=True))
                self._adopt(params)
                if params.keys() <= self.study.trials.keys():
                    continue
                engine = engine or connect()
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
        trials, plan = tuple(self.study.ended()), self.plan
        order = ranked(trials)
        parts = (found for trial in order if (found := self.folder.load(trial.number)) is not None)
        settings = {**self.task.config.to_json(), "sweep": plan.to_json()}
        found, pool = pooled(parts, self.task.knowledge, settings)
        if found is not None:
            found.save(self.folder.path / POOLED)
        seconds = time.monotonic() - self.start
        states = Counter(trial.state for trial in trials)
        said = {
            "plan": plan.to_json(),
            "request": request,
            "engine": engine,
            "trials": [trial.to_json() for trial in trials],
            "counts": {state: states[state] for state in (COMPLETE, PRUNED, FAILED)},
            "ranking": [trial.number for trial in order],
            "front": [trial.number for trial in front(trials)],
            "best": order[0].to_json() if order else None,
            "failures": dict(Counter(t.reason for t in trials if t.state == FAILED)),
            "pooled": {
                "runs": pool.runs,
                "candidates": pool.candidates,
                "groups": len(pool),
                "groups_dropped": pool.dropped,
                "consensus": 0 if found is None else found.to_json()["consensus"],
            },
            "session": {"trials": self.fresh, "seconds": seconds, "compute_seconds": self.compute},
            "environment": environment(plan.config.device),
        }
        return Sweep(plan, self.task, trials, found, pool, seconds, self.compute, self.fresh, said)

    def _adopt(self, params: dict[int, Params]) -> None:
        """Files whose line was not written before the sweep was stopped."""
        for number, own in params.items():
            if number not in self.study.trials:
                found = self.folder.load(number)
                if found is not None:
                    self.study.record(judged(number, own, found, self.plan.objectives))

    def _advance(self, engine: Engine, params: dict[int, Params], until: int = 0) -> None:
        """Living trials of a wave up to a step, or to their end; a job that ran out of memory is
        tried again in two halves.
        """
        left = {
            number: own
            for number, own in params.items()
            if number not in self.study.trials
            and (not until or executors.paused_value(self.folder.state(number))[0] < until)
        }
        todo = executors.jobs(left, self.plan.seed, self.plan.batch)
        while todo:
            smaller: list[Job] = []
            for outcome in engine.run(self._resumed(job, until) for job in todo):
                self.compute += outcome.seconds
                if outcome.state is not None:
                    write_atomic(self.folder.state(outcome.job.numbers[0]), outcome.state)
                elif outcome.reason.startswith(executors.MEMORY) and len(outcome.job.numbers) > 1:
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
        """The best of a wave that paused at a step go on, the others end."""
        reached = {
            number: math.inf if value is None else value
            for number in params.keys() - self.study.trials.keys()
            for value in (executors.paused_value(self.folder.state(number))[1],)
        }
        # Trials that an earlier session ended at this rung count among those it began with.
        ended = [t for t in self.study.ended(PRUNED) if t.step == until and t.number in params]
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
        self.study.record(trial)
        self.folder.state(trial.number).unlink(missing_ok=True)
        self.fresh += 1
        if self.watch is not None:
            ended = self.study.trials.values()
            values = [t.values[0] for t in ended if t.state == COMPLETE]
            failed = sum(t.state == FAILED for t in ended)
            self.watch(
                Progress(
                    len(self.study.trials),
                    self.plan.trials,
                    self.fresh,
                    failed,
                    abs(min(values)) if values else None,
                    time.monotonic() - self.start,
                )
            )
