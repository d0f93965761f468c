"""Attacks from weights alone. Nothing here may import datasets, training or evaluation."""

from residuum.attacks.base import Attack
from residuum.attacks.cost import estimate
from residuum.attacks.registry import ATTACKS, every_attack
from residuum.attacks.run import attack
from residuum.attacks.selection import select
from residuum.attacks.stationarity.objectives import OBJECTIVES
from residuum.attacks.stationarity.priors import PRIORS
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
