"""Every lemma and theorem of Refael et al. 2025 on a concrete network: printed, corrected, exact."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import softplus

from residuum.networks import MLP
from residuum.reproduce.context import Context
from residuum.reproduce.exact import ReluPoint, simplex
from residuum.reproduce.outcome import Outcome, Row
from residuum.stationarity import norm
from residuum.theory.budgets import budget_certificates
from residuum.theory.directions import data_direction
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.levels import split_levels

FAR = 1000.0


def theorems(context: Context) -> Outcome:
    """The table; every entry is computed here, none is quoted from the theory page."""
    point = simplex()
    parts = (threshold, merging, splitting, far, budgets, perturbed, levels, singular, shifted)
    rows = tuple(row for part in parts for row in part(point))
    details = {
        "network": "12-2-1 on 6 samples, closed form; others are named in the notes of a row"
    }
    return Outcome(rows, {}, details)


def threshold(point: ReluPoint) -> Iterator[Row]:
    """Theorem 1: a mean logistic loss below 1/n does not separate; below ln2/n it does."""
    base = simplex(bias=False)
    x = torch.stack([30 * base.x[0], 0.2 * base.x[0]])
    margins = base.model(x)[:, 0] * torch.tensor([1.0, -1.0]).double() * base.y[0]
    loss = float(softplus(-margins).mean())
    yield Row(
        "Theorem 1: loss below which all margins are positive, n = 2, logistic",
        loss,
        1 / 2,
        corrected=math.log(2) / 2,
        note=f"this loss, with a margin of {float(margins.min()):.2g}: the printed 1/n is that of the "
        "exponential loss",
    )


def merging(point: ReluPoint) -> Iterator[Row]:
    """Lemma 2 in one pattern, Lemma 6 across patterns."""
    yield Row(
        "Lemma 2: residual after a merge in one pattern",
        point.set.merge(0, 1).residual,
        0.0,
        corrected=0.0,
    )
    other = simplex(groups=4, size=2)
    first, second = 0, 4  # groups 0 and 2: one label, two patterns
    keep = [i for i in range(len(other.x)) if i not in (first, second)]
    best = math.inf
    for share in torch.linspace(0, 1, 41):
        mean = share * other.x[first] + (1 - share) * other.x[second]
        x = torch.cat([other.x[keep], mean[None]])
        y = torch.cat([other.y[keep], other.y[[first]]])
        best = min(best, KKTSet.of(other.model, x, y).residual)
    yield Row(
        "Lemma 6: residual after a merge across two patterns",
        best,
        0.0,
        corrected=best,
        note="the best over the merged sample's place and all multipliers >= 0; network 12-4-1",
    )


def splitting(point: ReluPoint) -> Iterator[Row]:
    """Lemma 3 / 7: the residual stays; the margin only along directions orthogonal to grad_x Phi."""
    given = point.set
    some = torch.tensor([0])
    nu, on = _random(12), given.directions("tangent", some)[0]
    length = min(1.0, 0.5 * float(given.budgets(nu, some).least[0]))
    free, kept = given.split(0, nu, length), given.split(0, on, 0.1)
    yield Row(
        "Lemma 3: residual after a split along a random direction",
        free.residual,
        0.0,
        corrected=0.0,
    )
    change = length * abs(float(given.gradients[0, 0] @ nu))
    yield Row(
        "Lemma 7: fall of the margin after that split",
        1 - float(free.margin or 0),
        0.0,
        corrected=change,
        note="alpha |<grad_x Phi, nu>|",
    )
    yield Row(
        "Lemma 7: the same, nu orthogonal to grad_x Phi",
        1 - float(kept.margin or 0),
        0.0,
        corrected=0.0,
    )


def far(point: ReluPoint) -> Iterator[Row]:
    """Theorem 4, and that it needs no two layers."""
    given = point.set
    made = given.far_set(FAR)
    yield Row(
        "Theorem 4: residual of a set farther away than 1000",
        made.residual,
        0.0,
        corrected=0.0,
        note=f"distance {given.distance(made):.6g}, margin {made.margin:.6g}, full KKT set: "
        f"{'yes' if made.full_kkt_set else 'no'}",
    )


def budgets(point: ReluPoint) -> Iterator[Row]:
    """Theorem 5, where an output weight exceeds one."""
    steep = simplex(bias=False, scale=0.05)
    given = steep.set
    nu = steep.model.linears[0].weight[0]
    worst = max(
        (budget_certificates(steep.model, given.x, given.lam, i, nu) for i in range(len(given))),
        key=lambda found: found.theorem5_printed / found.exact,
    )
    i = next(
        k
        for k in range(len(given))
        if budget_certificates(steep.model, given.x, given.lam, k, nu).exact == worst.exact
    )
    beyond = given.split(i, nu, 0.99 * worst.theorem5_printed, check=False).residual
    yield Row(
        "Theorem 5: budget of a split",
        worst.exact,
        worst.theorem5_printed,
        corrected=worst.theorem5_corrected,
        note=f"|v| = {float(steep.model.linears[1].weight.abs().max()):.3g}; a split the printed budget "
        f"allows has residual {beyond:.2g}",
    )


def perturbed(point: ReluPoint) -> Iterator[Row]:
    """Theorem 8 and Lemma 14 at an eps-KKT point, and Theorem 8 with the printed gamma."""
    eps_point, eps = _perturbed(point)
    direction = _random(12, 1)
    sound = budget_certificates(eps_point.model, eps_point.x, eps_point.lam, 0, direction, eps)
    yield Row(
        "Theorem 8: budget at an eps-KKT point",
        sound.exact,
        sound.theorem8,
        corrected=sound.theorem8,
        note=f"eps = {eps:.3g}, two-sided gamma, |nu| = 1",
    )
    sides = [
        budget_certificates(point.model, point.x, point.lam, k, _random(12, seed))
        for seed in range(40)
        for k in range(len(point.x))
    ]
    false = max(sides, key=lambda one: one.one_sided / one.exact)
    yield Row(
        "Theorem 8 with the printed one-sided gamma",
        false.exact,
        false.one_sided,
        corrected=false.theorem8,
        note="worst of 240 directions and samples",
    )
    first, v = eps_point.model.linears[0].weight, eps_point.model.linears[1].weight[0].abs()
    gamma = float((eps_point.x @ direction).abs().max())
    bound = eps + gamma * v * eps_point.lam.sum()
    j = int(((first @ direction).abs() / bound).argmax())
    yield Row(
        "Lemma 14: |<w_j, nu>|",
        float((first @ direction)[j].abs()),
        float(bound[j]),
        corrected=float(bound[j]),
        note="the neuron nearest its bound",
    )


def levels(point: ReluPoint) -> Iterator[Row]:
    """Theorem 9: what a split does to delta and to the margin; the split that breaks it most."""
    steep = simplex(bias=False, scale=0.5).set
    least, nu = int(steep.lam.argmin()), steep.gradients[0, 0]
    reach = 0.05 * float(steep.budgets(nu / nu.norm()).least[least])
    tried = [
        split_levels(steep, least, nu, a * reach, b * reach)
        for a in (0.02, 0.1, 0.5, 1.0)
        for b in (0.02, 0.1, 0.5, 1.0)
    ]
    stated = [found for found in tried if found.printed is not None]
    found = max(stated, key=lambda one: one.delta_after / float(one.printed or 1))
    yield Row(
        "Theorem 9: delta after a split", found.delta_after, found.printed, corrected=found.bound
    )
    yield Row(
        "Theorem 9: margin after that split",
        found.margin_after,
        found.margin_before,
        corrected=found.margin_after,
        note="condition (b) is stated at the margin before",
    )


def singular(point: ReluPoint) -> Iterator[Row]:
    """Theorem 15 and its remark."""
    x = torch.randn(40, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, sigma, gamma = data_direction(x)
    yield Row(
        "Theorem 15: gamma along the last singular vector",
        gamma,
        sigma,
        corrected=sigma,
        note="an upper bound, as printed; n = 40, d = 12",
    )
    yield Row(
        "Theorem 15, remark: size of gamma",
        gamma,
        sigma / len(x),
        corrected=sigma / math.sqrt(len(x)),
        note="no direction has less than sigma_d / sqrt(n); the remark says sigma_d / n",
    )


def shifted(point: ReluPoint) -> Iterator[Row]:
    """Appendix D: rewriting the biases is not training on shifted data."""
    first = point.model.linears[0]
    for length in (0.1, 0.5, 5.0):
        u = length * torch.ones(12, dtype=torch.float64) / math.sqrt(12)
        moved = MLP((12, len(first.weight), 1)).double()
        moved.load_state_dict(point.model.state_dict())
        with torch.no_grad():
            moved.linears[0].bias.sub_(first.weight @ u)
        given = KKTSet.of(moved, point.x + u, point.y, point.lam)
        size = norm(given.target)
        formula = math.sqrt(
            float(first.bias.norm()) ** 2 * length**2 + float((first.weight @ u).norm()) ** 2
        )
        refitted = KKTSet.of(moved, point.x + u, point.y).residual
        yield Row(
            f"Appendix D: residual after a shift of norm {length:g}",
            given.residual,
            0.0,
            corrected=formula / size,
            note=f"refitted multipliers: {refitted:.3g}",
        )


def _random(dim: int, seed: int = 0) -> Tensor:
    nu = torch.randn(dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nu / nu.norm()


def _perturbed(point: ReluPoint) -> tuple[ReluPoint, float]:
    """The point with noise of 5% of every parameter's size, and its eps."""
    generator = torch.Generator().manual_seed(3)
    model = MLP((point.x.shape[1], 2, 1)).double()
    model.load_state_dict(point.model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.add_(0.05 * noise * p.norm() / p.numel() ** 0.5)
    moved = ReluPoint(model.requires_grad_(False), point.x, point.y, point.lam)
    return moved, moved.set.residual * norm(moved.set.target)
