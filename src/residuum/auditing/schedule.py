"""Run every attack that applies, as planned before the audit (:mod:`.plan`).

Attacks with restarts run in batches, so that an interrupted audit continues. Baselines come last. An error of
one attack becomes a row that names it. It never ends the audit.
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
from residuum.surfaces.surface import WEIGHTS, Surface, build_surfaces, resolve_surface

if TYPE_CHECKING:
    from residuum.auditing.run import Audit
    from residuum.auditing.store import AuditStore

NO_TIME = "skipped: the clock stopped the audit"
TOO_EXPENSIVE = "skipped: it takes more than a baseline may"
MAX_REASON = 300  # characters of the error message of a plug-in
MIN_SECONDS = 1e-3  # that an attack is given: the solver needs a positive time limit


@dataclass(frozen=True, eq=False)
class AttackResults(Record):
    """The outputs of all attacks.

    Attributes:
        outcomes: One row per attack, deciding ones first.
        reconstructions: Of the deciding attacks, all restarts together.
        baselines: Reconstructions of the baselines.
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
    """Run the attacks. They see the network and the attacker's knowledge, never the samples."""
    schedule = AttackSchedule.of(audit)
    results = schedule.run()
    faults = {p.name: f"failed on import: {p.error}" for p in plugins.load() if p.error}
    faults |= {name: f"failed: {message}" for name, message in plugins.faults.items()}
    plugins.faults.clear()  # reported once
    rows = [AttackOutcome(name, True, True, False, reason) for name, reason in faults.items()]
    is_canonical = audit.case.attacked is not audit.case.audited
    results = results.replace(
        outcomes=(*results.outcomes, *rows),
        reconstructions=tuple(r.replace(canonical=is_canonical) for r in results.reconstructions),
    )
    return replace(audit, attacks=results)


def selected_attacks(request: AuditRequest, knowledge: Knowledge) -> dict[str, Attack]:
    """Return the attacks that the request asks for, by name, baselines last.

    Args:
        request: Settings of the audit.
        knowledge: What the attacker knows.

    Returns:
        The attacks with their settings: those of the preset, of the request, and of the attack itself.

    Raises:
        InputError: If the request names an attack or a surface that is not known.
    """
    requested = requested_settings(request)
    surface = "" if request.surface == "all" else resolve_surface(request.surface, knowledge)
    selected = {
        name: configured_attack(kind, request, requested.get(name, {}))
        for name, kind in every_attack().items()
        if (request.baselines or not kind.is_baseline)
        and (not requested or name in requested)
        and (not surface or kind.surface == surface)
    }
    return dict(sorted(selected.items(), key=lambda item: item[1].is_baseline))


def requested_settings(request: AuditRequest) -> dict[str, dict[str, Any]]:
    """Return the settings of the attacks that the request names; {} if it names none.

    Raises:
        InputError: If there is no attack of that name.
    """
    settings: dict[str, dict[str, Any]] = {}
    for entry in request.attacks:
        values = {"attack": entry} if isinstance(entry, str) else dict(entry)
        name = str(values.pop("attack", ""))
        attack_class(name)
        settings |= dict.fromkeys(CHOICES.get(name, (name,)), values)
    return settings


def configured_attack(
    kind: type[Attack], request: AuditRequest, settings: Mapping[str, Any]
) -> Attack:
    """Return an attack with the settings of the preset, of the request, and its own.

    Baselines do not use the preset and the steps of the request.
    """
    values: dict[str, Any] = {} if kind.is_baseline else dict(PRESETS[request.preset].settings)
    values |= {"seed": request.seed, "device": request.device}
    if request.steps is not None and not kind.is_baseline:
        values["steps"] = request.steps
    return kind(**{**kind.select_settings(values), **settings})


def skipped_attacks(
    attacks: dict[str, Attack],
    surfaces_of: dict[str, Surface],
    knowledge: Knowledge,
    requested: Collection[str],
) -> dict[str, AttackOutcome]:
    """Return a row with the reason for every attack that does not apply, or that an audit leaves out.

    An attack that is requested by name is not left out.
    """
    rows: dict[str, AttackOutcome] = {}
    for name, attack in attacks.items():
        with _own_fault(name, attack, rows):
            why_not = attack.why_not(surfaces_of[name], knowledge)
            left_out = "" if name in requested else attack.why_skipped(surfaces_of[name], knowledge)
            if reason := why_not or left_out:
                rows[name] = AttackOutcome(name, not attack.is_baseline, not why_not, False, reason)
    return rows


