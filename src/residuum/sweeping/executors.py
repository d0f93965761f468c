"""The trials of a sweep, and the engines that run them: this process, other processes, or a Ray cluster.

A job is one trial, or a batch of trials that run side by side in one program (``per_run``). The numbers
of the trials decide which of them share a job, so every engine computes the same results. A failed trial
does not end the sweep. If a trial diverges, crashes or runs out of memory, it is recorded with the reason.

An engine turns a submitted job into a future of its outcome. :func:`run_jobs` keeps the engine busy,
submits a job again if its worker died, and yields outcomes in the order in which jobs end. To add an
engine, write a class and add it to ``ENGINES``.
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
    configure,
    count_restarts,
)

MEMORY = "out of memory"
# Jobs submitted per slot of a cluster. With two, no slot is ever idle, and an autoscaler sees the demand.
JOBS_PER_SLOT = 2
REFRESH = 5.0  # seconds between two counts of the slots of a cluster
# These switch off the usage reports of Ray.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# This restricts Ray to this machine on every system. Without it, Ray replaces 127.0.0.1 by the address of
# the network card, and anyone who can reach that card could run code here.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass(frozen=True, eq=False)
class Task:
    """The inputs that all trials share. They are sent to each worker once.

    Attributes:
        network: The released network.
        knowledge: What the attacker knows.
        attack: The attack.
        threads: Number of threads of each worker.
    """

    network: Network
    knowledge: Knowledge
    attack: Attack
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Job:
    """Trials that run side by side. The number of the first trial decides the random numbers of all.

    Attributes:
        params: Settings of each trial, by number.
        seed: Seed of the sweep.
        until: Step to pause at, 0 to run to the end.
        state: Saved state to continue from.
    """

    params: dict[int, Params]
    seed: int
    until: int = 0
    state: bytes | None = None

    @property
    def numbers(self) -> list[int]:
        """Numbers of its trials."""
        return list(self.params)

    def split_in_halves(self) -> list[Job]:
        """Split the job into two with half of the trials each."""
        rows, size = list(self.params.items()), -(-len(self.params) // 2)
        return [Job(dict(half), self.seed) for half in (rows[:size], rows[size:])]


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a job: a reconstruction per trial, a paused state, or the reason of a failure."""

    job: Job
    reconstructions: tuple[Reconstruction, ...] = ()
    state: bytes | None = None
    reason: str = ""
    seconds: float = 0.0


