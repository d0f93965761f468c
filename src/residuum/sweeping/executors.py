"""One trial of a sweep, and where trials run: this process, others, or a Ray cluster.

A job is one trial, or several that share a program (``PerRun``); which trials share one
is decided by their numbers, so that every engine computes the same. Nothing a worker meets ends the
sweep: a trial that diverges, crashes or finds no memory comes back with its reason.

An engine is an executor: a job submitted is a future of its outcome. :func:`outcomes` keeps it full,
submits again what a worker took with it, and yields in the order in which jobs end; the sweep sorts by
number wherever order matters. A new engine is a class and one line in ``ENGINES``.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from residuum.attacks import AttackConfig, attack, select
from residuum.attacks.run import advance
from residuum.attacks.stationarity.solver import SolverState
from residuum.errors import InputError, MissingExtraError
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction
from residuum.sweeping.space import COMPLETE, EXPECTED, FAILED, SEEDS, Params, Trial, configured

MEMORY = "out of memory"
AHEAD = 2  # jobs under way per place: no idle moment, and demand that an autoscaler sees
LOOK = 5.0  # seconds between counts of the places that a cluster has
# No reports to Ray's makers.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Ray's switch for "this machine alone", whatever the system: without it Ray takes 127.0.0.1 for the
# address of the network card, and whoever reaches that could run code here.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass(frozen=True, eq=False)
class Task:
    """What all trials share; it travels to a worker once. config: resolved; threads: of each worker."""

    checkpoint: Network
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


def _reason(problem: BaseException | None) -> str:
    """One line; memory has a word of its own, because a job that ran out of it is tried smaller."""
    text = " ".join(str(problem).split())[:300]
    if isinstance(problem, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text:
        return f"{MEMORY}: {text}"
    return f"{type(problem).__name__}: {text}"


def measured(loss: Tensor, layers: Tensor) -> float | None:
    """Relative first-layer residual at each restart's best loss, median over restarts that have one.

    loss: (R, T).
    layers: (R, T, L) squared.
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
    """What is remembered of a finished trial; all restarts diverged: it failed.

    Figures are of the weights alone. agreement: share of the chosen groups' members that several
    restarts hold. expected: their confidences added up.
    """
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
        share = chosen.support / max(found.restarts, 1)
        counted = torch.where(chosen.confidence.isnan(), share, chosen.confidence)
        facts["expected"] = float(counted[agreed].sum())
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

    per_run = [config for config in stacked for _ in range(own)]
    with tempfile.TemporaryDirectory(prefix="residuum-") as folder:
        path = Path(folder) / "state.safetensors" if job.until or job.state else None
        if path is not None and job.state is not None:
            path.write_bytes(job.state)
        given = task.checkpoint, task.knowledge, stacked[0]
        if path is not None and job.until and advance(*given, path, job.until, per_run):
            return Outcome(job, state=path.read_bytes())
        found = attack(*given, state_path=path, per_run=per_run)
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

    def room(self) -> int:
        """Jobs that may be under way at this moment."""
        return 1

    def submit(self, job: Job) -> Future[Outcome]:
        """Begin a job. An exception is the death of its worker: what it met itself is an outcome."""

    def why(self, ended: Future[Outcome]) -> str:
        """What a worker died of."""
        return _reason(ended.exception())

    def close(self) -> None:
        """Stop whatever still runs and let go of the machines; may go on while trials are pooled."""

    def ended(self) -> None:
        """Wait until what ``close`` began is over."""


def outcomes(engine: Engine, jobs: Iterable[Job], retries: int) -> Iterator[Outcome]:
    """Of all jobs, each once, as they end; ``jobs`` is read no faster than there is room.

    ``jobs`` may be endless, and ask for the next trial only then: a sampler that learns has seen more.
    A job whose worker died is tried again, here or on another machine; after ``retries`` it is an
    outcome too.
    """
    again, pending = list[tuple[Job, int]](), dict[Future[Outcome], tuple[Job, int]]()
    source = ((job, 1) for job in jobs)
    while True:
        while len(pending) < engine.room() and (
            todo := again.pop() if again else next(source, None)
        ):
            pending[engine.submit(todo[0])] = todo
        if not pending:
            return
        for ended in wait(pending, LOOK, FIRST_COMPLETED).done:
            job, tries = pending.pop(ended)
            if ended.exception() is None:
                yield ended.result()
            elif tries <= retries:
                again.append((job, tries + 1))
            else:
                yield Outcome(job, reason=f"its worker died {tries} times: {engine.why(ended)}")


class Local(Engine):
    """This process, one job after the other; jobs of several trials fill a GPU."""

    def __init__(self, task: Task, resources: Resources) -> None:
        self._task, self._threads = task, torch.get_num_threads()

    def submit(self, job: Job) -> Future[Outcome]:
        """Done when it returns."""
        ended = Future[Outcome]()
        ended.set_result(work(self._task, job))
        return ended

    def close(self) -> None:
        """The threads that the caller had."""
        torch.set_num_threads(self._threads)


