"""Directions along which a sample can be split.

A split replaces a sample x_i by its two halves x_i + nu and x_i - nu. Both halves must keep the activation
pattern of x_i, i.e. the signs of all switches s_k. A switch is for example the input of a ReLU. The smaller
the slopes <grad s_k, nu> are, the longer nu can be. The following rules choose nu:

    data       last left singular vector of the d x n data matrix: the largest component
               max_i |<x_i, nu>| lies between sigma_d / sqrt(n) and sigma_d, the smallest singular
               value of this matrix (Refael et al. 2025, Theorem 15)
    weights    last right singular vector of the first layer: outputs hardly depend on this direction
    tangent    a random direction
    softest    argmin_nu || diag(1/|s|) G nu ||, where G (K, d) has the gradients of the K switches at x_i,
               and s has their values
    largest    max ||z|| s.t. |<grad s_k, z>| <= |s_k|, by several linear programs. The first program
               maximizes <z, nu> for the direction nu of "softest". Each further program takes the solution
               of the previous program as nu, so the length ||z|| grows from program to program.

Each direction is made orthogonal to grad_x Phi(x_i), so that the margins of both halves do not change.
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

# The rule "largest", which searches for the direction of the longest move, solves at most this number of
# linear programs. Each program improves the solution of the program before.
MAX_ROUNDS = 4
# Time limit of a linear program in seconds. With over a thousand neurons, a program would take minutes.
PROGRAM_SECONDS = 30.0
# The rule "softest" divides by the distances of a sample from activation boundaries. Distances are set to
# at least the largest distance divided by this number, because others would give huge quotients.
DISTANCE_RATIO = 1e6


def find_data_direction(x: Tensor) -> tuple[Tensor, float, float]:
    """Return the unit direction along which samples have the smallest components.

    Args:
        x: (n, ...) samples with d entries each.

    Returns:
        The direction (d,), the smallest singular value of the data matrix (0 if the samples span fewer than d
        dimensions), and the largest component of a sample along the direction.
    """
    flat_samples = x.flatten(1).double()
    direction, smallest_singular_value = _find_last_singular_vector(flat_samples)
    return direction, smallest_singular_value, float((flat_samples @ direction).abs().max())


def find_weight_direction(model: nn.Module) -> tuple[Tensor, float]:
    """Return the unit direction of input space on which the first layer of an MLP depends least.

    Args:
        model: The network, with d inputs.

    Returns:
        The direction (d,) and the smallest singular value of the first layer. The value is 0 if the neurons
        span fewer than d dimensions.
    """
    return _find_last_singular_vector(_first_layer(model))


def _find_last_singular_vector(matrix: Tensor) -> tuple[Tensor, float]:
    """Return the unit vector whose product with a matrix is smallest, and the norm of this product.

    The vector is the last right singular vector of the matrix. If the rows of the matrix span fewer
    dimensions than it has columns, the norm is 0.
    """
    _, sigma, vectors = torch.linalg.svd(matrix, full_matrices=True)
    return vectors[-1], float(sigma[-1]) if len(sigma) == matrix.shape[1] else 0.0


def find_hidden_basis(models: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return the directions of input space that are orthogonal to all weights of the first layer.

    If a sample moves along such a direction, the outputs of the network do not change. So the sample can move
    without limit and keeps its margins. Directions along which the samples have small components come first.
    If there are several copies of the network, the directions are orthogonal to the first layers of all
    copies.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (n, *shape) samples.

    Returns:
        (d, k) orthonormal directions.
    """
    first_layers = torch.cat([_first_layer(model) for model in models])
    _, sigma, rows = torch.linalg.svd(first_layers, full_matrices=True)
    weight_rank = int((sigma > 10 * ROUNDING * sigma[0]).sum())
    null_space_basis = rows[weight_rank:].T
    if not null_space_basis.shape[1]:
        return null_space_basis
    _, _, sorted_directions = torch.linalg.svd(x.flatten(1) @ null_space_basis, full_matrices=True)
    # The singular vectors are sorted by the size of the samples' components along them, largest first. The
    # order is reversed, so that directions with small components come first.
    hidden_basis = null_space_basis @ sorted_directions.T.flip(1)
    # A second projection removes the rounding errors of the first, which a long split would multiply.
    for _ in range(2):
        hidden_basis = hidden_basis - rows[:weight_rank].T @ (rows[:weight_rank] @ hidden_basis)
        hidden_basis = hidden_basis / hidden_basis.norm(dim=0)
    return hidden_basis


def project_onto_margin(direction: Tensor, gradients: Tensor) -> Tensor:
    """Make a direction orthogonal to the gradients of a sample's margins, and scale it to length 1.

    The halves x +- nu of a split have the same margins as the sample x only if nu is orthogonal to the
    gradients of these margins. A second projection removes the rounding errors of the first, which a long
    split would multiply.

    Args:
        direction: (d,) a direction.
        gradients: (g, d) gradients of the margins with respect to x.

    Returns:
        (d,) unit direction.

    Raises:
        HypothesisError: If the direction is a linear combination of the gradients.
    """
    projected = unit(direction)
    _, singular_values, right_vectors = torch.linalg.svd(
        gradients.reshape(-1, projected.numel()), full_matrices=False
    )
    is_nonzero_value = singular_values > ROUNDING * singular_values.max().clamp(min=1e-300)
    gradient_basis = right_vectors[is_nonzero_value]
    for _ in range(2):
        projected = projected - gradient_basis.T @ (gradient_basis @ projected)
    if float(projected.norm()) <= 1e-8:
        raise HypothesisError(
            "The direction in which a sample is split in two must not be a combination of the gradients "
            "of its margins; this direction is one, so every split along it would change a margin.",
            "Pass a direction that is returned by KKTSet.directions().",
            hypothesis="direction",
        )
    return unit(projected)


