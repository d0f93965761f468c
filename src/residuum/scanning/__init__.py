"""Findings in a release without an attack, and releases without what need not be there."""
