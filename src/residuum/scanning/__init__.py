"""Scan a release for what can reveal training data, and write a copy that holds only the weights."""
