"""Pooling: the consensus of all runs of a sweep, in memory that does not grow with the number of runs.

Runs are processed one after the other, those of the best trials first. Only groups of similar candidates are
stored. A candidate joins the nearest group of its label if the cosine with the mean of the group is at least
``SIMILARITY``. Candidates that join no group are grouped among themselves (``attacks/selection.py``) and form
new groups. If samples have only a few values, the distance is used instead of the cosine. The weight w_i of a
candidate x_i is relative to the largest weight in its run, because settings scale weights differently. If
there are 25% more groups than ``limit``, the groups that the fewest runs found are dropped. Among groups with
equally many runs, those with the smallest weight are dropped first.

A group of candidates x_i with the weights w_i has these statistics:

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

# Maximal number of groups of similar candidates in memory: 300 MB for images of 3 x 32 x 32 values.
LIMIT = 4096
# Maximal number of groups of similar candidates in the combined result of all trials.
MAX_GROUPS = 2000


class Pool:
    """Groups of similar candidates (guesses of samples) from all runs that were added.

    Attributes:
        limit: Maximal number of groups in memory.
        runs: Number of runs that were added.
        candidates: Number of candidates of these runs.
        dropped: Number of groups that were dropped to limit memory.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.runs, self.candidates, self.dropped = 0, 0, 0
        self.radius: float | None = None
        self.shape: tuple[int, ...] = ()
        self.label_type = torch.float64
        self._groups: dict[str, Tensor] = {}

    def add(self, trial: Reconstruction) -> None:
        """Add the candidates (guesses of samples) of a trial, except those of runs that diverged."""
        is_usable = find_usable_candidates(trial)
        for run, status in enumerate(trial.status):
            is_in_run = is_usable & (trial.run == run)
            if status != "diverged" and bool(is_in_run.any()):
                weight = trial.weight[is_in_run].double()
                x, labels = trial.x[is_in_run].flatten(1).double(), trial.labels[is_in_run].double()
                self._add_run(x, labels, weight / weight.max())
        self.shape, self.label_type = tuple(trial.x.shape[1:]), trial.labels.dtype

    def _add_run(self, x: Tensor, labels: Tensor, weight: Tensor) -> None:
        """Add the (k, d) candidates ``x`` of a run, which must be finite and not zero."""
        if self.radius is None and x.shape[1] < grouping.FEW_VALUES:
            self.radius = grouping.DUPLICATE * float(x.norm(dim=1).median())
        group_index = self._find_nearest(x, labels)
        ungrouped = (group_index < 0).nonzero().flatten()
        group_count = len(self)
        for label in labels[ungrouped].unique():
            ungrouped_of_label = ungrouped[labels[ungrouped] == label]
            new_groups = group_candidates(
                x[ungrouped_of_label], weight[ungrouped_of_label], SIMILARITY, self.radius
            )
            group_sizes = torch.tensor([len(members) for members in new_groups])
            group_index[ungrouped_of_label[torch.cat(new_groups)]] = group_count + torch.arange(
                len(new_groups)
            ).repeat_interleave(group_sizes)
            group_count += len(new_groups)
        self._merge(x, labels, weight, group_index, group_count)
        self.runs, self.candidates = self.runs + 1, self.candidates + len(x)
        # The weakest groups are removed only if there are 25% more groups than the limit, because sorting
        # is slow.
        if len(self) > 1.25 * self.limit:
            best_group_indices = self.order()[: self.limit].sort().values
            self.dropped += len(self) - len(best_group_indices)
            self._groups = {
                name: values[best_group_indices] for name, values in self._groups.items()
            }

    def __len__(self) -> int:
        return len(self._groups["sum"]) if self._groups else 0

    def _find_nearest(self, x: Tensor, labels: Tensor) -> Tensor:
        """Find the group of similar samples that each of k reconstructed samples joins, -1 for none."""
        if not len(self):
            return torch.full((len(x),), -1)
        stored_groups = self._groups
        if (
            self.radius is None
        ):  # compare directions: the sum of a group has the direction of its mean
            closeness = cosine(x, stored_groups["sum"])
        else:
            closeness = -l2(x, stored_groups["sum"] / stored_groups["weight"][:, None])
        best_closeness, nearest = closeness.masked_fill_(
            labels[:, None] != stored_groups["label"], -math.inf
        ).max(1)
        threshold = SIMILARITY if self.radius is None else -self.radius
        return nearest.masked_fill(best_closeness < threshold, -1)

    def _merge(
        self, x: Tensor, labels: Tensor, weight: Tensor, group_index: Tensor, count: int
    ) -> None:
        """Add candidates to their groups of similar candidates.

        For each group, only three sums over its candidates and one candidate are stored, so memory does not
        grow with the number of runs. The stored candidate has the largest weight. With weights w_i and
        candidates x_i, the sums are sum_i w_i, sum_i w_i x_i and sum_i w_i x_i / |x_i|.

        Args:
            x: (k, d) candidates.
            labels: (k,) labels of the candidates.
            weight: (k,) weights of the candidates.
            group_index: (k,) index of the group of each candidate.
            count: Number of groups after the candidates are added.
        """
        if not self._groups:
            scalar_fields = ("weight", "heaviest", "label", "support", "members", "run")
            self._groups = {name: x.new_zeros(0) for name in scalar_fields}
            self._groups |= dict.fromkeys(("sum", "unit", "x"), x[:0])
        new_group_count = count - len(self)
        self._groups = groups = {
            name: torch.cat([values, values.new_zeros(new_group_count, *values.shape[1:])])
            for name, values in self._groups.items()
        }
        groups["sum"].index_add_(0, group_index, weight[:, None] * x)
        groups["unit"].index_add_(0, group_index, weight[:, None] * x / x.norm(dim=1, keepdim=True))
        groups["weight"].index_add_(0, group_index, weight)
        groups["members"].index_add_(0, group_index, torch.ones_like(weight))
        groups["support"][group_index.unique()] += 1
        largest_weights = groups["heaviest"].scatter_reduce(0, group_index, weight, "amax")
        has_largest_weight = (weight == largest_weights[group_index]) & (
            weight > groups["heaviest"][group_index]
        )
        best_candidate_indices = has_largest_weight.nonzero().flatten()
        groups["heaviest"].copy_(largest_weights)
        changed_group_indices = group_index[best_candidate_indices]
        groups["x"][changed_group_indices], groups["label"][changed_group_indices] = (
            x[best_candidate_indices],
            labels[best_candidate_indices],
        )
        groups["run"][changed_group_indices] = float(self.runs)

    def order(self) -> Tensor:
        """Sort groups of similar samples by the number of runs that reconstructed them, then by weight."""
        support, weight = self._groups["support"], self._groups["weight"]
        order_by_weight = weight.argsort(descending=True, stable=True)
        return order_by_weight[support[order_by_weight].argsort(descending=True, stable=True)]

    def selection(self) -> tuple[Selection, dict[str, Tensor]]:
        """Return the groups that several runs found. If there are no such groups, return the best groups.

        Returns:
            The mean candidate of each group as a selection, and what is stored about the groups by name.
        """
        group_order = self.order()
        consensus_order = group_order[self._groups["support"][group_order] > 1]
        group_order = (consensus_order if len(consensus_order) else group_order)[:MAX_GROUPS]
        best_groups = {name: values[group_order] for name, values in self._groups.items()}
        best_groups["label"] = best_groups["label"].to(self.label_type)
        group_means = best_groups["sum"] / best_groups["weight"][:, None]
        weighted_cosine = (group_means * best_groups["unit"]).sum(1) / group_means.norm(
            dim=1
        ).clamp(min=1e-300)
        group_rows = [
            {"support": int(s), "lam": float(w / s), "tightness": float(t)}
            for s, w, t in zip(
                best_groups["support"],
                best_groups["weight"],
                weighted_cosine / best_groups["weight"],
                strict=True,
            )
        ]
        largest_weight = max((row["lam"] for row in group_rows), default=0.0)
        log_dimension = math.log(grouping.effective_dimension(group_means))
        features = [
            compute_features(row, self.runs, largest_weight, log_dimension) for row in group_rows
        ]
        selection = Selection(
            x=group_means.reshape(-1, *self.shape),
            labels=best_groups["label"],
            lam=torch.tensor([row["lam"] for row in group_rows]),
            support=best_groups["support"].long(),
            members=best_groups["members"].long(),
            index=torch.arange(len(group_rows)),
            confidence=torch.tensor([estimate_confidence(row, self.runs) for row in features]),
            features=torch.tensor(features).reshape(-1, len(grouping.FEATURES)),
        )
        return selection, best_groups


