"""Slots of candidates: assign slots and numbers to new candidates, and empty slots.

Runs side by side share tensors (R, m, ...) and may hold different numbers of candidates. An empty slot holds
zeros, and empty slots are filled first. A candidate keeps its number, and each number is used once in a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.stationarity.solver import Population, SolverState

# Names of the tensors that have one entry per slot.
POPULATION_FIELDS = ("labels", "active", "ident", "best_labels", "best_active", "best_ident")
STATE_FIELDS = ("x", "lam", "best_x", "best_lam")


@dataclass(frozen=True)
class Newcomer:
    """A new candidate of one run, or one half of a candidate that splits.

    Attributes:
        x: The candidate.
        lam: Its multiplier. After a split, both halves have the same multiplier.
        label: Its label.
        parent: Slot of the candidate that splits, None for a candidate without a parent.
        parent_x: The half that stays in the parent's slot.
        figures: Numbers for the event.
    """

    x: Tensor
    lam: Tensor
    label: Tensor
    parent: int | None = None
    parent_x: Tensor | None = None
    figures: dict[str, float] = field(default_factory=dict)


def get_population(state: SolverState) -> Population:
    """Return the population of the state of an attack that grows."""
    assert state.population is not None
    return state.population


def append_events(state: SolverState, events: list[dict[str, Any]]) -> SolverState:
    """Append events to the events of a state.

    Args:
        state: The current state.
        events: The new events.

    Returns:
        The new state.
    """
    population = get_population(state)
    return state.replace(population=population.replace(events=(*population.events, *events)))


def place_newcomers(
    state: SolverState, newcomers: list[list[Newcomer]]
) -> tuple[SolverState, list[list[tuple[int, ...]]]]:
    """Assign slots and numbers to new candidates. Empty slots are filled first.

    Both halves of a split inherit the optimizer state of their parent.

    Args:
        state: The current state.
        newcomers: New candidates of each run, with stored multipliers.

    Returns:
        The new state, and for each run the numbers of each newcomer. A split has two numbers: of the half in
        the parent's slot and of the half in the new slot.
    """
    if not any(newcomers):
        return state, [[] for _ in newcomers]
    population, m = get_population(state), state.x.shape[1]
    sizes = [int(a.sum()) + len(new) for a, new in zip(population.active, newcomers, strict=True)]
    state = add_slots(state, max(m, *sizes))
    population = get_population(state)
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


def remove_candidates(state: SolverState, dropped: Tensor) -> SolverState:
    """Empty slots.

    Args:
        state: The current state.
        dropped: Mask of the slots to empty (R, m).

    Returns:
        The new state.
    """
    population = get_population(state)

    def empty_slots(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(dropped.view(*dropped.shape, *[1] * (tensor.ndim - 2)), 0.0)

    return state.replace(
        x=empty_slots(state.x),
        lam=empty_slots(state.lam),
        moments={name: empty_slots(t) for name, t in state.moments.items()},
        population=population.replace(active=population.active & ~dropped),
    )


def add_slots(state: SolverState, slots: int) -> SolverState:
    """Append empty slots.

    Args:
        state: The current state.
        slots: Number of slots afterwards.

    Returns:
        The new state. It is the same if there are enough slots.
    """
    more = slots - state.x.shape[1]
    if more <= 0:
        return state

    def pad(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(len(tensor), more, *tensor.shape[2:])], 1)

    population = get_population(state)
    entries = {name: pad(getattr(population, name)) for name in POPULATION_FIELDS}
    return state.replace(
        **{name: pad(getattr(state, name)) for name in STATE_FIELDS},
        moments={name: pad(t) for name, t in state.moments.items()},
        population=population.replace(**entries),
    )
