"""The study of a sweep: the settings of all trials, and the results of the trials that ended.

The study is an Optuna study. The study is stored in a database, or in a journal (a file with lines of JSON)
in the folder of the sweep. The study has no reconstructed samples.
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

# Names of two Optuna attributes: the plan of the sweep is stored in the study, and statistics in each
# trial.
PLAN_ATTRIBUTE, TRIAL_ATTRIBUTE = "residuum:plan", "residuum:trial"


class Study:
    """The trials of a sweep. An Optuna study in memory draws them, and a stored study records them.

    The trials of a sweep are drawn in waves. A wave is drawn after all earlier waves have ended, by a sampler
    with a separate seed. So a wave depends only on the request and on the results of earlier waves. It does
    not depend on the order in which trials end, on interruptions, or on the machines.
    """

    def __init__(
        self, request: SweepRequest, storage: Any = None, identity: dict[str, Any] | None = None
    ) -> None:
        """Open the study, which records the trials of a sweep.

        Args:
            request: The settings of the sweep.
            storage: An Optuna storage, None to keep the study in memory only.
            identity: Plain values that identify this sweep among other sweeps in the storage.
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
        if PLAN_ATTRIBUTE not in self._stored.user_attrs:
            self._stored.set_user_attr(PLAN_ATTRIBUTE, json.dumps(identity, sort_keys=True))
        for stored in self._stored.get_trials(deepcopy=False):
            # Trials that another program added to the study do not have this attribute.
            if trial_fields := stored.user_attrs.get(TRIAL_ATTRIBUTE):
                trial_fields = trial_fields | {
                    "params": dict(stored.params),
                    "values": tuple(trial_fields["values"]),
                }
                self.trials[trial_fields["number"]] = Trial(**trial_fields)

    def ask(self, wave: range) -> dict[int, Params]:
        """Draw the settings of a group of trials (a wave). Return them by trial number."""
        seed = np.random.SeedSequence((self._request.seed, wave.start)).generate_state(1)
        self._memory.sampler = self._sampler(int(seed[0]))
        params = {number: dict(self._memory.ask(self._space).params) for number in wave}
        for number in params.keys() & self.trials.keys():
            self._tell_memory(self.trials[number])
        return params

    def _sampler(self, seed: int) -> Any:
        from optuna.samplers import QMCSampler, RandomSampler, TPESampler

        space = self._space
        if self._request.sampler == "random":
            return RandomSampler(seed=seed)
        if self._request.sampler == "tpe":
            return TPESampler(seed=seed, constant_liar=True)

        class Sobol(QMCSampler):
            """The Sobol sampler of Optuna with known ranges of the settings.

            Otherwise, the sampler would learn the ranges from the first trial, and draw this trial at random.
            """

            def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
                return space

        # Optuna warns that the Sobol sampler is experimental.
        with warnings.catch_warnings(action="ignore"):
            return Sobol(seed=seed, scramble=True)

    def tell(self, trial: Trial) -> None:
        """Record the result of a trial (one attack of the sweep) that has ended."""
        trial_fields = trial.to_json()
        optuna_trial = self._optuna.trial.create_trial(
            state=self._optuna.trial.TrialState[STATES[trial.state]],
            values=list(trial.values) or None,
            params=trial_fields.pop("params"),
            distributions=self._space,
            user_attrs={TRIAL_ATTRIBUTE: trial_fields},
        )
        self._stored.add_trial(optuna_trial)
        self.trials[trial.number] = trial
        self._tell_memory(trial)

    def _tell_memory(self, trial: Trial) -> None:
        optuna_state = self._optuna.trial.TrialState[STATES[trial.state]]
        self._memory.tell(trial.number, list(trial.values) or None, optuna_state)

    @property
    def front(self) -> list[int]:
        """Numbers of the trials (attacks) that no other trial beats in all objectives, best first."""
        best_trials = sorted(
            self._memory.best_trials, key=lambda trial: (trial.values[0], trial.number)
        )
        return [trial.number for trial in best_trials]


@contextmanager
def open_storage(journal: Path, url: str | None) -> Iterator[Any]:
    """Open an Optuna storage, and close the storage at the end.

    Args:
        journal: Path of the journal file, which is used if there is no URL.
        url: URL of a database, None to use the journal file.

    Yields:
        The open storage.
    """
    if url is None:
        yield _open_journal(journal)
        return
    database_storage = _open_database(url)
    try:
        yield database_storage
    finally:
        database_storage.engine.dispose()


def _open_journal(path: Path) -> Any:
    """Open a journal (a file with lines of JSON), and repair the journal if the last sweep was killed."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    # This process has exclusive access to the folder, so a lock file of the journal was left by a killed
    # process. A last line without a line end is incomplete, for example after a power failure.
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except ValueError as problem:
        raise InputError(
            f"The journal (record of the trials) {str(path)!r} must consist of lines of JSON; reading the "
            f"journal failed ({problem}).",
            "Remove the journal. The next sweep in this folder restores the journal from the files of the "
            "trials.",
        ) from problem


def _open_database(url: str) -> Any:
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    except (SQLAlchemyError, ImportError) as problem:
        safe_url = re.sub("//.*@", "//***@", url)[:80]  # the URL without user name and password
        raise InputError(
            f"The option --storage must be the URL of a reachable database; connecting to {safe_url!r} "
            f"failed "
            f"({type(problem).__name__}).",
            "Example: --storage postgresql+psycopg://user@host/name. Omit --storage to use a file.",
        ) from problem
