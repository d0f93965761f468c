"""Trials on a Ray cluster: one started here on 127.0.0.1, or one that is running elsewhere.

The weights go into the object store once and from there to every machine that runs a trial. A trial
whose machine goes away is run again on another; machines that come later get the next trials. Ray's
reports to its makers are switched off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

from residuum.errors import InputError, MissingExtraError
from residuum.sweeping.engines import Resources
from residuum.sweeping.trials import MEMORY, Job, Outcome, Task, work

AHEAD = 2  # jobs handed over per place: demand that an autoscaler sees, and no idle moment
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Ray's switch for "this machine alone", whatever the system: without it Ray takes 127.0.0.1 for the
# address of the network card, and whoever reaches that could run code here.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
LOOK = 5.0  # seconds between counts of the places that the cluster has


class Ray:
    """Jobs as Ray tasks with so many CPUs and GPUs each."""

    def __init__(self, task: Task, resources: Resources) -> None:
        for name, value in (QUIET | ({} if _elsewhere(resources.address) else LOOPBACK)).items():
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
            num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=resources.retries,
        )  # fmt: skip
        self._room, self._looked = 0, 0.0

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """As they end."""
        source, pending = iter(jobs), dict[Any, Job]()
        try:
            while True:
                while len(pending) < self._places():
                    job = next(source, None)
                    if job is None:
                        break
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
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._resources.address:
            options["address"] = self._resources.address
        else:
            options |= {
                "num_cpus": self._resources.workers * self._resources.cpus or None,
                "include_dashboard": False, "_node_ip_address": "127.0.0.1",
                # A trial too large for the machine comes back as such, not again and again.
                "_system_config": {"task_oom_retries": self._resources.retries},
            }  # fmt: skip
        try:
            self._ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError) as problem:
            raise InputError(
                f"No Ray cluster answers at {self._resources.address or 'this machine'!r} "
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
            return Outcome(job, reason=_line(problem))
        except errors.RayError as problem:
            tries = self._resources.retries + 1
            return Outcome(job, reason=f"its worker died {tries} times: {_line(problem)}")


def _elsewhere(address: str) -> bool:
    """Whether a cluster may have other machines than this one."""
    return bool(address) and not address.startswith(("127.0.0.1", "localhost"))


def _line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
