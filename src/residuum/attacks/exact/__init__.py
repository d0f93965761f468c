"""Exact recovery from polynomial networks."""
