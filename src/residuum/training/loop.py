"""The training loop, which reports progress, stops at limits, and saves and continues runs."""

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

SAVE_EVERY = 20.0  # seconds between two saved states of a run
HISTORY_POINTS = 400  # number of points in the history of a run, enough to draw a curve
# Number of times that a run with ``stop_residual`` computes the KKT residual. Each time, a least-squares
# problem is solved.
RESIDUAL_CHECKS = 50
GOALS = ("margin", "residual", "loss")


@dataclass(frozen=True, eq=False)
class TrainingState(Record):
    """The state of a training run, from which the run can be continued.

    Attributes:
        theta: Current weights by parameter name.
        theta0: Initial weights by parameter name.
        step: Number of steps so far.
        fingerprint: Hash of data and settings. A run with another fingerprint cannot continue from this
            state.
        status: "running", or the reason why the run stopped: "steps" or "time" if a limit was reached,
            "margin", "residual" or "loss" if a goal was reached, or "diverged".
        scalars: Numbers of the optimizer state, such as the step size.
        buffers: Tensors of the optimizer state, such as the momentum.
        history: Entries at regular steps. Each entry holds the step, the loss, the margin, the weight norm,
            and the KKT residual if it was computed.
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
    """The progress of a training run.

    Attributes:
        step: Number of steps so far.
        steps: Maximum number of steps.
        loss: Training loss.
        margin: Smallest margin of a training sample, or None for regression.
        normalized: Smallest margin divided by ||theta||^L, where theta are the weights and L is the order of
            homogeneity. None if the network is not homogeneous.
    """

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
    """Train a new network.

    An interrupt (Ctrl-C) saves the state and is raised again. A call with the same arguments continues the
    run from the saved state. A saved state with other settings or other data raises an ``InputError``.

    Args:
        arch: Architecture string.
        data: Training samples.
        config: Settings of the training.
        task: "binary", "multiclass", "regression" or "auto".
        device: Device of the training.
        state_path: File of the saved state, or None to save no state.
        watch: A function that is called with the progress at regular steps.

    Returns:
        The state of the finished run.
    """
    architecture = Architecture.parse(arch)
    task = choose_task(task, architecture.outputs)
    run = _Run(architecture, data, config, task, device, watch, state_path)
    return run.run()


def initialize(arch: Architecture, config: TrainingConfig) -> nn.Module:
    """Return a network with initial weights according to ``config.init`` and ``config.seed``.

    The global random generator does not change. The initialization "small" makes only the weights of the
    first layer small, as in Haim et al. 2022. During training, the rows of this layer then become linear
    combinations of training samples.

    Args:
        arch: The architecture.
        config: Settings of the training.

    Returns:
        The network.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = arch.build()
        if config.init == "small":
            weights_by_name = dict(model.named_parameters())
            with torch.no_grad():
                for name in next(
                    iter(by_layer(weights_by_name).values())
                ):  # parameters of the first layer
                    weights_by_name[name].normal_().mul_(config.init_scale)
        elif config.init == "lecun":
            with torch.no_grad():
                for p in model.parameters():
                    if p.ndim > 1:
                        p.normal_().div_(math.sqrt(p[0].numel()))
                    else:
                        p.zero_()
    return model.to(getattr(torch, config.dtype))


def make_release(state: TrainingState, arch: str, data: Dataset, task: str) -> Network:
    """Return the network to release: weights, architecture and label names, without any samples.

    Args:
        state: State of the finished run.
        arch: Architecture string.
        data: Training samples.
        task: Task of the network.

    Returns:
        The network.
    """
    return Network(state.theta, arch, data.shape, data.classes, task)


