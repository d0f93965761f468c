"""Attacks that search for samples that solve a stationarity equation, which holds after training.

The equation says that the weights are a weighted sum of gradients at the training samples. The attacks
minimize its error (residual).
"""

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

SAVE_EVERY = 20.0  # seconds between two saves of the search's state to its file
SPLITTING = SampleSplitting()


def make_grower(solver: Solver, strategy: GrowthStrategy = SPLITTING) -> Grower | None:
    """Create the object that adds, splits and merges candidates (guesses of samples) during the search.

    Args:
        solver: The solver, which runs the optimization of the attack.
        strategy: Method that adds candidates during the search.

    Returns:
        The grower, None if the settings keep the number of candidates fixed.
    """
    return None if solver.config.split == "none" else Grower(solver, strategy)


def search(
    solver: Solver,
    path: str | Path | None = None,
    watch: Watcher | None = None,
    until: int | None = None,
    grower: Grower | None = None,
) -> SolverState:
    """Run the search for candidates with a solver, step by step.

    The search evaluates the loss at regular steps. After each of these evaluation steps, candidates can be
    added or merged, and the time limit is checked.

    Args:
        solver: The solver, which runs the optimization of the attack.
        path: File for the state of the search. If the file holds a state, the search continues from that
            state.
        watch: Function that is called with the progress of the attack.
        until: Pause at the first evaluation step that is not before step ``until``. The search can continue
            from the returned state.
        grower: Object that adds and merges candidates, by default the result of :func:`make_grower`.

    Returns:
        The state at the end of the search.
    """
    config, path = solver.config, None if path is None else Path(path)
    grower = grower or make_grower(solver)
    start_time = last_save_time = time.monotonic()
    solver.deadline = start_time + config.seconds
    search_state = load_state(path, solver.fingerprint, config.device) or solver.start()
    try:
        while not search_state.stopped and (until is None or search_state.step < until):
            next_step = solver.next_evaluation_step(search_state.step)
            if grower is not None:
                next_step = min(next_step, grower.next_round_step(search_state.step))
            search_state = solver.solve(search_state, next_step)
            if grower is not None:
                search_state = grower.run_due_rounds(search_state)
            if watch is not None:
                watch(solver.progress(search_state))
            now = time.monotonic()
            if not search_state.stopped and now - start_time > config.seconds:
                search_state = search_state.replace(stopped="time")
            if path is not None and now - last_save_time > SAVE_EVERY:
                search_state.save(path)
                last_save_time = now
    finally:
        if path is not None:
            search_state.save(path)
    return search_state


def summarize_growth(
    grower: Grower | None, state: SolverState
) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...]]:
    """Describe which candidates were added during the search, and how close each run is to a local minimum.

    Args:
        grower: Object that adds and merges candidates, None if their number is fixed.
        state: State at the end of the search.

    Returns:
        The notes, and the second-order stationarity of every run (:meth:`Grower.stationarity`): gradient norm
        and smallest Hessian eigenvalue. Both are empty if ``grower`` is None.
    """
    if grower is None or state.population is None:
        return (), ()
    notes = [grower.note] if grower.note else []
    event_kinds = {event["kind"] for event in state.population.events}
    if grower.strategy.event not in event_kinds:
        cause = "no candidate was unstable" if event_kinds else "no round was due within the steps"
        notes.append(f"growth: no candidate was added, because {cause}")
    for run, reason in enumerate(state.population.stopped):
        if reason == "limit":
            notes.append(f"growth: restart {run} reached its limit of candidates and added no more")
    return tuple(notes), tuple(grower.stationarity(state))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten(0, 1).cpu()


class StationarityAttack(StationaritySettings, Attack):
    """Base class of attacks that search for samples whose weighted gradients add up to the weights."""


