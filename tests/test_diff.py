"""Two audits side by side: what is called a change, what is not, and what they do not share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import residuum as rs
from residuum.auditing.comparing import ALIKE, BETTER, WORSE, diff, diff_schema
from residuum.auditing.result import AuditResult
from residuum.auditing.verdict import INCONCLUSIVE, LEAK, NO_LEAK_FOUND, Findings, Verdict
from residuum.cli.main import main
from residuum.report.html import render_difference
from tests import pages


def audit(verdict: Verdict, **changes: Any) -> AuditResult:
    return pages.audited(12, every=1, verdict=verdict, **changes)


def leak(count: int, low: float, high: float, grade: str = "near-copy") -> Verdict:
    return Verdict(LEAK, (), 30, count, 0.3, (low, high), 0.001, "ncc", "ncc > 0.8", grade)


NONE, OPEN = (
    leak(0, 0, 0, "").replace(outcome=NO_LEAK_FOUND),
    Verdict(INCONCLUSIVE, n=30, recovered=0),
)
CASES = [
    (leak(9, 4, 14), NONE, BETTER, "found a leak, the second no leak"),
    (NONE, leak(9, 4, 14), WORSE, "found no leak, the second a leak"),
    (leak(9, 4, 14), OPEN, ALIKE, "That the leak is gone is not shown"),
    (NONE, OPEN, WORSE, "nothing that could be decided"),
    (OPEN, OPEN, ALIKE, "Both audits found nothing that could be decided"),
    (leak(9, 4, 14), leak(9, 4, 14, "class-like"), BETTER, "from near-copy to class-like"),
    (leak(9, 4, 14, "resembles"), leak(9, 4, 14), WORSE, "from resembles to near-copy"),
    (leak(20, 12, 26), leak(4, 0.9, 9), BETTER, "fewer, beyond chance"),
    (leak(4, 0.9, 9), leak(20, 12, 26), WORSE, "more, beyond chance"),
    (leak(9, 4, 14), leak(6, 1.5, 11), ALIKE, "chance may explain"),
]


@pytest.mark.parametrize(("before", "after", "change", "said"), CASES)
def test_a_change_is_one_beyond_chance(
    before: Verdict, after: Verdict, change: str, said: str
) -> None:
    found = diff(audit(before), audit(after))
    assert found.change == change
    assert said in found.sentence
    jsonschema.validate(found.to_json(), diff_schema())


def test_samples_that_are_gone_are_named_where_they_are_the_same_samples() -> None:
    counts = [
        audit(leak(3, 1, 5), findings=Findings(12, samples=samples))
        for samples in ((1, 4, 7), (4, 9))
    ]
    found = diff(*counts)
    assert (found.gone, found.came, found.unlike) == ((1, 7), (9,), ())
    other = counts[1].replace(hashes={"data": "another"})
    assert diff(counts[0], other).gone is None


def test_what_was_not_made_alike_is_said() -> None:
    one = audit(NONE)
    other = one.replace(
        hashes={**one.hashes, "data": "x"},
        knowledge=rs.Knowledge(sample_count=3),
        settings={"budget": 30},
        suite=7,
    )
    said = " ".join(diff(one, other).unlike)
    for part in ("training data", "told different things", "10m and 30s", "versions 0 and 7"):
        assert part in said
    assert diff(one, one).unlike == ()


def test_the_page_has_both_sides_and_a_redacted_one_no_image() -> None:
    sides = audit(leak(9, 4, 14)), audit(leak(6, 1.5, 11))
    found = diff(*sides)
    text = render_difference(found, sides)
    assert text.count("<img") == 12
    assert found.sentence in text
    for row in found.rows:
        assert row.before in text
    redacted = render_difference(found, sides, redact=True)
    assert "<img" not in redacted
    assert "base64," not in redacted


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, verdict in (("a", NONE), ("b", leak(9, 4, 14))):
        audit(verdict, settings=SETTINGS).save(tmp_path / name)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["diff", a, b, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["change"] == WORSE
    assert main(["diff", a, b, "--fail-if-worse", "--out", str(tmp_path / "d.html")]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("WORSE: ")
    assert max(map(len, shown.splitlines()[:10])) <= 80
    assert (tmp_path / "d.html").read_text().startswith("<!doctype html>")
    assert main(["diff", b, a, "--fail-if-worse", "--quiet"]) == 0
    assert main(["diff", a, str(tmp_path)]) == 2


SETTINGS = {
    "task": "auto",
    "preset": "residuum",
    "budget": 60.0,
    "steps": None,
    "seed": 0,
    "subsets": 300,
    "device": "cpu",
    "baselines": True,
    "vouch": False,
    "twin": True,
    "recipe": "",
    "surface": "all",
    "arch": "mlp:64-1000-1000-1",
}
