"""Attacks from weights alone. Nothing here may import datasets, training or evaluation."""
