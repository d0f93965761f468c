"""What must not change unnoticed: reconstructions bit by bit, from one version to the next."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks import goldens

from tests.documents import ROOT


def result(x, **words):
    return {"a": {"numbers": {"x": torch.tensor(x)}, "words": json.dumps(words)}}


CHANGES = {
    "one bit": (result([1.0, 2.0]), result([1.0, 2.0 + 2.4e-7]), 0.0, "x: 1 of 2 numbers differ"),
    "too much": (result([1.0, 2.0]), result([1.0, 2.1]), 1e-2, "x: 1 of 2 numbers differ, by 4"),
    "an integer": (result([3]), result([4]), 1.0, "x: 1 of 1 numbers differ"),
    "a shape": (result([1.0]), result([1.0, 1.0]), 0.0, "x: (1,) torch.float32 became (2,)"),
    "a word": (
        result([1.0], kind="split"),
        result([1.0], kind="merge"),
        1.0,
        "kind: 'split' became",
    ),
    "a failure": (result([1.0]), result([1.0], failed="no such setting"), 1.0, "fails in the new"),
    "a scenario less": (result([1.0]), {}, 1.0, "only in the old code"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name):
    old, new, tolerance, words = CHANGES[name]
    assert goldens.compare(old, new, tolerance)["a"].startswith(words)
    assert goldens.compare(old, old, 0.0) == {"a": ""}


def test_a_tolerance_is_relative_and_for_numbers_that_are_not_counts():
    old, new = result([100.0, 0.0]), result([100.0, 1e-3])
    assert goldens.compare(old, new, 1e-4) == {"a": ""}
    assert goldens.compare(old, new, 1e-6)["a"]
    assert goldens.compare(result([float("nan")]), result([float("nan")])) == {"a": ""}


def test_scenarios_run_under_the_code_that_they_are_told():
    chosen = ["--only", "mlp: grown by curvature", "--steps", "60"]
    ((name, found),) = goldens.run(ROOT, chosen).items()
    assert name == "mlp: grown by curvature"
    assert json.loads(found["words"])["events"]
    assert found["numbers"]["steps"].tolist() == [0, 25, 30, 55, 60]
