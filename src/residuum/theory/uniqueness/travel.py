"""How far a pair really goes: from switch to switch, with the residual's change measured.

Between two events (a switch of either half changes sign) the change of the residual is affine in t, so
its square is a parabola, known from three points; the pair stops where it first exceeds the tolerance,
in mid-segment or at the event itself, where the change jumps. A switch whose jump is within the
tolerance is passed. Networks that are not piecewise linear: doubling and bisection of the change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.theory.patterns import Switches, slopes, switches
from residuum.theory.uniqueness.system import System

BEYOND = 1e-9  # of t: where the pattern after an event is read
EVENTS = 400
START, GUESSES, BISECTIONS = 1e-3, 6, 30
FAR = 1e12  # times (1 + |x|): what gets there is taken to go on for ever
TOLERANCE, BOX, NOTHING, EVENTS_SPENT = "tolerance", "box", "nothing", "too many switches"


@dataclass(frozen=True)
class Stop:
    """t reached, and what is in the way: a switch by name, box, tolerance, nothing."""

    t: float
    reason: str


def travel(
    system: System, i: int, v: Tensor, limit: float, tolerance: float, piecewise: bool
) -> Stop:
    """Largest t <= limit such that the pair x_i +- s v is as good for all s <= t; v: (*shape) unit."""

    def change(t: float) -> float:
        return system.change(i, t * v)

    far = FAR * (1 + float(system.x[i].norm()))
    if not piecewise:
        return _bisect(change, tolerance, min(limit, far), limit)
    t = 0.0
    for event in range(EVENTS):
        step, k, found = _next_event(system, i, v, t)
        end = min(t + step, limit, far)
        # Up to the first event nothing changes; afterwards the parabola decides.
        inside = _first_excess(change, t, end, tolerance) if event else None
        if inside is not None:
            return Stop(inside, TOLERANCE)
        if end >= limit:
            return Stop(limit, BOX)
        if end >= far:
            return Stop(math.inf, NOTHING)
        t = end * (1 + BEYOND)
        if change(t) > tolerance:
            return Stop(end, found.name(k))
    return Stop(t, EVENTS_SPENT)


def _next_event(system: System, i: int, v: Tensor, t: float) -> tuple[float, int, Switches]:
    """Distance to the next sign change of a switch of either half, and which switch it is."""
    points = torch.stack([system.x[i] + t * v, system.x[i] - t * v])
    found = switches([system.model], points)
    if not found.values.shape[1]:
        return math.inf, 0, found
    slope = slopes([system.model], points, torch.stack([v, -v]))
    step = -found.values / slope
    step = torch.where((step > 0) & step.isfinite(), step, math.inf)
    least, where = step.amin(0).min(0)
    return float(least), int(where), found


def _first_excess(
    change: Callable[[float], float], start: float, end: float, tolerance: float
) -> float | None:
    """First t of a segment at which the change exceeds the tolerance; its square is convex in t."""
    length = end - start
    shares = (0.25, 0.5, 0.75)
    p, q, r = (change(start + share * length) ** 2 for share in shares)
    curve = 8 * (p - 2 * q + r)
    slope = 2 * (r - p) - curve
    level = q - 0.5 * slope - 0.25 * curve  # value at share 0
    if level + slope + curve <= tolerance**2:
        return None
    excess = level - tolerance**2
    root = math.sqrt(max(slope**2 - 4 * curve * excess, 0.0))
    share = -2 * excess / (slope + root) if slope + root > 0 else 0.0
    return start + min(max(share, 0.0), 1.0) * length


def _bisect(change: Callable[[float], float], tolerance: float, most: float, limit: float) -> Stop:
    """A bracket from where the change, which grows like t^2 near 0, should meet the tolerance."""
    guess = START
    for _ in range(GUESSES):
        size = change(guess)
        guess = min(
            guess * min(math.sqrt(tolerance / size), 1e3) if size > 0 else 1e3 * guess, most
        )
    low, high = 0.0, guess
    while high < most and change(high) <= tolerance:
        low, high = high, min(2 * high, most)
    if high == most and change(most) <= tolerance:
        return Stop(limit, BOX) if most == limit else Stop(math.inf, NOTHING)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if change(middle) <= tolerance else (low, middle)
    return Stop(low, TOLERANCE)
