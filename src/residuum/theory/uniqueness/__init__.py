"""Bound how different reconstructed images can be in other training sets that fit the same weights."""

from residuum.theory.uniqueness.certificate import SHARE, Cost, estimate_cost, uniqueness

__all__ = ["SHARE", "Cost", "estimate_cost", "uniqueness"]
