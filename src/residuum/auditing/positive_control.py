"""Positive controls: would this audit have noticed a leak?

A positive control is a network of the audited architecture that is known to memorize its samples. It is
trained on as many held-out samples as the audited network has training samples
(:mod:`.control_training`). It is then attacked with the settings of the audit and fewer restarts, and
judged by the same rule. If the audit does not notice what a positive control memorized, finding nothing in
the audited network proves nothing.

One control can be lucky. There are therefore ``MIN_CONTROLS`` of them, with different samples and different
initial weights, and all of them must be noticed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

from residuum.auditing.budget import PARTS, TWIN_SHARE, Allowance, Batch
from residuum.auditing.case import Case
from residuum.auditing.control_training import ControlTraining, TrainedControl
from residuum.auditing.controls import Claim, sample_losses
from residuum.auditing.schedule import AttackResults, AttackSchedule
from residuum.auditing.scores import findings, run_tests
from residuum.auditing.verdict import HURRIED, MIN_CONTROLS, Twin
from residuum.errors import InputError, ResiduumError
from residuum.evaluation.matching import as_array, discrete
from residuum.evaluation.null import SUBSETS, draw_sets
from residuum.evaluation.scoring import CandidatePool, whole_pool
from residuum.networks.canonical import attacked_form
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.surfaces.inspection import inspect_network
from residuum.theory.rows import choose_task

if TYPE_CHECKING:
    from residuum.auditing.run import Audit

SEED_STEP = 1000  # between the seeds of two controls: far from the seeds of an audit's batches
SPARE = 100  # held-out samples beyond twice the training set that judging a control needs
ENOUGH = 0.75  # of the expected attack time: with less left, a control is not begun
TRAINING, JUDGING = 1 / 4, 1 / 4  # of a control's time: at most to train it, reserved to judge it


def train_and_attack_controls(audit: Audit) -> tuple[Twin, ...]:
    """Train and attack positive controls one after another, within the time for checks.

    Args:
        audit: The audit, whose attacks have run.

    Returns:
        One record per control. The list ends with the first control that is not noticed, because
        the audit is inconclusive then.
    """
    controls: list[Twin] = []
    for number in range(MIN_CONTROLS):
        remaining = MIN_CONTROLS - number
        if audit.budget.checks.left <= ENOUGH * remaining * _expected_seconds(audit.attacks):
            return (*controls, Twin(reason=HURRIED))
        start = time.monotonic()
        try:
            control = _run_control(audit, number)
        except (ResiduumError, RuntimeError) as problem:  # the user's own network may not train
            control = Twin(reason=str(problem).splitlines()[0][:200])
        controls.append(control.replace(seconds=round(time.monotonic() - start, 3)))
        if not control.noticed:
            break
    return tuple(controls)


def _expected_seconds(attacks: AttackResults) -> float:
    """Estimate how long attacking a control takes, by the attacks on the audited network."""
    batched, total = {batch.attack for batch in attacks.batches}, 0.0
    for result in attacks.reconstructions:
        restarts = result.restarts
        if result.attack in batched:
            restarts = _fewer_restarts(attacks.batches, result.attack).restarts
        total += result.seconds * restarts / result.restarts
    return total


def _fewer_restarts(batches: Sequence[Batch], name: str) -> Batch:
    """Return the batch that a control gets of an attack's restarts."""
    of_attack = [batch for batch in batches if batch.attack == name]
    restarts = max(1, sum(batch.restarts for batch in of_attack) // PARTS)
    return of_attack[0].replace(restarts=restarts)


def _run_control(audit: Audit, number: int) -> Twin:
    """Train control ``number``, attack it like the audited network, and judge it by the same rule.

    The control uses an equal part of the time that the remaining controls share.
    """
    case, claim = audit.case, audit.case.comparison
    assert claim is not None
    network, seed = case.attacked, audit.request.seed + SEED_STEP * number
    losses = sample_losses(network, claim.train, claim.train, network.task)
    target_loss = 0.0 if losses is None else float(losses.mean())
    data, holdout, weakness = _samples_of_control(case, claim, seed)
    share = Allowance(audit.budget.checks.left / (MIN_CONTROLS - number))
    unlimited = share.seconds == math.inf
    with share:
        wanted = math.inf if unlimited else TWIN_SHARE * audit.request.seconds
        training = ControlTraining(
            network=network,
            knowledge=case.knowledge,
            inspection=case.inspection if network is case.audited else inspect_network(network),
            recipe=audit.request.training_recipe,
            target_loss=target_loss,
            seconds=min(wanted, share.seconds * TRAINING),
            seed=seed,
        )
        trained = training.train(data)
        made = f"{trained.description}, loss {trained.loss:.2g} where the audited network reached "
        made += f"{target_loss:.2g}{weakness}"
        schedule = AttackSchedule(
            network=attacked_form(network.replace(theta=trained.theta), case.knowledge),
            knowledge=_knowledge_of_control(case.knowledge, trained, len(data)),
            request=audit.request,
        )
        reserve = 0.0 if unlimited else share.seconds * JUDGING
        attacks = _attack_control(schedule, audit.attacks, share, reserve)
        if not attacks.pools:
            missing = "; ".join(attacks.missing) or "no attack applies to it"
            reason = HURRIED if attacks.out_of_time else missing
            return Twin(reason=reason, made=made, left_out=tuple(attacks.missing))
        left = max(share.left, 0.0) / 2  # estimates err, and this is the last step
        tests, _ = run_tests(attacks.pools, Claim(data, holdout), seed, SUBSETS, left, must=False)
    if not tests:
        return Twin(reason=HURRIED, made=made, attacked=tuple(attacks.descriptions))
    summary = findings(tests, len(data))
    return Twin(
        n=len(data),
        recovered=summary.recovered,
        expected_by_chance=summary.expected_by_chance,
        p_value=summary.p_value,
        rule=summary.rule,
        made=made,
        attacked=tuple(attacks.descriptions),
        left_out=tuple(attacks.missing),
        batches=tuple(attacks.batches),
    )


def _samples_of_control(case: Case, claim: Claim, seed: int) -> tuple[Dataset, Dataset, str]:
    """Return the samples of a control, held-out samples to judge it, and what makes it weaker.

    They are held-out samples that the audit's own comparison does not need, or bundled digits of the
    same shape if there are too few.
    """
    assert claim.pool is not None
    needed = 2 * len(claim.train) + SPARE
    weakness = ""
    if len(claim.pool) >= needed:
        data, holdout = split_holdout(claim.pool, claim.train, seed)
    else:
        data, holdout = bundled_digits(claim.train, case.attacked, case.knowledge, seed)
        weakness = (
            f"; it is weaker, of {len(data)} digits of this shape, because {len(claim.pool)} held-out "
            f"samples are fewer than {needed}"
        )
    count = case.knowledge.sample_count or 0
    if count > len(claim.train) + len(claim.repeats):
        weakness += (
            f"; it holds these {len(data)} alone, where the audited network holds {count} samples, and "
            "gives them back the more easily"
        )
    return data, holdout, weakness


def _knowledge_of_control(knowledge: Knowledge, trained: TrainedControl, samples: int) -> Knowledge:
    """Return what the attacker knows of a control: the same kinds of facts, with its own values."""
    unknown = ("norms", "moment")
    return knowledge.replace(
        theta0=None if knowledge.theta0 is None else trained.theta0,
        norms=None,
        moment=None,
        sample_count=None if knowledge.sample_count is None else samples,
        provenance={k: v for k, v in knowledge.provenance.items() if k not in unknown},
    )


@dataclass
class _AttacksOnControl:
    """The attacks on a control: candidates, what ran in words and batches, and what did not run."""

    pools: dict[str, CandidatePool] = field(default_factory=dict)
    descriptions: list[str] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    out_of_time: bool = False


def _attack_control(
    schedule: AttackSchedule, audited: AttackResults, allowance: Allowance, reserve: float
) -> _AttacksOnControl:
    """Repeat the attacks of the audit on a control.

    Attacks that run once come first and take the time that they took. Batches have fewer restarts and
    end with the time: what is recovered in less time is the stronger evidence.
    """
    attacks = _AttacksOnControl()
    batched = {batch.attack for batch in audited.batches}
    queue = sorted(audited.reconstructions, key=lambda result: result.attack in batched)
    for position, audited_result in enumerate(queue):
        name = audited_result.attack
        seconds = (allowance.left - reserve) / (len(queue) - position)
        if seconds <= 0 or (name not in batched and audited_result.seconds > seconds):
            attacks.missing.append(f"{name}, for want of time")
            attacks.out_of_time = True
            continue
        batch = _fewer_restarts(audited.batches, name) if name in batched else None
        if batch is None:  # the effort of some attacks depends on the time that they are given
            seconds = float(audited_result.settings.get("seconds") or seconds)
        try:
            result = schedule.repeat(name, batch, seconds)
        except Exception as problem:
            if not (schedule.attacks[name].outside or isinstance(problem, ResiduumError)):
                raise
            attacks.missing.append(f"{name}, which failed: {str(problem)[:100]}")
            continue
        if result is None:
            attacks.missing.append(f"{name}, which does not apply to it")
            continue
        attacks.pools[name] = whole_pool(result)
        if batch is None:
            attacks.descriptions.append(name)
            continue
        steps = int(result.steps[-1]) if "time" in result.status else batch.steps
        of_all = "" if steps == batch.steps else f" of {batch.steps}"
        total = sum(before.restarts for before in audited.batches if before.attack == name)
        attacks.descriptions.append(
            f"{name} ({batch.restarts} of {total} restarts, {steps}{of_all} steps)"
        )
        attacks.batches.append(batch.replace(steps=steps))
    return attacks


def split_holdout(holdout: Dataset, like: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Return as many held-out samples as ``like`` has, and the rest.

    The sample has the label counts of ``like`` if there are enough held-out samples of each label.
    """
    if len(holdout.y.unique()) < 2:
        raise InputError("held-out samples without labels cannot be trained on", "Give labels.")
    rng = np.random.default_rng((seed, 7))
    labels, wanted = as_array(holdout.y), as_array(like.y)
    are_classes = discrete(holdout.y) and discrete(like.y)
    counts = zip(*np.unique(wanted, return_counts=True), strict=True)
    if not (are_classes and all((labels == label).sum() >= count for label, count in counts)):
        labels, wanted = np.zeros(len(holdout), dtype=int), np.zeros(len(like), dtype=int)
    rows = torch.from_numpy(draw_sets(labels, wanted, 1, rng)[0])
    remaining = torch.ones(len(holdout), dtype=torch.bool)
    remaining[rows] = False
    return (
        holdout.take(rows).replace(mean=like.mean),
        holdout.take(remaining).replace(mean=like.mean),
    )


def bundled_digits(
    like: Dataset, network: Network, knowledge: Knowledge, seed: int
) -> tuple[Dataset, Dataset]:
    """Return bundled digits in the shape and range of the training samples, with labels of their task."""
    from sklearn.datasets import load_digits

    images, digit = load_digits(return_X_y=True)
    order = np.random.default_rng((seed, 8)).permutation(len(images))
    x, y = torch.from_numpy(images[order] / 16).reshape(-1, 1, 8, 8), torch.from_numpy(digit[order])
    shape = like.shape
    if len(shape) == 3:
        x = F.interpolate(x, shape[1:], mode="bilinear").expand(-1, shape[0], -1, -1)
    else:
        x = F.interpolate(x.reshape(-1, 1, 64), math.prod(shape), mode="linear").reshape(-1, *shape)
    pictures = like.images.double()
    low, high = knowledge.value_range or (float(pictures.min()), float(pictures.max()))
    x = low + (high - low) * x
    if like.mean is not None:
        x = x - like.mean.double().reshape(shape)
    elif (mean := knowledge.mean) is not None:
        x = x - (mean.double().reshape(shape) if mean.numel() > 1 else mean)
    outputs = network.architecture.outputs
    task = choose_task(network.task, outputs)
    if task == "regression":
        y = (y.double() / 9)[:, None].expand(-1, outputs)
    elif task == "binary":
        y = 2 * (y % 2) - 1
    else:
        y = y % outputs
    n = min(len(like), (len(x) - SPARE) // 2)
    x = x.to(like.x.dtype).contiguous()
    return Dataset(x[:n], y[:n], like.mean), Dataset(x[n:], y[n:], like.mean)
