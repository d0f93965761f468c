"""Consensus over all runs of a sweep, however many: groups are kept, candidates pass by.

Runs are looked at one after the other, those of the best trials first. A candidate joins the nearest
group of its label when it lies within ``SIMILARITY`` (cosine) of that group's mean; what joins none
is grouped among itself (``attacks/selection.py``) and founds new groups. Weights count relative to the
heaviest candidate of their run, since settings scale them differently. Whenever there are a quarter
more than ``limit`` groups, the lightest of those that the fewest runs hold go: memory does not grow
with the runs.

    mean       = sum_i w_i x_i / sum_i w_i
    tightness  = sum_i w_i cos(mean, x_i) / sum_i w_i = <mean / |mean|, sum_i w_i x_i / |x_i|> / sum_i w_i
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from residuum.attacks import selection as grouping
from residuum.attacks.base import Attack
from residuum.attacks.registry import ATTACKS
from residuum.attacks.selection import (
    SIMILARITY,
    compute_features,
    estimate_confidence,
    find_usable_candidates,
    group_candidates,
)
from residuum.attacks.unmixing.attack import Unmix, confidence_by_share
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.similarity import cosine, l2

LIMIT = 4096  # groups at a time: 300 MB of photographs of 3 x 32 x 32, whatever the runs
KEPT = 2000  # groups in the pooled result


class Pool:
    """Groups of the candidates so far. limit: how many groups it holds."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.runs, self.candidates, self.dropped = 0, 0, 0
        self.radius: float | None = None
        self.shape: tuple[int, ...] = ()
        self.label_type = torch.float64
        self._groups: dict[str, Tensor] = {}

    def add(self, trial: Reconstruction) -> None:
        """Add all runs of one trial that did not diverge."""
        finite = find_usable_candidates(trial)
        for run, status in enumerate(trial.status):
            mask = finite & (trial.run == run)
            if status != "diverged" and bool(mask.any()):
                weight = trial.weight[mask].double()
                x, labels = trial.x[mask].flatten(1).double(), trial.labels[mask].double()
                self._add_run(x, labels, weight / weight.max())
        self.shape, self.label_type = tuple(trial.x.shape[1:]), trial.labels.dtype

    def _add_run(self, x: Tensor, labels: Tensor, weight: Tensor) -> None:
        """Add the candidates (k, d) of one run, finite and not zero."""
        if self.radius is None and x.shape[1] < grouping.FEW_VALUES:
            self.radius = grouping.DUPLICATE * float(x.norm(dim=1).median())
        group = self._nearest(x, labels)
        alone = (group < 0).nonzero().flatten()
        count = len(self)
        for label in labels[alone].unique():
            rows = alone[labels[alone] == label]
            new = group_candidates(x[rows], weight[rows], SIMILARITY, self.radius)
            sizes = torch.tensor([len(members) for members in new])
            group[rows[torch.cat(new)]] = count + torch.arange(len(new)).repeat_interleave(sizes)
            count += len(new)
        self._merge(x, labels, weight, group, count)
        self.runs, self.candidates = self.runs + 1, self.candidates + len(x)
        if len(self) > 1.25 * self.limit:  # not at every run: it sorts all groups
            best = self.order()[: self.limit].sort().values
            self.dropped += len(self) - len(best)
            self._groups = {name: values[best] for name, values in self._groups.items()}

    def __len__(self) -> int:
        return len(self._groups["sum"]) if self._groups else 0

    def _nearest(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return (k,) the group that each candidate joins, -1 for none."""
        if not len(self):
            return torch.full((len(x),), -1)
        groups = self._groups
        if self.radius is None:  # a mean has the direction of its sum
            near = cosine(x, groups["sum"])
        else:
            near = -l2(x, groups["sum"] / groups["weight"][:, None])
        best, at = near.masked_fill_(labels[:, None] != groups["label"], -math.inf).max(1)
        least = SIMILARITY if self.radius is None else -self.radius
        return at.masked_fill(best < least, -1)

    def _merge(self, x: Tensor, labels: Tensor, weight: Tensor, at: Tensor, count: int) -> None:
        """Put candidates into the groups ``at``; there are ``count`` groups with the new ones.

        A group is sums alone (of weights, of weighted candidates, of their directions) and its heaviest
        member, so that memory does not grow with the number of runs.
        """
        if not self._groups:
            names = ("weight", "heaviest", "label", "support", "members", "run")
            self._groups = {name: x.new_zeros(0) for name in names}
            self._groups |= dict.fromkeys(("sum", "unit", "x"), x[:0])
        new = count - len(self)
        self._groups = groups = {
            name: torch.cat([values, values.new_zeros(new, *values.shape[1:])])
            for name, values in self._groups.items()
        }
        groups["sum"].index_add_(0, at, weight[:, None] * x)
        groups["unit"].index_add_(0, at, weight[:, None] * x / x.norm(dim=1, keepdim=True))
        groups["weight"].index_add_(0, at, weight)
        groups["members"].index_add_(0, at, torch.ones_like(weight))
        groups["support"][at.unique()] += 1
        heaviest = groups["heaviest"].scatter_reduce(0, at, weight, "amax")
        mine = ((weight == heaviest[at]) & (weight > groups["heaviest"][at])).nonzero().flatten()
        groups["heaviest"].copy_(heaviest)
        groups["x"][at[mine]], groups["label"][at[mine]] = x[mine], labels[mine]
        groups["run"][at[mine]] = float(self.runs)

    def order(self) -> Tensor:
        """Groups, most supported first, heaviest first among equals."""
        support, weight = self._groups["support"], self._groups["weight"]
        by_weight = weight.argsort(descending=True, stable=True)
        return by_weight[support[by_weight].argsort(descending=True, stable=True)]

    def selection(self) -> tuple[Selection, dict[str, Tensor]]:
        """The best groups that several runs hold, or all where none agree; and their parts."""
        order = self.order()
        agreed = order[self._groups["support"][order] > 1]
        order = (agreed if len(agreed) else order)[:KEPT]
        part = {name: values[order] for name, values in self._groups.items()}
        part["label"] = part["label"].to(self.label_type)
        mean = part["sum"] / part["weight"][:, None]
        inner = (mean * part["unit"]).sum(1) / mean.norm(dim=1).clamp(min=1e-300)
        rows = [
            {"support": int(s), "lam": float(w / s), "tightness": float(t)}
            for s, w, t in zip(part["support"], part["weight"], inner / part["weight"], strict=True)
        ]
        heaviest = max((row["lam"] for row in rows), default=0.0)
        spread = math.log(grouping.effective_dimension(mean))
        features = [compute_features(row, self.runs, heaviest, spread) for row in rows]
        chosen = Selection(
            x=mean.reshape(-1, *self.shape),
            labels=part["label"],
            lam=torch.tensor([row["lam"] for row in rows]),
            support=part["support"].long(),
            members=part["members"].long(),
            index=torch.arange(len(rows)),
            confidence=torch.tensor([estimate_confidence(row, self.runs) for row in features]),
            features=torch.tensor(features).reshape(-1, len(grouping.FEATURES)),
        )
        return chosen, part


def pooled(
    parts: Iterable[Reconstruction],
    knowledge: Knowledge,
    settings: dict[str, Any],
) -> tuple[Reconstruction | None, Pool]:
    """Consensus of finished trials, best first, as a reconstruction that ``score`` reads.

    Its candidates are the heaviest member of each group, its selection their means.
    """
    pool, attack, surest = Pool(), "", torch.tensor(0.0)
    for found in parts:
        attack = found.attack
        if found.selection is not None and len(found.selection):
            # NaN, a withheld confidence, is kept: a trial found that agreement says nothing here.
            surest = torch.maximum(surest, found.selection.confidence.max().to(surest))
        pool.add(found)
    if not len(pool):
        return None, pool
    chosen, part = pool.selection()
    runs = pool.runs
    if issubclass(ATTACKS.get(attack, Attack), Unmix):
        values = math.prod(pool.shape)
        sure = confidence_by_share(chosen.support / runs, runs, values)
        sure = torch.minimum(sure, surest.to(sure))
        chosen = dataclasses.replace(chosen, confidence=sure)
    notes: tuple[str, ...] = (f"pooled from {pool.candidates} candidates of {runs} runs",)
    if pool.dropped:
        notes += (f"{pool.dropped} groups that few runs held were dropped to bound memory",)
    return Reconstruction(
        attack=attack,
        x=part["x"].reshape(-1, *pool.shape),
        labels=part["label"],
        lam=part["heaviest"],
        run=part["run"].long(),
        steps=torch.zeros(0, dtype=torch.long),
        loss=torch.zeros(runs, 0),
        layers=torch.zeros(runs, 0, 0),
        layer_names=(),
        status=("finished",) * runs,
        knowledge=knowledge,
        settings=settings,
        selection=chosen,
        notes=notes,
    ), pool
