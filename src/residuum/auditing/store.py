"""Save the outputs of an audit while it runs, so that an interrupted audit continues where it stopped.

``work/`` in the run directory holds the finished batches of the attacks, the state of the running batch, and
the outputs of every finished stage.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residuum.auditing.artifacts import RESULT, write_artifacts
from residuum.auditing.case import Case, identity
from residuum.auditing.plan import Batch
from residuum.auditing.request import AuditRequest
from residuum.auditing.result import AuditResult
from residuum.errors import OutputError
from residuum.records import Reconstruction, Record
from residuum.records.rundir import RunDir

if TYPE_CHECKING:
    from residuum.auditing.run import Audit

WORK, STATE = "work", "state"


@dataclass(frozen=True, eq=False)
class StageOutput(Record):
    """The saved outputs of one stage (step) of an audit, and its duration in seconds."""

    values: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class AuditStore:
    """Saves the outputs of an audit. This base class has no run directory, so it saves nothing."""

    path: Path | None = None

    def __bool__(self) -> bool:
        return False

    def finished(self) -> AuditResult | None:
        """Return None, because a store without a run directory holds no finished audit."""
        return None

    def load_or_run(self, name: str, run: Callable[[Audit], Audit], audit: Audit) -> Audit:
        """Run a stage of an audit. A store with a run directory reads saved outputs of the stage instead.

        Args:
            name: Name of the stage.
            run: The function of the stage, which returns the audit with the outputs of the stage.
            audit: The audit before the stage.

        Returns:
            The audit after the stage.
        """
        return run(audit)

    def load(self, batch: Batch) -> Reconstruction | None:
        """Return the saved output of a batch of restarts (runs of an attack), None if there is none."""
        return None

    def save(self, batch: Batch, result: Reconstruction) -> None:
        """Save the output of a finished batch of restarts.

        Args:
            batch: The finished batch.
            result: Reconstruction that the batch produced.
        """

    def state(self, batch: Batch) -> Path | None:
        """Return the path of the file for the state of a running batch, None if nothing is saved."""
        return None

    def write(self, result: AuditResult, *, blur: bool = False) -> None:
        """Write the artifacts of a finished audit.

        Args:
            result: The result of the audit.
            blur: Blur the images of the report until the reader asks for them.
        """


NO_STORE = AuditStore()


class AuditRun(RunDir, AuditStore):
    """An open run directory of an audit.

    A folder belongs to an audit if it holds ``work/`` (an audit that can continue) or ``result.json``
    (written last, when the audit is complete).
    """

    what, files, summary, request_file = "an audit", (WORK, RESULT), RESULT, f"{WORK}/request.json"
    path: Path

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.work = self.path / WORK
        self.case: Case | None = None
        self.request: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return True

    @property
    def has_work(self) -> bool:
        """Whether the folder holds saved results of an unfinished audit."""
        return any(self.work.glob("*.safetensors"))

    def refuse_other_results(self) -> None:
        """Raise an error if the folder holds an audit already.

        Raises:
            OutputError: If the folder holds a finished or an unfinished audit.
        """
        if self.is_complete or self.work.exists():
            raise OutputError(
                "The folder of a new result must not hold another audit; "
                f"{str(self.path)!r} holds an audit already.",
                "Pass a new folder for the result, or remove the folder that holds the other "
                "audit.",
            )

    def finished(self) -> AuditResult | None:
        """Return the result of the audit in this folder, None if it has not ended."""
        if not self.is_complete:
            return None
        self.finish()
        return AuditResult.load(self.path)

    def load_or_run(self, name: str, run: Callable[[Audit], Audit], audit: Audit) -> Audit:
        """Run a stage and save its outputs. If its outputs are saved already, read them instead.

        Args:
            name: Name of the stage.
            run: The function of the stage, which returns the audit with the outputs of the stage.
            audit: The audit before the stage.

        Returns:
            The audit after the stage.
        """
        output_path = self.work / f"stage-{name.replace(' ', '-')}.safetensors"
        if (output := StageOutput.load_or_none(output_path)) is not None:
            audit.deadline.charge(output.seconds)
            seconds_by_stage = {**audit.seconds, name: output.seconds}
            return replace(audit, **output.values, seconds=seconds_by_stage)
        start_time = time.monotonic()
        audit_after = run(audit)
        stage_seconds = round(time.monotonic() - start_time, 3)
        StageOutput(_changed(audit, audit_after), stage_seconds).save(output_path)
        return audit_after

    def load(self, batch: Batch) -> Reconstruction | None:
        """Return the saved output of a batch of restarts. If no readable file exists, return None."""
        return Reconstruction.load_or_none(self._file(batch))

    def save(self, batch: Batch, result: Reconstruction) -> None:
        """Save the output of a finished batch of restarts, and remove the state of the batch.

        Args:
            batch: The finished batch.
            result: Reconstruction that the batch produced.
        """
        result.save(self._file(batch))
        self.state(batch).unlink(missing_ok=True)

    def state(self, batch: Batch) -> Path:
        """Return the path of the file for the state of a running batch. Each batch has its own file."""
        return self.work / f"{STATE}-{self._file(batch).name}"

    def write(self, result: AuditResult, *, blur: bool = False) -> None:
        """Write the artifacts of a finished audit, ``result.json`` last, and remove ``work/``.

        Args:
            result: The result of the audit.
            blur: Blur the images of the report until the reader asks for them.
        """
        input_paths = {} if self.case is None else self.case.sources.paths
        input_path_texts = {name: str(path.resolve()) for name, path in input_paths.items()}
        release = None if self.case is None else self.case.release
        checkpoint_argument = {} if release is None else {"file": str(release.path)}
        write_artifacts(
            self.path,
            result,
            request=self.request or None,
            sources=input_path_texts,
            blur=blur,
            **checkpoint_argument,
        )
        self.finish()

    def finish(self) -> None:
        """Remove the folder ``work/``, which only an unfinished audit needs."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _file(self, batch: Batch) -> Path:
        file_name = f"{batch.attack}-{batch.seed}-{batch.restarts}x{batch.steps}.safetensors"
        return self.work / file_name


@contextmanager
def open_run(out: str | Path | None, case: Case, request: AuditRequest) -> Iterator[AuditStore]:
    """Open the run directory of an audit and lock it, so that no other audit writes to it.

    A folder that holds another audit or other files, or that cannot be written, raises a ``ResiduumError``.

    Args:
        out: The run directory, None to save nothing.
        case: The inputs of the audit.
        request: Settings of the audit.

    Yields:
        The store that saves the outputs of the audit.
    """
    if out is None:
        yield NO_STORE
        return
    with AuditRun.open(out) as run:
        run.case, run.request = case, identity(case, request)
        run.begin(run.request)
        yield run


def _changed(before: Audit, after: Audit) -> dict[str, Any]:
    """Return the fields of the audit that a stage (step) changed, with their new values."""
    field_names = [f.name for f in fields(before) if f.name not in ("case", "store", "listener")]
    return {
        name: getattr(after, name)
        for name in field_names
        if getattr(after, name) is not getattr(before, name)
    }
