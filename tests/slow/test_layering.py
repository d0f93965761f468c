"""The layers of the architecture hold, and attacks run where little is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("cyclopts", "rich", "sklearn", "kornia", "matplotlib", "clarabel", "PIL")


def test_contracts_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "Contracts: 4 kept, 0 broken." in done.stdout


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    "module", ["residuum.attacks, residuum.evaluation, residuum.io.checkpoints, residuum.theory"]
)
def test_attack_and_score_need_no_more_than_the_core(module: str) -> None:
    block = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}));"
    done = python(f"{block} import {module}")
    assert done.returncode == 0, done.stderr
    refused = python(f"{block} import sklearn.datasets")
    assert "ModuleNotFoundError" in refused.stderr


def test_certificates_of_regular_points_need_no_more_either() -> None:
    done = python(
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY}));"
        "from tests.cases import relu_point; from residuum.theory import certify;"
        "point = relu_point(); found = certify(point.model, point.x, point.y);"
        "assert found.residual_plain < 1e-9, found.residual_plain; print(found.status)"
    )
    assert done.stdout.strip() == "kkt", done.stderr


def test_importing_the_package_is_light() -> None:
    done = python("import sys, residuum; print(sorted({'torch', 'numpy'} & sys.modules.keys()))")
    assert done.stdout.strip() == "[]"
