"""Control arms of Shen et al. 2026: the candidate set grows as in sample splitting, but without curvature.

The paper claims that the direction of negative curvature is what helps. Both arms here add as many candidates
in the same rounds of the same attack, but do not use the splitting matrix:

random        new candidates at random places, if a multiplier there lowers the loss
frank-wolfe   new candidates at local maxima of |<r, f(x)>|, found by an inner ascent from random places on
              the sphere of the candidates' median length

|<r, f(x)>| is how much the first bit of a multiplier at x would lower the loss. f grows with x, so the ascent
needs the sphere to end. A new candidate gets its multiplier by one exact line search along the derivative of
the loss, which is quadratic in the multipliers. The loss never rises.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from residuum.attacks import StationarityAttack
from residuum.attacks.stationarity.attack import Stationarity
from residuum.attacks.stationarity.curvature import Curvature, inner_product
from residuum.attacks.stationarity.growth import GrowthStrategy, Proposal, Round
from residuum.attacks.stationarity.slots import Newcomer
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction

TRIED = 4  # places that are tried for every new candidate
ASCENT_STEPS = 60
FIRST, LAST = 0.3, 0.01  # lengths of the first and last step of the ascent over the radius
SAME = 0.95  # cosine above which two maxima count as one


class RandomPlaces(GrowthStrategy):
    """New candidates as at the start of the attack."""

    event: ClassVar[str] = "random"

    def propose(self, now: Round) -> Proposal:
        """Propose the first random places at which a multiplier lowers the loss."""
        x, labels, counts = random_places(now)
        return with_multipliers(now, now.clamp(x), labels, [list(range(n)) for n in counts])


class FrankWolfe(GrowthStrategy):
    """New candidates at which the residual correlates most with the gradient of a candidate."""

    event: ClassVar[str] = "frank-wolfe"

    def propose(self, now: Round) -> Proposal:
        """Propose the best maxima of |<r, f(x)>|; places that end together count once."""
        gain = Gain(now.problem, now.x, now.lam, now.sharpness)
        x, labels, counts = random_places(now)
        sign = now.x.new_ones(x.shape[1])
        if not now.problem.objective.nonnegative:
            sign[1::2] = -1.0
        lam = sign.view(1, -1, *[1] * (now.lam.ndim - 2))
        lam = lam.expand(*x.shape[:2], *now.lam.shape[2:]).contiguous()
        radius = now.median_length().view(-1, 1, *[1] * (now.x.ndim - 2))

        def lengths(x: Tensor) -> Tensor:
            norms = x.flatten(2).norm(dim=2).clamp(min=1e-30)
            return norms.view(*x.shape[:2], *[1] * (x.ndim - 2))

        def onto_sphere(x: Tensor) -> Tensor:
            return now.clamp(x * radius / lengths(x))

        x = onto_sphere(x)
        for k in range(ASCENT_STEPS):
            gradient, _ = gain.slope(x, lam, labels)
            length = radius * FIRST * (LAST / FIRST) ** (k / (ASCENT_STEPS - 1))
            x = onto_sphere(x - length * gradient / lengths(gradient))
        value = gain.slope(x, lam, labels)[1]
        orders = [
            distinct_places(x[run, :n], value[run, :n], labels[run, :n])
            for run, n in enumerate(counts)
        ]
        return with_multipliers(now, x, labels, orders)


CONTROLS: dict[str, GrowthStrategy] = {arm.event: arm for arm in (RandomPlaces(), FrankWolfe())}


def attack(
    target: Network,
    knowledge: Knowledge,
    config: StationarityAttack,
    strategy: GrowthStrategy,
    **options: Any,
) -> Reconstruction:
    """Attack as ``rs.attack`` does, with candidates that grow by a strategy.

    Args:
        target: The network.
        knowledge: What the attacker knows.
        config: Settings of the attack.
        strategy: The strategy.
        **options: Further arguments of ``Attack.run``.

    Returns:
        The reconstruction. Its settings name the strategy under ``split``.
    """
    method = config.resolve_settings(target, knowledge)
    assert isinstance(method, Stationarity)
    result = type(method).with_strategy(strategy).like(method).run(target, knowledge, **options)
    return result.replace(settings={**result.settings, "split": strategy.event})


class Gain(Curvature):
    """What a new candidate would change the loss by, in first order of its multiplier."""

    def slope(self, x: Tensor, lam: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients in x and values of -2 <w r, f(x)> for new candidates, with r fixed.

        Args:
            x: New candidates, (R, k, *shape).
            lam: Their multipliers.
            labels: Their labels, (R, k).

        Returns:
            The gradients, and the values (R, k). A value is the derivative of the loss along ``lam``.
        """
        if (equation := self.problem.explicit) is None:
            pairs = [
                self._slope_generic(run, *candidates)
                for run, candidates in enumerate(zip(x, lam, labels, strict=True))
            ]
            return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
        candidates = self.problem.with_labels(labels).candidates(x, lam)
        with torch.no_grad():
            gradient, value = equation.pull_back(
                candidates, self.errors, self.problem.objective, self.activation
            )
        return gradient.view_as(x), value

    @torch.enable_grad()
    def _slope_generic(
        self, run: int, x: Tensor, lam: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        xr = x.detach().requires_grad_()
        values = []
        for i in range(len(x)):
            total = self.sum_of_gradients(
                run, xr[i : i + 1], lam[i : i + 1].detach(), labels[i : i + 1]
            )
            values.append(inner_product(self.residuals[run], total))
        (gradient,) = torch.autograd.grad(torch.stack(values).sum(), xr)
        return gradient, torch.stack(values).detach()


def random_places(now: Round) -> tuple[Tensor, Tensor, list[int]]:
    """Return random places (R, k, *shape), their labels (R, k), and how many of them each run may use."""
    # The places of a run do not depend on the quotas of the other runs.
    counts, all_labels, solver = (
        [TRIED * quota for quota in now.quota],
        now.problem.labels,
        now.solver,
    )
    x = now.x.new_zeros(now.runs, max(counts), *now.x.shape[2:])
    labels = all_labels.new_zeros(now.runs, max(counts))
    for run, count in enumerate(counts):
        if not count:
            continue
        places = torch.randn(
            count, *solver.shape, generator=now.generators[run], dtype=torch.float64
        )
        x[run, :count] = places.mul_(solver.settings.for_run(run).sigma).to(now.x)
        # Labels come in blocks. A fixed shuffle spreads them over the places.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        labels[run, :count] = solver.labels(count)[order].to(all_labels)
    return x, labels, counts


def distinct_places(x: Tensor, value: Tensor, labels: Tensor) -> list[int]:
    """Sort places by value, smallest first, and drop places close to a better one with the same label.

    Args:
        x: Places, (k, *shape).
        value: Their values, (k,).
        labels: Their labels, (k,).

    Returns:
        Indices of the places.
    """
    unit = x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True).clamp(min=1e-12)
    same = (((unit @ unit.T) > SAME) & (labels[:, None] == labels[None])).tolist()
    chosen: list[int] = []
    for i in value.argsort().tolist():
        if not any(same[i][j] for j in chosen):
            chosen.append(i)
    return chosen


