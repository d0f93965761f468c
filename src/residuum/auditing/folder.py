"""The run directory of an audit, which keeps its finished batches.

A folder belongs to an audit when it holds ``work/`` (one that can go on) or ``result.json`` (one
that is complete, written last).
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from residuum.auditing.budget import Batch
from residuum.errors import OutputError
from residuum.records import Reconstruction
from residuum.records.rundir import RunDir, read_json, write_json

WORK, RESULT, STATE, PLAN = "work", "result.json", "state", "plan.json"


class AuditRun(RunDir):
    """An open run directory, and the store of its batches (``stages.Store``)."""

    what, own, summary, asked = "an audit", (WORK, RESULT), RESULT, f"{WORK}/request.json"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.work = self.path / WORK

    @property
    def started(self) -> bool:
        """Whether a batch is finished or under way."""
        return any(self.work.glob("*.safetensors"))

    def forget(self) -> None:
        """Drop the plan of a request that came to nothing."""
        (self.work / PLAN).unlink(missing_ok=True)

    def refuse_other_results(self) -> None:
        """Nothing that another audit left is written over."""
        if self.complete or self.work.exists():
            raise OutputError(
                f"{str(self.path)!r} holds an audit already.",
                "Choose another folder, or remove that one.",
            )

    def load(self, batch: Batch) -> Reconstruction | None:
        """The finished batch; one that cannot be read is run again."""
        return Reconstruction.load_or_none(self._file(batch))

    def save(self, batch: Batch, found: Reconstruction) -> None:
        """Keep a finished batch; its state is of no more use."""
        found.save(self._file(batch))
        self.state(batch).unlink(missing_ok=True)

    def state(self, batch: Batch) -> Path:
        """Where the batch under way is kept: one that a stop left behind is nobody else's."""
        return self.work / f"{STATE}-{self._file(batch).name}"

    def planned(self, attack: str) -> Batch | None:
        """The first batch of ``attack`` as planned before the interruption."""
        plan = read_json(self.work / PLAN).get(attack)
        with suppress(TypeError):
            return Batch(**plan) if isinstance(plan, dict) else None
        return None

    def plan(self, batch: Batch) -> None:
        """Keep the plan of an attack."""
        write_json(self.work / PLAN, {**read_json(self.work / PLAN), batch.attack: vars(batch)})

    def finish(self) -> None:
        """Drop what only an unfinished audit needs."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _file(self, batch: Batch) -> Path:
        name = f"{batch.attack}-{batch.seed}-{batch.restarts}x{batch.steps}.safetensors"
        return self.work / name
