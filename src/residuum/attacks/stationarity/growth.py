"""Growth of the candidate set: between evaluation steps of the search, runs get new candidates in rounds.

A run is one restart of the attack. A run has a round after a fixed number of steps, if its loss stagnates, or
if its gradient is small. Each run has its own schedule. A round

1. drops candidates with zero multipliers, and merges pairs that one candidate can replace (``merging.py``),
2. asks a strategy for new candidates, such as sample splitting (``splitting.py``),
3. stores the new candidates in the solver's tensors (``slots.py``) and records events.

A slot is a position of a candidate in the tensors of a run. A round never raises the loss. This loss does not
include the penalties of the priors.

An event is a dictionary of plain values:

    step, run                  step of the solver, and number of the restart
    kind                       "prune", "merge", "stable" (no candidate was added), or a new candidate's kind
    parent                     the candidate that is dropped, merged into another candidate, or split
    children                   the candidate that remains after a merge, or the new candidates
    eigenvalue, eta            eigenvalue and step length of a split; smallest eigenvalue of a stable run
    predicted                  second-order change of the loss by this split alone
    obtained                   change of the loss by all splits of the round, which share a residual
    loss_before, loss_after    loss without the penalties of priors, with the surrogate of this step

Candidates are identified by their number within the run (``slots.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from residuum.attacks.random_streams import stream
from residuum.attacks.stationarity.curvature import measure_stationarity
from residuum.attacks.stationarity.merging import merge, prune
from residuum.attacks.stationarity.priors import box
from residuum.attacks.stationarity.problem import Evaluation, Problem
from residuum.attacks.stationarity.slots import (
    Newcomer,
    append_events,
    get_population,
    place_newcomers,
)
from residuum.attacks.stationarity.solver import Solver, SolverState
from residuum.settings import StationaritySettings


class Round:
    """Input of a method that adds candidates: the candidates of all runs at one step of the search.

    The tensors also contain the runs that may not get new candidates at this step. Their ``quota`` is 0.

    Attributes:
        solver: The solver, which runs the optimization of the attack.
        step: Number of the solver's step.
        sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
            softplus).
        x: Candidates (R, m, *shape): m slots (positions of candidates) in each of R runs.
        lam: Multipliers (weights) of the candidates (R, m, ...), as they appear in the equation.
        active: Mask of the slots that hold a candidate (R, m). The other slots are empty.
        problem: The loss of the attack as a function of candidates and multipliers, with the candidates'
            labels.
        quota: Largest number of new candidates of each run in this round, 0 for runs that may not get new
            candidates now.
        generators: Random generator of each run for this round. The numbers in ``noise`` were drawn first.
        noise: Normal random numbers with the shape of the candidates x.
        free: 1 for coordinates of x that can increase and decrease, 0 for coordinates at a bound. None if
            there are no bounds.
    """

    def __init__(
        self, grower: Grower, state: SolverState, due: list[int], sharpness: float | Tensor
    ) -> None:
        population, settings = get_population(state), grower.settings
        self.solver, self.step, self.sharpness = grower.solver, state.step, sharpness
        self.problem = grower.problem.with_labels(population.labels)
        self.x, self.lam, self.active = state.x, state.lam * grower.scale, population.active
        self.quota = [
            min(max(1, int(settings.split_cap * count)), grower.limit - count) if run in due else 0
            for run, count in enumerate(self.active.sum(1).tolist())
        ]
        self.generators = [grower.create_generator(state.step, run) for run in range(self.runs)]
        self.noise = grower.draw_noise(state.x, self.generators)
        self.free: Tensor | None = None
        if self.solver.box is not None:
            low, high = box(self.solver.box, state.x)
            self.free = ((state.x > low) & (state.x < high)).to(state.x)

    @property
    def runs(self) -> int:
        """Number of restarts (independent runs of the attack) that run together."""
        return len(self.x)

    @property
    def config(self) -> StationaritySettings:
        """Settings of the attack."""
        return self.solver.config

    def clamp(self, x: Tensor) -> Tensor:
        """Move the values of candidates into the value range that the attacker knows."""
        projection_knowledge = self.solver.box
        return x if projection_knowledge is None else x.clamp(*box(projection_knowledge, x))

    def median_length(self) -> Tensor:
        """Return the median Euclidean norm of every run's candidates (R,)."""
        norms = self.x.flatten(2).norm(dim=2).masked_fill(~self.active, torch.nan)
        return norms.nanmedian(dim=1).values


