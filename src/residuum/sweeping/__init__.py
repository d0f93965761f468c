"""Sweeps: run an attack with many settings (trials), rank the trials, and combine their results."""

from residuum.sweeping.run import sweep
from residuum.sweeping.scoring import Sweep
from residuum.sweeping.space import SAMPLERS, SPACE, Range, SweepOptions, SweepRequest

__all__ = ["SAMPLERS", "SPACE", "Range", "Sweep", "SweepOptions", "SweepRequest", "sweep"]