def surfaces_of_attacks(
    attacks: dict[str, Attack], network: Network, knowledge: Knowledge
) -> dict[str, Surface]:
    """Return the surface that each attack works on; the weights if its own surface is missing."""
    present = build_surfaces(network, knowledge)
    return {name: present.get(attack.surface, present[WEIGHTS]) for name, attack in attacks.items()}


@dataclass(frozen=True)
class AttackSchedule:
    """The attacks of an audit on one network.

    Attributes:
        network: The network that is attacked.
        knowledge: What the attacker knows.
        request: Settings of the audit.
        store: Keeps finished batches, so that an interrupted audit continues.
        listener: Is told about the progress.
        deadline: Time at which the clock stops the attacks.
    """

    network: Network
    knowledge: Knowledge
    request: AuditRequest
    store: AuditStore | None = None
    listener: AuditListener = SILENT
    deadline: Deadline = NO_DEADLINE

    @classmethod
    def of(cls, audit: Audit) -> AttackSchedule:
        """Return the schedule of an audit."""
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
        return selected_attacks(self.request, self.knowledge)

    @cached_property
    def surfaces(self) -> dict[str, Surface]:
        """The surface of every attack, by name."""
        return surfaces_of_attacks(self.attacks, self.network, self.knowledge)

    def skipped(self) -> dict[str, AttackOutcome]:
        """Return a row with the reason for every attack that does not apply or is left out."""
        requested = requested_settings(self.request)
        return skipped_attacks(self.attacks, self.surfaces, self.knowledge, requested)

    def plan(self, rows: dict[str, AttackOutcome]) -> dict[str, AttackPlan]:
        """Return the plan of every attack that has no row yet. An attack that fails here gets one."""
        attacks = {name: attack for name, attack in self.attacks.items() if name not in rows}
        while True:
            try:
                return plan_attacks(
                    attacks,
                    self.surfaces,
                    self.network,
                    self.knowledge,
                    self.request,
                    requested_settings(self.request),
                )
            except PlanError as problem:
                with _own_fault(problem.name, attacks.pop(problem.name), rows):
                    raise problem.cause from None

    def run(self) -> AttackResults:
        """Run all attacks that apply."""
        rows = self.skipped()
        plans = self.plan(rows)
        self.listener.message(forecast(plans, self.request))
        reconstructions: dict[str, Reconstruction] = {}
        done: list[Batch] = []
        for name, plan in plans.items():
            attack, reason = self.attacks[name], self.reason_to_skip(name, plan)
            if reason:
                rows[name] = AttackOutcome(
                    name, not attack.is_baseline, True, False, reason, unfinished=plan.left_out
                )
                continue
            with _own_fault(name, attack, rows):
                result, batches = self._reconstruct(name, plan)
                row = outcome_of(attack, self.surfaces[name], result)
                rows[name] = row.replace(unfinished=plan.left_out)
                reconstructions[name] = result
                done.extend(batches)
        deciding = [name for name, attack in self.attacks.items() if not attack.is_baseline]
        return AttackResults(
            # A baseline that does not apply is no loss. One that failed is reported.
            tuple(rows[n] for n in self.attacks if n in deciding or rows[n].applies),
            tuple(reconstructions[n] for n in deciding if n in reconstructions),
            tuple(r for n, r in reconstructions.items() if n not in deciding),
            tuple(done),
            plans,
        )

    def repeat(self, name: str, plan: AttackPlan) -> Reconstruction | None:
        """Run an attack on this network as planned for another.

        Args:
            name: The attack.
            plan: Its plan.

        Returns:
            The reconstruction, None if the attack does not apply to this network.
        """
        if self.attacks[name].why_not(self.surfaces[name], self.knowledge):
            return None
        return self._reconstruct(name, plan)[0]

    def reason_to_skip(self, name: str, plan: AttackPlan) -> str:
        """Return why a planned attack does not run, "" if it runs."""
        if self.deadline.is_over:
            return NO_TIME
        if plan.runs:
            return ""
        if self.attacks[name].is_baseline:
            return TOO_EXPENSIVE
        return f"left out: {plan.left_out}"

    def _reconstruct(self, name: str, plan: AttackPlan) -> tuple[Reconstruction, list[Batch]]:
        """Run one attack and return its candidates and its batches."""
        attack, surface = self.attacks[name], self.surfaces[name]
        seconds_left = max(self.deadline.left, MIN_SECONDS)
        if attack.pace != "batches":
            seconds = plan.seconds if attack.pace == "sized" else seconds_left
            attack = attack.changed(seconds=seconds)
            if plan.restarts and isinstance(attack, RestartSettings):
                attack = attack.changed(restarts=plan.restarts)
            return attack.run(surface, self.knowledge), []
        results: list[Reconstruction] = []
        batches: list[Batch] = []
        for batch in plan.batches(attack):
            if results and self.deadline.is_over:
                break
            restarts = sum(earlier.restarts for earlier in batches)
            results.append(self._run_batch(attack, surface, batch, restarts, plan.restarts))
            batches.append(batch)
        result = merged(results)
        if len(batches) < len(plan.batches(attack)):
            result = result.replace(status=(*result.status[:-1], "time"))
        return result, batches

    def _run_batch(
        self, attack: Attack, surface: Surface, batch: Batch, done: int, total: int
    ) -> Reconstruction:
        """Run one batch, continue it, or read it back if it is finished."""
        if self.store and (finished := self.store.load(batch)) is not None:
            return finished
        attack = batch.of(attack).changed(seconds=max(self.deadline.left, MIN_SECONDS))
        watch = self.listener.watch_attack(batch.attack, done, total)
        state = self.store.state(batch) if self.store else None
        result = attack.run(surface, self.knowledge, state_path=state, watch=watch)
        if self.store:
            self.store.save(batch, result)
        return result


