"""Slots of candidates: give slots and numbers to new candidates, and empty slots.

Runs side by side share tensors (R, m, ...) and may hold different numbers of candidates. An empty slot holds
zeros and is used first. A candidate keeps its number for life, and no number is used twice in a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.stationarity.solver import Population, SolverState

OF_POPULATION = ("labels", "active", "ident", "best_labels", "best_active", "best_ident")
OF_STATE = ("x", "lam", "best_x", "best_lam")  # tensors with one entry per slot


@dataclass(frozen=True)
class Newcomer:
    """A new candidate of one run, or one half of a candidate that splits.

    x: the candidate.
    lam: its stored multiplier. After a split the other half has the same one.
    label: its label.
    parent: the slot of the candidate that splits; None for a candidate without a parent.
    parent_x: the half that stays in the parent's slot.
    figures: numbers for the event.
    """

    x: Tensor
    lam: Tensor
    label: Tensor
    parent: int | None = None
    parent_x: Tensor | None = None
    figures: dict[str, float] = field(default_factory=dict)


def population_of(state: SolverState) -> Population:
    """Return the state's population, which every attack that grows has."""
    assert state.population is not None
    return state.population


def with_events(state: SolverState, events: list[dict[str, Any]]) -> SolverState:
    """Append events to those of the state."""
    population = population_of(state)
    return state.replace(population=population.replace(events=(*population.events, *events)))


def settle(
    state: SolverState, newcomers: list[list[Newcomer]]
) -> tuple[SolverState, list[list[tuple[int, ...]]]]:
    """Give every run's newcomers slots, empty ones first, and numbers.

    Both halves of a split inherit the optimizer state of their parent.

    Returns:
        The new state, and per run the numbers of each newcomer: (half in the parent's slot, half in the new
        slot) of a split, (candidate,) otherwise.
    """
    if not any(newcomers):
        return state, [[] for _ in newcomers]
    population, m = population_of(state), state.x.shape[1]
    sizes = [int(a.sum()) + len(new) for a, new in zip(population.active, newcomers, strict=True)]
    state = widen(state, max(m, *sizes))
    population = population_of(state)
    tensors = {name: getattr(state, name).clone() for name in ("x", "lam")}
    moments = {name: t.clone() for name, t in state.moments.items()}
    entries = {name: getattr(population, name).clone() for name in ("labels", "active", "ident")}
    born = list(population.born)
    numbers: list[list[tuple[int, ...]]] = []
    for run, new in enumerate(newcomers):
        empty = (~population.active[run]).nonzero()[:, 0].tolist()
        numbers.append([])
        for slot, newcomer in zip(empty, new, strict=False):
            parent = newcomer.parent
            tensors["x"][run, slot], tensors["lam"][run, slot] = newcomer.x, newcomer.lam
            entries["labels"][run, slot], entries["active"][run, slot] = newcomer.label, True
            entries["ident"][run, slot] = born[run]
            fresh: tuple[int, ...] = (born[run],)
            if parent is not None and newcomer.parent_x is not None:
                tensors["x"][run, parent] = newcomer.parent_x
                tensors["lam"][run, parent] = newcomer.lam
                entries["ident"][run, parent] = born[run] + 1
                fresh = (born[run] + 1, born[run])
            for moment in moments.values():
                moment[run, slot] = 0.0 if parent is None else moment[run, parent]
            born[run] += len(fresh)
            numbers[run].append(fresh)
    population = population.replace(**entries, born=tuple(born))
    return state.replace(**tensors, moments=moments, population=population), numbers


def remove(state: SolverState, dropped: Tensor) -> SolverState:
    """Empty the slots that ``dropped`` (R, m) marks."""
    population = population_of(state)

    def emptied(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(dropped.view(*dropped.shape, *[1] * (tensor.ndim - 2)), 0.0)

    return state.replace(
        x=emptied(state.x),
        lam=emptied(state.lam),
        moments={name: emptied(t) for name, t in state.moments.items()},
        population=population.replace(active=population.active & ~dropped),
    )


def widen(state: SolverState, slots: int) -> SolverState:
    """Append empty slots, up to ``slots`` in all."""
    more = slots - state.x.shape[1]
    if more <= 0:
        return state

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(len(tensor), more, *tensor.shape[2:])], 1)

    population = population_of(state)
    entries = {name: padded(getattr(population, name)) for name in OF_POPULATION}
    return state.replace(
        **{name: padded(getattr(state, name)) for name in OF_STATE},
        moments={name: padded(t) for name, t in state.moments.items()},
        population=population.replace(**entries),
    )
