"""Which candidates of an attack are scored: all of them, or the attack's own choice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from residuum.records.reconstruction import Reconstruction


class CandidatePool(NamedTuple):
    """Candidates (m, *shape) with their labels (m,) and total multipliers (m,)."""

    x: Tensor
    labels: Tensor
    lam: Tensor


def whole_pool(found: Reconstruction) -> CandidatePool:
    """Every candidate, as the published counts pool them, and the means of groups of them."""
    x, labels, lam = found.x, found.labels, found.weight
    if found.selection is not None:
        mean = found.selection.members > 1
        x = torch.cat([x, found.selection.x[mean].to(x)])
        labels = torch.cat([labels, found.selection.labels[mean].to(labels)])
        lam = torch.cat([lam, found.selection.lam[mean].to(lam)])
    return CandidatePool(x, labels, lam)


def selected_pool(found: Reconstruction) -> CandidatePool:
    """The attack's own choice: what several restarts hold; all it ranked where none agree."""
    chosen = found.selection
    if chosen is None:
        return CandidatePool(found.x[:0], found.labels[:0], found.weight[:0])
    agreed = chosen.support > 1
    keep = agreed if bool(agreed.any()) else agreed | True
    return CandidatePool(chosen.x[keep], chosen.labels[keep], chosen.lam[keep])


def joined(pools: list[CandidatePool]) -> CandidatePool:
    """The candidates of several attacks as one pool, so that one test judges them together."""
    x, labels, lam = (
        torch.cat([part.double() for part in parts]) for parts in zip(*pools, strict=True)
    )
    return CandidatePool(x, labels, lam)
