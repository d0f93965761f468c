"""The training loop: progress, limits, checkpoints of its own, and resuming."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from residuum.networks import Architecture, homogeneity_order, probe_inputs
from residuum.networks.network import Network
from residuum.records import Dataset, Record, make_directory
from residuum.records.rundir import digest, refuse_other_run
from residuum.settings import TrainingConfig
from residuum.stationarity import by_layer, norm, parameters, residual
from residuum.theory.kkt import evaluate, fit_multipliers, pose_problem
from residuum.theory.rows import choose_task, margins, normalize_labels
from residuum.training import methods
from residuum.training.methods import LOSSES, choose_loss

SAVE_EVERY = 20.0  # seconds between checkpoints of a run
HISTORY_POINTS = 400  # of a run: enough for its curve
RESIDUAL_CHECKS = 50  # of a run that stops at a residual, each a least-squares problem
GOALS = ("margin", "residual", "loss")


@dataclass(frozen=True, eq=False)
class TrainingState(Record):
    """A run at one moment: all that is needed to go on, and what it has seen so far.

    scalars and buffers belong to the method (step size, temperature, momentum);
    history: step, loss, margin, norm, and the KKT residual where it was measured;
    status: running, steps, time, margin, residual, loss or diverged.
    theta, theta0: the weights now and at the start, by parameter name.
    fingerprint: of data and settings; a state of others is not gone on with.
    """

    theta: dict[str, Tensor]
    theta0: dict[str, Tensor]
    step: int
    fingerprint: str
    status: str = "running"
    scalars: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    history: tuple[dict[str, float], ...] = ()


@dataclass(frozen=True)
class TrainingProgress:
    """What a watcher sees. margin: smallest margin; normalized: over ||theta||^L, None if L is."""

    step: int
    steps: int
    loss: float
    margin: float | None
    normalized: float | None


Watcher = Callable[[TrainingProgress], None]


def train(
    arch: str,
    data: Dataset,
    config: TrainingConfig,
    *,
    task: str = "auto",
    device: str = "cpu",
    state_path: str | Path | None = None,
    watch: Watcher | None = None,
) -> TrainingState:
    """Train a fresh network on ``data``; with ``state_path`` the run is resumable.

    An interrupt (Ctrl-C) saves the state and is raised again; calling with the same arguments goes
    on where the run stopped, and refuses a state of other settings or other data.
    """
    architecture = Architecture.parse(arch)
    task = choose_task(task, architecture.outputs)
    run = _Run(architecture, data, config, task, device, watch, state_path)
    return run.go()


def initialize(arch: Architecture, config: TrainingConfig) -> nn.Module:
    """A seeded network, its weights drawn as ``config.init`` says; see :class:`TrainingConfig`.

    The global generator is left as it was. "small" scales the first layer alone, as in Haim et al.
    2022: then its rows become mixtures of samples.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = arch.build()
        if config.init == "small":
            theta = dict(model.named_parameters())
            with torch.no_grad():
                for name in next(iter(by_layer(theta).values())):  # of the first layer
                    theta[name].normal_().mul_(config.init_scale)
        elif config.init == "lecun":
            with torch.no_grad():
                for p in model.parameters():
                    if p.ndim > 1:
                        p.normal_().div_(math.sqrt(p[0].numel()))
                    else:
                        p.zero_()
    return model.to(getattr(torch, config.dtype))


def released(state: TrainingState, arch: str, data: Dataset, task: str) -> Network:
    """The checkpoint of a run: weights, architecture and label names, nothing of the data."""
    return Network(state.theta, arch, data.shape, data.classes, task)


