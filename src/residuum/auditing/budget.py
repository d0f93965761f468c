"""A wall-clock budget turned into batches of restarts, and the batches that were run.

The attacks get ``ATTACK_SHARE`` of the budget, in equal parts; scoring, certificates and the report
have the rest. A batch that has begun is finished: cutting it short would leave a run that nobody
could repeat. So the budget is a target that the last batch may overrun, and what is recorded, and
replayed, is the batches.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from residuum.attacks import AttackConfig, estimate
from residuum.errors import InputError
from residuum.records import Checkpoint, Knowledge, Record

ATTACK_SHARE, UNIQUENESS_SHARE = 0.75, 0.1
LEAST_UNIQUENESS = 3.0  # seconds: its null space is counted whatever the clock says
MEASURED = 0.3  # seconds of steps that are timed before the first batch
MIN_STEPS = 200
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


def first_batch(
    checkpoint: Checkpoint, knowledge: Knowledge, config: AttackConfig, share: float
) -> Batch:
    """The largest batch that fits into ``share`` seconds: fewer restarts first, then fewer steps."""
    restarts, steps = config.restarts, config.steps
    needed = estimate(checkpoint, knowledge, config, measured=MEASURED).seconds
    if needed > share and restarts > 1:
        restarts = 1
        single = replace(config, restarts=1)
        needed = estimate(checkpoint, knowledge, single, measured=MEASURED).seconds
    if needed > share:
        steps = max(min(MIN_STEPS, steps), int(steps * share / needed))
    return Batch(config.objective, restarts, steps, config.seed)


def next_batch(done: list[tuple[Batch, float]], candidates: int, share: float) -> Batch | None:
    """Another batch like the last one under the next seed, None when it would not fit.

    done: batches of one attack with their seconds; candidates: of each restart.
    """
    last, took = done[-1]
    restarts = sum(batch.restarts for batch, _ in done) + last.restarts
    used = sum(seconds for _, seconds in done)
    if used + took > share or restarts > MAX_RESTARTS or restarts * candidates > MAX_CANDIDATES:
        return None
    return last.replace(seed=last.seed + 1)
