"""One update of candidates and multipliers, in place: SGD with momentum or Adam, then constraints.

    SGD    v <- mu v + g;                      p <- p - rate v
    Adam   m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2;
           p <- p - rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Nothing here looks at the values of a tensor, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residuum.attacks.config import Step
from residuum.attacks.priors import box
from residuum.attacks.variation import PerRun
from residuum.records import Knowledge

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-12


class Updates:
    """knowledge: gives the box, None where candidates are not put into one; nonnegative: lam >= lam_min."""

    def __init__(self, settings: PerRun, knowledge: Knowledge | None, nonnegative: bool) -> None:
        self.settings, self.config = settings, settings.config
        self.knowledge, self.nonnegative = knowledge, nonnegative

    def apply(
        self, x: Tensor, lam: Tensor, gx: Tensor, gl: Tensor,
        moments: dict[str, Tensor], step: Step, alive: Tensor,
    ) -> None:  # fmt: skip
        """Change x, lam and moments; gx and gl are used up.

        alive: (R,) runs or (R, m) candidates; the others stay put.
        """
        factor = self.config.rate_at(step)
        for name, variable, gradient in (("x", x, gx), ("lam", lam, gl)):
            rate = self.settings.value(f"lr_{name}", variable.ndim)
            mask = alive.view(*alive.shape, *[1] * (variable.ndim - alive.ndim))
            gradient = gradient.masked_fill_(~mask, 0.0)
            direction = self._direction(name, gradient, moments, step)
            variable.sub_(torch.where(mask, direction, 0.0).mul_(rate * factor))
        if self.config.constraint == "project":
            self._project(x, lam, alive)

    def _direction(self, name: str, g: Tensor, moments: dict[str, Tensor], step: Step) -> Tensor:
        if self.config.optimiser == "sgd":
            return _moment(moments, name, g).mul_(self.config.momentum).add_(g)
        t = step + 1
        first, second = _moment(moments, f"{name}/1", g), _moment(moments, f"{name}/2", g)
        first.mul_(BETA1).add_(g, alpha=1 - BETA1)
        second.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        below = (second / (1 - BETA2**t)).sqrt_().add_(EPSILON)
        return (first / (1 - BETA1**t)).div_(below)

    def _project(self, x: Tensor, lam: Tensor, alive: Tensor) -> None:
        if self.knowledge is not None and self.knowledge.value_range is not None:
            low, high = box(self.knowledge, x)
            torch.maximum(torch.minimum(x, high), low, out=x)
        if self.nonnegative:
            least = self.settings.value("lam_min", lam.ndim)
            if alive.ndim == 1:
                lam.clamp_(min=least)
            else:  # an empty slot has no multiplier, whatever the least one is
                mask = alive.view(*alive.shape, *[1] * (lam.ndim - 2))
                lam.copy_(torch.where(mask, lam.clamp(min=least), lam))


def _moment(moments: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    if name not in moments:
        moments[name] = torch.zeros_like(like)
    return moments[name]
