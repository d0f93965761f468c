"""A wall-clock budget turned into shares, batches of restarts, and the batches that were run.

The deciding attacks get ``ATTACK_SHARE`` of the budget, in equal parts; a restart takes at most one
part in ``PARTS`` of that, because if nothing is found one more follows on a permuted target and one on
each positive control. These and the negative controls share an :class:`Allowance` of ``CHECK_SHARE``:
what does not fit is left out and said, and what "no leak found" needs is then missing. Baselines,
scoring and both certificates are told what they may take and sample, or leave out what does not
decide; reading, planning and the report have the rest. What is recorded, and replayed, is the batches.

An audit ends within ``OVERRUN`` times its budget. The attacks stop at the budget, and every stage
that decides nothing is skipped after it. Such a stop is never "no leak found".
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from residuum.attacks import AttackConfig
from residuum.attacks.cost import expected_seconds
from residuum.errors import InputError
from residuum.networks.network import Network
from residuum.records import Knowledge, Record

ATTACK_SHARE = 0.36  # of the budget: what the checks and everything below leave
OVERRUN = 1.3  # times the budget at which an audit ends
MIN_BUDGET = 5.0  # seconds: reading, scoring and the report alone take about as long
FEWEST_RESTARTS = 4  # that even a short audit plans: what several agree on counts for more
PARTS = 6  # of an attack's time: one is repeated on a permuted target, one on each positive control
CHECK_SHARE = 0.4  # of the budget, at most, for asking whether the audit can be believed
TWIN_SHARE = 0.03  # of training one positive control; its attack takes what the audited one took
BASELINE_SHARE, SCORE_SHARE, CERTIFICATE_SHARE, UNIQUENESS_SHARE = 0.05, 0.1, 0.05, 0.05
LEAST_BASELINE, LEAST_SCORE = 1.0, 3.0  # seconds: what is cheap is not left out of a short audit
LEAST_UNIQUENESS = 3.0  # seconds: its null space is counted whatever the clock says
MEASURED = 0.3, 2.0  # seconds of steps that are timed before the first batch, least and most
MIN_STEPS = 25  # one look at the loss: with fewer there is nothing to report
MOST_STRETCH = 2.0  # a restart is never more than twice as long as its preset says
# Seconds on two cores: of start, planning and report; of scoring and certificates of 500 samples.
AROUND, FLOOR = 8.0, 14.0
MAX_RESTARTS = 64  # of one attack, whatever the budget
MAX_CANDIDATES = 20_000  # of all restarts of one attack: bounds the memory of the scoring
UNITS = {"s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0}
UNITS |= {"h": 3600.0, "hour": 3600.0}


@dataclass(frozen=True, eq=False)
class Batch(Record):
    """Restarts that ran side by side: what decides their outcome, beside the preset.

    attack: a key of ``ATTACKS`` or ``OBJECTIVES``.
    seed: of all its restarts, which differ by their number.
    """

    attack: str
    restarts: int
    steps: int
    seed: int

    def of(self, config: AttackConfig) -> AttackConfig:
        """The settings of this batch, those of ``config`` otherwise."""
        config = replace(config, objective=self.attack, restarts=self.restarts)
        return replace(config, steps=self.steps, seed=self.seed)


def seconds_of(budget: str | float) -> float:
    """``"90s"``, ``"1m30s"``, ``"1.5h"``, ``"5 minutes"`` or a number of seconds."""
    text = "".join(str(budget).split())
    parts = re.findall(r"(\d+(?:\.\d*)?|\.\d+)([a-z]*)", text)
    whole = "".join(number + unit for number, unit in parts) == text
    # Only the last number may be without a unit, and only where it is the only one: seconds.
    sizes = [UNITS.get(unit, UNITS.get(unit.removesuffix("s"), math.nan)) for _, unit in parts]
    if len(parts) == 1 and not parts[0][1]:
        sizes = [1.0]
    value = sum(float(number) * size for (number, _), size in zip(parts, sizes, strict=True))
    if not whole or sorted(sizes, reverse=True) != sizes or not 0 < value < math.inf:
        raise InputError(
            f"A budget is a time such as 90s, 1m30s, 10min or 1h; got {str(budget)[:40]!r}.",
            "Say --budget 1min.",
        )
    return value


def duration(seconds: float) -> str:
    """A time as a person writes it, and as :func:`seconds_of` reads it."""
    whole = max(1, round(seconds))
    parts = ((whole // 3600, "h"), (whole % 3600 // 60, "m"), (whole % 60, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count)


@dataclass
class Allowance:
    """Seconds that several stages may take together: what runs inside ``with`` counts.

    clock: what tells the time.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    spent: float = 0.0
    _begun: float | None = None

    def __enter__(self) -> Allowance:
        self._begun = self.clock()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._begun is not None
        self.spent += self.clock() - self._begun
        self._begun = None

    def limit(self, seconds: float) -> None:
        """Make sure that at most ``seconds`` are left."""
        self.seconds -= max(0.0, self.left - seconds)

    @property
    def left(self) -> float:
        """Seconds, less than none when it is overrun."""
        running = 0.0 if self._begun is None else self.clock() - self._begun
        return self.seconds - self.spent - running


