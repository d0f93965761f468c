"""Alternative training sets: other samples that explain the same weights as well as the true ones.

    far       every sample split at least r away (Refael et al. 2025, Theorem 4): along a direction
              the first layer does not see, or, where there is none, inside its own exact budget
    budget    every sample split by a share of its exact budget, on its margin
    merge     samples of one label and one activation pattern replaced by their weighted mean

A sample that cannot be moved (it sits on kinks, or its budget is too small) stays as it is and is
reported with the neurons in its way.
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

LEAST = 1e-9  # of a sample's size: a smaller budget is none


@dataclass(frozen=True)
class Blocked:
    """A sample that stays, and what is in its way: how many neurons, the first of them by name."""

    sample: int
    budget: float
    neurons: int
    names: str


@dataclass(frozen=True, eq=False)
class Alternative:
    """before: the samples in use; after: the alternative; parents[j]: rows of before behind row j.

    index: row of the given set behind each row of before.
    budgets: (k,) exact symmetric budgets of the samples in use (infinite ones included), empty for
        a merge.
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
        """How many of the samples in use were moved or merged."""
        merged = sum(len(p) for p in self.parents if len(p) > 1)
        return merged if self.kind == "merge" else len(self.before) - len(self.blocked)


def far_alternative(
    given: KKTSet, r: float, direction: str = "softest", watch: Watcher | None = None
) -> Alternative:
    """A set at distance r where the weights allow it; samples whose budget is too small stay.

    Where the first layer leaves a direction of input space unseen, every sample moves along it as far
    as one likes. Otherwise each is split along its own direction, by r and by what other samples have
    of that direction, so that a half is far from all of them and not only from its own sample.
    """
    used, index = _used(given)
    everything = torch.full((len(used),), torch.inf, dtype=torch.float64)
    try:
        after = given.far_set(r)
        pairs = tuple((i,) for i in range(len(used)) for _ in range(2))
        return Alternative("far", used, after, pairs, index, everything)
    except HypothesisError as problem:
        if problem.hypothesis != "subspace":
            raise
    nu = used.directions(direction, watch=watch)
    found = used.budgets(nu)
    along = given.x.flatten(1) @ nu.T  # (n, k): what others have of each sample's direction
    lengths = r * (1 + 1e-12) + along.amax(0) - along.amin(0)
    return _split("far", used, index, nu, found, lengths, found.least > lengths)


def budget_alternative(
    given: KKTSet, share: float, direction: str = "softest", watch: Watcher | None = None
) -> Alternative:
    """Every sample split by ``share`` of its budget; of an unlimited one, of the largest sample."""
    if not 0 < share < 1:
        raise InputError(
            f"The share of a budget lies between 0 and 1; got {share}.", "Use --budget-frac 0.9."
        )
    used, index = _used(given)
    nu = used.directions(direction, watch=watch)
    found = used.budgets(nu)
    size = used.x.flatten(1).norm(dim=1)
    lengths = share * found.least.clamp(max=float(size.max()))
    return _split("budget", used, index, nu, found, lengths, found.least > LEAST * (1 + size))


def merge_alternative(given: KKTSet) -> Alternative:
    """Samples of one label, multipliers and pattern replaced by one."""
    used, index = _used(given)
    merged, groups = used.merge_all()
    if len(merged) == len(used):
        raise InconclusiveError(
            f"No two of the {len(used)} samples in use share label and activation pattern.",
            "Nothing can be merged; try --budget-frac 0.9.",
        )
    after = dataclasses.replace(merged, parent=given)
    no_budgets = torch.zeros(0, dtype=torch.float64)
    return Alternative("merge", used, after, tuple(map(tuple, groups)), index, no_budgets)


def _split(
    kind: str,
    used: KKTSet,
    index: Tensor,
    nu: Tensor,
    found: Budgets,
    lengths: Tensor,
    free: Tensor,
) -> Alternative:
    """Split the samples that may move so far; those in whose way a switch stands stay, and are named."""
    blocked = tuple(_blocked(found, i, int(index[i])) for i in (~free).nonzero()[:, 0].tolist())
    if not free.any():
        raise InconclusiveError(
            f"None of the {len(used)} samples in use can be moved that far inside its activation "
            f"pattern; the largest budget is {float(found.least.max()):.4g}.",
            "Try --budget-frac 0.9, or --direction largest.",
        )
    some = free.nonzero()[:, 0]
    after = used.split_all(nu[some], lengths[some], samples=some)
    parents = tuple((i,) for i, split in enumerate(free.tolist()) for _ in range(1 + split))
    return Alternative(kind, used, after, parents, index, found.least, blocked)


def _blocked(found: Budgets, i: int, sample: int) -> Blocked:
    kinks = int(found.kinks[i].sum())
    neurons = kinks or int(found.blocking[i].sum())
    return Blocked(sample, float(found.least[i]), neurons, found.names(i))


def _used(given: KKTSet) -> tuple[KKTSet, Tensor]:
    index = (given.lam > 0).nonzero()[:, 0]
    if not len(index):
        raise InconclusiveError(
            "No sample has a positive multiplier: these samples explain nothing of the weights.",
            "Check that they are the network's training data.",
        )
    return given.used(), index