@contextmanager
def _own_fault(name: str, attack: Attack, rows: dict[str, AttackOutcome]) -> Iterator[None]:
    """Turn an error of one attack into its row, if the other attacks can go on."""

    def record(applies: bool, reason: str) -> None:
        decides = not attack.is_baseline
        rows[name] = AttackOutcome(name, decides, applies, False, reason[:MAX_REASON])

    try:
        yield
    except PluginError as problem:
        record(True, f"failed: {problem.message}")
    except InputError as problem:  # the user can correct what an attack of this package refuses
        if attack.pace == "batches" and not attack.is_plugin:
            raise
        record(attack.is_plugin, problem.message)
    except Exception as problem:  # a plug-in's fault says nothing about the network
        if not attack.is_plugin:
            raise
        record(True, f"failed: {type(problem).__name__}: {problem}")


def merged(batches: list[Reconstruction]) -> Reconstruction:
    """Return the batches of one attack as one reconstruction, selected anew over all restarts.

    The selection counts agreement between restarts, so restarts are numbered on.
    """
    if len(batches) == 1:
        return batches[0]
    offsets = [sum(batch.restarts for batch in batches[:i]) for i in range(len(batches))]
    names = ("x", "labels", "lam", "loss", "layers")
    result = batches[0].replace(
        **{name: torch.cat([getattr(batch, name) for batch in batches]) for name in names},
        run=torch.cat([b.run + offset for b, offset in zip(batches, offsets, strict=True)]),
        status=tuple(status for batch in batches for status in batch.status),
        settings={**batches[0].settings, "restarts": sum(batch.restarts for batch in batches)},
        selection=None,
        seconds=sum(batch.seconds for batch in batches),
        notes=tuple(dict.fromkeys(note for batch in batches for note in batch.notes)),
    )
    return result.replace(selection=select(result))


def outcome_of(attack: Attack, surface: Surface, result: Reconstruction) -> AttackOutcome:
    """Return the row of an attack that ran, with the residuals of its best restart."""
    measured = attack.has_residual and (attack.pace == "batches" or not attack.is_plugin)
    fit = measure_fit(surface, result) if measured else WeightFit()
    return AttackOutcome(
        result.attack,
        not attack.is_baseline,
        True,
        True,
        reason_to_run(attack, surface),
        surface=surface.name,
        restarts=result.restarts,
        steps=int(result.steps[-1]) if len(result.steps) else 0,
        candidates=len(result.x),
        diverged=sum(status == "diverged" for status in result.status),
        residual=fit.worst,
        **vars(fit),
        seconds=result.seconds,
    )


def reason_to_run(attack: Attack, surface: Surface) -> str:
    """Return why an attack applies, in a few words."""
    if attack.is_baseline:
        return "a baseline: reported, never deciding"
    return attack.why_applies(surface)
