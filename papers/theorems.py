"""Every lemma and theorem of Refael et al. 2025 on a concrete network: printed, corrected, exact.

Theorem 9 in full: splitting sample l into x + a nu and x - b nu moves its margin m_l by +a s and -b s
with s = y_l <grad_x Phi, nu>, and everything follows exactly:

    p' = min(p, m_l + a s, m_l - b s),    delta' = max over the new set of lam (m - p')

Printed beside it: delta' <= delta + Dd if Dd < p, Dd = lam_l (a+b) C with
C = sum_{j active on x_l} |v_j| (eps + gamma |v_j| sum lam). That bound is not one (delta' reached 2.25
times it, and Dd < p compares different units). What does hold, since p - p' <= max(a, b) C:

    delta' <= delta + max(a, b) C max_i lam_i

with equality at an exact point whose samples all have the same <nu, x_i> and share one neuron.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from papers.outcome import Outcome
from papers.points import ExactPoint, noisy, normal, relu_point, steep_point
from papers.runs import Context
from residuum.networks import MLP, dense_chain
from residuum.stationarity import norm
from residuum.theory.budgets import budget_certificates, two_layer_weights, unit
from residuum.theory.directions import data_direction
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.patterns import HypothesisError

Rows = Iterator[
    tuple[str, float, float | None, float | None, str]
]  # exact, printed, corrected, note


@dataclass(frozen=True)
class SplitLevels:
    """Levels before and after a split: exact, as printed, and a bound that holds.

    printed: delta + Dd, or None where its condition Dd < p fails; bound: the corrected one; both need
    a two-layer network and are None for others.
    """

    margin_before: float
    margin_after: float
    delta_after: float
    printed: float | None
    bound: float | None


def split_levels(kkt: KKTSet, i: int, direction: Tensor, alpha: float, beta: float) -> SplitLevels:
    """Exact p' and delta' of a split that stays inside its pattern, and the published bound."""
    _check_binary(kkt)
    after = kkt.split(i, direction, alpha, beta)
    p, p_after, delta, delta_after = (
        float(value or 0.0) for value in (kkt.margin, after.margin, kkt.delta, after.delta)
    )
    printed = bound = None
    chain = dense_chain(kkt.models[0])
    if chain is not None and len(chain.linears) == 2:
        c = _sensitivity(kkt, chain, i, direction)
        change = float(kkt.lam[i]) * (alpha + beta) * c
        printed = delta + change if change < p else None
        bound = delta + max(alpha, beta) * c * float(kkt.lam.max())
    return SplitLevels(p, p_after, delta_after, printed, bound)


def largest_split(kkt: KKTSet, i: int, direction: Tensor, delta: float) -> float:
    """The inverse of Theorem 9: the longest symmetric split of sample i that an attacker cannot rule
    out who knows delta' <= delta; never beyond the exact budget. 0 where none is allowed.

    With a = b = t both halves have multiplier lam/2 and margins m +- t|s|, and every term of delta'
    grows with t, so each gives one bound on t in closed form.
    """
    margins, lam, nu = _check_binary(kkt)[:, 0], kkt.lam, unit(direction)
    budget = float(kkt.budgets(nu, torch.tensor([i])).least[0])
    p, m = float(margins.min()), float(margins[i])
    s = abs(float(kkt.gradients[i, 0] @ nu))
    others = torch.arange(len(lam)) != i
    # Of the other samples, whose slack grows once p' falls below p:
    rest = (lam[others] * (margins[others] - p)).amax() if others.any() else torch.tensor(0.0)
    rounding = 1e-12 * float(lam.max() * margins.abs().max())
    if max(float(rest), float(lam[i]) / 2 * (m - p)) > delta + rounding:
        return 0.0
    if s <= 1e-14 * float(kkt.gradients[i, 0].norm()):
        return budget
    used = others & (lam > 0)
    bounds = (m - margins[used] + delta / lam[used]) / s
    own = (2 * delta / float(lam[i]) - (m - p)) / s  # while p' = p
    if own > (m - p) / s:  # p' = m - t s from here on
        own = delta / (float(lam[i]) * s)
    return max(0.0, min([budget, own, *bounds.tolist()]))


def kkt_loss(kkt: KKTSet, power: int = 1, g1: float = 1.0, g2: float = 1.0) -> float:
    """L_KKT of Definition 1: g1 ||r||^power + g2 sum_i max(-lam_i, 0); Haim et al. 2022 have power 2."""
    size = kkt.residual * norm(kkt.target)
    return g1 * size**power + g2 * float((-kkt.lam).clamp(min=0).sum())


def _check_binary(kkt: KKTSet) -> Tensor:
    if kkt.task != "binary" or kkt.margins is None:
        raise HypothesisError(
            "label", "Theorem 9 is about binary labels and their margins.", "Compare KKTSet.delta."
        )
    return kkt.margins


def _sensitivity(kkt: KKTSet, model: MLP, i: int, direction: Tensor) -> float:
    """C: bound on |<grad_x Phi, nu>| at sample i from stationarity alone."""
    v, nu = two_layer_weights(model).abs(), unit(direction)
    eps = kkt.residual * norm(kkt.target)
    gamma = float((kkt.x.flatten(1) @ nu).abs().max())
    active = model.trace(kkt.x[i : i + 1]).pre[0][0] > 0
    return float((v * (eps + gamma * v * kkt.lam.sum()))[active].sum())


def theorems(context: Context) -> Outcome:
    """The table; every entry is computed here, none is quoted from the theory page."""
    network = "12-2-1 on 6 samples, closed form; others are named in the notes of a row"
    out = Outcome(details={"network": network})
    for part in (
        _threshold,
        _merging,
        _splitting,
        _budgets,
        _perturbed,
        _levels,
        _singular,
        _shifted,
    ):
        for what, exact, printed, corrected, note in part(relu_point()):
            out.row(what, exact, printed, corrected=corrected, note=note)
    return out


def _threshold(point: ExactPoint) -> Rows:
    """Theorem 1: a mean logistic loss below 1/n does not separate; below ln2/n it does."""
    base = steep_point()
    x = torch.stack([30 * base.x[0], 0.2 * base.x[0]])
    margins = base.model(x)[:, 0].detach() * torch.tensor([1.0, -1.0]).double() * base.y[0]
    what = "Theorem 1: loss below which all margins are positive, n = 2, logistic"
    note = f"this loss, with a margin of {float(margins.min()):.2g}: the printed 1/n is that of "
    note += "the exponential loss"
    yield what, float(softplus(-margins).mean()), 1 / 2, math.log(2) / 2, note


def _merging(point: ExactPoint) -> Rows:
    """Lemma 2 in one pattern, Lemma 6 across patterns."""
    residual = point.set.merge(0, 1).residual
    yield "Lemma 2: residual after a merge in one pattern", residual, 0.0, 0.0, ""
    other, pair = relu_point(groups=4, size=2), [0, 4]  # groups 0 and 2: one label, two patterns
    keep = [i for i in range(len(other.x)) if i not in pair]
    y, best = other.y[[*keep, pair[0]]], math.inf
    for share in torch.linspace(0, 1, 41):
        mean = share * other.x[pair[0]] + (1 - share) * other.x[pair[1]]
        merged = KKTSet.of(other.model, torch.cat([other.x[keep], mean[None]]), y)
        best = min(best, merged.residual)
    note = "the best over the merged sample's place and all multipliers >= 0; network 12-4-1"
    yield "Lemma 6: residual after a merge across two patterns", best, 0.0, best, note


def _splitting(point: ExactPoint) -> Rows:
    """Lemma 3 / 7: the residual stays; the margin only along directions orthogonal to grad_x Phi.
    Theorem 4 needs no two layers.
    """
    given, some, nu = point.set, torch.tensor([0]), unit(normal(12))
    length = min(1.0, 0.5 * float(given.budgets(nu, some).least[0]))
    free = given.split(0, nu, length)
    kept = given.split(0, given.directions("tangent", some)[0], 0.1)
    yield "Lemma 3: residual after a split along a random direction", free.residual, 0.0, 0.0, ""
    change, note = length * abs(float(given.gradients[0, 0] @ nu)), "alpha |<grad_x Phi, nu>|"
    falls = [1 - float(split.margin or 0) for split in (free, kept)]
    yield "Lemma 7: fall of the margin after that split", falls[0], 0.0, change, note
    yield "Lemma 7: the same, nu orthogonal to grad_x Phi", falls[1], 0.0, 0.0, ""
    far = given.far_set(1000.0)
    note = f"distance {given.distance(far):.6g}, margin {far.margin:.6g}, full KKT set: "
    note += "yes" if far.full_kkt_set else "no"
    yield "Theorem 4: residual of a set farther away than 1000", far.residual, 0.0, 0.0, note


def _budgets(point: ExactPoint) -> Rows:
    """Theorem 5, where an output weight exceeds one."""
    steep = steep_point(0.05)
    given, nu = steep.set, steep.model.linears[0].weight[0].detach()
    found = [budget_certificates(steep.model, given.x, given.lam, i, nu) for i in range(len(given))]
    i = max(range(len(found)), key=lambda k: found[k].theorem5_printed / found[k].exact)
    printed, corrected = found[i].theorem5_printed, found[i].theorem5_corrected
    beyond = given.split(i, nu, 0.99 * printed, check=False).residual
    largest = float(two_layer_weights(steep.model).abs().max())
    note = f"|v| = {largest:.3g}; a split the printed budget allows has residual {beyond:.2g}"
    yield "Theorem 5: budget of a split", found[i].exact, printed, corrected, note


def _perturbed(point: ExactPoint) -> Rows:
    """Theorem 8 and Lemma 14 at an eps-KKT point, and Theorem 8 with the printed gamma."""
    model, nu = noisy(point.model, 0.05, seed=3), unit(normal(12, seed=1))
    given = KKTSet.of(model, point.x, point.y, point.lam)
    eps = given.residual * norm(given.target)
    sound = budget_certificates(model, point.x, point.lam, 0, nu, eps)
    what, note = "Theorem 8: budget at an eps-KKT point", f"eps = {eps:.3g}, two-sided gamma"
    yield what, sound.exact, sound.theorem8, sound.theorem8, note
    sides = [
        budget_certificates(point.model, point.x, point.lam, k, normal(12, seed=seed))
        for seed in range(40)
        for k in range(len(point.x))
    ]
    false = max(sides, key=lambda one: one.one_sided / one.exact)
    what, note = "Theorem 8 with the printed one-sided gamma", "worst of 240 directions and samples"
    yield what, false.exact, false.one_sided, false.theorem8, note
    along, v = (model.linears[0].weight @ nu).abs().detach(), two_layer_weights(model).abs()
    bounds = eps + float((point.x @ nu).abs().max()) * v * point.lam.sum()
    j = int((along / bounds).argmax())
    bound, note = float(bounds[j]), "the neuron nearest its bound"
    yield "Lemma 14: |<w_j, nu>|", float(along[j]), bound, bound, note


def _levels(point: ExactPoint) -> Rows:
    """Theorem 9: what a split does to delta and to the margin; the split that breaks it most."""
    steep = steep_point(0.5).set
    least, nu = int(steep.lam.argmin()), steep.gradients[0, 0]
    reach = 0.05 * float(steep.budgets(unit(nu)).least[least])
    lengths = [share * reach for share in (0.02, 0.1, 0.5, 1.0)]
    tried = [split_levels(steep, least, nu, a, b) for a in lengths for b in lengths]
    stated = [found for found in tried if found.printed is not None]
    found = max(stated, key=lambda one: one.delta_after / float(one.printed or 1))
    yield "Theorem 9: delta after a split", found.delta_after, found.printed, found.bound, ""
    what, note = "Theorem 9: margin after that split", "condition (b) is stated at that before"
    yield what, found.margin_after, found.margin_before, found.margin_after, note


def _singular(point: ExactPoint) -> Rows:
    """Theorem 15 and its remark."""
    n, d = 40, 12
    _, sigma, gamma = data_direction(normal(n, d))
    what, note = "Theorem 15: gamma along the last singular vector", "an upper bound, as printed"
    yield what, gamma, sigma, sigma, f"{note}; n = {n}, d = {d}"
    note = "no direction has less than sigma_d / sqrt(n); the remark says sigma_d / n"
    yield "Theorem 15, remark: size of gamma", gamma, sigma / n, sigma / math.sqrt(n), note


def _shifted(point: ExactPoint) -> Rows:
    """Appendix D: rewriting the biases is not training on shifted data."""
    weight, bias = (part.detach() for part in point.model.linears[0].parameters())
    for length in (0.1, 0.5, 5.0):
        u = length * torch.ones(12, dtype=torch.float64) / math.sqrt(12)
        moved = copy.deepcopy(point.model)
        moved.linears[0].bias.data.sub_(weight @ u)
        given = KKTSet.of(moved, point.x + u, point.y, point.lam)
        formula = math.hypot(float(bias.norm()) * length, float((weight @ u).norm()))
        note = f"refitted multipliers: {KKTSet.of(moved, point.x + u, point.y).residual:.3g}"
        what = f"Appendix D: residual after a shift of norm {length:g}"
        yield what, given.residual, 0.0, formula / norm(given.target), note
