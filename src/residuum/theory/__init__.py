"""How weights determine training data: KKT residuals, margins, and sets of samples with equal gradients."""

from residuum.theory.kkt import certify
from residuum.theory.kkt_sets import KKTSet

__all__ = ["KKTSet", "certify"]
