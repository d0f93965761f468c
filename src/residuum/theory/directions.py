"""Directions along which a sample can be split.

A split is limited by <grad s_k, nu> for the switches near the sample. Hence these directions nu:

    data       last left singular vector of the d x n data matrix: gamma = max_i |<x_i, nu>| lies
               between sigma_d / sqrt(n) and sigma_d (Refael et al. 2025, Theorem 15)
    weights    last right singular vector of the first layer, which the network hardly depends on
    tangent    a random direction
    softest    argmin_nu || diag(1/|s|) G nu ||, G (K, d) the gradients of the switches at the sample
    largest    from there, max ||z|| s.t. |<grad s_k, z>| <= |s_k| by linear programs, each of which
               moves along the last solution: a symmetric split of length ||z||, larger with every round

Each direction is made orthogonal to grad_x Phi(x_i), so that both halves stay on the margin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from residuum.networks import dense_chain
from residuum.theory.budgets import compute_exact_budgets, unit
from residuum.theory.patterns import (
    ROUNDING,
    HypothesisError,
    compute_slope_matrix,
    compute_switches,
    estimate_slope_sizes,
)

MAX_ROUNDS = 4  # linear programs, each of which gives at least the budget of the last
PROGRAM_SECONDS = 30.0  # for one linear program: with more than a thousand neurons it takes minutes
DISTANCE_RATIO = 1e6  # softest: distances below the largest divided by this number count as equal


def find_data_direction(x: Tensor) -> tuple[Tensor, float, float]:
    """Return nu (d,), sigma_d and gamma of samples (n, ...). sigma_d is 0 if the samples do not span."""
    flat = x.flatten(1).double()
    nu, lowest = _find_least_visible(flat)
    return nu, lowest, float((flat @ nu).abs().max())


def find_weight_direction(model: nn.Module) -> tuple[Tensor, float]:
    """Return nu (d,) and the smallest singular value of an MLP's first layer, or 0 if it does not span."""
    return _find_least_visible(_first_layer(model))


def _find_least_visible(matrix: Tensor) -> tuple[Tensor, float]:
    """Return the last right singular vector and its singular value, or 0 if the rows do not span."""
    _, sigma, vectors = torch.linalg.svd(matrix, full_matrices=True)
    return vectors[-1], float(sigma[-1]) if len(sigma) == matrix.shape[1] else 0.0


def find_hidden_basis(models: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return directions that no first layer depends on, those outside the span of the data first.

    Along these directions the outputs of the network do not change, so budgets are infinite and margins stay.

    Args:
        models: The network at every gradient point.
        x: (n, *shape) samples.

    Returns:
        (d, k) orthonormal directions.
    """
    weight = torch.cat([_first_layer(model) for model in models])
    _, sigma, rows = torch.linalg.svd(weight, full_matrices=True)
    rank = int((sigma > 10 * ROUNDING * sigma[0]).sum())
    hidden = rows[rank:].T
    if not hidden.shape[1]:
        return hidden
    _, _, order = torch.linalg.svd(x.flatten(1) @ hidden, full_matrices=True)
    basis = hidden @ order.T.flip(1)  # directions with the least data come first
    for _ in range(2):  # repeated, to be orthogonal to every w_j even for long steps
        basis = basis - rows[:rank].T @ (rows[:rank] @ basis)
        basis = basis / basis.norm(dim=0)
    return basis


def project_onto_margin(direction: Tensor, gradients: Tensor) -> Tensor:
    """Project a direction so that it is orthogonal to gradients, and normalize it.

    A split x +- nu stays on the margin only if nu is orthogonal to the gradients of all margins in use. The
    projection is repeated, because the length of the split multiplies the rounding errors of the first one.

    Args:
        direction: (d,) a direction.
        gradients: (g, d) gradients.

    Returns:
        (d,) unit direction.

    Raises:
        HypothesisError: If nothing remains of the direction.
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
            "The direction is parallel to grad_x Phi, so it does not keep the sample on its margin.",
            "Pass another direction.",
        )
    return unit(nu)


def find_softest_direction(models: Sequence[nn.Module], x: Tensor, gradients: Tensor) -> Tensor:
    """Return the direction on the margin along which switches near a sample move least.

    This is the eigenvector of sum_j (slope_j / distance_j)^2 with the smallest eigenvalue, so a switch counts
    by how soon it is reached. The budget is a maximum over switches, while this is a sum. So the result is a
    good start but not the optimum.

    Args:
        models: The network at every gradient point.
        x: (*shape) a sample.
        gradients: (g, d) gradients of its margins.

    Returns:
        (d,) unit direction.
    """
    return _softest(*_scaled_slopes(models, x, gradients))


def _softest(scaled: Tensor, free: Tensor) -> Tensor:
    if not len(scaled):
        return unit(free[:, -1])
    _, vectors = torch.linalg.eigh(scaled.T @ scaled)
    return unit(free @ vectors[:, 0])


