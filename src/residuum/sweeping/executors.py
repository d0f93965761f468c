"""One trial of a sweep, and the engines that run trials: this process, others, or a Ray cluster.

A job is one trial, or several that share a program (``per_run``). The numbers of the trials decide
which of them share a job, so every engine computes the same. No failure of a trial ends the sweep: a
trial that diverges, crashes or finds no memory is recorded with its reason.

An engine is an executor: it turns a submitted job into a future of its outcome. :func:`outcomes` keeps
the engine full, submits a job again if its worker died, and yields outcomes in the order in which jobs
end. A new engine is a class and one line in ``ENGINES``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from residuum.attacks import Attack, select
from residuum.attacks.stationarity.attack import Stationarity
from residuum.attacks.stationarity.solver import SolverState
from residuum.errors import InputError, MissingExtraError
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction
from residuum.sweeping.space import (
    COMPLETE,
    EXPECTED,
    FAILED,
    SEEDS,
    Params,
    SweepRequest,
    Trial,
    configured,
    restarts_of,
)

MEMORY = "out of memory"
AHEAD = (
    2  # jobs submitted per place of a cluster: no idle moment, and demand that an autoscaler sees
)
REFRESH = 5.0  # seconds between two counts of the places in a cluster
# Ray sends no usage reports.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Ray's switch for "this machine alone" on every system. Without it Ray takes 127.0.0.1 for the address
# of the network card, and everybody who reaches that card could run code here.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass(frozen=True, eq=False)
class Task:
    """What all trials share, sent to each worker once. threads: of each worker."""

    network: Network
    knowledge: Knowledge
    attack: Attack
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Job:
    """Trials that run side by side. The number of the first decides the random numbers of all.

    params: settings of each trial, by number.
    seed: of the sweep.
    until: step to pause at, 0 for the end.
    state: saved state to go on from.
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
        """Return the job in two."""
        rows, size = list(self.params.items()), -(-len(self.params) // 2)
        return [Job(dict(half), self.seed) for half in (rows[:size], rows[size:])]


@dataclass(frozen=True, eq=False)
class Outcome:
    """How a job ended: with a reconstruction per trial, with a paused state, or with a reason."""

    job: Job
    reconstructions: tuple[Reconstruction, ...] = ()
    state: bytes | None = None
    reason: str = ""
    seconds: float = 0.0


def jobs(params: Mapping[int, Params], seed: int, batch: int) -> list[Job]:
    """Return blocks of ``batch`` trials by number (0 .. b-1, b .. 2b-1, ...), without those that ended."""
    blocks = groupby(params.items(), lambda row: row[0] // batch)
    return [Job(dict(block), seed) for _, block in blocks]


def work(task: Task, job: Job) -> Outcome:
    """Run a job. Every engine calls this function and nothing else."""
    start = time.perf_counter()
    torch.set_num_threads(task.threads)
    try:
        outcome = _run_attack(task, job)
    except Exception as problem:  # noqa: BLE001  a trial that fails is recorded with its reason
        outcome = Outcome(job, reason=_reason(problem))
    return dataclasses.replace(outcome, seconds=time.perf_counter() - start)


def _reason(problem: BaseException) -> str:
    """One line. Lack of memory has a word of its own, because such a job is tried again in halves."""
    text = " ".join(str(problem).split())[:300]
    if isinstance(problem, WorkerDiedError):
        return text
    lacks_memory = type(problem).__name__ in (
        "MemoryError",
        "OutOfMemoryError",
    )  # torch's and Ray's
    if lacks_memory or "allocate memory" in text:
        return f"{MEMORY}: {text}"
    return f"{type(problem).__name__}: {text}"


def first_layer_residual(loss: Tensor, layers: Tensor) -> float | None:
    """Return the relative first-layer residual at each restart's best loss, the median over restarts.

    Args:
        loss: (R, T), infinite or NaN where a restart has none.
        layers: (R, T, L) squared relative residuals.

    Returns:
        None if no restart has a finite loss or the attack records no residuals.
    """
    has_loss = torch.isfinite(loss).any(1)
    if not bool(has_loss.any()) or not layers.shape[-1]:
        return None
    best = loss.nan_to_num(nan=torch.inf).argmin(1)
    first = layers[torch.arange(len(best)), best, 0][has_loss].clamp(min=0).sqrt()
    value = float(first.median())
    return value if math.isfinite(value) else None


def paused_value(path: Path) -> tuple[int, float | None]:
    """Return step and residual of a saved state; step 0 if there is no such file."""
    if not path.is_file():
        return 0, None
    state = SolverState.load(path)
    return state.step, first_layer_residual(
        torch.stack(state.loss, 1), torch.stack(state.layers, 1)
    )


def judged(
    number: int, params: Params, reconstruction: Reconstruction, objectives: tuple[str, ...]
) -> Trial:
    """Return what is remembered of a finished trial. It failed if all restarts diverged.

    Its figures come from the weights alone. agreement: share of the chosen groups' members that several
    restarts hold. expected: sum of the confidences of those groups.
    """
    status, steps = reconstruction.status, reconstruction.steps
    finite = torch.tensor([one != "diverged" for one in status])
    figures: dict[str, Any] = {
        "residual": first_layer_residual(
            reconstruction.loss[finite], reconstruction.layers[finite]
        ),
        "agreement": 0.0,
        "expected": 0.0,
        "diverged": status.count("diverged"),
        "seconds": reconstruction.seconds,
        "step": int(steps[-1]) if len(steps) else None,
    }
    groups = reconstruction.selection
    if groups is not None and len(groups):
        agreed = groups.support > 1
        figures["agreement"] = float(groups.members[agreed].sum() / groups.members.sum())
        share = groups.support / max(reconstruction.restarts, 1)
        confidence = torch.where(groups.confidence.isnan(), share, groups.confidence)
        figures["expected"] = float(confidence[agreed].sum())
    if figures["residual"] is None and "residual" in objectives:
        reason = "diverged" if figures["diverged"] else "no finite residual"
        return Trial(number, params, FAILED, **figures, reason=reason)
    values = tuple(-figures[name] if name in EXPECTED else figures[name] for name in objectives)
    return Trial(number, params, COMPLETE, values, **figures)


def _run_attack(task: Task, job: Job) -> Outcome:
    """Attack with all trials of a job side by side, up to its pause or to the end."""
    restarts = restarts_of(task.attack)
    base = task.attack.changed(seed=job.seed * SEEDS + job.numbers[0])
    attacks = [configured(base, params) for params in job.params.values()]
    stacked = [attack.changed(restarts=restarts * len(attacks)) for attack in attacks]
    per_run = [attack for attack in stacked for _ in range(restarts)]
    with tempfile.TemporaryDirectory(prefix="residuum-") as folder:
        path = Path(folder) / "state.safetensors" if job.until or job.state else None
        if path is not None and job.state is not None:
            path.write_bytes(job.state)
        first = stacked[0].resolve_settings(task.network, task.knowledge)
        if path is not None and job.until and isinstance(first, Stationarity):
            has_steps = first.advance(task.network, task.knowledge, path, job.until, per_run)
            if has_steps:
                return Outcome(job, state=path.read_bytes())
        together = first.run(task.network, task.knowledge, state_path=path, per_run=per_run)
    if len(attacks) == 1:
        return Outcome(job, (together,))
    single = (_restarts_of(together, i, attack) for i, attack in enumerate(attacks))
    return Outcome(job, tuple(single))


def _restarts_of(together: Reconstruction, place: int, attack: Attack) -> Reconstruction:
    """Return the restarts of one trial of a job, as if they had run alone."""
    count = restarts_of(attack)
    first = place * count
    rows = slice(first, first + count)
    mask = (together.run >= first) & (together.run < first + count)
    alone = together.replace(
        x=together.x[mask],
        labels=together.labels[mask],
        lam=together.lam[mask],
        run=together.run[mask] - first,
        loss=together.loss[rows],
        layers=together.layers[rows],
        status=together.status[rows],
        settings=attack.to_json(),
        seconds=together.seconds * count / together.restarts,
        ident=None if together.ident is None else together.ident[mask],
        events=tuple(
            {**event, "run": event["run"] - first}
            for event in together.events
            if first <= event["run"] < first + count
        ),
        second_order=together.second_order[rows],
        selection=None,
    )
    return alone.replace(selection=select(alone))


class Engine(Protocol):
    """Runs jobs on some machines."""

    def places(self) -> int:
        """Return how many jobs may be submitted at this moment."""
        return 1

    def submit(self, job: Job) -> Future[Outcome]:
        """Begin a job. The future has an exception only if the worker died: other failures are outcomes."""

    def close(self) -> None:
        """Stop jobs that still run and release the machines."""


def outcomes(engine: Engine, jobs: Iterable[Job], retries: int) -> Iterator[Outcome]:
    """Yield the outcome of every job once, as jobs end.

    ``jobs`` is read no faster than there are places. If a worker dies, its job is tried again, at most
    ``retries`` times; then its death is the outcome.
    """
    again, pending = list[tuple[Job, int]](), dict[Future[Outcome], tuple[Job, int]]()
    source = ((job, 1) for job in jobs)
    while True:
        while len(pending) < engine.places() and (
            attempt := again.pop() if again else next(source, None)
        ):
            pending[engine.submit(attempt[0])] = attempt
        if not pending:
            return
        for ended in wait(pending, REFRESH, FIRST_COMPLETED).done:
            job, tries = pending.pop(ended)
            if (problem := ended.exception()) is None:
                yield ended.result()
            elif tries <= retries:
                again.append((job, tries + 1))
            else:
                yield Outcome(job, reason=f"its worker died {tries} times: {_reason(problem)}")


class Local(Engine):
    """This process, one job after the other; jobs of several trials fill a GPU."""

    def __init__(self, task: Task, request: SweepRequest) -> None:
        self._task, self._threads = task, torch.get_num_threads()

    def submit(self, job: Job) -> Future[Outcome]:
        """Run the job; the future is done."""
        ended = Future[Outcome]()
        ended.set_result(work(self._task, job))
        return ended

    def close(self) -> None:
        """Restore the caller's number of threads."""
        torch.set_num_threads(self._threads)


class WorkerDiedError(Exception):
    """A process ended in the middle of a job."""


class Worker:
    """A process that runs jobs one after the other. It has its own copy of the task, sent once."""

    def __init__(self, task: Task) -> None:
        context = mp.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, task), daemon=True)
        self.process.start()
        other.close()

    def run(self, job: Job) -> Outcome:
        """Run a job, or raise what the process died of."""
        try:
            self._pipe.send(job)
            return self._pipe.recv()
        except (EOFError, OSError) as problem:
            self.process.join()
            code = self.process.exitcode
            # The kernel sends signal 9 to a process when memory has run out.
            reason = f"{MEMORY}, or killed: signal 9" if code == -9 else f"exit code {code}"
            raise WorkerDiedError(reason) from problem


