"""Who is matched with whom: candidates to samples, given their similarity matrix.

Matrices are (m, n): candidates in rows, samples in columns. Each matching returns, for every
sample, a candidate and its value; a sample that gets none has candidate -1 and the worst value
there is (-inf, or +inf where lower is better), so that thresholds need no special case. An entry
with that value marks a pair that may not be matched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from residuum.errors import InputError, did_you_mean

Array: TypeAlias = np.ndarray[Any, Any]
STATE = 1 << 24  # candidates held in memory over all subsets that are matched at once


@dataclass(frozen=True)
class Matching:
    """candidate: (n,) index of each sample's candidate, -1 for none; value: (n,) of that pair."""

    candidate: Array
    value: Array


def nearest(similarity: Tensor | Array, higher_is_better: bool = True) -> Matching:
    """Each sample's best candidate; one candidate may serve several samples (as published)."""
    gain = _gain(similarity, higher_is_better)
    return _matching(gain, gain.argmax(0), higher_is_better)


def greedy(similarity: Tensor | Array, higher_is_better: bool = True) -> Matching:
    """One-to-one: the best pair of all is matched, then the best of what is left, and so on."""
    gain = _gain(similarity, higher_is_better)
    samples = np.arange(gain.shape[1])
    return _matching(gain, greedy_in_sets(gain, samples[None])[0], higher_is_better)


def optimal(similarity: Tensor | Array, higher_is_better: bool = True) -> Matching:
    """One-to-one with the best total value (the linear assignment problem)."""
    gain = _gain(similarity, higher_is_better)
    finite = gain[np.isfinite(gain)]
    spread = np.ptp(finite) + 1.0 if finite.size else 1.0
    # A forbidden pair costs more than all allowed ones could gain, so as few as can be are taken.
    forbidden = (finite.min() if finite.size else 0.0) - spread * min(gain.shape)
    rows, columns = linear_sum_assignment(np.where(np.isneginf(gain), forbidden, gain), True)
    candidate = np.full(gain.shape[1], -1)
    candidate[columns] = rows
    return _matching(gain, candidate, higher_is_better)


def greedy_in_sets(gain: Array, sets: Array) -> Array:
    """The greedy matching within each of many sets of samples. (s, n).

    gain: (m, N), higher is better; sets: (s, n) distinct columns per row. Greedy matching is the
    stable matching of a market whose two sides rank pairs by the same number, so deferred
    acceptance finds it: every free sample proposes to the best candidate that has not refused it,
    every candidate keeps its best proposal. All samples of all sets propose at once.
    """
    depth = min(len(gain), sets.shape[1])  # at most n - 1 candidates can be held by others
    order, value = _preferences(gain, depth)
    step = max(1, STATE // len(gain))
    parts = [
        _defer(order, value, sets[start : start + step], len(gain))
        for start in range(0, len(sets), step)
    ]
    return np.concatenate(parts)


def vote(ncc: Tensor, candidates: Tensor, rule: str = "released") -> Tensor:
    """Each sample's mean over the candidates that ``rule`` (a key of ``VOTES``) admits. (n, *shape).

    ncc: (m, n) normalised cross-correlations. The best candidate is always admitted.
    """
    if rule not in VOTES:
        raise InputError(f"There is no voting rule {rule!r}.", did_you_mean(rule, list(VOTES)))
    best = ncc.amax(0)
    admitted = (VOTES[rule](ncc, best) | (ncc == best)).to(candidates.dtype)  # (m, n)
    means = (admitted / admitted.sum(0)).T @ candidates.flatten(1)
    return means.reshape(-1, *candidates.shape[1:])


def as_array(values: Tensor | Array) -> Array:
    """``values`` as a numpy array in main memory."""
    return values.numpy(force=True) if isinstance(values, Tensor) else np.asarray(values)


def _preferences(gain: Array, depth: int) -> tuple[Array, Array]:
    """For every sample its ``depth`` best candidates, best first, and their gains. (N, depth)."""
    by_sample = gain.T
    top = np.argpartition(-by_sample, depth - 1, axis=1)[:, :depth]
    value = np.take_along_axis(by_sample, top, axis=1)
    best_first = np.argsort(-value, axis=1, kind="stable")
    return np.take_along_axis(top, best_first, 1), np.take_along_axis(value, best_first, 1)


def _defer(order: Array, value: Array, sets: Array, m: int) -> Array:
    """Deferred acceptance for :func:`greedy_in_sets`. Seats are (set, sample), slots (set, candidate)."""
    s, n = sets.shape
    sample = sets.ravel()
    asked = np.zeros(s * n, dtype=np.int64)  # how many candidates each seat has proposed to
    holder = np.full(s * m, -1)
    held = np.full(s * m, -np.inf)
    free = np.arange(s * n)
    while len(free := free[asked[free] < order.shape[1]]):
        gain = value[sample[free], asked[free]]
        free, gain = free[gain > -np.inf], gain[gain > -np.inf]  # those seats stay empty
        slot = free // n * m + order[sample[free], asked[free]]
        asked[free] += 1
        by_slot = np.lexsort((gain, slot))
        last = np.flatnonzero(np.diff(slot[by_slot], append=-1))  # the best proposal of each slot
        best = by_slot[last]
        best = best[gain[best] > held[slot[best]]]
        refused = np.ones(len(free), dtype=bool)
        refused[best] = False
        displaced = holder[slot[best]]
        holder[slot[best]], held[slot[best]] = free[best], gain[best]
        free = np.concatenate([free[refused], displaced[displaced >= 0]])
    candidate = np.full(s * n, -1)
    taken = np.flatnonzero(holder >= 0)
    candidate[holder[taken]] = taken % m
    return candidate.reshape(s, n)


def _gain(similarity: Tensor | Array, higher_is_better: bool) -> Array:
    values = as_array(similarity)
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(
            f"Matching needs a matrix (m, n) of candidates by samples; got shape {values.shape}.",
            "Give at least one candidate and one sample.",
        )
    if np.isnan(values).any():
        raise InputError("A similarity matrix must not hold NaN.", "Leave out broken candidates.")
    return values if higher_is_better else -values


def _matching(gain: Array, candidate: Array, higher_is_better: bool) -> Matching:
    value = np.where(candidate >= 0, gain[candidate, np.arange(gain.shape[1])], -np.inf)
    candidate = np.where(np.isneginf(value), -1, candidate)
    return Matching(candidate, value if higher_is_better else -value)


MATCHINGS: dict[str, Callable[..., Matching]] = {
    "nearest": nearest,
    "greedy": greedy,
    "optimal": optimal,
}

VOTES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # The released code compares squared distances of standardised images: 2 (1 - ncc) per pixel.
    "released": lambda ncc, best: 1 - ncc < 1.1 * (1 - best),
    "paper": lambda ncc, best: torch.gt(ncc, 0.9 * best),
}
