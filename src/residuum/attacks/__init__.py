"""Attacks from weights alone. Nothing here may import datasets, training or evaluation."""

from residuum.attacks.applicability import applicability
from residuum.attacks.config import AttackConfig
from residuum.attacks.dryrun import estimate
from residuum.attacks.objectives import OBJECTIVES
from residuum.attacks.presets import GROWTH_PRESETS, PRESETS
from residuum.attacks.priors import PRIORS
from residuum.attacks.run import attack
from residuum.attacks.selection import select

__all__ = [
    "GROWTH_PRESETS",
    "OBJECTIVES",
    "PRESETS",
    "PRIORS",
    "AttackConfig",
    "applicability",
    "attack",
    "estimate",
    "select",
]
