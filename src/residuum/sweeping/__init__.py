"""Many attacks with varied settings: drawn, run anywhere, ranked without the data, pooled."""

from residuum.sweeping.run import sweep
from residuum.sweeping.scoring import Sweep
from residuum.sweeping.space import SAMPLERS, SPACE, Plan, Range

__all__ = ["SAMPLERS", "SPACE", "Plan", "Range", "Sweep", "sweep"]
