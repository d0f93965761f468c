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
the directions in which the second derivative of f is smallest.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.errors import InputError
from residuum.networks import MLP
from residuum.records.uniqueness import NullSpace, Uniqueness
from residuum.theory.kkt import evaluate
from residuum.theory.patterns import HypothesisError, check_piecewise_linear, switches
from residuum.theory.rows import choose_task
from residuum.theory.uniqueness.cell import build_cell, seen
from residuum.theory.uniqueness.nullspace import null_space, row_space
from residuum.theory.uniqueness.smooth import curvature_directions
from residuum.theory.uniqueness.system import System, build_system
from residuum.theory.uniqueness.travel import BOX, NOTHING, Stop, travel

TOLERANCE = 1e-6
IDLE = 1e-9  # of the largest multiplier: below, a candidate takes no part
OUTSIDE = 1e-9
LINEAR = "no switches: only the sums of lam y and of lam y x over all candidates are determined"
Watch = Callable[[int, int], None]
Ends = tuple[Tensor, Tensor]


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
    if not isinstance(system.model, MLP):
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
