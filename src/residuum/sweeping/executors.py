"""The engines that run the trials of a sweep: in this process, in other processes, or on a Ray cluster.

A job is one trial, or a batch of trials that run at the same time in one call of the attack. The numbers of
the trials decide which trials share a job, so every engine computes the same results. A failed trial does
not end the sweep. If a trial diverges, crashes or runs out of memory, the trial is recorded with the reason.

An engine returns a future for each submitted job. The result of the future is the outcome of the job.
:func:`run_jobs` keeps the engine busy, submits a job again if its worker died, and yields outcomes in the
order in which jobs end. To add an engine, write a class and add the class to ``ENGINES``.
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

# If a job failed because memory ran out, the reason of the failure contains this text.
MEMORY = "out of memory"
# A slot of a cluster is the cores and the GPU share that one job needs. For each slot, this many jobs are
# submitted. While one runs, the other waits, so that no slot is idle and an autoscaler adds machines.
JOBS_PER_SLOT = 2
REFRESH = 5.0  # seconds after which we count again how many jobs a cluster can run at the same time
# These environment variables switch off the usage reports and a warning of Ray.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# This environment variable restricts Ray to this machine, because anyone who reaches Ray can run code on it.
# Without the variable, Ray replaces 127.0.0.1 by the address of the network card on some systems.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass(frozen=True, eq=False)
class Task:
    """The inputs that all trials of a sweep share. They are sent to each worker process once.

    Attributes:
        network: The released network.
        knowledge: What the attacker knows.
        attack: The attack. A trial changes some of its settings.
        threads: Number of CPU threads of each worker.
    """

    network: Network
    knowledge: Knowledge
    attack: Attack
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Job:
    """One or more trials that a worker runs at the same time.

    All trials of a job have the same seed. The seed depends on the number of the first trial.

    Attributes:
        params: Values of the varied settings of each trial, by the number of the trial.
        seed: Seed of the sweep.
        until: Step of the attack at which the job pauses, 0 to run to the end.
        state: Saved state of the attack to continue from, None to start from the beginning.
    """

    params: dict[int, Params]
    seed: int
    until: int = 0
    state: bytes | None = None

    @property
    def numbers(self) -> list[int]:
        """Numbers of the trials (runs with one set of settings) in this job."""
        return list(self.params)

    def split_in_halves(self) -> list[Job]:
        """Split this job into two jobs, each with half of the trials (attacks to run)."""
        numbered_params, first_half_size = list(self.params.items()), -(-len(self.params) // 2)
        return [
            Job(dict(half), self.seed)
            for half in (numbered_params[:first_half_size], numbered_params[first_half_size:])
        ]


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a job of a sweep: reconstructions, a paused state, or the reason of a failure."""

    job: Job
    reconstructions: tuple[Reconstruction, ...] = ()
    state: bytes | None = None
    reason: str = ""
    seconds: float = 0.0


