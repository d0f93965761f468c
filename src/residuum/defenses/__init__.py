"""Defenses, and what they do against an attacker who does not know of them and one who does."""

from residuum.defenses.catalogue import DEFENSES, Defense, Secret, Training, find
from residuum.defenses.trial import Attacked, Conditions, Outcome, at_seed, release, run_trial

__all__ = ["DEFENSES", "Attacked", "Conditions", "Defense", "Outcome", "Secret", "Training"]
__all__ += ["at_seed", "find", "release", "run_trial"]
