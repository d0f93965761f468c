"""The attack of the stationarity family: minimize the residual of one equation over candidates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex, cast

import torch
from torch import Tensor

from residuum.attacks.base import Attack, Watcher
from residuum.attacks.selection import select
from residuum.attacks.stationarity import objectives
from residuum.attacks.stationarity.defaults import default_settings
from residuum.attacks.stationarity.growth import Grower, GrowthStrategy
from residuum.attacks.stationarity.objectives import Objective
from residuum.attacks.stationarity.priors import PRIORS
from residuum.attacks.stationarity.solver import Population, Solver, SolverState, load_state
from residuum.attacks.stationarity.splitting import SampleSplitting
from residuum.errors import require_known
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction
from residuum.settings import KKTSettings, NTKSettings, StationaritySettings
from residuum.surfaces.surface import CHANGE, MOMENT, Surface

SAVE_EVERY = 20.0  # seconds between saves of the state
SPLITTING = SampleSplitting()


def make_grower(solver: Solver, strategy: GrowthStrategy = SPLITTING) -> Grower | None:
    """Create the object that grows the candidates of a solver.

    Args:
        solver: The solver.
        strategy: How candidates grow.

    Returns:
        The grower, None if the settings of the solver disable growth.
    """
    return None if solver.config.split == "none" else Grower(solver, strategy)


def search(
    solver: Solver,
    path: str | Path | None = None,
    watch: Watcher | None = None,
    until: int | None = None,
    grower: Grower | None = None,
) -> SolverState:
    """Run a search. After every evaluation step, candidates can grow and the time limit is checked.

    Args:
        solver: The solver.
        path: File for the state. If it holds a state, the search continues from there.
        watch: Receives the progress.
        until: Pause at the first evaluation step that is not before this step. The search can continue from
            the returned state.
        grower: Grows the candidates. The default is :func:`make_grower` of this solver.

    Returns:
        The state at the end.
    """
    config, path = solver.config, None if path is None else Path(path)
    grower = grower or make_grower(solver)
    start = saved = time.monotonic()
    solver.deadline = start + config.seconds
    state = load_state(path, solver.fingerprint, config.device) or solver.start()
    try:
        while not state.stopped and (until is None or state.step < until):
            next_ = solver.next_evaluation_step(state.step)
            if grower is not None:
                next_ = min(next_, grower.next_round_step(state.step))
            state = solver.solve(state, next_)
            if grower is not None:
                state = grower.run_due_rounds(state)
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


def summarize_growth(
    grower: Grower | None, state: SolverState
) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...]]:
    """Return notes about growth, and the second-order stationarity of the result.

    Args:
        grower: Grows the candidates, None without growth.
        state: The final state.

    Returns:
        The notes, and the stationarity of every run. Both are empty without growth.
    """
    if grower is None or state.population is None:
        return (), ()
    notes = [grower.note] if grower.note else []
    kinds = {event["kind"] for event in state.population.events}
    if grower.strategy.event not in kinds:
        cause = "no candidate was unstable" if kinds else "no round was due within the steps"
        notes.append(f"growth: no candidate was added, {cause}")
    for run, reason in enumerate(state.population.stopped):
        if reason == "limit":
            notes.append(f"growth: restart {run} stopped growing at its limit of candidates")
    return tuple(notes), tuple(grower.stationarity(state))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten(0, 1).cpu()


class StationarityAttack(StationaritySettings, Attack):
    """Base of the attacks that minimize the residual of a stationarity equation."""


class Stationarity(StationarityAttack):
    """Attack that minimizes the residual of an objective's equation.

    Attributes:
        objective: Target, gradients and multipliers of the equation.
        strategy: How candidates grow, if the settings enable growth.
        derived_from: The named class that a class created by :meth:`with_objective` or :meth:`with_strategy`
            comes from, None for a named class.
    """

    has_residual: ClassVar[bool] = True
    pace: ClassVar[str] = "batches"
    objective: ClassVar[type[Objective]]
    strategy: ClassVar[GrowthStrategy] = SPLITTING
    derived_from: ClassVar[type[Stationarity] | None] = None

    @classmethod
    def with_objective(cls, objective: type[Objective]) -> type[Stationarity]:
        """Return this attack with another objective, and the name and surface of that objective.

        Args:
            objective: The objective.

        Returns:
            A subclass of this attack.
        """
        return type(
            objective.__name__,
            (cls,),
            {
                "__module__": objective.__module__,
                "name": objective.name,
                "surface": objective.surface,
                "objective": objective,
                "derived_from": cls.derived_from or cls,
            },
        )

    @classmethod
    def with_strategy(cls, strategy: GrowthStrategy) -> type[Stationarity]:
        """Return this attack with another way to grow the candidates.

        Args:
            strategy: How candidates grow.

        Returns:
            A subclass of this attack.
        """
        members = {"strategy": strategy, "derived_from": cls.derived_from or cls}
        return type(cls.__name__, (cls,), {"__module__": cls.__module__, **members})

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle an attack. A class that cannot be imported is stored as its named class and its changes."""
        kind, named = type(self), type(self).derived_from
        if named is None:
            return super().__reduce_ex__(protocol)
        has_own_objective = kind.objective is not getattr(named, "objective", None)
        objective = kind.objective if has_own_objective else None
        strategy = None if kind.strategy is named.strategy else kind.strategy
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return _restore, (named, objective, strategy, values)

    @property
    def outside(self) -> bool:
        """True if the objective comes from another package."""
        return not self.objective.__module__.startswith("residuum.")

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply.

        Args:
            surface: The attack surface.
            knowledge: What the attacker knows.

        Returns:
            The reason, "" if the attack applies.
        """
        why_not = self.objective().why_not(surface.outputs, surface.task, knowledge)
        return why_not or ("" if surface.name == self.surface else f"needs {self.surface}")

    def why_applies(self, surface: Surface) -> str:
        """Return why the attack applies."""
        return self.objective().why_applies(surface)

    def why_skipped(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why an audit skips the attack although it applies.

        Args:
            surface: The attack surface.
            knowledge: What the attacker knows.

        Returns:
            The reason, "" if the audit does not skip the attack.
        """
        return self.objective().why_skipped(surface.task, knowledge)

    def resolve_settings(self, network: Network, knowledge: Knowledge) -> Attack:
        """Return the attack with the number of candidates, and priors that suit the data.

        Args:
            network: The network that is attacked.
            knowledge: What the attacker knows.

        Returns:
            The attack with its settings.
        """
        for prior, _ in self.priors or ():
            require_known(prior, PRIORS, "No prior")
        attack = super().resolve_settings(network, knowledge)
        is_signed = not self.objective.nonnegative
        defaults = default_settings(network, knowledge, self, self.surface, is_signed)
        return attack.changed(**defaults) if defaults else attack

    def reconstruct(
        self,
        surface: Surface,
        knowledge: Knowledge,
        *,
        state_path: str | Path | None = None,
        watch: Watcher | None = None,
        per_run: Sequence[Attack] | None = None,
    ) -> Reconstruction:
        """Run all restarts together, and continue from a saved state.

        Args:
            surface: The attack surface.
            knowledge: What the attacker knows.
            state_path: File for the state.
            watch: Receives the progress.
            per_run: Settings of each restart, if they differ.

        Returns:
            The candidates of all restarts, with a selection.
        """
        start = time.monotonic()
        solver = self.solver(surface.checkpoint, knowledge, per_run)
        grower = make_grower(solver, self.strategy)
        state = search(solver, state_path, watch, grower=grower)
        runs = self.restarts
        status = tuple(state.stopped if alive else "diverged" for alive in state.alive.tolist())
        lam, x = solver.multipliers(state.best_lam), state.best_x
        population = state.population or Population.start(runs, solver.problem.labels)
        living = population.best_active.cpu().flatten()
        notes, second_order = summarize_growth(grower, state)
        result = Reconstruction(
            attack=self.name,
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
            settings=self.to_json(),
            seconds=time.monotonic() - start,
            notes=notes,
            events=population.events,
            ident=population.best_ident.cpu().flatten()[living],
            second_order=second_order,
        )
        return result.replace(selection=select(result))

    def solver(
        self, network: Network, knowledge: Knowledge, per_run: Sequence[Attack] | None = None
    ) -> Solver:
        """Create the solver of this attack. All settings must be resolved.

        Args:
            network: The network that is attacked.
            knowledge: What the attacker knows.
            per_run: Settings of each restart, if they differ.

        Returns:
            The solver before its first step.
        """
        objective = self.objective.from_settings(self, knowledge)
        shape = network.sample_shape(knowledge)
        outputs = network.architecture.outputs
        objective.check(outputs, knowledge)
        model = network.copy_module()
        runs = None if per_run is None else cast(Sequence[StationaritySettings], per_run)
        return Solver(model, objective, knowledge, self, shape, outputs, self.candidates, runs)

    def advance(
        self,
        network: Network,
        knowledge: Knowledge,
        state_path: Path,
        until: int,
        per_run: Sequence[Attack] | None = None,
    ) -> bool:
        """Run the search up to step ``until`` and save its state. :meth:`run` can continue from there.

        Args:
            network: The network that is attacked.
            knowledge: What the attacker knows.
            state_path: File for the state.
            until: Step at which the search pauses.
            per_run: Settings of each restart, if they differ.

        Returns:
            True if steps are left.
        """
        attack = self.resolve_settings(network, knowledge)
        assert isinstance(attack, Stationarity)
        runs = (
            None if per_run is None else [r.resolve_settings(network, knowledge) for r in per_run]
        )
        solver = attack.solver(network, knowledge, runs)
        return not search(solver, state_path, until=until).stopped


