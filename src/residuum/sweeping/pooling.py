"""Pooling: the consensus of all runs of a sweep, in memory that does not grow with the number of runs.

Runs are processed one after the other, those of the best trials first. Only groups are stored. A candidate
joins the nearest group of its label if the cosine with the mean of the group is at least ``SIMILARITY``.
Candidates that join no group are grouped among themselves (``attacks/selection.py``) and form new groups.
Weights are relative to the heaviest candidate of their run, because settings scale them differently. If
there are 25% more groups than ``limit``, the groups with the fewest runs are dropped, the lightest first.

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

LIMIT = 4096  # groups in memory. They take 300 MB for photographs of 3 x 32 x 32
MAX_GROUPS = 2000  # groups in the pooled result


class Pool:
    """Groups of the candidates of all runs that were added.

    Attributes:
        limit: Maximal number of groups in memory.
        runs: Number of runs.
        candidates: Number of candidates of these runs.
        dropped: Number of groups that were dropped to bound memory.
    """

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
        """Add the candidates (k, d) of a run. They must be finite and not zero."""
        if self.radius is None and x.shape[1] < grouping.FEW_VALUES:
            self.radius = grouping.DUPLICATE * float(x.norm(dim=1).median())
        group = self._find_nearest(x, labels)
        unmatched = (group < 0).nonzero().flatten()
        count = len(self)
        for label in labels[unmatched].unique():
            rows = unmatched[labels[unmatched] == label]
            new = group_candidates(x[rows], weight[rows], SIMILARITY, self.radius)
            sizes = torch.tensor([len(members) for members in new])
            group[rows[torch.cat(new)]] = count + torch.arange(len(new)).repeat_interleave(sizes)
            count += len(new)
        self._merge(x, labels, weight, group, count)
        self.runs, self.candidates = self.runs + 1, self.candidates + len(x)
        if len(self) > 1.25 * self.limit:  # with slack, because dropping sorts all groups
            best = self.order()[: self.limit].sort().values
            self.dropped += len(self) - len(best)
            self._groups = {name: values[best] for name, values in self._groups.items()}

    def __len__(self) -> int:
        return len(self._groups["sum"]) if self._groups else 0

    def _find_nearest(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return (k,) the group that each candidate joins, -1 if it joins none."""
        if not len(self):
            return torch.full((len(x),), -1)
        groups = self._groups
        if self.radius is None:  # the mean of a group has the direction of its sum
            closeness = cosine(x, groups["sum"])
        else:
            closeness = -l2(x, groups["sum"] / groups["weight"][:, None])
        best, nearest = closeness.masked_fill_(labels[:, None] != groups["label"], -math.inf).max(1)
        threshold = SIMILARITY if self.radius is None else -self.radius
        return nearest.masked_fill(best < threshold, -1)

    def _merge(self, x: Tensor, labels: Tensor, weight: Tensor, group: Tensor, count: int) -> None:
        """Add candidates to their groups. ``count`` is the number of groups with the new ones.

        A group is stored as sums (of weights, of weighted candidates, of their directions) and its
        heaviest member, so that memory does not grow with the number of runs.
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
        groups["sum"].index_add_(0, group, weight[:, None] * x)
        groups["unit"].index_add_(0, group, weight[:, None] * x / x.norm(dim=1, keepdim=True))
        groups["weight"].index_add_(0, group, weight)
        groups["members"].index_add_(0, group, torch.ones_like(weight))
        groups["support"][group.unique()] += 1
        heaviest = groups["heaviest"].scatter_reduce(0, group, weight, "amax")
        is_heaviest = (weight == heaviest[group]) & (weight > groups["heaviest"][group])
        new_heaviest = is_heaviest.nonzero().flatten()
        groups["heaviest"].copy_(heaviest)
        rows = group[new_heaviest]
        groups["x"][rows], groups["label"][rows] = x[new_heaviest], labels[new_heaviest]
        groups["run"][rows] = float(self.runs)

    def order(self) -> Tensor:
        """Return the groups by support, most first, then by weight, heaviest first."""
        support, weight = self._groups["support"], self._groups["weight"]
        by_weight = weight.argsort(descending=True, stable=True)
        return by_weight[support[by_weight].argsort(descending=True, stable=True)]

    def selection(self) -> tuple[Selection, dict[str, Tensor]]:
        """Return the best groups that several runs found, or the best of all if there are none.

        Returns:
            The selection of their means, and the stored sums of these groups by name.
        """
        order = self.order()
        consensus = order[self._groups["support"][order] > 1]
        order = (consensus if len(consensus) else order)[:MAX_GROUPS]
        best = {name: values[order] for name, values in self._groups.items()}
        best["label"] = best["label"].to(self.label_type)
        mean = best["sum"] / best["weight"][:, None]
        inner = (mean * best["unit"]).sum(1) / mean.norm(dim=1).clamp(min=1e-300)
        rows = [
            {"support": int(s), "lam": float(w / s), "tightness": float(t)}
            for s, w, t in zip(best["support"], best["weight"], inner / best["weight"], strict=True)
        ]
        heaviest = max((row["lam"] for row in rows), default=0.0)
        spread = math.log(grouping.effective_dimension(mean))
        features = [compute_features(row, self.runs, heaviest, spread) for row in rows]
        selection = Selection(
            x=mean.reshape(-1, *self.shape),
            labels=best["label"],
            lam=torch.tensor([row["lam"] for row in rows]),
            support=best["support"].long(),
            members=best["members"].long(),
            index=torch.arange(len(rows)),
            confidence=torch.tensor([estimate_confidence(row, self.runs) for row in features]),
            features=torch.tensor(features).reshape(-1, len(grouping.FEATURES)),
        )
        return selection, best


def pool_trials(
    reconstructions: Iterable[Reconstruction],
    knowledge: Knowledge,
    settings: dict[str, Any],
) -> tuple[Reconstruction | None, Pool]:
    """Pool finished trials into their consensus, as a reconstruction that ``score`` reads.

    The candidates of the result are the heaviest member of each group. Its selection are the means.

    Args:
        reconstructions: Results of the trials, best first.
        knowledge: What the attacker knows.
        settings: Settings that are stored with the result.

    Returns:
        The pooled reconstruction, None if there is no candidate, and the pool.
    """
    pool, attack, max_confidence = Pool(), "", torch.tensor(0.0)
    for reconstruction in reconstructions:
        attack, selection = reconstruction.attack, reconstruction.selection
        if selection is not None and len(selection):
            # The maximum is NaN if a trial gives no confidence, because agreement means nothing there.
            max_confidence = torch.maximum(
                max_confidence, selection.confidence.max().to(max_confidence)
            )
        pool.add(reconstruction)
    if not len(pool):
        return None, pool
    pooled, groups = pool.selection()
    runs = pool.runs
    if issubclass(ATTACKS.get(attack, Attack), Unmix):
        values = math.prod(pool.shape)
        confidence = confidence_by_share(pooled.support / runs, runs, values)
        confidence = torch.minimum(confidence, max_confidence.to(confidence))
        pooled = dataclasses.replace(pooled, confidence=confidence)
    notes: tuple[str, ...] = (f"pooled from {pool.candidates} candidates of {runs} runs",)
    if pool.dropped:
        notes += (f"{pool.dropped} groups that few runs found were dropped to bound memory",)
    return Reconstruction(
        attack=attack,
        x=groups["x"].reshape(-1, *pool.shape),
        labels=groups["label"],
        lam=groups["heaviest"],
        run=groups["run"].long(),
        steps=torch.zeros(0, dtype=torch.long),
        loss=torch.zeros(runs, 0),
        layers=torch.zeros(runs, 0, 0),
        layer_names=(),
        status=("finished",) * runs,
        knowledge=knowledge,
        settings=settings,
        selection=pooled,
        notes=notes,
    ), pool
