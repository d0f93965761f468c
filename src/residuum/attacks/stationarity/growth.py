"""Ways to grow the candidate set, behind one interface: what a round adds to every run.

curvature     split candidates whose splitting matrix has a negative eigenvalue (Shen et al. 2026)
random        new candidates at random places, where a multiplier of the right sign lowers the loss
frank-wolfe   new candidates at local maxima of |<r, f(x)>|, found by an inner ascent from random
              places on the sphere of the candidates' median length

A split keeps the sum of multipliers. New candidates get theirs by one exact line search along the
loss's derivative in them, in which the loss is quadratic. Neither ever raises the equation's loss.
A new way to grow is one function and one line in ``GROWTH``.

Before a round, what one candidate can stand for is merged. Inside an activation pattern f is affine in
x (Refael et al. 2025, Lemma 2), so two candidates of one label and one pattern equal one candidate at
their weighted mean with the sum of their multipliers:

    lam' = lam_1 + lam_2,   x' = (lam_1 x_1 + lam_2 x_2) / lam'

With surrogates and smooth activations that holds nearly, so a merge is kept only where the loss
does not rise. Networks without gates have no pattern; there two candidates must be close.

An event is a dict of plain values: step, run, kind (split, random, frank-wolfe, merge, prune, stable,
undone), parent and children (numbers of candidates, see ``state.py``), eigenvalue, eta,
predicted (second-order change of the loss by this split alone), obtained (change by the whole round:
simultaneous splits share a residual), loss_before and loss_after, all of the equation's loss, without
priors, at the surrogate of that step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from residuum.attacks.random_streams import stream
from residuum.attacks.stationarity.priors import box
from residuum.attacks.stationarity.problem import Evaluation, Problem
from residuum.attacks.stationarity.splitting import (
    Curvature,
    exact_degree,
    joint_step,
    lowest_curvature,
    second_order,
)
from residuum.errors import InputError
from residuum.networks import ReLU, SigmoidReLU, Softplus

if TYPE_CHECKING:
    from residuum.attacks.stationarity.solver import Population, Solver, SolverState

TRIED = 4  # places tried for every new candidate that is wanted
ASCENT, FIRST, LAST = 60, 0.3, 0.01  # inner ascent: steps, and their length over the radius
SAME = 0.95  # cosine above which two maxima are one
VANISHING = 20.0  # sharpness times pre-activation above which a surrogate has no curvature left
TRIES = 8  # pairs per round and run
CLOSE = 0.1  # distance over length, for networks without gates
OWN = ("labels", "active", "ident", "best_labels", "best_active", "best_ident")  # of a population
PER_SLOT = ("x", "lam", "best_x", "best_lam")  # of a state


@dataclass(frozen=True)
class Newcomer:
    """One candidate more. parent: the slot that it splits from, whose other half takes ``moved``.

    lam: stored multiplier, of both halves where there is a parent.
    figures: of the split, for its event.
    """

    x: Tensor
    lam: Tensor
    label: Tensor
    parent: int | None = None
    moved: Tensor | None = None
    figures: dict[str, float] = field(default_factory=dict)


class Round:
    """All that a strategy may look at.

    x: (R, m, *shape).
    lam: plain-sum multipliers.
    active: (R, m).
    quota: how many candidates each run may get.
    draw: random candidates as at the start.
    labels: labels for so many.
    noise: like x, random.
    free: 1 where a coordinate may move both ways, None for everywhere.
    clamp: into the known box.
    exact: f has degree at most 3 in x.
    """

    def __init__(
        self, grower: Grower, state: SolverState, due: list[int], sharpness: float | Tensor
    ) -> None:
        population, self.runs = population_of(state), len(state.x)
        self.problem = grower.problem.with_labels(population.labels)
        self.grower, self.config, self.exact = grower, grower.config, grower.exact
        self.labels, self.clamp = grower.solver.labels, grower.clamp
        self.x, self.lam, self.active = state.x, state.lam * grower.scale, population.active
        self.sharpness = sharpness
        share, limit = grower.how.cap, grower.limit
        self.quota = [
            min(max(1, int(share * count)), limit - count) if run in due else 0
            for run, count in enumerate(self.active.sum(1).tolist())
        ]
        self.generators = [grower.generator(state.step, run) for run in range(self.runs)]
        self.noise = grower.noise(state.x, self.generators)
        self.free: Tensor | None = None
        if grower.solver.box is not None:
            low, high = box(grower.solver.box, state.x)
            self.free = ((state.x > low) & (state.x < high)).to(state.x)

    def draw(self, run: int, count: int) -> Tensor:
        """So many for this run."""
        return self.grower.solver.draw(run, count, self.generators[run]).to(self.x)

    def length(self) -> Tensor:
        """(R,) median length of the living candidates."""
        norms = self.x.flatten(2).norm(dim=2).masked_fill(~self.active, torch.nan)
        return norms.nanmedian(dim=1).values


@dataclass(frozen=True)
class Proposal:
    """newcomers: per run; before, after: (R,) loss; lowest: (R,) least eigenvalue over the living
    candidates, nan where nobody asked."""

    newcomers: list[list[Newcomer]]
    before: Tensor
    after: Tensor
    lowest: Tensor


def split(now: Round) -> Proposal:
    """Halve the most unstable candidates of every run along their least eigenvector.

    Unstable: v'Sv below a threshold, absolute as published, or relative to the loss over a squared
    length, which is what an eigenvalue of S is measured in. All splits of a round share one residual,
    so their lengths are found together (:func:`joint_step`); a run whose loss would not fall gets no
    newcomer.
    """
    curvature = Curvature(now.problem, now.x, now.lam, now.sharpness)
    found = lowest_curvature(curvature, now.noise, now.free)
    values = found.values.masked_fill(~now.active, torch.inf)
    values = torch.where(torch.isfinite(values) | ~now.active, values, torch.inf)
    limit = now.x.new_full((now.runs,), now.config.growth.threshold)
    if now.config.growth.relative:
        loss = now.problem.evaluate(now.x, now.lam, now.sharpness).loss
        limit = limit * loss / now.length().square().clamp(min=1e-12)
    order = values.argsort(1).argsort(1)  # 0 for the least
    quota = torch.tensor(now.quota, device=now.x.device)
    chosen = (values < -limit[:, None]) & (order < quota[:, None])
    longest = torch.full_like(limit, torch.inf) if now.exact else now.length() / 2
    if now.config.growth.eta > 0:
        longest = torch.full_like(limit, now.config.growth.eta)
    bend = values.nan_to_num(posinf=0.0)
    step = joint_step(curvature, found.vectors, bend, chosen, longest, now.exact, now.clamp)
    newcomers: list[list[Newcomer]] = [[] for _ in range(now.runs)]
    for run, slot in step.eta.nonzero().tolist():
        eta, value = step.eta[run, slot], values[run, slot]
        figures = {"eigenvalue": value, "eta": eta, "predicted": eta**2 * value / 2}
        x, moved = now.x[run, slot], eta * found.vectors[run, slot]
        plus, minus = (now.clamp((x + sign * moved)[None, None])[0, 0] for sign in (1, -1))
        half, label = now.lam[run, slot] / 2, now.problem.labels_of(run)[slot]
        plain = {name: float(figure) for name, figure in figures.items()}
        newcomers[run].append(Newcomer(minus, half, label, slot, plus, plain))
    return Proposal(newcomers, step.before, step.after, values.amin(1))


def random_places(now: Round) -> Proposal:
    """New candidates as at the start of the attack."""
    x, labels, tried = _places(now)
    return _with_multipliers(now, now.clamp(x), labels, [list(range(t)) for t in tried])


def frank_wolfe(now: Round) -> Proposal:
    """New candidates where the residual correlates most with a candidate's gradient.

    |<r, f(x)>| is how much a first bit of multiplier at x would lower the loss. It is climbed from
    random places on the sphere of the candidates' own length, since f grows with x and no ascent would
    end; places that ended together count once.
    """
    curvature = Curvature(now.problem, now.x, now.lam, now.sharpness)
    x, labels, tried = _places(now)
    sign = now.x.new_ones(x.shape[1])
    if not now.problem.objective.nonnegative:
        sign[1::2] = -1.0
    lam = sign.view(1, -1, *[1] * (now.lam.ndim - 2))
    lam = lam.expand(*x.shape[:2], *now.lam.shape[2:]).contiguous()
    radius = now.length().view(-1, 1, *[1] * (now.x.ndim - 2))

    def lengths(x: Tensor) -> Tensor:
        return x.flatten(2).norm(dim=2).clamp(min=1e-30).view(*x.shape[:2], *[1] * (x.ndim - 2))

    def onto(x: Tensor) -> Tensor:
        return now.clamp(x * radius / lengths(x))

    x = onto(x)
    for k in range(ASCENT):
        gradient, _ = curvature.slope(x, lam, labels)
        length = radius * FIRST * (LAST / FIRST) ** (k / (ASCENT - 1))
        x = onto(x - length * gradient / lengths(gradient))
    value = curvature.slope(x, lam, labels)[1]
    orders = [_distinct(x[r, :t], value[r, :t], labels[r, :t]) for r, t in enumerate(tried)]
    return _with_multipliers(now, x, labels, orders)


def _places(now: Round) -> tuple[Tensor, Tensor, list[int]]:
    """Random places (R, k, *shape), their labels (R, k), and how many of them each run may use.

    A run's own are the same whatever the other runs' quotas are.
    """
    tried = [TRIED * quota for quota in now.quota]
    own, most = now.problem.labels, max(tried)
    x = now.x.new_zeros(now.runs, most, *now.x.shape[2:])
    labels = own.new_zeros(now.runs, most)
    for run, count in enumerate(tried):
        if not count:
            continue
        x[run, :count] = now.draw(run, count)
        # Labels come in blocks; a fixed shuffle spreads them over the places.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        labels[run, :count] = now.labels(count)[order].to(own)
    return x, labels, tried


def nothing(now: Round) -> Proposal:
    """No growth."""
    loss = now.problem.evaluate(now.x, now.lam, now.sharpness).loss
    return Proposal([[]] * now.runs, loss, loss, torch.full_like(loss, torch.nan))


def _distinct(x: Tensor, value: Tensor, labels: Tensor) -> list[int]:
    """Places by their value, least first, without those that another of the label stands for."""
    unit = x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True).clamp(min=1e-12)
    near = (((unit @ unit.T) > SAME) & (labels[:, None] == labels[None])).tolist()
    kept: list[int] = []
    for i in value.argsort().tolist():
        if not any(near[i][j] for j in kept):
            kept.append(i)
    return kept


def _with_multipliers(now: Round, x: Tensor, labels: Tensor, orders: list[list[int]]) -> Proposal:
    """The first ``quota`` places of each run's order where the loss falls, multipliers by line search.

    L is quadratic along a change of multipliers, so two values and a slope give its minimum.
    """
    m, tried = now.x.shape[1], x.shape[1]
    own = now.problem.labels.expand(now.runs, -1)
    wide = now.problem.with_labels(torch.cat([own, labels.to(own)], 1))
    points = torch.cat([now.x, x], 1)
    zero = now.lam.new_zeros(now.runs, tried, *now.lam.shape[2:])
    at = wide.evaluate(points, torch.cat([now.lam, zero], 1), now.sharpness)
    downhill = -at.grad_lam[:, m:]
    if now.problem.objective.nonnegative:
        downhill = downhill.clamp(min=0)
    falls = downhill.reshape(*downhill.shape[:2], -1).square().sum(2) > 0
    keep = torch.zeros_like(falls)
    for run, (order, down) in enumerate(zip(orders, falls.tolist(), strict=True)):
        keep[run, [i for i in order if down[i]][: now.quota[run]]] = True
    downhill = downhill * keep.view(*keep.shape, *[1] * (downhill.ndim - 2))
    slope = -downhill.flatten(1).square().sum(1)
    step = torch.where(slope < 0, at.loss / (-slope).clamp(min=1e-30), 0.0)

    def shaped(t: Tensor) -> Tensor:
        return t.view(-1, *[1] * (downhill.ndim - 1)) * downhill

    there = wide.evaluate(points, torch.cat([now.lam, shaped(step)], 1), now.sharpness).loss
    bend = (there - at.loss - slope * step) / step.square().clamp(min=1e-30)
    lam = shaped(torch.where(bend > 0, -slope / (2 * bend).clamp(min=1e-30), 0.0))
    after = wide.evaluate(points, torch.cat([now.lam, lam], 1), now.sharpness).loss
    newcomers: list[list[Newcomer]] = [[] for _ in range(now.runs)]
    for run, i in (keep & (after < at.loss)[:, None]).nonzero().tolist():
        newcomers[run].append(Newcomer(x[run, i], lam[run, i], labels[run, i]))
    return Proposal(newcomers, at.loss, after, torch.full_like(after, torch.nan))


GROWTH: dict[str, Callable[[Round], Proposal]] = {
    "none": nothing,
    "curvature": split,
    "random": random_places,
    "frank-wolfe": frank_wolfe,
}


class Grower:
    """Grows the candidates of one solver, between its looks at the loss."""

    def __init__(self, solver: Solver) -> None:
        self.solver, self.problem, self.config = solver, solver.problem, solver.config
        self.scale, self.how = solver.scale, solver.config.growth
        flat = any(isinstance(module, nn.ReLU) for module in solver.model.modules())
        if self.how.how == "curvature" and self.problem.surrogate == "none" and flat:
            raise InputError(
                "Splitting needs curvature, and with true ReLU derivatives there is none: inside "
                "an activation pattern f is affine in x, so S is zero almost everywhere.",
                "Use --surrogate sigmoid or softplus, or --split random or frank-wolfe.",
            )
        self.exact = exact_degree(solver.model)
        self.limit = self.how.limit or 4 * solver.sizes[1]
        self.notes: dict[str, str] = {}

    def next_round(self, step: int) -> int:
        """The step at which a round may be due next, as far as the calendar says it."""
        if self.how.trigger != "period":
            return self.config.steps
        return (step // self.how.every + 1) * self.how.every

    def after(self, state: SolverState) -> SolverState:
        """The state after a look, grown where a run is due; in full precision."""
        if state.stopped:
            return state
        with self.solver.precision(False):
            return self._grown(state, self.solver.sharpness_at(state.step))

    def _grown(self, state: SolverState, sharpness: float | Tensor) -> SolverState:
        """One round for the runs that are due, at a look: make room, stop those that are full, add
        newcomers.

        The rest of the runs are left as they are: restarts grow apart, each by its own clock.
        """
        due = [run for run in range(len(state.x)) if self._due(state, run, sharpness)]
        if not due:
            return state
        population = population_of(state)
        last = tuple(state.step if r in due else at for r, at in enumerate(population.last))
        state = state.replace(population=population.replace(last=last))
        if self.how.merge:
            state = self._merge(state, due, sharpness)
        state, due = self._stop(state, due, sharpness)
        if not due:
            return state
        self._warn(state, sharpness)
        proposal = GROWTH[self.how.how](Round(self, state, due, sharpness))
        return self._settle(state, due, proposal)

    def _due(self, state: SolverState, run: int, sharpness: float | Tensor) -> bool:
        """Whether this run grows now: by the calendar, by a small gradient, or when its loss has settled.

        Settled: the best loss of the later half of a period is hardly below the best of the earlier
        half.
        """
        how, population = self.how, population_of(state)
        if population.stopped[run] or not bool(state.alive[run]) or state.step >= self.config.steps:
            return False
        if how.trigger == "period":
            return state.step > 0 and state.step % how.every == 0
        start = population.last[run]
        if state.step - start < how.every:
            return False
        if how.trigger == "gradient":
            found = self._evaluate(state, sharpness)
            return float(found.grad_x[run].norm()) <= how.tolerance
        start = max(start, state.step - how.every)
        middle = (start + state.step) / 2
        looks = list(zip(state.steps, state.loss, strict=True))
        early = [float(loss[run]) for step, loss in looks if start <= step <= middle]
        late = [float(loss[run]) for step, loss in looks if step > middle]
        return bool(early and late) and min(late) > (1 - how.tolerance) * min(early)

    def _evaluate(self, state: SolverState, sharpness: float | Tensor) -> Evaluation:
        problem = self.problem.with_labels(population_of(state).labels)
        return problem.evaluate(state.x, state.lam * self.scale, sharpness)

    def _stop(
        self, state: SolverState, due: list[int], sharpness: float | Tensor
    ) -> tuple[SolverState, list[int]]:
        """Runs whose loss is zero, or that hold as many candidates as allowed, grow no more."""
        population, loss = population_of(state), self._evaluate(state, sharpness).loss
        zero = self.how.zero * self.problem.empty_loss
        stopped = list(population.stopped)
        for run in due:
            if float(loss[run]) <= zero:
                stopped[run] = "zero loss"
            elif int(population.active[run].sum()) >= self.limit:
                stopped[run] = "limit"
        state = state.replace(population=population.replace(stopped=tuple(stopped)))
        return state, [run for run in due if not stopped[run]]

    def _merge(self, state: SolverState, due: list[int], sharpness: float | Tensor) -> SolverState:
        """Drop candidates without a multiplier, then merge pairs, each told as an event of the family
        tree.
        """
        ident = population_of(state).ident
        problem = self.problem.with_labels(population_of(state).labels)
        state, gone = prune(problem, state, self.scale, sharpness, due)
        events: list[dict[str, Any]] = [
            {"step": state.step, "run": run, "kind": "prune", "parent": int(ident[run, slot])}
            for run, slot in gone.nonzero().tolist()
        ]
        state, merged = merge(problem, state, self.scale, sharpness, due)
        for run, kept, lost, before, after in merged:
            who = {"parent": int(ident[run, lost]), "children": [int(ident[run, kept])]}
            losses = {"loss_before": before, "loss_after": after}
            events.append({"step": state.step, "run": run, "kind": "merge", **who, **losses})
        return recorded(state, events)

    def clamp(self, x: Tensor) -> Tensor:
        """Into the known box."""
        if self.solver.box is None:
            return x
        return x.clamp(*box(self.solver.box, x))

    def generator(self, step: int, run: int) -> torch.Generator:
        """Of its own for every round and run, so that neither other runs nor a resume matter."""
        return stream("growth", self.config.seed, run, step)

    def noise(self, x: Tensor, generators: list[torch.Generator]) -> Tensor:
        """Like x; a run's numbers do not depend on how many slots the other runs need."""
        most = max(self.limit, x.shape[1])
        rows = [
            torch.randn(most, *x.shape[2:], generator=g, dtype=torch.float64)[: x.shape[1]]
            for g in generators
        ]
        return torch.stack(rows).to(x)

    def _settle(self, state: SolverState, due: list[int], proposal: Proposal) -> SolverState:
        """Newcomers into their slots, with the stored multipliers that theirs are; events."""
        ident = population_of(state).ident
        scales = torch.as_tensor(self.scale, dtype=state.lam.dtype).flatten().expand(len(state.x))
        stored = [
            [replace(one, lam=one.lam / scale) for one in new]
            for new, scale in zip(proposal.newcomers, scales, strict=True)
        ]
        state, numbers = settle(state, stored)
        events = []
        kind = "split" if self.how.how == "curvature" else self.how.how
        for run in due:
            before, after = float(proposal.before[run]), float(proposal.after[run])
            common = {"step": state.step, "run": run, "loss_before": before}
            if not numbers[run]:
                lowest = float(proposal.lowest[run])
                events.append({**common, "kind": "stable", "eigenvalue": lowest})
            for fresh, one in zip(numbers[run], proposal.newcomers[run], strict=True):
                parent = {} if one.parent is None else {"parent": int(ident[run, one.parent])}
                end = {"children": list(fresh), "loss_after": after, "obtained": after - before}
                events.append({**common, "kind": kind, **parent, **one.figures, **end})
        return recorded(state, events)

    def _warn(self, state: SolverState, sharpness: float | Tensor) -> None:
        """Say it once when the surrogate is so sharp that S vanishes for most candidates."""
        equation = self.problem.explicit
        if self.how.how != "curvature" or equation is None or "vanishing" in self.notes:
            return
        activation = self.problem.activation(sharpness)
        if not isinstance(activation, SigmoidReLU | Softplus):
            return
        hidden = equation.pre_activations(state.x.flatten(2), activation)
        nearest = torch.stack([(z * sharpness).abs().amin(2) for z in hidden]).amin(0)
        far = nearest[population_of(state).active] > VANISHING
        if bool(far.double().mean() > 0.5):
            self.notes["vanishing"] = (
                f"splitting: at step {state.step} the surrogate is so sharp that S vanishes for "
                f"{int(far.sum())} of {len(far)} candidates (sharpness times the nearest "
                f"pre-activation above {VANISHING:g}); lower --sharpness to let them split"
            )

    def verdict(self, state: SolverState) -> list[dict[str, Any]]:
        """Per run: |grad_x L|, lam_min(Hess_x L) at the kept point, and whether it is stationary.

        eps-second-order stationary (Shen et al. 2026, Definition 5.1) with rho = 1:
        |grad_x L| <= eps and lam_min >= -sqrt(eps). least_eps: the smallest eps for which it is.
        """
        population = population_of(state)
        problem = self.problem.with_labels(population.best_labels)
        generators = [self.generator(self.config.steps + 1, run) for run in range(len(state.x))]
        start = self.noise(state.x, generators)
        mask = population.best_active.view(*start.shape[:2], *[1] * (start.ndim - 2))
        sharpness = self.solver.sharpness_at(state.step)
        with self.solver.precision(False):
            found = second_order(
                problem, state.best_x, state.best_lam * self.scale, sharpness, start * mask
            )
        rows = []
        for gradient, lowest in zip(*(part.tolist() for part in found), strict=True):
            least = max(gradient, min(lowest, 0.0) ** 2)
            level = {"eps": self.how.eps, "least_eps": least, "stationary": least <= self.how.eps}
            rows.append({"gradient": gradient, "lowest_curvature": lowest, **level})
        return rows


