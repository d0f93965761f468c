"""Recover the samples of a polynomial network by power iteration.

This search needs fewer neurons than the diagonalization in ``polynomial.py``, and tolerates more noise in the
neurons.

The samples x_i with weights b_i define the form (homogeneous polynomial) p(w) = sum_i b_i (w.x_i)^alpha. The
gradient of p is alpha f(w), with f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i. The stationarity equations of
training give f(Z_j) at the direction Z_j of every neuron. The form with minimum norm that has these gradients
is

    p(w) = sum_j (Z_j.w)^(alpha-1) (c_j.w),        sum_q K_pq c_q = f(Z_p)
    K_pq = ((Z_p.Z_q)^(alpha-1) I + (alpha-1) (Z_p.Z_q)^(alpha-2) Z_q Z_p^T) / alpha

Power iteration w <- +-f(w) increases |p| and converges to samples that are well separated from the others.
The end point w with the largest |p(w)| becomes a new sample with weight p(w). Levenberg-Marquardt steps then
refine all samples together on the stationarity equations

    sizes_j (f(Z_j) - sum_i s_i (Z_j.g_i)^(alpha-1) g_i) = 0

in the scaled samples g_i = |b_i|^(1/alpha) x_i with signs s_i = sign b_i. The factor sizes_j makes equation j
as large as neuron j. The misfit of these equations defines the form in which the search finds the next sample
(deflation).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.theory.polynomial import Interpolant

# Number of random starting directions, and number of power iteration steps from each of them.
STARTS, POWER_STEPS = 48, 100
# Weight of the previous direction in a power step.
# Without this weight, the iteration can oscillate if the degree of the form is even.
SHIFT = 0.3
INNER, FINAL = (
    15,
    100,
)  # Levenberg-Marquardt steps after every new sample, and after the last sample
RESTARTS = 8  # maximum number of attempts to find all samples
CHEAP = 1 / 16  # a new attempt starts only if less than this share of the computing budget is used
SOLVED = 1e-10  # a relative error of the fit below this value is a rounding error
FITTED = 1e-2  # maximum relative error at which the samples count as a good fit of the weights
SAME = 10.0  # two fits count as equally good if the ratio of their errors is at most this number
# The search ends if a new sample reduces the error of the fit by less than this share.
PROGRESS = 1e-3
BUDGET = 2.0**36  # maximum number of multiplications in one search, which take a few seconds
KERNEL_SIDE = 1500  # maximum number of rows of a kernel matrix that is factorized
# Smaller eigenvalues of the kernel matrix, as a share of the largest eigenvalue, count as zero.
RANK_TOLERANCE = 1e-10


@dataclass(frozen=True)
class GrownFit:
    """Samples that the search by power iteration has found one after the other.

    Attributes:
        x: (k, r) samples of length 1, in a signal subspace of r dimensions.
        b: (k,) weight of each sample.
        misfit: Relative error of all equations that the samples must solve.
        equations: Number of independent stationarity equations, None if there are too many to count.
        unknowns: Number k r of unknown values.
        is_complete: Whether the search ended before it exhausted its budget of multiplications.
    """

    x: Tensor
    b: Tensor
    misfit: float
    equations: int | None
    unknowns: int
    is_complete: bool


@dataclass(frozen=True)
class Form:
    """The form (homogeneous polynomial) p(w) = sum_j (Z_j.w)^(alpha-1) (c_j.w).

    Attributes:
        directions: (m, r) directions Z_j of the neurons.
        coefficients: (m, r) coefficient vectors c_j.
        degree: Degree alpha of the form.
    """

    directions: Tensor
    coefficients: Tensor
    degree: int

    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradient of the polynomial p, divided by its degree, at k points w (k, r)."""
        alpha, inner_products = self.degree, w @ self.directions.T
        direction_factors = (alpha - 1) * inner_products ** (alpha - 2) * (w @ self.coefficients.T)
        return (
            direction_factors @ self.directions + inner_products ** (alpha - 1) @ self.coefficients
        ) / alpha


