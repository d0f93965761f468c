"""Plan the work of an audit before it starts.

The plan depends on the effort, the network, the attacker's knowledge and the seed, never on the clock. So the
same file, seed and effort give the same verdict on a fast and on a slow machine.

The cost of an attack is counted in operations and expressed in reference seconds, which are seconds on a
fixed machine (:mod:`residuum.attacks.cost`). ``--budget`` is a limit in reference seconds. If the budget is
too small for the planned work, the audit leaves work out and reports which work. Such an audit never ends in
exit code 0.

An audit also has a time limit in real seconds: 1.3 times the budget (``OVERRUN``), at least 20 seconds. An
audit that the time limit stops never ends in exit code 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from residuum.attacks import Attack
from residuum.attacks.base import MIN_CANDIDATES
from residuum.attacks.cost import estimate_reference_seconds
from residuum.attacks.stationarity.attack import Stationarity
from residuum.auditing.durations import duration
from residuum.auditing.request import AuditRequest
from residuum.networks.network import Network
from residuum.records import Knowledge, Record
from residuum.settings import RestartSettings, SearchSettings
from residuum.surfaces.surface import Surface

OVERRUN = 1.3  # time limit of an audit in seconds, as a multiple of its budget
# Shortest time limit of an audit in seconds, so that an audit with a tiny budget still writes a report.
MIN_DEADLINE = 20.0
# Shares of the budget: of all attacks together, of all positive controls together, and of each single
# baseline.
ATTACK_SHARE, CONTROL_SHARE, BASELINE_SHARE = 0.4, 0.4, 0.05
MAX_RESTARTS = 64  # largest number of restarts of one attack
# Largest number of candidates (reconstructed samples) of one attack. Scoring holds all of them in memory.
MAX_CANDIDATES = 20_000
# Largest number of values of all candidates in a batch of restarts, because the batch is in memory at once.
MAX_BATCH_UNKNOWNS = 20_000_000


class Effort(NamedTuple):
    """How much work an audit plans, in reference seconds (computing time on a fixed machine).

    Attributes:
        attack_seconds: Reference seconds of all attacks together.
        restarts: Factor by which the number of restarts in the settings of an attack is multiplied. Restarts
            that do not fit into ``attack_seconds`` are not planned.
        budget: The default budget of the audit in reference seconds.
    """

    attack_seconds: float
    restarts: float
    budget: float


EFFORTS = {
    "quick": Effort(10.0, 0.25, 60.0),
    "standard": Effort(80.0, 2.0, 600.0),
    "thorough": Effort(2000.0, 8.0, 7200.0),
}


@dataclass(frozen=True, eq=False)
class Batch(Record):
    """Restarts of one attack (runs from different random candidates) that are computed together.

    Attributes:
        attack: Name of the attack.
        restarts: Number of restarts in the batch.
        steps: Number of optimization steps of each restart.
        seed: Seed of the batch. The random numbers of a restart depend on this seed and on the number of the
            restart in the batch.
    """

    attack: str
    restarts: int
    steps: int
    seed: int

    def apply_to(self, attack: Attack) -> Attack:
        """Return a copy of the attack with this batch's number of restarts (runs), steps and seed."""
        return attack.changed(restarts=self.restarts, steps=self.steps, seed=self.seed)