def split_into_jobs(params: Mapping[int, Params], seed: int, batch: int) -> list[Job]:
    """Divide the trials of a sweep into jobs by their numbers.

    The first job has the trials 0 to ``batch`` - 1.

    Args:
        params: Values of the varied settings of the trials that remain to be run, by trial number.
        seed: Seed of the sweep.
        batch: Number of trials per job.

    Returns:
        The jobs. A job has fewer trials if some of its trials are already finished.
    """
    params_by_job = groupby(params.items(), lambda row: row[0] // batch)
    return [Job(dict(block), seed) for _, block in params_by_job]


def run_job(task: Task, job: Job) -> Outcome:
    """Run a job: one or more trials of a sweep. Every engine calls this function.

    Args:
        task: The inputs that all trials of the sweep share.
        job: The trials to run.

    Returns:
        The outcome of the job. If the job failed, the outcome holds the reason.
    """
    start_time = time.perf_counter()
    torch.set_num_threads(task.threads)
    try:
        outcome = _run_attack(task, job)
    except Exception as problem:  # noqa: BLE001  a trial that fails is recorded with its reason
        outcome = Outcome(job, reason=_reason(problem))
    return dataclasses.replace(outcome, seconds=time.perf_counter() - start_time)


def _reason(problem: BaseException) -> str:
    """Return the reason of a failure as one line. If memory ran out, the line starts with ``MEMORY``."""
    problem_text = " ".join(str(problem).split())[:300]
    if isinstance(problem, WorkerDiedError):
        return problem_text
    # The errors of PyTorch and of Ray are both called OutOfMemoryError.
    is_memory_error = type(problem).__name__ in ("MemoryError", "OutOfMemoryError")
    if is_memory_error or "allocate memory" in problem_text:
        return f"{MEMORY}: {problem_text}"
    return f"{type(problem).__name__}: {problem_text}"


def first_layer_residual(loss: Tensor, layers: Tensor) -> float | None:
    """Return the relative residual of the first layer at the step with the best loss.

    The result is the median over all restarts.

    Args:
        loss: (R, T) loss of each of R restarts at T recorded steps. Infinite or NaN where there is none.
        layers: (R, T, L) squared relative residuals of L layers at these steps.

    Returns:
        The median residual. None if no restart has a finite loss, or if the attack records no residuals.
    """
    has_loss = torch.isfinite(loss).any(1)
    if not bool(has_loss.any()) or not layers.shape[-1]:
        return None
    best_step = loss.nan_to_num(nan=torch.inf).argmin(1)
    first_layer_residuals = (
        layers[torch.arange(len(best_step)), best_step, 0][has_loss].clamp(min=0).sqrt()
    )
    median_residual = float(first_layer_residuals.median())
    return median_residual if math.isfinite(median_residual) else None


def paused_value(path: Path) -> tuple[int, float | None]:
    """Read the step and the error of a paused trial from its saved state, (0, None) without a state."""
    if not path.is_file():
        return 0, None
    solver_state = SolverState.load(path)
    return solver_state.step, first_layer_residual(
        torch.stack(solver_state.loss, 1), torch.stack(solver_state.layers, 1)
    )


def judge_trial(
    number: int, params: Params, reconstruction: Reconstruction, objectives: tuple[str, ...]
) -> Trial:
    """Compute statistics that judge a finished trial of a sweep without training data.

    The candidates of all restarts form groups of similar candidates. ``agreement`` is the share of the
    candidates that are in groups with candidates of several restarts. Each group has a confidence, which is
    the probability that the reconstruction is real. ``expected`` is the sum of the confidences of the groups
    with candidates of several restarts.

    Args:
        number: Number of the trial.
        params: Values of the varied settings.
        reconstruction: Result of the trial.
        objectives: Names of the statistics that rank trials, such as ("residual",).

    Returns:
        The trial with its statistics. If trials are ranked by a residual and this trial has none, its state
        is "failed".
    """
    statuses, steps = reconstruction.status, reconstruction.steps
    is_not_diverged = torch.tensor([status != "diverged" for status in statuses])
    statistics: dict[str, Any] = {
        "residual": first_layer_residual(
            reconstruction.loss[is_not_diverged], reconstruction.layers[is_not_diverged]
        ),
        "agreement": 0.0,
        "expected": 0.0,
        "diverged": statuses.count("diverged"),
        "seconds": reconstruction.seconds,
        "step": int(steps[-1]) if len(steps) else None,
    }
    candidate_groups = reconstruction.selection
    if candidate_groups is not None and len(candidate_groups):
        is_found_by_several_restarts = candidate_groups.support > 1
        statistics["agreement"] = float(
            candidate_groups.members[is_found_by_several_restarts].sum()
            / candidate_groups.members.sum()
        )
        restart_share = candidate_groups.support / max(reconstruction.restarts, 1)
        confidence = torch.where(
            candidate_groups.confidence.isnan(), restart_share, candidate_groups.confidence
        )
        statistics["expected"] = float(confidence[is_found_by_several_restarts].sum())
    if statistics["residual"] is None and "residual" in objectives:
        reason = "diverged" if statistics["diverged"] else "no finite residual"
        return Trial(number, params, FAILED, **statistics, reason=reason)
    objective_values = tuple(
        -statistics[name] if name in EXPECTED else statistics[name] for name in objectives
    )
    return Trial(number, params, COMPLETE, objective_values, **statistics)


def _run_attack(task: Task, job: Job) -> Outcome:
    """Run all trials (attacks with different settings) of a job at the same time."""
    restarts = count_restarts(task.attack)
    seeded_attack = task.attack.changed(seed=job.seed * SEEDS + job.numbers[0])
    attacks = [configure(seeded_attack, params) for params in job.params.values()]
    attacks_with_all_restarts = [
        attack.changed(restarts=restarts * len(attacks)) for attack in attacks
    ]
    attack_of_each_run = [attack for attack in attacks_with_all_restarts for _ in range(restarts)]
    with tempfile.TemporaryDirectory(prefix="residuum-") as folder:
        state_path = Path(folder) / "state.safetensors" if job.until or job.state else None
        if state_path is not None and job.state is not None:
            state_path.write_bytes(job.state)
        first_attack = attacks_with_all_restarts[0].resolve_settings(task.network, task.knowledge)
        if state_path is not None and job.until and isinstance(first_attack, Stationarity):
            is_paused = first_attack.advance(
                task.network, task.knowledge, state_path, job.until, attack_of_each_run
            )
            if is_paused:
                return Outcome(job, state=state_path.read_bytes())
        combined = first_attack.run(
            task.network, task.knowledge, state_path=state_path, per_run=attack_of_each_run
        )
    if len(attacks) == 1:
        return Outcome(job, (combined,))
    reconstructions = (_extract_trial(combined, i, attack) for i, attack in enumerate(attacks))
    return Outcome(job, tuple(reconstructions))


def _extract_trial(combined: Reconstruction, index: int, attack: Attack) -> Reconstruction:
    """Extract the result of one trial (one set of settings) from the combined result of a job."""
    restart_count = count_restarts(attack)
    first_run = index * restart_count
    own_runs = slice(first_run, first_run + restart_count)
    is_own_candidate = (combined.run >= first_run) & (combined.run < first_run + restart_count)
    reconstruction = combined.replace(
        x=combined.x[is_own_candidate],
        labels=combined.labels[is_own_candidate],
        lam=combined.lam[is_own_candidate],
        run=combined.run[is_own_candidate] - first_run,
        loss=combined.loss[own_runs],
        layers=combined.layers[own_runs],
        status=combined.status[own_runs],
        settings=attack.to_json(),
        seconds=combined.seconds * restart_count / combined.restarts,
        ident=None if combined.ident is None else combined.ident[is_own_candidate],
        events=tuple(
            {**event, "run": event["run"] - first_run}
            for event in combined.events
            if first_run <= event["run"] < first_run + restart_count
        ),
        second_order=combined.second_order[own_runs],
        selection=None,
    )
    return reconstruction.replace(selection=select(reconstruction))


class Engine(Protocol):
    """Base class of engines, which run the attacks of a sweep, for example in other processes."""

    def count_slots(self) -> int:
        """Return how many jobs may be submitted to the engine at the same time."""
        return 1

    def submit(self, job: Job) -> Future[Outcome]:
        """Start a job. Return a future that gives its outcome, or an exception if the worker process dies."""

    def close(self) -> None:
        """Stop all running jobs and release the processes or machines of the engine."""


def run_jobs(engine: Engine, jobs: Iterable[Job], retries: int) -> Iterator[Outcome]:
    """Run jobs, and run a job again if its worker died.

    Args:
        engine: The engine that runs the jobs.
        jobs: The jobs. The next job is read only when the engine can run another one.
        retries: Maximal number of times that a job is run again after its worker died.

    Yields:
        The outcome of every job, in the order in which jobs end.
    """
    retry_queue, pending = list[tuple[Job, int]](), dict[Future[Outcome], tuple[Job, int]]()
    first_attempts = ((job, 1) for job in jobs)
    while True:
        while len(pending) < engine.count_slots() and (
            attempt := retry_queue.pop() if retry_queue else next(first_attempts, None)
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
                yield Outcome(
                    job, reason=f"the worker process died {tries} times: {_reason(problem)}"
                )


class Local(Engine):
    """An engine that runs the attacks of a sweep in this process, one after the other."""

    def __init__(self, task: Task, request: SweepRequest) -> None:
        self._task, self._threads = task, torch.get_num_threads()

    def submit(self, job: Job) -> Future[Outcome]:
        """Run the job to its end, and return a finished future with the outcome."""
        future = Future[Outcome]()
        future.set_result(run_job(self._task, job))
        return future

    def close(self) -> None:
        """Restore the number of CPU threads that PyTorch had before the sweep."""
        torch.set_num_threads(self._threads)


class WorkerDiedError(Exception):
    """The error that is raised if a worker process ends in the middle of a job."""


class Worker:
    """A worker process that runs jobs (attacks of a sweep) one after the other."""

    def __init__(self, task: Task) -> None:
        process_context = mp.get_context("spawn")
        self._pipe, worker_pipe = process_context.Pipe()
        self.process = process_context.Process(target=_serve, args=(worker_pipe, task), daemon=True)
        self.process.start()
        worker_pipe.close()

    def run(self, job: Job) -> Outcome:
        """Run a job in the worker process.

        Args:
            job: The trials to run.

        Returns:
            The outcome of the job.

        Raises:
            WorkerDiedError: If the process ended before the job was finished.
        """
        try:
            self._pipe.send(job)
            return self._pipe.recv()
        except (EOFError, OSError) as problem:
            self.process.join()
            exit_code = self.process.exitcode
            # If memory runs out, Linux kills a process with signal 9.
            reason = (
                f"{MEMORY}, or killed by signal 9" if exit_code == -9 else f"exit code {exit_code}"
            )
            raise WorkerDiedError(reason) from problem


def _serve(pipe: Connection, task: Task) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    Thread(target=_end_with_parent, daemon=True).start()
    while True:
        pipe.send(run_job(task, pipe.recv()))


def _end_with_parent() -> None:
    """End this worker process when the main process ends, even in the middle of a job."""
    main_process = mp.parent_process()
    assert main_process is not None
    main_process.join()
    os._exit(1)


class Processes(Engine):
    """An engine that runs the attacks of a sweep in several processes on this machine."""

    def __init__(self, task: Task, request: SweepRequest) -> None:
        self._count = request.workers or max(1, (os.cpu_count() or 1) // request.cpus)
        self._task = task
        # One thread for each worker process, which waits for the result of the process.
        self._threads = ThreadPoolExecutor(self._count)
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []

    def count_slots(self) -> int:
        """Return the number of worker processes, each of which runs one job at a time."""
        return self._count

    def submit(self, job: Job) -> Future[Outcome]:
        """Run the job in an idle worker process, or in a new worker process if none is idle."""
        if not self._idle:
            self._workers.append(Worker(self._task))
            self._idle.append(self._workers[-1])
        return self._threads.submit(self._run, self._idle.pop(), job)

    def _run(self, worker: Worker, job: Job) -> Outcome:
        outcome = worker.run(job)
        # If the process died, ``run`` raised an error, and the worker does not become idle.
        self._idle.append(worker)
        return outcome

    def close(self) -> None:
        """End all worker processes."""
        for worker in self._workers:
            worker.process.terminate()
        self._threads.shutdown()
        for worker in self._workers:
            worker.process.join()


class Ray(Engine):
    """An engine that runs jobs as Ray tasks, each with a number of CPUs and GPUs.

    Without an address, the engine starts a cluster on 127.0.0.1. The weights are put into the object store
    of Ray once, and every machine that runs a trial reads the weights from this store. If a machine leaves
    the cluster, its trials run again on another machine. Machines that join get the next trials.
    """

    def __init__(self, task: Task, request: SweepRequest) -> None:
        is_local = not request.address or request.address.startswith(("127.0.0.1", "localhost"))
        for name, value in (QUIET | (LOOPBACK if is_local else {})).items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as problem:
            raise MissingExtraError(
                "The option --engine ray needs the package Ray, which is not installed.",
                'Install it in a clone of residuum: pip install ".[cluster]"',
            ) from problem
        self._ray, self._request = ray, request
        self._connected = not ray.is_initialized()
        if self._connected:
            self._connect()
        self._task = ray.put(task)
        resources = {"num_cpus": request.cpus, "num_gpus": request.gpus}
        # Ray must not run a failed job again, because ``run_jobs`` already does this.
        self._remote = ray.remote(run_job).options(**resources, max_retries=0)
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
                "Start a cluster with `ray start --head`, or omit --address.",
            ) from problem

    def count_slots(self) -> int:
        """Return the number of jobs to submit at a time, which depends on the machines of the cluster."""
        if time.monotonic() - self._counted_at > REFRESH:
            resources, request = self._ray.cluster_resources(), self._request
            max_jobs_by_resource = [resources.get("CPU", 0) / request.cpus]
            if request.gpus:
                max_jobs_by_resource.append(resources.get("GPU", 0) / request.gpus)
            self._slots, self._counted_at = (
                max(1, int(JOBS_PER_SLOT * min(max_jobs_by_resource))),
                time.monotonic(),
            )
        return self._slots

    def submit(self, job: Job) -> Future[Outcome]:
        """Start a task on the Ray cluster that runs the job."""
        object_ref = self._remote.remote(self._task, job)
        future = object_ref.future()
        self._running[future] = object_ref
        return future

    def close(self) -> None:
        """Stop all running jobs. If this engine connected to the cluster, also disconnect."""
        for future, object_ref in list(self._running.items()):
            if not future.done():
                self._ray.cancel(object_ref, force=True)
        if self._connected:
            self._ray.shutdown()


ENGINES: dict[str, Callable[[Task, SweepRequest], Engine]] = {
    "local": Local,
    "processes": Processes,
    "ray": Ray,
}
