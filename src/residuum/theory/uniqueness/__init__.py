"""Certify how unique a reconstruction is, and estimate how long the certificate takes."""

from residuum.theory.uniqueness.certificate import SHARE, Cost, estimate_cost, uniqueness

__all__ = ["SHARE", "Cost", "estimate_cost", "uniqueness"]
