"""Evaluation of the attack's objective: explicit gradients for MLPs, automatic differentiation otherwise."""
