"""Rounds of growth between the steps of an attack: when, what, and a record of every event.

An event is a dict of plain values: step, run, kind (split, random, frank-wolfe, merge, prune, stable,
undone), parent and children (numbers of candidates, see ``population.py``), eigenvalue, eta,
predicted (second-order change of the loss by this split alone), obtained (change by the whole round:
simultaneous splits share a residual), loss_before and loss_after, all of the equation's loss, without
priors, at the surrogate of that step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from residuum.attacks.config import AttackConfig
from residuum.attacks.curvature import exact_degree
from residuum.attacks.growth import GROWTH, Proposal, Round
from residuum.attacks.merging import merge, prune
from residuum.attacks.priors import box
from residuum.attacks.problem import Problem
from residuum.attacks.randomness import stream
from residuum.attacks.slots import Newcomer, population_of, settle
from residuum.attacks.splitting import second_order
from residuum.attacks.state import SolverState
from residuum.errors import InputError
from residuum.networks import SigmoidReLU, Softplus
from residuum.records import Knowledge

VANISHING = 20.0  # sharpness times pre-activation above which a surrogate has no curvature left


@dataclass
class Grower:
    """Grows the candidates of one solver.

    draw(run, count, generator): random candidates as at the start; labels(count): labels for so
    many; knowledge: gives the box, None where candidates are not put into one; scale: from stored to
    plain-sum multipliers; candidates: of the start.
    """

    model: nn.Module
    problem: Problem
    config: AttackConfig
    knowledge: Knowledge | None
    scale: float | Tensor
    candidates: int
    draw: Callable[[int, int, torch.Generator], Tensor]
    labels: Callable[[int], Tensor]

    def __post_init__(self) -> None:
        flat = any(isinstance(module, nn.ReLU) for module in self.model.modules())
        if self.config.split == "curvature" and self.problem.surrogate == "none" and flat:
            raise InputError(
                "Splitting needs curvature, and with true ReLU derivatives there is none: inside "
                "an activation pattern f is affine in x, so S is zero almost everywhere.",
                "Use --surrogate sigmoid or softplus, or --split random or frank-wolfe.",
            )
        self.exact = exact_degree(self.model)
        self.limit = self.config.split_limit or 4 * self.candidates
        self.notes: dict[str, str] = {}

    def after(self, state: SolverState, sharpness: float | Tensor) -> SolverState:
        """The state after a look, grown where a run is due."""
        if state.stopped:
            return state
        due = [run for run in range(len(state.x)) if self._due(state, run, sharpness)]
        if not due:
            return state
        population = population_of(state)
        last = tuple(state.step if r in due else at for r, at in enumerate(population.last))
        state = state.replace(population=population.replace(last=last))
        if self.config.split_merge:
            state = self._merge(state, due, sharpness)
        state, due = self._stop(state, due, sharpness)
        if not due:
            return state
        self._warn(state, sharpness)
        now = self._round(state, due, sharpness)
        proposal = GROWTH[self.config.split](now)
        return self._settle(state, due, proposal)

    def _due(self, state: SolverState, run: int, sharpness: float | Tensor) -> bool:
        config, population = self.config, population_of(state)
        if population.stopped[run] or not bool(state.alive[run]) or state.step >= config.steps:
            return False
        if config.split_trigger == "period":
            return state.step > 0 and state.step % config.split_every == 0
        start = population.last[run]
        if state.step - start < config.split_every:
            return False
        if config.split_trigger == "gradient":
            labels = self.problem.with_labels(population.labels)
            found = labels.evaluate(state.x, state.lam * self.scale, sharpness)
            return float(found.grad_x[run].norm()) <= config.split_tolerance
        start = max(start, state.step - config.split_every)
        middle = (start + state.step) / 2
        looks = list(zip(state.steps, state.loss, strict=True))
        early = [float(loss[run]) for step, loss in looks if start <= step <= middle]
        late = [float(loss[run]) for step, loss in looks if step > middle]
        return bool(early and late) and min(late) > (1 - config.split_tolerance) * min(early)

    def _stop(
        self, state: SolverState, due: list[int], sharpness: float | Tensor
    ) -> tuple[SolverState, list[int]]:
        """Runs whose loss is zero, or that hold as many candidates as allowed, grow no more."""
        population = population_of(state)
        problem = self.problem.with_labels(population.labels)
        loss = problem.evaluate(state.x, state.lam * self.scale, sharpness).loss
        zero = self.config.split_zero * problem.empty_loss
        stopped = list(population.stopped)
        for run in due:
            if float(loss[run]) <= zero:
                stopped[run] = "zero loss"
            elif int(population.active[run].sum()) >= self.limit:
                stopped[run] = "limit"
        state = state.replace(population=population.replace(stopped=tuple(stopped)))
        return state, [run for run in due if not stopped[run]]

    def _merge(self, state: SolverState, due: list[int], sharpness: float | Tensor) -> SolverState:
        events: list[dict[str, Any]] = []
        ident = population_of(state).ident
        problem = self.problem.with_labels(population_of(state).labels)
        state, gone = prune(problem, state, self.scale, sharpness, due)
        events += [
            {"step": state.step, "run": run, "kind": "prune", "parent": int(ident[run, slot])}
            for run, slot in gone.nonzero().tolist()
        ]
        state, merged = merge(problem, state, self.scale, sharpness, due)
        for run, kept, lost, before, after in merged:
            events.append(
                {"step": state.step, "run": run, "kind": "merge", "parent": int(ident[run, lost]),
                 "children": [int(ident[run, kept])], "loss_before": before, "loss_after": after}
            )  # fmt: skip
        population = population_of(state)
        return state.replace(population=population.replace(events=(*population.events, *events)))

    def _round(self, state: SolverState, due: list[int], sharpness: float | Tensor) -> Round:
        config, population = self.config, population_of(state)
        counts = population.active.sum(1).tolist()
        quota = [
            min(max(1, int(config.split_cap * count)), self.limit - count) if run in due else 0
            for run, count in enumerate(counts)
        ]
        generators = [self._generator(state.step, run) for run in range(len(state.x))]
        noise = self._noise(state.x, generators)
        free = None
        if self.knowledge is not None:
            low, high = box(self.knowledge, state.x)
            free = ((state.x > low) & (state.x < high)).to(state.x)
        return Round(
            self.problem.with_labels(population.labels), config, state.x, state.lam * self.scale,
            population.active, sharpness, quota,
            lambda run, count: self.draw(run, count, generators[run]).to(state.x),
            self.labels, noise, free, self._clamp, self.exact,
        )  # fmt: skip

    def _clamp(self, x: Tensor) -> Tensor:
        if self.knowledge is None:
            return x
        low, high = box(self.knowledge, x)
        return torch.maximum(torch.minimum(x, high), low)

    def _generator(self, step: int, run: int) -> torch.Generator:
        """Of its own for every round and run, so that neither other runs nor a resume matter."""
        return stream("growth", self.config.seed, run, step)

    def _noise(self, x: Tensor, generators: list[torch.Generator]) -> Tensor:
        """Like x; a run's numbers do not depend on how many slots the other runs need."""
        most = max(self.limit, x.shape[1])
        rows = [
            torch.randn(most, *x.shape[2:], generator=g, dtype=torch.float64)[: x.shape[1]]
            for g in generators
        ]
        return torch.stack(rows).to(x)

    def _settle(self, state: SolverState, due: list[int], proposal: Proposal) -> SolverState:
        """Newcomers into their slots, with the stored multipliers that theirs are; events."""
        ident, scale = population_of(state).ident, self.scale
        stored = [
            [self._stored(one, scale if isinstance(scale, float) else scale[run]) for one in new]
            for run, new in enumerate(proposal.newcomers)
        ]
        state, numbers = settle(state, stored)
        events = []
        kind = "split" if self.config.split == "curvature" else self.config.split
        for run in due:
            before, after = float(proposal.before[run]), float(proposal.after[run])
            common = {"step": state.step, "run": run, "loss_before": before}
            if not numbers[run]:
                lowest = float(proposal.lowest[run])
                events.append({**common, "kind": "stable", "eigenvalue": lowest})
            for fresh, detail in zip(numbers[run], proposal.details[run], strict=True):
                parent = {"parent": int(ident[run, detail["parent"]])} if detail else {}
                events.append(
                    {**common, "kind": kind, **detail, **parent, "children": list(fresh),
                     "loss_after": after, "obtained": after - before}
                )  # fmt: skip
        population = population_of(state)
        return state.replace(population=population.replace(events=(*population.events, *events)))

    def _stored(self, one: Newcomer, scale: float | Tensor) -> Newcomer:
        factor = scale if isinstance(scale, float) else scale.flatten()[0]
        return Newcomer(one.x, one.lam / factor, one.label, one.parent, one.moved)

    def _warn(self, state: SolverState, sharpness: float | Tensor) -> None:
        """Say it once when the surrogate is so sharp that S vanishes for most candidates."""
        equation = self.problem.explicit
        if self.config.split != "curvature" or equation is None or "vanishing" in self.notes:
            return
        activation = self.problem.activation(sharpness)
        if not isinstance(activation, SigmoidReLU | Softplus):
            return
        a = state.x.flatten(2)
        nearest = torch.full(a.shape[:2], torch.inf, dtype=a.dtype, device=a.device)
        for weight, bias in equation.points[0][:-1]:
            z = a @ weight.T if bias is None else a @ weight.T + bias
            nearest = torch.minimum(nearest, (z * sharpness).abs().amin(2))
            a = activation(z)
        far = nearest[population_of(state).active] > VANISHING
        if bool(far.double().mean() > 0.5):
            self.notes["vanishing"] = (
                f"splitting: at step {state.step} the surrogate is so sharp that S vanishes for "
                f"{int(far.sum())} of {len(far)} candidates (sharpness times the nearest "
                f"pre-activation above {VANISHING:g}); lower --sharpness to let them split"
            )

    def verdict(self, state: SolverState, sharpness: float | Tensor) -> list[dict[str, Any]]:
        """Per run: |grad_x L|, lam_min(Hess_x L) at the kept point, and whether it is stationary.

        eps-second-order stationary (Shen et al. 2026, Definition 5.1) with rho = 1:
        |grad_x L| <= eps and lam_min >= -sqrt(eps). least_eps: the smallest eps for which it is.
        """
        population = population_of(state)
        problem = self.problem.with_labels(population.best_labels)
        generators = [self._generator(self.config.steps + 1, run) for run in range(len(state.x))]
        start = self._noise(state.x, generators)
        mask = population.best_active.view(*start.shape[:2], *[1] * (start.ndim - 2))
        found = second_order(
            problem, state.best_x, state.best_lam * self.scale, sharpness, start * mask
        )
        rows = []
        for gradient, lowest in zip(*(part.tolist() for part in found), strict=True):
            least = max(gradient, min(lowest, 0.0) ** 2)
            rows.append(
                {"gradient": gradient, "lowest_curvature": lowest, "eps": self.config.split_eps,
                 "least_eps": least, "stationary": least <= self.config.split_eps}
            )  # fmt: skip
        return rows