class _Run:
    """One run: the model on its device, the method, the clock."""

    def __init__(
        self,
        arch: Architecture,
        data: Dataset,
        config: TrainingConfig,
        task: str,
        device: str,
        watch: Watcher | None,
        state_path: str | Path | None,
    ) -> None:
        self.config, self.task, self.watch = config, task, watch
        self.loss = choose_loss(config.loss, task)
        self.path = Path(state_path) if state_path is not None else None
        self.fingerprint = _fingerprint(arch, data, config, task)
        self.model = initialize(arch, config).to(device)
        self.theta0 = snapshot(self.model)
        dtype = getattr(torch, config.dtype)
        self.x = data.x.to(device, dtype)
        evaluate(self.model, self.x[:1])  # refuses samples that do not fit
        y = normalize_labels(data.y, task, arch.outputs)
        self.y = y.to(device, torch.long if task == "multiclass" else dtype)
        self.order = homogeneity_order(arch.build(), probe_inputs(arch.inputs))
        self.method: methods.MarginMaximization | methods.GradientDescent
        if config.method == "margin":
            self.method = methods.MarginMaximization(self.model, self.x, self.y, self.order)
        else:
            self.method = methods.GradientDescent(self.model, self.x, self.y, self.loss, config)
        self.history: list[dict[str, float]] = []
        self.step, self.status = 0, "running"
        self._resume()

    def go(self) -> TrainingState:
        """Steps until a limit is met; the state is saved on the way, on interrupt, and at the end.

        An interrupt is held until a step is complete, so that what is saved is a state and not half of
        one. A run that diverged leaves nothing: there is nothing to go on from.
        """
        start = saved = time.monotonic()
        every = max(1, self.config.steps // HISTORY_POINTS)
        check = max(1, self.config.steps // RESIDUAL_CHECKS) if self.config.stop_residual else 0
        status = self.status
        if status == "running" and self.step >= self.config.steps:
            status = "steps"
        try:
            with _held_interrupts() as interrupted:
                while status == "running":
                    until = min(every - self.step % every, self.config.steps - self.step)
                    self.step += self.method.advance(self.step, until)
                    now = time.monotonic()
                    last = self.step >= self.config.steps
                    late = now - start > self.config.seconds
                    if self.step % every == 0 or last or late:
                        status = self._observe(check != 0 and self.step % check < every)
                    if status == "running" and (last or late):
                        status = "steps" if last else "time"
                    if status == "running" and interrupted():
                        raise KeyboardInterrupt
                    if now - saved > SAVE_EVERY:
                        self._save("running")
                        saved = now
        except KeyboardInterrupt:
            self._save("running")
            raise
        return self._save(status)

    def _observe(self, check_residual: bool) -> str:
        """Measure, remember, show, and say whether a goal is reached."""
        with torch.no_grad():
            outputs = self.model(self.x)
            loss = float(LOSSES[self.loss](outputs, self.y))
            margin = float(margins(outputs, self.y).min()) if self.task != "regression" else None
        size = norm(parameters(self.model))
        point = {"step": float(self.step), "loss": loss, "norm": size}
        point |= {} if margin is None else {"margin": margin}
        if not all(map(math.isfinite, point.values())):
            return "diverged"
        normalized = None
        if margin is not None and self.order is not None:
            with suppress(OverflowError, ZeroDivisionError):
                normalized = margin / size**self.order
        if check_residual:
            point["residual"] = self._residual() / size
        self.history.append(point)
        if self.watch is not None:
            self.watch(TrainingProgress(self.step, self.config.steps, loss, margin, normalized))
        if normalized is not None and normalized >= self.config.stop_margin:
            return "margin"
        if 0 < point.get("residual", 0) <= self.config.stop_residual:
            return "residual"
        return "loss" if 0 < self.config.stop_loss >= loss else "running"  # 0 is no goal

    def _residual(self) -> float:
        """||theta - sum lam_r g_r|| with the best multipliers, in float64 on the CPU."""
        model, x, _, _, _, rows = pose_problem(self.model, self.x, self.y, self.task)
        lam, _, _ = fit_multipliers(model, x, rows, free=self.task == "regression")
        return norm(residual(model, parameters(model), x, rows.combine(lam, len(x))))

    def _save(self, status: str) -> TrainingState:
        """Return the state, and write it to its file if there is one."""
        state = TrainingState(
            theta=snapshot(self.model),
            theta0=self.theta0,
            step=self.step,
            fingerprint=self.fingerprint,
            status=status,
            scalars=dict(self.method.scalars),
            buffers=_cpu(self.method.buffers),
            history=tuple(self.history),
        )
        if self.path is not None and status == "diverged":
            self.path.unlink(missing_ok=True)  # nothing to go on from; other settings may follow
        elif self.path is not None:
            state.save(self.path)
        return state

    def _resume(self) -> None:
        """Go on from a saved state of the same data and settings; another is refused, never overwritten."""
        if self.path is None:
            return
        make_directory(self.path.parent)  # an unwritable place shows before the work, not after
        if not self.path.exists():
            return
        state = TrainingState.load(self.path)
        if state.fingerprint != self.fingerprint:
            refuse_other_run(self.path.parent, "a training", "settings or data")
        self.model.load_state_dict(state.theta)
        self.theta0 = state.theta0
        self.step, self.history = state.step, list(state.history)
        self.status = state.status if state.status in GOALS else "running"
        self.method.scalars.update(state.scalars)
        self.method.buffers.update({k: v.to(self.x.device) for k, v in state.buffers.items()})


def _fingerprint(arch: Architecture, data: Dataset, config: TrainingConfig, task: str) -> str:
    """Hash of everything that decides a run but its length limits."""
    settings = {k: v for k, v in config.to_json().items() if k not in ("steps", "seconds")}
    return digest(json.dumps([str(arch), task, settings]), data.x, data.y)


@contextmanager
def _held_interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of a step, so that no half step is ever saved."""
    pressed: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    except ValueError:  # not the main thread: interrupts do not arrive here
        yield lambda: False
        return
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """The weights as they are now, on the CPU."""
    return _cpu(parameters(model))


def _cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().cpu().clone() for name, t in tensors.items()}
