"""Alternative training sets: other samples that fit the same weights as well as the true ones.

A split replaces a sample by two samples that lie on opposite sides of it. The budget of a sample is the
largest distance that it can move along a direction without a change of its activation pattern. There are
three kinds of alternatives:

    far       every sample is split into two samples that are at least a distance r away from all samples
              (Refael et al. 2025, Theorem 4). They move along a direction that the first layer ignores. If
              there is no such direction, they move within the budget.
    budget    every sample is split by a share of its budget and keeps its margin
    merge     samples with the same label and activation pattern are replaced by their weighted mean

Samples with kinks (a ReLU's input is exactly zero) or with too small a budget cannot be moved. These samples
do not change, and they are reported with the neurons that limit them.
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

# A budget (the distance that a sample can move) below this share of the sample's norm counts as zero.
MIN_BUDGET = 1e-9


@dataclass(frozen=True)
class Blocked:
    """A sample that cannot be moved far enough, and the neurons that limit it.

    Attributes:
        sample: Index of the sample.
        budget: The largest distance that the sample can move inside its activation pattern.
        neurons: Number of neurons that limit this distance.
        names: Names of the first of these neurons.
    """

    sample: int
    budget: float
    neurons: int
    names: str


@dataclass(frozen=True, eq=False)
class Alternative:
    """An alternative training set that fits the same weights as the original set.

    Attributes:
        kind: far, budget, or merge.
        before: The original samples with a positive multiplier. Others do not contribute to the weights.
        after: The alternative samples.
        parents: For each row of ``after``, the rows of ``before`` from which it was made.
        index: For each row of ``before``, its row in the original set.
        budgets: (k,) distances that the samples in ``before`` can move in both directions, which may be
            infinite. Empty for a merge.
        blocked: Samples that cannot be moved far enough.
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
        """The number of original samples that were moved or merged."""
        merged = sum(len(p) for p in self.parents if len(p) > 1)
        return merged if self.kind == "merge" else len(self.before) - len(self.blocked)


def build_far_alternative(
    kkt_set: KKTSet, r: float, direction: str = "softest", watch: Watcher | None = None
) -> Alternative:
    """Build an alternative training set whose samples lie at least ``r`` away from all original samples.

    If the first layer ignores a direction of input space, every sample can move along this direction without
    limit. Otherwise each sample is split into two, along a direction of its own. Both halves move by ``r``
    plus the range of all samples in this direction, so that they are far from all samples. Samples that would
    leave their activation pattern do not move.

    Args:
        kkt_set: Samples and multipliers of the network.
        r: The smallest distance between an alternative and an original sample.
        direction: Key of ``DIRECTIONS``, the rule that chooses the direction of each split.
        watch: Called with the number of finished samples and their total.

    Returns:
        The alternative.

    Raises:
        HypothesisError: If the distance is not positive and finite.
    """
    used, index = _select_used(kkt_set)
    infinite_budgets = torch.full((len(used),), torch.inf, dtype=torch.float64)
    try:
        far_set = kkt_set.far_set(r)
        parents = tuple((i,) for i in range(len(used)) for _ in range(2))
        return Alternative("far", used, far_set, parents, index, infinite_budgets)
    except HypothesisError as problem:
        if problem.hypothesis != "subspace":
            raise
    directions = used.directions(direction, watch=watch)
    budgets = used.budgets(directions)
    components = (
        kkt_set.x.flatten(1) @ directions.T
    )  # (n, k): components of all samples along each direction
    lengths = r * (1 + 1e-12) + components.amax(0) - components.amin(0)
    return _split("far", used, index, directions, budgets, lengths, budgets.least > lengths)


def build_budget_alternative(
    kkt_set: KKTSet, share: float, direction: str = "softest", watch: Watcher | None = None
) -> Alternative:
    """Build an alternative training set that splits every sample by a share of its budget.

    The budget of a sample is the largest distance that it can move inside its activation pattern.

    Args:
        kkt_set: Samples and multipliers of the network.
        share: The share of the budget. An infinite budget counts as the norm of the largest sample.
        direction: Key of ``DIRECTIONS``, the rule that chooses the direction of each split.
        watch: Called with the number of finished samples and their total.

    Returns:
        The alternative.

    Raises:
        InputError: If the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise InputError(
            "The share of the budget by which each sample is split must lie between 0 and 1; "
            f"got {share}.",
            "Pass --budget-frac 0.9.",
        )
    used, index = _select_used(kkt_set)
    directions = used.directions(direction, watch=watch)
    budgets = used.budgets(directions)
    norms = used.x.flatten(1).norm(dim=1)
    split_lengths = share * budgets.least.clamp(max=float(norms.max()))
    return _split(
        "budget",
        used,
        index,
        directions,
        budgets,
        split_lengths,
        budgets.least > MIN_BUDGET * (1 + norms),
    )


def build_merged_alternative(kkt_set: KKTSet) -> Alternative:
    """Build an alternative training set by merging samples.

    Samples with the same label, activation pattern and proportional multipliers become one sample.

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
            "Merging needs two samples with the same label and activation pattern; no two of the "
            f"{len(used)} samples with a positive multiplier have the same.",
            "Pass --budget-frac 0.9 to split samples instead.",
        )
    merged_set = dataclasses.replace(merged, parent=kkt_set)
    no_budgets = torch.zeros(0, dtype=torch.float64)
    return Alternative("merge", used, merged_set, tuple(map(tuple, groups)), index, no_budgets)


def _split(
    kind: str,
    used: KKTSet,
    index: Tensor,
    nu: Tensor,
    budgets: Budgets,
    lengths: Tensor,
    is_movable: Tensor,
) -> Alternative:
    """Split the samples for which ``is_movable`` is True, and describe what limits the other samples."""
    blocked = tuple(
        _describe_blocked(budgets, i, int(index[i])) for i in (~is_movable).nonzero()[:, 0].tolist()
    )
    if not is_movable.any():
        raise InconclusiveError(
            f"None of the {len(used)} samples can be moved by the requested distance inside its activation "
            f"pattern; the largest possible distance is {float(budgets.least.max()):.4g}.",
            "Pass --budget-frac 0.9, or --direction largest.",
        )
    movable_samples = is_movable.nonzero()[:, 0]
    split_set = used.split_all(
        nu[movable_samples], lengths[movable_samples], samples=movable_samples
    )
    parents = tuple((i,) for i, split in enumerate(is_movable.tolist()) for _ in range(1 + split))
    return Alternative(kind, used, split_set, parents, index, budgets.least, blocked)


def _describe_blocked(budgets: Budgets, i: int, sample: int) -> Blocked:
    kink_count = int(budgets.kinks[i].sum())
    neuron_count = kink_count or int(budgets.blocking[i].sum())
    return Blocked(sample, float(budgets.least[i]), neuron_count, budgets.names(i))


def _select_used(kkt_set: KKTSet) -> tuple[KKTSet, Tensor]:
    used_rows = (kkt_set.lam > 0).nonzero()[:, 0]
    if not len(used_rows):
        raise InconclusiveError(
            "No sample has a positive multiplier, so these samples do not contribute to the weights.",
            "Check that the samples are the network's training data.",
        )
    return kkt_set.used(), used_rows
