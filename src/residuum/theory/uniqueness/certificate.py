"""Is a reconstruction unique? Per candidate: what equal pairs in its place keep, and how far they go.

A single moved candidate always changes the residual where the gate patterns are independent; a
candidate taken twice with half its multiplier does not, as long as both halves keep its gates
(Refael et al. 2025, Theorem 4, for any depth). So each candidate stands for all pairs x +- a with a in
its cell (residuum.theory.uniqueness.cell), and the certificate says how large that cell is:

    radius              |a| of the longest pair found, its stopping point exact
    determined_energy   min_{a in cell} |x + a|^2 / |x|^2: what the least image of an equally good pair
                        keeps, as attained, measured as the network receives it, mean removed
    determined_at_least a lower bound of that minimum, by duality
    pixels              how far each pixel of a pair can move

Unequal splits (x + a with a share t of the multiplier, x - t/(1-t) a with the rest) and exchanges
between candidates of one pattern leave the residual as it is, too, and may keep less: not covered.

Directions outside row(W1) meet no switch: without a box they are free for ever. Networks that are not
piecewise linear have no cell: there the pair is stopped by the residual's curvature, and x moves along
the directions in which the second derivative of f is smallest (``curvature_directions``).

How far a pair really goes (``travel``): between two events (a switch of either half changes sign) the
change of the residual is affine in t, so its square is a parabola, known from three points; the pair
stops where it first exceeds the tolerance, in mid-segment or at the event itself, where the change
jumps. A switch whose jump is within the tolerance is passed. Networks that are not piecewise linear:
doubling and bisection of the change.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd

from residuum.errors import InputError
from residuum.networks import dense_chain
from residuum.records.certificate import NullSpace, Uniqueness
from residuum.stationarity import Theta, parameters
from residuum.theory.kkt import evaluate
from residuum.theory.patterns import (
    HypothesisError,
    Switches,
    check_piecewise_linear,
    slopes,
    switches,
)
from residuum.theory.rows import choose_task
from residuum.theory.uniqueness.cell import build_cell, seen
from residuum.theory.uniqueness.nullspace import null_space, row_space
from residuum.theory.uniqueness.system import System, build_system

TOLERANCE = 1e-6
IDLE = 1e-9  # of the largest multiplier: below, a candidate takes no part
OUTSIDE = 1e-9
LINEAR = "no switches: only the sums of lam y and of lam y x over all candidates are determined"
BEYOND = 1e-9  # of t: where the pattern after an event is read
EVENTS = 400
START, GUESSES, BISECTIONS = 1e-3, 6, 30
FAR = 1e12  # times (1 + |x|): what gets there is taken to go on for ever
BOX, NOTHING = "box", "nothing"
ENTRIES = 5 * 10**7  # of all second derivatives of one candidate
Watch = Callable[[int, int], None]
Ends = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Stop:
    """t reached, and what is in the way: a switch by name, box, tolerance, nothing."""

    t: float
    reason: str


@dataclass(frozen=True)
class _Sample:
    """What is found for one candidate; flat vectors."""

    radius: Stop
    inside: float
    most: float
    kinks: int
    direction: Tensor
    energy: float
    at_least: float
    least: Tensor
    pixels: Tensor


def uniqueness(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    lam: Tensor,
    *,
    task: str = "auto",
    box: tuple[float | Tensor, float | Tensor] | None = None,
    tolerance: float = TOLERANCE,
    samples: int | None = None,
    seconds: float = math.inf,
    device: str = "cpu",
    watch: Watch | None = None,
) -> Uniqueness:
    """Certificate of candidates x (m, *shape) with multipliers lam (m,) or (m, C).

    box: lowest and highest value of a pixel as the network receives it; samples: certify the first
    so many; seconds: start no further one after that time, those done are kept. The null space is
    that of all m candidates.
    """
    start = time.monotonic()
    if not (tolerance > 0 and math.isfinite(tolerance)):
        raise InputError(f"A tolerance is a positive number; got {tolerance}.", "Use 1e-6.")
    model = copy.deepcopy(model).double().requires_grad_(False).to(device)
    system, kept, task, notes = _active(model, x.double().to(device), labels, lam.double(), task)
    piecewise, span = _piecewise(model), row_space(system)
    pattern = switches([model], system.x).pattern if piecewise else None
    # A linear network has no switch: nothing inside row(W1) stops a pair either.
    walls = span if pattern is None or pattern.shape[1] else span[:0]
    ends = None if box is None else _ends(box, system.x[0])
    notes += _box_notes(system.x, ends)
    wanted = len(system.x) if samples is None else min(samples, len(system.x))
    found: list[_Sample] = []
    for i in range(wanted):
        if watch is not None:
            watch(i, wanted)
        found.append(_certify(system, i, walls, ends, tolerance, piecewise))
        if time.monotonic() - start > seconds and i + 1 < wanted:
            notes.append(f"time: {i + 1} of {wanted} candidates certified")
            break
    count = len(system.x) if pattern is None else _different(pattern)
    notes += [LINEAR] if pattern is not None and not pattern.shape[1] else []
    space = null_space(system, len(span), count)
    return _collect(system, kept, labels, task, tolerance, box is not None, found, span, space, notes,
                    time.monotonic() - start)  # fmt: skip


def _certify(
    system: System, i: int, walls: Tensor, ends: Ends | None, tolerance: float, piecewise: bool
) -> _Sample:
    """One candidate; walls: (k, d) basis of what switches see."""
    if not piecewise:
        return _certify_smooth(system, i, ends, tolerance)
    flat = system.x[i].flatten()
    if dense_chain(system.model) is None:
        walls = seen(system.model, system.x[i])
    cell = build_cell(system.model, system.x[i], walls, ends)
    a = cell.longest(-flat, i) if cell.basis.shape[1] else torch.zeros_like(flat)
    direction = a / a.norm().clamp(min=1e-300)
    stop = Stop(0.0, f"{cell.kinks} switches at zero" if cell.kinks else BOX)
    if float(a.norm()) > 0:
        stop = travel(system, i, direction.reshape(system.x[i].shape),
                      _limit(system.x[i], direction, ends), tolerance, True)  # fmt: skip
    inside, most, pixels = stop.t, cell.most, cell.pixels()
    least, bound = cell.nearest(flat)
    if ends is None and len(walls) < len(flat):
        outside = flat - walls.T @ (walls @ flat)
        least, bound = least - outside, bound - float(outside.square().sum())
        stop, most, direction = Stop(math.inf, NOTHING), math.inf, _outward(outside, walls)
        pixels = torch.where(1 - walls.square().sum(0) > OUTSIDE, math.inf, pixels)
    energy = max(float(flat.square().sum()), 1e-300)
    share = float((flat + least).square().sum()) / energy
    lower = min(max(bound / energy, 0.0), share)
    pixels = torch.maximum(pixels, least.abs())
    return _Sample(stop, inside, most, cell.kinks, direction, share, lower, least, pixels)


def _certify_smooth(system: System, i: int, ends: Ends | None, tolerance: float) -> _Sample:
    """One candidate of any other network: all by the measured change of the residual."""
    x = system.x[i]
    flat = x.flatten()

    def go(v: Tensor) -> Stop:
        return travel(system, i, v.reshape(x.shape), _limit(x, v, ends), tolerance, False)

    tried = curvature_directions(system, i)
    stops = [go(v) for v in tried]
    best = max(range(len(stops)), key=lambda k: stops[k].t)
    size = max(float(flat.norm()), 1e-300)
    step = min(go(-flat / size).t, size)
    least = -flat / size * step
    pixels = torch.tensor([go(e).t for e in torch.eye(len(flat)).to(flat)]).to(flat)
    share = float((flat + least).square().sum()) / size**2
    return _Sample(stops[best], stops[best].t, math.inf, 0, tried[best], share, 0.0, least, pixels)


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
            return Stop(inside, "tolerance")
        if end >= limit:
            return Stop(limit, BOX)
        if end >= far:
            return Stop(math.inf, NOTHING)
        t = end * (1 + BEYOND)
        if change(t) > tolerance:
            return Stop(end, found.name(k))
    return Stop(t, "too many switches")


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
    return Stop(low, "tolerance")


def curvature_directions(system: System, i: int) -> list[Tensor]:
    """d orthonormal directions (d,) in which a smooth network bends, least first.

    The halves x +- t v change the residual by t^2/2 f''[v, v] + O(t^4), so a pair goes furthest where
    that is small. sum_p H_p^2 over the Hessians H_p of all components f_p has the directions of no
    curvature as its null space; these are its eigenvectors.
    """
    theta, shape, u = parameters(system.model), system.x.shape[1:], system.u[i]
    d, size = system.x[i].numel(), sum(t.numel() for t in theta.values())
    if d * d * size > ENTRIES:
        raise InputError(
            f"Networks that are not piecewise linear are certified up to d^2 P = {ENTRIES:.0e}; "
            f"this one has d = {d}, P = {size}.",
            "Use a ReLU network, or a smaller one.",
        )

    def f(z: Tensor) -> Tensor:
        def value(t: Theta) -> Tensor:
            return (u * functional_call(system.model, t, (z.reshape(1, *shape),))[0]).sum()

        parts = grad(value)(theta)
        return torch.cat([system.scales[name] * parts[name].flatten() for name in theta])

    hessians = jacfwd(jacfwd(f))(system.x[i].flatten())  # (P, d, d)
    total = torch.einsum("pij,pjk->ik", hessians, hessians)
    return list(torch.linalg.eigh(total).eigenvectors.T)


def _active(
    model: nn.Module, x: Tensor, labels: Tensor, lam: Tensor, task: str
) -> tuple[System, Tensor, str, list[str]]:
    """The system of the candidates that take part, which those are, the task, a note on the others."""
    outputs = evaluate(model, x)
    task = choose_task(task, outputs.shape[1])
    labels, lam = labels.to(x.device), lam.to(x.device)
    weight = lam.reshape(len(lam), -1).abs().sum(1)
    part = weight > IDLE * weight.max() if len(weight) else weight > 0
    if not part.any():
        raise InputError(
            "A uniqueness certificate needs candidates with multipliers; none has one.",
            "Check the reconstruction.",
        )
    kept = part.nonzero()[:, 0]
    idle = len(x) - len(kept)
    notes = [f"{idle} candidates without a multiplier were left out"] if idle else []
    system = build_system(model, x[kept], labels[kept], lam[kept], task, outputs[kept])
    return system, kept, task, notes


def _different(pattern: Tensor) -> int:
    """Number of different rows."""
    return len(torch.unique(pattern, dim=0)) if pattern.shape[1] else 1


def _piecewise(model: nn.Module) -> bool:
    try:
        check_piecewise_linear(model)
    except HypothesisError:
        return False
    return True


def _ends(box: tuple[float | Tensor, float | Tensor], x: Tensor) -> Ends:
    """Both ends in the shape of a sample."""
    low, high = (torch.as_tensor(end, dtype=x.dtype, device=x.device) for end in box)
    return low.expand_as(x), high.expand_as(x)


def _limit(x: Tensor, v: Tensor, ends: Ends | None) -> float:
    """How far x + t v and x - t v both stay in the box."""
    if ends is None:
        return math.inf
    reach = torch.minimum(x - ends[0], ends[1] - x).flatten().clamp(min=0)
    moving = v != 0
    return float((reach[moving] / v[moving].abs()).min()) if moving.any() else 0.0


def _outward(outside: Tensor, walls: Tensor) -> Tensor:
    """A unit direction that no switch sees: the image's own part of it, where it has one."""
    if float(outside.norm()) > 1e-6 * (1 + float(walls.shape[0] > 0)):
        return outside / outside.norm()
    p = int((1 - walls.square().sum(0)).argmax())
    unit = -walls.T @ walls[:, p]
    unit[p] += 1
    return unit / unit.norm()


