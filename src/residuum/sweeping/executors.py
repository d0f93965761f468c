"""One trial of a sweep, and where trials run: this process, others, or a Ray cluster.

A job is one trial, or several that share a program (``PerRun``); which trials share one
is decided by their numbers, so that every engine computes the same. Nothing a worker meets ends the
sweep: a trial that diverges, crashes or finds no memory comes back with its reason.

An engine takes jobs, as many at a time as it has room for, and yields outcomes in the order in which
jobs end; the sweep sorts by number wherever order matters. A new engine is a class with ``run`` and
``close``, and one line in ``ENGINES``.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from residuum.attacks import AttackConfig, attack, select
from residuum.attacks.state import Progress, SolverState
from residuum.errors import InputError, MissingExtraError, require_known
from residuum.records import Checkpoint, Knowledge, Reconstruction
from residuum.sweeping.space import COMPLETE, EXPECTED, FAILED, SEEDS, Params, Trial, configured

MEMORY = "out of memory"
AHEAD = 2  # jobs handed to Ray per place: demand that an autoscaler sees, and no idle moment
LOOK = 5.0  # seconds between counts of the places that a cluster has
# No reports to Ray's makers.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Ray's switch for "this machine alone", whatever the system: without it Ray takes 127.0.0.1 for the
# address of the network card, and whoever reaches that could run code here.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass(frozen=True, eq=False)
class Task:
    """What all trials share; it travels to a worker once. config: resolved; threads: of each worker."""

    checkpoint: Checkpoint
    knowledge: Knowledge
    config: AttackConfig
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Job:
    """Trials, by number, that run side by side; the first one's number decides the random numbers of
    all. seed: of the sweep; until: step to pause at, 0 for the end; state: where to go on.
    """

    params: dict[int, Params]
    seed: int
    until: int = 0
    state: bytes | None = None

    @property
    def numbers(self) -> list[int]:
        """Numbers of its trials."""
        return list(self.params)

    def halves(self) -> list[Job]:
        """The job in two."""
        rows, size = list(self.params.items()), -(-len(self.params) // 2)
        return [Job(dict(part), self.seed) for part in (rows[:size], rows[size:])]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a job: a reconstruction per trial, or the state it paused in, or a reason."""

    job: Job
    found: tuple[Reconstruction, ...] = ()
    state: bytes | None = None
    reason: str = ""
    seconds: float = 0.0


class Pause(KeyboardInterrupt):
    """Ends an attack on purpose: an interrupt is what makes a solver save its state and stop."""


