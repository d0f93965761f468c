"""Attacks that match gradients or outputs, and baselines."""
