"""Theory of networks and their data: KKT residuals, margins, KKT sets."""

from residuum.theory.kkt import certify
from residuum.theory.kkt_sets import KKTSet

__all__ = ["KKTSet", "certify"]
