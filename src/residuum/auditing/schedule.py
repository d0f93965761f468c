"""Run every attack that applies, by the plan that was made before the audit (:mod:`.plan`).

Attacks with restarts run in batches, so that an interrupted audit can continue. Baselines run last. If an
attack raises an error, the audit continues, and the table of attacks shows the error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from residuum import plugins
from residuum.attacks import PRESETS, Attack, attack_class, every_attack, select
from residuum.attacks.registry import CHOICES
from residuum.attacks.stationarity.solution import WeightFit, measure_fit
from residuum.auditing.listener import SILENT, AuditListener
from residuum.auditing.outcomes import AttackOutcome
from residuum.auditing.plan import (
    NO_DEADLINE,
    AttackPlan,
    Batch,
    Deadline,
    PlanError,
    forecast,
    plan_attacks,
)
from residuum.auditing.request import AuditRequest
from residuum.errors import InputError, PluginError
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction, Record
from residuum.settings import RestartSettings
from residuum.surfaces.surface import (
    WEIGHTS,
    Surface,
    build_surfaces,
    list_surfaces,
    resolve_surface,
)

if TYPE_CHECKING:
    from residuum.auditing.run import Audit
    from residuum.auditing.store import AuditStore

NO_TIME = "skipped: the time limit stopped the audit"
TOO_EXPENSIVE = "skipped: too expensive for a baseline under this budget"
MAX_REASON = 300  # largest number of characters that a row shows of an error message
MIN_SECONDS = 1e-3  # shortest time limit of an attack, because the solver needs a positive limit


@dataclass(frozen=True, eq=False)
class AttackResults(Record):
    """The outputs of all attacks.

    Attributes:
        outcomes: One row per attack. Deciding attacks, which are all attacks except baselines, come first.
        reconstructions: Reconstructions of the deciding attacks, each with the candidates of all restarts.
        baselines: Reconstructions of the baselines, which do not enter the verdict.
        batches: The batches of restarts that ran.
        plans: The plan of every attack, by name.
    """

    outcomes: tuple[AttackOutcome, ...] = ()
    reconstructions: tuple[Reconstruction, ...] = ()
    baselines: tuple[Reconstruction, ...] = ()
    batches: tuple[Batch, ...] = ()
    plans: dict[str, AttackPlan] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of plug-ins and attacks that raised an error."""
        return tuple(row.name for row in self.outcomes if row.reason.startswith("failed"))


def run_attacks(audit: Audit) -> Audit:
    """Return the audit, extended by the outputs of all attacks.

    The attacks read the network and the attacker's knowledge. They never read the samples.
    """
    schedule = AttackSchedule.for_audit(audit)
    attack_results = schedule.run()
    error_by_name = {p.name: f"failed on import: {p.error}" for p in plugins.load() if p.error}
    error_by_name |= {name: f"failed: {message}" for name, message in plugins.faults.items()}
    plugins.faults.clear()  # so that the next audit does not report these errors again
    error_rows = [
        AttackOutcome(name, True, True, False, reason) for name, reason in error_by_name.items()
    ]
    was_rescaled = audit.case.attacked is not audit.case.audited
    attack_results = attack_results.replace(
        outcomes=(*attack_results.outcomes, *error_rows),
        reconstructions=tuple(
            r.replace(canonical=was_rescaled) for r in attack_results.reconstructions
        ),
    )
    return replace(audit, attacks=attack_results)


def select_attacks(request: AuditRequest, knowledge: Knowledge) -> dict[str, Attack]:
    """Return the attacks that the request asks for, by name, baselines last.

    An unknown attack or attack surface raises an ``InputError``.

    Args:
        request: Settings of the audit.
        knowledge: What the attacker knows.

    Returns:
        The attacks by name. If several sources set the same setting of an attack, the value that the user
        passed for this attack is used. If there is none, the value in the request is used, then the value in
        the preset.

    Raises:
        InputError: If none of the attacks applies to an update.
    """
    requested = read_requested_settings(request)
    surface = "" if request.surface == "all" else resolve_surface(request.surface, knowledge)
    selected = {
        name: configure_attack(kind, request, requested.get(name, {}))
        for name, kind in every_attack().items()
        if (request.baselines or not kind.is_baseline)
        and (not requested or name in requested)
        and (not surface or kind.surface == surface)
        and (knowledge.update is None or kind.surface in list_surfaces(knowledge))
    }
    if not selected and knowledge.update is not None:
        raise InputError(
            f"None of the attacks {', '.join(requested)} applies to an update, because they attack weights.",
            "Omit --attacks and --surface.",
        )
    return dict(sorted(selected.items(), key=lambda item: item[1].is_baseline))


