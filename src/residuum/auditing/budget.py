"""A wall-clock budget turned into shares, batches of restarts, and the batches that were run.

The deciding attacks get ``ATTACK_SHARE`` of the budget, in equal parts; baselines, scoring and both
certificates are told what they may take and sample, or leave out what does not decide; reading,
planning and the report have the rest. A batch that has begun is finished: cutting it short would
leave a run that nobody could repeat. What is recorded, and replayed, is the batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from residuum.attacks import AttackConfig, estimate
from residuum.errors import InputError
from residuum.records import Checkpoint, Knowledge, Record

ATTACK_SHARE = 0.7
BASELINE_SHARE, SCORE_SHARE, CERTIFICATE_SHARE, UNIQUENESS_SHARE = 0.05, 0.1, 0.05, 0.05
LEAST_BASELINE, LEAST_SCORE = 1.0, 3.0  # seconds: what is cheap is not left out of a short audit
LEAST_UNIQUENESS = 3.0  # seconds: its null space is counted whatever the clock says
MEASURED = 0.3  # seconds of steps that are timed before the first batch
MIN_STEPS = 25  # one look at the loss: with fewer there is nothing to report
AROUND = 6.0  # seconds that reading, planning and the report take on a small network
MAX_RESTARTS = 64
MAX_CANDIDATES = 20_000  # of all restarts of one attack: bounds the memory of the scoring
UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, eq=False)
class Batch(Record):
    """Restarts that ran side by side: what decides their outcome, beside the preset."""

    attack: str
    restarts: int
    steps: int
    seed: int


def seconds_of(budget: str | float) -> float:
    """``"90s"``, ``"10min"``, ``"1.5h"`` or a number of seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", str(budget))
    value = float(found[1]) * UNITS.get(found[2], math.nan) if found else math.nan
    if not 0 < value < math.inf:
        raise InputError(
            f"A budget is a time such as 90s, 10min or 1h; got {str(budget)[:40]!r}.",
            "Say --budget 1min.",
        )
    return value


@dataclass(frozen=True)
class Plan:
    """A first batch and how long it should take; steps: as many as the preset wants."""

    batch: Batch
    seconds: float
    steps: int


def first_batch(
    checkpoint: Checkpoint, knowledge: Knowledge, config: AttackConfig, share: float
) -> Plan:
    """The largest batch that fits into ``share`` seconds: fewer restarts first, then fewer steps."""
    restarts, steps = config.restarts, config.steps
    needed = estimate(checkpoint, knowledge, config, measured=MEASURED).seconds
    if needed > share and restarts > 1:
        restarts = max(1, int(restarts * share / needed))
        fewer = replace(config, restarts=restarts)
        needed = estimate(checkpoint, knowledge, fewer, measured=MEASURED).seconds
    if needed > share:
        steps = min(steps, max(MIN_STEPS, int(steps * share / needed)))
        needed *= steps / config.steps
    return Plan(Batch(config.objective, restarts, steps, config.seed), needed, config.steps)


def next_batch(done: list[tuple[Batch, float]], candidates: int, share: float) -> Batch | None:
    """Another batch under the next seed, as many restarts as fit; None when none does.

    done: batches of one attack with their seconds; candidates: of each restart.
    """
    last, took = done[-1]
    ran = sum(batch.restarts for batch, _ in done)
    left = share - sum(seconds for _, seconds in done)
    restarts = min(
        last.restarts,
        int(left * last.restarts / took) if took > 0 else last.restarts,
        MAX_RESTARTS - ran,
        MAX_CANDIDATES // max(1, candidates) - ran,
    )
    return last.replace(seed=last.seed + 1, restarts=restarts) if restarts > 0 else None


def forecast(seconds: float, plans: Sequence[Plan]) -> str:
    """What an audit will take, in a sentence; where the budget is too short, that and why."""
    share = ATTACK_SHARE * seconds / max(1, len(plans))
    attacks = sum(max(share, plan.seconds) for plan in plans)
    rest = (BASELINE_SHARE + SCORE_SHARE + CERTIFICATE_SHARE + UNIQUENESS_SHARE) * seconds
    total = max(attacks + rest + AROUND, seconds)
    said = (
        f"budget {seconds:.0f} s: attacks {attacks:.0f} s, scoring and certificates "
        f"{rest:.0f} s; about {total:.0f} s in all"
    )
    if total > 1.3 * seconds:
        said += f", longer than the budget, which is too short for less (--budget {total:.0f}s)"
    cut = [plan for plan in plans if plan.batch.steps < plan.steps]
    for plan in cut:
        whole = plan.seconds * plan.steps / plan.batch.steps / ATTACK_SHARE * len(plans)
        said += (
            f"; {plan.batch.attack} gets {plan.batch.steps} of its {plan.steps} steps and may explain "
            f"nothing: --budget {whole / 60:.0f}min would allow all"
        )
    return said
