"""Which candidates to split, along what, and how far (Shen et al. 2026, section 5).

Lanczos gives the least eigenpair of every splitting matrix S(x_i) at once. Several candidates split
in one round share one residual, so their gains do not add up: the steps are found jointly. Where f
has degree at most 3 in x the loss is exactly

    L(eta) = || r - 1/2 sum_i eta_i^2 f''(x_i)[v_i, v_i] ||_w^2

nonnegative least squares in eta_i^2; for one candidate eta^2 = -v'Sv / |f''[v, v]|_w^2 and the gain
is the share cos^2(r, f''[v, v]) of the loss. Elsewhere one line search along eta_i^2 ~ -v_i'S v_i,
the steepest descent in eta^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.attacks.curvature import Curvature, residuals
from residuum.attacks.problem import Problem
from residuum.theory.multipliers import factor_dense, solve

ITERATIONS = 20
HALVINGS = 14  # step lengths that a line search tries, each half of the one before
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Lowest:
    """values: (R, m) least eigenvalue of S(x_i); vectors: like x, unit length."""

    values: Tensor
    vectors: Tensor


def lowest_curvature(
    curvature: Curvature, start: Tensor, free: Tensor | None = None, iterations: int = ITERATIONS,
    workspace: int = 2**31,
) -> Lowest:  # fmt: skip
    """Least eigenpair of every S(x_i), candidates in chunks whose vectors fit the workspace.

    start: like x, random; free: like x, 1 where a coordinate may move both ways (inside the box).
    """
    x = curvature.x
    one = x.element_size() * len(x) * (iterations + 8) * x[0, 0].numel()
    equation = curvature.problem.explicit
    if equation is not None:
        one += 30 * x.element_size() * len(x) * sum(equation.widths[1:]) * len(equation.points)
    chunk = max(1, workspace // one)
    values, vectors = [], []
    for i in range(0, x.shape[1], chunk):
        rows = slice(i, min(i + chunk, x.shape[1]))
        mask = None if free is None else free[:, rows]

        def product(v: Tensor, rows: slice = rows, mask: Tensor | None = mask) -> Tensor:
            shaped = v.view_as(x[:, rows])
            if mask is None:
                return curvature.split(shaped, rows).flatten(2)
            return (curvature.split(shaped * mask, rows) * mask).flatten(2)

        first = start[:, rows] if mask is None else start[:, rows] * mask
        found = lanczos(product, first.flatten(2), iterations)
        values.append(found[0])
        vectors.append(found[1].view_as(x[:, rows]))
    return Lowest(torch.cat(values, 1), torch.cat(vectors, 1))


def lanczos(product: Product, start: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Least eigenvalues (...) and unit eigenvectors (..., d) of a batch of symmetric operators.

    start: (..., d). Every vector is orthogonalised twice against all before it. A space that is
    exhausted early goes on with zero vectors, whose diagonal entries are set above all others.
    """
    iterations = min(iterations, start.shape[-1])
    tiny = torch.finfo(start.dtype).eps ** 0.75
    q = start / start.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(start.dtype).tiny)
    basis = start.new_zeros(*start.shape[:-1], iterations, start.shape[-1])
    diagonal = start.new_zeros(*start.shape[:-1], iterations)
    off = torch.zeros_like(diagonal)
    scale = start.new_zeros(start.shape[:-1])
    for j in range(iterations):
        basis[..., j, :] = q
        w = product(q)
        diagonal[..., j] = (w * q).sum(-1)
        known = basis[..., : j + 1, :]
        for _ in range(2):
            w = w - ((known @ w[..., None]) * known).sum(-2)
        beta = w.norm(dim=-1)
        scale = torch.maximum(scale, torch.maximum(diagonal[..., j].abs(), beta))
        going = beta > tiny * scale
        off[..., j] = torch.where(going, beta, 0.0)
        q = torch.where(going[..., None], w / torch.where(going, beta, 1.0)[..., None], 0.0)
    dead = basis.square().sum(-1) < 0.5
    dead[..., 0] = False  # a start of zero: the value is 0 and its vector too
    diagonal = torch.where(dead, 4 * scale[..., None] + 1, diagonal)
    inner = off[..., : iterations - 1]
    matrix = torch.diag_embed(diagonal) + torch.diag_embed(inner, 1) + torch.diag_embed(inner, -1)
    values, vectors = torch.linalg.eigh(matrix)
    combined = (vectors[..., :, :1] * basis).sum(-2)
    length = combined.norm(dim=-1, keepdim=True)
    return values[..., 0], combined / torch.where(length > 0.5, length, 1.0)


