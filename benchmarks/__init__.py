"""Opt-in measurements: every figure a ratio against the published way, both taken in one run."""
