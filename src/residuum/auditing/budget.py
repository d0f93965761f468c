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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from residuum.attacks import Attack
from residuum.attacks.cost import expected_seconds
from residuum.attacks.stationarity.attack import Stationarity
from residuum.auditing.durations import duration
from residuum.auditing.request import AuditRequest
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


@dataclass(frozen=True, eq=False)
class Batch(Record):
    """Restarts that ran together. With the preset it decides their outcome.

    attack: name of the attack.
    seed: seed of all its restarts, which differ by their number.
    """

    attack: str
    restarts: int
    steps: int
    seed: int

    def of(self, attack: Attack) -> Attack:
        """Return the attack with the restarts, steps and seed of this batch."""
        return attack.changed(restarts=self.restarts, steps=self.steps, seed=self.seed)


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


class TimeBudget:
    """The wall-clock limits of one audit, counted from its creation.

    Repeated batches have no clock, so that they give the same result on every machine.

    Args:
        request: Settings of the audit.
    """

    def __init__(self, request: AuditRequest) -> None:
        start = time.monotonic()
        self.seconds = request.seconds
        self.unlimited = bool(request.batches)
        limit = math.inf if self.unlimited else max(self.seconds, MIN_BUDGET)
        self.attacks = running_since(start, limit)
        self.end = running_since(start, OVERRUN * limit)
        self.scoring = math.inf if self.unlimited else max(LEAST_SCORE, SCORE_SHARE * self.seconds)

    @cached_property
    def checks(self) -> Allowance:
        """What negative controls, the permuted target and positive controls take together."""
        share = math.inf if self.unlimited else CHECK_SHARE * self.seconds
        return Allowance(min(share, self.end.left))

    @property
    def is_spent(self) -> bool:
        """Whether the budget is over, so that stages that decide nothing are skipped."""
        return self.attacks.left <= 0

    def charge(self, seconds: float) -> None:
        """Count time that an interrupted run of the same audit took."""
        self.attacks.spent += seconds
        self.end.spent += seconds


@dataclass(frozen=True)
class Plan:
    """A first batch and how long it should take; steps: as many as the preset wants."""

    batch: Batch
    seconds: float
    steps: int


def first_batch(
    network: Network, knowledge: Knowledge, config: Stationarity, share: float, exact: bool
) -> Plan:
    """Plan the first batch of an attack. Later batches are like it.

    As many whole restarts as fit share the time evenly. Each is at least as long as the preset says, unless
    its steps are exact. If fewer than ``PARTS`` fit, they take fewer steps. On a CPU, restarts that run
    together take as long as one after another, so a single one is timed there.

    Args:
        network: The network that is attacked.
        knowledge: What the attacker knows.
        config: The attack.
        share: Seconds of the attack.
        exact: True if the number of steps must not change.

    Returns:
        The plan.
    """
    gpu = config.device.startswith("cuda")
    timed = config if gpu else config.changed(restarts=1)
    measured = min(max(MEASURED[0], 0.03 * share), MEASURED[1])
    needed = expected_seconds(network, knowledge, timed, measured)
    each = needed / timed.restarts
    fit = min(int(share / each), MAX_RESTARTS) if each > 0 else MAX_RESTARTS
    # Of a large network not even the fewest steps of the fewest restarts may fit.
    affordable = int(share * config.steps / (MIN_STEPS * each)) if each > 0 else MAX_RESTARTS
    fewest = max(1, min(config.restarts, FEWEST_RESTARTS, affordable))
    restarts = max(1, min(config.restarts, fit if exact else max(fit, fewest)))
    stretch = min(MOST_STRETCH, share / (max(PARTS, fit) * each)) if each > 0 else 1.0
    steps = config.steps if exact and fit else max(MIN_STEPS, int(config.steps * stretch))
    seconds = restarts * each * steps / config.steps
    return Plan(Batch(config.name, restarts, steps, config.seed), seconds, config.steps)


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
