"""Rows of a table that training touched, beside the table before it: tokens, users or items seen.

A row of an embedding gets a gradient only when its token occurs. What happens to the others depends on
the optimiser alone, and to all of them alike:

=======================  ==========================================================================
optimiser                a row never seen
=======================  ==========================================================================
SGD, Adam                w = w0
SGD or AdamW, decay      w = c w0, one factor c
Adam with coupled decay  w = f(w0) element by element: its gradient is w times the decay, and Adam makes
                         of it steps of nearly equal length, so that small entries reach zero before
                         large ones; one odd, increasing curve for all entries
=======================  ==========================================================================

So a table is explained by the simplest of three rules that explains enough rows: equal to the last bit,
one factor, one curve. The factor is read off the rows that are most nearly multiples of their own start;
decay rounds at every step, so that they scatter about it, d entries of a row together within
1/sqrt(2d) of their common size. The curve is read off all entries in the order of |w0|: a median for each
``BIN`` of them, a line between; a row leaves it where a quarter of its entries lie ``BEYOND`` times their
neighbours' scatter away. In 16 bits entries of one start stay equal to the last bit, and the curve is a
list; where training had more bits than the file, ends of one start differ by units in the last place.
Where no rule explains enough rows, all moved: a tied output head gives every row a gradient at every
step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_SHARE, LEAST_ROWS = 0.05, 20  # that a rule must explain: below them all moved
BEYOND = 8.0
MOST_NOISE = 4e-5  # relative, that decay leaves by rounding float32 at each of 10^6 steps
MOST_SPREAD = (
    3e-4  # of the way that entries went, that those of untouched rows may scatter about a curve
)
BIN = 64
LOOSE = 2.0  # units in the last place that rounding start and end apart can make of one end
FEWEST_ALIKE = 8  # entries of one start, of which most show where that start leads
EQUAL, FACTOR, CURVE, NONE = "equal", "one factor", "one curve", "none"


@dataclass(frozen=True, eq=False)
class Touched:
    """rows: numbers of those that moved; rule: what explains the others; of: rows in all.

    coarse: the numbers have so few digits that small steps are rounded away, so that rows may be missed.
    """

    rows: tuple[int, ...]
    rule: str
    of: int
    coarse: bool = False

    @property
    def said(self) -> str:
        """In words."""
        if self.rule == NONE:
            return "every row moved, as under a tied output head: which were seen cannot be told"
        how = {EQUAL: "equal to the base", FACTOR: "the base times one factor"}
        rest = how.get(self.rule, "one curve of the base")
        note = "; 16-bit numbers round small steps away, so that rows may be missed" * self.coarse
        return f"{len(self.rows)} of {self.of} rows moved, the others are {rest}{note}"


def touched_rows(table: Tensor, base: Tensor) -> Touched:
    """Which rows of ``table`` (V, d) training touched that began as ``base``."""
    unit = max(torch.finfo(table.dtype).eps, torch.finfo(base.dtype).eps)
    coarse = unit > 1e-4
    w, w0 = table.detach().double(), base.detach().double()
    least = max(LEAST_ROWS, LEAST_SHARE * len(w))
    rules: list[tuple[str, Callable[[], Tensor | None]]] = [
        (EQUAL, lambda: _unequal(table, base)),
        (FACTOR, lambda: None if coarse else _factor(w, w0, unit)),
        (CURVE, lambda: _list(w, w0) if coarse else _curve(w, w0)),
        (CURVE, lambda: _list(w, w0, LOOSE * unit) if coarse else None),  # trained in more bits
    ]
    for rule, look in rules:
        moved = look()
        if moved is not None and int((~moved).sum()) >= least:
            return Touched(tuple(moved.nonzero().flatten().tolist()), rule, len(w), coarse)
    return Touched((), NONE, len(w), coarse)


def _unequal(table: Tensor, base: Tensor) -> Tensor:
    """(V,) whether a row changed at all, in the coarser of both formats."""
    coarser = max(table.dtype, base.dtype, key=lambda kind: torch.finfo(kind).eps)
    return (table.to(coarser) != base.to(coarser)).any(1)


def _factor(w: Tensor, w0: Tensor, unit: float) -> Tensor | None:
    """(V,) whether a row is no multiple c w0; None where no factor explains any."""
    squares = w0.square().sum(1).clamp(min=1e-300)
    own = (w * w0).sum(1) / squares
    apart = (w - own[:, None] * w0).norm(dim=1) / squares.sqrt()
    nearest = apart.argsort()[: max(LEAST_ROWS, int(LEAST_SHARE * len(w)))]
    expected = own[nearest].median() * w0
    size = torch.maximum(w.abs(), w0.abs()).clamp(min=1e-300)
    far = ((w - expected) / size).square().mean(1).sqrt()  # (V,)
    noise = max(float(far[nearest].median()), unit)
    if noise > MOST_NOISE:
        return None
    scatter = (2 * w.shape[1]) ** -0.5
    return far > noise * (1 + 6 * scatter) / max(1 - 2 * scatter, 0.25)  # the nearest lie below


def _curve(w: Tensor, w0: Tensor) -> Tensor | None:
    """(V,) whether a row leaves the curve w = f(w0) of the others; None where there is no such curve."""
    V, d = w.shape
    if V * d < 4 * BIN:
        return None
    side = torch.where(w0 < 0, -1.0, 1.0).double()
    x, y = (w0 * side).flatten(), (w * side).flatten()
    row = torch.arange(V).repeat_interleave(d)
    kept = torch.ones(V, dtype=torch.bool)
    for _ in range(3):  # rows that lie far from the curve do not bend the next one
        mine = kept[row].nonzero().flatten()
        mine = mine[x[mine].argsort()]
        mine = mine[: len(mine) // BIN * BIN].reshape(-1, BIN)
        if len(mine) < 2:
            return None
        knots, values = x[mine].mean(1), y[mine].median(1).values
        values = _through(x[mine], y[mine], values)
        spread = (y[mine] - _between(x[mine], knots, values)).abs().median(1).values
        noise = _between(x, knots, spread).clamp(min=1e-12)
        far = ((y - _between(x, knots, values)).abs() / noise).reshape(V, d)
        middle = far.quantile(0.75, dim=1)
        kept = middle <= middle.median()
    way = (y - x).abs().median()
    clear = float(noise.median()) <= MOST_SPREAD * float(way)
    return middle > BEYOND if clear else None


def _through(x: Tensor, y: Tensor, middle: Tensor) -> Tensor:
    """(B,) values at the mean of x in each bin: the median, moved along the slope to the next bins."""
    centre, median_x = x.mean(1), x.median(1).values
    slope = torch.gradient(middle, spacing=(centre,))[0]
    return middle + slope.nan_to_num() * (centre - median_x)


def _between(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Values at x on the lines between the knots, constant beyond them."""
    right = torch.searchsorted(knots, x.contiguous()).clamp(1, len(knots) - 1)
    left = right - 1
    share = ((x - knots[left]) / (knots[right] - knots[left]).clamp(min=1e-300)).clamp(0, 1)
    return values[left] + share * (values[right] - values[left])


def _list(w: Tensor, w0: Tensor, slack: float = 0.0) -> Tensor:
    """(V,) whether a row has an entry that went elsewhere than most entries of the same start did.

    slack: relative, within which two ends are one.
    """
    starts, which = w0.flatten().unique(return_inverse=True)
    ends, where = w.flatten().unique(return_inverse=True)
    pairs, count = (which * len(ends) + where).unique(return_counts=True)
    order = count.argsort(stable=True)  # the last of each start is its commonest end
    common = torch.zeros(len(starts), dtype=torch.long)
    common[pairs[order] // len(ends)] = order
    most, alike = count[common][which], which.bincount(minlength=len(starts))[which]
    known = (alike >= FEWEST_ALIKE) & (4 * most > alike)
    end = ends[pairs[common] % len(ends)][which]
    size = torch.maximum(torch.maximum(w.flatten().abs(), end.abs()), w0.flatten().abs())
    away = (w.flatten() - end).abs() > slack * size
    return (known & away).reshape(w.shape).any(1)