class _Run:
    """A training run: the network on its device, the training method, and the limits on steps and time."""

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
        self.theta0 = copy_weights(self.model)
        dtype = getattr(torch, config.dtype)
        self.x = data.x.to(device, dtype)
        evaluate(self.model, self.x[:1])  # raises an error if the samples do not fit the network
        normalized_labels = normalize_labels(data.y, task, arch.outputs)
        self.y = normalized_labels.to(device, torch.long if task == "multiclass" else dtype)
        self.order = homogeneity_order(arch.build(), probe_inputs(arch.inputs))
        self.method: methods.MarginMaximization | methods.GradientDescent
        if config.method == "margin":
            self.method = methods.MarginMaximization(self.model, self.x, self.y, self.order)
        else:
            self.method = methods.GradientDescent(self.model, self.x, self.y, self.loss, config)
        self.history: list[dict[str, float]] = []
        self.step, self.status = 0, "running"
        self._resume()

    def run(self) -> TrainingState:
        """Train until a limit or a goal is reached. Save the state regularly, on interrupt and at the end.

        An interrupt takes effect after the current step, so that the saved state is consistent. If the run
        diverges, no state is saved, because such a run cannot be continued.

        Returns:
            The state of the finished run.

        Raises:
            KeyboardInterrupt: If the user interrupts the run.
        """
        start_time = last_save_time = time.monotonic()
        history_interval = max(1, self.config.steps // HISTORY_POINTS)
        residual_interval = (
            max(1, self.config.steps // RESIDUAL_CHECKS) if self.config.stop_residual else 0
        )
        status = self.status
        if status == "running" and self.step >= self.config.steps:
            status = "steps"
        try:
            with _delayed_interrupts() as is_interrupted:
                while status == "running":
                    step_limit = min(
                        history_interval - self.step % history_interval,
                        self.config.steps - self.step,
                    )
                    self.step += self.method.advance(self.step, step_limit)
                    current_time = time.monotonic()
                    is_last_step = self.step >= self.config.steps
                    is_out_of_time = current_time - start_time > self.config.seconds
                    if self.step % history_interval == 0 or is_last_step or is_out_of_time:
                        status = self._observe(
                            residual_interval != 0
                            and self.step % residual_interval < history_interval
                        )
                    if status == "running" and (is_last_step or is_out_of_time):
                        status = "steps" if is_last_step else "time"
                    if status == "running" and is_interrupted():
                        raise KeyboardInterrupt
                    if current_time - last_save_time > SAVE_EVERY:
                        self._save("running")
                        last_save_time = current_time
        except KeyboardInterrupt:
            self._save("running")
            raise
        return self._save(status)

    def _observe(self, check_residual: bool) -> str:
        """Record the loss and the margin, report the progress, and return the status of the training."""
        with torch.no_grad():
            outputs = self.model(self.x)
            loss = float(LOSSES[self.loss](outputs, self.y))
            margin = float(margins(outputs, self.y).min()) if self.task != "regression" else None
        weight_norm = norm(parameters(self.model))
        history_entry = {"step": float(self.step), "loss": loss, "norm": weight_norm}
        history_entry |= {} if margin is None else {"margin": margin}
        if not all(map(math.isfinite, history_entry.values())):
            return "diverged"
        normalized_margin = None
        if margin is not None and self.order is not None:
            with suppress(OverflowError, ZeroDivisionError):
                normalized_margin = margin / weight_norm**self.order
        if check_residual:
            history_entry["residual"] = self._residual() / weight_norm
        self.history.append(history_entry)
        if self.watch is not None:
            self.watch(
                TrainingProgress(self.step, self.config.steps, loss, margin, normalized_margin)
            )
        if normalized_margin is not None and normalized_margin >= self.config.stop_margin:
            return "margin"
        if 0 < history_entry.get("residual", 0) <= self.config.stop_residual:
            return "residual"
        # With stop_loss 0, the training never stops because of its loss.
        return "loss" if 0 < self.config.stop_loss >= loss else "running"

    def _residual(self) -> float:
        """Return the norm of the KKT residual theta - sum_r lam_r g_r of the weights theta.

        The vector g_r is the gradient of the margin of sample r. The multipliers lam_r minimize the
        norm. They are at least zero, except in regression.
        """
        model, x, _, _, _, rows = pose_problem(self.model, self.x, self.y, self.task)
        lam, _, _ = fit_multipliers(model, x, rows, free=self.task == "regression")
        return norm(residual(model, parameters(model), x, rows.combine(lam, len(x))))

    def _save(self, status: str) -> TrainingState:
        """Return the current state, and write the state to the file ``state_path`` of the run."""
        current_state = TrainingState(
            theta=copy_weights(self.model),
            theta0=self.theta0,
            step=self.step,
            fingerprint=self.fingerprint,
            status=status,
            scalars=dict(self.method.scalars),
            buffers=_cpu(self.method.buffers),
            history=tuple(self.history),
        )
        if self.path is not None and status == "diverged":
            # A run that diverged cannot be continued. Without its saved state, the user can start a run with
            # other settings in the same directory.
            self.path.unlink(missing_ok=True)
        elif self.path is not None:
            current_state.save(self.path)
        return current_state

    def _resume(self) -> None:
        """Load the saved state of the training, if it exists. Raise an error if data or settings differ."""
        if self.path is None:
            return
        # If the folder is not writable, raise an error now, not after the training.
        make_directory(self.path.parent)
        if not self.path.exists():
            return
        saved_state = TrainingState.load(self.path)
        if saved_state.fingerprint != self.fingerprint:
            refuse_other_run(self.path.parent, "a training", "settings or data")
        self.model.load_state_dict(saved_state.theta)
        self.theta0 = saved_state.theta0
        self.step, self.history = saved_state.step, list(saved_state.history)
        self.status = saved_state.status if saved_state.status in GOALS else "running"
        self.method.scalars.update(saved_state.scalars)
        self.method.buffers.update({k: v.to(self.x.device) for k, v in saved_state.buffers.items()})


def _fingerprint(arch: Architecture, data: Dataset, config: TrainingConfig, task: str) -> str:
    """Return a hash of everything that determines the training, except for the limits on steps and time."""
    settings = {k: v for k, v in config.to_json().items() if k not in ("steps", "seconds")}
    return digest(json.dumps([str(arch), task, settings]), data.x, data.y)


@contextmanager
def _delayed_interrupts() -> Iterator[Callable[[], bool]]:
    """Delay interrupts (Ctrl-C), and yield a function that returns True if an interrupt has occurred."""
    interrupts: list[int] = []
    try:
        previous_handler = signal.signal(
            signal.SIGINT, lambda number, frame: interrupts.append(number)
        )
    # Interrupts can be handled only in the main thread, and this is another thread.
    except ValueError:
        yield lambda: False
        return
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the current weights of a model on the CPU."""
    return _cpu(parameters(model))


def _cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().cpu().clone() for name, t in tensors.items()}
