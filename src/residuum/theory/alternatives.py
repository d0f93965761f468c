"""Build alternative training sets: other samples that fit the same weights as well as the true samples.

A split replaces a sample by two samples that lie on opposite sides of it. The activation pattern of a sample
says which neurons are active. The budget of a sample is the largest distance that the sample can move along a
direction before its activation pattern changes. There are three kinds of alternatives:

    far       every sample is split into two samples that are at least a distance r away from all samples
              (Refael et al. 2025, Theorem 4). Samples move along a direction that does not change the
              pre-activations of the first layer. If there is no such direction, samples move within their
              budgets.
    budget    every sample is split, and both halves move by a share of the budget. Margins do not change.
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

# The budget of a sample is the distance that it can move before another neuron becomes active or inactive.
# A budget below this number times (1 + norm of the sample) counts as zero.
MIN_BUDGET = 1e-9


@dataclass(frozen=True)
class Blocked:
    """A sample that cannot be moved by the requested distance, and the neurons that prevent this.

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
        before: The original samples with a positive multiplier. The other original samples do not contribute
            to the weights.
        after: The alternative samples.
        parents: For each alternative sample, the indices of the samples in ``before`` from which it was made.
        index: For each sample in ``before``, its index in the original set.
        budgets: (k,) largest distance that each sample in ``before`` can move forwards as well as backwards
            before its activation pattern changes. A distance may be infinite. Empty for a merge.
        blocked: Samples that cannot be moved by the requested distance.
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
        """The number of original samples that were split in two or merged."""
        merged_count = sum(len(p) for p in self.parents if len(p) > 1)
        return merged_count if self.kind == "merge" else len(self.before) - len(self.blocked)


def build_far_alternative(
    kkt_set: KKTSet, r: float, direction: str = "softest", watch: Watcher | None = None
) -> Alternative:
    """Build an alternative training set (with the same weights) at a distance from the original samples.

    Its samples lie at least ``r`` away from all original samples.

    If a direction of input space is orthogonal to the weights of all neurons of the first layer, every
    sample can move along this direction without limit. If there is no such direction, each sample gets its
    own direction. Each sample is split into two halves. Both halves move by ``r`` plus the range of all
    samples in their direction, so that they are far from all samples. A sample does not move if a half
    would leave the activation pattern of the sample.

    Args:
        kkt_set: Training samples with multipliers (weights), which explain the weights of the network.
        r: The smallest distance between an alternative and an original sample.
        direction: Name of the rule that chooses the direction of each split, a key of ``DIRECTIONS``.
        watch: Function that is called with the number of finished samples and the number of all samples.

    Returns:
        The alternative.

    Raises:
        HypothesisError: If the distance is not positive and finite.
    """
    used, index = _select_used(kkt_set)
    unlimited_distances = torch.full((len(used),), torch.inf, dtype=torch.float64)
    try:
        alternative_set = kkt_set.far_set(r)
        original_indices = tuple((i,) for i in range(len(used)) for _ in range(2))
        return Alternative(
            "far", used, alternative_set, original_indices, index, unlimited_distances
        )
    except HypothesisError as problem:
        if problem.hypothesis != "subspace":
            raise
    directions = used.directions(direction, watch=watch)
    budgets = used.budgets(directions)
    # The (n, k) components of all n samples along the k directions of the splits.
    components_along = kkt_set.x.flatten(1) @ directions.T
    lengths = r * (1 + 1e-12) + components_along.amax(0) - components_along.amin(0)
    return _split("far", used, index, directions, budgets, lengths, budgets.least > lengths)


def build_budget_alternative(
    kkt_set: KKTSet, share: float, direction: str = "softest", watch: Watcher | None = None
) -> Alternative:
    """Build an alternative training set (with the same weights) that splits every sample in two.

    The budget of a sample is the largest distance that it can move inside its activation pattern.

    Args:
        kkt_set: Training samples with multipliers (weights), which explain the weights of the network.
        share: The distance that both halves of a sample move, as a share of its budget. An infinite budget
            counts as the norm of the largest sample.
        direction: Name of the rule that chooses the direction of each split, a key of ``DIRECTIONS``.
        watch: Function that is called with the number of finished samples and the number of all samples.

    Returns:
        The alternative.

    Raises:
        InputError: If the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise InputError(
            "The option --budget-frac is a share of the largest distance that samples can move, so it "
            f"must lie between 0 and 1; got {share}.",
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
    """Build an alternative training set (with the same weights) by merging samples.

    Samples with the same label, activation pattern and proportional multipliers become one sample.

    Args:
        kkt_set: Training samples with multipliers (weights), which explain the weights of the network.

    Returns:
        The alternative.

    Raises:
        InconclusiveError: If no two samples can be merged.
    """
    used, index = _select_used(kkt_set)
    merged, groups = used.merge_all()
    if len(merged) == len(used):
        raise InconclusiveError(
            f"Two samples can be merged only if they have the same label and activate the same neurons; "
            f"no two of the {len(used)} samples that contribute to the weights do.",
            "Pass --budget-frac 0.9 to split samples instead.",
        )
    merged_set = dataclasses.replace(merged, parent=kkt_set)
    empty_budgets = torch.zeros(0, dtype=torch.float64)
    return Alternative("merge", used, merged_set, tuple(map(tuple, groups)), index, empty_budgets)


def _split(
    kind: str,
    used: KKTSet,
    index: Tensor,
    nu: Tensor,
    budgets: Budgets,
    lengths: Tensor,
    is_movable: Tensor,
) -> Alternative:
    """Split the samples marked by ``is_movable`` in two, and list the neurons that limit the others."""
    blocked = tuple(
        _describe_blocked(budgets, i, int(index[i])) for i in (~is_movable).nonzero()[:, 0].tolist()
    )
    if not is_movable.any():
        raise InconclusiveError(
            f"At least one sample must be able to move by the requested distance while the same neurons "
            f"stay active; the {len(used)} samples can move by at most "
            f"{float(budgets.least.max()):.4g}.",
            "Pass --budget-frac 0.9 for a shorter distance, or --direction largest for directions along "
            "which samples can move further.",
        )
    movable_samples = is_movable.nonzero()[:, 0]
    split_set = used.split_all(
        nu[movable_samples], lengths[movable_samples], samples=movable_samples
    )
    original_indices = tuple(
        (i,) for i, split in enumerate(is_movable.tolist()) for _ in range(1 + split)
    )
    return Alternative(kind, used, split_set, original_indices, index, budgets.least, blocked)


def _describe_blocked(budgets: Budgets, i: int, sample: int) -> Blocked:
    zero_input_count = int(budgets.kinks[i].sum())
    limiting_count = zero_input_count or int(budgets.blocking[i].sum())
    return Blocked(sample, float(budgets.least[i]), limiting_count, budgets.names(i))


def _select_used(kkt_set: KKTSet) -> tuple[KKTSet, Tensor]:
    used_indices = (kkt_set.lam > 0).nonzero()[:, 0]
    if not len(used_indices):
        raise InconclusiveError(
            f"At least one sample must contribute to the weights (have a positive multiplier); none of "
            f"the {len(kkt_set)} samples does.",
            "Check that the samples are the network's training data.",
        )
    return kkt_set.used(), used_indices
