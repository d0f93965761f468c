"""Ways to grow the candidate set, behind one interface: what a round adds to every run.

curvature     split candidates whose splitting matrix has a negative eigenvalue (Shen et al. 2026)
random        new candidates at random places, where a multiplier of the right sign lowers the loss
frank-wolfe   new candidates at local maxima of |<r, f(x)>|, found by an inner ascent from random
              places on the sphere of the candidates' median length

A split keeps the sum of multipliers. New candidates get theirs by one exact line search along the
loss's derivative in them, in which the loss is quadratic. Neither ever raises the equation's loss.
A new way to grow is one function and one line in ``GROWTH``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.config import AttackConfig
from residuum.attacks.curvature import Curvature
from residuum.attacks.problem import Problem
from residuum.attacks.slots import Newcomer
from residuum.attacks.splitting import joint_step, lowest_curvature

TRIED = 4  # places tried for every new candidate that is wanted
ASCENT, FIRST, LAST = 60, 0.3, 0.01  # inner ascent: steps, and their length over the radius
SAME = 0.95  # cosine above which two maxima are one


@dataclass(frozen=True)
class Round:
    """All that a strategy may look at.

    x: (R, m, *shape); lam: plain-sum multipliers; active: (R, m); quota: how many candidates each
    run may get; draw: (run, count) random candidates as at the start, labels: labels for so many;
    noise: like x, random; free: 1 where a coordinate may move both ways, None for everywhere;
    clamp: into the known box; exact: f has degree at most 3 in x.
    """

    problem: Problem
    config: AttackConfig
    x: Tensor
    lam: Tensor
    active: Tensor
    sharpness: float | Tensor
    quota: list[int]
    draw: Callable[[int, int], Tensor]
    labels: Callable[[int], Tensor]
    noise: Tensor
    free: Tensor | None
    clamp: Callable[[Tensor], Tensor]
    exact: bool

    @property
    def runs(self) -> int:
        """R."""
        return len(self.x)

    def length(self) -> Tensor:
        """(R,) median length of the living candidates."""
        norms = self.x.flatten(2).norm(dim=2).masked_fill(~self.active, torch.nan)
        return norms.nanmedian(dim=1).values


@dataclass(frozen=True)
class Proposal:
    """newcomers: per run; details: per run and newcomer, for the events; before, after: (R,) loss;
    lowest: (R,) least eigenvalue over the living candidates, nan where nobody asked."""

    newcomers: list[list[Newcomer]]
    before: Tensor
    after: Tensor
    lowest: Tensor
    details: list[list[dict[str, Any]]] = field(default_factory=list)


def split(now: Round) -> Proposal:
    """Halve the most unstable candidates of every run along their least eigenvector."""
    curvature = Curvature(now.problem, now.x, now.lam, now.sharpness)
    found = lowest_curvature(curvature, now.noise, now.free)
    values = found.values.masked_fill(~now.active, torch.inf)
    values = torch.where(torch.isfinite(values) | ~now.active, values, torch.inf)
    limit = now.x.new_full((now.runs,), now.config.split_threshold)
    if now.config.split_relative:
        loss = now.problem.evaluate(now.x, now.lam, now.sharpness).loss
        limit = limit * loss / now.length().square().clamp(min=1e-12)
    order = values.argsort(1).argsort(1)  # 0 for the least
    quota = torch.tensor(now.quota, device=now.x.device)
    chosen = (values < -limit[:, None]) & (order < quota[:, None])
    longest = torch.full_like(limit, torch.inf) if now.exact else now.length() / 2
    if now.config.split_eta > 0:
        longest = torch.full_like(limit, now.config.split_eta)
    step = joint_step(
        curvature,
        found.vectors,
        values.nan_to_num(posinf=0.0),
        chosen,
        longest,
        now.exact,
        now.clamp,
    )
    newcomers, details = [], []
    for run in range(now.runs):
        slots = step.eta[run].nonzero()[:, 0].tolist()
        newcomers.append([_half(now, run, slot, step.eta, found.vectors) for slot in slots])
        details.append(
            [
                {
                    "parent": slot,
                    "eigenvalue": float(values[run, slot]),
                    "eta": float(step.eta[run, slot]),
                    "predicted": float(step.eta[run, slot] ** 2 * values[run, slot] / 2),
                }
                for slot in slots
            ]
        )
    return Proposal(newcomers, step.before, step.after, values.amin(1), details)


def _half(now: Round, run: int, slot: int, eta: Tensor, v: Tensor) -> Newcomer:
    moved = eta[run, slot] * v[run, slot]
    x, label = now.x[run, slot], now.problem.labels.expand(now.runs, -1)[run, slot]
    plus, minus = (now.clamp((x + sign * moved)[None, None])[0, 0] for sign in (1, -1))
    return Newcomer(minus, now.lam[run, slot] / 2, label, slot, plus)


def random_places(now: Round) -> Proposal:
    """New candidates as at the start of the attack."""
    if not any(now.quota):
        return nothing(now)
    x, labels, tried = _places(now)
    return _with_multipliers(now, now.clamp(x), labels, [list(range(t)) for t in tried])


def frank_wolfe(now: Round) -> Proposal:
    """New candidates where the residual correlates most with a candidate's gradient."""
    if not any(now.quota):
        return nothing(now)
    curvature = Curvature(now.problem, now.x, now.lam, now.sharpness)
    x, labels, tried = _places(now)
    sign = now.x.new_ones(x.shape[1])
    if not now.problem.objective.nonnegative:
        sign[1::2] = -1.0
    lam = sign.view(1, -1, *[1] * (now.lam.ndim - 2))
    lam = lam.expand(*x.shape[:2], *now.lam.shape[2:]).contiguous()
    radius = now.length().view(-1, 1, *[1] * (now.x.ndim - 2))

    def lengths(x: Tensor) -> Tensor:
        return x.flatten(2).norm(dim=2).clamp(min=1e-30).view(*x.shape[:2], *[1] * (x.ndim - 2))

    def onto(x: Tensor) -> Tensor:
        return now.clamp(x * radius / lengths(x))

    x = onto(x)
    for k in range(ASCENT):
        gradient, _ = curvature.slope(x, lam, labels)
        length = radius * FIRST * (LAST / FIRST) ** (k / (ASCENT - 1))
        x = onto(x - length * gradient / lengths(gradient))
    value = curvature.slope(x, lam, labels)[1]
    orders = [_distinct(x[r, :t], value[r, :t], labels[r, :t]) for r, t in enumerate(tried)]
    return _with_multipliers(now, x, labels, orders)


