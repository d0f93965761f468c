"""Directions along which a sample can be split.

A sample x_i with activation boundaries s_k nearby (called switches) is split into x_i + nu and x_i - nu. The
smaller the slopes <grad s_k, nu> are, the longer the split can be. Hence these directions nu:

    data       last left singular vector of the d x n data matrix: gamma = max_i |<x_i, nu>| lies
               between sigma_d / sqrt(n) and sigma_d (Refael et al. 2025, Theorem 15)
    weights    last right singular vector of the first layer: outputs hardly depend on this direction
    tangent    a random direction
    softest    argmin_nu || diag(1/|s|) G nu ||, where G (K, d) has the gradients of the K switches at x_i
    largest    max ||z|| s.t. |<grad s_k, z>| <= |s_k|, by linear programs that begin with "softest". Each
               program moves along the last solution, so that the length ||z|| grows in every round.

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

# The "largest" rule solves this many linear programs, each of which begins with the last solution.
MAX_ROUNDS = 4
# A linear program stops after this many seconds, because it takes minutes with over a thousand neurons.
PROGRAM_SECONDS = 30.0
# The "softest" rule raises distances to switches to at least the largest distance over this number.
DISTANCE_RATIO = 1e6


def find_data_direction(x: Tensor) -> tuple[Tensor, float, float]:
    """Return the unit direction along which samples vary least, and how much they vary.

    Args:
        x: (n, ...) samples with d entries each.

    Returns:
        The direction (d,), the smallest singular value of the data matrix (0 if the samples span fewer than d
        dimensions), and the largest component of a sample along the direction.
    """
    flat_samples = x.flatten(1).double()
    nu, lowest = _find_least_visible(flat_samples)
    return nu, lowest, float((flat_samples @ nu).abs().max())


def find_weight_direction(model: nn.Module) -> tuple[Tensor, float]:
    """Return the unit direction of input space on which the first layer of an MLP depends least.

    Args:
        model: The network, with d inputs.

    Returns:
        The direction (d,) and the smallest singular value of the first layer. The value is 0 if the neurons
        span fewer than d dimensions.
    """
    return _find_least_visible(_first_layer(model))


def _find_least_visible(matrix: Tensor) -> tuple[Tensor, float]:
    """Return the last right singular vector of a matrix and its singular value.

    The value is 0 if the rows span fewer dimensions than the matrix has columns.
    """
    _, sigma, vectors = torch.linalg.svd(matrix, full_matrices=True)
    return vectors[-1], float(sigma[-1]) if len(sigma) == matrix.shape[1] else 0.0


def find_hidden_basis(models: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return directions of input space on which no first layer depends.

    Along these directions the outputs of the network do not change. So samples can move along them without
    limit and keep their margins. Directions in which the data vary least come first.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (n, *shape) samples.

    Returns:
        (d, k) orthonormal directions.
    """
    first_layers = torch.cat([_first_layer(model) for model in models])
    _, sigma, rows = torch.linalg.svd(first_layers, full_matrices=True)
    rank = int((sigma > 10 * ROUNDING * sigma[0]).sum())
    hidden_directions = rows[rank:].T
    if not hidden_directions.shape[1]:
        return hidden_directions
    _, _, order = torch.linalg.svd(x.flatten(1) @ hidden_directions, full_matrices=True)
    basis = hidden_directions @ order.T.flip(
        1
    )  # directions in which the data vary least come first
    # The projection is repeated, because long splits multiply its rounding errors.
    for _ in range(2):
        basis = basis - rows[:rank].T @ (rows[:rank] @ basis)
        basis = basis / basis.norm(dim=0)
    return basis


def project_onto_margin(direction: Tensor, gradients: Tensor) -> Tensor:
    """Project a direction so that it is orthogonal to gradients, and normalize it.

    A split x +- nu stays on the margin only if nu is orthogonal to the gradients of all margins in use. The
    projection is repeated, because the length of the split multiplies the rounding errors of the first
    projection.

    Args:
        direction: (d,) a direction.
        gradients: (g, d) gradients of the margins in x.

    Returns:
        (d,) unit direction.

    Raises:
        HypothesisError: If the direction is a combination of the gradients.
    """
    nu = unit(direction)
    decomposition = torch.linalg.svd(gradients.reshape(-1, nu.numel()), full_matrices=False)
    is_nonzero = decomposition[1] > ROUNDING * decomposition[1].max().clamp(min=1e-300)
    gradient_basis = decomposition[2][is_nonzero]
    for _ in range(2):
        nu = nu - gradient_basis.T @ (gradient_basis @ nu)
    if float(nu.norm()) <= 1e-8:
        raise HypothesisError(
            "direction",
            "A splitting direction must not be parallel to the gradients of the margins in x; this direction "
            "is parallel, so both halves of the sample would leave the margin.",
            "Pass another direction.",
        )
    return unit(nu)


