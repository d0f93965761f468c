"""Directions in which a smooth network bends least: the second derivative of f in x.

The halves x +- t v change the residual by t^2/2 f''[v, v] + O(t^4), so a pair goes furthest where that is
small. sum_p H_p^2 over the Hessians H_p of all components f_p has the directions of no curvature as
its null space; its eigenvectors, least first, are tried.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, jacfwd

from residuum.errors import InputError
from residuum.stationarity import Theta, parameters
from residuum.theory.uniqueness.system import System

ENTRIES = 5 * 10**7


def curvature_directions(system: System, i: int) -> list[Tensor]:
    """d orthonormal directions (d,), least curvature first."""
    theta, shape, u = parameters(system.model), system.x.shape[1:], system.u[i]
    d, size = system.x[i].numel(), sum(t.numel() for t in theta.values())
    if d * d * size > ENTRIES:
        raise InputError(
            f"Networks that are not piecewise linear are certified up to d^2 P = {ENTRIES:.0e}; "
            f"this one has d = {d}, P = {size}.",
            "Use a ReLU network, or a smaller one.",
        )

    def f(z: Tensor) -> Tensor:
        def value(t: Theta) -> Tensor:
            return (u * functional_call(system.model, t, (z.reshape(1, *shape),))[0]).sum()

        parts = grad(value)(theta)
        return torch.cat([system.scales[name] * parts[name].flatten() for name in theta])

    hessians = jacfwd(jacfwd(f))(system.x[i].flatten())  # (P, d, d)
    total = torch.einsum("pij,pjk->ik", hessians, hessians)
    return list(torch.linalg.eigh(total).eigenvectors.T)
