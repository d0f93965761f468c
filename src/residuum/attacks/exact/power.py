"""Samples from fewer or noisier neurons than the rank condition asks for: power iteration, growth.

f is known at unit neurons Z_j and is a gradient: p(w) = <w, f(w)> = sum_i b_i (w.x_i)^alpha has
grad p = alpha f. The form of least norm with the known gradients keeps that symmetry:

    p(w) = sum_j (Z_j.w)^(alpha-1) (c_j.w),        sum_q K_pq c_q = f(Z_p)
    K_pq = ((Z_p.Z_q)^(alpha-1) I + (alpha-1) (Z_p.Z_q)^(alpha-2) Z_q Z_p^T) / alpha

Power iteration w <- +-f(w) climbs |p| towards spectrally isolated samples. The best end point is
added with weight p(w), all samples found so far are refined together by Levenberg-Marquardt on the
stationarity equations (g_i = |b_i|^(1/alpha) x_i, s_i = sign b_i, row j as large as its neuron)

    sizes_j (f(Z_j) - sum_i s_i (Z_j.g_i)^(alpha-1) g_i) = 0

and what they leave over is the form in which the next one is looked for: deflation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.theory.polynomial import Interpolant

STARTS, CLIMB = 48, 100  # random directions side by side, and power steps of each
SHIFT = 0.3  # of the last direction kept in a step: without it an even form makes them oscillate
INNER, FINAL = 15, 100  # Levenberg-Marquardt steps after every sample, and at the end
RESTARTS, CHEAP = (
    8,
    1 / 16,
)  # growths tried again while they take less of the budget than this share
SOLVED = 1e-10  # relative misfit that is rounding
FITTED, SAME = (
    1e-2,
    10.0,
)  # misfit that counts as an explanation; factor up to which two are as good
PROGRESS = 1e-3  # a sample that lowers the misfit by a smaller share adds nothing
BUDGET = 2.0**36  # multiplications of one growth: seconds
KERNEL_SIDE = 1500  # unknowns c above which the kernel is not factorized
RANK_TOLERANCE = 1e-10  # of the kernel's largest eigenvalue


@dataclass(frozen=True)
class Grown:
    """Samples x: (k, r) unit rows with weights b: (k,); misfit: relative, over all equations.

    equations: independent ones among the m r, None where too many to tell.
    unknowns: k r.
    complete: whether it ended before its budget did.
    """

    x: Tensor
    b: Tensor
    misfit: float
    equations: int | None
    unknowns: int
    complete: bool


@dataclass(frozen=True)
class Form:
    """p of the least norm. directions Z, coefficients c: (m, r)."""

    directions: Tensor
    coefficients: Tensor
    degree: int

    def gradient(self, w: Tensor) -> Tensor:
        """(k, r) -> grad p(w) / alpha: (k, r)."""
        alpha, product = self.degree, w @ self.directions.T
        inner = (alpha - 1) * product ** (alpha - 2) * (w @ self.coefficients.T)
        return (inner @ self.directions + product ** (alpha - 1) @ self.coefficients) / alpha


class Completion:
    """Solves for c again and again; above KERNEL_SIDE unknowns c is the misfit itself, unsolved."""

    def __init__(self, f: Interpolant) -> None:
        self.f, self.rank = f, None
        z, alpha = f.directions, f.degree
        if z.numel() > KERNEL_SIDE:
            return
        s, eye = z @ z.T, torch.eye(z.shape[1], dtype=z.dtype)
        kernel = torch.einsum("pq,ab->paqb", s ** (alpha - 1), eye)
        kernel += (alpha - 1) * torch.einsum("pq,qa,pb->paqb", s ** (alpha - 2), z, z)
        kernel *= (f.sizes[:, None] * f.sizes)[:, None, :, None] / alpha
        values, vectors = torch.linalg.eigh(kernel.reshape(z.numel(), z.numel()))
        kept = values > RANK_TOLERANCE * values[-1]
        self.values, self.vectors = values[kept], vectors[:, kept]
        self.rank = int(kept.sum())

    def form(self, misfit: Tensor, solved: bool = True) -> Form:
        """The form of least norm whose gradients are this misfit (m, r); unsolved, noise stays small."""
        c = misfit
        if solved and self.rank is not None:
            c = (self.vectors @ (self.vectors.T @ misfit.flatten() / self.values)).reshape(c.shape)
        return Form(self.f.directions, self.f.sizes[:, None] * c, self.f.degree)


def grow(f: Interpolant, most: int, generator: torch.Generator) -> Grown:
    """Up to ``most`` samples; greedy first, then in random orders as long as that is cheap."""
    completion, budget = Completion(f), Budget()
    best: tuple[float, Tensor, Tensor] | None = None
    for attempt in range(RESTARTS):
        found = _grow_once(completion, most, generator, budget, attempt)
        if best is None or found[0] < best[0]:
            best = found
        if best[0] <= SOLVED or budget.left < (1 - CHEAP) * BUDGET:
            break
    assert best is not None
    error, g, sign = best
    size = g.norm(dim=1)
    x, b = g / size[:, None].clamp_min(1e-300), sign * size**f.degree
    return Grown(x, b, error, completion.rank, g.numel(), budget.left > 0)


@dataclass
class Budget:
    """Multiplications left."""

    left: float = BUDGET

    def allows(self, cost: float) -> bool:
        """Take ``cost`` off if there is so much left."""
        granted = cost <= self.left
        self.left -= cost if granted else 0
        return granted


def climb(form: Form, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shifted power iteration from random unit vectors: end points (k, r) and p there (k,)."""
    r = form.directions.shape[1]
    w = _unit(torch.randn(STARTS, r, generator=generator, dtype=torch.float64))
    sign = torch.where((w * form.gradient(w)).sum(1) < 0, -1.0, 1.0).double()[:, None]
    for _ in range(CLIMB):
        w = _unit(sign * _unit(form.gradient(w)) + SHIFT * w)  # the shift stops oscillation
    return w, (w * form.gradient(w)).sum(1)


