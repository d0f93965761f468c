"""Find the image of least energy in a polytope, with a lower bound that is proved even if the solver fails.

    minimize |x|^2   over   low <= rows (x - x0) <= high   and   lower <= x - x0 <= upper

The energy of an image x is |x|^2. The image x0 lies in the polytope, i.e. all lower limits are at most 0 and
all upper limits are at least 0. For any vector nu, every x of the polytope satisfies <nu, rows (x - x0)> <=
s(nu) = sum_k max(nu_k low_k, nu_k high_k). So by weak duality

    |x|^2 / 2  >=  min_{lower <= z - x0 <= upper} |z|^2 / 2 + <rows^T nu, z - x0>  -  s(nu).

The minimum is computed for each pixel separately: z - x0 = clamp(-rows^T nu - x0, lower, upper). The bound
holds for every nu, and an allowance for rounding errors is subtracted. The vectors nu come from a primal-dual
interior-point method (Mehrotra). The points of this method may lie outside the polytope. They are moved
towards x0 until they lie inside, and then serve as examples of images with little energy.

The method takes about twelve factorizations of d x d matrices, or of K x K matrices if there are few rows. It
treats a batch of images at once. First-order methods stall if an image is very close to a wall of its
polytope, but this method does not.

Shapes: rows (b, K, d), x0 (b, d), low, high (b, K), lower, upper (b, d). Limits may be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 60  # maximum number of interior-point steps
# The solver looks for the image with the smallest energy (squared norm) in a polytope. It stops if the best
# image and the proved lower bound differ by less than this share of the energy.
GAP = 1e-6
# The solver closes the gap between the best image that was found and the proved lower bound. A step counts
# as idle if the gap shrinks by less than this share of the energy (squared norm).
STALL_TOLERANCE = 1e-8
PATIENCE = 8  # the solver stops after this number of steps in a row without progress
# A wall is a linear inequality of the polytope. At the start of the interior-point method, the distance from
# each wall times the wall's multiplier has this value.
START_COMPLEMENTARITY = 1e-2
# In each step, the distances from the walls and the walls' multipliers must stay positive. This share of the
# longest step that keeps them nonnegative is taken.
STEP_FRACTION = 0.995
# Rounding errors may move a linear inequality of the polytope by this share of the image's norm.
WALL_ROUNDING = 1e-12
# Rounding errors may change a bound by this share of the sum of its absolute terms.
ROUNDING = 1e-12
# The solver keeps a pixel constant if it can change by less than this share of the image's norm. The proved
# bound stays valid, because it allows the change.
PINNED_TOLERANCE = 1e-9
# Images on the boundary of the polytope are moved to the inside by this factor, because a rounding error
# could move them to the outside.
INSIDE_FRACTION = 1 - 1e-9
# Largest ratio of a wall's multiplier and the distance from the wall. The limit keeps matrices finite if a
# distance becomes zero.
MAX_STIFFNESS = 1e20


@dataclass(frozen=True)
class Polytope:
    """The images x with low <= rows a <= high and lower <= a <= upper, where a = x - x0.

    Attributes:
        rows: (b, K, d) vectors of length 1, one for each linear inequality, for a batch of b polytopes.
        x0: (b, d) images inside the polytopes.
        low: (b, K) lower limits of the products of rows and a.
        high: (b, K) upper limits of the products of rows and a.
        lower: (b, d) lower limits of a, the change of the pixels.
        upper: (b, d) upper limits of a, the change of the pixels.
    """

    rows: Tensor
    x0: Tensor
    low: Tensor
    high: Tensor
    lower: Tensor
    upper: Tensor

    @property
    def size(self) -> Tensor:
        """Norms of the images x0 in a batch of b polytopes, (b, 1)."""
        return self.x0.norm(dim=1, keepdim=True).clamp(min=1e-150)

    def widened(self) -> Polytope:
        """Return a polytope with slightly wider limits, which contains this one despite rounding errors."""
        rounding_margin = WALL_ROUNDING * self.size
        return Polytope(
            self.rows,
            self.x0,
            self.low - rounding_margin,
            self.high + rounding_margin,
            self.lower - rounding_margin,
            self.upper + rounding_margin,
        )

    def bound(self, nu: Tensor) -> Tensor:
        """Return (b,) lower bounds of the energy |x|^2 of all images x in each polytope.

        Args:
            nu: (b, K) dual vectors, one entry for each linear inequality. Every dual vector gives a valid
                bound.

        Returns:
            The lower bounds.
        """
        linear_coefficients = _apply_transposed_rows(self.rows, nu)
        minimizing_changes = torch.minimum(
            torch.maximum(-linear_coefficients - self.x0, self.lower), self.upper
        )
        minimizing_images = self.x0 + minimizing_changes
        bound_terms = torch.cat(
            [
                minimizing_images.square() / 2,
                linear_coefficients * minimizing_changes,
                -_maximize_product(nu, self.low, self.high),
            ],
            1,
        )
        rounding_error_scale = nu.abs().sum(1) * (
            minimizing_changes.norm(dim=1) + self.size[:, 0]
        ) + bound_terms.abs().sum(1)
        return 2 * (bound_terms.sum(1) - ROUNDING * rounding_error_scale)

    def room(self, a: Tensor) -> Tensor:
        """Return the (b,) largest factors s for which the image x0 + s a lies in the polytope.

        The factor is infinite if the polytope does not limit it.
        """
        return torch.minimum(
            _find_largest_factor(_apply_rows(self.rows, a), self.low, self.high),
            _find_largest_factor(a, self.lower, self.upper),
        )


@dataclass(frozen=True)
class EnergyMinimum:
    """Bounds of the energy |x|^2 of all images in b polytopes, and examples with little energy.

    Attributes:
        bound: (b,) lower bounds of the energy of all images in each polytope.
        example: (b, d) difference x - x0 of the image with the least energy that was found.
    """

    bound: Tensor
    example: Tensor


def minimize_energy(polytope: Polytope) -> EnergyMinimum:
    """Find the image of least energy |x|^2 in each polytope, and a lower bound of the energy.

    Every step of the interior-point method gives a dual vector and a point. Any dual vector proves a lower
    bound. The point is an example after it was moved into the polytope. The best bound and the best example
    of all steps are returned, so an early stop makes the bound weaker but not wrong. Bounds are computed for
    a slightly larger polytope, so that they hold despite rounding errors.

    Args:
        polytope: A batch of polytopes.

    Returns:
        The bounds and examples.
    """
    widened_polytope = polytope.widened()
    solver = InteriorPoint(widened_polytope)
    energy = polytope.x0.square().sum(1)
    best_bound, least_energy = torch.zeros_like(energy), energy
    best_example, gap, idle_steps = torch.zeros_like(polytope.x0), energy, 0
    for _ in range(STEPS):
        solver.step()
        bound = widened_polytope.bound(solver.nu)
        # A comparison with NaN is False, so this line ignores bounds that are NaN.
        best_bound = torch.where(bound > best_bound, bound, best_bound)
        image_changes = solver.point()
        image_changes = (
            image_changes * (INSIDE_FRACTION * polytope.room(image_changes).clamp(max=1))[:, None]
        )
        energies = (polytope.x0 + image_changes).square().sum(1)
        is_better = energies < least_energy
        least_energy = torch.where(is_better, energies, least_energy)
        best_example = torch.where(is_better[:, None], image_changes, best_example)
        gap, previous_gap = least_energy - best_bound, gap
        idle_steps = (
            0 if bool((previous_gap - gap > STALL_TOLERANCE * energy).any()) else idle_steps + 1
        )
        has_converged = bool((gap <= GAP * energy).all())
        if has_converged or idle_steps == PATIENCE or not bool(solver.is_moving.any()):
            break
    return EnergyMinimum(torch.minimum(best_bound, energy), best_example)


def eliminates_rows(rows: int, pixels: int, *, walled: bool) -> bool:
    """Decide whether each step factorizes a matrix with the size of the rows or with the size of the pixels.

    The matrix with the size of the rows also needs an orthonormal basis of the rows. If a value range limits
    the pixels, this basis changes in every step. Then this matrix is cheaper only if there are fewer than
    half as many rows as pixels.

    Args:
        rows: Number of rows of the polytope.
        pixels: Number of pixels that can change.
        walled: Whether a value range limits the pixels.

    Returns:
        True if the matrix with the size of the rows is cheaper.
    """
    return (2 * rows if walled else rows) < pixels


class InteriorPoint:
    """State of the interior-point method for one batch of polytopes, in units of |x0|.

    The unknown a = x - x0 is the change of the image. The constraint values z = G a are the products of all
    rows with a, followed by a. The distances from the limits are p = z - low, with multipliers alpha, and q =
    high - z, with multipliers beta. Pixels whose limits are closer than ``PINNED_TOLERANCE`` are constant.
    """

    def __init__(self, polytope: Polytope) -> None:
        self.polytope = polytope
        self.is_pinned = polytope.upper - polytope.lower <= PINNED_TOLERANCE * polytope.size
        self.columns = (~self.is_pinned).any(0)
        is_pinned = self.is_pinned[:, self.columns]
        self.rows = polytope.rows[:, :, self.columns]
        if is_pinned.any():
            self.rows = self.rows * ~is_pinned[:, None]
        self.x0 = torch.where(is_pinned, 0.0, polytope.x0[:, self.columns] / polytope.size)
        lower = polytope.lower[:, self.columns].masked_fill(is_pinned, -torch.inf)
        upper = polytope.upper[:, self.columns].masked_fill(is_pinned, torch.inf)
        low = torch.cat([polytope.low, lower], 1) / polytope.size
        high = torch.cat([polytope.high, upper], 1) / polytope.size
        self.has_low, self.has_high = low.isfinite(), high.isfinite()
        self.low, self.high = (
            low.masked_fill(~self.has_low, -1.0),
            high.masked_fill(~self.has_high, 1.0),
        )
        self.a = torch.zeros_like(self.x0)
        self.p, self.q = (-self.low).clamp(min=1e-3), self.high.clamp(min=1e-3)
        self.alpha, self.beta = (
            self.has_low * START_COMPLEMENTARITY / self.p,
            self.has_high * START_COMPLEMENTARITY / self.q,
        )
        self.end_count = (self.has_low.sum(1) + self.has_high.sum(1)).clamp(min=1)[:, None]
        self.is_moving = torch.ones_like(self.end_count, dtype=torch.bool)
        row_count, pixels = self.rows.shape[1:]
        self.has_pixel_walls = bool((self.has_low | self.has_high)[:, row_count:].any())
        self.eliminates_rows = eliminates_rows(row_count, pixels, walled=self.has_pixel_walls)

    @property
    def nu(self) -> Tensor:
        """Dual vectors (b, K), which prove a lower bound of the energy (squared norm) of images.

        There is one entry for each of the K linear inequalities of a polytope.
        """
        return (self.beta - self.alpha)[:, : self.rows.shape[1]] * self.polytope.size

    def point(self) -> Tensor:
        """Return the differences (b, d) between the solver's current images and the images x0."""
        image_changes = torch.zeros_like(self.polytope.x0)
        image_changes[:, self.columns] = self.a * self.polytope.size
        return image_changes.masked_fill(self.is_pinned, 0.0)

    def step(self) -> None:
        """Take one predictor-corrector step of the interior-point method (Mehrotra)."""
        # The matrix G maps the change a of the image to the constraint values. The solution meets three
        # equations: a + x0 = G'(alpha - beta), p = G a - low and q = high - G a. The step reduces the errors
        # in these equations.
        constraint_values = self._apply_rows(self.a)
        self.stationarity_error = (
            self.x0 + self.a - self._apply_transposed_rows(self.alpha - self.beta)
        )
        self.p_error = self.has_low * (constraint_values - self.low - self.p)
        self.q_error = self.has_high * (self.high - constraint_values - self.q)
        failures = self.factorize(
            (self.alpha / self.p + self.beta / self.q).clamp(max=MAX_STIFFNESS)
        )
        # Complementarity is the mean product of the distance from a wall and the wall's multiplier. It is
        # zero at the solution. A predictor step aims at complementarity 0. The complementarity that this step
        # would reach determines the target of the corrector step. The corrector step also compensates the
        # second-order error of the predictor step.
        complementarity = self._complementarity(0, (self.a,) * 5)
        direction = self._solve(0.0, 0.0)
        predicted_complementarity = self._complementarity(self._longest(direction), direction)
        centering = (predicted_complementarity / complementarity).clamp(0, 1) ** 3 * complementarity
        direction = self._solve(
            centering - direction[1] * direction[3], centering - direction[2] * direction[4]
        )
        step_length = STEP_FRACTION * self._longest(direction)
        is_valid = torch.stack([component.isfinite().all(1) for component in direction]).all(0) & (
            failures == 0
        )
        self.is_moving = is_valid[:, None] & (complementarity > 0)
        step_length = torch.where(self.is_moving, step_length, 0.0)
        for name, component in zip(("a", "p", "q", "alpha", "beta"), direction, strict=True):
            new_value = getattr(self, name) + step_length * component.nan_to_num(0.0, 0.0, 0.0)
            setattr(self, name, new_value)

    def _solve(self, alpha_p: Tensor | float, beta_q: Tensor | float) -> tuple[Tensor, ...]:
        """Solve for the Newton step that brings the products alpha p and beta q to given values.

        Args:
            alpha_p: Target of the products of p (distances from the lower limits) and alpha.
            beta_q: Target of the products of q (distances from the upper limits) and beta.

        Returns:
            The changes of a, p, q, alpha and beta.
        """
        alpha_change = self.has_low * ((alpha_p - self.alpha * self.p) / self.p)
        beta_change = self.has_high * ((beta_q - self.beta * self.q) / self.q)
        by_p, by_q = self.alpha / self.p, self.beta / self.q
        newton_right_side = (
            self._apply_transposed_rows(
                alpha_change - by_p * self.p_error - beta_change + by_q * self.q_error
            )
            - self.stationarity_error
        )
        a_change = self.apply_inverse(newton_right_side)
        constraint_changes = self._apply_rows(a_change)
        p_change, q_change = (
            self.has_low * (constraint_changes + self.p_error),
            self.has_high * (self.q_error - constraint_changes),
        )
        return (
            a_change,
            p_change,
            q_change,
            alpha_change - by_p * p_change,
            beta_change - by_q * q_change,
        )

    def factorize(self, stiff: Tensor) -> Tensor:
        """Factorize the matrix H = D + R'SR of a Newton step.

        The stiffness of a constraint is alpha / p + beta / q. The matrix R has the K rows of the polytope, S
        is the diagonal matrix of their stiffness, and D is the identity plus the stiffness of the pixels. If
        there are few rows, a K x K matrix is factorized. Let D^-1/2 R' = QT, where Q has orthonormal columns.
        Then H^-1 = D^-1/2 (I - QQ' + Q (I + TST')^-1 Q') D^-1/2. If rows have a large stiffness, this formula
        is more accurate than Woodbury's formula, because no large numbers cancel. It also avoids the inner
        products of rows, which lose accuracy if rows are nearly parallel.

        Args:
            stiff: (b, K + k) stiffness alpha / p + beta / q of all K rows and k pixels.

        Returns:
            (b,) numbers that are not zero if a factorization failed.
        """
        row_count = self.rows.shape[1]
        self.row_stiffness, self.diagonal = stiff[:, :row_count], 1 + stiff[:, row_count:]
        # If no value range limits the pixels, the matrix D is the identity in every step. Then the
        # orthonormal basis Q of the scaled rows never changes.
        if self.eliminates_rows and (self.has_pixel_walls or not hasattr(self, "basis")):
            scaled_rows = (self.rows * self.diagonal.rsqrt()[:, None]).mT
            self.basis, self.triangular = torch.linalg.qr(scaled_rows)
        rows_to_multiply = self.triangular.mT if self.eliminates_rows else self.rows
        rows_product = rows_to_multiply.mT @ (self.row_stiffness[..., None] * rows_to_multiply)
        rows_product.diagonal(dim1=1, dim2=2).add_(1.0 if self.eliminates_rows else self.diagonal)
        self.factor, failures = torch.linalg.cholesky_ex(rows_product)
        return failures

    def apply_inverse(self, target: Tensor) -> Tensor:
        """Solve the factorized equations H a = ``target`` for a (b, d)."""
        if not self.eliminates_rows:
            return torch.cholesky_solve(target[..., None], self.factor)[..., 0]
        solution = self._solve_by_row_matrix(target)
        # If pixels are very close to their limits, the solution has large rounding errors. So its error,
        # ``target - matrix_times_solution``, is computed, and a second solve corrects it.
        matrix_times_solution = self.diagonal * solution + _apply_transposed_rows(
            self.rows, self.row_stiffness * _apply_rows(self.rows, solution)
        )
        return solution + self._solve_by_row_matrix(target - matrix_times_solution)

    def _solve_by_row_matrix(self, target: Tensor) -> Tensor:
        scaled_target = (target * self.diagonal.rsqrt())[..., None]
        inside_coordinates = self.basis.mT @ scaled_target
        outside_span = scaled_target - self.basis @ inside_coordinates
        # The part outside the span of the basis may be small and consist mostly of rounding errors. A second
        # projection removes what these errors add inside the span.
        second_projection = self.basis.mT @ outside_span
        outside_span = outside_span - self.basis @ second_projection
        solution = outside_span + self.basis @ torch.cholesky_solve(
            inside_coordinates + second_projection, self.factor
        )
        return solution[..., 0] * self.diagonal.rsqrt()

    def _longest(self, move: tuple[Tensor, ...]) -> Tensor:
        """Return the largest step lengths up to 1 at which all distances from limits stay nonnegative.

        Their multipliers stay nonnegative too. The result has the shape (b, 1).
        """
        values_with_changes = zip((self.p, self.q, self.alpha, self.beta), move[1:], strict=True)
        longest_steps = [
            torch.where(change < 0, -value / change, 1.0).amin(1, keepdim=True)
            for value, change in values_with_changes
        ]
        return torch.cat(longest_steps, 1).amin(1, keepdim=True).clamp(max=1)

    def _complementarity(self, length: Tensor | float, move: tuple[Tensor, ...]) -> Tensor:
        if isinstance(length, (int, float)):
            wall_products = self.alpha * self.p * self.has_low + self.beta * self.q * self.has_high
        else:
            _, p, q, alpha, beta = (length * component for component in move)
            wall_products = (self.alpha + alpha) * (self.p + p) * self.has_low
            wall_products = wall_products + (self.beta + beta) * (self.q + q) * self.has_high
        return wall_products.sum(1, keepdim=True) / self.end_count

    def _apply_rows(self, a: Tensor) -> Tensor:
        return torch.cat([_apply_rows(self.rows, a), a], 1)

    def _apply_transposed_rows(self, y: Tensor) -> Tensor:
        row_count = self.rows.shape[1]
        return _apply_transposed_rows(self.rows, y[:, :row_count]) + y[:, row_count:]


def _apply_rows(rows: Tensor, a: Tensor) -> Tensor:
    return (rows @ a[..., None])[..., 0]


def _apply_transposed_rows(rows: Tensor, y: Tensor) -> Tensor:
    return (rows.mT @ y[..., None])[..., 0]


def _maximize_product(nu: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the largest products nu_k z_k (b, K) of a dual vector nu with values z_k in [low_k, high_k].

    If nu_k is 0, the product is 0, even if a limit is infinite.
    """
    return torch.where(nu > 0, nu * high, torch.where(nu < 0, nu * low, 0.0))


def _find_largest_factor(z: Tensor, low: Tensor, high: Tensor) -> Tensor:
    largest_factors = torch.where(z > 0, high / z, torch.where(z < 0, low / z, torch.inf))
    return largest_factors.amin(1) if z.shape[1] else z.new_full((len(z),), torch.inf)
