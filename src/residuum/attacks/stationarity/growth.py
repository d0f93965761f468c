"""Grow the candidate set: between evaluations of the loss, runs have rounds in which they get new candidates.

A run has a round after a fixed number of steps, when its loss stagnates, or when its gradient is small. Every
run has a clock of its own, so that restarts grow apart. A round

1. drops candidates without a multiplier and merges pairs that one candidate can stand for (``merging.py``),
2. asks a strategy for new candidates; sample splitting is the published one (``splitting.py``),
3. gives the new candidates slots in the solver's tensors (``slots.py``) and records what happened.

No round raises the loss of the equation.

An event is a dict of plain values:

    step, run                  when, and in which restart
    kind                       prune, merge, stable (no candidate was added), or that of the strategy
    parent                     the candidate that is dropped, merged into another, or split
    children                   the candidate that a merge leaves, or the new ones
    eigenvalue, eta            of a split; the least eigenvalue of a stable run
    predicted                  second-order change of the loss by this split alone
    obtained                   change of the loss by the whole round, whose splits share a residual
    loss_before, loss_after    of the equation, without priors, at the surrogate of that step

Candidates are numbers within their run (``slots.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from residuum.attacks.random_streams import stream
from residuum.attacks.stationarity.curvature import second_order
from residuum.attacks.stationarity.merging import merge, prune
from residuum.attacks.stationarity.priors import box
from residuum.attacks.stationarity.problem import Evaluation, Problem
from residuum.attacks.stationarity.slots import Newcomer, population_of, settle, with_events
from residuum.attacks.stationarity.solver import Solver, SolverState
from residuum.settings import StationaritySettings


class Round:
    """What a strategy may look at: all runs at one step, also those that are not due.

    x: candidates (R, m, *shape).
    lam: plain-sum multipliers.
    active: slots in use (R, m).
    problem: the equation, with the labels of these candidates.
    quota: how many candidates each run may get, 0 if it is not due.
    generators: one per run, of this round alone. ``noise`` was drawn from them first.
    noise: random numbers with the shape of x.
    free: 1 where a coordinate may move both ways and 0 elsewhere; None if all may.
    """

    def __init__(
        self, grower: Grower, state: SolverState, due: list[int], sharpness: float | Tensor
    ) -> None:
        population, settings = population_of(state), grower.settings
        self.solver, self.step, self.sharpness = grower.solver, state.step, sharpness
        self.problem = grower.problem.with_labels(population.labels)
        self.x, self.lam, self.active = state.x, state.lam * grower.scale, population.active
        self.quota = [
            min(max(1, int(settings.split_cap * count)), grower.limit - count) if run in due else 0
            for run, count in enumerate(self.active.sum(1).tolist())
        ]
        self.generators = [grower.generator(state.step, run) for run in range(self.runs)]
        self.noise = grower.noise(state.x, self.generators)
        self.free: Tensor | None = None
        if self.solver.box is not None:
            low, high = box(self.solver.box, state.x)
            self.free = ((state.x > low) & (state.x < high)).to(state.x)

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return len(self.x)

    @property
    def config(self) -> StationaritySettings:
        """Settings of the attack."""
        return self.solver.config

    def clamp(self, x: Tensor) -> Tensor:
        """Project candidates into the known box."""
        knowledge = self.solver.box
        return x if knowledge is None else x.clamp(*box(knowledge, x))

    def length(self) -> Tensor:
        """Return the median length of every run's candidates (R,)."""
        norms = self.x.flatten(2).norm(dim=2).masked_fill(~self.active, torch.nan)
        return norms.nanmedian(dim=1).values


@dataclass(frozen=True)
class Proposal:
    """What a strategy adds in a round.

    newcomers: per run, with plain-sum multipliers.
    before, after: the loss (R,) without and with them.
    lowest: the least eigenvalue of each run's candidates (R,), nan if the strategy does not compute it.
    note: for the reader of the result, "" for none.
    """

    newcomers: list[list[Newcomer]]
    before: Tensor
    after: Tensor
    lowest: Tensor
    note: str = ""


