"""What a sweep is asked to do: which settings it varies, how far, in which order, and where trials run.

The ranges are wider than the box that was searched for the published runs, because the best of those
runs ended at its edges (lambda_min 0.5, alpha about 20).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pydantic import Field, InstanceOf, model_validator

from residuum.attacks import Attack, Auto
from residuum.attacks.cost import Estimate
from residuum.attacks.stationarity.attack import StationarityAttack
from residuum.attacks.stationarity.solver import CHECK_EVERY
from residuum.attacks.unmixing.attack import Unmix
from residuum.errors import InputError, require_known
from residuum.records import Record
from residuum.settings import FALLBACKS, NUMBERS, TRIAL_RESTARTS, RestartSettings, SweepSettings

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Params = dict[str, float]
SAMPLERS = ("random", "sobol", "tpe")
LEARNING = ("tpe",)  # samplers that look at finished trials, wave by wave
COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"
STATES = {COMPLETE: "COMPLETE", PRUNED: "PRUNED", FAILED: "FAIL"}  # Optuna's names
SEEDS = 100_003  # trials of one sweep at most; sweeps with other seeds share no random number
OBJECTIVES = ("residual", "agreement")
EXPECTED = ("expected",)  # ranks trials of an attack that leaves no residual
DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = ("minimize", "maximize")
RANKINGS = {
    False: "residual, or by residual,agreement",
    True: "expected, since unmix leaves no residual",
}
PLACES = {"engine", "workers", "cpus", "gpus", "address", "retries", "storage"}  # where trials run
ETA = 3  # one in ETA trials of a rung goes on to the next, for ETA times the steps


@dataclass(frozen=True)
class Trial(Record):
    """What is remembered of a trial.

    number: its place in the sweep, from 0.
    params: values of the settings that the sweep varies.
    state: complete, pruned or failed.
    values: what the trial is ranked by, () unless complete. The first is minimized: the residual, or
        minus ``expected``.
    residual: relative first-layer residual (a norm), median of the restarts that did not diverge;
        None if the attack leaves none.
    agreement: share of its candidates that several restarts hold.
    expected: sum of the confidences of those candidates, the number of reconstructions that are
        expected to be real. If the attack withholds confidence: sum of the shares of runs that hold
        them.
    step: the step that it reached.
    diverged: restarts that diverged.
    reason: why it failed.
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
        """Return the range as an Optuna distribution."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high))
        return FloatDistribution(self.low, self.high, log=self.log)


# The comments give the box that was searched for the published runs (Haim et al. 2022, as released).
SPACE: dict[str, Range] = {
    "lr_x": Range(1e-5, 3.0, log=True),  # 1e-5 .. 1
    "lr_lam": Range(1e-5, 3.0, log=True),  # fixed at 1e-4
    "sigma": Range(1e-6, 1.0, log=True),  # 1e-6 .. 0.1
    "lam_min": Range(0.0, 1.0),  # 0.01 .. 0.5
    "sharpness": Range(5.0, 1000.0, log=True),  # 10 .. 500
}
UNMIX = ("rank", "strength", "starts")
UNMIX_SPACE: dict[str, Range] = {
    "rank": Range(0.3, 1.0),
    "strength": Range(1.0, 8.0, log=True),
}


def numeric(attack: type[Attack]) -> dict[str, Any]:
    """Return the settings of an attack that a sweep can vary, with their defaults."""
    skipped = ("restarts", "seed", "seconds", "steps")
    defaults = {name: FALLBACKS.get(name, f.default) for name, f in attack.model_fields.items()}
    return {n: v for n, v in defaults.items() if n not in skipped and type(v) in (int, float)}


def configured(attack: Attack, params: Params) -> Attack:
    """Return the attack with these settings, each converted to the type of its default."""
    defaults = numeric(type(attack))
    changes: dict[str, Any] = {name: type(defaults[name])(v) for name, v in params.items()}
    return attack.changed(**changes)


def restarts_of(attack: Attack) -> int:
    """Return the number of restarts of an attack that a sweep can vary."""
    assert isinstance(attack, RestartSettings | Unmix)
    return attack.restarts


class SweepOptions(TypedDict, total=False):
    """Names and types of the fields of :class:`SweepRequest`, for editors and type checkers."""

    trials: int
    sampler: str
    seed: int
    attack: Attack
    space: Mapping[str, Range]
    batch: int
    wave: int
    rungs: int
    objectives: tuple[str, ...]
    engine: str
    workers: int
    cpus: int
    gpus: float
    address: str
    retries: int
    storage: str | None


class SweepRequest(SweepSettings):
    """What a sweep is asked to do.

    For unmix, ``space`` is ``UNMIX_SPACE`` and ``objectives`` is ("expected",) by default.

    Raises:
        InputError: If an option is unknown, is out of its bounds, or contradicts another.
    """

    attack: InstanceOf[Attack] = Field(
        default=Auto(restarts=TRIAL_RESTARTS),
        description="The attack. Its settings are those that are not varied; its restarts and steps are "
        "those of one trial.",
    )
    space: Mapping[str, Range] = Field(default=SPACE, description="Settings to vary, by name.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults_of_unmix(cls, options: dict[str, Any]) -> dict[str, Any]:
        if isinstance(options.get("attack"), Unmix):
            return {"space": UNMIX_SPACE, "objectives": EXPECTED, **options}
        return options

    @model_validator(mode="after")
    def _check(self) -> SweepRequest:
        require_known(self.sampler, SAMPLERS, "No sampler")
        if isinstance(self.attack, Unmix):
            self._check_unmix()
        elif not isinstance(self.attack, StationarityAttack):
            raise InputError(
                f"A sweep varies stationarity attacks and unmix; {self.attack.name} is none of them.",
                "Run it with residuum attack.",
            )
        self._check_space()
        self._check_objectives()
        if self.batch > 1:
            self._check_batch()
        return self

    def _check_unmix(self) -> None:
        for name in self.space:
            require_known(name, UNMIX, f"A sweep of {self.attack.name} cannot vary")
        if self.rungs:
            raise InputError(
                f"Successive halving pauses at steps; {self.attack.name} takes none.",
                "Use --rungs 0.",
            )

    def _check_space(self) -> None:
        """Every name is a setting of the attack, and both ends of its range are valid for it."""
        if not self.space:
            raise InputError("A sweep must vary a setting.", "Leave --search out for the default.")
        for name, setting in self.space.items():
            require_known(name, numeric(type(self.attack)), "A sweep cannot vary")
            if not setting.low < setting.high or (setting.log and setting.low <= 0):
                raise InputError(
                    f"{name} must run from low to high, above 0 on a log scale; got {setting.low:g} "
                    f"to {setting.high:g}.",
                    f"Example: --search {name}=1e-3:1:log.",
                )
            for end in (setting.low, setting.high):
                configured(type(self.attack)(), {name: end})

    def _check_objectives(self) -> None:
        unmix = isinstance(self.attack, Unmix)
        if self.objectives not in ((EXPECTED,) if unmix else (OBJECTIVES[:1], OBJECTIVES)):
            raise InputError(
                f"A sweep ranks by {RANKINGS[unmix]}; got {','.join(self.objectives)}.",
                "Leave --rank-by out.",
            )
        if self.objectives != OBJECTIVES[:1] and restarts_of(self.attack) < 2:
            raise InputError(
                "Agreement is between restarts; a trial has one.", "Use --restarts 2 or more."
            )

    def _check_batch(self) -> None:
        if alone := [name for name in self.space if name not in NUMBERS]:
            raise InputError(
                f"Trials that share a program may differ in {', '.join(NUMBERS)} alone; "
                f"{alone[0]} is varied too.",
                "Use --batch 1.",
            )
        if self.rungs:
            raise InputError(
                "Successive halving stops trials one by one; trials that share a program stop "
                "together.",
                "Use --batch 1, or --rungs 0.",
            )

    @property
    def waves(self) -> list[range]:
        """Numbers of the trials that are drawn together: all of them, unless the sampler learns."""
        size = self.wave if self.sampler in LEARNING else self.trials
        return [range(at, min(at + size, self.trials)) for at in range(0, self.trials, size)]

    @property
    def pauses(self) -> list[int]:
        """Steps at which the worst trials of a wave end, in multiples of ``CHECK_EVERY``."""
        if not isinstance(self.attack, RestartSettings):
            return []
        last = self.attack.steps
        steps = (last / ETA**k for k in range(self.rungs, 0, -1))
        rounded = {CHECK_EVERY * math.ceil(step / CHECK_EVERY) for step in steps}
        return sorted(step for step in rounded if step < last)

    def plan(self) -> dict[str, Any]:
        """Return what decides the trials as plain values: a stored sweep is compared with it."""
        attack = {k: v for k, v in self.attack.to_json().items() if k != "seconds"}
        return {**self.model_dump(mode="json", exclude={"attack", *PLACES}), "attack": attack}


def cost(request: SweepRequest, trial: Estimate) -> dict[str, float]:
    """Return what a sweep takes on one device, from the measured cost of a whole trial."""
    running, before, steps = request.trials, 0, 0
    for pause in (*request.pauses, trial.steps):
        steps += running * (pause - before)
        running, before = math.ceil(running / ETA), pause
    seconds = steps * trial.seconds / trial.steps
    return {
        "seconds_per_trial": trial.seconds,
        "trials_per_hour": 3600 * request.trials / seconds,
        "hours_of_this_sweep": seconds / 3600,
        "hours_of_10000_runs": 10_000 / trial.restarts * seconds / request.trials / 3600,
        "memory_bytes_per_trial": float(sum(trial.memory.values())),
        "gflop_per_step": trial.flops_per_step / 1e9,
    }
