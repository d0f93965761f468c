"""Measurements of one claim each, and the folder in which their results are stored."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
