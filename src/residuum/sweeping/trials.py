"""One trial of a sweep: what a worker is given, what it does, and what it hands back.

A job is one trial, or several that share a program (``PerRun``); which trials share one
is decided by their numbers, so that every engine computes the same. Nothing a worker meets ends the
sweep: a trial that diverges, crashes or finds no memory comes back with its reason.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residuum.attacks import AttackConfig, attack, select
from residuum.attacks.state import Progress, SolverState
from residuum.records import Checkpoint, Knowledge, Reconstruction
from residuum.sweeping.space import Params, configured

COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"
MEMORY = "out of memory"
SEEDS = 100_003  # trials of one sweep at most; sweeps with other seeds share no random number


@dataclass(frozen=True)
class Trial:
    """A trial as it is remembered. values: what it is ranked by, () unless complete.

    residual: relative first-layer residual (a norm), median of the restarts that did not diverge;
    agreement: share of its candidates that several restarts hold; expected: sum of the confidences
    of those, the number of reconstructions that it takes to be real.
    """

    number: int
    params: Params
    state: str
    values: tuple[float, ...] = ()
    residual: float | None = None
    agreement: float | None = None
    expected: float | None = None
    step: int | None = None
    diverged: int = 0
    seconds: float = 0.0
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """All fields, plainly."""
        return dataclasses.asdict(self) | {"values": list(self.values)}


@dataclass(frozen=True, eq=False)
class Task:
    """What all trials share; it travels to a worker once. config: resolved; threads: of each worker."""

    checkpoint: Checkpoint
    knowledge: Knowledge
    config: AttackConfig
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Job:
    """Trials that run side by side. until: step to pause at, 0 for the end; state: where to go on."""

    numbers: tuple[int, ...]
    params: tuple[Params, ...]
    seed: int
    until: int = 0
    state: bytes | None = None


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


def jobs(numbers: list[int], params: list[Params], seed: int, batch: int) -> list[Job]:
    """Blocks of ``batch`` trials, by number: 0 .. b-1, b .. 2b-1, and so on, less those that ended."""
    blocks: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        blocks.setdefault(number // batch, []).append(place)
    return [
        job_of([numbers[i] for i in places], [params[i] for i in places], seed)
        for places in blocks.values()
    ]


def job_of(numbers: Sequence[int], params: Sequence[Params], seed: int) -> Job:
    """These trials side by side; the first one's number decides the random numbers of all."""
    return Job(tuple(numbers), tuple(params), seed * SEEDS + numbers[0])


def work(task: Task, job: Job) -> Outcome:
    """Run a job. Every engine calls this and nothing else."""
    start = time.perf_counter()
    torch.set_num_threads(task.threads)
    try:
        done = _attacked(task, job)
    except Exception as problem:  # noqa: BLE001  whatever a trial dies of is its result
        done = Outcome(job, reason=reason_of(problem))
    return dataclasses.replace(done, seconds=time.perf_counter() - start)


def reason_of(problem: BaseException) -> str:
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
    """Step and residual of a state on disk."""
    state = SolverState.load(path)
    return state.step, measured(torch.stack(state.loss, 1), torch.stack(state.layers, 1))


def judged(
    number: int, params: Params, found: Reconstruction, objectives: tuple[str, ...]
) -> Trial:
    """What is remembered of a finished trial; all restarts diverged: it failed."""
    lost = found.status.count("diverged")
    living = torch.tensor([status != "diverged" for status in found.status])
    residual = measured(found.loss[living], found.layers[living]) if bool(living.any()) else None
    chosen = found.selection
    facts: dict[str, Any] = {"residual": residual, "agreement": 0.0, "expected": 0.0}
    if chosen is not None and len(chosen):
        agreed = chosen.support > 1
        facts["agreement"] = float(chosen.members[agreed].sum() / chosen.members.sum())
        facts["expected"] = float(chosen.confidence[agreed].sum())
    facts |= {"diverged": lost, "seconds": found.seconds, "step": int(found.steps[-1])}
    if residual is None:
        why = "diverged" if lost else "no finite residual"
        return Trial(number, params, FAILED, **facts, reason=why)
    return Trial(number, params, COMPLETE, tuple(facts[name] for name in objectives), **facts)


def trial_config(task: Task, job: Job, params: Params) -> AttackConfig:
    """The whole configuration of one trial."""
    return dataclasses.replace(configured(task.config, params), seed=job.seed)


def _attacked(task: Task, job: Job) -> Outcome:
    own = task.config.restarts
    runs = own * len(job.params)
    configs = [trial_config(task, job, params) for params in job.params]
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
                task.checkpoint, task.knowledge, stacked[0], state_path=path,
                watch=watch if job.until else None,
                per_run=[config for config in stacked for _ in range(own)],
            )  # fmt: skip
        except Pause:
            assert path is not None
            return Outcome(job, state=path.read_bytes())
    parts = (_part(found, i * own, own, config) for i, config in enumerate(configs))
    return Outcome(job, tuple(parts))


def _part(found: Reconstruction, first: int, own: int, config: AttackConfig) -> Reconstruction:
    """The restarts of one trial out of a job's, as if they had run alone."""
    if found.restarts == own:
        return found
    rows = slice(first, first + own)
    mine = (found.run >= first) & (found.run < first + own)
    events = ({**event, "run": event["run"] - first} for event in found.events
              if first <= event["run"] < first + own)  # fmt: skip
    piece = found.replace(
        x=found.x[mine], labels=found.labels[mine], lam=found.lam[mine], run=found.run[mine] - first,
        loss=found.loss[rows], layers=found.layers[rows], status=found.status[rows],
        settings=config.to_json(), seconds=found.seconds * own / found.restarts,
        ident=None if found.ident is None else found.ident[mine], events=tuple(events),
        second_order=found.second_order[rows], selection=None,
    )  # fmt: skip
    return piece.replace(selection=select(piece))
