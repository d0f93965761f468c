"""Directions along which a sample can be split, and how large the budget along them is.

What limits a split is <grad s_k, nu> for the switches near the sample, hence:

    data       last left singular vector of the d x n data matrix: gamma = max_i |<x_i, nu>| lies
               between sigma_d / sqrt(n) and sigma_d (Refael et al. 2025, Theorem 15)
    weights    last right singular vector of the first layer: what the network hardly sees
    tangent    a random direction
    softest    argmin_nu || diag(1/|s|) G nu ||, G (K, d) the gradients of the switches at the sample
    largest    from there, max ||z|| s.t. |<grad s_k, z>| <= |s_k| by linear programmes that each move
               along the last solution: a symmetric split of length ||z||, larger with every round

Each is made orthogonal to grad_x Phi(x_i), so that both halves stay on the margin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from residuum.networks import dense_chain
from residuum.theory.budgets import exact_budgets, unit
from residuum.theory.patterns import ROUNDING, HypothesisError, sizes, slope_matrix, switches

ROUNDS = 4  # linear programmes at most, each budget at least as long as the last
SECONDS = 30.0  # for one linear programme: past a thousand neurons they take minutes
WALL = 1e6  # softest: a switch this many times nearer than the farthest counts as no nearer


def data_direction(x: Tensor) -> tuple[Tensor, float, float]:
    """nu (d,), sigma_d and gamma of samples x: (n, ...); sigma_d = 0 where they do not span."""
    flat = x.flatten(1).double()
    nu, lowest = _least_seen(flat)
    return nu, lowest, float((flat @ nu).abs().max())


def weight_direction(model: nn.Module) -> tuple[Tensor, float]:
    """nu (d,) and the lowest singular value of an MLP's first layer (0 where it does not span)."""
    return _least_seen(_first_layer(model))


def _least_seen(matrix: Tensor) -> tuple[Tensor, float]:
    """The last right singular vector, and its singular value: 0 if the rows do not span."""
    _, sigma, vectors = torch.linalg.svd(matrix, full_matrices=True)
    return vectors[-1], float(sigma[-1]) if len(sigma) == matrix.shape[1] else 0.0


def hidden_basis(models: Sequence[nn.Module], x: Tensor) -> Tensor:
    """(d, k) orthonormal directions that no first layer sees, those outside the data's span first.

    Along them nothing a network computes changes: budgets are infinite and margins stay.
    """
    weight = torch.cat([_first_layer(model) for model in models])
    _, sigma, rows = torch.linalg.svd(weight, full_matrices=True)
    rank = int((sigma > 10 * ROUNDING * sigma[0]).sum())
    hidden = rows[rank:].T
    if not hidden.shape[1]:
        return hidden
    _, _, order = torch.linalg.svd(x.flatten(1) @ hidden, full_matrices=True)
    basis = hidden @ order.T.flip(1)  # what the data have least of comes first
    for _ in range(2):  # orthogonal to every w_j to rounding, however long the step along it is
        basis = basis - rows[:rank].T @ (rows[:rank] @ basis)
        basis = basis / basis.norm(dim=0)
    return basis


def tangent(direction: Tensor, gradients: Tensor) -> Tensor:
    """Unit direction (d,) without its components along gradients (g, d); refused where none is left.

    A split x +- nu stays on the margin only where nu is orthogonal to the gradient of every margin in use.
    Twice: what rounding leaves of a gradient after one projection is multiplied by the length of the split.
    """
    nu = unit(direction)
    basis = torch.linalg.svd(gradients.reshape(-1, nu.numel()), full_matrices=False)
    keep = basis[1] > ROUNDING * basis[1].max().clamp(min=1e-300)
    rows = basis[2][keep]
    for _ in range(2):
        nu = nu - rows.T @ (rows @ nu)
    if float(nu.norm()) <= 1e-8:
        raise HypothesisError(
            "direction",
            "The direction is parallel to grad_x Phi: nothing of it keeps the sample on its margin.",
            "Take another direction.",
        )
    return unit(nu)


def softest_direction(models: Sequence[nn.Module], x: Tensor, gradients: Tensor) -> Tensor:
    """(d,) the direction along which the switches near sample x (*shape) move least, on its margin.

    The least eigenvector of sum_j (slope_j / distance_j)^2: a switch counts by how soon it would be
    reached. The budget is a maximum over switches and this a sum, so it is a start, not the optimum.
    """
    return _softest(*_scaled_slopes(models, x, gradients))


def _softest(scaled: Tensor, free: Tensor) -> Tensor:
    if not len(scaled):
        return unit(free[:, -1])
    _, vectors = torch.linalg.eigh(scaled.T @ scaled)
    return unit(free @ vectors[:, 0])


