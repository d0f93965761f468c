"""Minimize the loss of an attack over candidates and multipliers, for R restarts at once.

``SolverState`` is the state of an attack. ``Solver.step`` updates candidates and multipliers once, and
``Solver.solve`` is the only loop over steps. The function ``search`` of ``attack.py`` does everything else
between evaluation steps: adding candidates, reporting progress, checking the time limit, saving and pausing.

All random numbers come from the seed. A run diverges if its loss is not finite or much too large. A diverged
run stops at its best point and is reported as "diverged", and the other runs continue.

    SGD    v <- mu v + g;                      p <- p - rate v
    Adam   m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2;
           p <- p - rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Here p is the variable, g its gradient, mu the momentum, b1 and b2 are the constants of Adam, and t is the
step. A step never reads the values of a tensor on the host, so that a CUDA graph can hold the step.

The runs share tensors (R, m, ...) and may hold different numbers of candidates. A slot is active or
empty. An empty slot holds zeros. Its multiplier is zero and never changes, so the slot adds nothing to the
equation. A candidate has a number that is used only once in its run. The numbers of the initial candidates
are 0..m-1, and a split creates two new numbers.
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
from residuum.attacks.stationarity.problem import Problem, balancing_scale, fit_multipliers
from residuum.engine.explicit import matmul_precision
from residuum.engine.graph import Repeater, keep_freed_memory
from residuum.errors import InputError
from residuum.records import Knowledge, Record
from residuum.records.rundir import digest, refuse_other_run
from residuum.settings import FAST_PRECISIONS, LR_LAM, NUMBERS, PER_RUN, StationaritySettings

# A run of the attack counts as diverged if its loss exceeds this multiple of its first loss, or of the loss
# without candidates if that is larger.
DIVERGED = 1e6
CHECK_EVERY = 25  # number of steps between two evaluations of the loss
BETA1, BETA2 = 0.9, 0.999  # Adam's decay rates of the first and second moment, the usual values
EPSILON = 1e-12  # constant in Adam's denominator, smaller than the gradients of losses near zero

Step = float | Tensor  # the number of a step; inside a CUDA graph it is a tensor
Moments = dict[str, Tensor]
OneStep = Callable[[Tensor, Tensor, Moments, Step, Tensor], None]


@dataclass(frozen=True, eq=False)
class Population(Record):
    """Labels, numbers and history of the candidates, if runs can add candidates during the search.

    Every run has m slots (positions of candidates in the tensors). Some slots can be empty.

    Attributes:
        labels: Labels of the candidates (R, m).
        active: Mask of the slots that hold a candidate (R, m).
        ident: Number of the candidate in each slot (R, m).
        best_labels: Labels of the candidates at the best point of every run.
        best_active: Mask of the slots that hold a candidate at the best point of every run.
        best_ident: Numbers of the candidates at the best point of every run.
        born: How many candidate numbers each run has used.
        last: Step at which each run last merged or added candidates.
        stopped: Why each run no longer adds candidates, "" if the run still can.
        events: Splits, merges and other changes of the candidates so far, see ``growth.py``.
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
        """Create the record of labels, numbers and history of the candidates at the start of an attack.

        All runs have the same number of candidates with the same labels.

        Args:
            runs: Number of runs R.
            labels: Labels of the candidates (m,).

        Returns:
            The record.
        """
        candidate_count = len(labels)
        run_labels = labels.expand(runs, candidate_count).clone()
        active = torch.ones(runs, candidate_count, dtype=torch.bool, device=labels.device)
        candidate_numbers = (
            torch.arange(candidate_count, device=labels.device)
            .expand(runs, candidate_count)
            .clone()
        )
        return cls(
            labels=run_labels,
            active=active,
            ident=candidate_numbers,
            best_labels=run_labels,
            best_active=active,
            best_ident=candidate_numbers,
            born=(candidate_count,) * runs,
            last=(0,) * runs,
            stopped=("",) * runs,
        )

    def keep_best(self, better: Tensor) -> Population:
        """Record the current candidates as the best result so far of the runs in the mask ``better`` (R,)."""
        current_fields = {
            f"best_{name}": getattr(self, name) for name in ("labels", "active", "ident")
        }
        best_fields = {
            n: torch.where(better[:, None], t, getattr(self, n)) for n, t in current_fields.items()
        }
        return self.replace(**best_fields)


