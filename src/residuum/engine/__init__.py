"""The fast path for MLPs: explicit gradients of the attack's objective, same results as autograd."""

from residuum.engine.explicit import Candidates, Cost, ExplicitEquation, evaluation_cost
from residuum.engine.graph import Repeater, keep_freed_memory, matmul_precision

__all__ = [
    "Candidates",
    "Cost",
    "ExplicitEquation",
    "Repeater",
    "evaluation_cost",
    "keep_freed_memory",
    "matmul_precision",
]
