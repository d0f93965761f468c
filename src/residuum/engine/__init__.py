"""The fast path for MLPs: explicit gradients of the attack's objective, same results as autograd."""

from residuum.engine.explicit import ExplicitEquation, Pullback, Residual
from residuum.engine.repeat import Repeater, matmul_precision

__all__ = ["ExplicitEquation", "Pullback", "Repeater", "Residual", "matmul_precision"]
