"""Attacks that match gradients or outputs, and the baselines."""
