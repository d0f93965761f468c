"""The attack of the stationarity family: minimize the residual of one equation over candidates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from residuum.attacks.base import Attack, Watcher
from residuum.attacks.selection import select
from residuum.attacks.stationarity.growth import Grower, GrowthStrategy
from residuum.attacks.stationarity.objectives import OBJECTIVES, Objective
from residuum.attacks.stationarity.solver import Population, Solver, SolverState, load_state
from residuum.attacks.stationarity.splitting import SampleSplitting
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction
from residuum.settings import AttackConfig
from residuum.surfaces.surface import Surface

SAVE_EVERY = 20.0  # seconds between saves of an attack that is kept
SPLITTING = SampleSplitting()


def make_grower(solver: Solver, strategy: GrowthStrategy = SPLITTING) -> Grower | None:
    """Return what grows the candidates of this solver, None if its settings ask for no growth."""
    return None if solver.config.growth.how == "none" else Grower(solver, strategy)


def search(
    solver: Solver,
    path: str | Path | None = None,
    watch: Watcher | None = None,
    until: int | None = None,
    grower: Grower | None = None,
) -> SolverState:
    """An attack from look to look: between them candidates grow, a watcher is told, the clock is read.

    path: where the state is kept, and taken up again.
    until: pause at the first look from this step on; the state that comes back has not stopped, and
        is gone on with.
    grower: Grows the candidates; by default :func:`make_grower` of this solver.
    """
    config, path = solver.config, None if path is None else Path(path)
    grower = grower or make_grower(solver)
    start = saved = time.monotonic()
    solver.deadline = start + config.seconds
    state = load_state(path, solver.fingerprint, config.device) or solver.start()
    try:
        while not state.stopped and (until is None or state.step < until):
            next_ = solver.next_look(state.step)
            if grower is not None:
                next_ = min(next_, grower.next_round(state.step))
            state = solver.solve(state, next_)
            if grower is not None:
                state = grower.after(state)
            if watch is not None:
                watch(solver.progress(state))
            now = time.monotonic()
            if not state.stopped and now - start > config.seconds:
                state = state.replace(stopped="time")
            if path is not None and now - saved > SAVE_EVERY:
                state.save(path)
                saved = now
    finally:
        if path is not None:
            state.save(path)
    return state


class Stationarity(Attack):
    """Descent on the residual of the surface's equation, with the covectors of an objective.

    strategy: how candidates grow, in attacks whose settings ask for growth.
    """

    acquits: ClassVar[bool] = True
    pace: ClassVar[str] = "batches"

    def __init__(
        self, name: str, objective: type[Objective], strategy: GrowthStrategy = SPLITTING
    ) -> None:
        self.name, self.objective, self.surface = name, objective, objective.surface
        self.strategy = strategy

    @property
    def outside(self) -> bool:
        """As the objective is."""
        return not self.objective.__module__.startswith("residuum.")

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """As the objective says."""
        why_not = self.objective().why_not(surface.outputs, surface.task, knowledge)
        return why_not or ("" if surface.name == self.surface else f"needs {self.surface}")

    def why(self, surface: Surface) -> str:
        """Likewise."""
        return self.objective().why(surface)

    def left_out(self, surface: Surface, knowledge: Knowledge) -> str:
        """Likewise."""
        return self.objective().left_out(surface.task, knowledge)

    def run(
        self,
        surface: Surface,
        knowledge: Knowledge,
        config: AttackConfig,
        *,
        state_path: str | Path | None = None,
        watch: Watcher | None = None,
        per_run: Sequence[AttackConfig] | None = None,
    ) -> Reconstruction:
        """All restarts side by side; a saved state is gone on with."""
        start = time.monotonic()
        solver = prepare(surface.checkpoint, knowledge, config, per_run, self.objective)
        grower = make_grower(solver, self.strategy)
        state = search(solver, state_path, watch, grower=grower)
        runs = config.restarts
        status = tuple(state.stopped if alive else "diverged" for alive in state.alive.tolist())
        lam, x = solver.multipliers(state.best_lam), state.best_x
        population = state.population or Population.start(runs, solver.problem.labels)
        living = population.best_active.cpu().flatten()
        notes, second_order = grown_facts(grower, state)
        found = Reconstruction(
            attack=config.objective,
            x=_flat(x)[living],
            labels=population.best_labels.cpu().flatten()[living],
            lam=_flat(lam)[living],
            run=torch.arange(runs).repeat_interleave(x.shape[1])[living],
            steps=torch.tensor(state.steps),
            loss=torch.stack(state.loss, 1),
            layers=torch.stack(state.layers, 1),
            layer_names=solver.problem.layer_names,
            status=status,
            knowledge=knowledge,
            settings=config.to_json(),
            seconds=time.monotonic() - start,
            notes=notes,
            events=population.events,
            ident=population.best_ident.cpu().flatten()[living],
            second_order=second_order,
        )
        return found.replace(selection=select(found))


def grown_facts(
    grower: Grower | None, state: SolverState
) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...]]:
    """Return the notes of an attack that grew, and the stationarity of its end."""
    if grower is None or state.population is None:
        return (), ()
    notes = [grower.note] if grower.note else []
    kinds = {event["kind"] for event in state.population.events}
    if grower.strategy.event not in kinds:
        why = "no candidate was unstable" if kinds else "no round was due within the steps"
        notes.append(f"growth: no candidate was added, {why}")
    for run, reason in enumerate(state.population.stopped):
        if reason == "limit":
            notes.append(f"growth: restart {run} stopped growing at its limit of candidates")
    return tuple(notes), tuple(grower.stationarity(state))


def prepare(
    checkpoint: Network,
    knowledge: Knowledge,
    config: AttackConfig,
    per_run: Sequence[AttackConfig] | None = None,
    kind: type[Objective] | None = None,
) -> Solver:
    """The attack that a resolved configuration describes, before its first step.

    kind: the objective where it is not the one that the configuration names.
    """
    objective = (kind or OBJECTIVES[config.objective]).configured(config, knowledge)
    shape = checkpoint.sample_shape(knowledge)
    outputs = checkpoint.architecture.outputs
    objective.check(outputs, knowledge)
    model = checkpoint.copy_module()
    return Solver(model, objective, knowledge, config, shape, outputs, config.candidates, per_run)


def _flat(part: Tensor) -> Tensor:
    return part.detach().flatten(0, 1).cpu()
