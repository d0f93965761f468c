"""Run every attack that applies, within its share of the time budget.

Attacks that run once come first and leave what they do not need. Batches of restarts fill the rest in equal
shares, planned from timed steps. Baselines come last. A fault of one attack becomes a row that names it.
It never ends the audit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from residuum import plugins
from residuum.attacks import PRESETS, Attack, attack_class, every_attack, select
from residuum.attacks.base import MIN_CANDIDATES
from residuum.attacks.registry import CHOICES
from residuum.attacks.stationarity.attack import Stationarity
from residuum.attacks.stationarity.objectives import permuted
from residuum.attacks.stationarity.solution import Explained, explained
from residuum.auditing.budget import (
    ATTACK_SHARE,
    BASELINE_SHARE,
    LEAST_BASELINE,
    MAX_RESTARTS,
    PARTS,
    Allowance,
    Batch,
    Plan,
    first_batch,
    forecast,
    next_batch,
)
from residuum.auditing.listener import SILENT, AuditListener
from residuum.auditing.request import AuditRequest
from residuum.auditing.verdict import AttackOutcome
from residuum.errors import InputError, PluginError
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction, Record
from residuum.settings import SearchSettings
from residuum.surfaces.surface import WEIGHTS, Surface, chosen, surfaces

if TYPE_CHECKING:
    from residuum.auditing.run import Audit
    from residuum.auditing.store import AuditStore

SHOWS_LEAKS_ONLY = "it leaves no residual, so what it does not find says nothing"
OUT_OF_TIME = "skipped: time budget exhausted"
MAX_REASON = 300  # characters of the error message of a plug-in
MAX_BASELINE = 3.0  # times its share: a baseline that takes longer is skipped
MIN_SECONDS = 1e-3  # that an attack is given: the solver needs a positive time limit


@dataclass(frozen=True, eq=False)
class AttackResults(Record):
    """The outputs of all attacks.

    Attributes:
        outcomes: One row per attack, deciding ones first.
        reconstructions: Of the deciding attacks, all restarts together.
        baselines: Reconstructions of the baselines.
        batches: The batches of restarts that ran.
        budget_needed: Estimate of the seconds at which every attack finishes its plan.
    """

    outcomes: tuple[AttackOutcome, ...] = ()
    reconstructions: tuple[Reconstruction, ...] = ()
    baselines: tuple[Reconstruction, ...] = ()
    batches: tuple[Batch, ...] = ()
    budget_needed: float | None = None

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
        budget_needed=schedule.budget_for_full_plan(results),
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
    surface = "" if request.surface == "all" else chosen(request.surface, knowledge)
    selected = {
        name: configured_attack(kind, request, requested.get(name, {}))
        for name, kind in every_attack().items()
        if (request.baselines or not kind.baseline)
        and (not requested or name in requested)
        and (not surface or kind.surface == surface)
    }
    return dict(sorted(selected.items(), key=lambda item: item[1].baseline))


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
    values: dict[str, Any] = {} if kind.baseline else dict(PRESETS[request.preset].settings)
    values |= {"seed": request.seed, "device": request.device}
    if request.steps is not None and not kind.baseline:
        values["steps"] = request.steps
    return kind(**{**kind.shared(values), **settings})


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
            left_out = "" if name in requested else attack.left_out(surfaces_of[name], knowledge)
            if reason := why_not or left_out:
                rows[name] = AttackOutcome(name, not attack.baseline, not why_not, False, reason)
    return rows


def surfaces_of_attacks(
    attacks: dict[str, Attack], network: Network, knowledge: Knowledge
) -> dict[str, Surface]:
    """Return the surface that each attack works on; the weights if its own surface is missing."""
    present = surfaces(network, knowledge)
    return {name: present.get(attack.surface, present[WEIGHTS]) for name, attack in attacks.items()}


@dataclass(frozen=True)
class AttackSchedule:
    """The attacks of an audit and their share of the time.

    Attributes:
        network: The network that is attacked.
        knowledge: What the attacker knows.
        request: Settings of the audit.
        store: Keeps finished batches, so that an interrupted audit continues.
        listener: Is told about the progress.
        sample_count: Number of training samples, for the forecast. No attack sees it.
        clock: Time until the attacks must end.
    """

    network: Network
    knowledge: Knowledge
    request: AuditRequest
    store: AuditStore | None = None
    listener: AuditListener = SILENT
    sample_count: int = 0
    clock: Allowance = field(default_factory=lambda: Allowance(math.inf))

    @classmethod
    def of(cls, audit: Audit) -> AttackSchedule:
        """Return the schedule of an audit."""
        return cls(
            network=audit.case.attacked,
            knowledge=audit.case.knowledge,
            request=audit.request,
            store=audit.store,
            listener=audit.listener,
            sample_count=0 if audit.case.train is None else len(audit.case.train),
            clock=audit.budget.attacks,
        )

    @cached_property
    def attacks(self) -> dict[str, Attack]:
        """The attacks with their settings, by name."""
        return selected_attacks(self.request, self.knowledge)

    @property
    def repeats(self) -> bool:
        """Whether recorded batches are repeated, which have no clock."""
        return bool(self.request.batches)

    def run(self) -> AttackResults:
        """Run all attacks that apply."""
        attacks = self.attacks
        surfaces_of = surfaces_of_attacks(attacks, self.network, self.knowledge)
        requested = requested_settings(self.request)
        rows = skipped_attacks(attacks, surfaces_of, self.knowledge, requested)
        timed = [n for n, a in attacks.items() if not a.baseline and a.pace != "formula"]
        timed = [name for name in timed if name not in rows]
        reconstructions: dict[str, Reconstruction] = {}
        done: list[Batch] = []

        def run_one(name: str, plan: Plan | None, share: float) -> None:
            attack = attacks[name]
            if attack.baseline and self.clock.left <= 0:
                rows[name] = AttackOutcome(name, False, True, False, OUT_OF_TIME)
                return
            with _own_fault(name, attack, rows):
                result, batches = self._reconstruct(name, attack, surfaces_of[name], plan, share)
                cut = self._unfinished(batches, result) if attack.pace == "batches" else ""
                row = outcome_of(attack, surfaces_of[name], result)
                rows[name] = row.replace(unfinished=cut)
                reconstructions[name] = result
                done.extend(batches)

        budget = ATTACK_SHARE * self.request.seconds
        left, weights = budget, sum(attacks[name].part for name in timed)
        batched = [name for name in timed if attacks[name].pace == "batches"]
        for name in timed:
            if name not in batched:  # the same for the same budget
                run_one(name, None, budget * attacks[name].part / weights)
                left -= reconstructions[name].seconds if name in reconstructions else 0.0
        share = max(left, 0.0) / max(1, len(batched))
        plans = {} if self.repeats else self._plans(attacks, batched, share, rows)
        if not self.repeats:
            self.listener.message(
                forecast(self.request.seconds, list(plans.values()), self.sample_count)
            )
        for name in attacks:
            if name not in rows:
                run_one(name, plans.get(name), share)
        deciding = [name for name, attack in attacks.items() if not attack.baseline]
        return AttackResults(
            # A baseline that does not apply is no loss. One that failed is reported.
            tuple(rows[n] for n in attacks if n in deciding or rows[n].applies),
            tuple(reconstructions[n] for n in deciding if n in reconstructions),
            tuple(r for n, r in reconstructions.items() if n not in deciding),
            tuple(done),
        )

    def plan(self, names: list[str]) -> list[Plan]:
        """Return the first batch of each of these attacks, from timed steps, without attacking."""
        share = ATTACK_SHARE * self.request.seconds / max(1, len(names))
        return [self._first_batch(name, share) for name in names]

    def budget_for_full_plan(self, results: AttackResults) -> float | None:
        """Estimate the budget, in seconds, at which every attack finishes its plan.

        The estimate comes from the time that the attacks took. None if no attack ran in batches.
        """
        per_restart: dict[str, float] = {}
        restarts = PARTS
        for row in results.outcomes:
            work = sum(b.restarts * b.steps for b in results.batches if b.attack == row.name)
            if work:
                attack = self._batched(row.name)
                per_restart[row.name] = row.seconds * attack.steps / work
                restarts = max(restarts, attack.restarts)
        if not per_restart:
            return None
        return restarts * max(per_restart.values()) * len(per_restart) / ATTACK_SHARE

    def residual_on_permuted(self, name: str, steps: int, seconds: float) -> float | None:
        """Return the residual that one restart leaves on a target whose entries were permuted.

        There is nothing to explain in such a target. A closed form has no such run, so what it does not
        explain stays whole.

        Args:
            name: The attack.
            steps: Its steps.
            seconds: Time limit.

        Returns:
            The residual of the checked layers. None if the time ended before the steps, because fewer
            steps would leave more and make the real residual look small.
        """
        attack = self.attacks[name]
        if not isinstance(attack, Stationarity):
            return 1.0
        surface = surfaces(self.network, self.knowledge)[attack.surface]
        objective = permuted(attack.objective, attack.seed)
        control = type(attack).with_objective(objective).like(attack)
        control = control.changed(restarts=1, steps=steps, seconds=seconds)
        result = control.run(surface, self.knowledge)
        return None if "time" in result.status else explained(surface, result, objective).worst

    def repeat(self, name: str, batch: Batch | None, seconds: float) -> Reconstruction | None:
        """Run an attack once more, on the network of this schedule.

        Args:
            name: The attack.
            batch: The batch of restarts to repeat, None for an attack that runs once.
            seconds: Time limit.

        Returns:
            The reconstruction, None if the attack does not apply to this network.
        """
        attack = self.attacks[name]
        surface = surfaces_of_attacks({name: attack}, self.network, self.knowledge)[name]
        if attack.why_not(surface, self.knowledge):
            return None
        attack = attack if batch is None else batch.of(attack)
        return attack.changed(seconds=seconds).run(surface, self.knowledge)

    def _plans(
        self,
        attacks: dict[str, Attack],
        names: list[str],
        share: float,
        rows: dict[str, AttackOutcome],
    ) -> dict[str, Plan]:
        """Return the first batch of each attack, as planned before an interruption if there was one."""
        plans: dict[str, Plan] = {}
        for name in names:
            with _own_fault(name, attacks[name], rows):
                if self.store and (batch := self.store.planned(name)) is not None:
                    plans[name] = Plan(batch, share, self._batched(name).steps)
                    continue
                plans[name] = self._first_batch(name, share)
                if self.store:
                    self.store.plan(plans[name].batch)
        return plans

    def _first_batch(self, name: str, share: float) -> Plan:
        own_settings = requested_settings(self.request).get(name, {})
        exact = self.request.steps is not None or "steps" in own_settings
        return first_batch(self.network, self.knowledge, self._batched(name), share, exact)

    def _batched(self, name: str) -> Stationarity:
        """Return an attack that runs in batches of restarts."""
        attack = self.attacks[name]
        assert isinstance(attack, Stationarity)
        return attack

    def _unfinished(self, batches: list[Batch], result: Reconstruction) -> str:
        """Return what is missing of the steps and restarts that the preset plans, "" if nothing."""
        plan = self._batched(batches[0].attack)
        full = [batch for batch in batches if batch.steps >= plan.steps]
        cut_by_clock = result.status.count("time")
        finished = sum(batch.restarts for batch in full) - cut_by_clock
        if finished >= plan.restarts:
            return ""
        longest = max(batch.steps for batch in batches)
        if longest < plan.steps:
            return f"each restart ran {longest} of {plan.steps} steps"
        return f"{max(finished, 0)} of {plan.restarts} restarts ran all {plan.steps} steps"

    def _reconstruct(
        self, name: str, attack: Attack, surface: Surface, plan: Plan | None, share: float
    ) -> tuple[Reconstruction, list[Batch]]:
        """Run one attack and return its candidates and its batches."""
        if attack.baseline:
            return self._baseline(attack, surface), []
        if attack.pace != "batches":
            has_clock = attack.pace != "sized"
            seconds = math.inf if self.repeats and has_clock else share
            return attack.changed(seconds=seconds).run(surface, self.knowledge), []
        results: list[Reconstruction] = []
        batches: list[Batch] = []
        for batch in self._batches(name, plan, share, results):
            done = sum(before.restarts for before in batches)
            total = self._restarts(name, plan, share, done, results)
            total = max(total, done + batch.restarts)
            results.append(self._run_batch(attack, surface, batch, done, total))
            batches.append(batch)
        if not results:
            raise NotRequested
        return merged(results), batches

    def _batches(
        self, name: str, plan: Plan | None, share: float, results: list[Reconstruction]
    ) -> Iterator[Batch]:
        """Yield batches one after another; ``results`` grows as they are finished."""
        if plan is None:
            yield from (batch for batch in self.request.batches if batch.attack == name)
            return
        batch: Batch | None = plan.batch
        done: list[tuple[Batch, float]] = []
        while batch is not None:
            yield batch
            if self.clock.left <= 0:
                return
            done.append((batch, results[-1].seconds))
            candidates = len(results[-1].x) // max(1, results[-1].restarts)
            batch = next_batch(done, candidates, share)

    def _restarts(
        self, name: str, plan: Plan | None, share: float, done: int, results: list[Reconstruction]
    ) -> int:
        """Return how many restarts an attack will have in all, estimated from those that ran."""
        if plan is None:
            return sum(batch.restarts for batch in self.request.batches if batch.attack == name)
        seconds = sum(result.seconds for result in results) if done else plan.seconds
        per_restart = seconds / (done or plan.batch.restarts)
        return min(MAX_RESTARTS, int(share / per_restart)) if per_restart > 0 else MAX_RESTARTS

    def _run_batch(
        self, attack: Attack, surface: Surface, batch: Batch, done: int, total: int
    ) -> Reconstruction:
        """Run one batch, continue it, or read it back if it is finished."""
        if self.store and (finished := self.store.load(batch)) is not None:
            return finished
        attack = batch.of(attack).changed(seconds=max(self.clock.left, MIN_SECONDS))
        watch = self.listener.watch_attack(batch.attack, done, total)
        state = self.store.state(batch) if self.store else None
        result = attack.run(surface, self.knowledge, state_path=state, watch=watch)
        if self.store:
            self.store.save(batch, result)
        return result

    def _baseline(self, attack: Attack, surface: Surface) -> Reconstruction:
        """Run a baseline, with fewer candidates if the time is short."""
        attack = attack.resolved(self.network, self.knowledge)
        if not isinstance(attack, SearchSettings):
            return attack.run(surface, self.knowledge)
        needed = attack.changed(steps=1).run(surface, self.knowledge).seconds * attack.steps
        allowed = max(LEAST_BASELINE, BASELINE_SHARE * self.request.seconds)
        if needed > allowed and not self.repeats:
            fit = max(MIN_CANDIDATES, int(attack.candidates * allowed / needed))
            attack = attack.changed(candidates=min(attack.candidates, fit))
            # A pass through a large network takes its time, however few candidates there are.
            one_step = attack.changed(steps=1).run(surface, self.knowledge)
            if one_step.seconds * attack.steps > MAX_BASELINE * allowed:
                raise BaselineTooSlow
        return attack.run(surface, self.knowledge)


class BaselineTooSlow(Exception):
    """A baseline does not fit into the time budget."""


class NotRequested(Exception):
    """None of the batches to be repeated belongs to this attack."""


@contextmanager
def _own_fault(name: str, attack: Attack, rows: dict[str, AttackOutcome]) -> Iterator[None]:
    """Turn an error of one attack into its row, if the other attacks can go on."""

    def record(applies: bool, reason: str) -> None:
        decides = not attack.baseline
        rows[name] = AttackOutcome(name, decides, applies, False, reason[:MAX_REASON])

    try:
        yield
    except NotRequested:
        record(True, "no batch of it was asked for")
    except BaselineTooSlow:
        record(True, OUT_OF_TIME)
    except PluginError as problem:
        record(True, f"failed: {problem.message}")
    except InputError as problem:  # the user can correct what an attack of this package refuses
        if attack.pace == "batches" and not attack.outside:
            raise
        record(attack.outside, problem.message)
    except Exception as problem:  # a plug-in's fault says nothing about the network
        if not attack.outside:
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
    """Return the row of an attack that ran.

    Only a residual that residuum measured itself can rule out a leak: of an objective, or of a built-in
    attack.
    """
    measured = attack.acquits and (attack.pace == "batches" or not attack.outside)
    unmeasured = Explained(silent="" if attack.baseline else SHOWS_LEAKS_ONLY)
    explanation = explained(surface, result) if measured else unmeasured
    return AttackOutcome(
        result.attack,
        not attack.baseline,
        True,
        True,
        reason_to_run(attack, surface),
        surface=surface.name,
        restarts=result.restarts,
        steps=int(result.steps[-1]) if len(result.steps) else 0,
        candidates=len(result.x),
        diverged=sum(status == "diverged" for status in result.status),
        residual=explanation.worst,
        **vars(explanation),
        seconds=result.seconds,
    )


def reason_to_run(attack: Attack, surface: Surface) -> str:
    """Return why an attack applies, in a few words."""
    if attack.baseline:
        return "a baseline: reported, never deciding"
    return attack.why(surface)
