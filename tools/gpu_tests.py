"""Run the tests that need a GPU, and store their outcomes: ``python -m tools.gpu_tests``.

``tools/results/gpu_tests-DEVICE.json`` gets the outcome and the seconds of every test of
tests/slow/test_gpu.py, and the environment. The exit code is that of pytest.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from experiments.programs import parse_paths, run_program
from experiments.report import device_name
from residuum.errors import InputError
from residuum.records import write_json
from residuum.records.rundir import environment
from tools import RESULTS

TESTS = Path(__file__).parents[1] / "tests" / "slow" / "test_gpu.py"


class OutcomeRecorder:
    """A pytest plug-in that records outcomes."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the test, also if it was skipped or failed before its call."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.partition("::")[2]
            self.tests[name] = {"outcome": report.outcome, "seconds": round(report.duration, 2)}


def main() -> int:
    """Run the tests and write their outcomes."""
    import pytest

    if not torch.cuda.is_available():
        raise InputError(
            "Tests of the CUDA path need a GPU; there is none.", "Run them on another machine."
        )
    outcomes = OutcomeRecorder()
    plain = ["-q", "--noconftest", "-o", "addopts=", "-p", "no:cacheprovider"]
    code = int(pytest.main([str(TESTS), *plain], plugins=[outcomes]))
    content = {"benchmark": "gpu", "tests": outcomes.tests, "environment": environment("cuda")}
    print("written:", write_json(RESULTS / f"gpu_tests-{device_name('cuda')}.json", content).name)
    return code


if __name__ == "__main__":
    parse_paths(__doc__)
    sys.exit(run_program(main))
