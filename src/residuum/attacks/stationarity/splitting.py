"""Which candidates to split, along what, and how far (Shen et al. 2026, section 5).

The splitting matrix is an operator:

    S(x_i) = -2 sum_p w_p r_p Hess_x f_p(x_i),     f(x_i) = grad_theta <u_i, Phi(theta; x_i)>

r = target - sum_i f(x_i) is held fixed, w are the layers' weights in the loss, and u_i carries the
multiplier lam_i, so that no factor lam_i is written. Splitting x_i into x_i +- eta v, half the
multiplier each, keeps the loss even in eta and changes it by

    eta^2 / 2 v'S v + O(eta^4)

so a direction of negative curvature of S lowers it, also where the Hessian of the loss, which is S
plus the square 2 |sum_i f'(x_i)[v_i]|^2, has none. Tied multipliers move with the candidates'
outputs inside f; which rivals count in a multiclass objective is held fixed.

x, v: (R, m, *shape); lam: (R, m, ...); the products are forward-mode derivatives of the engine's
gradient for MLPs, and automatic differentiation three times over for any other network.

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
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from residuum.attacks.stationarity.problem import Problem
from residuum.engine.explicit import Candidates
from residuum.networks import Polynomial
from residuum.theory.multipliers import factor_dense, solve

ITERATIONS = 20  # of Lanczos: a direction of negative curvature is wanted, not its last digits
HALVINGS = 14  # step lengths that a line search tries, each half of the one before
Product = Callable[[Tensor], Tensor]


class Curvature:
    """Products with S at one point (x, lam), for all candidates at once; r is computed here."""

    def __init__(self, problem: Problem, x: Tensor, lam: Tensor, sharpness: float | Tensor) -> None:
        self.problem, self.x, self.lam, self.sharpness = problem, x, lam, sharpness
        if (equation := problem.explicit) is None:
            self.residuals = [self._residual(run) for run in range(len(x))]
            return
        self.given = problem.objective, problem.activation(sharpness)
        with torch.no_grad():
            self.errors = equation.errors(problem.candidates(x, lam), *self.given)

    def split(self, v: Tensor, rows: slice = slice(None)) -> Tensor:
        """S(x_i) v_i for these candidates; v: like x[:, rows]."""
        if (equation := self.problem.explicit) is None:
            return torch.stack([self._split_generic(run, part, rows) for run, part in enumerate(v)])
        at = self.problem.candidates(self.x, self.lam)[rows]
        return _along(at, v, lambda dual: equation.pull(dual, self.errors, *self.given)[0])

    def slope(self, x: Tensor, lam: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient in x and values (R, k) of sum_p -2 w_p r_p f_p for NEW candidates, r fixed.

        labels: (R, k). A value is the derivative of the loss along the candidate's multipliers.
        """
        if (equation := self.problem.explicit) is None:
            each = enumerate(zip(x, lam, labels, strict=True))
            pairs = [self._slope_generic(run, *own) for run, own in each]
            return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
        at = self.problem.with_labels(labels).candidates(x, lam)
        with torch.no_grad():
            gradient, value = equation.pull(at, self.errors, *self.given)
        return gradient.view_as(x), value

    def full(self, v: Tensor) -> Tensor:
        """Hess_x L v, the whole Hessian of the loss: candidates influence each other through r."""
        if (equation := self.problem.explicit) is None:
            return torch.stack([self._full_generic(run, part) for run, part in enumerate(v)])
        at = self.problem.candidates(self.x, self.lam)
        return _along(at, v, lambda dual: equation.evaluate(dual, *self.given, False)[1])

    def _sum(self, run: int, x: Tensor, lam: Tensor, labels: Tensor) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for i, model in enumerate(self.problem.models(self.sharpness, run)):
            for name, term in self.problem.sum_of_gradients(model, i, x, lam, labels).items():
                total[name] = total[name] + term if name in total else term
        return total

    def _left(self, run: int, x: Tensor) -> dict[str, Tensor]:
        problem, models = self.problem, self.problem.models(self.sharpness, run)
        return problem.residual(models, x, self.lam[run].detach(), problem.labels_of(run))

    @torch.enable_grad()
    def _residual(self, run: int) -> dict[str, Tensor]:
        """-2 w r of one run by parameter name."""
        left = self._left(run, self.x[run].detach())
        weights = zip(self.problem.groups.values(), self.problem.layer_weights, strict=True)
        return {name: (-2 * w * left[name]).detach() for names, w in weights for name in names}

    @torch.enable_grad()
    def _slope_generic(
        self, run: int, x: Tensor, lam: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradient in x and per-candidate values of <-2 w r, f>; the values candidate by candidate."""
        xr = x.detach().requires_grad_()
        values = []
        for i in range(len(x)):
            total = self._sum(run, xr[i : i + 1], lam[i : i + 1].detach(), labels[i : i + 1])
            values.append(_inner(self.residuals[run], total))
        (gradient,) = torch.autograd.grad(torch.stack(values).sum(), xr)
        return gradient, torch.stack(values).detach()

    @torch.enable_grad()
    def _split_generic(self, run: int, v: Tensor, rows: slice) -> Tensor:
        xr = self.x[run, rows].detach().requires_grad_()
        total = self._sum(run, xr, self.lam[run, rows].detach(), self.problem.labels_of(run)[rows])
        return _product(_inner(self.residuals[run], total), xr, v)

    @torch.enable_grad()
    def _full_generic(self, run: int, v: Tensor) -> Tensor:
        xr = self.x[run].detach().requires_grad_()
        return _product(self.problem.squares(self._left(run, xr)) @ self.problem.weights, xr, v)


def residuals(problem: Problem, x: Tensor, lam: Tensor, sharpness: float | Tensor) -> Tensor:
    """(R, P) sqrt(w) r, so that the loss is the squared norm of a row (up to a constant outside)."""
    curvature = Curvature(problem, x, lam, sharpness)
    parts = []
    layers = zip(problem.groups.values(), problem.layer_weights, strict=True)
    for i, (names, w) in enumerate(layers):
        if w == 0:
            continue
        if problem.explicit is not None:
            error = curvature.errors[i]
            assert error is not None
            tensors = [t for t in error if t is not None]
        else:
            tensors = [torch.stack([r[n] for r in curvature.residuals]) for n in names]
        parts += [t.flatten(1) / (-2 * w**0.5) for t in tensors]
    return torch.cat(parts, 1)


def exact_degree(model: nn.Module) -> bool:
    """Whether f is a polynomial of degree at most 3 in x: then L is exactly quadratic in eta^2."""
    activation = getattr(model, "activation", None)
    one_layer = getattr(model, "hidden", 0) == 1
    return isinstance(activation, Polynomial) and activation.degree <= 3 and one_layer


def _product(value: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """Hessian of ``value`` in x times v; zero where x does not enter twice."""
    (gradient,) = torch.autograd.grad(value, x, create_graph=True, materialize_grads=True)
    if not gradient.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad(gradient, x, v, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


def _inner(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in b]).sum()


def _along(at: Candidates, v: Tensor, gradient: Callable[[Candidates], Tensor]) -> Tensor:
    """Derivative of a gradient in x along v, in forward mode."""
    # Gradients are enabled for the surrogate's own derivative rule; nothing requires any.
    with torch.enable_grad(), forward_ad.dual_level():
        dual = replace(at, x=forward_ad.make_dual(at.x, v.flatten(2)))
        tangent = forward_ad.unpack_dual(gradient(dual)).tangent
    return torch.zeros_like(v) if tangent is None else tangent.view_as(v)


@dataclass(frozen=True)
class Lowest:
    """values: (R, m) least eigenvalue of S(x_i); vectors: like x, unit length."""

    values: Tensor
    vectors: Tensor


def lowest_curvature(
    curvature: Curvature,
    start: Tensor,
    free: Tensor | None = None,
    iterations: int = ITERATIONS,
    workspace: int = 2**31,
) -> Lowest:
    """Least eigenpair of every S(x_i), candidates in chunks whose vectors fit the workspace.

    start: like x, random.
    free: like x, 1 where a coordinate may move both ways (inside the box).
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
        mask = x.new_ones(()) if free is None else free[:, rows]

        def product(v: Tensor, rows: slice = rows, mask: Tensor = mask) -> Tensor:
            return (curvature.split(v.view_as(x[:, rows]) * mask, rows) * mask).flatten(2)

        found = lanczos(product, (start[:, rows] * mask).flatten(2), iterations)
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
    problem: Problem,
    x: Tensor,
    lam: Tensor,
    sharpness: float | Tensor,
    start: Tensor,
    iterations: int = 2 * ITERATIONS,
) -> tuple[Tensor, Tensor]:
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
    curvature: Curvature,
    v: Tensor,
    bend: Tensor,
    chosen: Tensor,
    longest: Tensor,
    exact: bool = False,
    clamp: Callable[[Tensor], Tensor] = lambda x: x,
) -> JointStep:
    """Step lengths of all chosen candidates together; a run whose loss would not fall stays as it is.

    bend: (R, m) v'Sv.
    chosen: (R, m).
    longest: (R,) bound on every eta.
    exact: f has degree <= 3.
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
    problem: Problem,
    x: Tensor,
    lam: Tensor,
    v: Tensor,
    eta: Tensor,
    clamp: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, Tensor, Problem]:
    """2m candidates: x + eta v, then x - eta v, half the multiplier each; 0 in place of no sibling.

    Slots of all runs stay aligned, so that runs with different splits are evaluated in one batch.
    x, v: (R, m, *shape); eta: (R, m).
    """
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
    problem, labels = curvature.problem, curvature.problem.labels_of(run)
    alone, step = problem.with_labels(labels[index][:, None]), v[run, index][:, None]
    at = [residuals(alone, x + t * step, lam, curvature.sharpness) for t in (-1, 0, 1)]
    columns = -(at[0] + at[2] - 2 * at[1]) / 2
    own = problem.with_labels(labels[None]), curvature.x[run][None], curvature.lam[run][None]
    target = residuals(*own, curvature.sharpness)[0]
    squares = solve(factor_dense(columns.cpu().double(), target.cpu().double()), free=False)
    eta[index] = squares.clamp(min=0).sqrt().to(eta)
    return eta
