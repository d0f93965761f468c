"""Fit the KKT multipliers: the weights of the gradients whose sum is closest to the network's weights.

    lam = argmin_{lam >= 0} || theta - sum_r lam_r g_r ||

Here theta has the weights of the network, and g_r is the gradient of constraint r. For a regression, lam may
be negative. Let G be the Gram matrix of the gradients. If F^T F = G and F^T h = (<g_r, theta>)_r, the
multipliers also solve the small problem min ||F lam - h||. The matrix F comes from an eigendecomposition of
G. The condition number of G is the square of that of the gradients. If it exceeds 1e12 and the gradients fit
into memory, F comes from a QR factorization of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from residuum.errors import InconclusiveError

# Multipliers are fitted with the matrix of inner products of gradients. If its condition number exceeds
# this limit, they have fewer than four correct digits.
MAX_CONDITION = 1e12
# Number of steps of iterative refinement of fitted multipliers. Each step gives more correct digits.
REFINEMENTS = 2
DENSE_BYTES = 1 << 30  # largest size in bytes of a matrix of gradients for a QR factorization


@dataclass(frozen=True)
class Factor:
    """A small least-squares problem with the same solutions as the fit of R gradients to the weights.

    ||theta - sum_r lam_r g_r||^2 = ||F lam - h||^2 + const for all multipliers lam, with weights theta and
    gradients g_r.

    Attributes:
        matrix: The matrix F (k, R).
        target: The vector h (k,).
        condition: Condition number of the Gram matrix F^T F.
    """

    matrix: Tensor
    target: Tensor
    condition: float


def factor_gram(gram: Tensor, inner: Tensor) -> Factor:
    """Build the small least-squares problem of the multipliers from the Gram matrix of the gradients.

    The matrix F of the problem obeys F^T F = Gram matrix. Eigenvalues as small as rounding errors are
    dropped. If no neuron is active on a sample, its gradient is zero. F then has a zero column, so that
    column r of F always belongs to gradient r.

    Args:
        gram: (R, R) Gram matrix of the gradients.
        inner: (R,) inner products of the gradients with the weights.

    Returns:
        The small least-squares problem.

    Raises:
        InconclusiveError: If all gradients are zero.
    """
    eigenvalues, eigenvectors = torch.linalg.eigh((gram + gram.T) / 2)
    largest_eigenvalue = float(eigenvalues[-1])
    if not np.isfinite(largest_eigenvalue) or largest_eigenvalue <= 0:
        raise InconclusiveError(
            "The gradient of the network must not be zero at all samples; it is zero, because no neuron "
            "is active on the samples.",
            "Check the preprocessing of the data.",
        )
    smallest_eigenvalue = float(eigenvalues[0])
    # The Gram matrix is G = V diag(s) V'. So F = diag(sqrt(s)) V' obeys F' F = G, and h = diag(1 / sqrt(s))
    # V' inner obeys F' h = inner.
    is_kept = eigenvalues > 1e-14 * largest_eigenvalue
    root_eigenvalues = eigenvalues[is_kept].sqrt()
    # The columns of zero gradients are set to zero exactly. Otherwise their rounding errors would lead to
    # huge multipliers.
    factor_matrix = (
        root_eigenvalues[:, None]
        * eigenvectors[:, is_kept].T
        * (gram.diagonal() > 1e-14 * largest_eigenvalue)
    )
    factor_target = (eigenvectors[:, is_kept].T @ inner) / root_eigenvalues
    return Factor(
        factor_matrix,
        factor_target,
        largest_eigenvalue / smallest_eigenvalue if smallest_eigenvalue > 0 else float("inf"),
    )


def factor_dense(gradients: Tensor, theta: Tensor) -> Factor:
    """Build the small least-squares problem of the multipliers by a QR factorization of the gradients.

    This factorization does not square the condition number, unlike the Gram matrix.

    Args:
        gradients: (R, P) gradients with respect to the P weights.
        theta: (P,) weights.

    Returns:
        The small least-squares problem.
    """
    orthonormal_basis, matrix = torch.linalg.qr(gradients.T)
    singular_values = torch.linalg.svdvals(matrix)
    condition = (
        float(singular_values[0] / singular_values[-1]) ** 2
        if singular_values[-1] > 0
        else float("inf")
    )
    return Factor(matrix, orthonormal_basis.T @ theta, condition)


def solve(factor: Factor, free: bool) -> Tensor:
    """Compute the multipliers with which a weighted sum of gradients fits the network's weights best.

    Gradients can be linearly dependent, for example those of several constraints of one sample. Then many
    multipliers fit the weights equally well. If the least-squares solution of smallest norm has no negative
    entry, this solution is returned, because it is unique. Otherwise active-set nonnegative least squares
    returns one of the best solutions.

    Args:
        factor: The least-squares problem of the multipliers.
        free: Whether multipliers may be negative.

    Returns:
        (R,) multipliers.
    """
    solution = torch.linalg.lstsq(
        factor.matrix, factor.target[:, None], rcond=1e-13, driver="gelsd"
    ).solution[:, 0]
    if free or bool((solution >= -1e-12 * solution.abs().max()).all()):
        return solution if free else solution.clamp(min=0)
    from scipy.optimize import nnls

    multiplier_count = factor.matrix.shape[1]
    nonnegative, _ = nnls(
        factor.matrix.numpy(), factor.target.numpy(), maxiter=30 * multiplier_count
    )
    return torch.from_numpy(nonnegative)


def refine(lam: Tensor, gram: Tensor, correlate: Callable[[Tensor], Tensor], free: bool) -> Tensor:
    """Improve the accuracy of fitted multipliers (weights of gradients) by iterative refinement.

    Multipliers that solve the normal equations have a relative error of about the machine precision times the
    condition number of the Gram matrix. Each refinement step computes the residual (weights minus weighted
    sum of gradients) without the Gram matrix. It then fits a correction of the positive multipliers to this
    residual, which gives more correct digits.

    Args:
        lam: (R,) multipliers.
        gram: (R, R) Gram matrix of the gradients.
        correlate: Function from multipliers to the (R,) inner products of the gradients with the residual.
        free: Whether multipliers may be negative. If not, negative results are set to zero.

    Returns:
        (R,) refined multipliers.
    """
    is_adjustable = torch.ones_like(lam, dtype=torch.bool) if free else lam > 0
    if not is_adjustable.any():
        return lam
    adjustable_gram = gram[is_adjustable][:, is_adjustable]
    for _ in range(REFINEMENTS):
        correction = torch.linalg.lstsq(
            adjustable_gram, correlate(lam)[is_adjustable][:, None], rcond=1e-13, driver="gelsd"
        ).solution
        lam = lam.clone()
        lam[is_adjustable] += correction[:, 0]
        if not free:
            lam.clamp_(min=0)
    return lam
