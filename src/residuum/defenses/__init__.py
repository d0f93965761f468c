"""Defenses against reconstruction, and tests of each defense against attackers with different knowledge."""

from residuum.defenses.catalog import DEFENSES, Defense, Secret, Training, parse_defense
from residuum.defenses.trial import (
    Attacked,
    Conditions,
    Defended,
    Outcome,
    release,
    run_trial,
    with_seed,
)

__all__ = ["DEFENSES", "Attacked", "Conditions", "Defended", "Defense", "Outcome", "Secret"]
__all__ += ["Training", "parse_defense", "release", "run_trial", "with_seed"]
