"""Sweeps: run an attack with many settings, rank the trials without training data, pool the candidates."""

from residuum.sweeping.run import sweep
from residuum.sweeping.scoring import Sweep
from residuum.sweeping.space import SAMPLERS, SPACE, Range, SweepOptions, SweepRequest

__all__ = ["SAMPLERS", "SPACE", "Range", "Sweep", "SweepOptions", "SweepRequest", "sweep"]