def levenberg_marquardt(
    f: Interpolant, g: Tensor, sign: Tensor, steps: int, damping: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """Solve the stationarity equations from g: (k, r); returns g and what is left over, (m, r).

    Damping grows fourfold after a step that did not help and falls fivefold after one that did. It ends
    at rounding, at a minimum, or when a step with little damping gains nothing.
    """
    error, total = misfit(f, g, sign), scale_of(f)
    for _ in range(steps):
        normal, slope = normal_equations(f, g, sign, error)
        normal.diagonal().mul_(1 + damping).add_(1e-14 * normal.diagonal().max())
        trial = g + torch.linalg.solve(normal, slope.flatten()).reshape(g.shape)
        after = misfit(f, trial, sign)
        gain = float(error.norm() - after.norm())
        if gain > 0:  # NaN is no gain
            g, error = trial, after
            if gain < 1e-6 * float(error.norm()) and damping < 1e-2:
                break
            damping = max(damping / 5, 1e-14)
        elif damping > 1e6 or (damping < 1e-6 and error.norm() < SOLVED * total):
            break  # at rounding, or at a minimum
        else:
            damping = max(4 * damping, 1e-8)
    return g, error


def misfit(f: Interpolant, g: Tensor, sign: Tensor) -> Tensor:
    """sizes_j (F_j - sum_i s_i (Z_j.g_i)^(alpha-1) g_i): (m, r)."""
    explained = (sign * (f.directions @ g.T) ** (f.degree - 1)) @ g
    return f.sizes[:, None] * (f.values - explained)


def scale_of(f: Interpolant) -> float:
    """Norm of the left sides: of the neurons, since sizes f(Z) = +-W."""
    return float((f.sizes[:, None] * f.values).norm())


def refinement_cost(f: Interpolant, samples: int, steps: int) -> float:
    """Multiplications of Levenberg-Marquardt: normal equations and their solution."""
    m, r = f.values.shape
    return steps * (samples * r) ** 2 * (m + samples * r / 3.0)


def _grow_once(
    completion: Completion, most: int, generator: torch.Generator, budget: Budget, attempt: int
) -> tuple[float, Tensor, Tensor]:
    """Relative misfit, g, sign of the fewest samples that do about as well as the most.

    Even attempts look in the completed form, odd ones in the unsolved one; the first two are greedy.
    """
    f, alpha = completion.f, completion.f.degree
    total, error = scale_of(f), f.sizes[:, None] * f.values
    g, sign = f.values.new_zeros(0, f.values.shape[1]), f.values.new_zeros(0)
    history: list[tuple[float, Tensor, Tensor]] = []
    for k in range(1, most + 1):
        if not budget.allows(8.0 * STARTS * CLIMB * f.values.numel()) and history:
            break
        w, p = climb(completion.form(error, attempt % 2 == 0), generator)
        size = p.abs() if p.abs().sum() > 0 else torch.ones_like(p)
        pick = (
            size.argmax()[None] if attempt < 2 else torch.multinomial(size, 1, generator=generator)
        )
        g = torch.cat([g, size[pick, None] ** (1 / alpha) * w[pick]])
        sign = torch.cat([sign, torch.where(p[pick] < 0, -1.0, 1.0).double()])
        before = float(error.norm())
        if budget.allows(refinement_cost(f, k, INNER)):
            g, error = levenberg_marquardt(f, g, sign, INNER)
        else:
            g, error = _deflate(f, g, sign, error)
        history.append((float(error.norm()) / total, g, sign))
        if history[-1][0] <= SOLVED or float(error.norm()) > (1 - PROGRESS) * before:
            break
    return _fewest(f, history, budget)


def _deflate(f: Interpolant, g: Tensor, sign: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """The last sample at the weight that explains most of ``error``, the others left as they are."""
    along = _unit(g[-1:])
    explained = f.sizes[:, None] * (sign[-1] * (f.directions @ along.T) ** (f.degree - 1)) @ along
    b = ((explained * error).sum() / (explained**2).sum().clamp_min(1e-300)).clamp_min(0)
    return torch.cat([g[:-1], b ** (1 / f.degree) * along]), error - b * explained


def _fewest(
    f: Interpolant, history: list[tuple[float, Tensor, Tensor]], budget: Budget
) -> tuple[float, Tensor, Tensor]:
    """Noise can always be fitted by more samples: of the good fits the one with the fewest."""
    least = min(error for error, _, _ in history)
    good = [h for h in history if h[0] <= min(SAME * least, FITTED)]
    error, g, sign = good[0] if good else min(history, key=lambda h: h[0])
    steps = FINAL if budget.allows(refinement_cost(f, len(g), FINAL)) else INNER
    if steps == FINAL or budget.allows(refinement_cost(f, len(g), INNER)):
        g, left = levenberg_marquardt(f, g, sign, steps)
        error = float(left.norm()) / scale_of(f)
    return error, g, sign


def normal_equations(
    f: Interpolant, g: Tensor, sign: Tensor, error: Tensor
) -> tuple[Tensor, Tensor]:
    """J^T J: (k r, k r) and J^T error: (k, r), J the derivative of the explained part in g.

    J_(j,c),(i,a) = A_ji g_ic Z_ja + B_ji [c = a], written out so that J itself is never formed.
    """
    z, (k, r) = f.directions, g.shape
    product = z @ g.T  # (m, k)
    a = f.sizes[:, None] * (f.degree - 1) * sign * product ** (f.degree - 2)
    b = f.sizes[:, None] * sign * product ** (f.degree - 1)
    outer = (a[:, :, None] * z[:, None]).reshape(len(z), k * r)
    normal = (outer.T @ outer).reshape(k, r, k, r) * (g @ g.T)[:, None, :, None]
    mixed = (outer.T @ b).reshape(k, r, k)[..., None] * g[:, None, None, :]
    normal += mixed + mixed.permute(2, 3, 0, 1)
    normal.diagonal(dim1=1, dim2=3).add_((b.T @ b)[:, :, None])
    return normal.reshape(k * r, k * r), (a * (error @ g.T)).T @ z + b.T @ error


def _unit(w: Tensor) -> Tensor:
    return w / w.norm(dim=1, keepdim=True).clamp_min(1e-300)
