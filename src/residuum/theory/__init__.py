"""What can be said about a network and its data: KKT residuals, multipliers, margins."""

from residuum.theory.kkt import certify

__all__ = ["certify"]