def _box_notes(x: Tensor, ends: Ends | None) -> list[str]:
    if ends is None:
        return ["no value range was given: nothing but switches stops a pair"]
    beyond = int(((x < ends[0]) | (x > ends[1])).flatten(1).any(1).sum())
    return [f"{beyond} candidates leave the box: their pixels there are held"] if beyond else []


def _collect(
    system: System, kept: Tensor, labels: Tensor, task: str, tolerance: float, box: bool,
    found: list[_Sample], span: Tensor, space: NullSpace, notes: list[str], seconds: float,
) -> Uniqueness:  # fmt: skip
    """The record, on the CPU."""
    k, shape = len(found), system.x.shape[1:]
    index = kept[:k].cpu()

    def vector(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def images(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).reshape(k, *shape).cpu()

    directions = torch.stack([part.direction for part in found])
    outside = (directions - directions @ span.T @ span).square().sum(1)
    return Uniqueness(
        task=task,
        samples=len(system.x),
        tolerance=tolerance,
        box=box,
        index=index,
        labels=labels.cpu()[index],
        lam=system.weight[:k].cpu(),
        radius=vector([part.radius.t for part in found]),
        radius_inside=vector([part.inside for part in found]),
        radius_most=vector([part.most for part in found]),
        blocked_by=tuple(part.radius.reason for part in found),
        kinks=torch.tensor([part.kinks for part in found]),
        direction=images([part.direction for part in found]),
        outside=outside.cpu(),
        determined_energy=vector([part.energy for part in found]),
        determined_at_least=vector([part.at_least for part in found]),
        least=images([system.x[i].flatten() + part.least for i, part in enumerate(found)]),
        pixels=images([part.pixels for part in found]),
        size=system.x[:k].flatten(1).norm(dim=1).cpu(),
        null_space=space,
        seconds=seconds,
        notes=tuple(notes),
    )