def find_softest_direction(models: Sequence[nn.Module], x: Tensor, gradients: Tensor) -> Tensor:
    """Return the direction along which a sample keeps its margins and nearby switches change least.

    A switch is a function whose sign belongs to the activation pattern, for example the input of a ReLU. The
    direction minimizes the sum of (slope / distance)^2 over all switches, where distance is how far the
    switch is from zero. The direction is not optimal. The length of a split is limited by a single switch
    (the first that changes sign) and not by this sum.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (*shape) a sample with d entries.
        gradients: (g, d) gradients of the sample's margins with respect to the sample.

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
    """Return a direction along which a sample can move far forwards and backwards in its activation pattern.

    The search starts from the direction of :func:`find_softest_direction`. Linear programs improve this
    direction one after the other. The search ends if a program finds no direction with a longer distance. The
    result is a local maximum of the distance, because the maximum length over a polytope has many local
    solutions.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (*shape) a sample with d entries.
        gradients: (g, d) gradients of the sample's margins with respect to the sample.

    Returns:
        (d,) unit direction.
    """
    from scipy.optimize import linprog

    scaled, tangent_basis = _scaled_slopes(models, x, gradients)
    best_direction = _softest(scaled, tangent_basis)
    longest_distance = _budget(models, x, best_direction)
    if not len(scaled) or not np.isfinite(longest_distance):
        return best_direction
    scaled_slopes = scaled.numpy()
    constraints = np.concatenate([scaled_slopes, -scaled_slopes])
    for _ in range(MAX_ROUNDS):
        objective = (best_direction @ tangent_basis).numpy()
        solver_options = {"time_limit": PROGRAM_SECONDS}
        unbounded, upper_limits = (None, None), np.ones(len(constraints))
        solution = linprog(
            -objective,
            constraints,
            upper_limits,
            bounds=unbounded,
            method="highs",
            options=solver_options,
        )
        # If the linear program is unbounded or reached its time limit, the best direction so far is returned.
        if solution.status != 0:
            break
        new_direction = unit(tangent_basis @ torch.from_numpy(solution.x))
        new_distance = _budget(models, x, new_direction)
        if not new_distance > longest_distance * (1 + 1e-9):
            break
        best_direction, longest_distance = new_direction, new_distance
    return best_direction


def _scaled_slopes(
    models: Sequence[nn.Module], x: Tensor, gradients: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of all switches at a sample, each divided by the absolute value of the switch.

    A switch is a function whose sign belongs to the activation pattern, for example the input of a ReLU. Only
    directions along which the sample's margins do not change are allowed. They form the tangent space, and
    the gradients are expressed in coordinates of a basis of this space. If the coordinates of a move are c,
    the product of row j with c is the relative change of switch j. A switch can change its sign if this
    relative change is 1 or more in absolute value.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (*shape) a sample with d entries.
        gradients: (g, d) gradients of the sample's margins with respect to the sample.

    Returns:
        The scaled slopes (J, t) of J switches, and the basis (d, t) of the tangent space.

    Raises:
        HypothesisError: If no direction keeps the sample on its margin.
    """
    switches, matrix = compute_switches(models, x[None]), compute_slope_matrix(models, x)
    largest_slopes = estimate_slope_sizes(models, x[None], switches.layers)[0]
    distances = switches.values[0].abs()
    _, sigma, rows = torch.linalg.svd(gradients.reshape(-1, x.numel()), full_matrices=True)
    gradient_rank = int((sigma > ROUNDING * sigma.max().clamp(min=1e-300)).sum())
    tangent_basis = rows[gradient_rank:].T
    if not tangent_basis.shape[1]:
        raise HypothesisError(
            f"A sample can be split in two only along a direction that is orthogonal to the gradients of "
            f"its margins; for this sample with {x.numel()} values, no such direction exists.",
            "Use a network with more inputs than outputs.",
            hypothesis="direction",
        )
    has_slope = matrix.norm(dim=1) > ROUNDING * largest_slopes
    matrix, distances = matrix[has_slope], distances[has_slope]
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
            "The direction 'weights' and the method KKTSet.far_set() need a network that consists of "
            f"dense layers; got {type(model).__name__}.",
            "Pass the direction 'softest'.",
            hypothesis="subspace",
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
        samples_with_gradients = zip(indices.tolist(), gradients, strict=True)
        return torch.stack(
            [
                find_direction(models, x[i], sample_gradients)
                for i, sample_gradients in samples_with_gradients
            ]
        )

    return finder


# Rules that choose the direction of a split, by name. Each rule is a function that returns (k, d) unit
# directions, along which the margins of the k samples x[indices] do not change. The argument ``gradients``
# (k, g, d) has the gradients of these margins with respect to the samples.
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
# Rules that are slow, because they process one sample after the other, and therefore show progress.
SLOW = ("softest", "largest")