def second_order(
    problem: Problem, x: Tensor, lam: Tensor, sharpness: float | Tensor, start: Tensor,
    iterations: int = 2 * ITERATIONS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(R,) |grad_x L| and lam_min(Hess_x L) of the equation's loss, Lanczos on the full Hessian."""
    gradient = problem.evaluate(x, lam, sharpness).grad_x.flatten(1).norm(dim=1)
    curvature = Curvature(problem, x, lam, sharpness)

    def product(v: Tensor) -> Tensor:
        return curvature.full(v.view_as(x)).flatten(1)

    return gradient, lanczos(product, start.flatten(1), iterations)[0]


@dataclass(frozen=True)
class JointStep:
    """eta: (R, m), 0 where a candidate stays whole; before, after: (R,) loss of the equation."""

    eta: Tensor
    before: Tensor
    after: Tensor


def joint_step(
    curvature: Curvature, v: Tensor, bend: Tensor, chosen: Tensor, longest: Tensor,
    exact: bool = False, clamp: Callable[[Tensor], Tensor] = lambda x: x,
) -> JointStep:  # fmt: skip
    """Step lengths of all chosen candidates together; a run whose loss would not fall stays as it is.

    bend: (R, m) v'Sv; chosen: (R, m); longest: (R,) bound on every eta; exact: f has degree <= 3.
    """
    x, lam, problem = curvature.x, curvature.lam, curvature.problem
    wanted = (-bend).clamp(min=0) * chosen
    if exact:
        base = torch.stack([_closed_form(curvature, run, v, chosen[run]) for run in range(len(x))])
        base = torch.minimum(base, longest[:, None])
    else:
        top = wanted.amax(1, keepdim=True)
        base = longest[:, None] * (wanted / torch.where(top > 0, top, 1.0)).sqrt()
    before = problem.evaluate(x, lam, curvature.sharpness).loss
    best, eta = before.clone(), torch.zeros_like(base)
    for halving in range(HALVINGS):
        trial = base / 2**halving
        pair = offspring(problem, x, lam, v, trial, clamp)
        loss = pair[2].evaluate(pair[0], pair[1], curvature.sharpness).loss
        better = (loss < best) & (trial > 0).any(1)
        best, eta = torch.where(better, loss, best), torch.where(better[:, None], trial, eta)
        if exact and bool((better | ~chosen.any(1)).all()):
            break  # the minimum itself; the rest would only be shorter
    return JointStep(eta, before, best)


def offspring(
    problem: Problem, x: Tensor, lam: Tensor, v: Tensor, eta: Tensor,
    clamp: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, Tensor, Problem]:  # fmt: skip
    """2m candidates: x + eta v, then x - eta v, half the multiplier each; 0 in place of no sibling."""
    moved = eta.view(*eta.shape, *[1] * (x.ndim - 2)) * v
    split = (eta > 0).view(*eta.shape, *[1] * (lam.ndim - 2))
    half = lam / 2
    labels = problem.labels.expand(len(x), -1)
    return (
        torch.cat([clamp(x + moved), clamp(x - moved)], 1),
        torch.cat([torch.where(split, half, lam), torch.where(split, half, 0.0)], 1),
        problem.with_labels(torch.cat([labels, labels], 1)),
    )


def _closed_form(curvature: Curvature, run: int, v: Tensor, chosen: Tensor) -> Tensor:
    """(m,) eta of one run by nonnegative least squares; f of degree <= 3.

    f''[v, v] = f(x + v) + f(x - v) - 2 f(x) exactly, each candidate taken as a run of its own.
    """
    eta, index = chosen.to(v.dtype) * 0, chosen.nonzero()[:, 0]
    if not len(index):
        return eta
    x, lam = curvature.x[run, index][:, None], curvature.lam[run, index][:, None]
    labels = curvature.problem.labels.expand(len(curvature.x), -1)[run, index][:, None]
    alone, step = curvature.problem.with_labels(labels), v[run, index][:, None]
    at = [residuals(alone, x + t * step, lam, curvature.sharpness) for t in (-1, 0, 1)]
    columns = -(at[0] + at[2] - 2 * at[1]) / 2
    here = slice(run, run + 1)
    own = curvature.problem.with_labels(curvature.problem.labels.expand(len(curvature.x), -1)[here])
    target = residuals(own, curvature.x[here], curvature.lam[here], curvature.sharpness)[0]
    squares = solve(factor_dense(columns.cpu().double(), target.cpu().double()), free=False)
    eta[index] = squares.clamp(min=0).sqrt().to(eta)
    return eta
