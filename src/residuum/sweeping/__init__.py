"""Many attacks with varied settings: drawn, run anywhere, ranked without the data, pooled."""

from residuum.sweeping.artifacts import sweep
from residuum.sweeping.plan import Plan
from residuum.sweeping.run import Sweep
from residuum.sweeping.space import SAMPLERS, SPACE, Setting

__all__ = ["SAMPLERS", "SPACE", "Plan", "Setting", "Sweep", "sweep"]
