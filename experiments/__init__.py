"""Measurements of single claims, run by hand."""
