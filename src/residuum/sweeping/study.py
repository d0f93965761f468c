"""The memory of a sweep: which trials are drawn, and how those that ended did.

It is an Optuna study, in a journal in the run directory or in the database of ``storage``. It holds
settings and figures, never a candidate.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from residuum.errors import InputError
from residuum.records.rundir import digest
from residuum.sweeping.space import DIRECTIONS, STATES, Params, SweepRequest, Trial

REQUEST, FACTS = "residuum:plan", "residuum:trial"  # attributes of a stored study and of its trials


class Study:
    """Trials of a sweep: an Optuna study in memory that draws them, and a stored one that records those
    that ended.

    A wave is drawn as a whole, by a sampler with a seed of its own, after all earlier waves have ended.
    So it depends on the request and on earlier waves alone: not on which trial ended first, nor on a
    restart, nor on the machines, and any session draws it again.
    """

    def __init__(
        self, request: SweepRequest, storage: Any = None, identity: dict[str, Any] | None = None
    ) -> None:
        """Open the study.

        Args:
            request: What the sweep is asked to do.
            storage: An Optuna storage; None keeps nothing.
            identity: What tells this sweep from others that share the storage.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._request, self.trials = optuna, request, dict[int, Trial]()
        self._space = {name: setting.distribution() for name, setting in request.space.items()}
        directions = DIRECTIONS[: len(request.objectives)]
        self._memory = optuna.create_study(directions=directions)
        self._stored = optuna.create_study(
            storage=storage,
            study_name=f"residuum-{digest(identity)[:16]}",
            directions=directions,
            load_if_exists=True,
        )
        if REQUEST not in self._stored.user_attrs:
            self._stored.set_user_attr(REQUEST, json.dumps(identity, sort_keys=True))
        for stored in self._stored.get_trials(deepcopy=False):
            if facts := stored.user_attrs.get(FACTS):  # trials of other programs have none
                facts = facts | {"params": dict(stored.params), "values": tuple(facts["values"])}
                self.trials[facts["number"]] = Trial(**facts)

    def ask(self, wave: range) -> dict[int, Params]:
        """Return the settings of the next trials, by number."""
        seed = np.random.SeedSequence((self._request.seed, wave.start)).generate_state(1)
        self._memory.sampler = self._sampler(int(seed[0]))
        drawn = {number: dict(self._memory.ask(self._space).params) for number in wave}
        for number in drawn.keys() & self.trials.keys():
            self._tell_memory(self.trials[number])
        return drawn

    def _sampler(self, seed: int) -> Any:
        from optuna.samplers import QMCSampler, RandomSampler, TPESampler

        space = self._space
        if self._request.sampler == "random":
            return RandomSampler(seed=seed)
        if self._request.sampler == "tpe":
            return TPESampler(seed=seed, constant_liar=True)

        class Sobol(QMCSampler):
            """Optuna's sampler, which would otherwise learn the space from a random first trial."""

            def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
                return space

        with warnings.catch_warnings(action="ignore"):  # Optuna calls it experimental
            return Sobol(seed=seed, scramble=True)

    def tell(self, trial: Trial) -> None:
        """Record how a trial ended."""
        facts = trial.to_json()
        line = self._optuna.trial.create_trial(
            state=self._optuna.trial.TrialState[STATES[trial.state]],
            values=list(trial.values) or None,
            params=facts.pop("params"),
            distributions=self._space,
            user_attrs={FACTS: facts},
        )
        self._stored.add_trial(line)
        self.trials[trial.number] = trial
        self._tell_memory(trial)

    def _tell_memory(self, trial: Trial) -> None:
        state = self._optuna.trial.TrialState[STATES[trial.state]]
        self._memory.tell(trial.number, list(trial.values) or None, state)

    @property
    def front(self) -> list[int]:
        """Numbers of the complete trials that no other one beats, in the order of the first value."""
        best = sorted(self._memory.best_trials, key=lambda trial: (trial.values[0], trial.number))
        return [trial.number for trial in best]


@contextmanager
def open_storage(journal: Path, url: str | None) -> Iterator[Any]:
    """Open an Optuna storage: the database of ``url``, or the file ``journal``."""
    if url is None:
        yield _open_journal(journal)
        return
    database = _open_database(url)
    try:
        yield database
    finally:
        database.engine.dispose()


def _open_journal(path: Path) -> Any:
    """Open lines in a file. The run directory is locked, so a lock in it was left by a killed sweep. A
    last line without an end was cut by a power failure or a full disk.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except ValueError as problem:
        raise InputError(
            f"The journal {str(path)!r} must be lines of JSON, and is not ({problem}).",
            "Remove it: the files of the trials restore their lines.",
        ) from problem


def _open_database(url: str) -> Any:
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    except (SQLAlchemyError, ImportError) as problem:
        shown = re.sub("//.*@", "//***@", url)[:80]  # without the password
        raise InputError(
            f"The storage must be the URL of a database that answers; {shown!r} does not "
            f"({type(problem).__name__}).",
            "Example: --storage postgresql+psycopg://user@host/name; leave it out for a file.",
        ) from problem
