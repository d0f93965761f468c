"""Uniqueness of a reconstruction: the certificate, its components, and its cost."""

from residuum.theory.uniqueness.certificate import SHARE, Cost, estimate_cost, uniqueness

__all__ = ["SHARE", "Cost", "estimate_cost", "uniqueness"]
