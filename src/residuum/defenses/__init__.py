"""Defenses, tried against an attacker who does not know of them and one who does."""

from residuum.defenses.catalog import DEFENSES, Defense, Secret, Training, find
from residuum.defenses.trial import (
    Attacked,
    Conditions,
    Defended,
    Outcome,
    at_seed,
    release,
    run_trial,
)

__all__ = ["DEFENSES", "Attacked", "Conditions", "Defended", "Defense", "Outcome", "Secret"]
__all__ += ["Training", "at_seed", "find", "release", "run_trial"]
