"""Many attacks with varied settings: drawn, run anywhere, ranked without the data, pooled."""

from residuum.sweeping.run import sweep
from residuum.sweeping.scoring import Sweep
from residuum.sweeping.space import SAMPLERS, SPACE, Range, SweepOptions, SweepRequest

__all__ = ["SAMPLERS", "SPACE", "Range", "Sweep", "SweepOptions", "SweepRequest", "sweep"]
