"""The run directory of an audit: one process at a time, finished batches kept, half of nothing.

A folder belongs to an audit when it holds ``work/`` (one that can go on) or ``result.json`` (one
that is complete, written last). Every file is written beside its place and renamed into it, so a
kill at any moment leaves a folder that the same command takes up again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from residuum.auditing.budget import Batch
from residuum.errors import OutputError
from residuum.records import Reconstruction, read_json, write_json
from residuum.records.folders import another, claimed, clear_temporaries

WHAT, WORK, RESULT = "an audit", "work", "result.json"
REQUEST, STATE, PLAN = "request.json", "state.safetensors", "plan.json"


class Folder:
    """An open run directory, and the store of its batches (``stages.Store``)."""

    def __init__(self, path: Path) -> None:
        self.path, self.work = path, path / WORK

    @property
    def complete(self) -> bool:
        """Whether an audit has ended here."""
        return (self.path / RESULT).is_file()

    def refuse_other_results(self) -> None:
        """Nothing that another audit left is written over."""
        if self.complete or self.work.exists():
            raise OutputError(
                f"{str(self.path)!r} holds an audit already.",
                "Choose another folder, or remove that one.",
            )

    def claim(self, request: dict[str, Any]) -> None:
        """Begin, or go on with, the audit that ``request`` describes; any other is refused.

        A request that left no work, because its inputs were refused, stands in nobody's way.
        """
        wanted = json.loads(json.dumps(request))
        before = read_json(self.path / RESULT).get("request") if self.complete else None
        if not self.complete and (self.work / REQUEST).is_file():
            before = read_json(self.work / REQUEST)
        if before != wanted and not self.complete and not self._started:
            (self.work / PLAN).unlink(missing_ok=True)  # of a request that came to nothing
        elif before != wanted and (before is not None or self.complete):
            before = before if isinstance(before, dict) else {}
            changed = sorted(k for k in {*before, *wanted} if before.get(k) != wanted.get(k))
            raise another(self.path, WHAT, f"settings or inputs ({', '.join(changed[:4])})")
        if not self.complete:
            write_json(self.work / REQUEST, request)
            self.work.chmod(0o700)

    def load(self, batch: Batch) -> Reconstruction | None:
        """The finished batch; one that cannot be read is run again."""
        return Reconstruction.load_or_none(self._file(batch))

    def save(self, batch: Batch, found: Reconstruction) -> None:
        """Keep a finished batch; its state is of no more use."""
        found.save(self._file(batch))
        self.state().unlink(missing_ok=True)

    def state(self) -> Path:
        """Where the batch under way is kept."""
        return self.work / STATE

    def planned(self, attack: str) -> Batch | None:
        """The first batch of ``attack`` as planned before the interruption."""
        with suppress(TypeError):
            return Batch(**read_json(self.work / PLAN)[attack]) if self._plans(attack) else None
        return None

    def plan(self, batch: Batch) -> None:
        """Keep the plan of an attack."""
        write_json(self.work / PLAN, {**read_json(self.work / PLAN), batch.attack: vars(batch)})

    def finish(self) -> None:
        """Drop what only an unfinished audit needs."""
        shutil.rmtree(self.work, ignore_errors=True)

    @property
    def _started(self) -> bool:
        """Whether a batch is finished or under way."""
        return any(self.work.glob("*.safetensors"))

    def _plans(self, attack: str) -> bool:
        return isinstance(read_json(self.work / PLAN).get(attack), dict)

    def _file(self, batch: Batch) -> Path:
        name = f"{batch.attack}-{batch.seed}-{batch.restarts}x{batch.steps}.safetensors"
        return self.work / name


@contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """``path`` for this audit alone; an empty new one goes again."""
    with claimed(path, WHAT, {WORK, RESULT}):
        for folder in (path, path / WORK):
            clear_temporaries(folder)
        yield Folder(path)
