"""What a split does to the margin p and to delta (Refael et al. 2025, Theorem 9), and its inverse.

Splitting sample l into x + a nu and x - b nu moves its margin m_l by +a s and -b s with
s = y_l <grad_x Phi, nu>, and everything follows exactly:

    p' = min(p, m_l + a s, m_l - b s),    delta' = max over the new set of lam (m - p')

Printed beside it: delta' <= delta + Dd if Dd < p, Dd = lam_l (a+b) C with
C = sum_{j active on x_l} |v_j| (eps + gamma |v_j| sum lam). That bound is not one (delta' reached 2.25
times it, and Dd < p compares different units). What does hold, since p - p' <= max(a, b) C:

    delta' <= delta + max(a, b) C max_i lam_i

with equality at an exact point whose samples all have the same <nu, x_i> and share one neuron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.errors import InputError, did_you_mean
from residuum.networks import dense_chain
from residuum.stationarity import norm
from residuum.theory.budgets import two_layer_weights, unit
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.patterns import HypothesisError

FORMS = ("refael2025", "haim2022")


@dataclass(frozen=True)
class SplitLevels:
    """Levels before and after a split: exact, as printed, and a bound that holds.

    printed: delta + Dd, or None where its condition Dd < p fails; bound: the corrected one; both need
    a two-layer network and are None for others. printed_holds: delta_after <= printed.
    """

    margin_before: float
    margin_after: float
    delta_before: float
    delta_after: float
    printed: float | None
    bound: float | None

    @property
    def printed_holds(self) -> bool | None:
        """Whether the printed statement is true here; None where it says nothing."""
        if self.printed is None:
            return None
        same_margin = self.margin_after >= self.margin_before * (1 - 1e-12)
        return same_margin and self.delta_after <= self.printed * (1 + 1e-12)


def split_levels(kkt: KKTSet, i: int, direction: Tensor, alpha: float, beta: float) -> SplitLevels:
    """Exact p' and delta' of a split that stays inside its pattern, and the published bound."""
    after = kkt.split(i, direction, alpha, beta)
    margins = [kkt.margin, after.margin, kkt.delta, after.delta]
    if kkt.task != "binary" or None in margins:
        raise HypothesisError(
            "label", "Theorem 9 is about binary labels and their margins.", "Compare KKTSet.delta."
        )
    p, p_after, delta, delta_after = (float(v) for v in margins if v is not None)
    printed = bound = None
    if (chain := dense_chain(kkt.models[0])) is not None and len(chain.linears) == 2:
        c, lam = _sensitivity(kkt, i, direction), float(kkt.lam[i])
        change = lam * (alpha + beta) * c
        printed = delta + change if change < p else None
        bound = delta + max(alpha, beta) * c * float(kkt.lam.max())
    return SplitLevels(p, p_after, delta, delta_after, printed, bound)


def largest_split(kkt: KKTSet, i: int, direction: Tensor, delta: float) -> float:
    """The inverse of Theorem 9: the longest symmetric split of sample i that an attacker cannot rule
    out who knows delta' <= delta; never beyond the exact budget. 0 where none is allowed.

    With a = b = t both halves have multiplier lam/2 and margins m +- t|s|, and every term of delta'
    grows with t, so each gives one bound on t in closed form.
    """
    if kkt.task != "binary" or kkt.margins is None:
        raise HypothesisError("label", "Theorem 9 is about binary labels.", "Use KKTSet.budgets.")
    nu = unit(direction)
    budget = float(kkt.budgets(nu, torch.tensor([i])).least[0])
    margins, lam = kkt.margins[:, 0], kkt.lam
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


def kkt_loss(kkt: KKTSet, form: str = "refael2025", g1: float = 1.0, g2: float = 1.0) -> float:
    """L_KKT of Definition 1: g1 ||r|| + g2 sum_i max(-lam_i, 0); haim2022 squares the norm."""
    if form not in FORMS:
        raise InputError(f"No form {form!r} of the KKT loss.", did_you_mean(form, FORMS))
    size = kkt.residual * norm(kkt.target)
    negative = float((-kkt.lam).clamp(min=0).sum())
    return g1 * (size if form == "refael2025" else size**2) + g2 * negative


def _sensitivity(kkt: KKTSet, i: int, direction: Tensor) -> float:
    """C: bound on |<grad_x Phi, nu>| at sample i from stationarity alone."""
    model = dense_chain(kkt.models[0])
    assert model is not None
    v, nu = two_layer_weights(model).abs(), unit(direction)
    eps = kkt.residual * norm(kkt.target)
    gamma = float((kkt.x.flatten(1) @ nu).abs().max())
    active = model.trace(kkt.x[i : i + 1]).pre[0][0] > 0
    found = float((v * (eps + gamma * v * kkt.lam.sum()))[active].sum())
    return found if math.isfinite(found) else math.inf
