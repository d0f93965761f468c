"""Many attacks with varied settings: drawn, run anywhere, ranked without the data, pooled."""

from residuum.sweep.plan import Plan
from residuum.sweep.run import Sweep, sweep
from residuum.sweep.space import SAMPLERS, SPACE, Setting

__all__ = ["SAMPLERS", "SPACE", "Plan", "Setting", "Sweep", "sweep"]
