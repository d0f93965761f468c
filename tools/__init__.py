"""Tools for developers: compare two versions, test the tests, and record the tests that need a GPU."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
