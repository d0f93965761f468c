"""Recover samples by power iteration if there are fewer or noisier neurons than the rank condition requires.

The function f is known at the unit neurons Z_j. It is a gradient: p(w) = <w, f(w)> = sum_i b_i (w.x_i)^alpha
satisfies grad p = alpha f. The form with minimum norm and the known gradients has the same symmetry:

    p(w) = sum_j (Z_j.w)^(alpha-1) (c_j.w),        sum_q K_pq c_q = f(Z_p)
    K_pq = ((Z_p.Z_q)^(alpha-1) I + (alpha-1) (Z_p.Z_q)^(alpha-2) Z_q Z_p^T) / alpha

Power iteration w <- +-f(w) increases |p| and converges to spectrally isolated samples. The best end point
becomes a new sample with weight p(w). Levenberg-Marquardt then refines all samples together on the
stationarity equations (g_i = |b_i|^(1/alpha) x_i, s_i = sign b_i, row j as large as its neuron)

    sizes_j (f(Z_j) - sum_i s_i (Z_j.g_i)^(alpha-1) g_i) = 0

The residual of these equations defines the form in which the search finds the next sample (deflation).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.theory.polynomial import Interpolant

STARTS, POWER_STEPS = 48, 100  # number of random directions, and power steps of each
SHIFT = 0.3  # share of the last direction in a step; prevents oscillation for an even form
INNER, FINAL = 15, 100  # Levenberg-Marquardt steps after every sample, and at the end
RESTARTS = 8  # maximum number of attempts
CHEAP = 1 / 16  # attempts continue only while they use less than this share of the budget
SOLVED = 1e-10  # a relative misfit below this is rounding
FITTED = 1e-2  # maximum relative misfit of a good fit
SAME = 10.0  # maximum ratio of the misfits of two equally good fits
PROGRESS = 1e-3  # a sample that reduces the misfit by a smaller share is useless
BUDGET = 2.0**36  # multiplications of one search, a few seconds
KERNEL_SIDE = 1500  # maximum number of unknowns c for which the kernel is factorized
RANK_TOLERANCE = 1e-10  # minimum eigenvalue of the kernel, as a share of the largest


@dataclass(frozen=True)
class GrownFit:
    """Samples that a search has found one after the other.

    Attributes:
        x: (k, r) samples of length 1.
        b: (k,) weights.
        misfit: Relative misfit of all equations.
        equations: Number of independent equations among the m r, None if there are too many to count.
        unknowns: Number of unknowns, k r.
        is_complete: Whether the search ended before it exhausted its budget.
    """

    x: Tensor
    b: Tensor
    misfit: float
    equations: int | None
    unknowns: int
    is_complete: bool


@dataclass(frozen=True)
class Form:
    """The form p with minimum norm.

    Attributes:
        directions: (m, r) directions Z.
        coefficients: (m, r) coefficients c.
        degree: Degree alpha.
    """

    directions: Tensor
    coefficients: Tensor
    degree: int

    def gradient(self, w: Tensor) -> Tensor:
        """Return grad p(w) / alpha (k, r) at points w (k, r)."""
        alpha, product = self.degree, w @ self.directions.T
        inner = (alpha - 1) * product ** (alpha - 2) * (w @ self.coefficients.T)
        return (inner @ self.directions + product ** (alpha - 1) @ self.coefficients) / alpha


class Completion:
    """A solver for the coefficients c, which factorizes the kernel once.

    Above KERNEL_SIDE unknowns, it uses the misfit itself as c and solves nothing.
    """

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
        is_large = values > RANK_TOLERANCE * values[-1]
        self.values, self.vectors = values[is_large], vectors[:, is_large]
        self.rank = int(is_large.sum())

    def complete(self, misfit: Tensor, solve: bool = True) -> Form:
        """Return the form with minimum norm whose gradients equal a misfit.

        Args:
            misfit: (m, r) misfit.
            solve: Whether to solve for the coefficients. Otherwise the misfit itself is used, which does not
                amplify noise.

        Returns:
            The form.
        """
        c = misfit
        if solve and self.rank is not None:
            c = (self.vectors @ (self.vectors.T @ misfit.flatten() / self.values)).reshape(c.shape)
        return Form(self.f.directions, self.f.sizes[:, None] * c, self.f.degree)


def grow(f: Interpolant, max_samples: int, generator: torch.Generator) -> GrownFit:
    """Search for samples one after the other.

    The first attempts are greedy. Further attempts use random orders, as long as they are cheap.

    Args:
        f: The interpolated function.
        max_samples: Maximum number of samples.
        generator: Random number generator.

    Returns:
        The best fit of all attempts.
    """
    completion, budget = Completion(f), Budget()
    best: tuple[float, Tensor, Tensor] | None = None
    for attempt in range(RESTARTS):
        fit = _grow_once(completion, max_samples, generator, budget, attempt)
        if best is None or fit[0] < best[0]:
            best = fit
        if best[0] <= SOLVED or budget.remaining < (1 - CHEAP) * BUDGET:
            break
    assert best is not None
    error, g, sign = best
    size = g.norm(dim=1)
    x, b = g / size[:, None].clamp_min(1e-300), sign * size**f.degree
    return GrownFit(x, b, error, completion.rank, g.numel(), budget.remaining > 0)


@dataclass
class Budget:
    """The number of multiplications that a search may still use."""

    remaining: float = BUDGET

    def spend(self, cost: float) -> bool:
        """Subtract a cost if the budget covers it. Return True in this case."""
        is_covered = cost <= self.remaining
        self.remaining -= cost if is_covered else 0
        return is_covered


def run_power_iteration(form: Form, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Run the shifted power iteration from random unit vectors.

    Args:
        form: The form p.
        generator: Random number generator.

    Returns:
        The end points (k, r), and the values of p there (k,).
    """
    r = form.directions.shape[1]
    w = _normalize(torch.randn(STARTS, r, generator=generator, dtype=torch.float64))
    sign = torch.where((w * form.gradient(w)).sum(1) < 0, -1.0, 1.0).double()[:, None]
    for _ in range(POWER_STEPS):
        w = _normalize(sign * _normalize(form.gradient(w)) + SHIFT * w)
    return w, (w * form.gradient(w)).sum(1)