def with_multipliers(now: Round, x: Tensor, labels: Tensor, orders: list[list[int]]) -> Proposal:
    """Propose the first places in the order of each run at which the loss decreases, up to its quota.

    The loss is quadratic along a change of multipliers, so two values and a slope give its minimum.

    Args:
        now: The state of the attack.
        x: Places, (R, k, *shape).
        labels: Their labels, (R, k).
        orders: Order of the places of each run.

    Returns:
        The proposal.
    """
    m, tried = now.x.shape[1], x.shape[1]
    known_labels = now.problem.labels.expand(now.runs, -1)
    wide = now.problem.with_labels(torch.cat([known_labels, labels.to(known_labels)], 1))
    points = torch.cat([now.x, x], 1)
    zero = now.lam.new_zeros(now.runs, tried, *now.lam.shape[2:])
    start = wide.evaluate(points, torch.cat([now.lam, zero], 1), now.sharpness)
    downhill = -start.grad_lam[:, m:]
    if now.problem.objective.nonnegative:
        downhill = downhill.clamp(min=0)
    falls = downhill.reshape(*downhill.shape[:2], -1).square().sum(2) > 0
    keep = torch.zeros_like(falls)
    for run, (order, falls_at) in enumerate(zip(orders, falls.tolist(), strict=True)):
        keep[run, [i for i in order if falls_at[i]][: now.quota[run]]] = True
    downhill = downhill * keep.view(*keep.shape, *[1] * (downhill.ndim - 2))
    slope = -downhill.flatten(1).square().sum(1)
    step = torch.where(slope < 0, start.loss / (-slope).clamp(min=1e-30), 0.0)

    def along(length: Tensor) -> Tensor:
        return length.view(-1, *[1] * (downhill.ndim - 1)) * downhill

    trial = wide.evaluate(points, torch.cat([now.lam, along(step)], 1), now.sharpness).loss
    bend = (trial - start.loss - slope * step) / step.square().clamp(min=1e-30)
    lam = along(torch.where(bend > 0, -slope / (2 * bend).clamp(min=1e-30), 0.0))
    after = wide.evaluate(points, torch.cat([now.lam, lam], 1), now.sharpness).loss
    newcomers: list[list[Newcomer]] = [[] for _ in range(now.runs)]
    for run, i in (keep & (after < start.loss)[:, None]).nonzero().tolist():
        newcomers[run].append(Newcomer(x[run, i], lam[run, i], labels[run, i]))
    return Proposal(newcomers, start.loss, after, torch.full_like(after, torch.nan))
