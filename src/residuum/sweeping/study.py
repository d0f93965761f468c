"""The memory of a sweep: an Optuna study in SQLite by default, or wherever its URL says.

A trial is written once, when it has ended, under its own number; one that was under way when the
sweep was stopped has left no trace and is drawn again, with the same settings. The storage holds
settings and figures, never a candidate: those stay in the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from residuum.errors import InputError
from residuum.records import Reconstruction
from residuum.records.rundir import RunDir, digest
from residuum.sweeping.plan import Plan
from residuum.sweeping.trials import COMPLETE, FAILED, PRUNED, Trial

if TYPE_CHECKING:
    import optuna

DATABASE, TRIALS = "study.db", "trials"
POOLED = "reconstruction.safetensors"
DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = ("minimize", "maximize")
PLAN, FACTS = "residuum:plan", "residuum:trial"


class SweepRun(RunDir):
    """An open directory of a sweep: one driver at a time, a file per trial."""

    what, own, summary = "a sweep", ("request.json",), "sweep.json"

    def trial(self, number: int) -> Path:
        """Where a finished trial's candidates are."""
        return self.path / TRIALS / f"{number:06d}.safetensors"

    def state(self, number: int) -> Path:
        """Where a trial that successive halving paused goes on from."""
        return self.path / TRIALS / f"{number:06d}.state.safetensors"

    def load(self, number: int) -> Reconstruction | None:
        """A finished trial's candidates; None where there are none, or none that can be read."""
        return Reconstruction.load_or_none(self.trial(number))


class Study:
    """The trials that have ended, by number."""

    def __init__(self, study: optuna.Study, plan: Plan, store: optuna.storages.RDBStorage) -> None:
        self._study, self._store = study, store
        self._distributions = {name: s.distribution() for name, s in plan.space.items()}
        ended = (_read(one.user_attrs, one.params) for one in study.get_trials(deepcopy=False))
        self.trials = {trial.number: trial for trial in ended if trial is not None}

    def record(self, trial: Trial) -> None:
        """Write an ended trial; a number is written once."""
        import optuna

        if trial.number in self.trials:
            return
        states = optuna.trial.TrialState
        state = {COMPLETE: states.COMPLETE, PRUNED: states.PRUNED, FAILED: states.FAIL}
        facts = {k: v for k, v in trial.to_json().items() if k != "params"}
        self._study.add_trial(
            optuna.trial.create_trial(
                state=state[trial.state],
                values=list(trial.values) or None,
                params=trial.params,
                distributions=self._distributions,
                user_attrs={FACTS: facts},
            )
        )
        self.trials[trial.number] = trial

    def close(self) -> None:
        """Leave the database, its file whole."""
        self._store.engine.dispose()

    def ended(self, state: str | None = None) -> list[Trial]:
        """Trials in the order of their numbers; state: only those that ended so."""
        every = (self.trials[number] for number in sorted(self.trials))
        return [trial for trial in every if state is None or trial.state == state]


def open_study(plan: Plan, request: dict[str, Any], folder: Path, storage: str | None) -> Study:
    """The study that ``request`` describes, begun or gone on with."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = storage or f"sqlite:///{(folder / DATABASE).resolve()}"
    try:
        store = optuna.storages.RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
        study = optuna.create_study(
            storage=store,
            study_name=_name(request),
            directions=DIRECTIONS[: len(plan.objectives)],
            load_if_exists=True,
        )
    except (SQLAlchemyError, ImportError) as problem:
        raise InputError(
            f"The storage must be the URL of a database that answers; {_without_password(url)!r} "
            f"does not ({type(problem).__name__}).",
            "Example: --storage postgresql+psycopg://user@host/name; leave it out for SQLite.",
        ) from problem
    _hasten(store)
    if PLAN not in study.user_attrs:
        study.set_user_attr(PLAN, json.dumps(request, sort_keys=True))
    return Study(study, plan, store)


def _hasten(store: optuna.storages.RDBStorage) -> None:
    """SQLite without waiting for the disk at every trial.

    A kill loses nothing; a power cut may lose the last lines, which the trials' files give back.
    """
    from sqlalchemy import event

    def connected(connection: Any, _: Any) -> None:
        connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=normal")

    if store.engine.name == "sqlite":
        event.listen(store.engine, "connect", connected)
        store.engine.dispose()


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """Complete trials, least first-layer residual first; the lower number breaks a tie."""
    done = (trial for trial in trials if trial.state == COMPLETE)
    return sorted(done, key=lambda trial: (trial.values[0], trial.number))


def front(trials: Iterable[Trial]) -> list[Trial]:
    """Complete trials that no other one beats in every objective, in ranked order."""
    order = ranked(trials)
    kept = order[:1]
    if kept and len(kept[0].values) > 1:
        for trial in order[1:]:  # the residual rises: only a higher agreement earns a place
            if trial.values[1] > kept[-1].values[1]:
                kept.append(trial)
    return kept


def _read(attributes: dict[str, Any], params: dict[str, Any]) -> Trial | None:
    facts = attributes.get(FACTS)
    if not isinstance(facts, dict):  # somebody else's trial in the same study
        return None
    return Trial(**facts | {"params": dict(params), "values": tuple(facts["values"])})


def _name(request: dict[str, Any]) -> str:
    """One study per checkpoint and plan, so that sweeps can share a server."""
    return f"residuum-{digest(request)[:16]}"


def _without_password(url: str) -> str:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url[:60]
