"""What must not change unnoticed: texts and files here, reconstructions from one version to the next."""

from __future__ import annotations

import difflib
import json
from importlib.metadata import version

import pytest
import torch

from residuum.cli.main import COMMANDS
from tests import goldens
from tests.documents import ROOT
from tools import compare_versions as versions

NO_FOLDER = {"demo", "scan", "strip"}  # demo: two audits, and a picture of both
IN_ANOTHER = {"score": ("attack", "scores.json"), "report": ("audit-leak", "report-redacted.html")}


def pinned(package):
    """Whether the release is the one of constraints.txt; another one words its help differently."""
    return f"{package}=={version(package)}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_nothing_that_users_see_changed_unnoticed(tmp_path):
    """`python -m tests.goldens` writes the new texts: a commit of its own, with its reason."""
    goldens_made, stored = goldens.make(tmp_path), goldens.stored()
    changes = []
    for name in sorted({*goldens_made, *stored}):
        if name.startswith("help/") and not pinned("cyclopts"):
            continue
        old, new = (texts.get(name, "").splitlines() for texts in (stored, goldens_made))
        changes += difflib.unified_diff(old, new, name, f"{name}, made now", lineterm="", n=1)
    advice = "If this is meant, run python -m tests.goldens and commit the difference."
    assert not changes, "\n".join([*changes, advice])


def test_every_command_has_its_help_and_its_folder():
    stored = goldens.stored()
    assert {f"help/{name}.txt" for name in COMMANDS} < {*stored}
    folders = {name[8:-4].partition("-")[0] for name in stored if name.startswith("folders/")}
    assert folders == {*COMMANDS} - NO_FOLDER - {*IN_ANOTHER}
    for folder, file in IN_ANOTHER.values():
        assert file in stored[f"folders/{folder}.txt"].splitlines()


def test_the_mask_hides_rounding_and_clock_and_nothing_else():
    values = {"n": 20, "name": "b", "recovered": 3, "created": "today", "p_value": 0.1, "ok": True}
    row = {**values, "why": "3 of 20, p = 0.1", "sha": "0123456789abcdef"}
    masked = goldens.mask({"rows": [row, {**row, "recovered": 4, "p_value": 0.2}], "none": None})
    assert masked == {
        "rows": [
            {
                **values,
                "recovered": "INTEGER",
                "created": "MASKED",
                "p_value": "FLOAT",
                "why": "# of #, p = #",
                "sha": "HASH",
            }
        ],
        "none": None,
    }
    assert goldens.mask({"rows": [row, {**row, "why": "other words"}]})["rows"][1:]


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
    assert versions.compare(old, new, tolerance)["a"].startswith(words)
    assert versions.compare(old, old, 0.0) == {"a": ""}


def test_a_tolerance_is_relative_and_for_numbers_that_are_not_counts():
    old, new = result([100.0, 0.0]), result([100.0, 1e-3])
    assert versions.compare(old, new, 1e-4) == {"a": ""}
    assert versions.compare(old, new, 1e-6)["a"]
    assert versions.compare(result([float("nan")]), result([float("nan")])) == {"a": ""}


def test_scenarios_run_with_the_code_that_is_passed():
    chosen = ["--only", "mlp: grown by curvature", "--steps", "60"]
    ((name, output),) = versions.run(ROOT, chosen).items()
    assert name == "mlp: grown by curvature"
    assert json.loads(output["words"])["events"]
    assert output["numbers"]["steps"].tolist() == [0, 25, 30, 55, 60]
