"""Alternative training sets: other samples that fit the same weights as well as the true ones.

    far       every sample is split at least r away (Refael et al. 2025, Theorem 4): along a direction that
              the first layer ignores, or, if there is none, within its own exact budget
    budget    every sample is split by a share of its exact budget, on its margin
    merge     samples with the same label and activation pattern are replaced by their weighted mean

Some samples cannot be moved, because they have kinks or too small a budget. They do not change, and they are
reported with the neurons that limit them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.errors import InconclusiveError, InputError
from residuum.theory.budgets import Budgets
from residuum.theory.kkt_sets import KKTSet, Watcher
from residuum.theory.patterns import HypothesisError

MIN_BUDGET = 1e-9  # relative to a sample's size: a smaller budget counts as zero


@dataclass(frozen=True)
class Blocked:
    """A sample that does not move, and what limits it.

    Attributes:
        sample: Index of the sample.
        budget: Its budget.
        neurons: Number of neurons that limit it.
        names: Names of the first of these neurons.
    """

    sample: int
    budget: float
    neurons: int
    names: str


@dataclass(frozen=True, eq=False)
class Alternative:
    """An alternative training set.

    Attributes:
        kind: far, budget, or merge.
        before: The samples in use.
        after: The alternative.
        parents: Rows of ``before`` behind each row of ``after``.
        index: Row of the given set behind each row of ``before``.
        budgets: (k,) exact symmetric budgets of the samples in use, which may be infinite. Empty for a merge.
        blocked: Samples that do not move.
    """

    kind: str
    before: KKTSet
    after: KKTSet
    parents: tuple[tuple[int, ...], ...]
    index: Tensor
    budgets: Tensor
    blocked: tuple[Blocked, ...] = ()

    @property
    def changed(self) -> int:
        """The number of samples in use that were moved or merged."""
        merged = sum(len(p) for p in self.parents if len(p) > 1)
        return merged if self.kind == "merge" else len(self.before) - len(self.blocked)


def build_far_alternative(
    kkt_set: KKTSet, r: float, direction: str = "softest", watch: Watcher | None = None
) -> Alternative:
    """Build a set at distance ``r``, as far as the weights allow it.

    If the first layer ignores a direction of input space, every sample can move along it without limit.
    Otherwise each sample is split along its own direction, by ``r`` plus the range of all samples in this
    direction. So each half is far from all samples, not only from its own. Samples with too small a budget do
    not move.

    Args:
        kkt_set: Samples and multipliers of the network.
        r: The distance.
        direction: A rule of ``DIRECTIONS``.
        watch: Called with the number of finished samples and their total.

    Returns:
        The alternative.

    Raises:
        HypothesisError: If the distance is not positive and finite.
    """
    used, index = _select_used(kkt_set)
    infinite = torch.full((len(used),), torch.inf, dtype=torch.float64)
    try:
        after = kkt_set.far_set(r)
        pairs = tuple((i,) for i in range(len(used)) for _ in range(2))
        return Alternative("far", used, after, pairs, index, infinite)
    except HypothesisError as problem:
        if problem.hypothesis != "subspace":
            raise
    nu = used.directions(direction, watch=watch)
    budgets = used.budgets(nu)
    along = kkt_set.x.flatten(1) @ nu.T  # (n, k): components of all samples along each direction
    lengths = r * (1 + 1e-12) + along.amax(0) - along.amin(0)
    return _split("far", used, index, nu, budgets, lengths, budgets.least > lengths)


def build_budget_alternative(
    kkt_set: KKTSet, share: float, direction: str = "softest", watch: Watcher | None = None
) -> Alternative:
    """Split every sample by a share of its budget.

    Args:
        kkt_set: Samples and multipliers of the network.
        share: The share. An infinite budget counts as the norm of the largest sample.
        direction: A rule of ``DIRECTIONS``.
        watch: Called with the number of finished samples and their total.

    Returns:
        The alternative.

    Raises:
        InputError: If the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise InputError(
            f"The share of a budget must lie between 0 and 1; got {share}.",
            "Pass --budget-frac 0.9.",
        )
    used, index = _select_used(kkt_set)
    nu = used.directions(direction, watch=watch)
    budgets = used.budgets(nu)
    size = used.x.flatten(1).norm(dim=1)
    lengths = share * budgets.least.clamp(max=float(size.max()))
    return _split(
        "budget", used, index, nu, budgets, lengths, budgets.least > MIN_BUDGET * (1 + size)
    )


def build_merged_alternative(kkt_set: KKTSet) -> Alternative:
    """Merge samples with the same label, multipliers and pattern.

    Args:
        kkt_set: Samples and multipliers of the network.

    Returns:
        The alternative.

    Raises:
        InconclusiveError: If no two samples can be merged.
    """
    used, index = _select_used(kkt_set)
    merged, groups = used.merge_all()
    if len(merged) == len(used):
        raise InconclusiveError(
            "Merging needs two samples with the same label and activation pattern; there are none among "
            f"the {len(used)} samples in use.",
            "Pass --budget-frac 0.9 to split samples instead.",
        )
    after = dataclasses.replace(merged, parent=kkt_set)
    no_budgets = torch.zeros(0, dtype=torch.float64)
    return Alternative("merge", used, after, tuple(map(tuple, groups)), index, no_budgets)


def _split(
    kind: str,
    used: KKTSet,
    index: Tensor,
    nu: Tensor,
    budgets: Budgets,
    lengths: Tensor,
    free: Tensor,
) -> Alternative:
    """Split the samples that can move so far. The others do not move, and their limits are described."""
    blocked = tuple(
        _describe_blocked(budgets, i, int(index[i])) for i in (~free).nonzero()[:, 0].tolist()
    )
    if not free.any():
        raise InconclusiveError(
            f"None of the {len(used)} samples in use can be moved that far inside its activation "
            f"pattern; the largest budget is {float(budgets.least.max()):.4g}.",
            "Pass --budget-frac 0.9, or --direction largest.",
        )
    movable = free.nonzero()[:, 0]
    after = used.split_all(nu[movable], lengths[movable], samples=movable)
    parents = tuple((i,) for i, split in enumerate(free.tolist()) for _ in range(1 + split))
    return Alternative(kind, used, after, parents, index, budgets.least, blocked)


def _describe_blocked(budgets: Budgets, i: int, sample: int) -> Blocked:
    kinks = int(budgets.kinks[i].sum())
    neurons = kinks or int(budgets.blocking[i].sum())
    return Blocked(sample, float(budgets.least[i]), neurons, budgets.names(i))


def _select_used(kkt_set: KKTSet) -> tuple[KKTSet, Tensor]:
    index = (kkt_set.lam > 0).nonzero()[:, 0]
    if not len(index):
        raise InconclusiveError(
            "No sample has a positive multiplier, so these samples do not contribute to the weights.",
            "Check that they are the network's training data.",
        )
    return kkt_set.used(), index
