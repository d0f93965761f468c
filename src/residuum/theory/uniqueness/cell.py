"""The cell of one candidate: all a for which x + a and x - a have the gates of x and stay in the box.

    P = { a : |<b_k, a>| <= |s_k|  for every switch k,  |a_p| <= min(x_p - low_p, high_p - x_p) }

(s_k the switch's value, b_k its gradient in x: residuum.theory.patterns.) Every pair x +- a with a in
P is as good as x. P is a symmetric polytope. With rows b_k / |s_k| stacked as B (box included), the
ellipsoid {|B a| <= 1} lies inside P and sqrt(rows) times it contains P; H = B^T B.

    travel      1 / max_k |<B_k, v>|: exact stopping point along v
    pixels      of pixel p along H^-1 e_p, where the ellipsoid lets it go furthest
    nearest     argmin_{a in P} |a + c|^2 by ADMM on B a = s, |s| <= 1, with its dual bound
                max_y -|B^T y|^2 - 2 <B^T y, c> - 2 |y|_1
    radius      max_P |a| is not tractable: eigenvectors of H^-1, then a -> nearest to a far multiple of
                a, which never shortens it; the longest found is attained, an ellipsoid bounds it above

Coordinates: free pixels with a box, row(W1) without one; switches at zero are kept by going to the
complement of their gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from residuum.theory.patterns import slope_matrix, switches

KINK = 1e-10  # of |b_k| (1 + |x|): a switch that is nearer to zero sits on it
THIN = 1e-4  # of |x|
PINNED = 1e-9  # of |x|: a pixel that is nearer to the end of its range cannot move
GAP, STEPS, CHECK = 1e-3, 300, 25
RELAX, PENALTY, PATIENCE, SWING = 1.6, 1e-3, 100, 3.0
INSIDE = 1 - 1e-9  # a wall is not touched: at zero a gate is a matter of rounding
FAR, CLIMBS, CLIMB_STEPS, BLOCK, POWERS = 20.0, 2, 50, 16, 6


@dataclass(frozen=True)
class Cell:
    """P in coordinates a = T z.

    rows B: (J, k); basis T: (d, k) orthonormal; inverse: H^-1 (k, k); kinks: switches that sit at
    zero; reach: of the free pixels in the box; widths: (J,) <= 1, what walls closer than THIN are
    multiplied by in ADMM, and softened: (J, k) those rows: a very thin P would stall it.
    """

    rows: Tensor
    basis: Tensor
    inverse: Tensor
    kinks: int
    reach: Tensor | None
    widths: Tensor
    softened: Tensor

    @cached_property
    def single(self) -> Tensor:
        """The softened rows in single precision: steps are bound by memory; checks are in double."""
        return self.softened.float()

    @cached_property
    def gram(self) -> Tensor:
        """(k, k) of the softened rows."""
        return self.softened.T @ self.softened

    def travel(self, z: Tensor) -> Tensor:
        """(k, n) directions -> (n,) largest t with t z in P."""
        if not len(self.rows):
            return z.new_full((z.shape[1],), math.inf)
        return 1 / (self.rows @ z).abs().amax(0)

    @property
    def most(self) -> float:
        """No a in P is longer: |B a|^2 <= J there, and inf-norm bounds the largest eigenvalue."""
        if not self.basis.shape[1]:
            return 0.0
        bound = math.sqrt(len(self.rows) * float(self.inverse.abs().sum(1).max()))
        return min(bound, float(self.reach.norm())) if self.reach is not None else bound

    def pixels(self) -> Tensor:
        """(d,) how far each pixel moves at least, other pixels moving as they like."""
        along = self.inverse @ self.basis.T  # (k, d): column p is H^-1 T^T e_p
        own = (self.basis.T * along).sum(0)
        return torch.nan_to_num(own * self.travel(along), nan=0.0, posinf=0.0)

    def nearest(self, c: Tensor, steps: int = STEPS, gap: float = GAP) -> tuple[Tensor, float]:
        """a in P nearest to -c (d,), and a lower bound on |a + c|^2 over P."""
        inside = self.basis.T @ c
        rest = float((c - self.basis @ inside).square().sum())
        size = float(inside.square().sum())
        if size == 0 or not len(self.rows):
            return -self.basis @ inside, rest
        rho, b, g = PENALTY * size, self.single, self.widths.float()
        solve, target = self._solver(rho), inside.float()
        s = b.new_zeros(len(b))
        w, best, least, bound = s, torch.zeros_like(inside), size, 0.0
        for step in range(1, steps + 1):
            z = solve @ (rho * (b.T @ (s - w)) - target)
            image, before = b @ z, s
            mixed = RELAX * image + (1 - RELAX) * s
            s = (mixed + w).clamp(-g, g)
            w = w + mixed - s
            if step % CHECK and step < steps:
                continue
            reached, y = z.double(), rho * w.double()
            reached = reached * min(1.0, float(self.travel(reached[:, None])[0]))
            value, pull = float((reached + inside).square().sum()), self.softened.T @ y
            dual = -float(pull @ pull) - 2 * float(pull @ inside) - 2 * float(y.abs() @ self.widths)
            best, least = (reached, value) if value < least else (best, least)
            bound = max(bound, dual)
            if least - bound <= gap * size:
                break
            turn = _balance(image, s, rho * (b.T @ (s - before)), pull)
            if step >= PATIENCE and not 1 / SWING < turn < SWING:
                rho, w = rho * turn, w / turn
                solve = self._solver(rho)
        return self.basis @ best * INSIDE, rest + bound

    def longest(self, start: Tensor, seed: int) -> Tensor:
        """(d,) the longest a of P found: leading eigenvectors of H^-1, ``start``, then climbing."""
        k = self.basis.shape[1]
        rng = torch.Generator().manual_seed(seed)
        v = torch.randn(k, min(BLOCK, k), generator=rng, dtype=torch.float64).to(self.basis)
        for _ in range(POWERS):
            v = torch.linalg.qr(self.inverse @ v)[0]
        own = self.basis.T @ start
        if float(own.norm()) > 0:
            v = torch.cat([v, (own / own.norm())[:, None]], 1)
        reach = self.travel(v)
        best = self.basis @ (v[:, reach.argmax()] * reach.max())
        for _ in range(CLIMBS):
            tried = self.nearest(-FAR * best, CLIMB_STEPS, 0.0)[0]
            if float(tried.norm()) <= 1.01 * float(best.norm()):
                break
            best = tried
        return best

    def _solver(self, rho: float) -> Tensor:
        """(1 + rho H)^-1 in single precision."""
        eye = torch.eye(len(self.inverse), dtype=self.rows.dtype, device=self.rows.device)
        factor = torch.linalg.cholesky(eye + rho * self.gram)
        return torch.cholesky_inverse(factor).float()


def build_cell(
    model: nn.Module, x: Tensor, span: Tensor, box: tuple[Tensor, Tensor] | None
) -> Cell:
    """Cell of x: (*shape); span: (rank, d) basis of row(W1)."""
    value, slope = gates(model, x)
    flat, reach = x.flatten(), None
    basis = span.T
    if box is not None:
        low, high = (end.expand_as(x).flatten() for end in box)
        reach = torch.minimum(flat - low, high - flat).clamp(min=0)
        free = reach > PINNED * flat.norm()
        basis = torch.eye(len(flat), dtype=x.dtype, device=x.device)[:, free]
        reach, slope = reach[free], slope[:, free]
    else:
        slope = slope @ basis
    size = slope.norm(dim=1)
    kink = (value.abs() <= KINK * size * (1 + flat.norm())) & (size > 0)
    wall = ~kink & (size > 0)
    rows = slope[wall] / value[wall].abs()[:, None]
    if reach is not None:
        rows = torch.cat([rows, torch.diag(1 / reach)])
    if kink.any():
        turn = _complement(slope[kink])
        rows, basis = rows @ turn, basis @ turn
    inverse = _inverse(rows, basis.shape[1])
    widths = (1 / rows.norm(dim=1) / (THIN * flat.norm())).clamp(max=1)
    softened = widths[:, None] * rows
    return Cell(rows, basis, inverse, int(kink.sum()), reach, widths, softened)


def gates(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """(K,) values of all switches at x and (K, d) their gradients."""
    return switches([model], x[None]).values[0], slope_matrix([model], x)


def _balance(image: Tensor, s: Tensor, drift: Tensor, pull: Tensor) -> float:
    """By what to multiply the penalty so that primal and dual residuals shrink alike."""
    primal = float((image - s).norm()) / max(float(image.norm()), float(s.norm()), 1e-300)
    dual = float(drift.norm()) / max(float(pull.norm()), 1e-300)
    return min(max(math.sqrt(max(primal, 1e-12) / max(dual, 1e-12)), 0.1), 10.0)


def seen(model: nn.Module, x: Tensor) -> Tensor:
    """(rank, d) orthonormal basis of the gradients of all switches at x.

    Along what is orthogonal to them no switch moves, so the pattern and with it these gradients stay.
    """
    _, values, rows = torch.linalg.svd(gates(model, x)[1], full_matrices=False)
    return rows[values > KINK * values[0]] if len(values) and float(values[0]) > 0 else rows[:0]


def _inverse(rows: Tensor, k: int) -> Tensor:
    """H^-1; H gets a trace of the identity where it is singular to rounding."""
    h = rows.T @ rows
    eye = torch.eye(k, dtype=rows.dtype, device=rows.device)
    lift = 1e-15 * float(h.diagonal().sum()) + 1e-300
    while True:
        factor, failed = torch.linalg.cholesky_ex(h + lift * eye)
        if not int(failed):
            return torch.cholesky_inverse(factor) if k else h
        lift *= 100


def _complement(rows: Tensor) -> Tensor:
    """(k, k - rank) orthonormal directions that are orthogonal to all rows."""
    unit = rows / rows.norm(dim=1, keepdim=True)
    _, values, right = torch.linalg.svd(unit, full_matrices=True)
    rank = int((values > 1e-10 * values[0]).sum())
    return right[rank:].T.contiguous()