UNBOUNDED = Allowance(math.inf)


def running_since(start: float, seconds: float) -> Allowance:
    """Return an allowance of ``seconds`` that has been running since ``start``."""
    return Allowance(seconds, _begun=start)


@dataclass(frozen=True)
class Plan:
    """A first batch and how long it should take; steps: as many as the preset wants."""

    batch: Batch
    seconds: float
    steps: int


def first_batch(
    checkpoint: Network, knowledge: Knowledge, config: AttackConfig, share: float, exact: bool
) -> Plan:
    """The batch that the others of ``share`` seconds will be like.

    As many whole restarts as fit share the time evenly, each at least as long as the preset says,
    unless its steps are ``exact``; where fewer than ``PARTS`` fit, these take fewer steps.
    Restarts side by side cost
    a CPU what they cost one after another, so there a single one is timed.
    """
    gpu = config.device.startswith("cuda")
    timed = config if gpu else replace(config, restarts=1)
    measured = min(max(MEASURED[0], 0.03 * share), MEASURED[1])
    needed = expected_seconds(checkpoint, knowledge, timed, measured)
    each = needed / timed.restarts
    fit = min(int(share / each), MAX_RESTARTS) if each > 0 else MAX_RESTARTS
    # Of a large network not even the fewest steps of the fewest restarts may fit.
    affordable = int(share * config.steps / (MIN_STEPS * each)) if each > 0 else MAX_RESTARTS
    fewest = max(1, min(config.restarts, FEWEST_RESTARTS, affordable))
    restarts = max(1, min(config.restarts, fit if exact else max(fit, fewest)))
    stretch = min(MOST_STRETCH, share / (max(PARTS, fit) * each)) if each > 0 else 1.0
    steps = config.steps if exact and fit else max(MIN_STEPS, int(config.steps * stretch))
    seconds = restarts * each * steps / config.steps
    return Plan(Batch(config.objective, restarts, steps, config.seed), seconds, config.steps)


def next_batch(done: list[tuple[Batch, float]], candidates: int, share: float) -> Batch | None:
    """Another batch under the next seed, as many restarts as fit; None when none does.

    done: batches of one attack with their seconds.
    candidates: of each restart.
    Estimates err: a restart fits that would overrun by a tenth.
    """
    last, took = done[-1]
    ran = sum(batch.restarts for batch, _ in done)
    left = share - sum(seconds for _, seconds in done)
    restarts = min(
        last.restarts,
        int(1.1 * left * last.restarts / took) if took > 0 else last.restarts,
        MAX_RESTARTS - ran,
        MAX_CANDIDATES // max(1, candidates) - ran,
    )
    return last.replace(seed=last.seed + 1, restarts=restarts) if restarts > 0 else None


def forecast(seconds: float, plans: Sequence[Plan], samples: int) -> str:
    """Return how long an audit will take, and what a longer budget would allow.

    samples: of the training set. Scoring and certificates take at least ``floor`` seconds.
    """
    share = ATTACK_SHARE * seconds / max(1, len(plans))
    attacks = sum(max(share, plan.seconds) for plan in plans)
    floor = FLOOR * (samples / 500) ** 1.5
    after = SCORE_SHARE + CERTIFICATE_SHARE + UNIQUENESS_SHARE
    rest = max(BASELINE_SHARE * seconds, LEAST_BASELINE) + max(after * seconds, floor)
    checks = CHECK_SHARE * seconds
    total = min(max(attacks + rest + checks + AROUND, seconds), OVERRUN * seconds)
    said = (
        f"with a budget of {duration(seconds)} the attacks get {duration(attacks)}, scoring and "
        f"certificates {duration(rest)}, negative and positive controls at most {duration(checks)}: about "
        f"{duration(total)} in all"
    )
    if cut := [plan for plan in plans if plan.batch.steps < plan.steps]:
        each = (p.seconds * p.steps / p.batch.steps / p.batch.restarts for p in cut)
        whole = 60 * math.ceil(PARTS * max(each) / ATTACK_SHARE * len(plans) / 60)
        names = (f"{p.batch.attack} {p.batch.steps} of its {p.steps} steps" for p in cut)
        said += (
            f". This is enough for {', '.join(names)}. It can show a leak and cannot rule one out: the full "
            f"plan takes about --budget {duration(whole)}"
        )
    return said
