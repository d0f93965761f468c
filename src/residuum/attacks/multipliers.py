"""Multipliers in closed form: for fixed candidates the loss is a (nonnegative) least-squares problem.

    min_lam sum_l w_l || target_l - sum_i lam_i g_i,l ||^2

The g_i are read off the problem itself: its gradient in lam at lam = 0 and along lam gives the right
side and the products with the Gram matrix, so every objective that is linear in lam is covered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residuum.attacks.problem import Problem
from residuum.theory.multipliers import factor_gram, solve

MAX_UNKNOWNS = 2000


def best_multipliers(
    problem: Problem, x: Tensor, lam: Tensor, floor: float | None, scale: float, sharpness: float
) -> Tensor:
    """Stored multipliers (R, m, ...) that minimise the loss at x, each run on its own.

    floor: the least value allowed, which makes them nonnegative; None leaves them free.
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
        factor = factor_gram(torch.stack(columns).cpu(), right.cpu())
        values = solve(factor, free=floor is None)
        if floor is not None:
            values = values.clamp(min=floor)
        solved.append(values.to(lam).view_as(lam[run]))
    return torch.stack(solved)
