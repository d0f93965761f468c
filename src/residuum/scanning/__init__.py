"""Scan a release for what can reveal training data, and strip it down to its weights."""