def find_softest_direction(models: Sequence[nn.Module], x: Tensor, gradients: Tensor) -> Tensor:
    """Return the direction along which a sample stays on its margin and nearby switches change least.

    A switch is an activation boundary, for example the input of a ReLU. The direction minimizes the sum of
    (slope / distance)^2 over all switches, so a switch counts by how soon the sample reaches it. The first
    switch limits a split, and not the sum over switches. So the direction is good but not optimal.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (*shape) a sample with d entries.
        gradients: (g, d) gradients of the sample's margins in x.

    Returns:
        (d,) unit direction.
    """
    return _softest(*_scaled_slopes(models, x, gradients))


def _softest(scaled: Tensor, tangent_basis: Tensor) -> Tensor:
    if not len(scaled):
        return unit(tangent_basis[:, -1])
    _, vectors = torch.linalg.eigh(scaled.T @ scaled)
    return unit(tangent_basis @ vectors[:, 0])


def find_largest_direction(models: Sequence[nn.Module], x: Tensor, gradients: Tensor) -> Tensor:
    """Return a direction along which a sample can move far both ways inside its activation pattern.

    Linear programs improve the direction of :func:`find_softest_direction`. The maximum length over a
    polytope has many local solutions. Every round gives at least the length of the round before.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (*shape) a sample with d entries.
        gradients: (g, d) gradients of the sample's margins in x.

    Returns:
        (d,) unit direction.
    """
    from scipy.optimize import linprog

    scaled, tangent_basis = _scaled_slopes(models, x, gradients)
    best_direction = _softest(scaled, tangent_basis)
    best_budget = _budget(models, x, best_direction)
    if not len(scaled) or not np.isfinite(best_budget):
        return best_direction
    slopes = scaled.numpy()
    constraints = np.concatenate([slopes, -slopes])
    for _ in range(MAX_ROUNDS):
        objective = (best_direction @ tangent_basis).numpy()
        solver_options = {"time_limit": PROGRAM_SECONDS}
        unbounded, bounds = (None, None), np.ones(len(constraints))
        solution = linprog(
            -objective,
            constraints,
            bounds,
            bounds=unbounded,
            method="highs",
            options=solver_options,
        )
        if solution.status != 0:  # the program reached its time limit or is unbounded
            break
        new_direction = unit(tangent_basis @ torch.from_numpy(solution.x))
        new_budget = _budget(models, x, new_direction)
        if not new_budget > best_budget * (1 + 1e-9):
            break
        best_direction, best_budget = new_direction, new_budget
    return best_direction


def _scaled_slopes(
    models: Sequence[nn.Module], x: Tensor, gradients: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the slopes of all switches at a sample, divided by the sample's distances from the switches.

    A switch is an activation boundary. Slopes are given in coordinates of the tangent space, which has the
    directions that keep the sample on its margin. If the sample moves along coordinates c, it reaches switch
    j after a distance of 1 / |row_j c|.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (*shape) a sample with d entries.
        gradients: (g, d) gradients of the sample's margins in x.

    Returns:
        The scaled slopes (J, t) of J switches, and the basis (d, t) of the tangent space.

    Raises:
        HypothesisError: If no direction keeps the sample on its margin.
    """
    switches, matrix = compute_switches(models, x[None]), compute_slope_matrix(models, x)
    slope_sizes = estimate_slope_sizes(models, x[None], switches.layers)[0]
    distances = switches.values[0].abs()
    _, sigma, rows = torch.linalg.svd(gradients.reshape(-1, x.numel()), full_matrices=True)
    gradient_rank = int((sigma > ROUNDING * sigma.max().clamp(min=1e-300)).sum())
    tangent_basis = rows[gradient_rank:].T
    if not tangent_basis.shape[1]:
        raise HypothesisError(
            "direction",
            "A split needs a direction that is orthogonal to the gradients of the margins in x; a sample "
            f"with {x.numel()} entries has none.",
            "Use a network with more inputs than outputs.",
        )
    is_moving = matrix.norm(dim=1) > ROUNDING * slope_sizes
    matrix, distances = matrix[is_moving], distances[is_moving]
    if not len(matrix):
        return matrix, tangent_basis
    relative_distances = distances / matrix.norm(dim=1)
    smallest_distance = (relative_distances.max() / DISTANCE_RATIO).clamp(min=1e-300)
    return (
        matrix / torch.maximum(distances, smallest_distance * matrix.norm(dim=1))[:, None]
    ) @ tangent_basis, tangent_basis


def _budget(models: Sequence[nn.Module], x: Tensor, nu: Tensor) -> float:
    return float(compute_exact_budgets(models, x[None], nu.reshape(x[None].shape)).least[0])


def _first_layer(model: nn.Module) -> Tensor:
    if (chain := dense_chain(model)) is None:
        raise HypothesisError(
            "subspace",
            "This direction needs a first layer that is connected to the full input; "
            f"{type(model).__name__} has none.",
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


# Each function returns (k, d) unit directions that keep the k samples x[indices] on their margins.
# Its argument ``gradients`` has shape (k, g, d) and holds the gradients of the margins of these samples in x.
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
SLOW = ("softest", "largest")  # rules that process one sample after the other and show progress