def read_requested_settings(request: AuditRequest) -> dict[str, dict[str, Any]]:
    """Return the settings of the attacks that the user names, by name of the attack, {} if there are none."""
    settings: dict[str, dict[str, Any]] = {}
    for entry in request.attacks:
        attack_settings = {"attack": entry} if isinstance(entry, str) else dict(entry)
        name = str(attack_settings.pop("attack", ""))
        attack_class(name)
        settings |= dict.fromkeys(CHOICES.get(name, (name,)), attack_settings)
    return settings


def configure_attack(
    kind: type[Attack], request: AuditRequest, settings: Mapping[str, Any]
) -> Attack:
    """Create an attack with the settings of the user, of the audit and of the preset.

    Values in ``settings`` replace values in ``request``, and values in ``request`` replace values in the
    preset. Baselines ignore the preset and ``request.steps``.

    Args:
        kind: The class of the attack.
        request: Settings of the audit.
        settings: Settings that the user passed for this attack.

    Returns:
        The attack.
    """
    default_settings: dict[str, Any] = (
        {} if kind.is_baseline else dict(PRESETS[request.preset].settings)
    )
    default_settings |= {"seed": request.seed, "device": request.device}
    if request.steps is not None and not kind.is_baseline:
        default_settings["steps"] = request.steps
    return kind(**{**kind.select_settings(default_settings), **settings})


def list_skipped_attacks(
    attacks: dict[str, Attack],
    surfaces_by_name: dict[str, Surface],
    knowledge: Knowledge,
    requested: Collection[str],
) -> dict[str, AttackOutcome]:
    """Return a table row with the reason for every attack that will not run.

    Args:
        attacks: The attacks, by name.
        surfaces_by_name: The attack surface of each attack.
        knowledge: What the attacker knows.
        requested: Names of attacks that the user asks for. If such an attack applies, it runs.

    Returns:
        One row of the table of attacks for each skipped attack, by name.
    """
    row_by_attack: dict[str, AttackOutcome] = {}
    for name, attack in attacks.items():
        with _record_error(name, attack, row_by_attack):
            why_inapplicable = attack.why_not(surfaces_by_name[name], knowledge)
            why_omitted = (
                "" if name in requested else attack.why_skipped(surfaces_by_name[name], knowledge)
            )
            if reason := why_inapplicable or why_omitted:
                row_by_attack[name] = AttackOutcome(
                    name, not attack.is_baseline, not why_inapplicable, False, reason
                )
    return row_by_attack


def find_surfaces(
    attacks: dict[str, Attack], network: Network, knowledge: Knowledge
) -> dict[str, Surface]:
    """Return the attack surface (part of the release) that each attack works on.

    If the release does not have the attack surface of an attack, the weights are returned instead.

    Args:
        attacks: The attacks, by name.
        network: The network that is attacked.
        knowledge: What the attacker knows.

    Returns:
        The attack surfaces, by name of the attack.
    """
    available_surfaces = build_surfaces(network, knowledge)
    default_surface = available_surfaces.get(WEIGHTS, next(iter(available_surfaces.values())))
    return {
        name: available_surfaces.get(attack.surface, default_surface)
        for name, attack in attacks.items()
    }


