"""What a sweep is asked to do: everything that decides its trials, and nothing that does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from residuum.attacks import AttackConfig
from residuum.attacks.config import NUMBERS
from residuum.attacks.dryrun import Estimate
from residuum.attacks.run import ATTACKS
from residuum.attacks.solver import CHECK_EVERY
from residuum.errors import InputError, did_you_mean
from residuum.sweeping.space import SAMPLERS, SPACE, Setting, check
from residuum.sweeping.trials import SEEDS

OBJECTIVES = ("residual", "agreement")
ETA = 3  # of a rung's trials one in so many goes on to the next, for so many times the steps


@dataclass(frozen=True)
class Plan:
    """The trials of a sweep.

    config: what is not varied; restarts and steps are those of one trial; space: what is; batch:
    trials that share a program, side by side (1: each alone); wave: trials drawn together by a
    sampler that learns; rungs: pauses of successive halving, 0 for none; objectives: ("residual",)
    or ("residual", "agreement"), the second for a front of trials none of which beats another.
    """

    trials: int = 32
    sampler: str = "random"
    seed: int = 0
    config: AttackConfig = field(default_factory=lambda: AttackConfig(restarts=2))
    space: Mapping[str, Setting] = field(default_factory=lambda: dict(SPACE))
    batch: int = 1
    wave: int = 16
    rungs: int = 0
    objectives: tuple[str, ...] = ("residual",)

    def __post_init__(self) -> None:
        check(self.space)
        if self.sampler not in SAMPLERS:
            raise InputError(
                f"No sampler {self.sampler!r}.", did_you_mean(self.sampler, tuple(SAMPLERS))
            )
        if not 1 <= self.trials <= SEEDS:
            raise InputError(f"Trials are from 1 to {SEEDS}; got {self.trials}.", "Correct it.")
        if min(self.batch, self.wave) < 1 or self.rungs < 0:
            raise InputError("batch and wave are at least 1, rungs at least 0.", "Correct them.")
        if self.objectives not in (OBJECTIVES[:1], OBJECTIVES):
            raise InputError(
                f"A sweep ranks by residual, or by residual,agreement; got {self.objectives}.",
                "Use --rank-by residual.",
            )
        if self.config.objective in ATTACKS:
            raise InputError(
                f"A sweep varies attacks on the weights' equation; {self.config.objective} takes "
                "no steps on it.",
                "Run it with residuum attack.",
            )
        self._check_sharing()

    def _check_sharing(self) -> None:
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
        if "agreement" in self.objectives and self.config.restarts < 2:
            raise InputError(
                "Agreement is between restarts; a trial has one.", "Use --restarts 2 or more."
            )

    @property
    def waves(self) -> list[range]:
        """Trials that are drawn together: all of them, unless the sampler learns."""
        size = self.trials if SAMPLERS[self.sampler] is not None else self.wave
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
        space = {name: asdict(setting) for name, setting in self.space.items()}
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