def pool_trials(
    reconstructions: Iterable[Reconstruction],
    knowledge: Knowledge,
    settings: dict[str, Any],
) -> tuple[Reconstruction | None, Pool]:
    """Combine the candidates of all finished trials of a sweep into one reconstruction.

    The candidates of all trials form groups of similar candidates. The pooled reconstruction has one
    candidate per group: the candidate with the largest weight. The field ``selection`` of the pooled
    reconstruction has the mean of each group.

    Args:
        reconstructions: Results of the trials, the best trial first.
        knowledge: What the attacker knows.
        settings: Settings that are stored with the pooled reconstruction.

    Returns:
        The pooled reconstruction (None if no trial has a candidate), and the groups of all candidates.
    """
    pool, attack, best_confidence = Pool(), "", torch.tensor(0.0)
    for reconstruction in reconstructions:
        attack, selection = reconstruction.attack, reconstruction.selection
        if selection is not None and len(selection):
            # If a trial gave no confidence (NaN), the maximum and the combined confidence are NaN as well.
            best_confidence = torch.maximum(
                best_confidence, selection.confidence.max().to(best_confidence)
            )
        pool.add(reconstruction)
    if not len(pool):
        return None, pool
    pooled, groups = pool.selection()
    run_count = pool.runs
    if issubclass(ATTACKS.get(attack, Attack), Unmix):
        value_count = math.prod(pool.shape)
        confidence = confidence_by_share(pooled.support / run_count, run_count, value_count)
        confidence = torch.minimum(confidence, best_confidence.to(confidence))
        pooled = dataclasses.replace(pooled, confidence=confidence)
    notes: tuple[str, ...] = (f"pooled from {pool.candidates} candidates of {run_count} runs",)
    if pool.dropped:
        notes += (f"{pool.dropped} groups that few runs found were dropped to limit memory",)
    return Reconstruction(
        attack=attack,
        x=groups["x"].reshape(-1, *pool.shape),
        labels=groups["label"],
        lam=groups["heaviest"],
        run=groups["run"].long(),
        steps=torch.zeros(0, dtype=torch.long),
        loss=torch.zeros(run_count, 0),
        layers=torch.zeros(run_count, 0, 0),
        layer_names=(),
        status=("finished",) * run_count,
        knowledge=knowledge,
        settings=settings,
        selection=pooled,
        notes=notes,
    ), pool
