"""Slots of candidates: newcomers move in, the dead move out, tensors grow when none is empty."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.attacks.population import OWN, Population
from residuum.attacks.state import SolverState

PER_SLOT = ("x", "lam", "best_x", "best_lam")


@dataclass(frozen=True)
class Newcomer:
    """One candidate more. parent: the slot that it splits from, whose other half takes ``moved``.

    lam: stored multiplier, of both halves where there is a parent.
    """

    x: Tensor
    lam: Tensor
    label: Tensor
    parent: int | None = None
    moved: Tensor | None = None


def population_of(state: SolverState) -> Population:
    """The state's population; only states of attacks that grow have one."""
    assert state.population is not None
    return state.population


def settle(
    state: SolverState, newcomers: list[list[Newcomer]]
) -> tuple[SolverState, list[list[tuple[int, ...]]]]:
    """Give every run's newcomers slots, empty ones first, and numbers; optimiser state is inherited.

    Returns the numbers of each newcomer: (child, child) of a split, (candidate,) otherwise.
    """
    if not any(newcomers):
        return state, [[] for _ in newcomers]
    population, m = population_of(state), state.x.shape[1]
    wanted = max(
        (int(population.active[run].sum()) + len(new) for run, new in enumerate(newcomers)),
        default=0,
    )
    state = widen(state, max(m, wanted))
    population = population_of(state)
    tensors = {name: getattr(state, name).clone() for name in ("x", "lam")}
    moments = {name: t.clone() for name, t in state.moments.items()}
    own = {name: getattr(population, name).clone() for name in ("labels", "active", "ident")}
    born = list(population.born)
    numbers: list[list[tuple[int, ...]]] = []
    for run, new in enumerate(newcomers):
        empty = (~population.active[run]).nonzero()[:, 0].tolist()
        numbers.append([])
        for slot, one in zip(empty, new, strict=False):
            tensors["x"][run, slot], tensors["lam"][run, slot] = one.x, one.lam
            own["labels"][run, slot], own["active"][run, slot] = one.label, True
            own["ident"][run, slot] = born[run]
            fresh: tuple[int, ...] = (born[run],)
            if one.parent is not None and one.moved is not None:
                tensors["x"][run, one.parent] = one.moved
                tensors["lam"][run, one.parent] = one.lam
                own["ident"][run, one.parent] = born[run] + 1
                fresh = (born[run] + 1, born[run])
            for moment in moments.values():
                moment[run, slot] = 0.0 if one.parent is None else moment[run, one.parent]
            born[run] += len(fresh)
            numbers[run].append(fresh)
    population = population.replace(**own, born=tuple(born))
    return state.replace(**tensors, moments=moments, population=population), numbers


def remove(state: SolverState, gone: Tensor) -> SolverState:
    """Empty these slots (R, m)."""
    population = population_of(state)

    def emptied(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(gone.view(*gone.shape, *[1] * (tensor.ndim - 2)), 0.0)

    return state.replace(
        x=emptied(state.x),
        lam=emptied(state.lam),
        moments={name: emptied(t) for name, t in state.moments.items()},
        population=population.replace(active=population.active & ~gone),
    )


def widen(state: SolverState, slots: int) -> SolverState:
    """The same with empty slots at the end, up to so many."""
    more = slots - state.x.shape[1]
    if more <= 0:
        return state

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(len(tensor), more, *tensor.shape[2:])], 1)

    population = population_of(state)
    return state.replace(
        **{name: padded(getattr(state, name)) for name in PER_SLOT},
        moments={name: padded(t) for name, t in state.moments.items()},
        population=population.replace(**{name: padded(getattr(population, name)) for name in OWN}),
    )