@dataclass(frozen=True, eq=False)
class AttackPlan(Record):
    """The work that an audit plans for one attack.

    Attributes:
        restarts: Number of restarts (runs from different random candidates), 0 if the attack has none.
        seconds: Reference seconds (computing time on a fixed machine) that all restarts take. If the attack
            has no restarts, the reference seconds that the attack may take.
        runs: Whether the attack runs at all.
        left_out: The work for which the budget is too small, in words, "" if nothing is left out.
        batch_restarts: Number of restarts that are computed together in a batch.
        share: Share of this attack in the reference seconds of all attacks.
    """

    restarts: int = 0
    seconds: float = 0.0
    runs: bool = True
    left_out: str = ""
    batch_restarts: int = 1
    share: float = 1.0

    def batches(self, attack: Attack) -> list[Batch]:
        """Divide the restarts (independent runs) of an attack into batches with different seeds."""
        assert isinstance(attack, Stationarity)
        batch_sizes = [self.batch_restarts] * (self.restarts // self.batch_restarts)
        if remainder := self.restarts % self.batch_restarts:
            batch_sizes.append(remainder)
        return [
            Batch(attack.name, size, attack.steps, attack.seed + i)
            for i, size in enumerate(batch_sizes)
        ]


class Deadline:
    """The time at which an audit must end. The time limit counts from the creation of this object.

    Args:
        seconds: Time limit in seconds.
        clock: Returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self.start = clock()

    @classmethod
    def for_request(cls, request: AuditRequest) -> Deadline:
        """Return the deadline of an audit with the settings ``request``. The time limit starts now."""
        return cls(max(MIN_DEADLINE, OVERRUN * limit_of(request)))

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline. The number is negative after the deadline."""
        return self.seconds - (self.clock() - self.start)

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.seconds_left <= 0

    def charge(self, seconds: float) -> None:
        """Shorten the time limit by the seconds that an earlier, interrupted run of this audit took."""
        self.seconds -= seconds


NO_DEADLINE = Deadline(math.inf)


class PlanError(Exception):
    """Raised if an attack raises an error while its cost is counted.

    Attributes:
        name: Name of the attack.
        cause: Error that the attack raised.
    """

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.name, self.cause = name, cause


def effort_of(request: AuditRequest) -> Effort:
    """Look up how much work an audit plans, by its setting ``effort``."""
    return EFFORTS[request.effort]


def limit_of(request: AuditRequest) -> float:
    """Return the budget of an audit in reference seconds (computing time on a fixed machine).

    If the user passes no budget, the effort sets the budget.
    """
    requested_seconds = request.seconds
    return effort_of(request).budget if requested_seconds is None else requested_seconds


def plan_attacks(
    attacks: Mapping[str, Attack],
    surfaces: Mapping[str, Surface],
    network: Network,
    knowledge: Knowledge,
    request: AuditRequest,
    requested: Mapping[str, Mapping[str, Any]],
) -> dict[str, AttackPlan]:
    """Plan how much work each attack of an audit does.

    The effort grants all attacks together a number of reference seconds (computing time on a fixed machine).
    The attacks share these seconds equally, unless an attack asks for less (``Attack.effort_share``). An
    attack with restarts (runs from different random candidates) plans as many restarts as fit into its share,
    at least one. If the budget is too small for this plan, restarts are left out. If the budget is too small
    for one restart, the whole attack is left out.

    Args:
        attacks: Attacks that apply, by name.
        surfaces: Attack surface (part of the release) of each attack, by name of the attack.
        network: The network that is attacked.
        knowledge: What the attacker knows.
        request: Settings of the audit.
        requested: Settings of the attacks that the user asks for, by name of the attack.

    Returns:
        The plan of every attack, by name.

    Raises:
        PlanError: If an attack fails while its cost is counted.
    """
    effort, limit = effort_of(request), limit_of(request)
    attacks_that_share_time = {
        n: a for n, a in attacks.items() if not a.is_baseline and a.pace != "formula"
    }
    total_share = sum(attack.effort_share for attack in attacks_that_share_time.values())
    plans: dict[str, AttackPlan] = {}
    for name, attack in attacks.items():
        time_share = attack.effort_share / total_share if name in attacks_that_share_time else 0.0
        try:
            if attack.is_baseline:
                cost = _cost_of_baseline(attack, surfaces[name], network, knowledge)
                plans[name] = AttackPlan(seconds=cost, runs=cost <= BASELINE_SHARE * limit)
            elif name not in attacks_that_share_time:
                plans[name] = AttackPlan(seconds=math.inf)
            else:
                plan = plan_attack(
                    attack,
                    surfaces[name],
                    network,
                    knowledge,
                    planned=effort.attack_seconds * time_share,
                    allowed=ATTACK_SHARE * limit * time_share,
                    restart_factor=effort.restarts,
                    is_exact="restarts" in requested.get(name, {}),
                )
                plans[name] = plan.replace(share=time_share)
        except Exception as problem:
            raise PlanError(name, problem) from problem
    return plans


def plan_attack(
    attack: Attack,
    surface: Surface,
    network: Network,
    knowledge: Knowledge,
    planned: float,
    allowed: float,
    restart_factor: float,
    is_exact: bool = False,
) -> AttackPlan:
    """Plan how many restarts of one attack run, or how long an attack without restarts may run.

    A restart is a run of the attack from other random candidates. Reference seconds are computing time on a
    fixed machine.

    Args:
        attack: The attack.
        surface: The attack surface (part of the release) that the attack works on.
        network: The network that is attacked.
        knowledge: What the attacker knows.
        planned: Reference seconds that this attack should take at the chosen effort.
        allowed: Reference seconds that the budget allows for this attack.
        restart_factor: Factor by which the number of restarts in the settings of the attack is multiplied.
        is_exact: If the budget allows it, run exactly the number of restarts in the settings of the attack.

    Returns:
        The plan of the attack.
    """
    if attack.pace == "sized" or not isinstance(attack, RestartSettings):
        allowed_seconds = min(planned, allowed)
        shortfall = (
            ""
            if allowed_seconds >= planned
            else f"{allowed_seconds / planned:.0%} of the planned work ran"
        )
        return AttackPlan(seconds=allowed_seconds, left_out=shortfall)
    attack = attack.resolve_settings(network, knowledge)
    assert isinstance(attack, RestartSettings)
    restart_cost = max(estimate_reference_seconds(attack, surface, knowledge), 1e-9)
    max_restarts = max(1, min(MAX_RESTARTS, MAX_CANDIDATES // max(1, attack.candidates)))
    if is_exact:
        restarts = min(attack.restarts, max_restarts)
    else:
        planned_restarts = max(1, math.ceil(restart_factor * attack.restarts))
        restarts = max(1, min(planned_restarts, int(planned / restart_cost), max_restarts))
    affordable_restarts = min(restarts, int(allowed / restart_cost))
    if not affordable_restarts:
        cost_text = duration(restart_cost)
        return AttackPlan(
            runs=False,
            left_out=f"a single restart takes about {cost_text}, more than the budget allows",
            seconds=restart_cost,
        )
    unknowns = attack.candidates * math.prod(surface.sample_shape(knowledge))
    batch_size = max(1, MAX_BATCH_UNKNOWNS // max(1, unknowns))
    left_out = (
        ""
        if affordable_restarts == restarts
        else f"{affordable_restarts} of {restarts} restarts ran"
    )
    return AttackPlan(
        affordable_restarts,
        affordable_restarts * restart_cost,
        True,
        left_out,
        min(affordable_restarts, batch_size),
    )


def _cost_of_baseline(
    attack: Attack, surface: Surface, network: Network, knowledge: Knowledge
) -> float:
    attack = attack.resolve_settings(network, knowledge)
    if not isinstance(attack, SearchSettings):
        return 0.0
    attack = attack.changed(candidates=max(MIN_CANDIDATES, attack.candidates))
    return estimate_reference_seconds(attack, surface, knowledge)


def forecast(plans: Mapping[str, AttackPlan], request: AuditRequest) -> str:
    """Describe what an audit plans to run.

    Args:
        plans: The plans of the attacks, by name.
        request: Settings of the audit.

    Returns:
        Sentences that name the effort, the time limit, the attacks, and the work that is left out.
    """
    budget_text = duration(limit_of(request))
    planned_texts = [
        f"{name}, {plan.restarts} restart{'' if plan.restarts == 1 else 's'}"
        for name, plan in plans.items()
        if plan.runs and plan.restarts
    ]
    forecast_text = f"Effort {request.effort}, at most {budget_text} of reference time."
    forecast_text += f" Attacks: {'; '.join(planned_texts)}." if planned_texts else ""
    left_out_texts = [f"{name}: {plan.left_out}" for name, plan in plans.items() if plan.left_out]
    if left_out_texts:
        forecast_text += f" Left out, because the budget is too small: {'; '.join(left_out_texts)}."
        forecast_text += " This audit can show a leak and cannot rule one out."
    return forecast_text


def budget_for_all(plans: Mapping[str, AttackPlan], request: AuditRequest) -> float | None:
    """Return the smallest advised budget that is large enough for all planned work of an audit.

    Args:
        plans: The plans of the attacks, by name.
        request: Settings of the audit.

    Returns:
        The budget in reference seconds (computing time on a fixed machine), None if no work is left out.
    """
    reduced_plans = [plan for plan in plans.values() if plan.left_out]
    if not reduced_plans:
        return None
    seconds_for_one_restart = max(
        (plan.seconds / plan.share for plan in reduced_plans if not plan.runs), default=0.0
    )
    seconds_needed = max(effort_of(request).budget, seconds_for_one_restart / ATTACK_SHARE)
    return 60.0 * math.ceil(seconds_needed / 60)
