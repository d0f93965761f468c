"""An attack at one moment: who lives in which slot, what is saved, what a watcher sees.

Runs side by side share tensors (R, m, ...) and may hold different numbers of candidates. A slot is
alive or empty; an empty one holds zeros, its multiplier is zero and never moves, so it adds nothing
to the equation. Every candidate has a number of its own, never used again in its run: those of the
start are 0..m-1, and a split gives two new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residuum.attacks.objectives import Objective
from residuum.records import Knowledge, Record
from residuum.records.rundir import another, digest
from residuum.settings.attack import AttackConfig

DIVERGED = 1e6  # a loss this many times the first one, or that of no candidates, counts as diverged
OWN = ("labels", "active", "ident", "best_labels", "best_active", "best_ident")
PER_SLOT = ("x", "lam", "best_x", "best_lam")


@dataclass(frozen=True, eq=False)
class Population(Record):
    """labels, active, ident: (R, m), and the same of the best point of every run.

    born: numbers used up in each run; last: step of each run's latest round; events: what happened,
    see ``growth.py``; stopped: why a run grows no more, "" while it may.
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

    def keep_best(self, better: Tensor) -> Population:
        """Runs (R,) that reached a better point remember who was alive there."""
        now = {f"best_{name}": getattr(self, name) for name in ("labels", "active", "ident")}
        kept = {n: torch.where(better[:, None], t, getattr(self, n)) for n, t in now.items()}
        return self.replace(**kept)


@dataclass(frozen=True)
class Progress:
    """What a watcher sees: losses (R,) and relative squared residuals (R, L) at a step.

    living: the candidates of every run at this moment, worked out when asked for.
    """

    step: int
    steps: int
    loss: Tensor
    layers: Tensor
    layer_names: tuple[str, ...]
    living: Callable[[], list[Tensor]] | None = None


Watcher = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class SolverState(Record):
    """An attack at one moment: all that is needed to go on.

    x, best_x: (R, m, *shape), or (R, m, r) in row-space mode; tensors may share memory, so none of
    them is ever changed in place. population: of an attack whose candidates grow, None otherwise.
    """

    x: Tensor
    lam: Tensor
    best_x: Tensor
    best_lam: Tensor
    best_loss: Tensor
    first_loss: Tensor
    alive: Tensor
    step: int
    fingerprint: str
    moments: dict[str, Tensor] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    loss: tuple[Tensor, ...] = ()
    layers: tuple[Tensor, ...] = ()
    stopped: str = ""
    population: Population | None = None

    @property
    def moving(self) -> Tensor:
        """(R,) runs, or (R, m) candidates of them, that steps may change."""
        if self.population is None:
            return self.alive
        return self.alive[:, None] & self.population.active


def progress(
    state: SolverState, steps: int, names: tuple[str, ...], pixels: Callable[[Tensor], Tensor]
) -> Progress:
    """The state as a watcher sees it; pixels: from what is searched in to what the network sees."""

    def living() -> list[Tensor]:
        x, population = pixels(state.x), state.population
        if population is None:
            return list(x)
        return [x[run][population.active[run]] for run in range(len(x))]

    return Progress(state.step, steps, state.loss[-1], state.layers[-1], names, living)


def load_state(path: Path | None, fingerprint: str, device: str) -> SolverState | None:
    """The state saved at ``path``, None where there is none; another attack's state is refused."""
    if path is None or not path.exists():
        return None
    state = SolverState.load(path)
    if state.fingerprint != fingerprint:
        raise another(path.parent, "an attack", "settings or on other weights")
    stopped = "" if state.stopped == "time" else state.stopped
    population = None if state.population is None else _moved(state.population, device)
    moments = {name: t.to(device) for name, t in state.moments.items()}
    state = state.replace(moments=moments, stopped=stopped, population=population)
    return _moved(state, device)


def _moved(record: Any, device: str) -> Any:
    """With its tensors on another device; a history of them stays where it is."""
    tensors = {name: t for name, t in vars(record).items() if isinstance(t, Tensor)}
    return record.replace(**{name: t.to(device) for name, t in tensors.items()})


def look(
    state: SolverState, x: Tensor, lam: Tensor, loss: Tensor, layers: Tensor, empty_loss: float
) -> SolverState:
    """History, best snapshots, and runs that left the finite numbers.

    empty_loss: what no candidates at all would cost; a run that began near zero may come back to it.
    """
    first = torch.where(torch.isfinite(state.first_loss), state.first_loss, loss)
    fine = torch.isfinite(loss) & (loss <= DIVERGED * first.clamp(min=empty_loss))
    better = state.alive & fine & (loss < state.best_loss)
    # A run stopped by the clock has been looked at where it goes on from.
    population = state.population
    past = len(state.steps) - (state.step in state.steps[-1:])
    return state.replace(
        best_x=_where(better, x, state.best_x),
        best_lam=_where(better, lam, state.best_lam),
        best_loss=torch.where(better, loss, state.best_loss),
        first_loss=first,
        alive=state.alive & fine,
        steps=(*state.steps[:past], state.step),
        loss=(*state.loss[:past], loss.detach().cpu().double()),
        layers=(*state.layers[:past], layers.detach().cpu().double()),
        population=population if population is None else population.keep_best(better),
    )


def fingerprint(
    model: nn.Module,
    objective: Objective,
    knowledge: Knowledge,
    configs: Sequence[AttackConfig],
    candidates: int,
) -> str:
    """Hash of everything that decides an attack but its wall clock.

    configs: the settings of all runs together, then each run's own where they differ.
    """
    settings = [{k: v for k, v in config.to_json().items() if k != "seconds"} for config in configs]
    tensors = [*model.state_dict().values(), *(knowledge.theta0 or {}).values()]
    known = [t for t in (*tensors, knowledge.mean, knowledge.norms) if t is not None]
    rest = [knowledge.shape, knowledge.value_range, knowledge.sample_count, knowledge.label_balance]
    told = [rest, knowledge.loss, knowledge.weight_decay]
    return digest([*settings, repr(objective), candidates], *known, told)


def _where(runs: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """new for these runs, old for the others; no copy where one of them serves all."""
    if bool(runs.all()):
        return new
    if not bool(runs.any()):
        return old
    return torch.where(runs.view(-1, *[1] * (new.ndim - 1)), new, old)


@dataclass(frozen=True)
class Newcomer:
    """One candidate more. parent: the slot that it splits from, whose other half takes ``moved``.

    lam: stored multiplier, of both halves where there is a parent; figures: of the split, for its event.
    """

    x: Tensor
    lam: Tensor
    label: Tensor
    parent: int | None = None
    moved: Tensor | None = None
    figures: dict[str, float] = field(default_factory=dict)


def population_of(state: SolverState) -> Population:
    """The state's population; only states of attacks that grow have one."""
    assert state.population is not None
    return state.population


def recorded(state: SolverState, events: list[dict[str, Any]]) -> SolverState:
    """With these events after those before."""
    population = population_of(state)
    return state.replace(population=population.replace(events=(*population.events, *events)))


def settle(
    state: SolverState, newcomers: list[list[Newcomer]]
) -> tuple[SolverState, list[list[tuple[int, ...]]]]:
    """Give every run's newcomers slots, empty ones first, and numbers; optimiser state is inherited.

    Returns the numbers of each newcomer: (child, child) of a split, (candidate,) otherwise.
    """
    if not any(newcomers):
        return state, [[] for _ in newcomers]
    population, m = population_of(state), state.x.shape[1]
    wanted = [int(a.sum()) + len(new) for a, new in zip(population.active, newcomers, strict=True)]
    state = widen(state, max(m, *wanted))
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
