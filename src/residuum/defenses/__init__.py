"""Defenses, and what they do against an attacker who does not know of them and one who does."""

from residuum.defenses.base import Defense, Secret, Training
from residuum.defenses.catalogue import DEFENSES, find
from residuum.defenses.outcome import Attacked, Outcome
from residuum.defenses.trial import Setting, at_seed, release, run_trial

__all__ = [
    "DEFENSES",
    "Attacked",
    "Defense",
    "Outcome",
    "Secret",
    "Setting",
    "Training",
    "at_seed",
    "find",
    "release",
    "run_trial",
]
