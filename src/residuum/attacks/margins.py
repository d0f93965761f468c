"""Equal margins: every sample with a multiplier lies at the same distance in output.

At a KKT point lam_i > 0 only where the margin is the least, y_i Phi(x_i) = p (multiclass: Phi_y less
the best rival). Stationarity alone does not ask for it. As a penalty on the candidates' own outputs

    M(x, lam) = weight sum_i w_i (margin_i / p - 1)^2,      w_i = min(mu_i, 1) / m

mu: stored multipliers, of order one; p: their weighted median of the candidates' margins, so that
nobody has to be told it, but at least FLOOR of their weighted mean size: before candidates have
settled the median may be zero. p is not differentiated, and the weight rises from zero over the steps,
for the same reason. A candidate without a multiplier may have any output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from residuum.attacks.objectives import Objective
from residuum.checkpoints.surfaces import WEIGHTS
from residuum.records import Knowledge

FEW_VALUES = 8  # in the plane, where every output is shared by a curve of points, it misleads
FLOOR = 0.2  # of the mean size of margins: the least p, while the median may be zero
AGREE = 0.25  # weighted mean deviation from p, over p, that still counts as equal


@dataclass(frozen=True)
class EqualMargins:
    """weight: of the penalty; scale: stored multipliers are lam / scale, a number or (R, 1, ...)."""

    objective: Objective
    weight: float | Tensor
    scale: float | Tensor

    @classmethod
    def promised(
        cls,
        objective: Objective,
        knowledge: Knowledge,
        shape: tuple[int, ...],
        weight: float,
        scale: float | Tensor,
    ) -> EqualMargins | None:
        """The penalty where training to zero loss ends in equal margins; None elsewhere.

        Weight decay lets multipliers go with outputs; a change of the weights or a moment is a sum of
        gradients of all samples.
        """
        some = objective.margins(torch.zeros(1, 1, 2), torch.zeros(1))
        if not weight or some is None or objective.surface != WEIGHTS or knowledge.weight_decay:
            return None
        return None if math.prod(shape) < FEW_VALUES else cls(objective, weight, scale)

    def at(self, share: float | Tensor) -> EqualMargins:
        """When this share of the steps is done: outputs mean nothing before candidates do."""
        return replace(self, weight=self.weight * share)

    def penalty(self, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """(R,) from outputs (R, m, C), labels (m,) or (R, m), lam (R, m, ...)."""
        margins, weight = self._margins(outputs, labels), self._weights(lam)
        p = common_margin(margins.detach(), weight.detach())
        return self.weight * (weight * (margins / p - 1).square()).sum(-1)

    def derivatives(
        self, outputs: Tensor, labels: Tensor, lam: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The penalty, and its derivatives in the outputs and in lam."""

        def penalty(outputs: Tensor, lam: Tensor) -> Tensor:
            return self.penalty(outputs, labels, lam)

        found = torch.func.vjp(penalty, outputs, lam)
        outbar, lambar = found[1](torch.ones_like(found[0]))
        return found[0], outbar, lambar

    def disagreement(self, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """(R,) weighted mean of |margin_i / p - 1|: small where training came to its end."""
        margins, weight = self._margins(outputs, labels), self._weights(lam)
        p = common_margin(margins, weight)
        return (weight * (margins / p - 1).abs()).sum(-1) / weight.sum(-1)

    def of_run(self, run: int) -> EqualMargins:
        """For one run of several."""
        if not isinstance(self.scale, Tensor):
            return self
        return replace(self, scale=self.scale[run : run + 1])

    def _margins(self, outputs: Tensor, labels: Tensor) -> Tensor:
        margins = self.objective.margins(outputs, labels)
        assert margins is not None
        return margins

    def _weights(self, lam: Tensor) -> Tensor:
        """w (R, m)."""
        return (lam / self.scale).reshape(*lam.shape[:2], -1).sum(-1).clamp(max=1) / lam.shape[1]


def common_margin(margins: Tensor, weight: Tensor) -> Tensor:
    """p: (R, 1), the weighted median of (R, m) margins, at least FLOOR of their weighted mean size."""
    ordered, order = margins.sort(-1)
    below = weight.gather(-1, order).cumsum(-1)
    total = below[..., -1:]
    middle = (below < total / 2).sum(-1, keepdim=True).clamp(max=margins.shape[-1] - 1)
    size = (weight * margins.abs()).sum(-1, keepdim=True) / total.clamp(min=1e-30)
    return torch.maximum(ordered.gather(-1, middle), FLOOR * size).clamp(min=1e-30)
