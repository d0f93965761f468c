"""The request of a sweep: which settings the sweep varies, in which ranges, and where the trials run.

The ranges are wider than those that Haim et al. (2022) searched, because the best of their published runs
ended at the edges of the ranges (lambda_min 0.5, alpha about 20).
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
# Names of the samplers that use the results of earlier trials to choose the settings of the next trials.
LEARNING = ("tpe",)
COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"
# The names that Optuna gives to the states of a trial.
STATES = {COMPLETE: "COMPLETE", PRUNED: "PRUNED", FAILED: "FAIL"}
# Maximal number of trials of a sweep. It guarantees that the trials of two sweeps with different seeds have
# different seeds.
SEEDS = 100_003
OBJECTIVES = ("residual", "agreement")
# What a sweep maximizes if the attack solves no equation: the number of reconstructions that are probably
# real.
EXPECTED = ("expected",)
DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = ("minimize", "maximize")
RANKING_RULES = {  # the key is True for the attack unmix, and False for other attacks
    False: "'residual' or 'residual,agreement'",
    True: "'expected', because the attack 'unmix' has no residual",
}
# Settings that decide where the trials run, and do not change the results.
PLACES = {"engine", "workers", "cpus", "gpus", "address", "retries", "storage"}
# After each pause of successive halving, the best 1/ETA of the trials continue, for ETA times as many steps.
ETA = 3


@dataclass(frozen=True)
class Trial(Record):
    """The result of a trial, one run of the attack with one set of settings.

    Attributes:
        number: Number of the trial in the sweep, from 0.
        params: Values of the settings that the sweep varies, by name.
        state: "complete", "pruned" (stopped early) or "failed".
        values: Values of the objectives, () unless the trial is complete. The first value is minimized. It
            is the residual, or minus ``expected``.
        residual: Relative first-layer residual (a norm), the median of the restarts that did not diverge.
            None if the attack has no residual.
        agreement: Share of the candidates that several restarts found.
        expected: Number of reconstructions that are expected to be real. This is the sum of the
            confidences of the reconstructions that several restarts found. If the attack gives no
            confidence, the share of the restarts that found a reconstruction is its confidence.
        step: Last step of the attack.
        diverged: Number of restarts that diverged.
        seconds: Duration of the trial.
        reason: Why the trial failed or was pruned.
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
    """The range of values that a sweep gives to a setting. Both ends are included.

    Attributes:
        low: Smallest value of the setting.
        high: Largest value of the setting.
        log: Whether values are spread evenly on a logarithmic scale.
        integer: Whether the values are integers.
    """

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def distribution(self) -> BaseDistribution:
        """Convert the range to a distribution of the library Optuna."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.integer:
            return IntDistribution(int(self.low), int(self.high))
        return FloatDistribution(self.low, self.high, log=self.log)


# Default ranges of a sweep. The comments name the ranges in the released code of Haim et al. (2022).
SPACE: dict[str, Range] = {
    "lr_x": Range(1e-5, 3.0, log=True),  # Haim et al. searched from 1e-5 to 1
    "lr_lam": Range(1e-5, 3.0, log=True),  # Haim et al. used 1e-4 only
    "sigma": Range(1e-6, 1.0, log=True),  # Haim et al. searched from 1e-6 to 0.1
    "lam_min": Range(0.0, 1.0),  # Haim et al. searched from 0.01 to 0.5
    "sharpness": Range(5.0, 1000.0, log=True),  # Haim et al. searched from 10 to 500
}
UNMIX = ("rank", "strength", "starts")
UNMIX_SPACE: dict[str, Range] = {
    "rank": Range(0.3, 1.0),
    "strength": Range(1.0, 8.0, log=True),
}


def list_numeric_settings(attack: type[Attack]) -> dict[str, Any]:
    """Return the numeric settings of an attack, which a sweep can vary, with their default values."""
    fixed_settings = ("restarts", "seed", "seconds", "steps")
    defaults = {name: FALLBACKS.get(name, f.default) for name, f in attack.model_fields.items()}
    return {
        n: v for n, v in defaults.items() if n not in fixed_settings and type(v) in (int, float)
    }


def configure(attack: Attack, params: Params) -> Attack:
    """Return an attack with some settings changed.

    Args:
        attack: The attack.
        params: New values, by the name of the setting. A value is converted to the type of the default
            value of its setting.

    Returns:
        The attack with the new values.
    """
    defaults = list_numeric_settings(type(attack))
    changes: dict[str, Any] = {name: type(defaults[name])(v) for name, v in params.items()}
    return attack.changed(**changes)


def count_restarts(attack: Attack) -> int:
    """Return the number of restarts (runs from random starts) of the attack of a sweep."""
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
    """The settings of a sweep.

    If the attack is unmix, the default of ``space`` is ``UNMIX_SPACE``, and the default of ``objectives``
    is ("expected",).

    Raises:
        InputError: If an option is unknown, is out of bounds, or contradicts another option.
    """

    attack: InstanceOf[Attack] = Field(
        default=Auto(restarts=TRIAL_RESTARTS),
        description="The attack that a sweep (a search over settings) runs. Settings that the sweep does "
        "not vary keep the values of this attack.",
    )
    space: Mapping[str, Range] = Field(
        default=SPACE,
        description="For each setting of the attack that the sweep varies: its name and the range of its "
        "values.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults_of_unmix(cls, options: dict[str, Any]) -> dict[str, Any]:
        if isinstance(options.get("attack"), Unmix):
            return {"space": UNMIX_SPACE, "objectives": EXPECTED, **options}
        return options

    @model_validator(mode="after")
    def _check(self) -> SweepRequest:
        require_known(self.sampler, SAMPLERS, "There is no sampler")
        if isinstance(self.attack, Unmix):
            self._check_unmix()
        elif not isinstance(self.attack, StationarityAttack):
            raise InputError(
                "The attack of a sweep must be 'unmix' or an attack on a stationarity equation (an equation "
                f"that the weights satisfy after training), such as 'kkt'; got {self.attack.name!r}.",
                f"Run residuum attack {self.attack.name}, which runs the attack once.",
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
                f"Successive halving (stopping the worst trials early) needs an attack that runs in "
                f"steps; {self.attack.name} has no steps.",
                "Use --rungs 0.",
            )

    def _check_space(self) -> None:
        """Check that the attack has every setting to vary, and that both ends of each range are valid."""
        if not self.space:
            raise InputError(
                "A sweep must vary at least one setting; got no setting.",
                "Omit --search to vary the default settings.",
            )
        for name, setting in self.space.items():
            require_known(name, list_numeric_settings(type(self.attack)), "A sweep cannot vary")
            if not setting.low < setting.high or (setting.log and setting.low <= 0):
                raise InputError(
                    f"The range of the setting {name} must go from a smaller to a larger number, and a "
                    f"range on a log scale must start above 0; got {setting.low:g} to {setting.high:g}.",
                    f"Example: --search {name}=1e-3:1:log.",
                )
            for end in (setting.low, setting.high):
                configure(type(self.attack)(), {name: end})

    def _check_objectives(self) -> None:
        is_unmix = isinstance(self.attack, Unmix)
        if self.objectives not in ((EXPECTED,) if is_unmix else (OBJECTIVES[:1], OBJECTIVES)):
            raise InputError(
                f"The option --rank-by must be {RANKING_RULES[is_unmix]}; got "
                f"{','.join(self.objectives)!r}.",
                "Omit --rank-by.",
            )
        if self.objectives != OBJECTIVES[:1] and count_restarts(self.attack) < 2:
            raise InputError(
                "Ranking by agreement compares the restarts of a trial (runs from different random "
                "starts), so a trial needs at least 2 restarts; got 1.",
                "Use --restarts 2 or more.",
            )

    def _check_batch(self) -> None:
        if unsupported := [name for name in self.space if name not in NUMBERS]:
            raise InputError(
                f"Trials that run as one batch may differ only in the settings {', '.join(NUMBERS)}; the "
                f"sweep also varies "
                f"{unsupported[0]}.",
                "Use --batch 1.",
            )
        if self.rungs:
            raise InputError(
                "Successive halving stops single trials early, and the trials of a batch can only stop "
                "together, so the two options cannot be combined.",
                "Use --batch 1, or --rungs 0.",
            )

    @property
    def waves(self) -> list[range]:
        """For each wave (a group of trials whose settings are drawn together), the numbers of its trials."""
        wave_size = self.wave if self.sampler in LEARNING else self.trials
        first_trials = range(0, self.trials, wave_size)
        return [range(start, min(start + wave_size, self.trials)) for start in first_trials]

    @property
    def pauses(self) -> list[int]:
        """Steps of the attack after which the worst trials are stopped early (successive halving)."""
        if not isinstance(self.attack, RestartSettings):
            return []
        last_step = self.attack.steps
        pause_steps = (last_step / ETA**k for k in range(self.rungs, 0, -1))
        rounded_steps = {CHECK_EVERY * math.ceil(step / CHECK_EVERY) for step in pause_steps}
        return sorted(step for step in rounded_steps if step < last_step)

    def plan(self) -> dict[str, Any]:
        """Return the settings that decide the results of a sweep. They identify the sweep."""
        attack = {k: v for k, v in self.attack.to_json().items() if k != "seconds"}
        return {**self.model_dump(mode="json", exclude={"attack", *PLACES}), "attack": attack}


def estimate_cost(request: SweepRequest, trial: Estimate) -> dict[str, float]:
    """Estimate the cost of a sweep on one device.

    Args:
        request: The settings of the sweep.
        trial: The measured cost of one trial that runs to its end.

    Returns:
        Estimated seconds, rates and memory, by name.
    """
    running, previous, steps = request.trials, 0, 0
    for pause in (*request.pauses, trial.steps):
        steps += running * (pause - previous)
        running, previous = math.ceil(running / ETA), pause
    seconds = steps * trial.seconds / trial.steps
    return {
        "seconds_per_trial": trial.seconds,
        "trials_per_hour": 3600 * request.trials / seconds,
        "hours_of_this_sweep": seconds / 3600,
        "hours_of_10000_runs": 10_000 / trial.restarts * seconds / request.trials / 3600,
        "memory_bytes_per_trial": float(sum(trial.memory.values())),
        "gflop_per_step": trial.flops_per_step / 1e9,
    }