def split_into_jobs(params: Mapping[int, Params], seed: int, batch: int) -> list[Job]:
    """Split trials into jobs by their numbers: 0 .. b-1, b .. 2b-1 and so on, with batches of size b.

    Args:
        params: Settings of the trials that remain to be run, by number.
        seed: Seed of the sweep.
        batch: Number of trials per job.

    Returns:
        The jobs. A job has fewer trials if some of its numbers are missing.
    """
    blocks = groupby(params.items(), lambda row: row[0] // batch)
    return [Job(dict(block), seed) for _, block in blocks]


def run_job(task: Task, job: Job) -> Outcome:
    """Run a job. This is the function that every engine calls.

    Args:
        task: The inputs that all trials share.
        job: The job.

    Returns:
        The outcome. If the job failed, it holds the reason.
    """
    start = time.perf_counter()
    torch.set_num_threads(task.threads)
    try:
        outcome = _run_attack(task, job)
    except Exception as problem:  # noqa: BLE001  a trial that fails is recorded with its reason
        outcome = Outcome(job, reason=_reason(problem))
    return dataclasses.replace(outcome, seconds=time.perf_counter() - start)


def _reason(problem: BaseException) -> str:
    """Return the reason in one line. ``MEMORY`` marks jobs that are run again in two halves."""
    text = " ".join(str(problem).split())[:300]
    if isinstance(problem, WorkerDiedError):
        return text
    is_memory_error = type(problem).__name__ in ("MemoryError", "OutOfMemoryError")  # torch and Ray
    if is_memory_error or "allocate memory" in text:
        return f"{MEMORY}: {text}"
    return f"{type(problem).__name__}: {text}"


def first_layer_residual(loss: Tensor, layers: Tensor) -> float | None:
    """Return the median over restarts of the relative first-layer residual at the best loss.

    Args:
        loss: (R, T), infinite or NaN if a restart has no loss at this step.
        layers: (R, T, L) squared relative residuals.

    Returns:
        The residual. None if no restart has a finite loss, or if the attack records no residuals.
    """
    has_loss = torch.isfinite(loss).any(1)
    if not bool(has_loss.any()) or not layers.shape[-1]:
        return None
    best = loss.nan_to_num(nan=torch.inf).argmin(1)
    first = layers[torch.arange(len(best)), best, 0][has_loss].clamp(min=0).sqrt()
    value = float(first.median())
    return value if math.isfinite(value) else None


def paused_value(path: Path) -> tuple[int, float | None]:
    """Return step and residual of a saved state, and step 0 if the file does not exist."""
    if not path.is_file():
        return 0, None
    state = SolverState.load(path)
    return state.step, first_layer_residual(
        torch.stack(state.loss, 1), torch.stack(state.layers, 1)
    )


def judge_trial(
    number: int, params: Params, reconstruction: Reconstruction, objectives: tuple[str, ...]
) -> Trial:
    """Compute the figures of a finished trial, from the weights alone.

    Agreement is the share of the members of selected groups that several restarts found. Expected is the
    sum of the confidences of these groups.

    Args:
        number: Number of the trial.
        params: Its settings.
        reconstruction: Its result.
        objectives: Names of the figures that rank trials.

    Returns:
        The trial. It has failed if there is no residual to rank it by.
    """
    statuses, steps = reconstruction.status, reconstruction.steps
    finite = torch.tensor([status != "diverged" for status in statuses])
    figures: dict[str, Any] = {
        "residual": first_layer_residual(
            reconstruction.loss[finite], reconstruction.layers[finite]
        ),
        "agreement": 0.0,
        "expected": 0.0,
        "diverged": statuses.count("diverged"),
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
    """Run all trials of a job side by side, up to the pause or to the end."""
    restarts = count_restarts(task.attack)
    base = task.attack.changed(seed=job.seed * SEEDS + job.numbers[0])
    attacks = [configure(base, params) for params in job.params.values()]
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
        combined = first.run(task.network, task.knowledge, state_path=path, per_run=per_run)
    if len(attacks) == 1:
        return Outcome(job, (combined,))
    results = (_extract_trial(combined, i, attack) for i, attack in enumerate(attacks))
    return Outcome(job, tuple(results))


def _extract_trial(combined: Reconstruction, index: int, attack: Attack) -> Reconstruction:
    """Return the restarts of one trial of a job, as if the trial had run alone."""
    count = count_restarts(attack)
    first = index * count
    rows = slice(first, first + count)
    mask = (combined.run >= first) & (combined.run < first + count)
    reconstruction = combined.replace(
        x=combined.x[mask],
        labels=combined.labels[mask],
        lam=combined.lam[mask],
        run=combined.run[mask] - first,
        loss=combined.loss[rows],
        layers=combined.layers[rows],
        status=combined.status[rows],
        settings=attack.to_json(),
        seconds=combined.seconds * count / combined.restarts,
        ident=None if combined.ident is None else combined.ident[mask],
        events=tuple(
            {**event, "run": event["run"] - first}
            for event in combined.events
            if first <= event["run"] < first + count
        ),
        second_order=combined.second_order[rows],
        selection=None,
    )
    return reconstruction.replace(selection=select(reconstruction))


class Engine(Protocol):
    """An executor of jobs."""

    def count_slots(self) -> int:
        """Return the number of jobs that may be submitted at the same time."""
        return 1

    def submit(self, job: Job) -> Future[Outcome]:
        """Start a job. The future has an exception only if the worker died. Other failures are outcomes."""

    def close(self) -> None:
        """Stop all running jobs and release the machines."""


def run_jobs(engine: Engine, jobs: Iterable[Job], retries: int) -> Iterator[Outcome]:
    """Run jobs, and run a job again if its worker died.

    Args:
        engine: The engine.
        jobs: The jobs. They are read only when the engine has a free slot.
        retries: Maximal number of times that a job is run again.

    Yields:
        The outcome of every job, in the order in which jobs end.
    """
    retry_queue, pending = list[tuple[Job, int]](), dict[Future[Outcome], tuple[Job, int]]()
    source = ((job, 1) for job in jobs)
    while True:
        while len(pending) < engine.count_slots() and (
            attempt := retry_queue.pop() if retry_queue else next(source, None)
        ):
            pending[engine.submit(attempt[0])] = attempt
        if not pending:
            return
        for ended in wait(pending, REFRESH, FIRST_COMPLETED).done:
            job, tries = pending.pop(ended)
            if (problem := ended.exception()) is None:
                yield ended.result()
            elif tries <= retries:
                retry_queue.append((job, tries + 1))
            else:
                yield Outcome(job, reason=f"its worker died {tries} times: {_reason(problem)}")


class Local(Engine):
    """An engine that runs jobs in this process, one after the other. A batch of trials can fill a GPU."""

    def __init__(self, task: Task, request: SweepRequest) -> None:
        self._task, self._threads = task, torch.get_num_threads()

    def submit(self, job: Job) -> Future[Outcome]:
        """Run the job, and return a finished future."""
        ended = Future[Outcome]()
        ended.set_result(run_job(self._task, job))
        return ended

    def close(self) -> None:
        """Restore the number of threads."""
        torch.set_num_threads(self._threads)


class WorkerDiedError(Exception):
    """The error that is raised when a process ended in the middle of a job."""


class Worker:
    """A process that runs jobs one after the other. The task is sent to it once."""

    def __init__(self, task: Task) -> None:
        context = mp.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, task), daemon=True)
        self.process.start()
        other.close()

    def run(self, job: Job) -> Outcome:
        """Run a job in the process.

        Args:
            job: The job.

        Returns:
            The outcome.

        Raises:
            WorkerDiedError: If the process ended before the job was finished.
        """
        try:
            self._pipe.send(job)
            return self._pipe.recv()
        except (EOFError, OSError) as problem:
            self.process.join()
            code = self.process.exitcode
            # The kernel sends signal 9 to a process if memory runs out.
            reason = f"{MEMORY}, or killed: signal 9" if code == -9 else f"exit code {code}"
            raise WorkerDiedError(reason) from problem


