"""An attack at one moment: what a watcher sees, what is saved, and what a saved state belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from residuum.attacks.config import AttackConfig
from residuum.attacks.objectives import Objective
from residuum.attacks.population import Population
from residuum.records import Knowledge, Record
from residuum.records.rundir import another, digest

DIVERGED = 1e6  # a loss this many times the first one, or that of no candidates, counts as diverged


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
    moved = {
        name: getattr(state, name).to(device)
        for name in ("x", "lam", "best_x", "best_lam", "best_loss", "first_loss", "alive")
    }
    moments = {name: t.to(device) for name, t in state.moments.items()}
    stopped = "" if state.stopped == "time" else state.stopped
    population = state.population if state.population is None else state.population.to(device)
    return state.replace(**moved, moments=moments, stopped=stopped, population=population)


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