def jobs(params: Mapping[int, Params], seed: int, batch: int) -> list[Job]:
    """Blocks of ``batch`` trials, by number: 0 .. b-1, b .. 2b-1, and so on, less those that ended."""
    blocks = groupby(params.items(), lambda row: row[0] // batch)
    return [Job(dict(block), seed) for _, block in blocks]


def work(task: Task, job: Job) -> Outcome:
    """Run a job. Every engine calls this and nothing else."""
    start = time.perf_counter()
    torch.set_num_threads(task.threads)
    try:
        done = _attacked(task, job)
    except Exception as problem:  # noqa: BLE001  whatever a trial dies of is its result
        done = Outcome(job, reason=_reason(problem))
    return dataclasses.replace(done, seconds=time.perf_counter() - start)


def _reason(problem: Exception) -> str:
    """One line; memory has a word of its own, because a job that ran out of it is tried smaller."""
    text = " ".join(str(problem).split())[:300]
    if isinstance(problem, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text:
        return f"{MEMORY}: {text}"
    return f"{type(problem).__name__}: {text}"


def measured(loss: Tensor, layers: Tensor) -> float | None:
    """Relative first-layer residual at each restart's best loss, median over restarts that have one.

    loss: (R, T); layers: (R, T, L) squared.
    """
    known = torch.isfinite(loss).any(1)
    if not bool(known.any()) or not layers.shape[-1]:
        return None
    best = loss.nan_to_num(nan=torch.inf).argmin(1)
    first = layers[torch.arange(len(best)), best, 0][known].clamp(min=0).sqrt()
    value = float(first.median())
    return value if value == value else None


def paused_value(path: Path) -> tuple[int, float | None]:
    """Step and residual of a state on disk; step 0 where there is none."""
    if not path.is_file():
        return 0, None
    state = SolverState.load(path)
    return state.step, measured(torch.stack(state.loss, 1), torch.stack(state.layers, 1))


def judged(
    number: int, params: Params, found: Reconstruction, objectives: tuple[str, ...]
) -> Trial:
    """What is remembered of a finished trial; all restarts diverged: it failed."""
    living = torch.tensor([status != "diverged" for status in found.status])
    facts: dict[str, Any] = {
        "residual": measured(found.loss[living], found.layers[living]),
        "agreement": 0.0,
        "expected": 0.0,
        "diverged": found.status.count("diverged"),
        "seconds": found.seconds,
        "step": int(found.steps[-1]) if len(found.steps) else None,
    }
    chosen = found.selection
    if chosen is not None and len(chosen):
        agreed = chosen.support > 1
        facts["agreement"] = float(chosen.members[agreed].sum() / chosen.members.sum())
        facts["expected"] = float(chosen.confidence[agreed].sum())
    if facts["residual"] is None and "residual" in objectives:
        why = "diverged" if facts["diverged"] else "no finite residual"
        return Trial(number, params, FAILED, **facts, reason=why)
    values = tuple(-facts[name] if name in EXPECTED else facts[name] for name in objectives)
    return Trial(number, params, COMPLETE, values, **facts)


def _attacked(task: Task, job: Job) -> Outcome:
    own, seed = task.config.restarts, job.seed * SEEDS + job.numbers[0]
    runs = own * len(job.params)
    base = dataclasses.replace(task.config, seed=seed)
    configs = [configured(base, params) for params in job.params.values()]
    stacked = [dataclasses.replace(config, restarts=runs) for config in configs]

    def watch(progress: Progress) -> None:
        if job.until and job.until <= progress.step < progress.steps:
            raise Pause

    with tempfile.TemporaryDirectory(prefix="residuum-") as folder:
        path = Path(folder) / "state.safetensors" if job.until or job.state else None
        if path is not None and job.state is not None:
            path.write_bytes(job.state)
        try:
            found = attack(
                task.checkpoint,
                task.knowledge,
                stacked[0],
                state_path=path,
                watch=watch if job.until else None,
                per_run=[config for config in stacked for _ in range(own)],
            )
        except Pause:
            assert path is not None
            return Outcome(job, state=path.read_bytes())
    if len(configs) == 1:
        return Outcome(job, (found,))
    parts = (_part(found, i * own, own, config) for i, config in enumerate(configs))
    return Outcome(job, tuple(parts))


def _part(found: Reconstruction, first: int, own: int, config: AttackConfig) -> Reconstruction:
    """The restarts of one trial out of a job's, as if they had run alone."""
    rows = slice(first, first + own)
    mine = (found.run >= first) & (found.run < first + own)
    events = (
        {**event, "run": event["run"] - first}
        for event in found.events
        if first <= event["run"] < first + own
    )
    piece = found.replace(
        x=found.x[mine],
        labels=found.labels[mine],
        lam=found.lam[mine],
        run=found.run[mine] - first,
        loss=found.loss[rows],
        layers=found.layers[rows],
        status=found.status[rows],
        settings=config.to_json(),
        seconds=found.seconds * own / found.restarts,
        ident=None if found.ident is None else found.ident[mine],
        events=tuple(events),
        second_order=found.second_order[rows],
        selection=None,
    )
    return piece.replace(selection=select(piece))


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
    retries: int = 2


class Engine(Protocol):
    """Runs jobs somewhere."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Outcomes of all jobs, each once, as they end; ``jobs`` is read no faster than needed."""

    def close(self) -> None:
        """Stop whatever still runs and let go of the machines."""


class Local:
    """This process, one job after the other; jobs of several trials fill a GPU."""

    def __init__(self, task: Task, resources: Resources) -> None:
        self._task, self._threads = task, torch.get_num_threads()

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """In the order given."""
        return (work(self._task, job) for job in jobs)

    def close(self) -> None:
        """The threads that the caller had."""
        torch.set_num_threads(self._threads)


class Processes:
    """Processes on this machine, each with its own copy of the weights, sent once.

    A process that dies takes its own job with it and no other; that job is tried again.
    """

    def __init__(self, task: Task, resources: Resources) -> None:
        count = resources.workers or max(1, (os.cpu_count() or 1) // resources.cpus)
        self._task, self._count, self._retries = task, count, resources.retries
        self._workers: dict[Connection, BaseProcess] = {}

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """As they end."""
        source, again = ((job, 1) for job in jobs), deque[tuple[Job, int]]()
        busy: dict[Connection, tuple[Job, int]] = {}
        while True:
            while len(busy) < self._count:
                todo = again.popleft() if again else next(source, None)
                if todo is None:
                    break
                free = next((link for link in self._workers if link not in busy), None)
                free = free or self._started()
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
                    ended = self._end(ready)
                    if tries <= self._retries:
                        again.append((job, tries + 1))
                    else:
                        yield Outcome(job, reason=f"its process died {tries} times ({ended})")

    def close(self) -> None:
        """End every process."""
        for process in self._workers.values():
            process.terminate()
        for link in list(self._workers):
            self._end(link)

    def _started(self) -> Connection:
        context = mp.get_context("spawn")
        mine, its = context.Pipe()
        process = context.Process(target=_serve, args=(its, self._task), daemon=True)
        process.start()
        its.close()
        self._workers[mine] = process
        return mine

    def _end(self, link: Connection) -> str:
        """Let go of a process that has ended or been told to; what it ended with."""
        process = self._workers.pop(link)
        link.close()
        process.join()
        # 9 is what the kernel sends to a process when memory has run out.
        killed = process.exitcode == -9
        return f"{MEMORY}, or killed: signal 9" if killed else f"exit code {process.exitcode}"


def _serve(link: Connection, task: Task) -> None:
    """A worker's life: jobs until the sweep closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the sweep's to answer
    with suppress(EOFError, BrokenPipeError):
        while True:
            link.send(work(task, link.recv()))


class Ray:
    """Jobs as Ray tasks with so many CPUs and GPUs each, on a cluster started here on 127.0.0.1, or
    on one that is running elsewhere.

    The weights go into the object store once and from there to every machine that runs a trial. A
    trial whose machine goes away is run again on another; machines that come later get the next.
    """

    def __init__(self, task: Task, resources: Resources) -> None:
        here = not resources.address or resources.address.startswith(("127.0.0.1", "localhost"))
        for name, value in (QUIET | (LOOPBACK if here else {})).items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as problem:
            raise MissingExtraError(
                "The engine 'ray' needs Ray, which is not installed.",
                "Install it with: pip install 'residuum[cluster]'",
            ) from problem
        self._ray, self._resources = ray, resources
        self._mine = not ray.is_initialized()
        if self._mine:
            self._connect()
        self._task = ray.put(task)
        self._remote = ray.remote(work).options(
            num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=resources.retries
        )
        self._room, self._looked = 0, 0.0

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """As they end."""
        source, pending = iter(jobs), dict[Any, Job]()
        try:
            while True:
                while len(pending) < self._places() and (job := next(source, None)):
                    pending[self._remote.remote(self._task, job)] = job
                if not pending:
                    return
                for done in self._ray.wait(list(pending), timeout=LOOK)[0]:
                    yield self._fetch(done, pending.pop(done))
        finally:
            for left in pending:
                self._ray.cancel(left, force=True)

    def close(self) -> None:
        """Leave the cluster, or end the one that was started here."""
        if self._mine:
            self._ray.shutdown()

    def _connect(self) -> None:
        address = self._resources.address
        alone = {
            "num_cpus": self._resources.workers * self._resources.cpus or None,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            # A trial too large for the machine comes back as such, not again and again.
            "_system_config": {"task_oom_retries": self._resources.retries},
        }
        options: dict[str, Any] = {"address": address} if address else alone
        try:
            self._ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as problem:
            raise InputError(
                f"No Ray cluster answers at {address or 'this machine'!r} "
                f"({' '.join(str(problem).split())[:120]}).",
                "Start one with `ray start --head`, or leave --address out.",
            ) from problem

    def _places(self) -> int:
        """Jobs that may be under way: machines come and go."""
        now = time.monotonic()
        if not self._room or now - self._looked > LOOK:
            there, need = self._ray.cluster_resources(), self._resources
            counts = [there.get("CPU", 0) / need.cpus]
            if need.gpus:
                counts.append(there.get("GPU", 0) / need.gpus)
            self._room, self._looked = max(1, int(AHEAD * min(counts))), now
        return self._room

    def _fetch(self, done: Any, job: Job) -> Outcome:
        errors = self._ray.exceptions
        try:
            return self._ray.get(done)
        except errors.OutOfMemoryError:
            return Outcome(job, reason=f"{MEMORY}: Ray ended the worker before the machine ran out")
        except (errors.RayTaskError, errors.RaySystemError) as problem:
            return Outcome(job, reason=_reason(problem))
        except errors.RayError as problem:
            tries = self._resources.retries + 1
            return Outcome(job, reason=f"its worker died {tries} times: {_reason(problem)}")


Start = Callable[[Task, Resources], Engine]
ENGINES: dict[str, Start] = {"local": Local, "processes": Processes, "ray": Ray}


def open_engine(name: str, task: Task, resources: Resources) -> Engine:
    """The engine of this name; one that needs an extra says so."""
    require_known(name, ENGINES, "No engine")
    return ENGINES[name](task, resources)
