"""Minimize the attack's loss over candidates and multipliers, R restarts side by side.

``SolverState`` is an attack at one moment, ``Solver.step`` one update of it, ``Solver.solve`` the one
loop over steps. What happens between looks at the loss (growth, a watcher, the clock, saving, pausing)
is ``search`` in ``attack.py``.

Every random number comes from the seed; nothing here knows a dataset. A run whose loss leaves the
finite numbers is put back to its best point, stopped, and reported as "diverged"; the others go on.

    SGD    v <- mu v + g;                      p <- p - rate v
    Adam   m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2;
           p <- p - rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

A step never looks at the values of a tensor, so that a CUDA graph can hold it.

Runs side by side share tensors (R, m, ...) and may hold different numbers of candidates. A slot is
alive or empty; an empty one holds zeros, its multiplier is zero and never moves, so it adds nothing
to the equation. Every candidate has a number of its own, never used again in its run: those of the
start are 0..m-1, and a split gives two new ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residuum.attacks.base import AttackProgress
from residuum.attacks.random_streams import stream
from residuum.attacks.stationarity.objectives import Objective
from residuum.attacks.stationarity.priors import PRIORS, Prior, box, derivatives, penalty
from residuum.attacks.stationarity.problem import Problem, balancing_scale, best_multipliers
from residuum.engine.explicit import matmul_precision
from residuum.engine.graph import Repeater, keep_freed_memory
from residuum.errors import InputError
from residuum.records import Knowledge, Record
from residuum.records.rundir import another, digest
from residuum.settings import FAST, LR_LAM, NUMBERS, VARIED, StationaritySettings

DIVERGED = 1e6  # a loss this many times the first one, or that of no candidates, counts as diverged
CHECK_EVERY = 25  # steps between looks at the loss: snapshots, divergence, history
BETA1, BETA2 = 0.9, 0.999  # of Adam, as everywhere
EPSILON = 1e-12  # below any gradient that matters: losses near zero have small ones

Step = float | Tensor  # a tensor stays on its device: a CUDA graph holds the whole step
Moments = dict[str, Tensor]
OneStep = Callable[[Tensor, Tensor, Moments, Step, Tensor], None]


@dataclass(frozen=True, eq=False)
class Population(Record):
    """labels, active, ident: (R, m), and the same of the best point of every run.

    born: numbers used up in each run.
    last: step of each run's latest round.
    events: what happened, see ``growth.py``.
    stopped: why a run grows no more, "" while it may.
    """

    labels: Tensor
    active: Tensor
    ident: Tensor
    best_labels: Tensor
    best_active: Tensor
    best_ident: Tensor
    born: tuple[int, ...]
    last: tuple[int, ...]
    stopped: tuple[str, ...]
    events: tuple[dict[str, Any], ...] = ()

    @classmethod
    def start(cls, runs: int, labels: Tensor) -> Population:
        """Every run with the same candidates, all alive; labels: (m,)."""
        m = len(labels)
        own = labels.expand(runs, m).clone()
        active = torch.ones(runs, m, dtype=torch.bool, device=labels.device)
        ident = torch.arange(m, device=labels.device).expand(runs, m).clone()
        return cls(own, active, ident, own, active, ident, (m,) * runs, (0,) * runs, ("",) * runs)

    def keep_best(self, better: Tensor) -> Population:
        """Runs (R,) that reached a better point remember who was alive there."""
        now = {f"best_{name}": getattr(self, name) for name in ("labels", "active", "ident")}
        kept = {n: torch.where(better[:, None], t, getattr(self, n)) for n, t in now.items()}
        return self.replace(**kept)


@dataclass(frozen=True, eq=False)
class SolverState(Record):
    """An attack at one moment: all that is needed to go on.

    x, best_x: (R, m, *shape). Tensors may share memory, so none of them is changed in place.
    population: of an attack whose candidates grow, None otherwise.
    lam, best_lam: (R, m, ...) stored multipliers.
    best_loss, first_loss: (R,) at the best look so far, and at the first, which divergence is judged
        by.
    alive: (R,) runs that have not diverged.
    step: how many are done.
    fingerprint: of network, objective, knowledge and settings; a state of others is not gone on with.
    moments: of the optimizer, by variable.
    steps, loss, layers: the looks so far: step, (R,) and (R, L) each.
    stopped: why no further step is taken, "" while some are.
    """

    x: Tensor
    lam: Tensor
    best_x: Tensor
    best_lam: Tensor
    best_loss: Tensor
    first_loss: Tensor
    alive: Tensor
    step: int
    fingerprint: str
    moments: dict[str, Tensor] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    loss: tuple[Tensor, ...] = ()
    layers: tuple[Tensor, ...] = ()
    stopped: str = ""
    population: Population | None = None

    @property
    def moving(self) -> Tensor:
        """(R,) runs, or (R, m) candidates of them, that steps may change."""
        if self.population is None:
            return self.alive
        return self.alive[:, None] & self.population.active


class Solver:
    """One attack on one network: ``solve(start())`` runs it to its end.

    per_run: settings of each restart where they differ, see ``PerRun``.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        knowledge: Knowledge,
        config: StationaritySettings,
        shape: tuple[int, ...],
        outputs: int,
        candidates: int,
        per_run: Sequence[StationaritySettings] | None = None,
    ) -> None:
        keep_freed_memory()
        if knowledge.mean is not None:  # once: a copy from the host cannot be part of a CUDA graph
            knowledge = knowledge.replace(mean=knowledge.mean.to(config.device))
        self.config, self.knowledge, self.shape = config, knowledge, shape
        self.model, self.objective, self.outputs = model, objective, outputs
        self.dtype = config.numbers
        self.settings = PerRun(config, per_run, self.dtype, config.device)
        configs = [config, *self.settings.runs]
        self.fingerprint = fingerprint(model, objective, knowledge, configs, candidates)
        self.problem = self._problem(model, candidates)
        # If set, candidates are projected into its value range after every step.
        projects = config.constraint == "project" and knowledge.value_range is not None
        self.box = knowledge if projects else None
        self.sizes = (config.restarts, candidates)
        self.lam_shape = objective.multiplier_shape(outputs)
        lam_ndim, x_ndim = 2 + len(self.lam_shape), 2 + len(shape)
        self.lam_min = self.settings.value("lam_min", lam_ndim)
        lr_lam = self.settings.value("lr_lam", lam_ndim)
        self.rates = {
            "x": self.settings.value("lr_x", x_ndim),
            "lam": LR_LAM if lr_lam is None else lr_lam,
        }
        self.sharpness = self.settings.value("sharpness", 3)  # at the end
        self.priors: list[Prior] = [
            PRIORS[name](weight, self.lam_min, knowledge.replace(shape=shape))
            for name, weight in self.settings.priors()
        ]
        self.scale = self._stored_scale(candidates, lam_ndim)
        self.check_every = CHECK_EVERY * (8 if config.device.startswith("cuda") else 1)
        self.deadline, self.step_seconds = math.inf, 0.0  # of the clock; 0: not yet measured
        self.active: Tensor | None = None  # (R, m) slots in use, None: all
        self.padding: float | Tensor = 0.0  # what priors charge for empty slots, (R,)
        # A step of any network is many small operations already: one of them fills a graph.
        self.captured = CHECK_EVERY if self.problem.explicit is not None else 1
        self._static = StaticSteps(self.step, config, self.dtype, self.captured)

    def solve(self, state: SolverState, until: int | None = None) -> SolverState:
        """Steps from this state to ``until``, by default the last, with a look at the loss after some.

        The state that comes back says "finished" in ``stopped`` when no step is left to take, or no
        run alive to take it.
        """
        config = self.config
        until = config.steps if until is None else min(until, config.steps)
        self._adopt(state)
        if not state.steps:  # where the runs begin
            state = self._look(state)
        while not state.stopped and state.step < until:
            end = min(self.next_look(state.step), until, state.step + self._affordable_steps(state))
            start = time.monotonic()
            x, lam, moments = self.advance(state, end - state.step)
            self.step_seconds = (time.monotonic() - start) / (end - state.step)
            state = self._look(state.replace(x=x, lam=lam, moments=moments, step=end))
            if end == config.steps or not bool(state.alive.any()):
                state = state.replace(stopped="finished")
            if time.monotonic() >= self.deadline:
                break
        return state

    def _affordable_steps(self, state: SolverState) -> int:
        """Return how many steps fit before the deadline, at least one.

        The steps of a large network take so long that a whole interval between two looks would overrun.
        The first time a step is timed and discarded, so that the looks stay where they are.
        """
        on_gpu = self.config.device.startswith("cuda")  # steps are cheap, and captured in graphs
        if on_gpu or self.deadline == math.inf:
            return self.config.steps
        if not self.step_seconds:
            start = time.monotonic()
            self.advance(state, 1)
            self.step_seconds = time.monotonic() - start
        return max(1, int((self.deadline - time.monotonic()) / self.step_seconds))

    def advance(
        self, state: SolverState, count: int, fast: bool | None = None
    ) -> tuple[Tensor, Tensor, Moments]:
        """Candidates, multipliers and moments after ``count`` steps, without a look.

        fast: whether matrix products may round, by default while the search is on.
        """
        end = state.step + count
        fast = self.searching(end) if fast is None else fast
        with self.precision(fast):
            if self.config.device.startswith("cuda"):
                if self._closed_form_due(state.step):
                    state = state.replace(lam=self._closed_form(state.x, state.lam, state.step))
                return self._static.run(state, count, fast)
            x, lam = state.x.clone(), state.lam.clone()
            moments = {name: moment.clone() for name, moment in state.moments.items()}
            for step in range(state.step, end):
                if self._closed_form_due(step):
                    lam = self._closed_form(x, lam, step)
                self.step(x, lam, moments, step, state.moving)
            return x, lam, moments

    def step(self, x: Tensor, lam: Tensor, moments: Moments, step: Step, moving: Tensor) -> None:
        """One update of candidates and multipliers, in place: gradients, Adam or SGD, projection.

        Both directions are worked out before either variable moves. Projection comes last: candidates
        into the known box, multipliers above the least one, for a slot in use.

        moments: of the optimizer, by variable; made where they are missing.
        step: a number, or on a GPU a tensor, so that a captured step reads its schedule anew.
        moving: see ``SolverState.moving``.
        """
        _, _, gx, gl = self.gradients(x, lam, step, measure=False)
        rate, moves = rate_at(self.config, step), []
        for name, variable, gradient in (("x", x, gx), ("lam", lam, gl)):
            mask = _over(moving, variable)
            direction = self._direction(name, gradient.masked_fill_(~mask, 0.0), moments, step)
            moves.append((variable, torch.where(mask, direction, 0.0), self.rates[name]))
        for variable, direction, own in moves:
            variable.sub_(direction.mul_(own * rate))
        if self.config.constraint != "project":
            return
        if self.box is not None:
            x.clamp_(*box(self.box, x))
        if self.objective.nonnegative and moving.ndim == 1:
            lam.clamp_(min=self.lam_min)
        elif self.objective.nonnegative:
            # An empty slot has no multiplier, whatever the least one is.
            lam.copy_(torch.where(_over(moving, lam), lam.clamp(min=self.lam_min), lam))

    def next_look(self, step: int) -> int:
        """The step after which the loss is looked at next.

        A captured chunk ends where closed-form multipliers are due: no graph can hold them.
        """
        end = min(step + self.check_every, self.config.steps)
        every = self.config.lam_every
        if every and self.config.device.startswith("cuda"):
            end = min(end, (step // every + 1) * every)
        return end

    def searching(self, step: int) -> bool:
        """Whether matrix products may round up to this step: ``polish`` is the share of the last ones."""
        config = self.config
        return config.precision in FAST and step <= config.steps * (1 - config.polish)

    def progress(self, state: SolverState) -> AttackProgress:
        """The state as a watcher sees it."""

        def living() -> list[Tensor]:
            x, population = state.x, state.population
            if population is None:
                return list(x)
            return [x[run][population.active[run]] for run in range(len(x))]

        names = self.problem.layer_names
        return AttackProgress(
            state.step, self.config.steps, state.loss[-1], state.layers[-1], names, living
        )

    def multipliers(self, lam: Tensor) -> Tensor:
        """Plain-sum multipliers of stored ones."""
        return lam * self.scale

    def start(self) -> SolverState:
        """Random candidates and multipliers; each restart has a generator of its own."""
        config, xs, lams = self.config, [], []
        for run in range(config.restarts):
            generator = stream("candidates", config.seed, run)
            x = self._draw(self.settings.one(run).sigma, generator)
            xs.append(x.to(config.device, self.dtype))
            draw = torch.randn if config.lam_distribution == "normal" else torch.rand
            lam = draw(self.sizes[1], *self.lam_shape, generator=generator, dtype=torch.float64)
            low, high = config.lam_init
            spread = high if config.lam_distribution == "normal" else high - low
            lams.append((low + spread * lam).to(config.device, self.dtype))
        x, lam = (part[0][None] if len(part) == 1 else torch.stack(part) for part in (xs, lams))
        infinite = torch.full((config.restarts,), math.inf, dtype=self.dtype, device=config.device)
        alive = torch.ones(config.restarts, dtype=torch.bool, device=config.device)
        state = SolverState(x, lam, x, lam, infinite, infinite, alive, 0, self.fingerprint)
        if config.split == "none":
            return state
        return state.replace(population=Population.start(config.restarts, self.problem.labels))

    def _draw(self, sigma: float, generator: torch.Generator) -> Tensor:
        """Draw the candidates of one run, normal numbers with standard deviation ``sigma``."""
        x = torch.randn(self.sizes[1], *self.shape, generator=generator, dtype=torch.float64)
        return x.mul_(sigma)

    def _adopt(self, state: SolverState) -> None:
        """Labels of the state's own candidates, and buffers for as many as it has.

        Slots that nobody uses are candidates of zeros; what priors charge for them is taken off the
        loss.
        """
        population = state.population
        if population is None or population.active is self.active:  # nobody came or went
            return
        self.problem.labels, self.active = population.labels, population.active
        self._static = StaticSteps(self.step, self.config, self.dtype, self.captured)
        nobody = torch.zeros_like(state.x[:, :1]), torch.zeros_like(state.lam[:, :1])
        charge = penalty(self.priors, *nobody)
        self.padding = charge * (~population.active).sum(1)

    def _look(self, state: SolverState) -> SolverState:
        """History, best snapshots, and runs that left the finite numbers.

        A run that began near zero may come back to what no candidates at all would cost.
        """
        loss, layers, _, _ = self.gradients(state.x, state.lam, state.step)
        first = torch.where(torch.isfinite(state.first_loss), state.first_loss, loss)
        fine = torch.isfinite(loss) & (loss <= DIVERGED * first.clamp(min=self.problem.empty_loss))
        better = state.alive & fine & (loss < state.best_loss)
        # A run stopped by the clock has been looked at where it goes on from.
        population = state.population
        past = len(state.steps) - (state.step in state.steps[-1:])
        return state.replace(
            best_x=_where(better, state.x, state.best_x),
            best_lam=_where(better, state.lam, state.best_lam),
            best_loss=torch.where(better, loss, state.best_loss),
            first_loss=first,
            alive=state.alive & fine,
            steps=(*state.steps[:past], state.step),
            loss=(*state.loss[:past], loss.detach().cpu().double()),
            layers=(*state.layers[:past], layers.detach().cpu().double()),
            population=population if population is None else population.keep_best(better),
        )

    def _closed_form_due(self, step: int) -> bool:
        return bool(self.config.lam_every and step and step % self.config.lam_every == 0)

    @contextmanager
    def precision(self, fast: bool) -> Iterator[None]:
        """Matrix products as ``dtype`` says while the search is on, in full float32 otherwise."""
        equation = self.problem.explicit
        if equation is not None:
            equation.half = fast and self.config.precision == "bf16"
        try:
            with matmul_precision(fast):
                yield
        finally:
            if equation is not None:
                equation.half = False

    def gradients(
        self, x: Tensor, lam: Tensor, step: Step, measure: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss (R,), relative squared residuals (R, L), gradients in x and in the stored lam.

        Priors are in the loss. Multipliers are stored over a scale, by default one that
        makes the first sum as large as the target, so that one rate suits all networks: by the chain rule
        their gradient is multiplied by it.

        measure: the loss is wanted too, and not its gradients alone.
        """
        share, sharpness = share_at(self.config, step), self.sharpness_at(step)
        found = self.problem.evaluate(x, lam * self.scale, sharpness, measure)
        loss, gx, gl = found.loss, found.grad_x, found.grad_lam * self.scale
        if self.priors:
            total, prior_x, prior_lam = derivatives(self.priors, x, lam, share)
            gx, gl, loss = gx.add_(prior_x), gl.add_(prior_lam), loss + (total - self.padding)
        return loss, found.layers, gx, gl

    def _direction(self, name: str, g: Tensor, moments: Moments, step: Step) -> Tensor:
        """What is subtracted, before the rate: momentum of SGD, or Adam's ratio of corrected moments.

        The moments are written in place, since a captured step must find them where it left them.
        """

        def moment(name: str) -> Tensor:
            if name not in moments:
                moments[name] = torch.zeros_like(g)
            return moments[name]

        if self.config.optimizer == "sgd":
            return moment(name).mul_(self.config.momentum).add_(g)
        t = step + 1
        first, second = moment(f"{name}/1"), moment(f"{name}/2")
        first.mul_(BETA1).add_(g, alpha=1 - BETA1)
        second.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        below = (second / (1 - BETA2**t)).sqrt_().add_(EPSILON)
        return (first / (1 - BETA1**t)).div_(below)

    def _closed_form(self, x: Tensor, lam: Tensor, step: Step) -> Tensor:
        """The best multipliers for these candidates, per run; see ``problem.best_multipliers``.

        Runs are solved one by one, each over its own slots in use, with its own floor and sharpness.
        """
        best = lam.clone()
        for run in range(len(x)):
            own = self.settings.one(run)
            there = slice(None) if self.active is None else self.active[run]
            scale = self.scale if isinstance(self.scale, float) else float(self.scale[run].max())
            own_problem = self.problem.with_labels(self.problem.labels_of(run)[there])
            best[run, there] = best_multipliers(
                own_problem,
                x[run, there][None],
                lam[run, there][None],
                own.lam_min if self.objective.nonnegative else None,
                scale,
                sharpness_at(own, step),
            )[0]
        return best

    def sharpness_at(self, step: Step) -> Step:
        """Of the surrogate at a step; a tensor where runs differ in it."""
        return sharpness_at(self.config, step, self.sharpness)

    def labels(self, count: int) -> Tensor:
        """Labels for so many candidates."""
        return self.objective.labels(count, self.outputs, self.knowledge)

    def _problem(self, model: nn.Module, candidates: int) -> Problem:
        """Build the equation for so many candidates."""
        config = self.config
        return Problem(
            model,
            self.objective,
            self.knowledge,
            self.labels(candidates),
            surrogate=config.surrogate,
            normalize=config.normalize,
            layers=config.layers,
            dtype=self.dtype,
            device=config.device,
        )

    def _stored_scale(self, candidates: int, ndim: int) -> float | Tensor:
        """Factor from stored to plain-sum multipliers; per run where their sharpness differs."""
        if self.config.lam_scale != "auto":
            return 1.0 if self.config.lam_scale == "one" else 1 / candidates
        if not isinstance(self.sharpness, Tensor):
            return self._scale_at(self.sharpness)
        scales = [self._scale_at(run.sharpness) for run in self.settings.runs]
        return self.sharpness.new_tensor(scales).view(-1, *[1] * (ndim - 1))

    def _scale_at(self, sharpness: float) -> float:
        spread = 0.25
        if self.knowledge.value_range is not None:
            spread = (self.knowledge.value_range[1] - self.knowledge.value_range[0]) / 4
        x = self._draw(spread, stream("scale"))[None]
        x = x.to(self.config.device, self.dtype)
        return balancing_scale(self.problem, x, self.lam_shape, sharpness)


def share_at(config: StationaritySettings, step: Step) -> Step:
    """Of the steps, 1 at the last one."""
    return _at_most(step / max(1, config.steps - 1), 1.0)


def sharpness_at(config: StationaritySettings, step: Step, sharpness: Step | None = None) -> Step:
    """The surrogate's alpha or beta at a step; a number, or a tensor that stays on its device.

    sharpness: the one at the end, by default the configuration's own.
    """
    sharpness = config.sharpness if sharpness is None else sharpness
    if config.anneal == "loo2024":  # as released: a decade every 20 000 steps, up to 200
        return _at_most(10 + 10 ** (step / 20000), 200.0)
    if config.anneal == "geometric" and config.sharpness_from:
        return config.sharpness_from * (sharpness / config.sharpness_from) ** share_at(config, step)
    return sharpness


def rate_at(config: StationaritySettings, step: Step) -> Step:
    """Factor on both learning rates: cosine from 1 down to ``lr_decay``; 1 keeps them fixed."""
    angle = math.pi * _at_most(step / max(1, config.steps), 1.0)
    cosine = torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)
    return config.lr_decay + (1 - config.lr_decay) * (1 + cosine) / 2


def _at_most(value: Step, limit: float) -> Step:
    return value.clamp(max=limit) if isinstance(value, Tensor) else min(value, limit)


def _over(alive: Tensor, like: Tensor) -> Tensor:
    return alive.view(*alive.shape, *[1] * (like.ndim - alive.ndim))


class StaticSteps:
    """step: changes x, lam and moments in place; chunk: steps that one captured graph holds.

    A captured graph keeps the shapes it was captured with: after growth a new object is needed.
    """

    def __init__(
        self, step: OneStep, config: StationaritySettings, dtype: torch.dtype, chunk: int
    ) -> None:
        self.step, self.config, self.dtype, self.chunk = step, config, dtype, chunk
        self.live: dict[str, Tensor] = {}
        self.moments: Moments = {}
        self.repeaters: dict[bool, Repeater] = {}

    def run(self, state: SolverState, count: int, fast: bool) -> tuple[Tensor, Tensor, Moments]:
        """``count`` steps from this state: candidates, multipliers and moments after them."""
        live, moments = self.live, self.moments
        now = {"x": state.x, "lam": state.lam, "moving": state.moving}
        if not live:
            for name, tensor in now.items():
                live[name] = torch.empty_like(tensor)
            live["step"] = torch.zeros((), dtype=self.dtype, device=self.config.device)
        if fast not in self.repeaters:  # a captured graph keeps the precision it was captured in
            body = torch.compile(self.step) if self.config.compile else self.step

            def one() -> None:
                body(live["x"], live["lam"], moments, live["step"], live["moving"])
                live["step"].add_(1)

            self.repeaters[fast] = Repeater(one, self.config.device, self.chunk)
        for name, tensor in now.items():
            live[name].copy_(tensor)
        live["step"].fill_(state.step)
        for name, moment in state.moments.items():
            moments.setdefault(name, torch.empty_like(moment)).copy_(moment)
        self.repeaters[fast].run(count)
        kept = {name: moment.clone() for name, moment in moments.items()}
        return live["x"].clone(), live["lam"].clone(), kept


def _where(runs: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """new for these runs, old for the others; no copy where one of them serves all."""
    if bool(runs.all()):
        return new
    if not bool(runs.any()):
        return old
    return torch.where(runs.view(-1, *[1] * (new.ndim - 1)), new, old)


class PerRun:
    """Settings of R runs that share one program and one set of weights.

    runs: one configuration each, or none where all are alike. A setting that is the same in every
    run stays a plain number; one that differs is a tensor with one value per run, shaped to
    broadcast against (R, m, ...).
    """

    def __init__(
        self,
        config: StationaritySettings,
        runs: Sequence[StationaritySettings] | None,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        self.runs = tuple(runs or ())
        self.config = config
        self._numbers: dict[str, Any] = {"dtype": dtype, "device": device}
        if self.runs:
            self._check()
        self._tensors = {
            name: torch.tensor(values, **self._numbers)
            for name in NUMBERS
            if len(set(values := [getattr(run, name) for run in self.runs])) > 1
        }

    def value(self, name: str, ndim: int = 1) -> float | Tensor:
        """One number for all runs, or a tensor (R, 1, ...) of ``ndim`` dimensions."""
        if name not in self._tensors:
            return getattr(self.one(0), name)
        tensor = self._tensors[name]
        return tensor.view(-1, *[1] * (ndim - 1))

    def priors(self) -> list[tuple[str, float | Tensor]]:
        """Every prior that some run has, with its weight: a number, or (R,) with 0 where it is absent."""
        if len({run.priors for run in self.runs}) < 2:
            return list(self.one(0).priors or ())
        own = [dict(run.priors or ()) for run in self.runs]
        names = dict.fromkeys(name for priors in own for name in priors)
        return [
            (name, torch.tensor([priors.get(name, 0.0) for priors in own], **self._numbers))
            for name in names
        ]

    def one(self, run: int) -> StationaritySettings:
        """The settings of one run."""
        return self.runs[run] if self.runs else self.config

    def _check(self) -> None:
        if len(self.runs) != self.config.restarts:
            raise InputError(
                f"Settings per run must be as many as restarts; got {len(self.runs)} for "
                f"{self.config.restarts}.",
                "Give one configuration per restart.",
            )
        for run in self.runs:
            common = {name: getattr(self.config, name) for name in VARIED}
            if run.changed(**common) != self.config:
                raise InputError(
                    f"Runs side by side may differ in {', '.join(VARIED)} alone.",
                    "Run configurations that differ otherwise one after the other.",
                )


def fingerprint(
    model: nn.Module,
    objective: Objective,
    knowledge: Knowledge,
    configs: Sequence[StationaritySettings],
    candidates: int,
) -> str:
    """Hash of everything that decides an attack but its wall clock.

    configs: the settings of all runs together, then each run's own where they differ.
    """
    settings = [{k: v for k, v in config.to_json().items() if k != "seconds"} for config in configs]
    tensors = [*model.state_dict().values(), *(knowledge.theta0 or {}).values()]
    known = [t for t in (*tensors, knowledge.mean, knowledge.norms) if t is not None]
    rest = [knowledge.shape, knowledge.value_range, knowledge.sample_count, knowledge.label_balance]
    told = [rest, knowledge.loss, knowledge.weight_decay, knowledge.columns]
    return digest([*settings, repr(objective), candidates], *known, told)


def load_state(path: Path | None, fingerprint: str, device: str) -> SolverState | None:
    """The state saved at ``path``, None where there is none; another attack's state is refused."""
    if path is None or not path.exists():
        return None
    state = SolverState.load(path)
    if state.fingerprint != fingerprint:
        raise another(path.parent, "an attack", "settings or on other weights")
    stopped = "" if state.stopped == "time" else state.stopped
    population = None if state.population is None else _moved(state.population, device)
    moments = {name: t.to(device) for name, t in state.moments.items()}
    state = state.replace(moments=moments, stopped=stopped, population=population)
    return _moved(state, device)


def _moved(record: Any, device: str) -> Any:
    """With its tensors on another device; a history of them stays where it is."""
    tensors = {name: t for name, t in vars(record).items() if isinstance(t, Tensor)}
    return record.replace(**{name: t.to(device) for name, t in tensors.items()})
