"""Attacks on networks that were trained on tables."""
