"""What a sweep is asked to do: which settings it varies, how far, and in which order they are tried.

A setting is a number of :class:`AttackConfig`; its range is wider than the box that was searched for
the published runs, whose best ones ended at its edges (lambda_min 0.5, alpha about 20).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from residuum.attacks import AttackConfig
from residuum.attacks.cost import Estimate
from residuum.attacks.registry import ATTACKS
from residuum.attacks.stationarity.solver import CHECK_EVERY
from residuum.attacks.unmixing.attack import Unmix
from residuum.errors import InputError, require_known
from residuum.records import Record
from residuum.settings import LEFT_OPEN, NUMBERS, settings_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Params = dict[str, float]
SAMPLERS = ("random", "sobol", "tpe")
LEARNING = ("tpe",)  # they look at what ended, wave by wave
COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"
STATES = {COMPLETE: "COMPLETE", PRUNED: "PRUNED", FAILED: "FAIL"}  # in Optuna's words
SEEDS = 100_003  # trials of one sweep at most; sweeps with other seeds share no random number
OBJECTIVES = ("residual", "agreement")
EXPECTED = ("expected",)  # what ranks trials of an attack that leaves no residual
DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = ("minimize", "maximize")
RANKINGS = {
    False: "residual, or by residual,agreement",
    True: "expected, since unmix leaves no residual",
}
ETA = 3  # of a rung's trials one in so many goes on to the next, for so many times the steps


@dataclass(frozen=True)
class Trial(Record):
    """A trial as it is remembered. values: what it is ranked by, () unless complete; the less the better
    in the first of them, which is minus ``expected`` where that ranks.

    residual: relative first-layer residual (a norm), median of the restarts that did not diverge,
        None of an attack that leaves none.
    agreement: share of its candidates that several restarts hold.
    expected: sum of the confidences of those, the number of reconstructions that it takes to be
        real. Where an attack withholds confidence: sum of the shares of runs that hold them.
    params: its settings, of those that are varied.
    state: complete, failed or pruned; reason: why it failed.
    step: of the rung that it reached.
    diverged: restarts that did.
    """

    number: int
    params: Params
    state: str
    values: tuple[float, ...] = ()
    residual: float | None = None
    agreement: float | None = None
    expected: float | None = None
    step: int | None = None
    diverged: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Range:
    """A range, both ends included; log: tried evenly in the logarithm; whole: whole numbers."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def distribution(self) -> BaseDistribution:
        """The same range in Optuna's words."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high))
        return FloatDistribution(self.low, self.high, log=self.log)


# In the comments the box that was searched for the published runs (Haim et al. 2022, as released).
SPACE: dict[str, Range] = {
    "lr_x": Range(1e-5, 3.0, log=True),  # 1e-5 .. 1
    "lr_lam": Range(1e-5, 3.0, log=True),  # fixed at 1e-4
    "sigma": Range(1e-6, 1.0, log=True),  # 1e-6 .. 0.1
    "lam_min": Range(0.0, 1.0),  # 0.01 .. 0.5
    "sharpness": Range(5.0, 1000.0, log=True),  # 10 .. 500
}
UNMIX = ("unmix_rank", "unmix_strength", "unmix_starts")
UNMIX_SPACE: dict[str, Range] = {
    "unmix_rank": Range(0.3, 1.0),
    "unmix_strength": Range(1.0, 8.0, log=True),
}


def unmixes(config: AttackConfig) -> bool:
    """Whether it takes a layer apart: without steps, without a residual, with settings of its own."""
    return isinstance(ATTACKS.get(config.objective), Unmix)


def numeric() -> dict[str, Any]:
    """Settings of an attack that a sweep can vary, with their defaults."""
    skipped = ("restarts", "seed", "seconds", "steps")
    defaults = {n: one.default for n, one in settings_of(AttackConfig).items()} | LEFT_OPEN
    return {n: v for n, v in defaults.items() if n not in skipped and type(v) in (int, float)}


def _check(space: Mapping[str, Range]) -> None:
    """Every name is a setting of the attack, and both ends of its range are valid for it."""
    known = numeric()
    if not space:
        raise InputError("A sweep must vary a setting.", "Leave --search out for the default.")
    for name, setting in space.items():
        require_known(name, known, "A sweep cannot vary")
        if not setting.low < setting.high or (setting.log and setting.low <= 0):
            raise InputError(
                f"{name} must run from low to high, above 0 on a log scale; got {setting.low:g} "
                f"to {setting.high:g}.",
                f"Example: --search {name}=1e-3:1:log.",
            )
        for end in (setting.low, setting.high):
            configured(AttackConfig(), {name: end})


def configured(config: AttackConfig, params: Params) -> AttackConfig:
    """The configuration with these settings, each in the type that it has."""
    known = numeric()
    changes: dict[str, Any] = {name: type(known[name])(value) for name, value in params.items()}
    return config.changed(**changes)


@dataclass(frozen=True)
class Plan:
    """The trials of a sweep: everything that decides them, and nothing that does not.

    config: what is not varied; restarts and steps are those of one trial.
    space: what is.
    batch: trials that share a program, side by side (1: each alone).
    wave: trials drawn together by a sampler that learns.
    rungs: pauses of successive halving, 0 for none.
    objectives: ("residual",) or ("residual", "agreement"), the second for a front of trials none of
        which beats another; ("expected",) of unmix, which leaves no residual, and whose space is
        ``UNMIX_SPACE``.
    """

    trials: int = 32
    sampler: str = "random"
    seed: int = 0
    config: AttackConfig = field(default_factory=lambda: AttackConfig(restarts=2))
    space: Mapping[str, Range] = field(default_factory=lambda: dict(SPACE))
    batch: int = 1
    wave: int = 16
    rungs: int = 0
    objectives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if apart := unmixes(self.config):
            self._check_unmix()
        if not self.objectives:
            object.__setattr__(self, "objectives", EXPECTED if apart else OBJECTIVES[:1])
        _check(self.space)
        require_known(self.sampler, SAMPLERS, "No sampler")
        if not 1 <= self.trials <= SEEDS:
            raise InputError(f"Trials are from 1 to {SEEDS}; got {self.trials}.", "Correct it.")
        if min(self.batch, self.wave) < 1 or self.rungs < 0:
            raise InputError("batch and wave are at least 1, rungs at least 0.", "Correct them.")
        if self.objectives not in ((EXPECTED,) if apart else (OBJECTIVES[:1], OBJECTIVES)):
            raise InputError(
                f"A sweep ranks by {RANKINGS[apart]}; got {','.join(self.objectives)}.",
                "Leave --rank-by out.",
            )
        if self.config.objective in ATTACKS and not apart:
            raise InputError(
                f"A sweep varies attacks on the weights' equation, and unmix; {self.config.objective} "
                "takes no steps on it.",
                "Run it with residuum attack.",
            )
        alone = [name for name in self.space if name not in NUMBERS]
        if self.batch > 1 and alone:
            raise InputError(
                f"Trials that share a program may differ in {', '.join(NUMBERS)} alone; "
                f"{alone[0]} is varied too.",
                "Use --batch 1.",
            )
        if self.batch > 1 and self.rungs:
            raise InputError(
                "Successive halving stops trials one by one; trials that share a program stop "
                "together.",
                "Use --batch 1, or --rungs 0.",
            )
        if self.objectives != OBJECTIVES[:1] and self.config.restarts < 2:
            raise InputError(
                "Agreement is between restarts; a trial has one.", "Use --restarts 2 or more."
            )

    def _check_unmix(self) -> None:
        """Its own settings, by default a share of the rank and a strength; no steps to pause at."""
        if self.space == SPACE:
            object.__setattr__(self, "space", dict(UNMIX_SPACE))
        for name in self.space:
            require_known(name, UNMIX, f"A sweep of {self.config.objective} cannot vary")
        if self.rungs:
            raise InputError(
                f"Successive halving pauses at steps; {self.config.objective} takes none.",
                "Use --rungs 0.",
            )

    @property
    def waves(self) -> list[range]:
        """Trials that are drawn together: all of them, unless the sampler learns."""
        size = self.wave if self.sampler in LEARNING else self.trials
        return [range(at, min(at + size, self.trials)) for at in range(0, self.trials, size)]

    @property
    def pauses(self) -> list[int]:
        """Steps at which the worst trials of a wave end, in whole looks at the loss."""
        wanted = (self.config.steps / ETA**k for k in range(self.rungs, 0, -1))
        rounded = {CHECK_EVERY * math.ceil(step / CHECK_EVERY) for step in wanted}
        return sorted(step for step in rounded if step < self.config.steps)

    def to_json(self) -> dict[str, Any]:
        """Plain values: what a stored study is compared with."""
        config = {k: v for k, v in self.config.to_json().items() if k != "seconds"}
        space = {name: dataclasses.asdict(setting) for name, setting in self.space.items()}
        return {**vars(self), "config": config, "space": space, "objectives": list(self.objectives)}


def cost(plan: Plan, trial: Estimate) -> dict[str, float]:
    """What a sweep takes on one device like the measured one; trial: the cost of a whole trial."""
    left, before, steps = plan.trials, 0, 0
    for pause in plan.pauses:
        steps += left * (pause - before)
        left, before = math.ceil(left / ETA), pause
    steps += left * (plan.config.steps - before)
    seconds = steps * trial.seconds / plan.config.steps
    return {
        "seconds_per_trial": trial.seconds,
        "trials_per_hour": 3600 * plan.trials / seconds,
        "hours_of_this_sweep": seconds / 3600,
        "hours_of_10000_runs": 10_000 / plan.config.restarts * seconds / plan.trials / 3600,
        "memory_bytes_per_trial": float(sum(trial.memory.values())),
        "gflop_per_step": trial.flops_per_step / 1e9,
    }
