"""Candidates of runs that grow apart: who lives in which slot, and how they came about.

Runs side by side share tensors (R, m, ...) and may hold different numbers of candidates. A slot is
alive or empty; an empty one holds zeros, its multiplier is zero and never moves, so it adds nothing
to the equation. Every candidate has a number of its own, never used again in its run: those of the
start are 0..m-1, and a split gives two new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.records import Record

OWN = ("labels", "active", "ident", "best_labels", "best_active", "best_ident")


@dataclass(frozen=True, eq=False)
class Population(Record):
    """labels, active, ident: (R, m), and the same of the best point of every run.

    born: numbers used up in each run; last: step of each run's latest round; events: what happened,
    see ``grower.py``; stopped: why a run grows no more, "" while it may.
    """

    labels: Tensor
    active: Tensor
    ident: Tensor
    best_labels: Tensor
    best_active: Tensor
    best_ident: Tensor
    born: tuple[int, ...]
    last: tuple[int, ...]
    stopped: tuple[str, ...]
    events: tuple[dict[str, Any], ...] = ()

    @classmethod
    def start(cls, runs: int, labels: Tensor) -> Population:
        """Every run with the same candidates, all alive; labels: (m,)."""
        m = len(labels)
        own = labels.expand(runs, m).clone()
        active = torch.ones(runs, m, dtype=torch.bool, device=labels.device)
        ident = torch.arange(m, device=labels.device).expand(runs, m).clone()
        return cls(own, active, ident, own, active, ident, (m,) * runs, (0,) * runs, ("",) * runs)

    def to(self, device: str) -> Population:
        """The same on another device."""
        return self.replace(**{name: getattr(self, name).to(device) for name in OWN})

    def keep_best(self, better: Tensor) -> Population:
        """Runs (R,) that reached a better point remember who was alive there."""
        mask = better[:, None]
        return self.replace(
            **{
                f"best_{name}": torch.where(
                    mask, getattr(self, name), getattr(self, f"best_{name}")
                )
                for name in ("labels", "active", "ident")
            }
        )

    def index(self, run: int) -> Tensor:
        """Slots that are alive in one run."""
        return self.active[run].nonzero()[:, 0]
