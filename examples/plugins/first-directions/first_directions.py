"""An attack in one file: the singular vectors of the first layer, both ways, as candidates.

It leaves no residual, so it may find a leak and never rules one out.
"""

import math

import torch

from residuum.attacks import ATTACKS, Attack
from residuum.records import Reconstruction


class FirstDirections(Attack):
    """Directions in which the first layer is largest."""

    name = "first-directions"

    def why_not(self, surface, knowledge):
        """The rows of the first layer must be as long as a sample."""
        inputs = math.prod(surface.shape(knowledge))
        seen = first_weight(surface).shape[1]
        return "" if seen == inputs else "needs a first layer that sees the whole input"

    def run(self, surface, knowledge, config, **_):
        """config: what every attack is told; here the number of candidates."""
        _, sizes, rows = torch.linalg.svd(first_weight(surface), full_matrices=False)
        count = max(1, min(config.candidates // 2, len(rows)))
        x = torch.cat([rows[:count], -rows[:count]]).reshape(-1, *surface.shape(knowledge))
        lam = sizes[:count].repeat(2)
        return Reconstruction.at_once(self.name, x, torch.zeros(len(x)), lam, knowledge)


def first_weight(surface):
    """(h, d) in float64."""
    return next(t for t in surface.target.values() if t.ndim >= 2).flatten(1).double()


ATTACKS["first-directions"] = FirstDirections()
