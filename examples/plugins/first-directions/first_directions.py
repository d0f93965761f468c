"""An attack in one file: the singular vectors of the first layer, both ways, as candidates.

It leaves no residual, so it may find a leak and never rules one out.
"""

import math
from typing import ClassVar

import torch
from pydantic import Field

from residuum.attacks import ATTACKS, OneShotAttack
from residuum.records import Reconstruction


class FirstDirections(OneShotAttack):
    """Directions in which the first layer is largest."""

    name: ClassVar[str] = "first-directions"
    directions: int = Field(default=10, gt=0, description="Number of singular vectors.")

    def why_not(self, surface, knowledge):
        """The rows of the first layer must be as long as a sample."""
        inputs = math.prod(surface.sample_shape(knowledge))
        seen = first_weight(surface).shape[1]
        return "" if seen == inputs else "needs a first layer that sees the whole input"

    def find(self, surface, knowledge):
        """Return each direction with both signs."""
        _, sizes, rows = torch.linalg.svd(first_weight(surface), full_matrices=False)
        count = min(self.directions, len(rows))
        x = torch.cat([rows[:count], -rows[:count]]).reshape(-1, *surface.sample_shape(knowledge))
        lam = sizes[:count].repeat(2)
        return Reconstruction.from_candidates(self.name, x, torch.zeros(len(x)), lam, knowledge)


def first_weight(surface):
    """(h, d) in float64."""
    return next(t for t in surface.target.values() if t.ndim >= 2).flatten(1).double()


ATTACKS["first-directions"] = FirstDirections