def prune(
    problem: Problem,
    state: SolverState,
    scale: float | Tensor,
    sharpness: float | Tensor,
    due: list[int],
) -> tuple[SolverState, Tensor]:
    """Empty the slots whose multipliers are zero and would stay so; returns (R, m) which."""
    active = torch.zeros_like(population_of(state).active)
    active[due] = population_of(state).active[due]
    found = problem.evaluate(state.x, state.lam * scale, sharpness)
    zero = (state.lam == 0).reshape(*active.shape, -1).all(2)
    stays = found.grad_lam >= 0 if problem.objective.nonnegative else found.grad_lam == 0
    stays = stays.reshape(*active.shape, -1).all(2)
    gone = active & zero & stays
    return (remove(state, gone) if bool(gone.any()) else state), gone


def merge(
    problem: Problem,
    state: SolverState,
    scale: float | Tensor,
    sharpness: float | Tensor,
    due: list[int],
) -> tuple[SolverState, list[tuple[int, int, int, float, float]]]:
    """Merge pairs of the runs that are due while no loss rises.

    Returns (run, slot kept, slot emptied, loss before, loss after) of every merge.
    """
    # An exact fit has a loss of rounding errors alone, which say nothing about a merge.
    rounding = 64 * torch.finfo(state.x.dtype).eps ** 2 * problem.empty_loss
    queues = {run: _pairs(problem, state, run) for run in due}
    done = []
    for _ in range(TRIES):
        before = problem.evaluate(state.x, state.lam * scale, sharpness).loss
        x, lam = state.x.clone(), state.lam.clone()
        tried: dict[int, tuple[int, int]] = {}
        for run, queue in queues.items():
            if queue:
                tried[run] = i, j = queue.pop(0)
                weight = torch.stack([state.lam[run, k].abs().sum() for k in (i, j)])
                share = weight / weight.sum()
                x[run, i] = share[0] * state.x[run, i] + share[1] * state.x[run, j]
                lam[run, i] = state.lam[run, i] + state.lam[run, j]
                lam[run, j] = 0.0
        if not tried:
            break
        after = problem.evaluate(x, lam * scale, sharpness).loss
        gone = torch.zeros_like(population_of(state).active)
        for run, (i, j) in tried.items():
            if not bool(after[run] <= before[run] + rounding):
                x[run], lam[run] = state.x[run], state.lam[run]
                continue
            gone[run, j] = True
            done.append((run, i, j, float(before[run]), float(after[run])))
            queues[run] = [pair for pair in queues[run] if not {i, j} & set(pair)]
        if bool(gone.any()):
            state = remove(state.replace(x=x, lam=lam), gone)
    return state, done


