"""Measurements of speed. Each is a ratio of a reference's cost to ours, both measured in one run."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