class Completion:
    """Finds homogeneous polynomials (forms) from their gradients: the form of smallest norm.

    The gradients are given at the weights of the neurons.

    The constructor factorizes the kernel matrix of the neurons once. If the kernel matrix has more than
    KERNEL_SIDE rows, the given gradients themselves are used as the coefficients of the form.
    """

    def __init__(self, f: Interpolant) -> None:
        self.f, self.rank = f, None
        z, alpha = f.directions, f.degree
        if z.numel() > KERNEL_SIDE:
            return
        s, eye = z @ z.T, torch.eye(z.shape[1], dtype=z.dtype)
        kernel_matrix = torch.einsum("pq,ab->paqb", s ** (alpha - 1), eye)
        kernel_matrix += (alpha - 1) * torch.einsum("pq,qa,pb->paqb", s ** (alpha - 2), z, z)
        kernel_matrix *= (f.sizes[:, None] * f.sizes)[:, None, :, None] / alpha
        values, vectors = torch.linalg.eigh(kernel_matrix.reshape(z.numel(), z.numel()))
        is_nonzero = values > RANK_TOLERANCE * values[-1]
        self.values, self.vectors = values[is_nonzero], vectors[:, is_nonzero]
        self.rank = int(is_nonzero.sum())

    def complete(self, misfit: Tensor, solve: bool = True) -> Form:
        """Return the form with minimum norm whose gradients at the neurons equal a misfit.

        Args:
            misfit: (m, r) misfit of the stationarity equations of m neurons.
            solve: Whether to solve for the coefficients of the form. If False, the misfit itself becomes the
                coefficients. The solution can amplify noise in the misfit, and the misfit itself cannot.

        Returns:
            The form.
        """
        coefficients = misfit
        if solve and self.rank is not None:
            solution = self.vectors @ (self.vectors.T @ misfit.flatten() / self.values)
            coefficients = solution.reshape(misfit.shape)
        return Form(self.f.directions, self.f.sizes[:, None] * coefficients, self.f.degree)


def grow(f: Interpolant, max_samples: int, generator: torch.Generator) -> GrownFit:
    """Search for samples one after the other by power iteration.

    The first two attempts always add the sample with the largest weight. Further attempts add samples in a
    random order. New attempts start only if the earlier attempts have used a small share of BUDGET, the
    maximum number of multiplications.

    Args:
        f: The function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i, interpolated from the neurons.
        max_samples: Maximum number of samples.
        generator: Random number generator.

    Returns:
        The fit with the smallest misfit of all attempts.
    """
    completion, budget = Completion(f), Budget()
    best_fit: tuple[float, Tensor, Tensor] | None = None
    for attempt in range(RESTARTS):
        grown_fit = _grow_once(completion, max_samples, generator, budget, attempt)
        if best_fit is None or grown_fit[0] < best_fit[0]:
            best_fit = grown_fit
        if best_fit[0] <= SOLVED or budget.remaining < (1 - CHEAP) * BUDGET:
            break
    assert best_fit is not None
    error, scaled_samples, sign = best_fit
    lengths = scaled_samples.norm(dim=1)
    x, b = scaled_samples / lengths[:, None].clamp_min(1e-300), sign * lengths**f.degree
    return GrownFit(x, b, error, completion.rank, scaled_samples.numel(), budget.remaining > 0)


@dataclass
class Budget:
    """A counter of the multiplications that a search for samples may still use."""

    remaining: float = BUDGET

    def spend(self, cost: float) -> bool:
        """Spend multiplications of the budget, and return True. Return False if too few are left."""
        is_covered = cost <= self.remaining
        self.remaining -= cost if is_covered else 0
        return is_covered