def largest_direction(models: Sequence[nn.Module], x: Tensor, gradients: Tensor) -> Tensor:
    """(d,) a direction of large symmetric budget: successive linear programmes from the softest one.

    Maximizing a length over a polytope has many local answers; every round is at least as long.
    """
    from scipy.optimize import linprog

    scaled, free = _scaled_slopes(models, x, gradients)
    best = _softest(scaled, free)
    reach = _budget(models, x, best)
    if not len(scaled) or not np.isfinite(reach):
        return best
    a = scaled.numpy()
    lines = np.concatenate([a, -a])
    for _ in range(ROUNDS):
        goal = (best @ free).numpy()
        limit = {"time_limit": SECONDS}
        ends, ones = (None, None), np.ones(len(lines))
        found = linprog(-goal, lines, ones, bounds=ends, method="highs", options=limit)
        if found.status != 0:  # out of time, or unbounded: then the softest direction was free
            break
        nu = unit(free @ torch.from_numpy(found.x))
        longer = _budget(models, x, nu)
        if not longer > reach * (1 + 1e-9):
            break
        best, reach = nu, longer
    return best


def _scaled_slopes(
    models: Sequence[nn.Module], x: Tensor, gradients: Tensor
) -> tuple[Tensor, Tensor]:
    """diag(1/|s|) G in coordinates of the tangent space (J, t), and its basis (d, t).

    s_j: distance of switch j from zero; G: slopes of all switches at x. Along a direction of the tangent
    space with coordinates c, switch j is reached after 1 / |row_j c|, whichever way.
    """
    found, matrix = switches(models, x[None]), slope_matrix(models, x)
    size = sizes(models, x[None], found.layers)[0]
    distance = found.values[0].abs()
    _, sigma, rows = torch.linalg.svd(gradients.reshape(-1, x.numel()), full_matrices=True)
    rank = int((sigma > ROUNDING * sigma.max().clamp(min=1e-300)).sum())
    free = rows[rank:].T
    if not free.shape[1]:
        raise HypothesisError(
            "direction",
            "No direction is orthogonal to grad_x Phi: the sample has one coordinate.",
            "Nothing can be split on the margin here.",
        )
    moving = matrix.norm(dim=1) > ROUNDING * size
    matrix, distance = matrix[moving], distance[moving]
    if not len(matrix):
        return matrix, free
    relative = distance / matrix.norm(dim=1)
    floor = (relative.max() / WALL).clamp(min=1e-300)
    return (matrix / torch.maximum(distance, floor * matrix.norm(dim=1))[:, None]) @ free, free


def _budget(models: Sequence[nn.Module], x: Tensor, nu: Tensor) -> float:
    return float(exact_budgets(models, x[None], nu.reshape(x[None].shape)).least[0])


def _first_layer(model: nn.Module) -> Tensor:
    if (chain := dense_chain(model)) is None:
        raise HypothesisError(
            "subspace",
            f"A first layer that sees the whole input is needed; {type(model).__name__} has none.",
            "Use the direction 'softest'.",
        )
    return chain.linears[0].weight.detach().double()


Finder = Callable[[Sequence[nn.Module], Tensor, Tensor, Tensor], Tensor]


def _each(nu: Tensor, gradients: Tensor) -> Tensor:
    return torch.stack([tangent(nu, own) for own in gradients])


def _random(models: Sequence[nn.Module], x: Tensor, some: Tensor, gradients: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(some), gradients.shape[2], generator=generator, dtype=torch.float64)
    return torch.stack([tangent(nu, own) for nu, own in zip(drawn, gradients, strict=True)])


def _one_by_one(find: Callable[[Sequence[nn.Module], Tensor, Tensor], Tensor]) -> Finder:
    def finder(models: Sequence[nn.Module], x: Tensor, some: Tensor, gradients: Tensor) -> Tensor:
        pairs = zip(some.tolist(), gradients, strict=True)
        return torch.stack([find(models, x[i], own) for i, own in pairs])

    return finder


# finder(models, x, some, gradients): unit directions (k, d) for the samples x[some] that keep them on
# their margins; gradients: (k, g, d) of their margins.
DIRECTIONS: dict[str, Finder] = {
    "data": lambda models, x, some, gradients: _each(data_direction(x)[0], gradients),
    "weights": lambda models, x, some, gradients: _each(weight_direction(models[0])[0], gradients),
    "tangent": _random,
    "softest": _one_by_one(softest_direction),
    "largest": _one_by_one(largest_direction),
}
SLOW = ("softest", "largest")  # one sample after the other