def find_largest_direction(models: Sequence[nn.Module], x: Tensor, gradients: Tensor) -> Tensor:
    """Return a direction of large symmetric budget, by successive linear programs from the softest one.

    The maximum length over a polytope has many local solutions. Every round gives at least the length of the
    round before.

    Args:
        models: The network at every gradient point.
        x: (*shape) a sample.
        gradients: (g, d) gradients of its margins.

    Returns:
        (d,) unit direction.
    """
    from scipy.optimize import linprog

    scaled, free = _scaled_slopes(models, x, gradients)
    best = _softest(scaled, free)
    reach = _budget(models, x, best)
    if not len(scaled) or not np.isfinite(reach):
        return best
    a = scaled.numpy()
    lines = np.concatenate([a, -a])
    for _ in range(MAX_ROUNDS):
        objective = (best @ free).numpy()
        options = {"time_limit": PROGRAM_SECONDS}
        unbounded, bounds = (None, None), np.ones(len(lines))
        solution = linprog(
            -objective, lines, bounds, bounds=unbounded, method="highs", options=options
        )
        if solution.status != 0:  # the time limit was reached, or the budget is unbounded
            break
        nu = unit(free @ torch.from_numpy(solution.x))
        new_reach = _budget(models, x, nu)
        if not new_reach > reach * (1 + 1e-9):
            break
        best, reach = nu, new_reach
    return best


def _scaled_slopes(
    models: Sequence[nn.Module], x: Tensor, gradients: Tensor
) -> tuple[Tensor, Tensor]:
    """Return diag(1/|s|) G in coordinates of the tangent space (J, t), and the basis (d, t) of that space.

    s_j is the distance of switch j from zero, and G has the slopes of all switches at x. Along a direction
    of the tangent space with coordinates c, switch j is reached after 1 / |row_j c|, in either direction.

    Args:
        models: The network at every gradient point.
        x: (*shape) a sample.
        gradients: (g, d) gradients of its margins.

    Returns:
        The scaled slopes and the basis.

    Raises:
        HypothesisError: If the sample has one coordinate.
    """
    switches, matrix = compute_switches(models, x[None]), compute_slope_matrix(models, x)
    size = estimate_slope_sizes(models, x[None], switches.layers)[0]
    distance = switches.values[0].abs()
    _, sigma, rows = torch.linalg.svd(gradients.reshape(-1, x.numel()), full_matrices=True)
    rank = int((sigma > ROUNDING * sigma.max().clamp(min=1e-300)).sum())
    free = rows[rank:].T
    if not free.shape[1]:
        raise HypothesisError(
            "direction",
            "No direction is orthogonal to grad_x Phi, because the sample has one coordinate.",
            "Samples with one coordinate cannot be split on their margin.",
        )
    is_moving = matrix.norm(dim=1) > ROUNDING * size
    matrix, distance = matrix[is_moving], distance[is_moving]
    if not len(matrix):
        return matrix, free
    relative = distance / matrix.norm(dim=1)
    floor = (relative.max() / DISTANCE_RATIO).clamp(min=1e-300)
    return (matrix / torch.maximum(distance, floor * matrix.norm(dim=1))[:, None]) @ free, free


def _budget(models: Sequence[nn.Module], x: Tensor, nu: Tensor) -> float:
    return float(compute_exact_budgets(models, x[None], nu.reshape(x[None].shape)).least[0])


def _first_layer(model: nn.Module) -> Tensor:
    if (chain := dense_chain(model)) is None:
        raise HypothesisError(
            "subspace",
            f"A first layer that is connected to the full input is needed; {type(model).__name__} has none.",
            "Pass the direction 'softest'.",
        )
    return chain.linears[0].weight.detach().double()


Finder = Callable[[Sequence[nn.Module], Tensor, Tensor, Tensor], Tensor]


def _project_each(nu: Tensor, gradients: Tensor) -> Tensor:
    return torch.stack(
        [project_onto_margin(nu, sample_gradients) for sample_gradients in gradients]
    )


def _random(models: Sequence[nn.Module], x: Tensor, indices: Tensor, gradients: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    random_directions = torch.randn(
        len(indices), gradients.shape[2], generator=generator, dtype=torch.float64
    )
    return torch.stack(
        [
            project_onto_margin(nu, sample_gradients)
            for nu, sample_gradients in zip(random_directions, gradients, strict=True)
        ]
    )


def _one_by_one(find_direction: Callable[[Sequence[nn.Module], Tensor, Tensor], Tensor]) -> Finder:
    def finder(
        models: Sequence[nn.Module], x: Tensor, indices: Tensor, gradients: Tensor
    ) -> Tensor:
        pairs = zip(indices.tolist(), gradients, strict=True)
        return torch.stack(
            [find_direction(models, x[i], sample_gradients) for i, sample_gradients in pairs]
        )

    return finder


# finder(models, x, indices, gradients) returns unit directions (k, d) for the samples x[indices] that
# keep them on their margins. gradients (k, g, d) are those of their margins.
DIRECTIONS: dict[str, Finder] = {
    "data": lambda models, x, indices, gradients: _project_each(
        find_data_direction(x)[0], gradients
    ),
    "weights": lambda models, x, indices, gradients: _project_each(
        find_weight_direction(models[0])[0], gradients
    ),
    "tangent": _random,
    "softest": _one_by_one(find_softest_direction),
    "largest": _one_by_one(find_largest_direction),
}
SLOW = ("softest", "largest")  # these process one sample after the other