@dataclass(frozen=True)
class Proposal:
    """New candidates for samples that a method proposes to add at one step of the search.

    Attributes:
        newcomers: New candidates of each run, with multipliers as they appear in the equation.
        before: Loss of each run without the new candidates (R,).
        after: Loss of each run with the new candidates (R,).
        lowest: Smallest eigenvalue of each run (R,). A negative eigenvalue means that splitting a candidate
            lowers the loss. The values are NaN if the strategy computes no eigenvalues.
        note: Text for users of the attack, "" if there is nothing to say.
    """

    newcomers: list[list[Newcomer]]
    before: Tensor
    after: Tensor
    lowest: Tensor
    note: str = ""


class GrowthStrategy:
    """Base class of the methods that find new candidates during the search.

    Attributes:
        event: Name under which the addition of a candidate is recorded, such as "split".
    """

    event: ClassVar[str]

    def check(self, solver: Solver) -> None:
        """Raise an ``InputError`` if this method cannot find new candidates (guesses of samples)."""

    def propose(self, now: Round) -> Proposal:
        """Propose new candidates (guesses of training samples) that do not increase the loss of any run."""
        raise NotImplementedError


class Grower:
    """Adds, merges and removes candidates (guesses of samples) during the search of a solver.

    Args:
        solver: The solver, which runs the optimization of the attack.
        strategy: Method that finds new candidates.
    """

    def __init__(self, solver: Solver, strategy: GrowthStrategy) -> None:
        strategy.check(solver)
        self.solver, self.strategy = solver, strategy
        self.problem, self.scale = solver.problem, solver.scale
        self.limit = self.settings.split_limit or 4 * solver.sizes[1]
        self.note = ""  # a note for users, "" until the strategy that adds candidates returns one

    @property
    def settings(self) -> StationaritySettings:
        """Settings of the attack, including when candidates (guesses of samples) are added."""
        return self.solver.config

    def next_round_step(self, step: int) -> int:
        """Return the number of the next step at which new candidates may be added to runs.

        If the loss or the gradient decides when runs get new candidates, this step is not known in advance.
        The method then returns the last step of the search.

        Args:
            step: Number of the current step.

        Returns:
            The number of the step.
        """
        if self.settings.split_trigger != "period":
            return self.solver.config.steps
        return (step // self.settings.split_every + 1) * self.settings.split_every

    def run_due_rounds(self, state: SolverState) -> SolverState:
        """Merge and add candidates (guesses of samples) in all runs for which it is time to do so."""
        if state.stopped:
            return state
        with self.solver.precision(False):
            return self._run_rounds(state, self.solver.sharpness_at(state.step))

    def _run_rounds(self, state: SolverState, sharpness: float | Tensor) -> SolverState:
        due_runs = [run for run in range(len(state.x)) if self._is_due(state, run, sharpness)]
        if not due_runs:
            return state
        candidate_population = get_population(state)
        last_round_steps = tuple(
            state.step if r in due_runs else step
            for r, step in enumerate(candidate_population.last)
        )
        state = state.replace(population=candidate_population.replace(last=last_round_steps))
        if self.settings.split_merge:
            state = self._merge(state, due_runs, sharpness)
        state, due_runs = self._stop(state, due_runs, sharpness)
        if not due_runs:
            return state
        proposal = self.strategy.propose(Round(self, state, due_runs, sharpness))
        self.note = self.note or proposal.note
        return self._settle(state, due_runs, proposal)

    def _is_due(self, state: SolverState, run: int, sharpness: float | Tensor) -> bool:
        """Return True if it is time to merge and add candidates in this run.

        The setting ``split_trigger`` decides whether this depends on the step, on the gradient or on a
        stagnating loss. The loss of the last ``split_every`` steps stagnates if its smallest value in the
        second half of these steps is hardly smaller than in the first half.

        Args:
            state: State of the search: the candidates and the optimizer.
            run: Index of the run (restart).
            sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
                softplus).

        Returns:
            True if candidates may be merged and added at this step.
        """
        settings, population = self.settings, get_population(state)
        is_finished = state.step >= self.solver.config.steps
        if population.stopped[run] or not bool(state.alive[run]) or is_finished:
            return False
        if settings.split_trigger == "period":
            return state.step > 0 and state.step % settings.split_every == 0
        period_start = population.last[run]
        if state.step - period_start < settings.split_every:
            return False
        if settings.split_trigger == "gradient":
            run_gradient = self._evaluate(state, sharpness).grad_x[run]
            return float(run_gradient.norm()) <= settings.split_tolerance
        period_start = max(period_start, state.step - settings.split_every)
        middle_step = (period_start + state.step) / 2
        history = list(zip(state.steps, state.loss, strict=True))
        early_losses = [
            float(loss[run]) for step, loss in history if period_start <= step <= middle_step
        ]
        late_losses = [float(loss[run]) for step, loss in history if step > middle_step]
        return bool(early_losses and late_losses) and min(late_losses) > (
            1 - settings.split_tolerance
        ) * min(early_losses)

    def _evaluate(self, state: SolverState, sharpness: float | Tensor) -> Evaluation:
        return self._problem_of(state).evaluate(state.x, state.lam * self.scale, sharpness)

    def _problem_of(self, state: SolverState) -> Problem:
        return self.problem.with_labels(get_population(state).labels)

    def _stop(
        self, state: SolverState, due: list[int], sharpness: float | Tensor
    ) -> tuple[SolverState, list[int]]:
        """Stop adding candidates in runs whose loss is zero, or that have the maximal number of candidates.

        Args:
            state: State of the search: the candidates and the optimizer.
            due: Indices of the runs that may change their number of candidates at this step.
            sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
                softplus).

        Returns:
            The new state, and the indices of the runs that can still get candidates.
        """
        population, loss = get_population(state), self._evaluate(state, sharpness).loss
        zero_threshold = self.settings.split_zero * self.problem.empty_loss
        stop_reasons = list(population.stopped)
        for run in due:
            if float(loss[run]) <= zero_threshold:
                stop_reasons[run] = "zero loss"
            elif int(population.active[run].sum()) >= self.limit:
                stop_reasons[run] = "limit"
        state = state.replace(population=population.replace(stopped=tuple(stop_reasons)))
        return state, [run for run in due if not stop_reasons[run]]

    def _merge(self, state: SolverState, due: list[int], sharpness: float | Tensor) -> SolverState:
        """Remove candidates (guesses of samples) with weight zero, merge similar pairs, and record this."""
        candidate_numbers_before, problem = get_population(state).ident, self._problem_of(state)
        state, dropped = prune(problem, state, self.scale, sharpness, due)
        events: list[dict[str, Any]] = [
            {
                "step": state.step,
                "run": run,
                "kind": "prune",
                "parent": int(candidate_numbers_before[run, slot]),
            }
            for run, slot in dropped.nonzero().tolist()
        ]
        state, merges = merge(problem, state, self.scale, sharpness, due)
        for run, merged_slot, emptied_slot, before, after in merges:
            parent, child = (
                int(candidate_numbers_before[run, emptied_slot]),
                int(candidate_numbers_before[run, merged_slot]),
            )
            event = {"step": state.step, "run": run, "kind": "merge", "parent": parent}
            losses = {"loss_before": before, "loss_after": after}
            events.append({**event, "children": [child], **losses})
        return append_events(state, events)

    def create_generator(self, step: int, run: int) -> torch.Generator:
        """Create the random generator of one run at one step at which candidates are added.

        The generator does not depend on other runs or on whether the attack was resumed.

        Args:
            step: Number of the solver's step.
            run: Index of the run (restart).

        Returns:
            The generator.
        """
        return stream("growth", self.solver.config.seed, run, step)

    def draw_noise(self, x: Tensor, generators: list[torch.Generator]) -> Tensor:
        """Draw normal random numbers with the shape of x.

        The random numbers of a run do not depend on the number of candidates of other runs.

        Args:
            x: Candidates (R, m, *shape): m positions of candidates in each of R runs.
            generators: Random generator of each run.

        Returns:
            Normal random numbers with the shape of x.
        """
        max_candidates = max(self.limit, x.shape[1])
        noise_by_run = [
            torch.randn(max_candidates, *x.shape[2:], generator=g, dtype=torch.float64)[
                : x.shape[1]
            ]
            for g in generators
        ]
        return torch.stack(noise_by_run).to(x)

    def _settle(self, state: SolverState, due: list[int], proposal: Proposal) -> SolverState:
        """Add proposed candidates (guesses of samples) to the search, and record an event for each."""
        candidate_numbers_before = get_population(state).ident
        multiplier_scales = (
            torch.as_tensor(self.scale, dtype=state.lam.dtype).flatten().expand(len(state.x))
        )
        stored_newcomers = [
            [replace(newcomer, lam=newcomer.lam / scale) for newcomer in new]
            for new, scale in zip(proposal.newcomers, multiplier_scales, strict=True)
        ]
        state, numbers = place_newcomers(state, stored_newcomers)
        events = []
        for run in due:
            before, after = float(proposal.before[run]), float(proposal.after[run])
            common_fields = {"step": state.step, "run": run, "loss_before": before}
            if not numbers[run]:
                lowest_eigenvalue = float(proposal.lowest[run])
                events.append({**common_fields, "kind": "stable", "eigenvalue": lowest_eigenvalue})
            for newcomer_numbers, new in zip(numbers[run], proposal.newcomers[run], strict=True):
                event = {**common_fields, "kind": self.strategy.event}
                if new.parent is not None:
                    event["parent"] = int(candidate_numbers_before[run, new.parent])
                outcome = {
                    "children": list(newcomer_numbers),
                    "loss_after": after,
                    "obtained": after - before,
                }
                events.append({**event, **new.figures, **outcome})
        return append_events(state, events)

    def stationarity(self, state: SolverState) -> list[dict[str, Any]]:
        """Measure how close the best point of every run is to a local minimum of the loss L.

        A point is eps-second-order stationary (Shen et al. 2026, Definition 5.1, with rho = 1) if
        |grad_x L| <= eps and lam_min(Hess_x L) >= -sqrt(eps).

        Args:
            state: State at the end of the search.

        Returns:
            A dictionary for every run: the norm |grad_x L|, the smallest eigenvalue lam_min of the Hessian,
            eps, whether the point is stationary for eps, and ``least_eps``, the smallest eps for which the
            point is stationary.
        """
        candidate_population = get_population(state)
        problem_at_best = self.problem.with_labels(candidate_population.best_labels)
        # Candidates are never added after the last step, so the random numbers of this step number are
        # unused.
        unused_step = self.solver.config.steps + 1
        generators = [self.create_generator(unused_step, run) for run in range(len(state.x))]
        start_vectors = self.draw_noise(state.x, generators)
        is_candidate = candidate_population.best_active.view(
            *start_vectors.shape[:2], *[1] * (start_vectors.ndim - 2)
        )
        sharpness, lam = self.solver.sharpness_at(state.step), state.best_lam * self.scale
        with self.solver.precision(False):
            gradient, lowest = measure_stationarity(
                problem_at_best, state.best_x, lam, sharpness, start_vectors * is_candidate
            )
        eps, rows = self.settings.split_eps, []
        for norm, value in zip(gradient.tolist(), lowest.tolist(), strict=True):
            least_eps = max(norm, min(value, 0.0) ** 2)
            eps_results = {"eps": eps, "least_eps": least_eps, "stationary": least_eps <= eps}
            rows.append({"gradient": norm, "lowest_curvature": value, **eps_results})
        return rows
