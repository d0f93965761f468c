"""KKT multipliers: the nonnegative (or free) lam that fits theta best.

    lam = argmin_{lam >= 0} || theta - sum_r lam_r g_r ||

Let F^T F = G be the Gram matrix of the g_r, and F^T h = (<g_r, theta>)_r. Then this is the small problem
min ||F lam - h||, where F comes from an eigendecomposition of G. G squares the condition number. So above
1e12 the factor is computed from a QR factorization of the dense gradients, if they fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from residuum.errors import InconclusiveError

MAX_CONDITION = 1e12  # of the Gram matrix: above it, lam has fewer than four correct digits
REFINEMENTS = 2  # steps, each of which gains digits
DENSE_BYTES = 1 << 30  # maximum size of dense gradients for a QR factorization


@dataclass(frozen=True)
class Factor:
    """F (k, R) and h (k,) with ||theta - sum lam_r g_r||^2 = ||F lam - h||^2 + const.

    Attributes:
        matrix: F.
        target: h.
        condition: Condition number of the Gram matrix, the square of that of F.
    """

    matrix: Tensor
    target: Tensor
    condition: float


def factor_gram(gram: Tensor, inner: Tensor) -> Factor:
    """Factorize the Gram matrix.

    Eigenvalues and rows below rounding are dropped. Columns of G that are zero belong to samples on which no
    neuron is active. The factor has a zero column for each, so that multipliers are numbered like the rows.

    Args:
        gram: G (R, R).
        inner: (R,) products <g_r, theta>.

    Returns:
        The factor.

    Raises:
        InconclusiveError: If all gradients are zero.
    """
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    top = float(values[-1])
    if not np.isfinite(top) or top <= 0:
        raise InconclusiveError(
            "The gradients of all samples are zero, because no neuron is active on them.",
            "Check the preprocessing of the data.",
        )
    lowest = float(values[0])
    # G = V diag(values) V': F = diag(sqrt) V' and h = diag(1/sqrt) V'<g, theta>, without rounding errors.
    keep = values > 1e-14 * top
    root = values[keep].sqrt()
    # Rounding errors in the column of a dead row would look like a gradient with a huge multiplier.
    matrix = root[:, None] * vectors[:, keep].T * (gram.diagonal() > 1e-14 * top)
    target = (vectors[:, keep].T @ inner) / root
    return Factor(matrix, target, top / lowest if lowest > 0 else float("inf"))


def factor_dense(gradients: Tensor, theta: Tensor) -> Factor:
    """Factorize the dense gradients by QR, which does not square the condition number.

    Args:
        gradients: (R, P) gradients.
        theta: (P,) parameters.

    Returns:
        The factor.
    """
    q, matrix = torch.linalg.qr(gradients.T)
    singular_values = torch.linalg.svdvals(matrix)
    condition = (
        float(singular_values[0] / singular_values[-1]) ** 2
        if singular_values[-1] > 0
        else float("inf")
    )
    return Factor(matrix, q.T @ theta, condition)


def solve(factor: Factor, free: bool) -> Tensor:
    """Return the best multipliers.

    Rows can be dependent (tied rivals are), and then many multipliers fit theta equally well. If the smallest
    least-squares solution is feasible, it is returned, which makes the result unique. Otherwise active-set
    NNLS gives one of the best solutions.

    Args:
        factor: The factor of the problem.
        free: Multipliers may be negative.

    Returns:
        (R,) multipliers.
    """
    solution = torch.linalg.lstsq(
        factor.matrix, factor.target[:, None], rcond=1e-13, driver="gelsd"
    ).solution[:, 0]
    if free or bool((solution >= -1e-12 * solution.abs().max()).all()):
        return solution if free else solution.clamp(min=0)
    from scipy.optimize import nnls

    rows = factor.matrix.shape[1]
    nonnegative, _ = nnls(factor.matrix.numpy(), factor.target.numpy(), maxiter=30 * rows)
    return torch.from_numpy(nonnegative)


def refine(lam: Tensor, gram: Tensor, correlate: Callable[[Tensor], Tensor], free: bool) -> Tensor:
    """Refine multipliers iteratively on their support: G_SS d = <g_S, r(lam)>, with explicit r.

    The normal equations limit the accuracy of lam to eps * cond(G). Each step with an explicit residual gains
    digits. Steps are clipped to lam >= 0.

    Args:
        lam: (R,) multipliers.
        gram: G (R, R).
        correlate: Function from lam to <g_r, r(lam)> for all rows.
        free: Multipliers may be negative.

    Returns:
        (R,) multipliers.
    """
    support = torch.ones_like(lam, dtype=torch.bool) if free else lam > 0
    if not support.any():
        return lam
    block = gram[support][:, support]
    for _ in range(REFINEMENTS):
        step = torch.linalg.lstsq(
            block, correlate(lam)[support][:, None], rcond=1e-13, driver="gelsd"
        ).solution
        lam = lam.clone()
        lam[support] += step[:, 0]
        if not free:
            lam.clamp_(min=0)
    return lam
