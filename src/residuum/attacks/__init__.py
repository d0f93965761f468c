"""Attacks from weights alone. Nothing here may import datasets, training or evaluation."""

from residuum.attacks.contract import Attack, select
from residuum.attacks.dryrun import estimate
from residuum.attacks.objectives import OBJECTIVES
from residuum.attacks.priors import PRIORS
from residuum.attacks.run import ATTACKS, attack, every_attack
from residuum.settings import AttackConfig
from residuum.settings.presets import GROWTH_PRESETS, PRESETS

__all__ = [
    "ATTACKS",
    "GROWTH_PRESETS",
    "OBJECTIVES",
    "PRESETS",
    "PRIORS",
    "Attack",
    "AttackConfig",
    "attack",
    "estimate",
    "every_attack",
    "select",
]