@dataclass(frozen=True)
class AttackSchedule:
    """The attacks of an audit on one network, with the plan of their work.

    Attributes:
        network: The network that is attacked.
        knowledge: What the attacker knows.
        request: Settings of the audit.
        store: Keeps finished batches, so that an interrupted audit can continue.
        listener: Receives the progress of the attacks.
        deadline: The time at which the attacks must end.
    """

    network: Network
    knowledge: Knowledge
    request: AuditRequest
    store: AuditStore | None = None
    listener: AuditListener = SILENT
    deadline: Deadline = NO_DEADLINE

    @classmethod
    def for_audit(cls, audit: Audit) -> AttackSchedule:
        """Create the schedule that runs the attacks of an audit on its network."""
        return cls(
            network=audit.case.attacked,
            knowledge=audit.case.knowledge,
            request=audit.request,
            store=audit.store,
            listener=audit.listener,
            deadline=audit.deadline,
        )

    @cached_property
    def attacks(self) -> dict[str, Attack]:
        """The attacks with their settings, by name."""
        return select_attacks(self.request, self.knowledge)

    @cached_property
    def surfaces(self) -> dict[str, Surface]:
        """The attack surface (part of the model that is attacked) of every attack, by name of the attack."""
        return find_surfaces(self.attacks, self.network, self.knowledge)

    def skipped(self) -> dict[str, AttackOutcome]:
        """Return a table row with the reason for every attack that does not run."""
        requested = read_requested_settings(self.request)
        return list_skipped_attacks(self.attacks, self.surfaces, self.knowledge, requested)

    def plan(self, rows: dict[str, AttackOutcome]) -> dict[str, AttackPlan]:
        """Return the plans of the work of all attacks that are not skipped.

        ``rows`` holds the table rows of the skipped attacks, by name of the attack. If an attack raises an
        error while it is planned, a row with the error is added to ``rows``.
        """
        attacks_to_plan = {
            name: attack for name, attack in self.attacks.items() if name not in rows
        }
        while True:
            try:
                return plan_attacks(
                    attacks_to_plan,
                    self.surfaces,
                    self.network,
                    self.knowledge,
                    self.request,
                    read_requested_settings(self.request),
                )
            except PlanError as problem:
                with _record_error(problem.name, attacks_to_plan.pop(problem.name), rows):
                    raise problem.cause from None

    def run(self) -> AttackResults:
        """Run all attacks that apply to the network, as planned, and return their outputs."""
        row_by_attack = self.skipped()
        plans = self.plan(row_by_attack)
        self.listener.message(forecast(plans, self.request))
        reconstructions: dict[str, Reconstruction] = {}
        finished_batches: list[Batch] = []
        for name, plan in plans.items():
            attack, reason = self.attacks[name], self.reason_to_skip(name, plan)
            if reason:
                row_by_attack[name] = AttackOutcome(
                    name, not attack.is_baseline, True, False, reason, unfinished=plan.left_out
                )
                continue
            with _record_error(name, attack, row_by_attack):
                result, batches = self._reconstruct(name, plan)
                outcome_row = make_outcome(attack, self.surfaces[name], result)
                row_by_attack[name] = outcome_row.replace(unfinished=plan.left_out)
                reconstructions[name] = result
                finished_batches.extend(batches)
        deciding_attacks = [name for name, attack in self.attacks.items() if not attack.is_baseline]
        return AttackResults(
            # A baseline (a simple attack for comparison) that does not apply gets no row in the table. A
            # baseline that failed gets a row with its error.
            tuple(
                row_by_attack[n]
                for n in self.attacks
                if n in deciding_attacks or row_by_attack[n].applies
            ),
            tuple(reconstructions[n] for n in deciding_attacks if n in reconstructions),
            tuple(r for n, r in reconstructions.items() if n not in deciding_attacks),
            tuple(finished_batches),
            plans,
        )

    def repeat(self, name: str, plan: AttackPlan) -> Reconstruction | None:
        """Run an attack on this network with a plan that was made for another network.

        Positive controls are attacked in this way, with the plan for the audited network.

        Args:
            name: Name of the attack.
            plan: The plan that was made for the other network.

        Returns:
            The reconstruction, None if the attack does not apply to this network.
        """
        if self.attacks[name].why_not(self.surfaces[name], self.knowledge):
            return None
        return self._reconstruct(name, plan)[0]

    def reason_to_skip(self, name: str, plan: AttackPlan) -> str:
        """Return why a planned attack does not run.

        Args:
            name: Name of the attack.
            plan: The plan of the attack.

        Returns:
            The reason to skip the attack, "" if the attack runs.
        """
        if self.deadline.is_over:
            return NO_TIME
        if plan.runs:
            return ""
        if self.attacks[name].is_baseline:
            return TOO_EXPENSIVE
        return f"left out: {plan.left_out}"

    def _reconstruct(self, name: str, plan: AttackPlan) -> tuple[Reconstruction, list[Batch]]:
        """Return the reconstruction of one attack, and the batches of restarts (runs) that were computed."""
        attack, surface = self.attacks[name], self.surfaces[name]
        seconds_left = max(self.deadline.seconds_left, MIN_SECONDS)
        if attack.pace != "batches":
            seconds = plan.seconds if attack.pace == "sized" else seconds_left
            attack = attack.changed(seconds=seconds)
            if plan.restarts and isinstance(attack, RestartSettings):
                attack = attack.changed(restarts=plan.restarts)
            return attack.run(surface, self.knowledge), []
        batch_results: list[Reconstruction] = []
        batches: list[Batch] = []
        for batch in plan.batches(attack):
            if batch_results and self.deadline.is_over:
                break
            restarts_done = sum(earlier.restarts for earlier in batches)
            batch_results.append(
                self._run_batch(attack, surface, batch, restarts_done, plan.restarts)
            )
            batches.append(batch)
        reconstruction = merge_batches(batch_results)
        if len(batches) < len(plan.batches(attack)):
            # The time limit stopped the attack, so the last restart gets the status "time".
            reconstruction = reconstruction.replace(status=(*reconstruction.status[:-1], "time"))
        return reconstruction, batches

    def _run_batch(
        self, attack: Attack, surface: Surface, batch: Batch, done: int, total: int
    ) -> Reconstruction:
        """Return the output of one batch of restarts (runs from different random candidates).

        If the batch finished before an interruption of the audit, its saved output is returned. If the batch
        was interrupted, it continues. Otherwise the batch is run.
        """
        if self.store and (finished := self.store.load(batch)) is not None:
            return finished
        attack = batch.apply_to(attack).changed(
            seconds=max(self.deadline.seconds_left, MIN_SECONDS)
        )
        watch = self.listener.watch_attack(batch.attack, done, total)
        state_path = self.store.state(batch) if self.store else None
        reconstruction = attack.run(surface, self.knowledge, state_path=state_path, watch=watch)
        if self.store:
            self.store.save(batch, reconstruction)
        return reconstruction


