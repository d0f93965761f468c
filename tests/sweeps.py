"""What sweep tests share: a small exact network, plans that take a moment, and tasks that go wrong."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from residuum.attacks import AttackConfig
from residuum.attacks.run import resolve
from residuum.checkpoints import checkpoint_from_module
from residuum.records import Checkpoint, Knowledge
from residuum.sweep import Plan
from residuum.sweep.space import draw
from residuum.sweep.trials import Job, Task, jobs
from tests.cases import relu_point

KNOWLEDGE = Knowledge(sample_count=6)


@lru_cache(maxsize=1)
def victim() -> Checkpoint:
    """An exact KKT point with six samples."""
    return checkpoint_from_module(relu_point().model)


def plan(trials: int = 6, steps: int = 50, **changes: Any) -> Plan:
    config = AttackConfig(restarts=2, steps=steps, candidates=12)
    return Plan(**{"trials": trials, "seed": 3, "config": config} | changes)


def task(**changes: Any) -> Task:
    config = resolve(victim(), KNOWLEDGE, plan(**changes).config)
    return Task(victim(), KNOWLEDGE, config)


def some_jobs(count: int, steps: int = 50) -> list[Job]:
    wanted = plan(count, steps)
    return jobs(list(range(count)), draw("random", wanted.space, range(count), 3, ()), 3, 1)


class Deadly:
    """A task that ends its process the first ``times`` times it is worked on, in any process."""

    def __init__(self, task: Task, marker: Path, times: int) -> None:
        self._task, self._marker, self._times = task, str(marker), times

    @property
    def threads(self) -> int:
        """What ``work`` looks at first."""
        with open(self._marker, "a+") as stream:
            stream.seek(0)
            if len(stream.read()) < self._times:
                stream.write("x")
                stream.flush()
                os._exit(3)
        return 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._task, name)
