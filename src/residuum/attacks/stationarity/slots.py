"""Add candidates to the tensors of a solver, and remove candidates from them.

R runs share tensors of shape (R, m, ...), but the runs may have different numbers of candidates. A slot is
one of the m positions of a run. A slot holds one candidate, or zeros if it is empty. New candidates fill the
empty slots first. Every candidate of a run has a number, which is never used again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.stationarity.solver import Population, SolverState

# A slot is a place in the tensors that can hold one candidate. These are the names of the tensors with one
# entry for each slot.
POPULATION_FIELDS = ("labels", "active", "ident", "best_labels", "best_active", "best_ident")
STATE_FIELDS = ("x", "lam", "best_x", "best_lam")


@dataclass(frozen=True)
class Newcomer:
    """A candidate that is added to a run, or one half of a candidate that is split in two.

    Attributes:
        x: The sample of the new candidate.
        lam: Multiplier of the new candidate. After a split, both halves have the same multiplier.
        label: Label of the new candidate.
        parent: Position in the tensors of the candidate that splits, None if no candidate splits.
        parent_x: Sample of the other half, which replaces the candidate that splits. None if no candidate
            splits.
        figures: Numbers that are recorded with the addition, such as the eigenvalue of a split.
    """

    x: Tensor
    lam: Tensor
    label: Tensor
    parent: int | None = None
    parent_x: Tensor | None = None
    figures: dict[str, float] = field(default_factory=dict)


def get_population(state: SolverState) -> Population:
    """Return the record of a search's candidates (guesses of samples): labels, numbers and history."""
    assert state.population is not None
    return state.population


def append_events(state: SolverState, events: list[dict[str, Any]]) -> SolverState:
    """Append events, such as splits and merges of candidates, to the recorded history of a search.

    Args:
        state: State of the search: the candidates and the optimizer.
        events: The new events as dictionaries.

    Returns:
        The new state of the search.
    """
    candidate_population = get_population(state)
    return state.replace(
        population=candidate_population.replace(events=(*candidate_population.events, *events))
    )


def place_newcomers(
    state: SolverState, newcomers: list[list[Newcomer]]
) -> tuple[SolverState, list[list[tuple[int, ...]]]]:
    """Add new candidates to the tensors of a state, and number them.

    A slot is a position of a candidate in the tensors. Empty slots are filled before the tensors grow. If a
    candidate is split in two, both halves inherit its optimizer state.

    Args:
        state: State of the search: the candidates and the optimizer.
        newcomers: New candidates of each run, with multipliers divided by the solver's scale.

    Returns:
        The new state, and the numbers of each run's new candidates. A split has two numbers: that of the
        half that replaces the split candidate, and that of the other half.
    """
    if not any(newcomers):
        return state, [[] for _ in newcomers]
    candidate_population, m = get_population(state), state.x.shape[1]
    needed_slots = [
        int(a.sum()) + len(new)
        for a, new in zip(candidate_population.active, newcomers, strict=True)
    ]
    state = add_slots(state, max(m, *needed_slots))
    candidate_population = get_population(state)
    tensors = {name: getattr(state, name).clone() for name in ("x", "lam")}
    moments = {name: t.clone() for name, t in state.moments.items()}
    slot_fields = {
        name: getattr(candidate_population, name).clone() for name in ("labels", "active", "ident")
    }
    next_numbers = list(candidate_population.born)
    numbers: list[list[tuple[int, ...]]] = []
    for run, new in enumerate(newcomers):
        empty_slots = (~candidate_population.active[run]).nonzero()[:, 0].tolist()
        numbers.append([])
        for slot, newcomer in zip(empty_slots, new, strict=False):
            parent = newcomer.parent
            tensors["x"][run, slot], tensors["lam"][run, slot] = newcomer.x, newcomer.lam
            slot_fields["labels"][run, slot], slot_fields["active"][run, slot] = (
                newcomer.label,
                True,
            )
            slot_fields["ident"][run, slot] = next_numbers[run]
            newcomer_numbers: tuple[int, ...] = (next_numbers[run],)
            if parent is not None and newcomer.parent_x is not None:
                tensors["x"][run, parent] = newcomer.parent_x
                tensors["lam"][run, parent] = newcomer.lam
                slot_fields["ident"][run, parent] = next_numbers[run] + 1
                newcomer_numbers = (next_numbers[run] + 1, next_numbers[run])
            for moment in moments.values():
                moment[run, slot] = 0.0 if parent is None else moment[run, parent]
            next_numbers[run] += len(newcomer_numbers)
            numbers[run].append(newcomer_numbers)
    candidate_population = candidate_population.replace(**slot_fields, born=tuple(next_numbers))
    return state.replace(**tensors, moments=moments, population=candidate_population), numbers


def remove_candidates(state: SolverState, dropped: Tensor) -> SolverState:
    """Remove candidates from a state, and fill their positions in the tensors with zeros.

    Args:
        state: State of the search: the candidates and the optimizer.
        dropped: Mask of the candidates to remove (R, m).

    Returns:
        The new state of the search.
    """
    candidate_population = get_population(state)

    def empty_slots(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(dropped.view(*dropped.shape, *[1] * (tensor.ndim - 2)), 0.0)

    return state.replace(
        x=empty_slots(state.x),
        lam=empty_slots(state.lam),
        moments={name: empty_slots(t) for name, t in state.moments.items()},
        population=candidate_population.replace(active=candidate_population.active & ~dropped),
    )


def add_slots(state: SolverState, slots: int) -> SolverState:
    """Append empty slots (positions of candidates, filled with zeros) to the tensors of a state.

    Args:
        state: State of the search: the candidates and the optimizer.
        slots: Number of slots that each run needs.

    Returns:
        The new state, or the given state if there are enough slots.
    """
    missing_slots = slots - state.x.shape[1]
    if missing_slots <= 0:
        return state

    def pad(tensor: Tensor) -> Tensor:
        return torch.cat(
            [tensor, tensor.new_zeros(len(tensor), missing_slots, *tensor.shape[2:])], 1
        )

    candidate_population = get_population(state)
    padded_fields = {name: pad(getattr(candidate_population, name)) for name in POPULATION_FIELDS}
    return state.replace(
        **{name: pad(getattr(state, name)) for name in STATE_FIELDS},
        moments={name: pad(t) for name, t in state.moments.items()},
        population=candidate_population.replace(**padded_fields),
    )
