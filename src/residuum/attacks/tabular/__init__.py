"""Attacks on networks trained on tables."""
