"""Forests: their structure, and the training table that it determines."""