def _serve(pipe: Connection, task: Task) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep's own process answers Ctrl-C
    Thread(target=_end_with_parent, daemon=True).start()
    while True:
        pipe.send(work(task, pipe.recv()))


def _end_with_parent() -> None:
    """End this process, also in the middle of a job, when the sweep is killed."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Processes(Engine):
    """Processes on this machine. The death of one costs its own job and no other."""

    def __init__(self, task: Task, request: SweepRequest) -> None:
        self._count = request.workers or max(1, (os.cpu_count() or 1) // request.cpus)
        self._task = task
        self._threads = ThreadPoolExecutor(self._count)  # each waits for the process that it uses
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []

    def places(self) -> int:
        """One job per process."""
        return self._count

    def submit(self, job: Job) -> Future[Outcome]:
        """Give the job to a process that is idle, or to a new one."""
        if not self._idle:
            self._workers.append(Worker(self._task))
            self._idle.append(self._workers[-1])
        return self._threads.submit(self._run, self._idle.pop(), job)

    def _run(self, worker: Worker, job: Job) -> Outcome:
        outcome = worker.run(job)
        self._idle.append(worker)  # unless it died
        return outcome

    def close(self) -> None:
        """End every process."""
        for worker in self._workers:
            worker.process.terminate()
        self._threads.shutdown()
        for worker in self._workers:
            worker.process.join()


class Ray(Engine):
    """Jobs as Ray tasks with so many CPUs and GPUs each, on a cluster started here on 127.0.0.1, or on
    one that is running elsewhere.

    The weights go into the object store once and from there to every machine that runs a trial. If a
    machine leaves, its trials run again on another; machines that join get the next ones.
    """

    def __init__(self, task: Task, request: SweepRequest) -> None:
        is_local = not request.address or request.address.startswith(("127.0.0.1", "localhost"))
        for name, value in (QUIET | (LOOPBACK if is_local else {})).items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as problem:
            raise MissingExtraError(
                "The engine 'ray' needs Ray, which is not installed.",
                'Install it in a clone of residuum: pip install ".[cluster]"',
            ) from problem
        self._ray, self._request = ray, request
        self._connected = not ray.is_initialized()
        if self._connected:
            self._connect()
        self._task = ray.put(task)
        needs = {"num_cpus": request.cpus, "num_gpus": request.gpus}
        self._remote = ray.remote(work).options(**needs, max_retries=0)  # `outcomes` retries
        self._running = WeakKeyDictionary[Future[Outcome], Any]()
        self._places, self._counted = 0, -math.inf

    def _connect(self) -> None:
        request = self._request
        alone = {
            "num_cpus": request.workers * request.cpus or None,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            # Workers import while the cluster starts, not with their first trial.
            "_system_config": {"preload_python_modules": [__name__]},
        }
        options: dict[str, Any] = {"address": request.address} if request.address else alone
        try:
            self._ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as problem:
            raise InputError(
                f"No Ray cluster answers at {request.address or 'this machine'!r} "
                f"({' '.join(str(problem).split())[:120]}).",
                "Start one with `ray start --head`, or leave --address out.",
            ) from problem

    def places(self) -> int:
        """Count the places of the cluster now and then: machines come and go."""
        if time.monotonic() - self._counted > REFRESH:
            resources, request = self._ray.cluster_resources(), self._request
            counts = [resources.get("CPU", 0) / request.cpus]
            if request.gpus:
                counts.append(resources.get("GPU", 0) / request.gpus)
            self._places, self._counted = max(1, int(AHEAD * min(counts))), time.monotonic()
        return self._places

    def submit(self, job: Job) -> Future[Outcome]:
        """Start a Ray task for the job."""
        result = self._remote.remote(self._task, job)
        began = result.future()
        self._running[began] = result
        return began

    def close(self) -> None:
        """Stop what still runs, then leave the cluster, or end the one that was started here."""
        for began, result in list(self._running.items()):
            if not began.done():
                self._ray.cancel(result, force=True)
        if self._connected:
            self._ray.shutdown()


ENGINES: dict[str, Callable[[Task, SweepRequest], Engine]] = {
    "local": Local,
    "processes": Processes,
    "ray": Ray,
}
