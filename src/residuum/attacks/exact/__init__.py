"""Exact recovery of samples from polynomial networks."""
