"""The attack stage: which attacks apply, their batches of restarts, and what they bring back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from residuum.attacks import PRESETS, AttackConfig, attack, select
from residuum.attacks.applicability import Applicability, Facts, applicability
from residuum.attacks.explained import Explained, explained
from residuum.attacks.polynomial import recover
from residuum.attacks.run import BASELINES, FEWEST, resolve
from residuum.attacks.state import Watcher
from residuum.auditing.budget import (
    ATTACK_SHARE,
    BASELINE_SHARE,
    LEAST_BASELINE,
    Batch,
    Plan,
    first_batch,
    forecast,
    next_batch,
)
from residuum.auditing.verdict import AttackOutcome
from residuum.checkpoints import Inspection, build_model
from residuum.errors import InputError
from residuum.networks import Architecture
from residuum.records import Checkpoint, Knowledge, Reconstruction

POLYNOMIAL = "polynomial"


class Store(Protocol):
    """Where finished batches are kept, so that an interrupted audit goes on; see ``folder.py``."""

    def load(self, batch: Batch) -> Reconstruction | None:
        """The finished batch, None when it is not there."""

    def save(self, batch: Batch, found: Reconstruction) -> None:
        """Keep a finished batch."""

    def state(self) -> Path | None:
        """File for the state of the batch under way."""

    def planned(self, attack: str) -> Batch | None:
        """The first batch of ``attack`` as it was planned before."""

    def plan(self, batch: Batch) -> None:
        """Keep the plan of an attack before its first batch begins."""


@dataclass(frozen=True)
class Attacked:
    """All that the attacks brought back, deciding ones first, and the batches they took."""

    outcomes: tuple[AttackOutcome, ...]
    found: tuple[Reconstruction, ...]  # of the deciding attacks, all restarts together
    baselines: tuple[Reconstruction, ...]
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class AttackStage:
    """Everything the attacks need.

    batches: exactly these instead of what the budget allows; say: told what it will all take; exact:
    whether the steps of ``config`` were asked for; samples: of the training set, for the forecast.
    """

    checkpoint: Checkpoint
    inspection: Inspection
    knowledge: Knowledge
    config: AttackConfig
    seconds: float
    store: Store | None = None
    watch: Callable[[str], Watcher] | None = None
    batches: tuple[Batch, ...] = ()
    baselines: bool = True
    say: Callable[[str], None] | None = None
    exact: bool = False
    samples: int = 0

    def run(self) -> Attacked:
        """Run what applies; the deciding attacks share their part of the budget equally."""
        rules = self._answers()
        timed = [
            name
            for name, rule in rules.items()
            if name not in (*BASELINES, POLYNOMIAL) and self._why_not(name, rule) == ""
        ]
        share = ATTACK_SHARE * self.seconds / max(1, len(timed))
        plans = {} if self.batches else {name: self._plan(name, share) for name in timed}
        if self.say is not None and not self.batches:
            self.say(forecast(self.seconds, list(plans.values()), self.samples))
        outcomes, found, done = [], [], []
        for name, rule in rules.items():
            if name in BASELINES:
                continue
            if why_not := self._why_not(name, rule):
                outcomes.append(AttackOutcome(name, True, rule.applies, False, why_not))
                continue
            parts, batches = self._deciding(name, plans.get(name), share)
            done += batches
            if parts:
                found.append(merged(parts))
                outcomes.append(outcome_of(self.checkpoint, found[-1], True, rule.reason))
            else:
                reason = "its recovery does not apply to these weights"
                outcomes.append(AttackOutcome(name, True, False, False, reason))
        beside = self._baselines() if self.baselines else ()
        outcomes += [
            outcome_of(self.checkpoint, part, False, "a baseline: reported, never deciding")
            for part in beside
        ]
        return Attacked(tuple(outcomes), tuple(found), beside, tuple(done))

    def _answers(self) -> dict[str, Applicability]:
        kind = Architecture.parse(self.checkpoint.arch).kind
        facts = Facts(
            kind, self.inspection.outputs, self.inspection.homogeneity_order,
            self.knowledge.theta0 is not None, self.checkpoint.task,
        )  # fmt: skip
        return {answer.attack: answer for answer in applicability(facts)}

    def _why_not(self, name: str, rule: Applicability) -> str:
        """Why an attack is not run; "" when it is."""
        if not rule.applies:
            return rule.reason
        if name == "weight-decay" and self._auto != name and self.knowledge.weight_decay is None:
            return "sound for networks trained with weight decay, and none was granted"
        return ""

    @property
    def _auto(self) -> str:
        config = replace(self.config, objective="auto")
        return resolve(self.checkpoint, self.knowledge, config).objective

    def _plan(self, name: str, share: float) -> Plan:
        """The first batch of an attack, as planned before an interruption where there was one."""
        config = replace(self.config, objective=name)
        if self.store and (batch := self.store.planned(name)) is not None:
            return Plan(batch, share, config.steps)
        plan = first_batch(self.checkpoint, self.knowledge, config, share, exact=self.exact)
        if self.store:
            self.store.plan(plan.batch)
        return plan

    def _deciding(
        self, name: str, plan: Plan | None, share: float
    ) -> tuple[list[Reconstruction], list[Batch]]:
        if name == POLYNOMIAL:
            part = self._polynomial()
            return ([part] if part else []), []
        parts: list[Reconstruction] = []
        batches: list[Batch] = []
        for batch in self._schedule(name, plan, share, parts):
            parts.append(self._batch(batch))
            batches.append(batch)
        return parts, batches

    def _schedule(
        self, name: str, plan: Plan | None, share: float, parts: list[Reconstruction]
    ) -> Iterator[Batch]:
        """Batches one after another; ``parts`` grows as they are finished."""
        if plan is None:
            yield from (batch for batch in self.batches if batch.attack == name)
            return
        batch: Batch | None = plan.batch
        done: list[tuple[Batch, float]] = []
        while batch is not None:
            yield batch
            done.append((batch, parts[-1].seconds))
            candidates = len(parts[-1].x) // max(1, parts[-1].restarts)
            batch = next_batch(done, candidates, share)

    def _batch(self, batch: Batch) -> Reconstruction:
        """One batch: read back where it is finished, otherwise run, or gone on with."""
        if self.store and (found := self.store.load(batch)) is not None:
            return found
        config = replace(
            self.config, objective=batch.attack, restarts=batch.restarts, steps=batch.steps,
            seed=batch.seed,
        )  # fmt: skip
        watch = self.watch(batch.attack) if self.watch else None
        state = self.store.state() if self.store else None
        found = attack(self.checkpoint, self.knowledge, config, state_path=state, watch=watch)
        if self.store:
            self.store.save(batch, found)
        return found

    def _polynomial(self) -> Reconstruction | None:
        """Exact recovery as a reconstruction; None where its conditions fail."""
        start = time.monotonic()
        try:
            found = recover(build_model(self.checkpoint), seed=self.config.seed)
        except InputError:
            return None
        shape = self.knowledge.shape or self.checkpoint.input_shape or found.x.shape[1:]
        part = Reconstruction(
            attack=POLYNOMIAL, x=found.x.reshape(-1, *shape),
            labels=torch.where(found.weights < 0, -1.0, 1.0), lam=found.weights.abs(),
            run=torch.zeros(len(found.x), dtype=torch.long), steps=torch.zeros(1, dtype=torch.long),
            loss=torch.tensor([[found.residual**2]]), layers=torch.tensor([[[found.residual**2]]]),
            layer_names=("all equations",), status=("finished",), knowledge=self.knowledge,
            seconds=time.monotonic() - start, notes=found.notes,
        )  # fmt: skip
        return part.replace(selection=select(part))

    def _baselines(self) -> tuple[Reconstruction, ...]:
        """Both baselines, as far as the network has what they look at; fewer candidates for want of time."""
        found = []
        allowed = max(LEAST_BASELINE, BASELINE_SHARE * self.seconds)
        allowed = math.inf if self.batches else allowed  # repeated batches have no clock
        for name in BASELINES:
            config = replace(PRESETS[name], device=self.config.device, seed=self.config.seed)
            config = resolve(self.checkpoint, self.knowledge, config)
            try:
                one_step = attack(self.checkpoint, self.knowledge, replace(config, steps=1))
                needed = one_step.seconds * config.steps
                if needed > allowed:
                    fit = max(FEWEST, int(config.candidates * allowed / needed))
                    config = replace(config, candidates=min(config.candidates, fit))
                found.append(attack(self.checkpoint, self.knowledge, config))
            except InputError:  # the rows of a convolution are no images
                continue
        return tuple(found)


def merged(parts: list[Reconstruction]) -> Reconstruction:
    """Batches of one attack as one reconstruction, selected anew over all restarts."""
    if len(parts) == 1:
        return parts[0]
    offsets = [sum(part.restarts for part in parts[:i]) for i in range(len(parts))]
    found = parts[0].replace(
        x=torch.cat([part.x for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        lam=torch.cat([part.lam for part in parts]),
        run=torch.cat([part.run + offset for part, offset in zip(parts, offsets, strict=True)]),
        loss=torch.cat([part.loss for part in parts]),
        layers=torch.cat([part.layers for part in parts]),
        status=tuple(status for part in parts for status in part.status),
        settings={**parts[0].settings, "restarts": sum(part.restarts for part in parts)},
        selection=None,
        seconds=sum(part.seconds for part in parts),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
    return found.replace(selection=select(found))


def outcome_of(
    checkpoint: Checkpoint, found: Reconstruction, decides: bool, reason: str
) -> AttackOutcome:
    """One attack that was run, in the words of the verdict; a baseline explains no weights."""
    far = explained(checkpoint, found) if found.layer_names else Explained()
    return AttackOutcome(
        found.attack,
        decides,
        True,
        True,
        reason,
        restarts=found.restarts,
        steps=int(found.steps[-1]) if len(found.steps) else 0,
        candidates=len(found.x),
        diverged=sum(status == "diverged" for status in found.status),
        residual=far.worst,
        residuals=far.residuals,
        judged=far.judged,
        silent=far.silent,
        seconds=found.seconds,
    )
