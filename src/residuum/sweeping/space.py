"""Which settings a sweep varies, how far, and in which order they are tried.

A setting is a number of :class:`AttackConfig`; its range is wider than the box that was searched for
the published runs, whose best ones ended at its edges (lambda_min 0.5, alpha about 20). Random and
Sobol points are functions of the seed and the trial's number alone: any trial can be drawn again,
on any machine, without its predecessors having ended. TPE learns from the trials of earlier waves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from residuum.attacks import AttackConfig
from residuum.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from residuum.sweeping.trials import Trial

Params = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """A range, both ends included; log: tried evenly in the logarithm; whole: whole numbers."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, share: float) -> float:
        """The value at a share in [0, 1] of the way from low to high."""
        if self.whole:
            return int(self.low) + math.floor(min(share, 1 - 1e-12) * (self.high - self.low + 1))
        if self.log:
            return self.low * (self.high / self.low) ** share
        return self.low + share * (self.high - self.low)

    def share(self, value: float) -> float:
        """The inverse of :meth:`at`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def distribution(self) -> BaseDistribution:
        """The same range in Optuna's words."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high))
        return FloatDistribution(self.low, self.high, log=self.log)


# In the comments the box that was searched for the published runs (Haim et al. 2022, as released).
SPACE: dict[str, Setting] = {
    "lr_x": Setting(1e-5, 3.0, log=True),  # 1e-5 .. 1
    "lr_lam": Setting(1e-5, 3.0, log=True),  # fixed at 1e-4
    "sigma": Setting(1e-6, 1.0, log=True),  # 1e-6 .. 0.1
    "lam_min": Setting(0.0, 1.0),  # 0.01 .. 0.5
    "sharpness": Setting(5.0, 1000.0, log=True),  # 10 .. 500
}


def numeric() -> dict[str, Any]:
    """Settings of an attack that a sweep can vary, with their defaults."""
    skipped = ("restarts", "seed", "seconds", "steps")
    return {
        field.name: field.default
        for field in dataclasses.fields(AttackConfig)
        if isinstance(field.default, int | float)
        and not isinstance(field.default, bool)
        and field.name not in skipped
    }


def check(space: Mapping[str, Setting]) -> None:
    """Every name is a setting of the attack, and both ends of its range are valid for it."""
    known = numeric()
    if not space:
        raise InputError("A sweep must vary a setting.", "Leave --search out for the default.")
    for name, setting in space.items():
        if name not in known:
            raise InputError(f"A sweep cannot vary {name!r}.", did_you_mean(name, tuple(known)))
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
    return dataclasses.replace(config, **changes)


def _random(count: int, dimensions: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random((count, dimensions))


def _sobol(count: int, dimensions: int, seed: int) -> np.ndarray[Any, Any]:
    from scipy.stats.qmc import Sobol

    # Drawn up to a power of two: the points balance then, and a longer sweep begins alike.
    points = Sobol(dimensions, scramble=True, rng=np.random.default_rng(seed))
    return points.random_base2(max(1, (count - 1).bit_length()))[:count]


def draw(
    sampler: str, space: Mapping[str, Setting], numbers: range, seed: int, told: Sequence[Trial]
) -> list[Params]:
    """Settings of the trials ``numbers``; told: earlier trials, of which only ``tpe`` takes notice."""
    if sampler not in SAMPLERS:
        raise InputError(f"No sampler {sampler!r}.", did_you_mean(sampler, tuple(SAMPLERS)))
    points = SAMPLERS[sampler]
    if points is None:
        return _tpe(space, numbers, seed, told)
    shares = points(numbers.stop, len(space), seed)[numbers.start :]
    return [
        {name: setting.at(share) for (name, setting), share in zip(space.items(), row, strict=True)}
        for row in shares.tolist()
    ]  # fmt: skip


def _tpe(
    space: Mapping[str, Setting], numbers: range, seed: int, told: Sequence[Trial]
) -> list[Params]:
    """A wave of suggestions: a fresh study is told what ended, in the order of the trials' numbers.

    So a wave depends on the earlier ones alone, not on who finished first nor on a restart.
    """
    import optuna

    ended = [trial for trial in told if trial.state == "complete"]
    several = bool(ended) and len(ended[0].values) > 1
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        directions=["minimize", "maximize"] if several else ["minimize"],
        sampler=optuna.samplers.TPESampler(seed=seed * 100_003 + numbers.start, constant_liar=True),
    )
    distributions = {name: setting.distribution() for name, setting in space.items()}
    for trial in sorted(ended, key=lambda one: one.number):
        study.add_trial(
            optuna.trial.create_trial(
                values=list(trial.values), params=trial.params, distributions=distributions
            )
        )
    return [dict(study.ask(distributions).params) for _ in numbers]


# None: it learns from earlier trials, wave by wave.
SAMPLERS: dict[str, Callable[[int, int, int], np.ndarray[Any, Any]] | None] = {
    "random": _random,
    "sobol": _sobol,
    "tpe": None,
}
