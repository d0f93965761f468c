"""Certificate of how unique a reconstruction is, and estimate of what the certificate costs."""

from residuum.theory.uniqueness.certificate import SHARE, Cost, estimate_cost, uniqueness

__all__ = ["SHARE", "Cost", "estimate_cost", "uniqueness"]
