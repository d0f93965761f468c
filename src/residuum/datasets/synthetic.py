"""Points drawn on purpose: the circle of Haim et al. (2022) and the sphere of Refael et al. (2025)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residuum.datasets.pool import Pool, Request, seeded
from residuum.datasets.selection import DEFAULT_HOLDOUT, check_divisible
from residuum.errors import DataError

SIGNS = ("-1", "+1")


def circle(request: Request) -> Pool:
    """n equally spaced points of the unit circle with alternating labels (20 unless told).

        x_i = (cos a_i, sin a_i),   a_i = a + 2 pi i / n,   y_i = (-1)^i,   a ~ U[0, 2 pi) by seed

    Held out are the n points half a spacing further, x_{i + 1/2} with label y_i: the points of the
    circle farthest from every training point.
    """
    n = 20 if request.n is None else request.n
    check_divisible(n, 2)
    start = 2 * math.pi * torch.rand((), dtype=torch.float64, generator=seeded(request.seed))
    steps = torch.arange(n, dtype=torch.float64)

    def at(step: Tensor) -> Tensor:
        angle = start + 2 * math.pi * step / n
        return torch.stack((angle.cos(), angle.sin()), dim=1)

    labels = (steps.long() + 1) % 2
    held = Pool("circle", at(steps + 0.5), labels, SIGNS)
    return Pool("circle", at(steps), labels, SIGNS, center=False, test=held)


def sphere(request: Request, *, dim: int = 784) -> Pool:
    """n points uniform on S^{dim-1}, labelled by the sign of the first coordinate (500 unless told).

    Half of the points have each sign: a uniform point given its sign is a uniform point reflected
    to that side. Held-out points are drawn the same way.
    """
    n = 500 if request.n is None else request.n
    check_divisible(n, 2)
    if dim < 2:
        raise DataError(f"A sphere needs dim >= 2; got dim={dim}.", "Use dim=784.")
    generator = seeded(request.seed)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, dim, dtype=torch.float64, generator=generator)
        x /= x.norm(dim=1, keepdim=True)
        labels = (torch.arange(count) + 1) % 2
        x[:, 0] = x[:, 0].abs() * (2 * labels - 1)
        return x, labels

    x, labels = draw(n)
    held = Pool("sphere", *draw(request.holdout or DEFAULT_HOLDOUT), SIGNS)
    return Pool("sphere", x, labels, SIGNS, center=False, test=held)