def _restore(
    kind: type[Stationarity],
    objective: type[Objective] | None,
    strategy: GrowthStrategy | None,
    values: dict[str, Any],
) -> Stationarity:
    kind = kind if objective is None else kind.with_objective(objective)
    kind = kind if strategy is None else kind.with_strategy(strategy)
    return kind(**values)


class BinaryKKT(KKTSettings, Stationarity):
    """The KKT equation of a binary classifier (Haim et al. 2022)."""

    name: ClassVar[str] = "binary-kkt"
    objective: ClassVar[type[Objective]] = objectives.BinaryKKT


class MulticlassKKT(KKTSettings, Stationarity):
    """The KKT equation of a classifier with several outputs (Buzaglo et al. 2023)."""

    name: ClassVar[str] = "multiclass-kkt"
    objective: ClassVar[type[Objective]] = objectives.MulticlassKKT


class WeightDecay(Stationarity):
    """The equation of a network trained with weight decay (Buzaglo et al. 2023)."""

    name: ClassVar[str] = "weight-decay"
    objective: ClassVar[type[Objective]] = objectives.WeightDecay


class NTK(NTKSettings, Stationarity):
    """The equation of the weight update from known initial weights (Loo et al. 2024)."""

    name: ClassVar[str] = "ntk"
    surface: ClassVar[str] = CHANGE
    objective: ClassVar[type[Objective]] = objectives.NTK


