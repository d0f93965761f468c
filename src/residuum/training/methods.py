"""Two ways to descend: gradient descent as published, and margin maximisation with a safe step."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from residuum.training.config import TrainingConfig
from residuum.training.losses import LOSSES, margins


class Method(Protocol):
    """One step at a time; everything it must remember is in ``scalars`` and ``buffers``."""

    scalars: dict[str, float]
    buffers: dict[str, Tensor]

    def step(self, count: int) -> None:
        """Take step number ``count`` (from 0), changing the model's parameters in place."""


class GradientDescent:
    """theta -= lr (grad L + w theta), with heavy-ball momentum; full batch or mini-batches.

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
        size, n = self.config.batch, len(self.x)
        if self.config.method == "gd" or not 0 < size < n:
            return self.x, self.y
        per_epoch = math.ceil(n / size)
        epoch, part = divmod(count, per_epoch)
        generator = torch.Generator().manual_seed(hash((self.config.seed, epoch)) % 2**63)
        chosen = torch.randperm(n, generator=generator)[part * size : (part + 1) * size]
        return self.x[chosen], self.y[chosen]


class MarginMaximisation:
    """Descent on F(theta) = log sum_r exp(-tau m_r(theta)) with a backtracking step.

    F is the log of the exponential loss, so its gradient does not vanish as the margin grows: where
    gradient descent's margin grows like log t, this one's grows like t. The step eta is enlarged
    after every success and halved until the Armijo condition holds, and never moves theta by more
    than a tenth of its norm. For an L-homogeneous network theta is rescaled whenever its margin
    passes MARGIN_CAP while tau takes up the factor, which leaves F and the direction of theta
    unchanged: nothing overflows however long it runs.
    """

    GROW, SHRINK, ARMIJO, REACH = 1.2, 0.5, 0.1, 0.1
    MARGIN_CAP, MARGIN_BACK_TO = 20.0, 10.0  # apart, so that rescaling (one evaluation) is rare

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, order: float | None) -> None:
        self.model, self.x, self.y, self.order = model, x, y, order
        self.scalars = {"eta": 0.1, "tau": 1.0, "evaluations": 0.0}
        self.buffers: dict[str, Tensor] = {}
        self._current: tuple[Tensor, Tensor] | None = None

    def step(self, count: int) -> None:
        """One accepted step; at a point where no step helps, theta stays."""
        weights = list(self.model.parameters())
        if self._current is None:
            self._current = self._objective()
        value, lowest = self._current
        gradient = torch.autograd.grad(value, weights)
        slope = float(sum(g.square().sum() for g in gradient))
        size = math.sqrt(float(sum(p.detach().square().sum() for p in weights)))
        before, eta = float(value.detach()), self.scalars["eta"]
        eta = min(eta, self.REACH * size / math.sqrt(slope)) if slope > 0 else eta
        old = [p.detach().clone() for p in weights]
        while slope > 0 and eta > 1e-18:
            with torch.no_grad():
                for p, o, g in zip(weights, old, gradient, strict=True):
                    p.copy_(torch.add(o, g, alpha=-eta))
            trial = self._objective()
            if float(trial[0].detach()) <= before - self.ARMIJO * eta * slope:  # False for NaN
                self._current, lowest = trial, trial[1]
                self.scalars["eta"] = eta * self.GROW
                break
            eta *= self.SHRINK
        else:
            with torch.no_grad():
                for p, o in zip(weights, old, strict=True):
                    p.copy_(o)
            self._current = None
            self.scalars["eta"] = max(eta, 1e-12)
        self._rescale(float(lowest))

    def _objective(self) -> tuple[Tensor, Tensor]:
        self.scalars["evaluations"] += 1
        m = margins(self.model(self.x), self.y)
        return torch.logsumexp((-self.scalars["tau"] * m).flatten(), 0), m.detach().min()

    def _rescale(self, lowest: float) -> None:
        if self.order is None or not self.MARGIN_CAP < lowest < math.inf:
            return
        factor = (self.MARGIN_BACK_TO / lowest) ** (1 / self.order)
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(factor)
        self.scalars["tau"] *= lowest / self.MARGIN_BACK_TO
        self.scalars["eta"] *= factor**2
        self._current = None
