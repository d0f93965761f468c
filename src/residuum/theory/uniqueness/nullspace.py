"""Counting the null space of the linearised system, undoubled and doubled.

With u_i / 2 on both copies (x_i + a_i, x_i + b_i; multipliers lam/2 + s, lam/2 + t) the linearised
residual depends on a + b and s + t alone. Hence, for m candidates and R multipliers,

    dim null(doubled) = (m d + R) + dim null(undoubled),

and of the m d + R antisymmetric directions R only move multiplier between equal copies (``twins``),
m d move two copies against each other (``pairs``): m rank(W1) of them inside row(W1).

    dense    singular values of the whole Jacobian J
    block    LOBPCG on J^T J from random blocks, orthogonal to what is found already; a direction
             counts when its own ||J v|| is verified, and blocks follow until one brings another kind
    layers   MLPs too large for both: the first layer's part of J v is D^T dX + S^T diag(dlam) X,
             and S^T dlam in its bias (D, S: backward signals of candidates and rows). So v = 0 where
             D and S have full row rank; otherwise (m - rank D) (d - rank W1) <= dim null <=
             (m - rank D) d + R - rank S.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lobpcg
from torch import Tensor, nn
from torch.func import vmap

from residuum.networks import dense_chain
from residuum.records.certificate import NullSpace
from residuum.stationarity import parameters
from residuum.theory.uniqueness.system import System

NULL = 1e-10  # of the largest singular value: what is smaller counts as zero
BLOCK_NULL = 1e-7  # J^T J has half the digits
DENSE_UNKNOWNS, DENSE_ENTRIES = 3000, 5 * 10**7
BLOCK, BLOCK_MOST = 8, 400
Product = Callable[[Tensor], Tensor]
Array = np.ndarray[Any, Any]


def null_space(
    system: System, row_rank: int, patterns: int, method: str = "auto", seed: int = 0
) -> NullSpace:
    """The dimensions; row_rank: of W1."""
    least, most, change = 0, 0, None
    method = choose_method(system.model, system.unknowns) if method == "auto" else method
    if method == "dense":
        least, change = dense_null(system)
        most = least
    elif method == "block":
        least, change, complete = block_null(system, seed)
        most = least if complete else system.unknowns
    else:
        least, most = layer_bounds(system, row_rank)
    m, twins = len(system.x), len(system.lam)
    d = system.x[0].numel()
    pairs = m * d
    return NullSpace(
        unknowns=system.unknowns,
        undoubled=least,
        undoubled_most=most,
        doubled=pairs + twins + least,
        doubled_most=pairs + twins + most,
        twins=twins,
        pairs_inside=m * row_rank,
        pairs_outside=m * (d - row_rank),
        patterns=patterns,
        method=method,
        change=change,
    )


def dense_jacobian(system: System) -> Tensor:
    """(P, m d + R), one forward-mode pass per column."""
    forward, _ = system.products()
    eye = torch.eye(system.unknowns, dtype=system.x.dtype, device=system.x.device)
    return vmap(forward, chunk_size=64)(eye).T


def dense_null(system: System) -> tuple[int, float]:
    """Dimension by singular values, and the largest of those counted over ||J||."""
    values = torch.linalg.svdvals(dense_jacobian(system))
    top = float(values[0]) if len(values) else 0.0
    zero = values <= NULL * top
    missing = system.unknowns - len(values)
    return missing + int(zero.sum()), float(values[zero].max()) / top if zero.any() and top else 0.0


def block_null(system: System, seed: int = 0) -> tuple[int, float, bool]:
    """Verified dimension, largest ||J v|| / ||J|| counted, and whether the count is complete."""
    forward, backward = system.products()
    n, top = system.unknowns, _largest(forward, backward, system, seed)
    rng = np.random.default_rng(seed)

    def normal(block: Array) -> Array:
        v = torch.from_numpy(np.ascontiguousarray(block.reshape(n, -1).T)).to(system.x)
        found = vmap(lambda w: backward(forward(w)) / top**2, chunk_size=32)(v)
        return found.T.cpu().numpy().reshape(block.shape)

    operator = LinearOperator((n, n), matvec=normal, matmat=normal, dtype=float)
    null = torch.zeros(n, 0, dtype=torch.float64)
    while True:
        size = min(BLOCK, (n - null.shape[1]) // 5)  # what LOBPCG needs
        if null.shape[1] >= BLOCK_MOST or not size:
            break
        start = rng.standard_normal((n, size))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own verdict on convergence: ours is ||J v|| below
            vectors = lobpcg(operator, start, Y=null.numpy() if null.shape[1] else None,
                             largest=False, tol=1e-9, maxiter=200)[1]  # fmt: skip
        fresh = torch.from_numpy(np.ascontiguousarray(vectors))
        fresh = torch.linalg.qr(fresh - null @ (null.T @ fresh))[0]
        image = vmap(forward, chunk_size=32)(fresh.T.to(system.x)).cpu() / top
        turn, values, _ = torch.linalg.svd(image, full_matrices=False)
        zero = values <= BLOCK_NULL
        null = torch.cat([null, fresh @ turn[:, zero]], 1)
        if not zero.all():
            return null.shape[1], _verified(forward, null.to(system.x), top), True
    return null.shape[1], _verified(forward, null.to(system.x), top), False


def _verified(forward: Product, null: Tensor, top: float) -> float:
    """The largest ||J v|| / ||J|| over all unit v in the span of the orthonormal columns."""
    if not null.shape[1]:
        return 0.0
    return float(torch.linalg.matrix_norm(vmap(forward, chunk_size=32)(null.T), 2)) / top


def layer_bounds(system: System, row_rank: int) -> tuple[int, int]:
    """Bounds from the first layer of an MLP."""
    model = dense_chain(system.model)
    assert model is not None
    trace = model.trace(system.x)
    d, m = system.x[0].numel(), len(system.x)
    free = m - _rank(model.signals(trace, system.u)[0])
    if model.linears[0].bias is None:
        return free * (d - row_rank), free * d + len(system.lam)
    weighted = system.rows.covectors * system.lam[:, None]
    rows = model.signals(trace, weighted, system.rows.index)[0]
    return free * (d - row_rank), free * d + len(rows) - _rank(rows)


def row_space(system: System) -> Tensor:
    """(rank, d) orthonormal basis of row(W1); of the input space where there is no first layer."""
    chain = dense_chain(system.model)
    if chain is None:
        d = system.x[0].numel()
        return torch.eye(d, dtype=system.x.dtype, device=system.x.device)
    weight = chain.linears[0].weight.detach()
    _, values, rows = torch.linalg.svd(weight, full_matrices=False)
    return rows[values > NULL * values[0]] if float(values[0]) > 0 else rows[:0]


def choose_method(model: nn.Module, unknowns: int) -> str:
    """dense where the Jacobian fits; the others where it does not."""
    size = sum(t.numel() for t in parameters(model).values())
    if unknowns <= DENSE_UNKNOWNS and unknowns * size <= DENSE_ENTRIES:
        return "dense"
    return "block" if dense_chain(model) is None else "layers"


def _largest(forward: Product, backward: Product, system: System, seed: int) -> float:
    """||J|| by power iteration: a scale, needed to a few per cent."""
    rng = torch.Generator().manual_seed(seed)
    v = torch.randn(system.unknowns, generator=rng, dtype=torch.float64).to(system.x)
    for _ in range(20):
        v = backward(forward(v / v.norm()))
    return float(v.norm()) ** 0.5


def _rank(matrix: Tensor) -> int:
    values = torch.linalg.svdvals(matrix.detach())
    return int((values > NULL * values[0]).sum()) if len(values) and float(values[0]) > 0 else 0