@contextmanager
def _record_error(name: str, attack: Attack, rows: dict[str, AttackOutcome]) -> Iterator[None]:
    """Write an error of an attack into the table row of the attack, so that the audit continues."""

    def record(applies: bool, reason: str) -> None:
        can_decide = not attack.is_baseline
        rows[name] = AttackOutcome(name, can_decide, applies, False, reason[:MAX_REASON])

    try:
        yield
    except PluginError as problem:
        record(True, f"failed: {problem.message}")
    except InputError as problem:  # end the audit, so that the user can correct the wrong input
        if attack.pace == "batches" and not attack.is_plugin:
            raise
        record(attack.is_plugin, problem.message)
    except Exception as problem:  # the audit continues only after errors of plug-ins
        if not attack.is_plugin:
            raise
        record(True, f"failed: {type(problem).__name__}: {problem}")


def merge_batches(batches: list[Reconstruction]) -> Reconstruction:
    """Return the outputs of all batches of restarts of one attack as one reconstruction.

    Afterwards, likely training samples are selected among the candidates of all restarts.
    """
    if len(batches) == 1:
        return batches[0]
    # A candidate is selected if several restarts found it. To tell the restarts apart, the restarts of all
    # batches are numbered consecutively.
    offsets = [sum(batch.restarts for batch in batches[:i]) for i in range(len(batches))]
    tensor_fields = ("x", "labels", "lam", "loss", "layers")
    merged = batches[0].replace(
        **{name: torch.cat([getattr(batch, name) for batch in batches]) for name in tensor_fields},
        run=torch.cat([b.run + offset for b, offset in zip(batches, offsets, strict=True)]),
        status=tuple(status for batch in batches for status in batch.status),
        settings={**batches[0].settings, "restarts": sum(batch.restarts for batch in batches)},
        selection=None,
        seconds=sum(batch.seconds for batch in batches),
        notes=tuple(dict.fromkeys(note for batch in batches for note in batch.notes)),
    )
    return merged.replace(selection=select(merged))


def make_outcome(attack: Attack, surface: Surface, result: Reconstruction) -> AttackOutcome:
    """Return the table row of an attack that ran, with the errors of its best restart (run).

    A residual is the share of the weights of a layer that the reconstruction does not fit.

    Args:
        attack: The attack.
        surface: The attack surface (part of the release) that the attack worked on.
        result: The reconstruction of the attack.

    Returns:
        The row of the attack.
    """
    has_residuals = attack.has_residual and (attack.pace == "batches" or not attack.is_plugin)
    weight_fit = measure_fit(surface, result) if has_residuals else WeightFit()
    return AttackOutcome(
        result.attack,
        not attack.is_baseline,
        True,
        True,
        reason_to_run(attack, surface),
        surface=surface.label or surface.name,
        restarts=result.restarts,
        steps=int(result.steps[-1]) if len(result.steps) else 0,
        candidates=len(result.x),
        diverged=sum(status == "diverged" for status in result.status),
        residual=weight_fit.worst,
        **vars(weight_fit),
        seconds=result.seconds,
    )


def reason_to_run(attack: Attack, surface: Surface) -> str:
    """Return why an attack applies to the network.

    Args:
        attack: The attack.
        surface: The attack surface (part of the release) that the attack works on.

    Returns:
        The reason in a few words.
    """
    if attack.is_baseline:
        return "a baseline, which does not enter the verdict"
    return attack.why_applies(surface)
