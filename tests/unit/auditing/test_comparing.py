"""Two audits compared: what is called a change, what is not, and what they do not share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import residuum as rs
from residuum.auditing.comparing import ALIKE, BETTER, WORSE, compare
from residuum.auditing.outcomes import Findings
from residuum.auditing.power import ControlSize, PositiveControls
from residuum.auditing.result import AuditResult
from residuum.auditing.verdict import INCONCLUSIVE, LEAK, NO_LEAK_FOUND, Checks, Verdict
from residuum.cli.main import main
from residuum.report.html import render_comparison
from tests import pages, schemas
from tests.verdict_inputs import SOUND, membership


def audit(verdict: Verdict, **changes: Any) -> AuditResult:
    return pages.audited(12, recovered_every=1, verdict=verdict, **changes)


def leak(count: int, low: float, high: float, grade: str = "near-copy") -> Verdict:
    return Verdict(
        LEAK,
        grade=grade,
        grades={grade: count} if grade else {},
        n=30,
        recovered=count,
        expected_by_chance=0.3,
        interval=(low, high),
        p_value=0.001,
        metric="ncc",
        rule="ncc > 0.8",
    )


NONE, OPEN = (
    leak(0, 0, 0, "").replace(outcome=NO_LEAK_FOUND),
    Verdict(INCONCLUSIVE, n=30, recovered=0),
)
CASES = [
    (leak(9, 4, 14), NONE, BETTER, "The audit before found a leak. The audit after found no leak."),
    (NONE, leak(9, 4, 14), WORSE, "The audit before found no leak. The audit after found a leak."),
    (leak(9, 4, 14), OPEN, ALIKE, "This does not show that the leak was fixed"),
    (NONE, OPEN, WORSE, "nothing that could be decided"),
    (OPEN, OPEN, ALIKE, "Both audits found nothing that could be decided"),
    (leak(9, 4, 14), leak(9, 4, 14, "class-level"), BETTER, "from near-copy to class-level"),
    (leak(9, 4, 14, "resemblance"), leak(9, 4, 14), WORSE, "from resemblance to near-copy"),
    (leak(9, 4, 14), leak(9, 4, 14, "membership"), BETTER, "from near-copy to membership"),
    (leak(9, 4, 14), leak(9, 4, 14, "verbatim"), WORSE, "from near-copy to verbatim"),
    (leak(20, 12, 26), leak(4, 0.9, 9), BETTER, "significantly fewer samples"),
    (leak(4, 0.9, 9), leak(20, 12, 26), WORSE, "significantly more samples"),
    (leak(9, 4, 14), leak(6, 1.5, 11), ALIKE, "may be due to chance"),
]


@pytest.mark.parametrize(("before", "after", "change", "message"), CASES)
def test_a_change_is_one_beyond_chance(
    before: Verdict, after: Verdict, change: str, message: str
) -> None:
    comparison = compare(audit(before), audit(after))
    assert comparison.change == change
    assert message in comparison.sentence
    schemas.check("comparison", comparison.to_json())


def test_samples_that_are_gone_are_named_where_they_are_the_same_samples() -> None:
    counts = [
        audit(leak(3, 1, 5), findings=Findings(12, samples=samples))
        for samples in ((1, 4, 7), (4, 9))
    ]
    comparison = compare(*counts)
    assert (comparison.only_before, comparison.only_after, comparison.unlike) == ((1, 7), (9,), ())
    other = counts[1].replace(hashes={"data": "another"})
    assert compare(counts[0], other).only_before is None


def test_what_was_not_made_alike_is_said() -> None:
    result = audit(NONE)
    other = result.replace(
        hashes={**result.hashes, "data": "x"},
        knowledge=rs.Knowledge(sample_count=3),
        settings={"budget": 30.0, "effort": "quick"},
        suite=7,
    )
    result = result.replace(settings={"budget": None, "effort": "standard"})
    differences = " ".join(compare(result, other).unlike)
    for text in (
        "training data",
        "have different knowledge",
        "the settings of effort differ: standard and quick",
        "the settings of budget differ: default and 30.0",
        "versions 0 and 7",
    ):
        assert text in differences
    assert compare(result, result).unlike == ()


def test_membership_and_positive_controls_of_both_audits_are_rows() -> None:
    sizes = (ControlSize(24, (0,), 0, 0.0), ControlSize(12, (12, 12, 12), 3, 0.0))
    controls = (PositiveControls("reconstruction", sizes), PositiveControls("membership"))
    before = audit(NONE, membership=membership(3), checks=Checks())
    after = audit(NONE, membership=None, checks=SOUND.replace(positive_controls=controls))
    rows = {row.what: (row.before, row.after) for row in compare(before, after).rows}
    swapped = {row.what: (row.after, row.before) for row in compare(after, before).rows}
    assert swapped == rows
    assert rows["named members"] == ("3 of 20", "–")
    assert rows["AUC of the losses"] == ("0.50", "–")
    assert rows["positive controls of reconstruction"] == ("–", "12 samples")
    assert rows["positive controls of membership"] == ("–", "not detected")


def test_the_page_has_both_sides_and_a_redacted_one_no_image() -> None:
    sides = audit(leak(9, 4, 14)), audit(leak(6, 1.5, 11))
    comparison = compare(*sides)
    text = render_comparison(comparison, sides)
    assert text.count("<img") == 12
    assert comparison.sentence in text
    for row in comparison.rows:
        assert row.before in text
    redacted = render_comparison(comparison, sides, redact=True)
    assert "<img" not in redacted
    assert "base64," not in redacted


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """The folders of an audit without a leak, and of one with a leak."""
    for name, verdict in (("before", NONE), ("after", leak(9, 4, 14))):
        audit(verdict, settings=SETTINGS).save(tmp_path / name)
    return str(tmp_path / "before"), str(tmp_path / "after")


def test_a_report_against_another_audit(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = runs
    assert main(["report", after, "--against", before]) == 0
    output = capsys.readouterr().out
    assert output.startswith("WORSE: The audit before found no leak.")
    assert max(map(len, output.splitlines()[:2])) <= 80
    page = Path(after) / "comparison.html"
    assert f"report: {page}" in output
    assert page.read_text().startswith("<!doctype html>")
    assert main(["report", after, "--against", before, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    schemas.check("comparison", document)
    assert (document["change"], document["before"], document["after"]) == (WORSE, before, after)
    assert main(["report", before, "--against", after, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["change"] == BETTER


def test_exit_codes_of_a_comparison(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = runs
    against = ["--against", before, "--fail-if-worse"]
    assert main(["report", after, *against, "--out", str(tmp_path / "c.html")]) == 1
    assert (tmp_path / "c.html").is_file()
    capsys.readouterr()
    assert main(["report", before, "--against", after, "--fail-if-worse", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    for wrong, words in (
        ([after, "--against", str(tmp_path)], "must be the folder of a finished audit"),
        ([str(tmp_path), "--against", before], "must be the folder of a finished audit"),
        ([after, "--fail-if-worse"], "Pass --against OTHER"),
    ):
        assert main(["report", *wrong]) == 2
        assert words in capsys.readouterr().err


def test_options_of_a_report_apply_to_a_comparison(runs: tuple[str, str]) -> None:
    before, after = runs
    assert main(["report", after, "--against", before, "--redact", "--quiet"]) == 0
    assert "<img" not in (Path(after) / "comparison-redacted.html").read_text()
    assert main(["report", after, "--against", before, "--blur", "--quiet"]) == 0
    assert 'class="blur"' in (Path(after) / "comparison.html").read_text()


def test_folders_can_be_compared_from_python(runs: tuple[str, str]) -> None:
    assert rs.compare(*runs).change == WORSE
    assert rs.compare(AuditResult.load(runs[1]), runs[0]).change == BETTER


SETTINGS = {
    "requested": {},
    "task": "auto",
    "preset": "residuum",
    "effort": "standard",
    "budget": None,
    "fail_on": "membership",
    "positive_controls": True,
    "steps": None,
    "seed": 0,
    "subsets": 300,
    "device": "cpu",
    "baselines": True,
    "recipe": "",
    "surface": "all",
    "arch": "mlp:64-1000-1000-1",
}
