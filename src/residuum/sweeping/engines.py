"""Where trials run. An engine takes jobs, as many at a time as it has room for, and yields outcomes.

Outcomes come in the order in which jobs end; the sweep sorts by number wherever order matters, so
that the same plan gives the same trials on every engine. A new engine is a class with ``run`` and
``close``, and one line in ``ENGINES``.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from residuum.errors import InputError, did_you_mean
from residuum.sweeping.trials import Job, Outcome, Task, work

RETRIES = 2


@dataclass(frozen=True)
class Resources:
    """What trials may use. workers: processes on this machine, 0 for one per core and trial;
    cpus, gpus: of one trial; address: of a Ray cluster, "" to start one here; retries: of a job
    whose process or machine died.
    """

    workers: int = 0
    cpus: int = 1
    gpus: float = 0.0
    address: str = ""
    retries: int = RETRIES


class Engine(Protocol):
    """Runs jobs somewhere."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Outcomes of all jobs, each once, as they end; ``jobs`` is read no faster than needed."""

    def close(self) -> None:
        """Stop whatever still runs and let go of the machines."""


class Local:
    """This process, one job after the other; jobs of several trials fill a GPU."""

    def __init__(self, task: Task, resources: Resources) -> None:
        import torch

        self._task, self._threads = task, torch.get_num_threads()

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """In the order given."""
        for job in jobs:
            yield work(self._task, job)

    def close(self) -> None:
        """The threads that the caller had."""
        import torch

        torch.set_num_threads(self._threads)


class Processes:
    """Processes on this machine, each with its own copy of the weights, sent once.

    A process that dies takes its own job with it and no other; that job is tried again.
    """

    def __init__(self, task: Task, resources: Resources) -> None:
        import os

        count = resources.workers or max(1, (os.cpu_count() or 1) // resources.cpus)
        self._task, self._count, self._retries = task, count, resources.retries
        self._context = mp.get_context("spawn")
        self._workers: dict[Connection, BaseProcess] = {}

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """As they end."""
        source, again = iter(jobs), deque[tuple[Job, int]]()
        busy: dict[Connection, tuple[Job, int]] = {}
        while True:
            while len(busy) < self._count:
                todo = again.popleft() if again else _first(source)
                if todo is None:
                    break
                free = self._free(busy)
                busy[free] = todo
                with suppress(BrokenPipeError):  # a worker that died is met below
                    free.send(todo[0])
            if not busy:
                return
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                job, tries = busy.pop(ready)
                try:
                    yield ready.recv()
                except (EOFError, ConnectionResetError):
                    code = self._bury(ready)
                    if tries < self._retries:
                        again.append((job, tries + 1))
                    else:
                        yield Outcome(job, reason=_death(code, tries + 1))

    def close(self) -> None:
        """End every process."""
        for link, process in self._workers.items():
            link.close()
            process.terminate()
        for process in self._workers.values():
            process.join()
        self._workers.clear()

    def _free(self, busy: dict[Connection, tuple[Job, int]]) -> Connection:
        for link in self._workers:
            if link not in busy:
                return link
        mine, its = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(its, self._task), daemon=True)
        process.start()
        its.close()
        self._workers[mine] = process
        return mine

    def _bury(self, link: Connection) -> int | None:
        process = self._workers.pop(link)
        link.close()
        process.join()
        return process.exitcode


def _serve(link: Connection, task: Task) -> None:
    """A worker's life: jobs until the sweep closes its end."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the sweep's to answer
    with suppress(EOFError, BrokenPipeError):
        while True:
            link.send(work(task, link.recv()))


def _first(source: Iterator[Job]) -> tuple[Job, int] | None:
    job = next(source, None)
    return None if job is None else (job, 0)


def _death(code: int | None, tries: int) -> str:
    # 9 is what the kernel sends to a process when memory has run out.
    what = "out of memory, or killed: signal 9" if code == -9 else f"exit code {code}"
    return f"its process died {tries} times ({what})"


def open_engine(name: str, task: Task, resources: Resources) -> Engine:
    """The engine of this name; one that needs an extra says so."""
    if name not in ENGINES:
        raise InputError(f"No engine {name!r}.", did_you_mean(name, tuple(ENGINES)))
    module, _, attribute = ENGINES[name].partition(":")
    make: Callable[[Task, Resources], Engine] = getattr(importlib.import_module(module), attribute)
    return make(task, resources)


# Where each engine is; a module is imported when its engine is asked for.
ENGINES: dict[str, Any] = {
    "local": "residuum.sweeping.engines:Local",
    "processes": "residuum.sweeping.engines:Processes",
    "ray": "residuum.sweeping.cluster:Ray",
}
