"""What can be said about a network and its data: KKT residuals, margins, KKT sets."""

from residuum.theory.kkt import certify
from residuum.theory.kkt_sets import KKTSet

__all__ = ["KKTSet", "certify"]
