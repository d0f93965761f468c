"""The least image of a polytope, with a bound that is proved whatever the solver did.

    least |x|^2   over   low <= rows (x - x0) <= high,   left <= x - x0 <= right,   0 inside all of them

For ANY vector nu every x of the polytope has <nu, rows (x - x0)> <= s(nu) = sum_k max(nu_k low_k,
nu_k high_k), so by weak duality

    |x|^2 / 2  >=  min_{left <= z - x0 <= right} |z|^2 / 2 + <rows^T nu, z - x0>  -  s(nu),

and the minimum is that of one pixel at a time: z = clamp(-rows^T nu). Nothing has to be feasible for
the bound to hold; an allowance for rounding is taken off. The nu are those of a primal-dual
interior-point method (Mehrotra's), whose points, pulled towards x0 until they lie inside, are the
examples. It takes a dozen factorizations of d x d, or of K x K where there are few rows, for a batch of
images at once; switches that nearly touch the image, where first-order methods stall, cost it nothing.

Shapes: rows (b, K, d), x0 (b, d), low, high (b, K), left, right (b, d); ends may be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS, GAP = 60, 1e-6  # interior-point steps at most; |x0|^2 times this: bound and example have met
# |x0|^2 times the first: a step that brings them no nearer than that is idle; so many in a row are enough.
STALLED, PATIENCE = 1e-8, 8
START, SHORT = 1e-2, 0.995  # first complementarity, share of the way to the nearest end
WIDEN = 1e-12  # of |x0|: by what a wall may be misplaced by rounding
ROUNDING = 1e-12  # of the terms of a bound
PINNED = 1e-9  # of |x0|: a pixel with less room is held by the solver, not by the bound
INSIDE = 1 - 1e-9  # an example does not touch a wall: at zero a gate is a matter of rounding
STIFF = 1e20  # of a wall: keeps the factorization finite where a distance has become zero


@dataclass(frozen=True)
class Polytope:
    """low <= rows a <= high and left <= a <= right for a = x - x0; rows of length one."""

    rows: Tensor
    x0: Tensor
    low: Tensor
    high: Tensor
    left: Tensor
    right: Tensor

    @property
    def size(self) -> Tensor:
        """(b, 1) |x0|."""
        return self.x0.norm(dim=1, keepdim=True).clamp(min=1e-150)

    def widened(self) -> Polytope:
        """Walls moved out by what rounding may have misplaced them: contains the polytope."""
        room = WIDEN * self.size
        return Polytope(
            self.rows,
            self.x0,
            self.low - room,
            self.high + room,
            self.left - room,
            self.right + room,
        )

    def bound(self, nu: Tensor) -> Tensor:
        """(b,) lower bounds of |x|^2 from any nu: (b, K)."""
        pull = _back(self.rows, nu)
        a = torch.minimum(torch.maximum(-pull - self.x0, self.left), self.right)
        x = self.x0 + a
        terms = torch.cat([x.square() / 2, pull * a, -_support(nu, self.low, self.high)], 1)
        lost = nu.abs().sum(1) * (a.norm(dim=1) + self.size[:, 0]) + terms.abs().sum(1)
        return 2 * (terms.sum(1) - ROUNDING * lost)

    def room(self, a: Tensor) -> Tensor:
        """(b,) largest s with s a inside; inf where nothing is in the way."""
        return torch.minimum(
            _room(_ahead(self.rows, a), self.low, self.high), _room(a, self.left, self.right)
        )


@dataclass(frozen=True)
class Least:
    """bound: (b,) no image has less energy than this; example: (b, d) the least a that was found."""

    bound: Tensor
    example: Tensor


def least(given: Polytope) -> Least:
    """Bound and example, until they meet.

    Every step of the interior-point method leaves a dual vector, which proves a lower bound whatever it
    is, and a point, which pulled back a little into the polytope is an example. The best of either is
    kept, so that stopping early costs sharpness and never truth. Bounds are of a polytope that is wider
    by the rounding of its rows.
    """
    wide = given.widened()
    state = _State(wide)
    energy = given.x0.square().sum(1)
    best, least_energy = torch.zeros_like(energy), energy
    example, gap, idle = torch.zeros_like(given.x0), energy, 0
    for _ in range(STEPS):
        state.step()
        bound = wide.bound(state.nu)
        best = torch.where(bound > best, bound, best)  # false for nan
        a = state.point()
        a = a * (INSIDE * given.room(a).clamp(max=1))[:, None]
        found = (given.x0 + a).square().sum(1)
        better = found < least_energy
        least_energy = torch.where(better, found, least_energy)
        example = torch.where(better[:, None], a, example)
        gap, before = least_energy - best, gap
        idle = 0 if bool((before - gap > STALLED * energy).any()) else idle + 1
        met = bool((gap <= GAP * energy).all())
        if met or idle == PATIENCE or not bool(state.moving.any()):
            break
    return Least(torch.minimum(best, energy), example)


def few(rows: int, pixels: int, *, walled: bool) -> bool:
    """Whether rows are eliminated, not pixels.

    Where pixels have walls every step needs a basis of its own, which costs as much as the dense matrix
    once there are half as many rows as pixels.
    """
    return (2 * rows if walled else rows) < pixels


class _State:
    """Interior-point iterates of one batch, in units of |x0|.

    z = G a runs over rows and pixels; p = z - low and q = high - z are its distances from both ends,
    alpha and beta their multipliers. Pinned pixels stay where they are.
    """

    def __init__(self, given: Polytope) -> None:
        self.given = given
        self.held = given.right - given.left <= PINNED * given.size
        self.columns = (~self.held).any(0)
        held = self.held[:, self.columns]
        self.rows = given.rows[:, :, self.columns]
        if held.any():
            self.rows = self.rows * ~held[:, None]
        self.x0 = torch.where(held, 0.0, given.x0[:, self.columns] / given.size)
        left = given.left[:, self.columns].masked_fill(held, -torch.inf)
        right = given.right[:, self.columns].masked_fill(held, torch.inf)
        low = torch.cat([given.low, left], 1) / given.size
        high = torch.cat([given.high, right], 1) / given.size
        self.below, self.above = low.isfinite(), high.isfinite()
        self.low, self.high = low.masked_fill(~self.below, -1.0), high.masked_fill(~self.above, 1.0)
        self.a = torch.zeros_like(self.x0)
        self.p, self.q = (-self.low).clamp(min=1e-3), self.high.clamp(min=1e-3)
        self.alpha, self.beta = self.below * START / self.p, self.above * START / self.q
        self.count = (self.below.sum(1) + self.above.sum(1)).clamp(min=1)[:, None]
        self.moving = torch.ones_like(self.count, dtype=torch.bool)
        k, pixels = self.rows.shape[1:]
        self.walled = bool((self.below | self.above)[:, k:].any())
        self.few = few(k, pixels, walled=self.walled)

    @property
    def nu(self) -> Tensor:
        """(b, K) the dual vector of the rows, pixels left to the bound's own minimum."""
        return (self.beta - self.alpha)[:, : self.rows.shape[1]] * self.given.size

    def point(self) -> Tensor:
        """(b, d) the primal point."""
        a = torch.zeros_like(self.given.x0)
        a[:, self.columns] = self.a * self.given.size
        return a.masked_fill(self.held, 0.0)

    def step(self) -> None:
        """One predictor-corrector step."""
        # What is still wrong: stationarity a + x0 = G'(alpha - beta), and p, q as distances of z = G a.
        z = self._ahead(self.a)
        self.drift = self.x0 + self.a - self._back(self.alpha - self.beta)
        self.miss_p = self.below * (z - self.low - self.p)
        self.miss_q = self.above * (self.high - z - self.q)
        failed = self._factorize((self.alpha / self.p + self.beta / self.q).clamp(max=STIFF))
        # Predictor: straight for complementarity zero. How far that gets says how much to center, and
        # its second-order term is put right in the corrector (Mehrotra).
        gap = self._complementarity(0, (self.a,) * 5)
        move = self._solve(0.0, 0.0)
        ahead = self._complementarity(self._longest(move), move)
        center = (ahead / gap).clamp(0, 1) ** 3 * gap
        move = self._solve(center - move[1] * move[3], center - move[2] * move[4])
        length = SHORT * self._longest(move)
        sound = torch.stack([part.isfinite().all(1) for part in move]).all(0) & (failed == 0)
        self.moving = sound[:, None] & (gap > 0)
        length = torch.where(self.moving, length, 0.0)
        for name, part in zip(("a", "p", "q", "alpha", "beta"), move, strict=True):
            moved = getattr(self, name) + length * part.nan_to_num(0.0, 0.0, 0.0)
            setattr(self, name, moved)

    def _solve(self, lower: Tensor | float, upper: Tensor | float) -> tuple[Tensor, ...]:
        """Newton step towards alpha p = lower, beta q = upper: moves of a, p, q, alpha, beta."""
        need_p = self.below * ((lower - self.alpha * self.p) / self.p)
        need_q = self.above * ((upper - self.beta * self.q) / self.q)
        by_p, by_q = self.alpha / self.p, self.beta / self.q
        right = self._back(need_p - by_p * self.miss_p - need_q + by_q * self.miss_q) - self.drift
        a = self._inverse(right)
        z = self._ahead(a)
        p, q = self.below * (z + self.miss_p), self.above * (self.miss_q - z)
        return a, p, q, need_p - by_p * p, need_q - by_q * q

    def _factorize(self, stiff: Tensor) -> Tensor:
        """Of H = D + R'SR, what is left of I + G' stiff G: rows R with S, pixels alone in D = I + theirs.

        Of few rows a K x K matrix is factorized. With D^-1/2 R' = QT, Q of orthonormal columns, H leaves
        alone what is across from Q: H^-1 = D^-1/2 (I - QQ' + Q (I + TST')^-1 Q') D^-1/2. Nothing cancels
        in it, as it does in Woodbury's I - B'(I + BB')^-1 B of stiff rows, and no product of rows is
        taken where they may be nearly parallel. Returns (b,) which failed, not being zero.
        """
        k = self.rows.shape[1]
        self.stiff, self.alone = stiff[:, :k], 1 + stiff[:, k:]
        if self.few and (self.walled or not hasattr(self, "basis")):  # else D = I in every step
            across = (self.rows * self.alone.rsqrt()[:, None]).mT
            self.basis, self.within = torch.linalg.qr(across)
        rows = self.within.mT if self.few else self.rows
        matrix = rows.mT @ (self.stiff[..., None] * rows)
        matrix.diagonal(dim1=1, dim2=2).add_(1.0 if self.few else self.alone)
        self.factor, failed = torch.linalg.cholesky_ex(matrix)
        return failed

    def _inverse(self, right: Tensor) -> Tensor:
        """H^-1 right, (b, d)."""
        if not self.few:
            return torch.cholesky_solve(right[..., None], self.factor)[..., 0]
        found = self._through_rows(right)
        # A basis is rounded as a whole, and stiff pixels are the least of it: what is left of the
        # equation is solved once more.
        kept = self.alone * found + _back(self.rows, self.stiff * _ahead(self.rows, found))
        return found + self._through_rows(right - kept)

    def _through_rows(self, right: Tensor) -> Tensor:
        across = (right * self.alone.rsqrt())[..., None]
        inside = self.basis.mT @ across
        across = across - self.basis @ inside
        # Stiff rows make what is inside so long that the difference is mostly its rounding: once more.
        more = self.basis.mT @ across
        across = across - self.basis @ more
        found = across + self.basis @ torch.cholesky_solve(inside + more, self.factor)
        return found[..., 0] * self.alone.rsqrt()

    def _longest(self, move: tuple[Tensor, ...]) -> Tensor:
        """(b, 1) how much of a move keeps distances and multipliers positive, at most all of it."""
        parts = zip((self.p, self.q, self.alpha, self.beta), move[1:], strict=True)
        ends = [torch.where(d < 0, -v / d, 1.0).amin(1, keepdim=True) for v, d in parts]
        return torch.cat(ends, 1).amin(1, keepdim=True).clamp(max=1)

    def _complementarity(self, length: Tensor | float, move: tuple[Tensor, ...]) -> Tensor:
        if isinstance(length, (int, float)):
            total = self.alpha * self.p * self.below + self.beta * self.q * self.above
        else:
            _, p, q, alpha, beta = (length * part for part in move)
            total = (self.alpha + alpha) * (self.p + p) * self.below
            total = total + (self.beta + beta) * (self.q + q) * self.above
        return total.sum(1, keepdim=True) / self.count

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
    """max of nu_k z_k over low_k <= z_k <= high_k; 0 where nu_k is, whatever the ends."""
    return torch.where(nu > 0, nu * high, torch.where(nu < 0, nu * low, 0.0))


def _room(z: Tensor, low: Tensor, high: Tensor) -> Tensor:
    far = torch.where(z > 0, high / z, torch.where(z < 0, low / z, torch.inf))
    return far.amin(1) if z.shape[1] else z.new_full((len(z),), torch.inf)
