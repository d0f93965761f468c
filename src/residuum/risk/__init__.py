"""Measure which training records are at risk of being reconstructed, without running an attack."""
