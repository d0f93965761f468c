"""Multipliers in closed form: for fixed candidates the loss is a (nonnegative) least-squares problem.

    min_{lam >= floor} sum_l w_l || target_l - sum_i lam_i g_i,l ||^2

A floor is a shift: lam = floor + nu with nu >= 0 and the right side lessened by G floor.

The g_i are read off the problem itself: its gradient in lam at lam = 0 and along lam gives the right
side and the products with the Gram matrix, so every objective that is linear in lam is covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from residuum.attacks.config import PerRun
from residuum.attacks.problem import Problem
from residuum.theory.multipliers import factor_gram, solve

MAX_UNKNOWNS = 2000


def best_multipliers(
    problem: Problem,
    x: Tensor,
    lam: Tensor,
    floor: float | None,
    scale: float,
    sharpness: float | Tensor,
) -> Tensor:
    """Stored multipliers (R, m, ...) that minimise the loss at x, each run on its own.

    floor: the least value allowed; None leaves them free. A run that has left the finite numbers,
    or none of whose gradients is alive, keeps the multipliers it has.
    """
    flat = lam.flatten(1)
    unknowns = flat.shape[1]
    if unknowns > MAX_UNKNOWNS:
        return lam
    solved = []
    for run in range(len(x)):
        here = x[run : run + 1]

        def gradient(values: Tensor, here: Tensor = here, run: int = run) -> Tensor:
            shaped = values.view_as(lam[run : run + 1])
            return (
                problem.evaluate(here, shaped * scale, sharpness).grad_lam.flatten().double()
                * scale
            )

        zero = torch.zeros_like(flat[run])
        right = -gradient(zero) / 2  # <g_i, target>_w
        columns = [
            gradient(e) / 2 + right for e in torch.eye(unknowns, dtype=x.dtype, device=x.device)
        ]
        gram, shift = torch.stack(columns).cpu(), floor or 0.0
        if not bool(gram.isfinite().all()) or float(gram.trace()) <= 0:
            solved.append(lam[run])
            continue
        factor = factor_gram(gram, right.cpu() - shift * gram.sum(1))
        values = shift + solve(factor, free=floor is None)
        solved.append(values.to(lam).view_as(lam[run]))
    return torch.stack(solved)


def stored_scale(
    settings: PerRun, candidates: int, balancing: Callable[[float], float], ndim: int,
    target: Mapping[str, Tensor],
) -> float | Tensor:  # fmt: skip
    """Factor from stored to plain-sum multipliers; per run where their sharpness differs.

    balancing: the scale at a sharpness; ndim: dimensions of lam; target: gives dtype and device.
    """
    rule = settings.config.lam_scale
    if rule != "auto":
        return 1.0 if rule == "one" else 1 / candidates
    if not settings.differs("sharpness"):
        return balancing(settings.one(0).sharpness)
    found = torch.tensor([balancing(run.sharpness) for run in settings.runs], dtype=torch.float64)
    return found.to(next(iter(target.values()))).view(-1, *[1] * (ndim - 1))


def balancing_scale(problem: Problem, x: Tensor, shape: tuple[int, ...], sharpness: float) -> float:
    """The common multiplier that makes the first explained layer's sum over x as large as its target.

    x: (1, m, ...); shape: of one candidate's multipliers.
    """
    ones = torch.ones(*x.shape[:2], *shape, dtype=x.dtype, device=x.device)
    # residual(s) = target - s T: from three values of s the size of T follows.
    first = next((i for i, weight in enumerate(problem.layer_weights) if weight > 0), 0)
    at = [problem.evaluate(x, s * ones, sharpness).layers[0, first] for s in (-1.0, 0.0, 1.0)]
    squared = float((at[0] + at[2]) / 2 - at[1])  # ||T||^2 / ||target||^2
    return 1 / math.sqrt(squared) if squared > 0 else 1.0