def _pairs(problem: Problem, state: SolverState, run: int) -> list[tuple[int, int]]:
    """Pairs that may merge, nearest first: one label, one sign of all multipliers, one pattern."""
    population = population_of(state)
    slots = population.active[run].nonzero()[:, 0]
    x = state.x[run, slots].flatten(1)
    lam = state.lam[run, slots].reshape(len(x), -1)
    signs = lam.sign()
    alike = population.labels[run, slots]
    fits = (alike[:, None] == alike[None]) & ((signs[:, None] * signs[None]) >= 0).all(2)
    fits &= (lam != 0).any(1)[:, None] & (lam != 0).any(1)[None]
    distance = torch.cdist(x, x)
    gates = patterns(problem, state.x[run, slots])
    if gates is None:
        lengths = x.norm(dim=1)
        fits &= distance <= CLOSE * torch.minimum(lengths[:, None], lengths[None])
    else:
        fits &= gates @ gates.T >= gates.shape[1] - 0.5
    index = torch.triu(fits, 1).nonzero()
    order = distance[index[:, 0], index[:, 1]].argsort()[: 4 * TRIES]
    return [(int(slots[a]), int(slots[b])) for a, b in index[order].tolist()]


def patterns(problem: Problem, x: Tensor) -> Tensor | None:
    """(m, neurons) signs of all pre-activations of a ReLU MLP at theta; None for other networks."""
    equation = problem.explicit
    if equation is None or not isinstance(problem.true_activation, ReLU):
        return None
    hidden = equation.pre_activations(x.flatten(1), problem.true_activation)
    return torch.cat(
        [x[:, :0].flatten(1), *(torch.where(z > 0, 1.0, -1.0).to(x) for z in hidden)], 1
    )


