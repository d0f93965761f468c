"""The smallest image in a polytope, with a lower bound that is proved even if the solver fails.

    minimize |x|^2   over   low <= rows (x - x0) <= high,   lower <= x - x0 <= upper,   0 inside all of them

For ANY vector nu, every x of the polytope satisfies <nu, rows (x - x0)> <= s(nu) = sum_k max(nu_k low_k,
nu_k high_k). So by weak duality

    |x|^2 / 2  >=  min_{lower <= z - x0 <= upper} |z|^2 / 2 + <rows^T nu, z - x0>  -  s(nu).

The minimum separates into pixels: z = clamp(-rows^T nu). The bound needs no feasible point, and an
allowance for rounding is subtracted. The vectors nu come from a primal-dual interior-point method
(Mehrotra). Its points are pulled towards x0 until they lie inside, and then serve as examples. The method
takes about twelve factorizations of d x d matrices, or of K x K matrices if there are few rows, for a batch
of images at once. Switches that nearly touch the image stall first-order methods, but not this method.

Shapes: rows (b, K, d), x0 (b, d), low, high (b, K), lower, upper (b, d). Ends may be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Maximum number of interior-point steps. A gap below GAP |x0|^2 counts as converged.
STEPS, GAP = 60, 1e-6
# A step is idle if the gap shrinks by less than STALL_TOLERANCE |x0|^2. PATIENCE idle steps end the loop.
STALL_TOLERANCE, PATIENCE = 1e-8, 8
# The first complementarity, and the share of the way to the nearest end that a step takes.
START_COMPLEMENTARITY, STEP_FRACTION = 1e-2, 0.995
WALL_ROUNDING = 1e-12  # relative to |x0|: how far rounding may misplace a wall
ROUNDING = 1e-12  # relative to the terms of a bound
# Relative to |x0|: the solver fixes pixels with less room, but the bound does not.
PINNED_TOLERANCE = 1e-9
INSIDE_FRACTION = 1 - 1e-9  # an example touches no wall, where rounding would decide a gate
MAX_STIFFNESS = 1e20  # keeps the factorization finite if a distance becomes zero


@dataclass(frozen=True)
class Polytope:
    """The set low <= rows a <= high and lower <= a <= upper for a = x - x0. Rows have length one."""

    rows: Tensor
    x0: Tensor
    low: Tensor
    high: Tensor
    lower: Tensor
    upper: Tensor

    @property
    def size(self) -> Tensor:
        """(b, 1) norms |x0|."""
        return self.x0.norm(dim=1, keepdim=True).clamp(min=1e-150)

    def widened(self) -> Polytope:
        """Return a polytope that contains this one if rounding has misplaced the walls."""
        room = WALL_ROUNDING * self.size
        return Polytope(
            self.rows,
            self.x0,
            self.low - room,
            self.high + room,
            self.lower - room,
            self.upper + room,
        )

    def bound(self, nu: Tensor) -> Tensor:
        """Return (b,) lower bounds of |x|^2, valid for any nu (b, K)."""
        linear = _back(self.rows, nu)
        a = torch.minimum(torch.maximum(-linear - self.x0, self.lower), self.upper)
        x = self.x0 + a
        terms = torch.cat([x.square() / 2, linear * a, -_support(nu, self.low, self.high)], 1)
        rounding = nu.abs().sum(1) * (a.norm(dim=1) + self.size[:, 0]) + terms.abs().sum(1)
        return 2 * (terms.sum(1) - ROUNDING * rounding)

    def room(self, a: Tensor) -> Tensor:
        """Return the (b,) largest s such that s a is inside, infinite if nothing limits it."""
        return torch.minimum(
            _room(_ahead(self.rows, a), self.low, self.high), _room(a, self.lower, self.upper)
        )


@dataclass(frozen=True)
class EnergyMinimum:
    """Bounds and examples of the smallest energy.

    Attributes:
        bound: (b,) no image has less energy.
        example: (b, d) a = x - x0 of the smallest image found.
    """

    bound: Tensor
    example: Tensor


def minimize_energy(polytope: Polytope) -> EnergyMinimum:
    """Improve bound and example until they agree.

    Every step of the interior-point method gives a dual vector and a point. Any dual vector proves a lower
    bound. The point, pulled back a little into the polytope, is an example. The best of each is stored, so
    an early stop makes the bound weaker but not wrong. Bounds are those of a polytope that is wider by the
    rounding errors of its rows.

    Args:
        polytope: A batch of polytopes.

    Returns:
        The bounds and examples.
    """
    widened = polytope.widened()
    state = _State(widened)
    energy = polytope.x0.square().sum(1)
    best, least_energy = torch.zeros_like(energy), energy
    example, gap, idle = torch.zeros_like(polytope.x0), energy, 0
    for _ in range(STEPS):
        state.step()
        bound = widened.bound(state.nu)
        best = torch.where(bound > best, bound, best)  # the comparison is false for NaN
        a = state.point()
        a = a * (INSIDE_FRACTION * polytope.room(a).clamp(max=1))[:, None]
        energies = (polytope.x0 + a).square().sum(1)
        better = energies < least_energy
        least_energy = torch.where(better, energies, least_energy)
        example = torch.where(better[:, None], a, example)
        gap, previous_gap = least_energy - best, gap
        idle = 0 if bool((previous_gap - gap > STALL_TOLERANCE * energy).any()) else idle + 1
        has_converged = bool((gap <= GAP * energy).all())
        if has_converged or idle == PATIENCE or not bool(state.is_moving.any()):
            break
    return EnergyMinimum(torch.minimum(best, energy), example)


def eliminates_rows(rows: int, pixels: int, *, walled: bool) -> bool:
    """Return True if rows are eliminated, False if pixels are eliminated.

    If pixels have walls, every step needs another basis. This costs as much as the dense matrix once there
    are half as many rows as pixels.

    Args:
        rows: Number of rows.
        pixels: Number of pixels.
        walled: Pixels have walls.

    Returns:
        Whether to eliminate rows.
    """
    return (2 * rows if walled else rows) < pixels


class _State:
    """Interior-point iterates of one batch, in units of |x0|.

    z = G a runs over rows and pixels. p = z - low and q = high - z are its distances from both ends, alpha
    and beta their multipliers. Pinned pixels do not move.
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
        k, pixels = self.rows.shape[1:]
        self.has_pixel_walls = bool((self.has_low | self.has_high)[:, k:].any())
        self.eliminates_rows = eliminates_rows(k, pixels, walled=self.has_pixel_walls)

    @property
    def nu(self) -> Tensor:
        """The (b, K) dual vector of the rows. The bound minimizes over pixels itself."""
        return (self.beta - self.alpha)[:, : self.rows.shape[1]] * self.polytope.size

    def point(self) -> Tensor:
        """Return the (b, d) primal point."""
        a = torch.zeros_like(self.polytope.x0)
        a[:, self.columns] = self.a * self.polytope.size
        return a.masked_fill(self.is_pinned, 0.0)

    def step(self) -> None:
        """Take one predictor-corrector step."""
        # Errors of stationarity a + x0 = G'(alpha - beta), and of p, q as distances of z = G a.
        z = self._ahead(self.a)
        self.stationarity_error = self.x0 + self.a - self._back(self.alpha - self.beta)
        self.p_error = self.has_low * (z - self.low - self.p)
        self.q_error = self.has_high * (self.high - z - self.q)
        failed = self._factorize(
            (self.alpha / self.p + self.beta / self.q).clamp(max=MAX_STIFFNESS)
        )
        # The predictor aims at complementarity zero. Its step length decides how much to center, and the
        # corrector compensates its second-order term (Mehrotra).
        gap = self._complementarity(0, (self.a,) * 5)
        move = self._solve(0.0, 0.0)
        ahead = self._complementarity(self._longest(move), move)
        center = (ahead / gap).clamp(0, 1) ** 3 * gap
        move = self._solve(center - move[1] * move[3], center - move[2] * move[4])
        length = STEP_FRACTION * self._longest(move)
        is_valid = torch.stack([component.isfinite().all(1) for component in move]).all(0) & (
            failed == 0
        )
        self.is_moving = is_valid[:, None] & (gap > 0)
        length = torch.where(self.is_moving, length, 0.0)
        for name, component in zip(("a", "p", "q", "alpha", "beta"), move, strict=True):
            moved = getattr(self, name) + length * component.nan_to_num(0.0, 0.0, 0.0)
            setattr(self, name, moved)

    def _solve(self, lower: Tensor | float, upper: Tensor | float) -> tuple[Tensor, ...]:
        """Return the Newton step to alpha p = lower, beta q = upper: moves of a, p, q, alpha, beta."""
        need_p = self.has_low * ((lower - self.alpha * self.p) / self.p)
        need_q = self.has_high * ((upper - self.beta * self.q) / self.q)
        by_p, by_q = self.alpha / self.p, self.beta / self.q
        target = (
            self._back(need_p - by_p * self.p_error - need_q + by_q * self.q_error)
            - self.stationarity_error
        )
        a = self._inverse(target)
        z = self._ahead(a)
        p, q = self.has_low * (z + self.p_error), self.has_high * (self.q_error - z)
        return a, p, q, need_p - by_p * p, need_q - by_q * q

    def _factorize(self, stiff: Tensor) -> Tensor:
        """Factorize H = D + R'SR, the rest of I + G' stiff G: rows R with S, and pixels in D = I + theirs.

        If there are few rows, a K x K matrix is factorized. Let D^-1/2 R' = QT, where Q has orthonormal
        columns. H does not act outside the range of Q: H^-1 = D^-1/2 (I - QQ' + Q (I + TST')^-1 Q') D^-1/2.
        Nothing cancels in this formula, unlike in Woodbury's I - B'(I + BB')^-1 B for stiff rows. It also
        avoids products of rows that may be nearly parallel.

        Args:
            stiff: (b, K + k) stiffness of all walls.

        Returns:
            (b,) which factorizations failed, as nonzero numbers.
        """
        k = self.rows.shape[1]
        self.row_stiffness, self.diagonal = stiff[:, :k], 1 + stiff[:, k:]
        # Without walls of pixels D = I in every step, so one basis suffices.
        if self.eliminates_rows and (self.has_pixel_walls or not hasattr(self, "basis")):
            across = (self.rows * self.diagonal.rsqrt()[:, None]).mT
            self.basis, self.triangular = torch.linalg.qr(across)
        rows = self.triangular.mT if self.eliminates_rows else self.rows
        matrix = rows.mT @ (self.row_stiffness[..., None] * rows)
        matrix.diagonal(dim1=1, dim2=2).add_(1.0 if self.eliminates_rows else self.diagonal)
        self.factor, failed = torch.linalg.cholesky_ex(matrix)
        return failed

    def _inverse(self, target: Tensor) -> Tensor:
        """Return H^-1 target, (b, d)."""
        if not self.eliminates_rows:
            return torch.cholesky_solve(target[..., None], self.factor)[..., 0]
        solution = self._through_rows(target)
        # A basis has rounding errors of its largest entries, which may exceed stiff pixels. So the
        # residual of the equation is solved once more.
        product = self.diagonal * solution + _back(
            self.rows, self.row_stiffness * _ahead(self.rows, solution)
        )
        return solution + self._through_rows(target - product)

    def _through_rows(self, target: Tensor) -> Tensor:
        across = (target * self.diagonal.rsqrt())[..., None]
        inside = self.basis.mT @ across
        across = across - self.basis @ inside
        # Stiff rows make ``inside`` so long that the difference is mostly rounding. So we project again.
        correction = self.basis.mT @ across
        across = across - self.basis @ correction
        solution = across + self.basis @ torch.cholesky_solve(inside + correction, self.factor)
        return solution[..., 0] * self.diagonal.rsqrt()

    def _longest(self, move: tuple[Tensor, ...]) -> Tensor:
        """Return the (b, 1) step length that keeps distances and multipliers positive, at most 1."""
        pairs = zip((self.p, self.q, self.alpha, self.beta), move[1:], strict=True)
        ends = [torch.where(d < 0, -v / d, 1.0).amin(1, keepdim=True) for v, d in pairs]
        return torch.cat(ends, 1).amin(1, keepdim=True).clamp(max=1)

    def _complementarity(self, length: Tensor | float, move: tuple[Tensor, ...]) -> Tensor:
        if isinstance(length, (int, float)):
            total = self.alpha * self.p * self.has_low + self.beta * self.q * self.has_high
        else:
            _, p, q, alpha, beta = (length * component for component in move)
            total = (self.alpha + alpha) * (self.p + p) * self.has_low
            total = total + (self.beta + beta) * (self.q + q) * self.has_high
        return total.sum(1, keepdim=True) / self.end_count

    def _ahead(self, a: Tensor) -> Tensor:
        return torch.cat([_ahead(self.rows, a), a], 1)

    def _back(self, y: Tensor) -> Tensor:
        k = self.rows.shape[1]
        return _back(self.rows, y[:, :k]) + y[:, k:]


def _ahead(rows: Tensor, a: Tensor) -> Tensor:
    return (rows @ a[..., None])[..., 0]


def _back(rows: Tensor, y: Tensor) -> Tensor:
    return (rows.mT @ y[..., None])[..., 0]


def _support(nu: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the maximum of nu_k z_k over low_k <= z_k <= high_k. It is 0 if nu_k is 0."""
    return torch.where(nu > 0, nu * high, torch.where(nu < 0, nu * low, 0.0))


def _room(z: Tensor, low: Tensor, high: Tensor) -> Tensor:
    distance = torch.where(z > 0, high / z, torch.where(z < 0, low / z, torch.inf))
    return distance.amin(1) if z.shape[1] else z.new_full((len(z),), torch.inf)