def _serve(pipe: Connection, task: Task) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    Thread(target=_end_with_parent, daemon=True).start()
    while True:
        pipe.send(run_job(task, pipe.recv()))


def _end_with_parent() -> None:
    """End this process when the main process ends, even in the middle of a job."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Processes(Engine):
    """An engine that runs jobs in processes on this machine. If a process dies, only its job is lost."""

    def __init__(self, task: Task, request: SweepRequest) -> None:
        self._count = request.workers or max(1, (os.cpu_count() or 1) // request.cpus)
        self._task = task
        self._threads = ThreadPoolExecutor(self._count)  # each thread waits for one process
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []

    def count_slots(self) -> int:
        """Return the number of processes."""
        return self._count

    def submit(self, job: Job) -> Future[Outcome]:
        """Run the job in an idle process, or in a new one."""
        if not self._idle:
            self._workers.append(Worker(self._task))
            self._idle.append(self._workers[-1])
        return self._threads.submit(self._run, self._idle.pop(), job)

    def _run(self, worker: Worker, job: Job) -> Outcome:
        outcome = worker.run(job)
        self._idle.append(worker)  # not reached if the process died
        return outcome

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.process.terminate()
        self._threads.shutdown()
        for worker in self._workers:
            worker.process.join()


class Ray(Engine):
    """An engine that runs jobs as Ray tasks, each with a number of CPUs and GPUs.

    Without an address, it starts a cluster on 127.0.0.1. The weights are put into the object store once,
    and every machine that runs a trial reads them from there. If a machine leaves the cluster, its trials
    run again on another machine. Machines that join get the next trials.
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
        self._remote = ray.remote(run_job).options(**needs, max_retries=0)  # `run_jobs` retries
        self._running = WeakKeyDictionary[Future[Outcome], Any]()
        self._slots, self._counted_at = 0, -math.inf

    def _connect(self) -> None:
        request = self._request
        local_options = {
            "num_cpus": request.workers * request.cpus or None,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            # Workers import this module while the cluster starts, not in their first trial.
            "_system_config": {"preload_python_modules": [__name__]},
        }
        options: dict[str, Any] = {"address": request.address} if request.address else local_options
        try:
            self._ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as problem:
            raise InputError(
                f"A Ray cluster must be reachable at {request.address or 'this machine'!r}; connecting "
                f"failed ({' '.join(str(problem).split())[:120]}).",
                "Start one with `ray start --head`, or leave --address out.",
            ) from problem

    def count_slots(self) -> int:
        """Return the slots of the cluster. They are counted again regularly, as machines come and go."""
        if time.monotonic() - self._counted_at > REFRESH:
            resources, request = self._ray.cluster_resources(), self._request
            counts = [resources.get("CPU", 0) / request.cpus]
            if request.gpus:
                counts.append(resources.get("GPU", 0) / request.gpus)
            self._slots, self._counted_at = (
                max(1, int(JOBS_PER_SLOT * min(counts))),
                time.monotonic(),
            )
        return self._slots

    def submit(self, job: Job) -> Future[Outcome]:
        """Start a Ray task for the job."""
        result = self._remote.remote(self._task, job)
        future = result.future()
        self._running[future] = result
        return future

    def close(self) -> None:
        """Stop running jobs. Then leave the cluster, or end it if it was started here."""
        for future, result in list(self._running.items()):
            if not future.done():
                self._ray.cancel(result, force=True)
        if self._connected:
            self._ray.shutdown()


ENGINES: dict[str, Callable[[Task, SweepRequest], Engine]] = {
    "local": Local,
    "processes": Processes,
    "ray": Ray,
}
