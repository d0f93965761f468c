"""An objective in one file: theta = lam sum_i y_i grad Phi(x_i), one multiplier for all samples.

Its derivatives are left to automatic differentiation.
"""

from dataclasses import dataclass
from typing import ClassVar

from residuum.attacks.stationarity.objectives import OBJECTIVES, Objective


@dataclass(frozen=True)
class EqualKKT(Objective):
    """u_i = y_i mean(lam)."""

    name: ClassVar[str] = "equal-kkt"
    paper: ClassVar[str] = "an example"
    task: ClassVar[str] = "binary"

    def why_not(self, outputs, task, knowledge):
        """Labels are -1 and +1, on one output."""
        return "" if outputs == 1 else f"needs one output; this network has {outputs}"

    def covectors(self, point, outputs, labels, lam):
        """(..., m, 1)."""
        return (lam.mean(-1, keepdim=True) * labels.to(lam.dtype))[..., None]


OBJECTIVES["equal-kkt"] = EqualKKT