class GrowthStrategy:
    """How a round finds new candidates. ``event`` is the kind of their events."""

    event: ClassVar[str]

    def check(self, solver: Solver) -> None:
        """Refuse an attack in which the strategy cannot work, with an ``InputError``."""

    def propose(self, now: Round) -> Proposal:
        """Propose new candidates that do not raise the loss of any run."""
        raise NotImplementedError


class Grower:
    """Grows the candidates of one solver, between its evaluations of the loss."""

    def __init__(self, solver: Solver, strategy: GrowthStrategy) -> None:
        strategy.check(solver)
        self.solver, self.strategy = solver, strategy
        self.problem, self.scale = solver.problem, solver.scale
        self.limit = self.settings.split_limit or 4 * solver.sizes[1]
        self.note = ""  # of the first round that has one

    @property
    def settings(self) -> StationaritySettings:
        """Settings of growth."""
        return self.solver.config

    def next_round(self, step: int) -> int:
        """Return the step before which no round is due, as far as that is known in advance."""
        if self.settings.split_trigger != "period":
            return self.solver.config.steps
        return (step // self.settings.split_every + 1) * self.settings.split_every

    def after(self, state: SolverState) -> SolverState:
        """Return the state after an evaluation, with a round for every run that is due; in full precision."""
        if state.stopped:
            return state
        with self.solver.precision(False):
            return self._grown(state, self.solver.sharpness_at(state.step))

    def _grown(self, state: SolverState, sharpness: float | Tensor) -> SolverState:
        due = [run for run in range(len(state.x)) if self._is_due(state, run, sharpness)]
        if not due:
            return state
        population = population_of(state)
        last = tuple(state.step if r in due else step for r, step in enumerate(population.last))
        state = state.replace(population=population.replace(last=last))
        if self.settings.split_merge:
            state = self._merge(state, due, sharpness)
        state, due = self._stop(state, due, sharpness)
        if not due:
            return state
        proposal = self.strategy.propose(Round(self, state, due, sharpness))
        self.note = self.note or proposal.note
        return self._settle(state, due, proposal)

    def _is_due(self, state: SolverState, run: int, sharpness: float | Tensor) -> bool:
        """Return True if this run has a round now: by its step, its gradient, or its stagnating loss.

        A loss stagnates if its least value in the later half of a period is hardly below that of the earlier
        half.
        """
        settings, population = self.settings, population_of(state)
        is_over = state.step >= self.solver.config.steps
        if population.stopped[run] or not bool(state.alive[run]) or is_over:
            return False
        if settings.split_trigger == "period":
            return state.step > 0 and state.step % settings.split_every == 0
        start = population.last[run]
        if state.step - start < settings.split_every:
            return False
        if settings.split_trigger == "gradient":
            gradient = self._evaluate(state, sharpness).grad_x[run]
            return float(gradient.norm()) <= settings.split_tolerance
        start = max(start, state.step - settings.split_every)
        middle = (start + state.step) / 2
        history = list(zip(state.steps, state.loss, strict=True))
        early = [float(loss[run]) for step, loss in history if start <= step <= middle]
        late = [float(loss[run]) for step, loss in history if step > middle]
        return bool(early and late) and min(late) > (1 - settings.split_tolerance) * min(early)

    def _evaluate(self, state: SolverState, sharpness: float | Tensor) -> Evaluation:
        return self._problem_of(state).evaluate(state.x, state.lam * self.scale, sharpness)

    def _problem_of(self, state: SolverState) -> Problem:
        return self.problem.with_labels(population_of(state).labels)

    def _stop(
        self, state: SolverState, due: list[int], sharpness: float | Tensor
    ) -> tuple[SolverState, list[int]]:
        """Stop runs whose loss is zero or that hold as many candidates as allowed; they grow no more.

        Returns:
            The new state, and the runs that are still due.
        """
        population, loss = population_of(state), self._evaluate(state, sharpness).loss
        zero = self.settings.split_zero * self.problem.empty_loss
        stopped = list(population.stopped)
        for run in due:
            if float(loss[run]) <= zero:
                stopped[run] = "zero loss"
            elif int(population.active[run].sum()) >= self.limit:
                stopped[run] = "limit"
        state = state.replace(population=population.replace(stopped=tuple(stopped)))
        return state, [run for run in due if not stopped[run]]

    def _merge(self, state: SolverState, due: list[int], sharpness: float | Tensor) -> SolverState:
        """Drop candidates without a multiplier, then merge pairs, and record both."""
        ident, problem = population_of(state).ident, self._problem_of(state)
        state, dropped = prune(problem, state, self.scale, sharpness, due)
        events: list[dict[str, Any]] = [
            {"step": state.step, "run": run, "kind": "prune", "parent": int(ident[run, slot])}
            for run, slot in dropped.nonzero().tolist()
        ]
        state, merges = merge(problem, state, self.scale, sharpness, due)
        for run, kept_slot, lost_slot, before, after in merges:
            parent, child = int(ident[run, lost_slot]), int(ident[run, kept_slot])
            event = {"step": state.step, "run": run, "kind": "merge", "parent": parent}
            losses = {"loss_before": before, "loss_after": after}
            events.append({**event, "children": [child], **losses})
        return with_events(state, events)

    def generator(self, step: int, run: int) -> torch.Generator:
        """Return the generator of one round and run, so that neither other runs nor a resume matter."""
        return stream("growth", self.solver.config.seed, run, step)

    def noise(self, x: Tensor, generators: list[torch.Generator]) -> Tensor:
        """Draw normal numbers with the shape of x.

        The numbers of a run do not depend on how many slots the other runs need.
        """
        most = max(self.limit, x.shape[1])
        rows = [
            torch.randn(most, *x.shape[2:], generator=g, dtype=torch.float64)[: x.shape[1]]
            for g in generators
        ]
        return torch.stack(rows).to(x)

    def _settle(self, state: SolverState, due: list[int], proposal: Proposal) -> SolverState:
        """Put newcomers into slots, with stored multipliers in place of plain-sum ones, and record them."""
        ident = population_of(state).ident
        scales = torch.as_tensor(self.scale, dtype=state.lam.dtype).flatten().expand(len(state.x))
        stored = [
            [replace(newcomer, lam=newcomer.lam / scale) for newcomer in new]
            for new, scale in zip(proposal.newcomers, scales, strict=True)
        ]
        state, numbers = settle(state, stored)
        events = []
        for run in due:
            before, after = float(proposal.before[run]), float(proposal.after[run])
            common = {"step": state.step, "run": run, "loss_before": before}
            if not numbers[run]:
                lowest = float(proposal.lowest[run])
                events.append({**common, "kind": "stable", "eigenvalue": lowest})
            for fresh, new in zip(numbers[run], proposal.newcomers[run], strict=True):
                event = {**common, "kind": self.strategy.event}
                if new.parent is not None:
                    event["parent"] = int(ident[run, new.parent])
                result = {"children": list(fresh), "loss_after": after, "obtained": after - before}
                events.append({**event, **new.figures, **result})
        return with_events(state, events)

    def stationarity(self, state: SolverState) -> list[dict[str, Any]]:
        """Return per run |grad_x L| and lam_min(Hess_x L) at the best point, and whether it is stationary.

        A point is eps-second-order stationary (Shen et al. 2026, Definition 5.1, with rho = 1) if
        |grad_x L| <= eps and lam_min >= -sqrt(eps). ``least_eps`` is the smallest eps for which it is.
        """
        population = population_of(state)
        problem = self.problem.with_labels(population.best_labels)
        last = self.solver.config.steps + 1  # a key that no round has
        generators = [self.generator(last, run) for run in range(len(state.x))]
        start = self.noise(state.x, generators)
        mask = population.best_active.view(*start.shape[:2], *[1] * (start.ndim - 2))
        sharpness, lam = self.solver.sharpness_at(state.step), state.best_lam * self.scale
        with self.solver.precision(False):
            gradient, lowest = second_order(problem, state.best_x, lam, sharpness, start * mask)
        eps, rows = self.settings.split_eps, []
        for norm, value in zip(gradient.tolist(), lowest.tolist(), strict=True):
            least = max(norm, min(value, 0.0) ** 2)
            level = {"eps": eps, "least_eps": least, "stationary": least <= eps}
            rows.append({"gradient": norm, "lowest_curvature": value, **level})
        return rows