class Processes(Engine):
    """Processes on this machine, each with its own copy of the weights, sent once.

    Each is a pool of its own, because a pool breaks as a whole when one of its processes dies: so a
    death costs its own job and no other.
    """

    def __init__(self, task: Task, resources: Resources) -> None:
        self._count = resources.workers or max(1, (os.cpu_count() or 1) // resources.cpus)
        self._task = task
        self._pools: dict[ProcessPoolExecutor, tuple[Future[Outcome], BaseProcess]] = {}

    def room(self) -> int:
        """One each: what waits in the queue of a process that dies would be lost with it."""
        return self._count

    def submit(self, job: Job) -> Future[Outcome]:
        """To a process that is idle, or to a new one."""
        for pool, (last, process) in self._pools.items():
            if last.done():
                with suppress(BrokenProcessPool):  # died with its last job, or since
                    self._pools[pool] = pool.submit(_work, job), process
                    return self._pools[pool][0]
        pool = ProcessPoolExecutor(1, mp.get_context("spawn"), _begin, (self._task,))
        others = mp.active_children()
        began = pool.submit(_work, job)
        process = next(child for child in mp.active_children() if child not in others)
        self._pools[pool] = began, process
        return began

    def why(self, ended: Future[Outcome]) -> str:
        """The signal or code that its process ended with."""
        code = self._end(next(pool for pool, (last, _) in self._pools.items() if last is ended))
        # 9 is what the kernel sends to a process when memory has run out.
        return f"{MEMORY}, or killed: signal 9" if code == -9 else f"exit code {code}"

    def close(self) -> None:
        """End every process."""
        for _, process in self._pools.values():
            process.terminate()
        for pool in list(self._pools):
            self._end(pool)

    def _end(self, pool: ProcessPoolExecutor) -> int | None:
        """Let go of a process that has ended or been told to; what it ended with."""
        _, process = self._pools.pop(pool)
        pool.shutdown()
        return process.exitcode


_SHARED: list[Task] = []  # in a process of its own: the task of all its jobs


def _begin(task: Task) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the sweep's to answer
    Thread(target=_end_with_the_sweep, daemon=True).start()
    _SHARED.append(task)


def _end_with_the_sweep() -> None:
    """A pool does not notice when the process that made it is killed."""
    sweep = mp.parent_process()
    assert sweep is not None
    sweep.join()
    os._exit(1)


def _work(job: Job) -> Outcome:
    return work(_SHARED[0], job)


class Ray(Engine):
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
                'Install it in a clone of residuum: pip install ".[cluster]"',
            ) from problem
        self._ray, self._resources = ray, resources
        self._mine = not ray.is_initialized()
        if self._mine:
            self._connect()
        self._task = ray.put(task)
        needs = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
        self._remote = ray.remote(work).options(**needs, max_retries=0)  # `outcomes` retries
        self._room, self._looked = 0, 0.0
        # More than a second of waiting for processes to end.
        self._ending = Thread(target=ray.shutdown)
        self._under_way = WeakKeyDictionary[Future[Outcome], Any]()

    def submit(self, job: Job) -> Future[Outcome]:
        """Wherever Ray finds room."""
        result = self._remote.remote(self._task, job)
        began = result.future()
        self._under_way[began] = result
        return began

    def why(self, ended: Future[Outcome]) -> str:
        """Ray's own words, and for memory this module's."""
        problem = ended.exception()
        lack = isinstance(problem, self._ray.exceptions.OutOfMemoryError)
        return f"{MEMORY}: Ray ended it before the machine ran out" if lack else _reason(problem)

    def close(self) -> None:
        """Leave the cluster, or end the one that was started here."""
        for began, result in list(self._under_way.items()):
            if not began.done():
                self._ray.cancel(result, force=True)
        if self._mine:
            self._ending.start()

    def ended(self) -> None:
        """A second cluster cannot be started before the first one is gone."""
        if self._ending.ident is not None:
            self._ending.join()

    def _connect(self) -> None:
        address = self._resources.address
        alone = {
            "num_cpus": self._resources.workers * self._resources.cpus or None,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            # Workers import while the cluster starts, not with their first trial.
            "_system_config": {"preload_python_modules": [__name__]},
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

    def room(self) -> int:
        """Machines come and go."""
        now = time.monotonic()
        if not self._room or now - self._looked > LOOK:
            there, need = self._ray.cluster_resources(), self._resources
            counts = [there.get("CPU", 0) / need.cpus]
            if need.gpus:
                counts.append(there.get("GPU", 0) / need.gpus)
            self._room, self._looked = max(1, int(AHEAD * min(counts))), now
        return self._room


ENGINES: dict[str, Callable[[Task, Resources], Engine]] = {
    "local": Local,
    "processes": Processes,
    "ray": Ray,
}