class Stationarity(StationarityAttack):
    """Attack that searches for samples that solve an equation for the weights, which its objective defines.

    Attributes:
        objective: Class that defines the target, the gradients and the multipliers of the equation.
        strategy: Method that adds candidates during the search, if the settings allow new candidates.
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
        """Return a variant of this attack for another equation (objective), with the name of that objective.

        Args:
            objective: Class of the objective.

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
        """Return this attack with another method that adds candidates during the search.

        Args:
            strategy: Method that adds candidates during the search.

        Returns:
            A subclass of this attack.
        """
        class_attributes = {"strategy": strategy, "derived_from": cls.derived_from or cls}
        return type(cls.__name__, (cls,), {"__module__": cls.__module__, **class_attributes})

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Return the parts from which pickle restores the attack.

        Pickle cannot store a class that :meth:`with_objective` or :meth:`with_strategy` created. The method
        therefore returns the named class, the replaced objective and strategy, and the settings.

        Returns:
            The function that restores the attack, and the arguments of this function.
        """
        attack_class, named_class = type(self), type(self).derived_from
        if named_class is None:
            return super().__reduce_ex__(protocol)
        has_own_objective = attack_class.objective is not getattr(named_class, "objective", None)
        objective = attack_class.objective if has_own_objective else None
        strategy = None if attack_class.strategy is named_class.strategy else attack_class.strategy
        settings = {name: getattr(self, name) for name in self.model_fields_set}
        return _restore, (named_class, objective, strategy, settings)

    @property
    def outside(self) -> bool:
        """Whether a plug-in package defines the equation (objective) of the attack."""
        return not self.objective.__module__.startswith("residuum.")

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply to a network.

        Args:
            surface: The attack surface, such as the released weights or the weight update.
            knowledge: What the attacker knows.

        Returns:
            The reason, "" if the attack applies.
        """
        reason = self.objective().why_not(surface.outputs, surface.task, knowledge)
        return reason or ("" if surface.name == self.surface else f"needs {self.surface}")

    def why_applies(self, surface: Surface) -> str:
        """Return a short reason why the attack applies to the network."""
        return self.objective().why_applies(surface)

    def why_skipped(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why an audit skips the attack although it applies.

        Args:
            surface: The attack surface, such as the released weights or the weight update.
            knowledge: What the attacker knows.

        Returns:
            The reason, "" if the audit does not skip the attack.
        """
        return self.objective().why_skipped(surface.task, knowledge)

    def resolve_settings(self, network: Network, knowledge: Knowledge) -> Attack:
        """Choose the settings that depend on the data: the number of candidates, and the priors (penalties).

        Args:
            network: The network that is attacked.
            knowledge: What the attacker knows.

        Returns:
            The attack with resolved settings.
        """
        for prior, _ in self.priors or ():
            require_known(prior, PRIORS, "No prior")
        attack = super().resolve_settings(network, knowledge)
        has_signed_multipliers = not self.objective.nonnegative
        defaults = default_settings(network, knowledge, self, self.surface, has_signed_multipliers)
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
        """Run all restarts (independent runs) of the attack together.

        If ``state_path`` holds a state, continue from this state.

        Args:
            surface: The attack surface, such as the released weights or the weight update.
            knowledge: What the attacker knows.
            state_path: File in which the state of the search is saved.
            watch: Function that is called with the progress of the attack.
            per_run: Settings of each restart (independent run), if they differ.

        Returns:
            The candidates of all restarts, with a selection.
        """
        start_time = time.monotonic()
        solver = self.solver(surface.checkpoint, knowledge, per_run)
        grower = make_grower(solver, self.strategy)
        final_state = search(solver, state_path, watch, grower=grower)
        run_count = self.restarts
        run_statuses = tuple(
            final_state.stopped if alive else "diverged" for alive in final_state.alive.tolist()
        )
        lam, x = solver.multipliers(final_state.best_lam), final_state.best_x
        candidate_population = final_state.population or Population.start(
            run_count, solver.problem.labels
        )
        has_candidate = candidate_population.best_active.cpu().flatten()
        notes, second_order = summarize_growth(grower, final_state)
        reconstruction = Reconstruction(
            attack=self.name,
            x=_flat(x)[has_candidate],
            labels=candidate_population.best_labels.cpu().flatten()[has_candidate],
            lam=_flat(lam)[has_candidate],
            run=torch.arange(run_count).repeat_interleave(x.shape[1])[has_candidate],
            steps=torch.tensor(final_state.steps),
            loss=torch.stack(final_state.loss, 1),
            layers=torch.stack(final_state.layers, 1),
            layer_names=solver.problem.layer_names,
            status=run_statuses,
            knowledge=knowledge,
            settings=self.to_json(),
            seconds=time.monotonic() - start_time,
            notes=notes,
            events=candidate_population.events,
            ident=candidate_population.best_ident.cpu().flatten()[has_candidate],
            second_order=second_order,
        )
        return reconstruction.replace(selection=select(reconstruction))

    def solver(
        self, network: Network, knowledge: Knowledge, per_run: Sequence[Attack] | None = None
    ) -> Solver:
        """Create the solver of this attack. Call :meth:`resolve_settings` on the attack first.

        Args:
            network: The network that is attacked.
            knowledge: What the attacker knows.
            per_run: Settings of each restart (independent run), if they differ.

        Returns:
            The solver before its first step.
        """
        objective = self.objective.from_settings(self, knowledge)
        shape = network.sample_shape(knowledge)
        outputs = network.architecture.outputs
        objective.check(outputs, knowledge)
        model = network.copy_module()
        run_settings = None if per_run is None else cast(Sequence[StationaritySettings], per_run)
        return Solver(
            model, objective, knowledge, self, shape, outputs, self.candidates, run_settings
        )

    def advance(
        self,
        network: Network,
        knowledge: Knowledge,
        state_path: Path,
        until: int,
        per_run: Sequence[Attack] | None = None,
    ) -> bool:
        """Run the search up to step ``until`` and save its state. :meth:`run` can continue from the state.

        Args:
            network: The network that is attacked.
            knowledge: What the attacker knows.
            state_path: File in which the state of the search is saved.
            until: Number of the step at which the search pauses.
            per_run: Settings of each restart (independent run), if they differ.

        Returns:
            True if the search is not complete.
        """
        attack = self.resolve_settings(network, knowledge)
        assert isinstance(attack, Stationarity)
        run_settings = (
            None if per_run is None else [r.resolve_settings(network, knowledge) for r in per_run]
        )
        solver = attack.solver(network, knowledge, run_settings)
        return not search(solver, state_path, until=until).stopped


def _restore(
    attack_class: type[Stationarity],
    objective: type[Objective] | None,
    strategy: GrowthStrategy | None,
    values: dict[str, Any],
) -> Stationarity:
    if objective is not None:
        attack_class = attack_class.with_objective(objective)
    if strategy is not None:
        attack_class = attack_class.with_strategy(strategy)
    return attack_class(**values)


class BinaryKKT(KKTSettings, Stationarity):
    """Attack on a binary classifier by the KKT equation of margin maximization (Haim et al. 2022)."""

    name: ClassVar[str] = "binary-kkt"
    objective: ClassVar[type[Objective]] = objectives.BinaryKKT


class MulticlassKKT(KKTSettings, Stationarity):
    """Attack on a classifier with several outputs by the KKT equation of margin maximization.

    See Buzaglo et al. 2023.
    """

    name: ClassVar[str] = "multiclass-kkt"
    objective: ClassVar[type[Objective]] = objectives.MulticlassKKT


class WeightDecay(Stationarity):
    """Attack on a network trained with weight decay (Buzaglo et al. 2023)."""

    name: ClassVar[str] = "weight-decay"
    objective: ClassVar[type[Objective]] = objectives.WeightDecay


class NTK(NTKSettings, Stationarity):
    """Attack on the weight update from known initial weights (Loo et al. 2024)."""

    name: ClassVar[str] = "ntk"
    surface: ClassVar[str] = CHANGE
    objective: ClassVar[type[Objective]] = objectives.NTK


class OptimizerState(Stationarity):
    """Attack on an optimizer state, which is a weighted sum of recent gradients."""

    name: ClassVar[str] = "moment"
    surface: ClassVar[str] = MOMENT
    objective: ClassVar[type[Objective]] = objectives.Moment


class Auto(StationarityAttack):
    """Attack that suits the network: for classifiers the class KKT, for regressions the class WeightDecay."""

    name: ClassVar[str] = "auto"

    def resolve_settings(self, network: Network, knowledge: Knowledge) -> Attack:
        """Choose the attack that suits the task of the network, and the settings that depend on the network.

        Args:
            network: The network that is attacked.
            knowledge: What the attacker knows.

        Returns:
            The attack with resolved settings.
        """
        network.check_weights()
        attack_classes: tuple[type[Stationarity], ...] = (BinaryKKT, MulticlassKKT, WeightDecay)
        attack_class = next(a for a in attack_classes if a.objective.task == network.inferred_task)
        return attack_class.like(self).resolve_settings(network, knowledge)


class KKT(KKTSettings, StationarityAttack):
    """Attack on the KKT equation of margin maximization, for networks with one output or several outputs."""

    name: ClassVar[str] = "kkt"

    def resolve_settings(self, network: Network, knowledge: Knowledge) -> Attack:
        """Choose the attack for one or several outputs, and the settings that depend on the network.

        Args:
            network: The network that is attacked.
            knowledge: What the attacker knows.

        Returns:
            The attack with resolved settings.
        """
        outputs = network.architecture.outputs
        attack_class = BinaryKKT if outputs == 1 else MulticlassKKT
        return attack_class.like(self).resolve_settings(network, knowledge)