class OptimizerState(Stationarity):
    """The equation of an optimizer state."""

    name: ClassVar[str] = "moment"
    surface: ClassVar[str] = MOMENT
    objective: ClassVar[type[Objective]] = objectives.Moment


class Auto(StationarityAttack):
    """The stationarity attack that suits the network: KKT for a classifier, weight decay for a regression."""

    name: ClassVar[str] = "auto"

    def resolve_settings(self, network: Network, knowledge: Knowledge) -> Attack:
        """Return the attack for the task of the network.

        Args:
            network: The network that is attacked.
            knowledge: What the attacker knows.

        Returns:
            The attack with its settings.
        """
        network.check_weights()
        by_task: tuple[type[Stationarity], ...] = (BinaryKKT, MulticlassKKT, WeightDecay)
        chosen = next(a for a in by_task if a.objective.task == network.inferred_task)
        return chosen.like(self).resolve_settings(network, knowledge)


class KKT(KKTSettings, StationarityAttack):
    """The KKT attack: binary or multiclass, by the number of outputs."""

    name: ClassVar[str] = "kkt"

    def resolve_settings(self, network: Network, knowledge: Knowledge) -> Attack:
        """Return the attack for the number of outputs.

        Args:
            network: The network that is attacked.
            knowledge: What the attacker knows.

        Returns:
            The attack with its settings.
        """
        outputs = network.architecture.outputs
        chosen = BinaryKKT if outputs == 1 else MulticlassKKT
        return chosen.like(self).resolve_settings(network, knowledge)
