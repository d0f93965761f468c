"""What is descended, and two ways to: gradient descent as published, margin maximization with a safe step.

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
REPLAYED = 25  # steps of gradient descent in one CUDA graph


def logistic(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean logistic loss."""
    return F.softplus(-margins(outputs, y), threshold=40).mean()  # 20 would show in float64


def exponential(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean exponential loss."""
    return torch.exp(-margins(outputs, y)).mean()


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean over samples of the squared distance to the target."""
    return (outputs - y.reshape(outputs.shape)).square().sum(1).mean()


# A loss goes by the name of its function.
LOSSES: dict[str, Loss] = {
    loss.__name__: loss for loss in (logistic, exponential, squared, F.cross_entropy)
}
TASK_LOSSES = {
    "binary": ("logistic", "exponential", "squared"),
    "multiclass": ("cross_entropy",),
    "regression": ("squared",),
}


def choose_loss(name: str, task: str) -> str:
    """The loss asked for, or the task's usual one; refused where it does not fit."""
    fitting = TASK_LOSSES[task]
    if name and name not in fitting:
        raise InputError(
            f"Loss {name} does not fit a {task} task.", f"Use one of {', '.join(fitting)}."
        )
    return name or fitting[0]


class GradientDescent:
    """theta -= lr (grad L + w theta), with heavy-ball momentum; full batch or mini-batches.

    One step at a time; everything that a method must remember is in ``scalars`` and ``buffers``.
    Batches are drawn from a permutation that depends on the seed and the epoch alone, so a resumed
    run sees the same batches.
    """

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, loss: str, config: TrainingConfig
    ) -> None:
        self.model, self.x, self.y, self.config = model, x, y, config
        self.loss = LOSSES[loss]
        self.scalars: dict[str, float] = {}
        self.buffers: dict[str, Tensor] = {}
        same = config.method == "gd" and not config.momentum  # every step is the same program
        self._repeated = (
            Repeater(lambda: self.step(0), str(x.device), REPLAYED) if same and x.is_cuda else None
        )

    def advance(self, count: int, most: int) -> int:
        """Take one step, or up to ``most`` where they are replayed; says how many."""
        if self._repeated is None:
            self.step(count)
            return 1
        self._repeated.run(most)
        return most

    def step(self, count: int) -> None:
        """One step on the full set or on the next mini-batch."""
        x, y = self._batch(count)
        names, weights = zip(*self.model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(self.loss(self.model(x), y), weights)
        with torch.no_grad():
            for name, p, g in zip(names, weights, gradients, strict=True):
                if self.config.weight_decay:
                    g = g + self.config.weight_decay * p
                if self.config.momentum:
                    previous = self.buffers.get(name)
                    g = g if previous is None else self.config.momentum * previous.to(g.device) + g
                    self.buffers[name] = g
                p.sub_(g, alpha=self.config.lr)

    def _batch(self, count: int) -> tuple[Tensor, Tensor]:
        """The samples of a step: all, or the next part of an order that seed and epoch alone decide, so
        that a run that was interrupted goes on with the same batches.
        """
        size, n = self.config.batch, len(self.x)
        if self.config.method == "gd" or not 0 < size < n:
            return self.x, self.y
        per_epoch = math.ceil(n / size)
        epoch, part = divmod(count, per_epoch)
        generator = torch.Generator().manual_seed(hash((self.config.seed, epoch)) % 2**63)
        chosen = torch.randperm(n, generator=generator)[part * size : (part + 1) * size]
        return self.x[chosen], self.y[chosen]


class MarginMaximization:
    """Descent on F(theta) = log sum_r exp(-tau m_r(theta)) in steps of equal predicted progress.

        v <- MOMENTUM v - (c / ||grad F||^2) grad F,    theta <- theta + v

    F is the log of the exponential loss, so its gradient does not vanish as the margin grows: where
    gradient descent's margin grows like log t, this one's grows like t. c is the fall of F that a
    step would bring if F were linear; it is enlarged while F falls, made smaller when F rises, and
    kept between LEAST and MOST: samples gather on the kinks of neurons, where no step along a
    gradient is sure to descend and a monotone line search would shrink its step for ever. A rise by
    more than SLACK is undone, and no step moves theta by more than a tenth of its norm. For an
    L-homogeneous network theta is rescaled whenever its margin passes MARGIN_CAP while tau takes up
    the factor, which leaves F and the direction of theta unchanged: nothing overflows however long
    it runs.
    """

    # A step that was too long costs more than one that was too short: c grows slowly, shrinks faster.
    MOMENTUM, GROW, SHRINK, UNDO, SLACK, REACH = 0.9, 1.02, 0.9, 0.25, 0.5, 0.1
    LEAST, MOST = 1e-4, 0.5  # of c: below it stalls at kinks, above it F is far from linear
    MARGIN_CAP, MARGIN_BACK_TO = 20.0, 10.0  # apart, so that rescaling (one evaluation) is rare

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, order: float | None) -> None:
        self.model, self.x, self.y, self.order = model, x, y, order
        self.scalars = {"c": 0.01, "tau": 1.0, "evaluations": 0.0}
        self.buffers = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self._tau = torch.ones((), dtype=torch.float64, device=x.device)
        self._gradient: tuple[Tensor, ...] = ()
        self._figures = torch.empty(0)
        self._measuring = Repeater(self._measure, str(x.device), 1)
        self._current: list[float] | None = None

    def advance(self, count: int, most: int) -> int:
        """Take one step: the length of the next depends on what this one brought."""
        self.step(count)
        return 1

    def step(self, count: int) -> None:
        """One step; where the gradient vanishes, theta stays.

        The objective is the logarithm of the loss, whose gradient does not fade as the loss does. The
        step is bounded in relation to |theta| (``REACH``) and taken back, momentum forgotten, while the
        objective rises; its length then adapts. A homogeneous network is rescaled afterwards, which
        changes no direction.
        """
        names, weights = zip(*self.model.named_parameters(), strict=True)
        velocity = [self.buffers[name] for name in names]
        before, _, slope, size = self._current if self._current is not None else self._objective()
        if not 0 < slope < math.inf:
            return
        gradient = self._gradient
        if self.x.is_cuda:  # a replay writes where the last one did
            gradient = tuple(g.clone() for g in gradient)
        reach, c = self.REACH * math.sqrt(size), self.scalars["c"]
        old = [p.detach().clone() for p in weights]
        for _ in range(60):
            with torch.no_grad():
                for v, g in zip(velocity, gradient, strict=True):
                    v.mul_(self.MOMENTUM).sub_(g, alpha=c / slope)
                length = math.sqrt(float(_squared(velocity)))
                factor = min(1.0, reach / length) if length > 0 else 1.0
                for p, o, v in zip(weights, old, velocity, strict=True):
                    p.copy_(o.add(v.mul_(factor)))
            after, lowest, _, _ = self._objective()
            if after <= before + self.SLACK:  # False for NaN
                break
            for v in velocity:
                v.zero_()
            c *= self.UNDO
        c *= self.GROW if after < before else self.SHRINK
        self.scalars["c"] = min(max(c, self.LEAST), self.MOST)
        self._rescale(lowest)

    def _objective(self) -> list[float]:
        """F, the lowest margin, ||grad F||^2 and ||theta||^2 where theta is now; the gradient is kept."""
        self.scalars["evaluations"] += 1
        self._tau.fill_(self.scalars["tau"])
        first = self._measuring.cuda and self._measuring.graph is None
        for _ in range(1 + first):  # what is captured is not yet computed
            self._measuring.run(1)
        self._current = self._figures.tolist()
        return self._current

    def _measure(self) -> None:
        weights = tuple(self.model.parameters())
        m = margins(self.model(self.x), self.y)
        value = torch.logsumexp((-self._tau * m).flatten(), 0)
        self._gradient = torch.autograd.grad(value, weights)
        parts = value.detach(), m.detach().min(), _squared(self._gradient), _squared(weights)
        self._figures = torch.stack(parts)

    def _rescale(self, lowest: float) -> None:
        """Bring the margin of a homogeneous network back once it exceeds the cap, so that exp(-margin)
        stays a number.

        theta c multiplies all margins by c^L and changes no direction; velocity and temperature go
        along, so the descent does not notice.
        """
        if self.order is None or not self.MARGIN_CAP < lowest < math.inf:
            return
        factor = (self.MARGIN_BACK_TO / lowest) ** (1 / self.order)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.mul_(factor)
                self.buffers[name].mul_(factor)
        self.scalars["tau"] *= lowest / self.MARGIN_BACK_TO
        self._current = None


def _squared(tensors: Iterable[Tensor]) -> Tensor:
    first, *rest = (t.detach().square().sum() for t in tensors)
    return sum(rest, start=first)
