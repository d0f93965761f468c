"""KKT multipliers: the nonnegative (or free) lam that explains theta best.

    lam = argmin_{lam >= 0} || theta - sum_r lam_r g_r ||

With F^T F = G the Gram matrix of the g_r and F^T h = (<g_r, theta>)_r this is the small problem
min ||F lam - h||, whose F comes from an eigendecomposition of G. G squares the condition number, so
above 1e12 the factor is taken from a QR of the dense gradients instead, where they fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from residuum.errors import InconclusiveError

MAX_CONDITION = 1e12  # of the Gram matrix: above, fewer than four digits of lam are left
REFINEMENTS = 2  # steps, each of which regains digits
DENSE_BYTES = 1 << 30  # of the dense gradients that a QR may hold


@dataclass(frozen=True)
class Factor:
    """F: (k, R) and h: (k,) with ||theta - sum lam_r g_r||^2 = ||F lam - h||^2 + const.

    matrix: F; target: h.
    condition: of the Gram matrix, the square of that of F.
    """

    matrix: Tensor
    target: Tensor
    condition: float


def factor_gram(gram: Tensor, inner: Tensor) -> Factor:
    """From G (R, R) and <g_r, theta> (R,): eigenvalues and rows below rounding are dropped.

    Columns of G that are zero belong to samples on which no neuron is active; the factor keeps a zero column
    for each, so that multipliers stay numbered as the rows are.
    """
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    top = float(values[-1])
    if not np.isfinite(top) or top <= 0:
        raise InconclusiveError(
            "Every sample's gradient is zero: no neuron is active on the data.",
            "The network is dead on these samples; check the data's preprocessing.",
        )
    lowest = float(values[0])
    # G = V diag(values) V': F = diag(sqrt) V' and h = diag(1/sqrt) V'<g, theta> over what is not rounding.
    keep = values > 1e-14 * top
    root = values[keep].sqrt()
    # Rounding in the column of a dead row would pass for a gradient, to be met by a huge multiplier.
    matrix = root[:, None] * vectors[:, keep].T * (gram.diagonal() > 1e-14 * top)
    target = (vectors[:, keep].T @ inner) / root
    return Factor(matrix, target, top / lowest if lowest > 0 else float("inf"))


def factor_dense(gradients: Tensor, theta: Tensor) -> Factor:
    """From the dense gradients (R, P) and theta (P,): QR, no squaring of the condition number."""
    q, matrix = torch.linalg.qr(gradients.T)
    spread = torch.linalg.svdvals(matrix)
    condition = float(spread[0] / spread[-1]) ** 2 if spread[-1] > 0 else float("inf")
    return Factor(matrix, q.T @ theta, condition)


def solve(factor: Factor, free: bool) -> Tensor:
    """(R,) multipliers, nonnegative unless ``free``.

    Rows can be dependent (tied rivals are), and then many multipliers explain theta equally well.
    The smallest least-squares solution is taken where it is feasible, which makes the answer unique;
    otherwise active-set NNLS gives one of the best.
    """
    least = torch.linalg.lstsq(
        factor.matrix, factor.target[:, None], rcond=1e-13, driver="gelsd"
    ).solution[:, 0]
    if free or bool((least >= -1e-12 * least.abs().max()).all()):
        return least if free else least.clamp(min=0)
    from scipy.optimize import nnls

    rows = factor.matrix.shape[1]
    solution, _ = nnls(factor.matrix.numpy(), factor.target.numpy(), maxiter=30 * rows)
    return torch.from_numpy(solution)


def refine(lam: Tensor, gram: Tensor, correlate: Callable[[Tensor], Tensor], free: bool) -> Tensor:
    """Iterative refinement on the support: G_SS d = <g_S, r(lam)>, with r computed explicitly.

    correlate(lam) returns <g_r, r(lam)> for all rows. The normal equations limit lam to
    eps * cond(G); each step with an explicit residual regains digits. A step that leaves lam >= 0
    is cut back to it.
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