@dataclass(frozen=True, eq=False)
class SolverState(Record):
    """State of a search for training samples, with everything that is needed to continue it.

    The tensors of a state may share memory, so no tensor is changed in place.

    Attributes:
        x: Candidates for training samples (R, m, *shape), m in each of R runs.
        lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.
        best_x: Candidates at the best point of each run, which has the smallest loss.
        best_lam: Stored multipliers at the best point of each run.
        best_loss: Loss at the best point of each run (R,).
        first_loss: Loss at the first evaluation step (R,). A run diverges if its later loss is a large
            multiple of this loss.
        alive: Mask of the runs that have not diverged (R,).
        step: Number of optimization steps done.
        fingerprint: Hash of network, objective, knowledge and settings. Only an attack with the same hash
            can continue from this state.
        moments: Tensors of the optimizer state by name.
        steps: Numbers of the steps at which the loss was evaluated so far.
        loss: Losses of the runs (R,) at each evaluation step.
        layers: Relative squared residuals of the layers (R, L) at each evaluation step.
        stopped: Why the attack stopped, "" if the attack continues.
        population: Labels and numbers of the candidates, None if the number of candidates is fixed.
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
        """Mask of the runs (R,), or of the candidates (R, m), that optimization steps may change."""
        if self.population is None:
            return self.alive
        return self.alive[:, None] & self.population.active


class Solver:
    """The optimization of an attack: searches for training samples. ``solve(start())`` runs all of it.

    Args:
        model: The network that is attacked.
        objective: Defines the equation that the attack solves.
        knowledge: What the attacker knows.
        config: Settings of the attack.
        shape: Shape of a sample.
        outputs: Number of outputs of the network.
        candidates: Number of candidates m.
        per_run: Settings of each restart, if they differ (see ``PerRun``).
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
        if knowledge.mean is not None:
            # The mean is moved to the device now, because a CUDA graph cannot copy from the host.
            knowledge = knowledge.replace(mean=knowledge.mean.to(config.device))
        self.config, self.knowledge, self.shape = config, knowledge, shape
        self.model, self.objective, self.outputs = model, objective, outputs
        self.dtype = config.numbers
        self.settings = PerRun(config, per_run, self.dtype, config.device)
        configs = [config, *self.settings.runs]
        self.fingerprint = compute_fingerprint(model, objective, knowledge, configs, candidates)
        self.problem = self._problem(model, candidates)
        is_projected = config.constraint == "project" and knowledge.value_range is not None
        # If candidates are moved into the known value range after every step: the knowledge of this range.
        # Otherwise None.
        self.box = knowledge if is_projected else None
        self.sizes = (config.restarts, candidates)
        self.lam_shape = objective.multiplier_shape(outputs)
        lam_ndim, x_ndim = 2 + len(self.lam_shape), 2 + len(shape)
        self.lam_min = self.settings.value("lam_min", lam_ndim)
        lr_lam = self.settings.value("lr_lam", lam_ndim)
        self.rates = {
            "x": self.settings.value("lr_x", x_ndim),
            "lam": LR_LAM if lr_lam is None else lr_lam,
        }
        # Sharpness, at the last step, of the smooth function that replaces the derivative of the ReLU.
        self.sharpness = self.settings.value("sharpness", 3)
        self.priors: list[Prior] = [
            PRIORS[name](weight, self.lam_min, knowledge.replace(shape=shape))
            for name, weight in self.settings.priors()
        ]
        self.scale = self._stored_scale(candidates, lam_ndim)
        self.check_every = CHECK_EVERY * (8 if config.device.startswith("cuda") else 1)
        self.deadline = math.inf  # time on the monotonic clock at which the search must end
        self.step_seconds = 0.0  # seconds per step, 0 before the first measurement
        # Mask (R, m) of the positions in the tensors that hold a candidate, None if every position holds one.
        self.active: Tensor | None = None
        # Some places in the tensors hold zeros instead of a candidate. The loss contains a penalty (R,) for
        # these zeros, which is subtracted again.
        self.padding: float | Tensor = 0.0
        # If derivatives come from autograd and not from formulas, a CUDA graph of one step is large. Then
        # each graph holds only one step.
        self.captured = CHECK_EVERY if self.problem.explicit is not None else 1
        self._static = StaticSteps(self.step, config, self.dtype, self.captured)

    def solve(self, state: SolverState, until: int | None = None) -> SolverState:
        """Take optimization steps up to step ``until``, and evaluate the loss at the evaluation steps.

        Args:
            state: State of the search: the candidates and the optimizer.
            until: Number of the step to stop at, by default the last step of the attack.

        Returns:
            The new state. Its attribute ``stopped`` is "finished" after the last step of the attack, or if
            all runs have diverged.
        """
        config = self.config
        until = config.steps if until is None else min(until, config.steps)
        self._adopt(state)
        if not state.steps:  # the search begins, so its initial point is evaluated
            state = self._evaluate(state)
        while not state.stopped and state.step < until:
            end_step = state.step + self._affordable_steps(state)
            end_step = min(self.next_evaluation_step(state.step), until, end_step)
            start_time = time.monotonic()
            x, lam, moments = self.advance(state, end_step - state.step)
            self.step_seconds = (time.monotonic() - start_time) / (end_step - state.step)
            state = self._evaluate(state.replace(x=x, lam=lam, moments=moments, step=end_step))
            if end_step == config.steps or not bool(state.alive.any()):
                state = state.replace(stopped="finished")
            if time.monotonic() >= self.deadline:
                break
        return state

    def _affordable_steps(self, state: SolverState) -> int:
        """Return how many optimization steps can be taken before the deadline, at least one.

        For a large network, a whole interval between evaluation steps can exceed the deadline. The first call
        therefore measures the time of one step. The result of this step is discarded, so that the search does
        not depend on the measurement.
        """
        # On a GPU, steps are fast, and a CUDA graph runs many steps at once.
        on_gpu = self.config.device.startswith("cuda")
        if on_gpu or self.deadline == math.inf:
            return self.config.steps
        if not self.step_seconds:
            start_time = time.monotonic()
            self.advance(state, 1)
            self.step_seconds = time.monotonic() - start_time
        return max(1, int((self.deadline - time.monotonic()) / self.step_seconds))

    def advance(
        self, state: SolverState, count: int, fast: bool | None = None
    ) -> tuple[Tensor, Tensor, Moments]:
        """Take ``count`` optimization steps without an evaluation of the loss.

        Args:
            state: State of the search: the candidates and the optimizer.
            count: Number of steps.
            fast: Whether matrix products use tf32 or bf16, by default as decided by :meth:`is_fast`.

        Returns:
            The candidates, the stored multipliers and the optimizer state after the steps.
        """
        end_step = state.step + count
        fast = self.is_fast(end_step) if fast is None else fast
        with self.precision(fast):
            if self.config.device.startswith("cuda"):
                if self._closed_form_due(state.step):
                    state = state.replace(lam=self._closed_form(state.x, state.lam, state.step))
                return self._static.run(state, count, fast)
            x, lam = state.x.clone(), state.lam.clone()
            moments = {name: moment.clone() for name, moment in state.moments.items()}
            for step in range(state.step, end_step):
                if self._closed_form_due(step):
                    lam = self._closed_form(x, lam, step)
                self.step(x, lam, moments, step, state.moving)
            return x, lam, moments

    def step(self, x: Tensor, lam: Tensor, moments: Moments, step: Step, moving: Tensor) -> None:
        """Update candidates and multipliers in place, by a step of Adam or SGD and a projection.

        The gradients in candidates and multipliers are computed before either of the two changes. After the
        step, candidates are projected into the known value range, and multipliers below the minimum are set
        to the minimum. Positions in the tensors without a candidate stay zero.

        Args:
            x: Candidates, which are changed.
            lam: Stored multipliers, which are changed.
            moments: Tensors of the optimizer state by name. Missing tensors are created.
            step: Number of the step. On a GPU the number is a tensor, so that a captured graph computes the
                current learning rate and sharpness.
            moving: Mask of the runs (R,), or of their candidates (R, m), that may change.
        """
        _, _, gx, gl = self.gradients(x, lam, step, measure=False)
        rate, updates = rate_at(self.config, step), []
        for name, variable, gradient in (("x", x, gx), ("lam", lam, gl)):
            may_change = _expand(moving, variable)
            direction = self._direction(
                name, gradient.masked_fill_(~may_change, 0.0), moments, step
            )
            updates.append((variable, torch.where(may_change, direction, 0.0), self.rates[name]))
        for variable, direction, variable_rate in updates:
            variable.sub_(direction.mul_(variable_rate * rate))
        if self.config.constraint != "project":
            return
        if self.box is not None:
            x.clamp_(*box(self.box, x))
        if self.objective.nonnegative and moving.ndim == 1:
            lam.clamp_(min=self.lam_min)
        elif self.objective.nonnegative:
            # If a position in the tensors holds no candidate, its multiplier stays zero, even if the minimum
            # of the multipliers is positive.
            lam.copy_(torch.where(_expand(moving, lam), lam.clamp(min=self.lam_min), lam))

    def next_evaluation_step(self, step: int) -> int:
        """Return the next step at which the solver evaluates the loss.

        On a GPU, the loss is also evaluated before every fit of the multipliers in closed form, because a
        CUDA graph cannot hold this fit.

        Args:
            step: Number of the current step.

        Returns:
            The number of the evaluation step.
        """
        next_step = min(step + self.check_every, self.config.steps)
        lam_every = self.config.lam_every
        if lam_every and self.config.device.startswith("cuda"):
            next_step = min(next_step, (step // lam_every + 1) * lam_every)
        return next_step

    def is_fast(self, step: int) -> bool:
        """Return True if matrix products may use tf32 or bf16 precision up to this step.

        Args:
            step: Number of the optimization step.

        Returns:
            True if the settings name a fast precision, except in the last steps, whose share is the setting
            ``polish``.
        """
        config = self.config
        return config.precision in FAST_PRECISIONS and step <= config.steps * (1 - config.polish)

    def progress(self, state: SolverState) -> AttackProgress:
        """Return the progress of the attack, for the function that watches the attack."""

        def active_candidates() -> list[Tensor]:
            x, population = state.x, state.population
            if population is None:
                return list(x)
            return [x[run][population.active[run]] for run in range(len(x))]

        layer_names = self.problem.layer_names
        loss, layers = state.loss[-1], state.layers[-1]
        return AttackProgress(
            state.step, self.config.steps, loss, layers, layer_names, active_candidates
        )

    def multipliers(self, lam: Tensor) -> Tensor:
        """Return the multipliers (weights of the candidates): the stored numbers times the solver's scale."""
        return lam * self.scale

    def start(self) -> SolverState:
        """Return the initial state of the attack. Each restart (run) gets its own random numbers."""
        config, xs, lams = self.config, [], []
        for run in range(config.restarts):
            generator = stream("candidates", config.seed, run)
            initial_candidates = self._draw(self.settings.for_run(run).sigma, generator)
            xs.append(initial_candidates.to(config.device, self.dtype))
            draw = torch.randn if config.lam_distribution == "normal" else torch.rand
            initial_multipliers = draw(
                self.sizes[1], *self.lam_shape, generator=generator, dtype=torch.float64
            )
            low, high = config.lam_init
            multiplier_range = high if config.lam_distribution == "normal" else high - low
            lams.append(
                (low + multiplier_range * initial_multipliers).to(config.device, self.dtype)
            )
        initial_candidates, initial_multipliers = (
            tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
            for tensors in (xs, lams)
        )
        infinite_loss = torch.full(
            (config.restarts,), math.inf, dtype=self.dtype, device=config.device
        )
        alive = torch.ones(config.restarts, dtype=torch.bool, device=config.device)
        initial_state = SolverState(
            initial_candidates,
            initial_multipliers,
            initial_candidates,
            initial_multipliers,
            infinite_loss,
            infinite_loss,
            alive,
            0,
            self.fingerprint,
        )
        if config.split == "none":
            return initial_state
        return initial_state.replace(
            population=Population.start(config.restarts, self.problem.labels)
        )

    def _draw(self, sigma: float, generator: torch.Generator) -> Tensor:
        """Draw the initial candidates (guesses of samples) of one run: normal random numbers."""
        normal_numbers = torch.randn(
            self.sizes[1], *self.shape, generator=generator, dtype=torch.float64
        )
        return normal_numbers.mul_(sigma)

    def _adopt(self, state: SolverState) -> None:
        """Prepare the solver for a state: for the labels and the number of its candidates.

        If a run has fewer candidates than the tensors can hold, the other positions hold zeros. The method
        computes the penalty of the priors on these zeros, which is subtracted from the loss.
        """
        candidate_population = state.population
        # The solver and the state share the tensor ``active`` until a candidate is added or removed.
        if candidate_population is None or candidate_population.active is self.active:
            return
        self.problem.labels, self.active = candidate_population.labels, candidate_population.active
        self._static = StaticSteps(self.step, self.config, self.dtype, self.captured)
        empty_x, empty_lam = torch.zeros_like(state.x[:, :1]), torch.zeros_like(state.lam[:, :1])
        empty_penalty = penalty(self.priors, empty_x, empty_lam)
        self.padding = empty_penalty * (~candidate_population.active).sum(1)

    def _evaluate(self, state: SolverState) -> SolverState:
        """Compute the loss of every run. Record it, the best point so far, and which runs have diverged."""
        loss, layers, _, _ = self.gradients(state.x, state.lam, state.step)
        first_loss = torch.where(torch.isfinite(state.first_loss), state.first_loss, loss)
        # The first loss can be very small, so the limit is at least this multiple of the loss without
        # candidates.
        loss_limit = DIVERGED * first_loss.clamp(min=self.problem.empty_loss)
        is_fine = torch.isfinite(loss) & (loss <= loss_limit)
        is_better = state.alive & is_fine & (loss < state.best_loss)
        # If this step was already evaluated before an interruption, the new record replaces the old record.
        candidate_population = state.population
        kept_record_count = len(state.steps) - (state.step in state.steps[-1:])
        return state.replace(
            best_x=_where(is_better, state.x, state.best_x),
            best_lam=_where(is_better, state.lam, state.best_lam),
            best_loss=torch.where(is_better, loss, state.best_loss),
            first_loss=first_loss,
            alive=state.alive & is_fine,
            steps=(*state.steps[:kept_record_count], state.step),
            loss=(*state.loss[:kept_record_count], loss.detach().cpu().double()),
            layers=(*state.layers[:kept_record_count], layers.detach().cpu().double()),
            population=candidate_population
            if candidate_population is None
            else candidate_population.keep_best(is_better),
        )

    def _closed_form_due(self, step: int) -> bool:
        return bool(self.config.lam_every and step and step % self.config.lam_every == 0)

    @contextmanager
    def precision(self, fast: bool) -> Iterator[None]:
        """Set the precision of matrix products: that of the settings if ``fast``, otherwise full."""
        mlp_equation = self.problem.explicit
        if mlp_equation is not None:
            mlp_equation.half = fast and self.config.precision == "bf16"
        try:
            with matmul_precision(fast):
                yield
        finally:
            if mlp_equation is not None:
                mlp_equation.half = False

    def gradients(
        self, x: Tensor, lam: Tensor, step: Step, measure: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the loss including penalties, its gradients, and the error of the equation by layer.

        Stored multipliers are the multipliers of the gradients divided by a scale. By default, the scale
        makes the weighted sum of gradients initially as large as the target, so that one learning rate
        suits all networks. By the chain rule, the gradient in the stored multipliers is multiplied by the
        scale.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.
            step: Number of the step, which decides the surrogate's sharpness and the weights of the priors.
            measure: Whether to compute the loss and the residuals. If False, only the gradients are valid.

        Returns:
            The loss (R,), the relative squared residuals (R, L), and the gradients of the loss in x and in
            lam.
        """
        share, sharpness = share_at(self.config, step), self.sharpness_at(step)
        evaluation = self.problem.evaluate(x, lam * self.scale, sharpness, measure)
        loss, gx, gl = evaluation.loss, evaluation.grad_x, evaluation.grad_lam * self.scale
        if self.priors:
            total, prior_x, prior_lam = derivatives(self.priors, x, lam, share)
            gx, gl, loss = gx.add_(prior_x), gl.add_(prior_lam), loss + (total - self.padding)
        return loss, evaluation.layers, gx, gl

    def _direction(self, name: str, g: Tensor, moments: Moments, step: Step) -> Tensor:
        """Return the descent direction of one variable, by SGD with momentum or by Adam.

        The optimizer state is changed in place, because a captured step uses fixed tensors.

        Args:
            name: Name of the variable, "x" or "lam".
            g: Gradient of the loss in the variable.
            moments: Tensors of the optimizer state by name.
            step: Number of the optimization step.

        Returns:
            The direction, which the caller multiplies by the learning rate and subtracts.
        """

        def moment(name: str) -> Tensor:
            if name not in moments:
                moments[name] = torch.zeros_like(g)
            return moments[name]

        if self.config.optimizer == "sgd":
            return moment(name).mul_(self.config.momentum).add_(g)
        step_number = step + 1
        first, second = moment(f"{name}/1"), moment(f"{name}/2")
        first.mul_(BETA1).add_(g, alpha=1 - BETA1)
        second.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        denominator = (second / (1 - BETA2**step_number)).sqrt_().add_(EPSILON)
        return (first / (1 - BETA1**step_number)).div_(denominator)

    def _closed_form(self, x: Tensor, lam: Tensor, step: Step) -> Tensor:
        """Return the multipliers (weights) that minimize the loss for given candidates.

        The least-squares problems are solved run by run, because runs can differ in candidates and settings.
        """
        best_lam = lam.clone()
        for run in range(len(x)):
            settings = self.settings.for_run(run)
            candidate_index = slice(None) if self.active is None else self.active[run]
            multiplier_scale = (
                self.scale if isinstance(self.scale, float) else float(self.scale[run].max())
            )
            best_lam[run, candidate_index] = fit_multipliers(
                self.problem.with_labels(self.problem.labels_of(run)[candidate_index]),
                x[run, candidate_index][None],
                lam[run, candidate_index][None],
                settings.lam_min if self.objective.nonnegative else None,
                multiplier_scale,
                sharpness_at(settings, step),
            )[0]
        return best_lam

    def sharpness_at(self, step: Step) -> Step:
        """Return the sharpness, at a step, of the smooth function that replaces the ReLU's derivative.

        The result is a tensor if runs differ.
        """
        return sharpness_at(self.config, step, self.sharpness)

    def labels(self, count: int) -> Tensor:
        """Return the initial labels of ``count`` candidates (guesses of training samples)."""
        return self.objective.labels(count, self.outputs, self.knowledge)

    def _problem(self, model: nn.Module, candidates: int) -> Problem:
        """Build the loss function of the attack for a number of candidates (guesses of samples)."""
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
        """Return the factor between the multipliers (weights) that the solver stores and those it means."""
        if self.config.lam_scale != "auto":
            return 1.0 if self.config.lam_scale == "one" else 1 / candidates
        if not isinstance(self.sharpness, Tensor):
            return self._scale_at(self.sharpness)
        scales = [self._scale_at(run.sharpness) for run in self.settings.runs]
        return self.sharpness.new_tensor(scales).view(-1, *[1] * (ndim - 1))

    def _scale_at(self, sharpness: float) -> float:
        candidate_deviation = 0.25
        if self.knowledge.value_range is not None:
            candidate_deviation = (
                self.knowledge.value_range[1] - self.knowledge.value_range[0]
            ) / 4
        random_candidates = self._draw(candidate_deviation, stream("scale"))[None]
        random_candidates = random_candidates.to(self.config.device, self.dtype)
        return balancing_scale(self.problem, random_candidates, self.lam_shape, sharpness)


def share_at(config: StationaritySettings, step: Step) -> Step:
    """Return the share of the optimization steps that is already done.

    Args:
        config: Settings of the attack.
        step: Number of the optimization step.

    Returns:
        A number from 0 at the first step to 1 at the last step.
    """
    return _at_most(step / max(1, config.steps - 1), 1.0)


def sharpness_at(config: StationaritySettings, step: Step, sharpness: Step | None = None) -> Step:
    """Return the sharpness, at a step, of the smooth function that replaces the ReLU's derivative.

    Args:
        config: Settings of the attack.
        step: Number of the optimization step.
        sharpness: Sharpness at the last step, by default the sharpness in the settings.

    Returns:
        The sharpness, a tensor if the step or the final sharpness is a tensor.
    """
    sharpness = config.sharpness if sharpness is None else sharpness
    if config.anneal == "loo2024":
        # As in the published code of Loo et al., the sharpness of the smoothed ReLU increases with the
        # number of steps, up to 200.
        return _at_most(10 + 10 ** (step / 20000), 200.0)
    if config.anneal == "geometric" and config.sharpness_from:
        return config.sharpness_from * (sharpness / config.sharpness_from) ** share_at(config, step)
    return sharpness


def rate_at(config: StationaritySettings, step: Step) -> Step:
    """Return the factor by which both learning rates are reduced at a step: a cosine from 1 to ``lr_decay``.

    Args:
        config: Settings of the attack. An ``lr_decay`` of 1 keeps the learning rates constant.
        step: Number of the optimization step.

    Returns:
        The factor on the learning rates of candidates and multipliers.
    """
    angle = math.pi * _at_most(step / max(1, config.steps), 1.0)
    cosine = torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)
    return config.lr_decay + (1 - config.lr_decay) * (1 + cosine) / 2


def _at_most(value: Step, limit: float) -> Step:
    return value.clamp(max=limit) if isinstance(value, Tensor) else min(value, limit)


def _expand(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (like.ndim - mask.ndim))


class StaticSteps:
    """Runs optimization steps on tensors that stay at the same memory addresses, as CUDA graphs require.

    A captured graph has fixed shapes. If the number of candidates changes, a new object is needed.

    Args:
        step: Function of one step, which changes candidates, multipliers and optimizer state in place.
        config: Settings of the attack.
        dtype: Number format of the tensors.
        chunk: Number of steps in a captured CUDA graph.
    """

    def __init__(
        self, step: OneStep, config: StationaritySettings, dtype: torch.dtype, chunk: int
    ) -> None:
        self.step, self.config, self.dtype, self.chunk = step, config, dtype, chunk
        self.buffers: dict[str, Tensor] = {}
        self.moments: Moments = {}
        self.repeaters: dict[bool, Repeater] = {}

    def run(self, state: SolverState, count: int, fast: bool) -> tuple[Tensor, Tensor, Moments]:
        """Take ``count`` optimization steps from this state.

        Args:
            state: State of the search, which is not changed.
            count: Number of steps.
            fast: Whether matrix products use the fast precision of the settings, tf32 or bf16.

        Returns:
            The candidates, the stored multipliers and the optimizer state after the steps.
        """
        buffers, moments = self.buffers, self.moments
        inputs = {"x": state.x, "lam": state.lam, "moving": state.moving}
        if not buffers:
            for name, tensor in inputs.items():
                buffers[name] = torch.empty_like(tensor)
            buffers["step"] = torch.zeros((), dtype=self.dtype, device=self.config.device)
        if fast not in self.repeaters:  # each CUDA graph computes with a fixed precision
            step_function = torch.compile(self.step) if self.config.compile else self.step

            def take_step() -> None:
                step_function(
                    buffers["x"], buffers["lam"], moments, buffers["step"], buffers["moving"]
                )
                buffers["step"].add_(1)

            self.repeaters[fast] = Repeater(take_step, self.config.device, self.chunk)
        for name, tensor in inputs.items():
            buffers[name].copy_(tensor)
        buffers["step"].fill_(state.step)
        for name, moment in state.moments.items():
            moments.setdefault(name, torch.empty_like(moment)).copy_(moment)
        self.repeaters[fast].run(count)
        moment_copies = {name: moment.clone() for name, moment in moments.items()}
        return buffers["x"].clone(), buffers["lam"].clone(), moment_copies


def _where(runs: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Select ``new`` for the runs in a mask and ``old`` for the other runs, without a copy if possible."""
    if bool(runs.all()):
        return new
    if not bool(runs.any()):
        return old
    return torch.where(runs.view(-1, *[1] * (new.ndim - 1)), new, old)


class PerRun:
    """Settings of R runs that one solver optimizes together, on the same network.

    A setting that is the same in all runs is a plain number. A setting that differs is a tensor with one
    value per run, which broadcasts against (R, m, ...).

    Args:
        config: Settings of the attack.
        runs: Settings of each run, None if all runs have the settings of the attack.
        dtype: Number format of the tensors.
        device: Device on which the tensors are stored.

    Raises:
        InputError: If there is not one entry per restart, or if runs differ in settings that they must share.
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
        """Return the value of a numeric setting for all runs.

        Args:
            name: Name of the setting.
            ndim: Number of dimensions of the tensor, if runs differ.

        Returns:
            A number if all runs agree, otherwise a tensor (R, 1, ...) with ``ndim`` dimensions.
        """
        if name not in self._tensors:
            return getattr(self.for_run(0), name)
        run_values = self._tensors[name]
        return run_values.view(-1, *[1] * (ndim - 1))

    def priors(self) -> list[tuple[str, float | Tensor]]:
        """Return the priors (penalties) with their weights: a number, or a tensor (R,) if runs differ."""
        if len({run.priors for run in self.runs}) < 2:
            return list(self.for_run(0).priors or ())
        priors_by_run = [dict(run.priors or ()) for run in self.runs]
        prior_names = dict.fromkeys(name for priors in priors_by_run for name in priors)
        return [
            (
                name,
                torch.tensor([priors.get(name, 0.0) for priors in priors_by_run], **self._numbers),
            )
            for name in prior_names
        ]

    def for_run(self, run: int) -> StationaritySettings:
        """Return the settings of the restart (run) with this index."""
        return self.runs[run] if self.runs else self.config

    def _check(self) -> None:
        if len(self.runs) != self.config.restarts:
            raise InputError(
                f"The argument `per_run` must have one configuration for each restart; got "
                f"{len(self.runs)} configurations for {self.config.restarts} restarts.",
                "Pass one configuration per restart.",
            )
        for run in self.runs:
            common_settings = {name: getattr(self.config, name) for name in PER_RUN}
            if run.changed(**common_settings) != self.config:
                raise InputError(
                    f"The configurations in `per_run`, one for each restart, may differ only in the "
                    f"settings {', '.join(PER_RUN)}; other settings differ.",
                    "Run attacks that differ in other settings one after another.",
                )


def compute_fingerprint(
    model: nn.Module,
    objective: Objective,
    knowledge: Knowledge,
    configs: Sequence[StationaritySettings],
    candidates: int,
) -> str:
    """Compute a hash of all inputs and settings that decide the result of an attack, except its time limit.

    Args:
        model: The network that is attacked.
        objective: Defines the equation that the attack solves.
        knowledge: What the attacker knows.
        configs: Settings of the attack, followed by the settings of each run if the runs differ.
        candidates: Number of candidates.

    Returns:
        The hash as a string.
    """
    settings = [{k: v for k, v in config.to_json().items() if k != "seconds"} for config in configs]
    tensors = [*model.state_dict().values(), *(knowledge.theta0 or {}).values()]
    tensors += [t for t in (knowledge.mean, knowledge.norms) if t is not None]
    sample_facts: list[Any] = [knowledge.shape, knowledge.value_range]
    sample_facts += [knowledge.sample_count, knowledge.label_balance]
    plain_values = [sample_facts, knowledge.loss, knowledge.weight_decay, knowledge.columns]
    return digest([*settings, repr(objective), candidates], *tensors, plain_values)


def load_state(path: Path | None, fingerprint: str, device: str) -> SolverState | None:
    """Load the saved state of an attack. The state of another attack raises an ``InputError``.

    Args:
        path: File of the state, None if the state is not saved.
        fingerprint: Hash of the attack that continues from the state.
        device: Device on which the tensors are stored.

    Returns:
        The state of the search, None if there is no file.
    """
    if path is None or not path.exists():
        return None
    saved_state = SolverState.load(path)
    if saved_state.fingerprint != fingerprint:
        refuse_other_run(path.parent, "an attack", "settings or weights")
    stop_reason = "" if saved_state.stopped == "time" else saved_state.stopped
    candidate_population = (
        None if saved_state.population is None else _moved(saved_state.population, device)
    )
    moments = {name: t.to(device) for name, t in saved_state.moments.items()}
    saved_state = saved_state.replace(
        moments=moments, stopped=stop_reason, population=candidate_population
    )
    return _moved(saved_state, device)


def _moved(record: Any, device: str) -> Any:
    """Copy the tensors of a record to another device. Lists of tensors stay on their device."""
    tensors = {name: t for name, t in vars(record).items() if isinstance(t, Tensor)}
    return record.replace(**{name: t.to(device) for name, t in tensors.items()})
