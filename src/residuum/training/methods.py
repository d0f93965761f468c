"""Losses, and two methods of training: gradient descent and margin maximization.

The losses of outputs Phi_i with labels y_i or targets t_i are:

logistic       mean_i log(1 + exp(-y_i Phi_i))          y in {-1, +1}
exponential    mean_i exp(-y_i Phi_i)
squared        mean_i ||Phi_i - t_i||^2
cross_entropy  mean_i -log softmax(Phi_i)_{y_i}          y class indices
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.engine.graph import Repeater
from residuum.errors import InputError
from residuum.theory.rows import margins

if TYPE_CHECKING:
    from residuum.settings import TrainingConfig

Loss = Callable[[Tensor, Tensor], Tensor]
REPLAYED = 25  # number of gradient descent steps that a CUDA graph records and replays


def logistic(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean logistic loss.

    Args:
        outputs: Outputs, (n, C).
        y: Labels, (n,).

    Returns:
        The loss.
    """
    # For arguments above a threshold, softplus returns the argument itself. With PyTorch's default threshold
    # 20, the error of this approximation would be visible in float64.
    return F.softplus(-margins(outputs, y), threshold=40).mean()


def exponential(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean exponential loss.

    Args:
        outputs: Outputs, (n, C).
        y: Labels, (n,).

    Returns:
        The loss.
    """
    return torch.exp(-margins(outputs, y)).mean()


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared distance between outputs and targets.

    Args:
        outputs: Outputs, (n, C).
        y: Targets, (n, C) or (n,).

    Returns:
        The loss.
    """
    return (outputs - y.reshape(outputs.shape)).square().sum(1).mean()


# The name of a loss is the name of its function.
LOSSES: dict[str, Loss] = {
    loss.__name__: loss for loss in (logistic, exponential, squared, F.cross_entropy)
}
TASK_LOSSES = {
    "binary": ("logistic", "exponential", "squared"),
    "multiclass": ("cross_entropy",),
    "regression": ("squared",),
}


def choose_loss(name: str, task: str) -> str:
    """Check that a loss fits a task, and return its name.

    Args:
        name: Name of the requested loss, or "" for the default of the task.
        task: Task of the network.

    Returns:
        Name of the loss.

    Raises:
        InputError: If the loss does not fit the task.
    """
    losses_of_task = TASK_LOSSES[task]
    if name and name not in losses_of_task:
        raise InputError(
            f"The training loss must suit the task of the network; got the loss {name!r} for the task "
            f"{task!r}.",
            f"Use one of {', '.join(losses_of_task)}.",
        )
    return name or losses_of_task[0]


class GradientDescent:
    """Gradient descent with heavy-ball momentum, on all samples or on mini-batches.

        theta <- theta - lr (grad L + w theta)      for weights theta, loss L and weight decay w

    The optimizer state is in ``scalars`` and ``buffers``. Batches come from a permutation that depends
    only on the seed and the epoch, so a resumed run uses the same batches.

    Args:
        model: The network.
        x: Training samples.
        y: Labels.
        loss: Name of the loss.
        config: Settings of the training.
    """

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, loss: str, config: TrainingConfig
    ) -> None:
        self.model, self.x, self.y, self.config = model, x, y, config
        self.loss = LOSSES[loss]
        self.scalars: dict[str, float] = {}
        self.buffers: dict[str, Tensor] = {}
        # Every step of plain gradient descent runs the same operations, so a CUDA graph can replay the steps.
        has_identical_steps = config.method == "gd" and not config.momentum
        can_replay = has_identical_steps and x.is_cuda
        self._repeated = (
            Repeater(lambda: self.step(0), str(x.device), REPLAYED) if can_replay else None
        )

    def advance(self, count: int, limit: int) -> int:
        """Take one training step, or ``limit`` steps at once if a CUDA graph replays the steps.

        Args:
            count: Number of steps so far.
            limit: Maximum number of steps.

        Returns:
            The number of steps taken.
        """
        if self._repeated is None:
            self.step(count)
            return 1
        self._repeated.run(limit)
        return limit

    def step(self, count: int) -> None:
        """Take a gradient step on all samples or on the next mini-batch."""
        x, y = self.select_batch(count)
        names, weights = zip(*self.model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(self.loss(self.model(x), y), weights)
        with torch.no_grad():
            for name, p, update in zip(names, weights, gradients, strict=True):
                if self.config.weight_decay:
                    update = update + self.config.weight_decay * p
                if self.config.momentum:
                    momentum_buffer = self.buffers.get(name)
                    update = (
                        update
                        if momentum_buffer is None
                        else self.config.momentum * momentum_buffer.to(update.device) + update
                    )
                    self.buffers[name] = update
                p.sub_(update, alpha=self.config.lr)

    def select_batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the samples of a step: all samples, or the next mini-batch.

        Args:
            count: Number of steps before this one.

        Returns:
            The samples and their labels.
        """
        size, n = self.config.batch, len(self.x)
        if self.config.method == "gd" or not 0 < size < n:
            return self.x, self.y
        batches_per_epoch = math.ceil(n / size)
        epoch, batch = divmod(count, batches_per_epoch)
        generator = torch.Generator().manual_seed(hash((self.config.seed, epoch)) % 2**63)
        batch_rows = torch.randperm(n, generator=generator)[batch * size : (batch + 1) * size]
        return self.x[batch_rows], self.y[batch_rows]


class MarginMaximization:
    """Margin maximization: descent on F(theta) = log sum_r exp(-tau m_r(theta)).

        v <- MOMENTUM v - (c / ||grad F||^2) grad F,    theta <- theta + v

    The margin m_r of sample r tells how clearly the network classifies the sample. The number tau scales the
    margins. F is the logarithm of the exponential loss, so the gradient of F does not vanish as the margin
    grows. After t steps, the margin has grown like t. In gradient descent, the margin grows only like log t.

    The step size c is the decrease of F that a step would cause if F were linear. c grows while F decreases
    and shrinks when F increases, and it stays between MIN_C and MAX_C. During training, many training samples
    come to lie on kinks of neurons (the neuron's input is zero). At a kink, a gradient step can increase F,
    however short the step is. So small increases of F are allowed. A step that increases F by more than SLACK
    is undone. No step moves the weights theta by more than a tenth of their norm.

    If the margin of an L-homogeneous network exceeds MARGIN_CAP, theta is multiplied by a factor, and tau is
    divided by the factor by which the margins change. This changes neither F nor the direction of theta, and
    it avoids overflow. At the beginning, tau is 1.

    Args:
        model: The network.
        x: Training samples.
        y: Labels.
        order: Order of homogeneity L of the network, or None if the network is not homogeneous.
    """

    # Constants of the descent. The step size grows slowly and shrinks fast, because a step that is too long
    # costs more than a step that is too short.
    MOMENTUM, GROW, SHRINK, UNDO, SLACK, REACH = 0.9, 1.02, 0.9, 0.25, 0.5, 0.1
    # Limits of the step size c. With smaller steps, the descent gets stuck where a ReLU's input is zero.
    # With larger steps, the objective is not nearly linear within a step.
    MIN_C, MAX_C = 1e-4, 0.5
    # If the margin of the network exceeds MARGIN_CAP, all weights are scaled down so that the margin is
    # MARGIN_BACK_TO. The margin must double before this happens again.
    MARGIN_CAP, MARGIN_BACK_TO = 20.0, 10.0

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, order: float | None) -> None:
        self.model, self.x, self.y, self.order = model, x, y, order
        self.scalars = {"c": 0.01, "tau": 1.0, "evaluations": 0.0}
        self.buffers = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self._tau = torch.ones((), dtype=torch.float64, device=x.device)
        self._gradient: tuple[Tensor, ...] = ()
        self._measured_values = torch.empty(0)
        self._measuring = Repeater(self._measure, str(x.device), 1)
        self._current: list[float] | None = None

    def advance(self, count: int, limit: int) -> int:
        """Take a single training step. Its result determines the length of the next step.

        Args:
            count: Number of steps so far.
            limit: Not used.

        Returns:
            1, the number of steps taken.
        """
        self.step(count)
        return 1

    def step(self, count: int) -> None:
        """Take a step of margin maximization. If the gradient is zero, the weights do not change.

        The length of the step is at most ``REACH`` times the norm of the weights. If the objective increases
        by more than ``SLACK``, the step is undone and repeated without momentum and with a smaller length. A
        homogeneous network is rescaled afterwards, which does not change the direction of its weights.

        Args:
            count: Number of steps so far.
        """
        names, weights = zip(*self.model.named_parameters(), strict=True)
        velocity = [self.buffers[name] for name in names]
        before, _, squared_gradient_norm, squared_weight_norm = (
            self._current if self._current is not None else self._objective()
        )
        if not 0 < squared_gradient_norm < math.inf:
            return
        gradient = self._gradient
        # On a GPU, copy the gradient, because the next replay of the CUDA graph overwrites it.
        if self.x.is_cuda:
            gradient = tuple(g.clone() for g in gradient)
        max_step_length, c = self.REACH * math.sqrt(squared_weight_norm), self.scalars["c"]
        old_weights = [p.detach().clone() for p in weights]
        for _ in range(60):
            with torch.no_grad():
                for v, g in zip(velocity, gradient, strict=True):
                    v.mul_(self.MOMENTUM).sub_(g, alpha=c / squared_gradient_norm)
                step_length = math.sqrt(float(_squared(velocity)))
                shrink_factor = min(1.0, max_step_length / step_length) if step_length > 0 else 1.0
                for p, o, v in zip(weights, old_weights, velocity, strict=True):
                    p.copy_(o.add(v.mul_(shrink_factor)))
            after, lowest, _, _ = self._objective()
            # NaN counts as an increase, because comparisons with NaN are False.
            if after <= before + self.SLACK:
                break
            for v in velocity:
                v.zero_()
            c *= self.UNDO
        c *= self.GROW if after < before else self.SHRINK
        self.scalars["c"] = min(max(c, self.MIN_C), self.MAX_C)
        self.rescale(lowest)

    def _objective(self) -> list[float]:
        """Return the objective, the lowest margin, and the squared norms of the gradient and the weights.

        The gradient of the objective is stored in the attribute ``_gradient``.
        """
        self.scalars["evaluations"] += 1
        self._tau.fill_(self.scalars["tau"])
        is_first_on_gpu = self._measuring.cuda and self._measuring.graph is None
        # On a GPU, the first call captures the computation in a CUDA graph. Capturing computes no values, so
        # the graph must run once more.
        for _ in range(1 + is_first_on_gpu):
            self._measuring.run(1)
        self._current = self._measured_values.tolist()
        return self._current

    def _measure(self) -> None:
        weights = tuple(self.model.parameters())
        sample_margins = margins(self.model(self.x), self.y)
        objective = torch.logsumexp((-self._tau * sample_margins).flatten(), 0)
        self._gradient = torch.autograd.grad(objective, weights)
        measured_values = (
            objective.detach(),
            sample_margins.detach().min(),
            _squared(self._gradient),
            _squared(weights),
        )
        self._measured_values = torch.stack(measured_values)

    def rescale(self, lowest: float) -> None:
        """Rescale a homogeneous network if its margin exceeds ``MARGIN_CAP``. This avoids overflow.

        Args:
            lowest: Lowest margin of all samples.
        """
        # Multiplying the weights by a factor c multiplies all margins by c^L, where L is the order of
        # homogeneity. The momentum and tau are rescaled too, so that the descent continues unchanged.
        if self.order is None or not self.MARGIN_CAP < lowest < math.inf:
            return
        weight_factor = (self.MARGIN_BACK_TO / lowest) ** (1 / self.order)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.mul_(weight_factor)
                self.buffers[name].mul_(weight_factor)
        self.scalars["tau"] *= lowest / self.MARGIN_BACK_TO
        self._current = None


def _squared(tensors: Iterable[Tensor]) -> Tensor:
    first, *remaining = (t.detach().square().sum() for t in tensors)
    return sum(remaining, start=first)
