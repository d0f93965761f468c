"""Analyze how far the weights of a network determine its training data."""

from residuum.theory.kkt import certify
from residuum.theory.kkt_sets import KKTSet

__all__ = ["KKTSet", "certify"]