def _places(now: Round) -> tuple[Tensor, Tensor, list[int]]:
    """Random places (R, k, *shape), their labels (R, k), and how many of them each run may use.

    A run's own are the same whatever the other runs' quotas are.
    """
    tried = [TRIED * quota for quota in now.quota]
    own, most = now.problem.labels, max(tried)
    x = now.x.new_zeros(now.runs, most, *now.x.shape[2:])
    labels = own.new_zeros(now.runs, most)
    for run, count in enumerate(tried):
        if not count:
            continue
        x[run, :count] = now.draw(run, count)
        # Labels come in blocks; a fixed shuffle spreads them over the places.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        labels[run, :count] = now.labels(count)[order].to(own)
    return x, labels, tried


def nothing(now: Round) -> Proposal:
    """No growth."""
    loss = now.problem.evaluate(now.x, now.lam, now.sharpness).loss
    empty: list[list[Any]] = [[] for _ in range(now.runs)]
    return Proposal(empty, loss, loss, torch.full_like(loss, torch.nan), empty)


def _distinct(x: Tensor, value: Tensor, labels: Tensor) -> list[int]:
    """Places by their value, least first, without those that another of the label stands for."""
    unit = x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True).clamp(min=1e-12)
    near = (((unit @ unit.T) > SAME) & (labels[:, None] == labels[None])).tolist()
    kept: list[int] = []
    for i in value.argsort().tolist():
        if not any(near[i][j] for j in kept):
            kept.append(i)
    return kept


def _with_multipliers(now: Round, x: Tensor, labels: Tensor, orders: list[list[int]]) -> Proposal:
    """The first ``quota`` places of each run's order where the loss falls, multipliers by line search.

    L is quadratic along a change of multipliers, so two values and a slope give its minimum.
    """
    m, tried = now.x.shape[1], x.shape[1]
    own = now.problem.labels.expand(now.runs, -1)
    wide = now.problem.with_labels(torch.cat([own, labels.to(own)], 1))
    points = torch.cat([now.x, x], 1)
    zero = now.lam.new_zeros(now.runs, tried, *now.lam.shape[2:])
    at = wide.evaluate(points, torch.cat([now.lam, zero], 1), now.sharpness)
    downhill = -at.grad_lam[:, m:]
    if now.problem.objective.nonnegative:
        downhill = downhill.clamp(min=0)
    falls = downhill.reshape(*downhill.shape[:2], -1).square().sum(2) > 0
    keep = torch.zeros_like(falls)
    for run, (order, down) in enumerate(zip(orders, falls.tolist(), strict=True)):
        keep[run, [i for i in order if down[i]][: now.quota[run]]] = True
    downhill = downhill * keep.view(*keep.shape, *[1] * (downhill.ndim - 2))
    slope = -downhill.flatten(1).square().sum(1)
    step = torch.where(slope < 0, at.loss / (-slope).clamp(min=1e-30), 0.0)

    def shaped(t: Tensor) -> Tensor:
        return t.view(-1, *[1] * (downhill.ndim - 1)) * downhill

    there = wide.evaluate(points, torch.cat([now.lam, shaped(step)], 1), now.sharpness).loss
    bend = (there - at.loss - slope * step) / step.square().clamp(min=1e-30)
    lam = shaped(torch.where(bend > 0, -slope / (2 * bend).clamp(min=1e-30), 0.0))
    after = wide.evaluate(points, torch.cat([now.lam, lam], 1), now.sharpness).loss
    newcomers = [
        [
            Newcomer(x[run, i], lam[run, i], labels[run, i])
            for i in keep[run].nonzero()[:, 0].tolist()
        ]
        if bool(after[run] < at.loss[run])
        else []
        for run in range(now.runs)
    ]
    details: list[list[dict[str, Any]]] = [[{} for _ in new] for new in newcomers]
    return Proposal(newcomers, at.loss, after, torch.full_like(after, torch.nan), details)


GROWTH: dict[str, Callable[[Round], Proposal]] = {
    "none": nothing,
    "curvature": split,
    "random": random_places,
    "frank-wolfe": frank_wolfe,
}