def levenberg_marquardt(
    f: Interpolant, g: Tensor, sign: Tensor, steps: int, damping: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """Solve the stationarity equations by the Levenberg-Marquardt method.

    The damping is multiplied by four after a step that increases the misfit, and divided by five after a step
    that reduces it. The iteration ends at rounding, at a minimum, or if a step with little damping gains
    almost nothing.

    Args:
        f: The interpolated function.
        g: (k, r) initial scaled samples.
        sign: (k,) signs of the weights.
        steps: Maximum number of steps.
        damping: Initial damping.

    Returns:
        The scaled samples (k, r), and the misfit (m, r).
    """
    error, total = misfit(f, g, sign), target_norm(f)
    for _ in range(steps):
        normal, slope = normal_equations(f, g, sign, error)
        normal.diagonal().mul_(1 + damping).add_(1e-14 * normal.diagonal().max())
        trial = g + torch.linalg.solve(normal, slope.flatten()).reshape(g.shape)
        after = misfit(f, trial, sign)
        gain = float(error.norm() - after.norm())
        if gain > 0:  # False for NaN
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
    """Return sizes_j (F_j - sum_i s_i (Z_j.g_i)^(alpha-1) g_i).

    Args:
        f: The interpolated function.
        g: (k, r) scaled samples.
        sign: (k,) signs of the weights.

    Returns:
        (m, r) misfit.
    """
    fitted = (sign * (f.directions @ g.T) ** (f.degree - 1)) @ g
    return f.sizes[:, None] * (f.values - fitted)


def target_norm(f: Interpolant) -> float:
    """Return the norm of the targets, which is that of the neurons, because sizes f(Z) = +-W."""
    return float((f.sizes[:, None] * f.values).norm())


def estimate_refinement_cost(f: Interpolant, samples: int, steps: int) -> float:
    """Estimate the multiplications of Levenberg-Marquardt: the normal equations and their solution.

    Args:
        f: The interpolated function.
        samples: Number of samples.
        steps: Number of steps.

    Returns:
        The number of multiplications.
    """
    m, r = f.values.shape
    return steps * (samples * r) ** 2 * (m + samples * r / 3.0)


def _grow_once(
    completion: Completion,
    max_samples: int,
    generator: torch.Generator,
    budget: Budget,
    attempt: int,
) -> tuple[float, Tensor, Tensor]:
    """Search for samples once, and return the smallest number of samples that fits about as well.

    Even attempts search the completed form, odd attempts the unsolved form. The first two are greedy.

    Args:
        completion: The solver for the form.
        max_samples: Maximum number of samples.
        generator: Random number generator.
        budget: The remaining budget.
        attempt: Number of the attempt.

    Returns:
        The relative misfit, the scaled samples g and the signs.
    """
    f, alpha = completion.f, completion.f.degree
    total, error = target_norm(f), f.sizes[:, None] * f.values
    g, sign = f.values.new_zeros(0, f.values.shape[1]), f.values.new_zeros(0)
    history: list[tuple[float, Tensor, Tensor]] = []
    for k in range(1, max_samples + 1):
        if not budget.spend(8.0 * STARTS * POWER_STEPS * f.values.numel()) and history:
            break
        form = completion.complete(error, solve=attempt % 2 == 0)
        w, p = run_power_iteration(form, generator)
        size = p.abs() if p.abs().sum() > 0 else torch.ones_like(p)
        pick = (
            size.argmax()[None] if attempt < 2 else torch.multinomial(size, 1, generator=generator)
        )
        g = torch.cat([g, size[pick, None] ** (1 / alpha) * w[pick]])
        sign = torch.cat([sign, torch.where(p[pick] < 0, -1.0, 1.0).double()])
        last_error = float(error.norm())
        if budget.spend(estimate_refinement_cost(f, k, INNER)):
            g, error = levenberg_marquardt(f, g, sign, INNER)
        else:
            g, error = _deflate(f, g, sign, error)
        history.append((float(error.norm()) / total, g, sign))
        if history[-1][0] <= SOLVED or float(error.norm()) > (1 - PROGRESS) * last_error:
            break
    return _select_smallest_fit(f, history, budget)


def _deflate(f: Interpolant, g: Tensor, sign: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples, with the best weight of the last sample, and the remaining misfit.

    Args:
        f: The interpolated function.
        g: (k, r) scaled samples.
        sign: (k,) signs of the weights.
        error: (m, r) misfit without the last sample.

    Returns:
        The scaled samples and the misfit.
    """
    direction = _normalize(g[-1:])
    product = f.directions @ direction.T
    fitted = f.sizes[:, None] * (sign[-1] * product ** (f.degree - 1)) @ direction
    b = ((fitted * error).sum() / (fitted**2).sum().clamp_min(1e-300)).clamp_min(0)
    return torch.cat([g[:-1], b ** (1 / f.degree) * direction]), error - b * fitted


def _select_smallest_fit(
    f: Interpolant, history: list[tuple[float, Tensor, Tensor]], budget: Budget
) -> tuple[float, Tensor, Tensor]:
    """Return the good fit with the fewest samples, because more samples can always fit noise."""
    smallest = min(error for error, _, _ in history)
    good = [h for h in history if h[0] <= min(SAME * smallest, FITTED)]
    error, g, sign = good[0] if good else min(history, key=lambda h: h[0])
    steps = FINAL if budget.spend(estimate_refinement_cost(f, len(g), FINAL)) else INNER
    if steps == FINAL or budget.spend(estimate_refinement_cost(f, len(g), INNER)):
        g, remaining = levenberg_marquardt(f, g, sign, steps)
        error = float(remaining.norm()) / target_norm(f)
    return error, g, sign


def normal_equations(
    f: Interpolant, g: Tensor, sign: Tensor, error: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute J^T J and J^T error, where J is the derivative of the fitted values with respect to g.

    J_(j,c),(i,a) = A_ji g_ic Z_ja + B_ji [c = a]. The code expands the products, so that it never forms J.

    Args:
        f: The interpolated function.
        g: (k, r) scaled samples.
        sign: (k,) signs of the weights.
        error: (m, r) misfit.

    Returns:
        J^T J (k r, k r) and J^T error (k, r).
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


def _normalize(w: Tensor) -> Tensor:
    return w / w.norm(dim=1, keepdim=True).clamp_min(1e-300)