def run_power_iteration(form: Form, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Run the power iteration on a form from random unit vectors.

    Each step adds the previous vector, times SHIFT, to the gradient of the form at this vector.

    Args:
        form: The form p, a homogeneous polynomial.
        generator: Random number generator.

    Returns:
        The end points (k, r), and the values (k,) of p at the end points.
    """
    dimension = form.directions.shape[1]
    unit_vectors = _normalize(
        torch.randn(STARTS, dimension, generator=generator, dtype=torch.float64)
    )
    ascent_signs = torch.where(
        (unit_vectors * form.gradient(unit_vectors)).sum(1) < 0, -1.0, 1.0
    ).double()[:, None]
    for _ in range(POWER_STEPS):
        unit_vectors = _normalize(
            ascent_signs * _normalize(form.gradient(unit_vectors)) + SHIFT * unit_vectors
        )
    return unit_vectors, (unit_vectors * form.gradient(unit_vectors)).sum(1)


def levenberg_marquardt(
    f: Interpolant, g: Tensor, sign: Tensor, steps: int, damping: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """Solve the stationarity equations by the Levenberg-Marquardt method.

    The damping is multiplied by four after a step that increases the misfit, and divided by five after a step
    that reduces the misfit. The iteration ends if the misfit is as small as rounding errors, or if no step
    reduces the misfit even with large damping. The iteration also ends if a step with little damping reduces
    the misfit by almost nothing.

    Args:
        f: The function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i, interpolated from m neurons.
        g: (k, r) initial samples, scaled by |b|^(1/alpha) with their weights b and the degree alpha.
        sign: (k,) signs of the weights.
        steps: Maximum number of steps.
        damping: Initial damping.

    Returns:
        The scaled samples (k, r), and the misfit (m, r) of the equations.
    """
    error, total = misfit(f, g, sign), target_norm(f)
    for _ in range(steps):
        normal_matrix, slope = normal_equations(f, g, sign, error)
        normal_matrix.diagonal().mul_(1 + damping).add_(1e-14 * normal_matrix.diagonal().max())
        trial_g = g + torch.linalg.solve(normal_matrix, slope.flatten()).reshape(g.shape)
        trial_error = misfit(f, trial_g, sign)
        error_decrease = float(error.norm() - trial_error.norm())
        if error_decrease > 0:  # this is also False if the error after the step is NaN
            g, error = trial_g, trial_error
            if error_decrease < 1e-6 * float(error.norm()) and damping < 1e-2:
                break
            damping = max(damping / 5, 1e-14)
        elif damping > 1e6 or (damping < 1e-6 and error.norm() < SOLVED * total):
            break  # the error of the fit is a rounding error, or no step reduces it
        else:
            damping = max(4 * damping, 1e-8)
    return g, error


def misfit(f: Interpolant, g: Tensor, sign: Tensor) -> Tensor:
    """Return the misfit sizes_j (f(Z_j) - sum_i s_i (Z_j.g_i)^(alpha-1) g_i) of the stationarity equations.

    Args:
        f: The function f of degree alpha, its m neurons Z_j, and the sizes of the neurons.
        g: (k, r) samples g_i, scaled by |b_i|^(1/alpha) with their weights b_i.
        sign: (k,) signs s_i of the weights.

    Returns:
        (m, r) misfit of each equation.
    """
    fitted_values = (sign * (f.directions @ g.T) ** (f.degree - 1)) @ g
    return f.sizes[:, None] * (f.values - fitted_values)


def target_norm(f: Interpolant) -> float:
    """Return the norm of the target of the stationarity equations, which the samples must fit.

    The target of neuron j is its size times f(Z_j), where Z_j is the direction of the neuron and f the
    function to fit. At a KKT point, this target is the weight vector W_j of the neuron up to sign, so the
    result is the norm of the weight matrix W.

    Args:
        f: The function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i, interpolated from the neurons.

    Returns:
        The norm.
    """
    return float((f.sizes[:, None] * f.values).norm())


def estimate_refinement_cost(f: Interpolant, samples: int, steps: int) -> float:
    """Estimate how many multiplications a refinement by Levenberg-Marquardt steps needs.

    Each step builds the normal equations and solves them.

    Args:
        f: The function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i, interpolated from the neurons.
        samples: Number of samples.
        steps: Number of Levenberg-Marquardt steps.

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
    """Search for samples once, and return the smallest set of samples with an almost minimum misfit.

    Each new sample is found by power iteration on a form (homogeneous polynomial) that the misfit defines. In
    attempts with an even number, the gradients of the form at the neurons equal the misfit. In attempts with
    an odd number, the misfit gives the coefficients of the form. The first two attempts always add the sample
    with the largest weight, and further attempts add a random sample.

    Args:
        completion: The solver for the form.
        max_samples: Maximum number of samples.
        generator: Random number generator.
        budget: The number of multiplications that the search may still use.
        attempt: Number of the attempt, from 0.

    Returns:
        The relative misfit, the samples scaled by |b|^(1/alpha) with their weights b, and the signs of b.
    """
    f, alpha = completion.f, completion.f.degree
    total, error = target_norm(f), f.sizes[:, None] * f.values
    scaled_samples, sign = f.values.new_zeros(0, f.values.shape[1]), f.values.new_zeros(0)
    history: list[tuple[float, Tensor, Tensor]] = []
    for k in range(1, max_samples + 1):
        if not budget.spend(8.0 * STARTS * POWER_STEPS * f.values.numel()) and history:
            break
        form = completion.complete(error, solve=attempt % 2 == 0)
        w, p = run_power_iteration(form, generator)
        importance = p.abs() if p.abs().sum() > 0 else torch.ones_like(p)
        chosen_index = (
            importance.argmax()[None]
            if attempt < 2
            else torch.multinomial(importance, 1, generator=generator)
        )
        scaled_samples = torch.cat(
            [scaled_samples, importance[chosen_index, None] ** (1 / alpha) * w[chosen_index]]
        )
        sign = torch.cat([sign, torch.where(p[chosen_index] < 0, -1.0, 1.0).double()])
        last_error = float(error.norm())
        if budget.spend(estimate_refinement_cost(f, k, INNER)):
            scaled_samples, error = levenberg_marquardt(f, scaled_samples, sign, INNER)
        else:
            scaled_samples, error = _deflate(f, scaled_samples, sign, error)
        history.append((float(error.norm()) / total, scaled_samples, sign))
        if history[-1][0] <= SOLVED or float(error.norm()) > (1 - PROGRESS) * last_error:
            break
    return _select_smallest_fit(f, history, budget)


def _deflate(f: Interpolant, g: Tensor, sign: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Fit the weight of the last sample, and subtract its contribution from the error of the fit.

    Args:
        f: The function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i, interpolated from m neurons.
        g: (k, r) samples, scaled by |b|^(1/alpha) with their weights b and the degree alpha.
        sign: (k,) signs of the weights b.
        error: (m, r) misfit of the equations without the last sample.

    Returns:
        The scaled samples, and the remaining misfit.
    """
    direction = _normalize(g[-1:])
    inner_products = f.directions @ direction.T
    contribution_of_last = (
        f.sizes[:, None] * (sign[-1] * inner_products ** (f.degree - 1)) @ direction
    )
    sample_weight = (
        (contribution_of_last * error).sum() / (contribution_of_last**2).sum().clamp_min(1e-300)
    ).clamp_min(0)
    return torch.cat(
        [g[:-1], sample_weight ** (1 / f.degree) * direction]
    ), error - sample_weight * contribution_of_last


def _select_smallest_fit(
    f: Interpolant, history: list[tuple[float, Tensor, Tensor]], budget: Budget
) -> tuple[float, Tensor, Tensor]:
    """Return the good fit with the fewest samples, because more samples only fit noise."""
    smallest_misfit = min(relative_misfit for relative_misfit, _, _ in history)
    good_fits = [fit for fit in history if fit[0] <= min(SAME * smallest_misfit, FITTED)]
    relative_misfit, g, sign = good_fits[0] if good_fits else min(history, key=lambda fit: fit[0])
    refinement_steps = FINAL if budget.spend(estimate_refinement_cost(f, len(g), FINAL)) else INNER
    if refinement_steps == FINAL or budget.spend(estimate_refinement_cost(f, len(g), INNER)):
        g, remaining = levenberg_marquardt(f, g, sign, refinement_steps)
        relative_misfit = float(remaining.norm()) / target_norm(f)
    return relative_misfit, g, sign


def normal_equations(
    f: Interpolant, g: Tensor, sign: Tensor, error: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute J^T J and J^T error for a least-squares step. J is the derivative of the fit in the samples.

    J_(j,c),(i,a) = A_ji g_ic Z_ja + B_ji [c = a], with (m, k) matrices A and B of coefficients and the
    directions Z of the neurons. The code expands the products, so that it never forms J.

    Args:
        f: The function f(w) = sum_i b_i (w.x_i)^(alpha-1) x_i, interpolated from m neurons.
        g: (k, r) samples, scaled by |b|^(1/alpha) with their weights b and the degree alpha.
        sign: (k,) signs of the weights.
        error: (m, r) misfit of the equations.

    Returns:
        J^T J (k r, k r) and J^T error (k, r).
    """
    z, (k, r) = f.directions, g.shape
    inner_products = z @ g.T  # (m, k)
    coefficients_of_samples = (
        f.sizes[:, None] * (f.degree - 1) * sign * inner_products ** (f.degree - 2)
    )
    coefficients_of_directions = f.sizes[:, None] * sign * inner_products ** (f.degree - 1)
    outer_products = (coefficients_of_samples[:, :, None] * z[:, None]).reshape(len(z), k * r)
    normal_matrix = (outer_products.T @ outer_products).reshape(k, r, k, r) * (g @ g.T)[
        :, None, :, None
    ]
    mixed_products = (outer_products.T @ coefficients_of_directions).reshape(k, r, k)[
        ..., None
    ] * g[:, None, None, :]
    normal_matrix += mixed_products + mixed_products.permute(2, 3, 0, 1)
    normal_matrix.diagonal(dim1=1, dim2=3).add_(
        (coefficients_of_directions.T @ coefficients_of_directions)[:, :, None]
    )
    return normal_matrix.reshape(k * r, k * r), (
        coefficients_of_samples * (error @ g.T)
    ).T @ z + coefficients_of_directions.T @ error


def _normalize(w: Tensor) -> Tensor:
    return w / w.norm(dim=1, keepdim=True).clamp_min(1e-300)
