"""Shen et al. 2026: the same attack with and without splitting, sample by sample and over the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from residuum.attacks.state import Progress, SolverState
from residuum.evaluation.metrics import METRICS, display, published_search
from residuum.records import Dataset, Record
from residuum.reproduce.cache import digest
from residuum.reproduce.context import Context
from residuum.reproduce.shen2026.cases import Case, Prepared, aligned, prepared
from residuum.reproduce.shen2026.paired import THRESHOLD
from residuum.similarity import l2

FRAMES = 8


@dataclass(frozen=True, eq=False)
class Traced(Record):
    """One arm of a case. distance: (T, n) to the nearest candidate at every look; frames: (F, n, *shape)
    that candidate at some of them; final, other: candidates of the first and the second restart.
    """

    steps: Tensor
    loss: Tensor
    distance: Tensor
    counts: Tensor
    frame_steps: Tensor
    frames: Tensor
    final: Tensor
    other: Tensor
    best_loss: float


@dataclass
class Tracer:
    """A watcher of the first restart: distances to all samples, and pictures now and then."""

    samples: Tensor
    exact: bool
    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    distance: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    frame_steps: list[int] = field(default_factory=list)
    frames: list[Tensor] = field(default_factory=list)

    def __call__(self, progress: Progress) -> None:
        """Called by the solver at every look."""
        assert progress.living is not None
        x = progress.living()[0].detach().double()
        samples = self.samples.to(x.device)
        value, which = distances(x, samples, self.exact).min(0)
        self.steps.append(progress.step)
        self.loss.append(float(progress.loss[0]))
        self.distance.append(value.cpu())
        self.counts.append(len(x))
        if progress.step >= len(self.frames) * progress.steps / (FRAMES - 1) - 1e-9:
            if self.exact:
                shown = aligned(x, samples)[which, torch.arange(len(samples))].reshape(
                    samples.shape
                )
            else:
                shown = x[which]
            self.frame_steps.append(progress.step)
            self.frames.append(shown.float().cpu())


def distances(x: Tensor, samples: Tensor, exact: bool) -> Tensor:
    """(m, n) L2; for a cubic network between unit vectors up to sign, which is all that is determined."""
    if not exact:
        return l2(x.flatten(1), samples.flatten(1))
    inner = (aligned(x, samples) * samples.flatten(1)).sum(2).clamp(-1, 1)
    return (2 - 2 * inner).clamp(min=0).sqrt()


def traced(context: Context, ready: Prepared, arm: str) -> Traced:
    """Run one arm, or take it from the cache."""
    solver = ready.solvers[arm]
    key = digest("splitting", solver.fingerprint, ready.split.train.x)

    def make(partial: Path) -> Traced:
        tracer = Tracer(ready.split.train.x.double(), ready.exact)
        with context.attacking() as watch:

            def both(progress: Progress) -> None:
                tracer(progress)
                if watch is not None:
                    watch(progress)

            state = solver.solve(partial, both)
        final = living(solver.pixels(state.best_x), state)
        return Traced(
            steps=torch.tensor(tracer.steps),
            loss=torch.tensor(tracer.loss, dtype=torch.float64),
            distance=_stack(tracer.distance),
            counts=torch.tensor(tracer.counts),
            frame_steps=torch.tensor(tracer.frame_steps),
            frames=_stack(tracer.frames),
            final=final[0],
            other=final[-1],
            best_loss=float(state.best_loss[0]),
        )

    return context.cache.fetch("splitting", key, Traced, make)


def living(x: Tensor, state: SolverState) -> list[Tensor]:
    """Candidates in use of every restart, on the CPU."""
    x = x.detach().cpu().double()
    if state.population is None:
        return list(x)
    active = state.population.best_active.cpu()
    return [x[run][active[run]] for run in range(len(x))]


def quality(x: Tensor, data: Dataset, metric: str, exact: bool) -> Tensor:
    """(n,) how well every sample is matched, in the metric's own direction."""
    if exact or metric == "l2":
        return distances(x, data.x.double(), exact).amin(0)
    candidates, samples = x.reshape(-1, *data.shape), data.x.double()
    which = published_search(candidates, samples).argmax(0)
    mean = None if data.mean is None else data.mean.double()
    pairs = torch.stack([which, torch.arange(len(samples))], 1)
    shown = samples if mean is None else samples + mean
    return METRICS[metric].pairs(display(candidates, mean).float(), shown.float(), pairs).double()


def threshold(case: Case, ready: Prepared) -> float:
    """What counts as reconstructed: the published L2 on 784 pixels, per pixel; SSIM 0.4; |cos| 0.99."""
    if ready.exact:
        return math.sqrt(2 - 2 * 0.99)
    size = ready.split.train.x[0].numel()
    return THRESHOLD * math.sqrt(size / 784) if case.metric == "l2" else 0.4


def run_case(context: Context, case: Case) -> tuple[Prepared, dict[str, Traced]]:
    """Both arms of a case."""
    ready = prepared(context, case)
    return ready, {arm: traced(context, ready, arm) for arm in ("none", "split")}


def _stack(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts) if parts else torch.zeros(0)
