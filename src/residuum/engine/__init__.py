"""The fast path for MLPs: explicit gradients of the attack's objective, same results as autograd."""

from residuum.engine.explicit import ExplicitEquation, Residual

__all__ = ["ExplicitEquation", "Residual"]
