"""Minimise the attack's loss over candidates and multipliers, R restarts side by side.

Every random number comes from the seed; nothing here knows a dataset. A run whose loss leaves the
finite numbers is put back to its best point, stopped, and reported as "diverged"; the others go on.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from residuum.attacks.config import AttackConfig, Step
from residuum.attacks.objectives import Objective
from residuum.attacks.priors import PRIORS, Prior, box
from residuum.attacks.problem import Problem
from residuum.engine import Repeater, matmul_precision
from residuum.errors import InputError
from residuum.records import Knowledge, Record

CHECK_EVERY = 25  # steps between looks at the loss: snapshots, divergence, history
SAVE_EVERY = 20.0
DIVERGED = 1e6  # a loss this many times the first one counts as diverged


@dataclass(frozen=True)
class Progress:
    """What a watcher sees: losses (R,) and relative squared residuals (R, L) at a step."""

    step: int
    steps: int
    loss: Tensor
    layers: Tensor
    layer_names: tuple[str, ...]


Watcher = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class SolverState(Record):
    """An attack at one moment: all that is needed to go on."""

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


class Solver:
    """One attack on one network. ``solve`` runs it to its end, or on from a saved state."""

    def __init__(
        self, model: nn.Module, objective: Objective, knowledge: Knowledge, config: AttackConfig,
        shape: tuple[int, ...], outputs: int, candidates: int,
    ) -> None:  # fmt: skip
        self.config, self.knowledge = config, knowledge
        self.dtype = torch.float32 if config.dtype == "tf32" else getattr(torch, config.dtype)
        labels = objective.labels(candidates, outputs, knowledge)
        self.problem = Problem(
            model, objective, knowledge, labels,
            surrogate=config.surrogate, normalise=config.normalise, layers=config.layers,
            dtype=self.dtype, device=config.device,
        )  # fmt: skip
        self.nonnegative = objective.nonnegative
        self.priors: list[Prior] = [
            PRIORS[name](weight, config.lam_min, knowledge) for name, weight in config.priors
        ]
        self.sizes = (config.restarts, candidates)
        self.shape, self.lam_shape = shape, objective.multiplier_shape(outputs)
        self.fingerprint = _fingerprint(model, objective, knowledge, config, candidates)
        self.scale = self._scale()
        self.check_every = CHECK_EVERY * (8 if config.device.startswith("cuda") else 1)
        self._live: dict[str, Tensor] = {}
        self._moments: dict[str, Tensor] = {}
        self._repeaters: dict[bool, Repeater] = {}

    def solve(self, path: Path | None = None, watch: Watcher | None = None) -> SolverState:
        """Minimise; with ``path`` the state is saved there and taken up again."""
        start = saved = time.monotonic()
        state = self._load(path) or self._initial()
        try:
            while not state.stopped:
                state = self._chunk(state)
                if watch is not None:
                    names = self.problem.layer_names
                    watch(
                        Progress(
                            state.step, self.config.steps, state.loss[-1], state.layers[-1], names
                        )
                    )
                now = time.monotonic()
                if not state.stopped and now - start > self.config.seconds:
                    state = state.replace(stopped="time")
                if path is not None and now - saved > SAVE_EVERY:
                    state.save(path)
                    saved = now
        except KeyboardInterrupt:
            if path is not None:
                state.save(path)
            raise
        if path is not None:
            state.save(path)
        return state

    def multipliers(self, lam: Tensor) -> Tensor:
        """Plain-sum multipliers of stored ones."""
        return lam * self.scale

    def _initial(self) -> SolverState:
        """Random candidates and multipliers; each restart has a generator of its own."""
        config, xs, lams = self.config, [], []
        for run in range(config.restarts):
            generator = torch.Generator().manual_seed(config.seed * 10007 + run)
            x = torch.randn(self.sizes[1], *self.shape, generator=generator, dtype=torch.float64)
            xs.append(config.sigma * x)
            draw = torch.randn if config.lam_distribution == "normal" else torch.rand
            lam = draw(self.sizes[1], *self.lam_shape, generator=generator, dtype=torch.float64)
            low, high = config.lam_init
            spread = high if config.lam_distribution == "normal" else high - low
            lams.append(low + spread * lam)
        x, lam = (torch.stack(part).to(config.device, self.dtype) for part in (xs, lams))
        infinite = torch.full((config.restarts,), math.inf, dtype=self.dtype, device=config.device)
        alive = torch.ones(config.restarts, dtype=torch.bool, device=config.device)
        return SolverState(x, lam, x, lam, infinite, infinite, alive, 0, self.fingerprint)

    def _chunk(self, state: SolverState) -> SolverState:
        """Up to CHECK_EVERY steps, then a look at where each run stands."""
        config = self.config
        x, lam = state.x.clone(), state.lam.clone()
        moments = {name: t.clone() for name, t in state.moments.items()}
        end = min(state.step + self.check_every, config.steps)
        tf32 = config.dtype == "tf32" and end <= config.steps * (1 - config.polish)
        if not state.steps:
            state = self._look(state, x, lam, *self._gradients(x, lam, 0)[:2])
        with matmul_precision(tf32):
            if config.device.startswith("cuda"):
                due = range(max(state.step, 1), end)
                if config.lam_every and any(step % config.lam_every == 0 for step in due):
                    state = state.replace(lam=self._closed_form(x, lam, state.step))
                x, lam, moments = self._graph_steps(state, end - state.step, tf32)
            else:
                for step in range(state.step, end):
                    if config.lam_every and step and step % config.lam_every == 0:
                        lam = self._closed_form(x, lam, step)
                    self._step(x, lam, moments, step, state.alive)
        loss, layers, _, _ = self._gradients(x, lam, end)
        state = self._look(state.replace(step=end), x, lam, loss, layers)
        state = state.replace(x=x, lam=lam, moments=moments, step=end)
        if end == config.steps or not bool(state.alive.any()):
            state = state.replace(stopped="finished")
        return state

    def _step(
        self, x: Tensor, lam: Tensor, moments: dict[str, Tensor], step: Step, alive: Tensor
    ) -> None:
        """One update of candidates and multipliers, in place."""
        _, _, gx, gl = self._gradients(x, lam, step, measure=False)
        self._update(x, lam, gx, gl, moments, step, alive)

    def _graph_steps(
        self, state: SolverState, count: int, tf32: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The same steps on buffers that never move, so that a CUDA graph can replay them."""
        live, moments = self._live, self._moments
        if not live:
            for name in ("x", "lam", "alive"):
                live[name] = torch.empty_like(getattr(state, name))
            live["step"] = torch.zeros((), dtype=self.dtype, device=self.config.device)
        if tf32 not in self._repeaters:  # a captured graph keeps the precision it was captured in
            body = torch.compile(self._step) if self.config.compile else self._step

            def one() -> None:
                body(live["x"], live["lam"], moments, live["step"], live["alive"])
                live["step"].add_(1)

            self._repeaters[tf32] = Repeater(one, self.config.device, CHECK_EVERY)
        for name in ("x", "lam", "alive"):
            live[name].copy_(getattr(state, name))
        live["step"].fill_(state.step)
        for name, moment in state.moments.items():
            moments.setdefault(name, torch.empty_like(moment)).copy_(moment)
        self._repeaters[tf32].run(count)
        kept = {name: moment.clone() for name, moment in moments.items()}
        return live["x"].clone(), live["lam"].clone(), kept

    def _gradients(
        self, x: Tensor, lam: Tensor, step: Step, measure: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss (R,), relative squared residuals (R, L), gradients in x and in the stored lam."""
        sharpness = self.config.sharpness_at(step)
        found = self.problem.evaluate(x, lam * self.scale, sharpness, measure)
        loss, gx, gl = found.loss, found.grad_x, found.grad_lam * self.scale
        if self.priors:
            xl, ll = x.detach().requires_grad_(), lam.detach().requires_grad_()
            total = sum((p.weight * p.penalty(xl, ll) for p in self.priors), torch.zeros_like(loss))
            inner = torch.autograd.grad(
                total.sum(), (xl, ll), allow_unused=True, materialize_grads=True
            )
            gx, gl, loss = gx + inner[0], gl + inner[1], loss + total.detach()
        return loss, found.layers, gx, gl

    def _update(
        self, x: Tensor, lam: Tensor, gx: Tensor, gl: Tensor,
        moments: dict[str, Tensor], step: Step, alive: Tensor,
    ) -> None:  # fmt: skip
        """One step of SGD with momentum or Adam in place, then the constraints."""
        factor = self.config.rate_at(step)
        for name, variable, gradient, rate in (
            ("x", x, gx, self.config.lr_x), ("lam", lam, gl, self.config.lr_lam),
        ):  # fmt: skip
            mask = alive.view(-1, *[1] * (variable.ndim - 1))
            gradient = torch.where(mask, gradient, 0.0)
            direction = self._direction(name, gradient, moments, step)
            variable.sub_(torch.where(mask, direction, 0.0) * (rate * factor))
        if self.config.constraint == "project":
            if self.knowledge.value_range is not None:
                low, high = box(self.knowledge, x)
                torch.maximum(torch.minimum(x, high), low, out=x)
            if self.nonnegative:
                lam.clamp_(min=self.config.lam_min)

    def _direction(self, name: str, g: Tensor, moments: dict[str, Tensor], step: Step) -> Tensor:
        if self.config.optimiser == "sgd":
            first = moments.setdefault(name, torch.zeros_like(g))
            return first.mul_(self.config.momentum).add_(g)
        beta1, beta2, t = 0.9, 0.999, step + 1
        first = moments.setdefault(f"{name}/1", torch.zeros_like(g))
        second = moments.setdefault(f"{name}/2", torch.zeros_like(g))
        first.mul_(beta1).add_(g, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        return (first / (1 - beta1**t)) / ((second / (1 - beta2**t)).sqrt_() + 1e-12)

    def _look(
        self, state: SolverState, x: Tensor, lam: Tensor, loss: Tensor, layers: Tensor
    ) -> SolverState:
        """History, best snapshots, and runs that left the finite numbers."""
        first = torch.where(torch.isfinite(state.first_loss), state.first_loss, loss)
        fine = torch.isfinite(loss) & (loss <= DIVERGED * first)
        better = state.alive & fine & (loss < state.best_loss)
        mask_x = better.view(-1, *[1] * (x.ndim - 1))
        mask_lam = better.view(-1, *[1] * (lam.ndim - 1))
        # A run stopped by the clock has been looked at where it goes on from.
        past = len(state.steps) - (state.step in state.steps[-1:])
        return state.replace(
            best_x=torch.where(mask_x, x, state.best_x),
            best_lam=torch.where(mask_lam, lam, state.best_lam),
            best_loss=torch.where(better, loss, state.best_loss),
            first_loss=first,
            alive=state.alive & fine,
            steps=(*state.steps[:past], state.step),
            loss=(*state.loss[:past], loss.detach().cpu().double()),
            layers=(*state.layers[:past], layers.detach().cpu().double()),
        )

    def _closed_form(self, x: Tensor, lam: Tensor, step: Step) -> Tensor:
        """The best multipliers for these candidates, per run; see ``multipliers.py``."""
        from residuum.attacks.multipliers import best_multipliers

        sharpness = self.config.sharpness_at(step)
        floor = self.config.lam_min if self.nonnegative else None
        return best_multipliers(self.problem, x, lam, floor, self.scale, sharpness)

    def _scale(self) -> float:
        """Factor from stored to plain-sum multipliers."""
        if self.config.lam_scale == "one":
            return 1.0
        if self.config.lam_scale == "mean":
            return 1 / self.sizes[1]
        generator = torch.Generator().manual_seed(0)
        spread = 0.25
        if self.knowledge.value_range is not None:
            spread = (self.knowledge.value_range[1] - self.knowledge.value_range[0]) / 4
        x = spread * torch.randn(
            1, self.sizes[1], *self.shape, generator=generator, dtype=torch.float64
        )
        ones = torch.ones(
            1, self.sizes[1], *self.lam_shape, dtype=self.dtype, device=self.config.device
        )
        x = x.to(self.config.device, self.dtype)
        # residual(s) = target - s T: from two values of s the size of T follows, first layer only.
        at = [
            self.problem.evaluate(x, s * ones, self.config.sharpness).layers[0, 0]
            for s in (-1.0, 0.0, 1.0)
        ]
        squared = float((at[0] + at[2]) / 2 - at[1])  # ||T||^2 / ||target||^2
        return 1 / math.sqrt(squared) if squared > 0 else 1.0

    def _load(self, path: Path | None) -> SolverState | None:
        if path is None or not path.exists():
            return None
        state = SolverState.load(path)
        if state.fingerprint != self.fingerprint:
            raise InputError(
                f"{str(path.parent)!r} holds an attack with other settings or on other weights.",
                "Choose another --out, or remove that folder.",
            )
        moved = {
            name: getattr(state, name).to(self.config.device)
            for name in ("x", "lam", "best_x", "best_lam", "best_loss", "first_loss", "alive")
        }
        moments = {name: t.to(self.config.device) for name, t in state.moments.items()}
        stopped = "" if state.stopped == "time" else state.stopped
        return state.replace(**moved, moments=moments, stopped=stopped)


def _fingerprint(
    model: nn.Module,
    objective: Objective,
    knowledge: Knowledge,
    config: AttackConfig,
    candidates: int,
) -> str:
    """Hash of everything that decides an attack but its wall clock."""
    settings = {k: v for k, v in config.to_json().items() if k != "seconds"}
    digest = hashlib.sha256(
        json.dumps([settings, repr(objective), candidates], sort_keys=True).encode()
    )
    tensors = [*model.state_dict().values(), *(knowledge.theta0 or {}).values()]
    for tensor in [*tensors, knowledge.mean, knowledge.norms]:
        if tensor is not None:
            digest.update(tensor.detach().cpu().double().contiguous().numpy().tobytes())
    rest = [knowledge.shape, knowledge.value_range, knowledge.sample_count, knowledge.label_balance]
    digest.update(json.dumps([rest, knowledge.loss, knowledge.weight_decay]).encode())
    return digest.hexdigest()