def population_of(state: SolverState) -> Population:
    """The state's population; only states of attacks that grow have one."""
    assert state.population is not None
    return state.population


def recorded(state: SolverState, events: list[dict[str, Any]]) -> SolverState:
    """With these events after those before."""
    population = population_of(state)
    return state.replace(population=population.replace(events=(*population.events, *events)))


def settle(
    state: SolverState, newcomers: list[list[Newcomer]]
) -> tuple[SolverState, list[list[tuple[int, ...]]]]:
    """Give every run's newcomers slots, empty ones first, and numbers; optimiser state is inherited.

    Returns the numbers of each newcomer: (child, child) of a split, (candidate,) otherwise.
    """
    if not any(newcomers):
        return state, [[] for _ in newcomers]
    population, m = population_of(state), state.x.shape[1]
    wanted = [int(a.sum()) + len(new) for a, new in zip(population.active, newcomers, strict=True)]
    state = widen(state, max(m, *wanted))
    population = population_of(state)
    tensors = {name: getattr(state, name).clone() for name in ("x", "lam")}
    moments = {name: t.clone() for name, t in state.moments.items()}
    own = {name: getattr(population, name).clone() for name in ("labels", "active", "ident")}
    born = list(population.born)
    numbers: list[list[tuple[int, ...]]] = []
    for run, new in enumerate(newcomers):
        empty = (~population.active[run]).nonzero()[:, 0].tolist()
        numbers.append([])
        for slot, one in zip(empty, new, strict=False):
            tensors["x"][run, slot], tensors["lam"][run, slot] = one.x, one.lam
            own["labels"][run, slot], own["active"][run, slot] = one.label, True
            own["ident"][run, slot] = born[run]
            fresh: tuple[int, ...] = (born[run],)
            if one.parent is not None and one.moved is not None:
                tensors["x"][run, one.parent] = one.moved
                tensors["lam"][run, one.parent] = one.lam
                own["ident"][run, one.parent] = born[run] + 1
                fresh = (born[run] + 1, born[run])
            for moment in moments.values():
                moment[run, slot] = 0.0 if one.parent is None else moment[run, one.parent]
            born[run] += len(fresh)
            numbers[run].append(fresh)
    population = population.replace(**own, born=tuple(born))
    return state.replace(**tensors, moments=moments, population=population), numbers


def remove(state: SolverState, gone: Tensor) -> SolverState:
    """Empty these slots (R, m)."""
    population = population_of(state)

    def emptied(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(gone.view(*gone.shape, *[1] * (tensor.ndim - 2)), 0.0)

    return state.replace(
        x=emptied(state.x),
        lam=emptied(state.lam),
        moments={name: emptied(t) for name, t in state.moments.items()},
        population=population.replace(active=population.active & ~gone),
    )


def widen(state: SolverState, slots: int) -> SolverState:
    """The same with empty slots at the end, up to so many."""
    more = slots - state.x.shape[1]
    if more <= 0:
        return state

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(len(tensor), more, *tensor.shape[2:])], 1)

    population = population_of(state)
    return state.replace(
        **{name: padded(getattr(state, name)) for name in PER_SLOT},
        moments={name: padded(t) for name, t in state.moments.items()},
        population=population.replace(**{name: padded(getattr(population, name)) for name in OWN}),
    )
