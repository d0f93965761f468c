"""Measure which training records are at risk, from weights and data without an attack."""
