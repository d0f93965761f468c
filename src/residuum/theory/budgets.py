"""How far a sample can be split along a direction before its activation pattern changes.

Refael et al. 2025, Theorems 5 and 8. Inside a pattern every switch is affine in x, so the budgets

    alpha_max = min_k { -s_k(x) / <grad s_k, nu> : > 0 },    beta_max: the same along -nu

are exact, one-sided, and need no hypothesis on depth or on how good a KKT point is. The certificates
bound |<w_j, nu>| of a two-layer network by what stationarity says about w_j, with gamma =
max_i |<nu, x_i>| and |nu| = 1:

    Theorem 5 as printed   min_j |pre_j| / (gamma sum_i lam_i)              false where |v_j| > 1
    Theorem 5 corrected    min_j |pre_j| / (gamma |v_j| sum_{i active on j} lam_i)
    Theorem 8              min_j |pre_j| / (eps + gamma |v_j| sum_i lam_i)

(|pre_j| = |D_j| |w_j|, D_j the signed distance to the neuron's hyperplane.) Printed with a one-sided
gamma = max_i <nu, x_i> all of them are false.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.networks import MLP, dense_chain
from residuum.theory.patterns import ROUNDING, HypothesisError, Switches, sizes, slopes, switches


@dataclass(frozen=True)
class Budgets:
    """Exact one-sided budgets of n samples, each along its own direction.

    alpha, beta: (n,) how far along +nu and -nu, infinite where nothing is in the way; blocking:
    (n, K) the switches that stop a sample first on either side; kinks: (n, K) switches the sample
    sits on and that the direction would move: both budgets are 0 then.
    """

    alpha: Tensor
    beta: Tensor
    blocking: Tensor
    kinks: Tensor
    switches: Switches

    @property
    def least(self) -> Tensor:
        """(n,) the smaller side: how far a symmetric split can go."""
        return torch.minimum(self.alpha, self.beta)

    def names(self, i: int) -> str:
        """The neurons that stop sample i: all kinks it sits on, otherwise the first on each side."""
        return self.switches.names(self.kinks[i] if self.kinks[i].any() else self.blocking[i])


@torch.no_grad()
def exact_budgets(models: Sequence[nn.Module], x: Tensor, direction: Tensor) -> Budgets:
    """Budgets of x: (n, *shape) along unit directions (n, *shape) or (*shape)."""
    found = switches(models, x)
    value, slope = found.values, slopes(models, x, direction)
    size = sizes(models, x, found.layers)
    moves = slope.abs() > ROUNDING * size
    reach = 1 + x.flatten(1).norm(dim=1, keepdim=True)
    kinks = moves & (value.abs() <= 10 * ROUNDING * size * reach)
    step = torch.where(moves, -value / torch.where(moves, slope, 1.0), math.inf)
    ahead = torch.where(step > 0, step, math.inf).masked_fill(kinks, 0)
    behind = torch.where(step < 0, -step, math.inf).masked_fill(kinks, 0)
    alpha, beta = (_least(side) for side in (ahead, behind))
    stopped = (ahead <= alpha[:, None]) & alpha.isfinite()[:, None]
    stopped |= (behind <= beta[:, None]) & beta.isfinite()[:, None]
    return Budgets(alpha, beta, stopped, kinks, found)


@dataclass(frozen=True)
class BudgetCertificates:
    """The published bounds on a split of one sample beside the exact budget; lengths, |nu| = 1.

    theorem5_printed, theorem5_corrected: for an exact KKT point (eps = 0); theorem8: for an eps-KKT
    point; one_sided: Theorem 8 with the printed gamma = max_i <nu, x_i>; exact: the smaller one-sided
    budget. A certificate is valid where it does not exceed the exact budget.
    """

    theorem5_printed: float
    theorem5_corrected: float
    theorem8: float
    one_sided: float
    exact: float
    gamma: float
    eps: float

    def valid(self, name: str) -> bool:
        """Whether the named bound keeps its promise here (to rounding)."""
        return bool(getattr(self, name) <= self.exact * (1 + 1e-12))

    @property
    def invalid(self) -> tuple[str, ...]:
        """Names of the bounds that promise more than there is."""
        names = ("theorem5_printed", "theorem5_corrected", "theorem8", "one_sided")
        return tuple(name for name in names if not self.valid(name))


@torch.no_grad()
def budget_certificates(
    model: MLP, x: Tensor, lam: Tensor, i: int, direction: Tensor, eps: float = 0.0
) -> BudgetCertificates:
    """Certificates for splitting sample i of a binary two-layer network. x: (n, d); lam: (n,)."""
    v = two_layer_weights(model)
    nu = unit(direction)
    flat = x.flatten(1)
    pre = model.trace(x).pre[0]
    along = flat @ nu
    gamma, total = float(along.abs().max()), lam.sum()
    active = ((pre > 0) * lam[:, None]).sum(0)  # (h,) multipliers of the samples active on j
    distance = pre[i].abs()
    live = distance > 0  # a neuron without weights has no hyperplane
    one_sided = float(along.max())
    exact = exact_budgets((model,), x[i : i + 1], nu.reshape(x[i : i + 1].shape))
    return BudgetCertificates(
        theorem5_printed=_ratio(distance[live], (gamma * total).expand_as(distance[live])),
        theorem5_corrected=_ratio(distance[live], (gamma * v.abs() * active)[live]),
        theorem8=_ratio(distance[live], (eps + gamma * v.abs() * total)[live]),
        one_sided=_ratio(distance[live], (eps + one_sided * v.abs() * total)[live]),
        exact=float(exact.least[0]),
        gamma=gamma,
        eps=eps,
    )


def unit(direction: Tensor) -> Tensor:
    """(d,) the direction with length 1; one of zero length is refused."""
    flat = direction.flatten().double()
    length = float(flat.norm())
    if not 0 < length < math.inf:
        raise HypothesisError(
            "direction",
            f"A splitting direction must have a positive finite length; got {length}.",
            "Take one from residuum.theory.directions.",
        )
    return flat / length


def two_layer_weights(model: nn.Module) -> Tensor:
    """(h,) output weights v of a two-layer MLP with one output; the printed theorems need one."""
    chain = dense_chain(model)
    if chain is None or len(chain.linears) != 2 or chain.linears[1].out_features != 1:
        raise HypothesisError(
            "depth",
            "Theorems 5, 8 and 9 are stated for two-layer networks with one output; this is another.",
            "Use exact_budgets, which hold for any depth.",
        )
    return chain.linears[1].weight.detach()[0]


def _least(steps: Tensor) -> Tensor:
    return steps.amin(1) if steps.shape[1] else steps.new_full((len(steps),), math.inf)


def _ratio(above: Tensor, below: Tensor) -> float:
    """min above / below; nothing below, or less, means nothing in the way."""
    held = below > 0
    return float((above[held] / below[held]).min()) if held.any() else math.inf
