"""What one evaluation of the explicit engine costs: its matrix products, counted layer by layer.

Layer l maps a = h_{l-1} inputs to b = h_l outputs; each of its products takes 2 R m a b operations.

=====================================  =======================================================
product                                when
=====================================  =======================================================
z_l = a_{l-1} W_l^T                    always
d_l W_l                                l > 1
T_l = d_l^T a_{l-1}                    w_l > 0, or the residual is measured
a_{l-1} E_l^T,  d_l E_l                w_l > 0
(dbar_{l-1} o s') W_l^T                l > 1
zbar_l W_l                             l < L, or u depends on the outputs
z_l and d_l W_l a second time          candidates whose products did not fit into the workspace
=====================================  =======================================================

The first layer always drives the loss. Elementwise work is left out: it is bound by memory.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from residuum.engine.explicit import LIVE, ExplicitEquation

COPIES = 10  # of the candidates: state, best, two moments, those at work, gradient, temporaries


@dataclass(frozen=True)
class Cost:
    """flops: per layer, of one evaluation; memory: peak bytes of an attack, by what they hold."""

    flops: tuple[int, ...]
    memory: dict[str, int]

    @property
    def total_flops(self) -> int:
        """Of one evaluation."""
        return sum(self.flops)

    @property
    def total_memory(self) -> int:
        """Bytes."""
        return sum(self.memory.values())


def evaluation_cost(
    equation: ExplicitEquation,
    runs: int,
    candidates: int,
    *,
    follows_outputs: bool = False,
    measure: bool = False,
) -> Cost:
    """Cost of one evaluation of R runs with m candidates each.

    follows_outputs: whether the covectors u depend on the network's outputs.
    """
    plan, widths = equation.plan(runs, candidates), equation.widths
    again = max(0, candidates - plan.kept * plan.chunk) if plan.chunks > 1 else 0
    rows, points = runs * candidates, len(equation.points)
    flops = []
    for i, weight in enumerate(equation.layer_weights):
        once = _products(i, len(widths) - 1, bool(weight), follows_outputs, measure) * candidates
        twice = (2 if i else 1) * again
        flops.append(2 * points * runs * widths[i] * widths[i + 1] * (once + twice))
    size = equation.target[0][0].element_size()
    parameters = sum(a * b for a, b in itertools.pairwise(widths))
    live = size * points * runs * plan.chunk * LIVE * sum(widths[1:])
    kept = size * points * runs * plan.kept * plan.chunk * (2 * sum(widths[1:-1]) + widths[-1])
    memory = {
        "weights": size * parameters * (points + 1 + 2 * runs),  # points, target, two sums per run
        "candidates": size * rows * widths[0] * COPIES,
        "workspace": live + (kept if plan.chunks > 1 else 0),
    }
    return Cost(tuple(flops), memory)


def _products(layer: int, depth: int, weighted: bool, follows_outputs: bool, measure: bool) -> int:
    below, above = layer > 0, layer < depth - 1 or follows_outputs
    return 1 + 2 * below + (weighted or measure) + 2 * weighted + above
