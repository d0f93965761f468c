"""What machines read of an audit: result.json and its schema, SARIF, the model card."""

from __future__ import annotations

import html
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from residuum.auditing.artifacts import write_artifacts
from residuum.auditing.published import SCHEMA_VERSION
from residuum.auditing.result import AuditResult
from residuum.auditing.store import AuditRun
from residuum.auditing.verdict import EXIT_CODES, Verdict
from residuum.cli.main import COMMANDS, main
from residuum.errors import OutputError
from residuum.report.html import STATUS, model_card
from residuum.report.sarif import RULE, format_message, sarif
from tests import pages, schemas
from tests.program import options_of
from tests.victims import write

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "sarif-2.1.0-rtm.5.json").read_text())


def check_sarif(log: dict[str, Any]) -> None:
    """The published schema, and section 3.27.10: a level belongs to the kind "fail" alone."""
    jsonschema.Draft4Validator(PUBLISHED).validate(log)
    for result in log["runs"][0]["results"]:
        assert result["kind"] == "fail" or result["level"] == "none"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An audit of a few steps: what it finds does not matter here."""
    folder = tmp_path_factory.mktemp("artifacts")
    command = [*write(folder / "v", "tight"), "--out", str(folder / "run"), "--quiet"]
    assert main([*command, "--steps", "30", "--budget", "0.1", "--subsets", "200"]) in (0, 3)
    return folder / "run"


def test_result_fits_its_published_schema(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    schemas.check("result", result)
    assert result["schema_version"] == SCHEMA_VERSION
    assert result["uniqueness"] is None
    assert result["uniqueness_reason"]


def test_directions_of_the_first_layer_are_a_line_of_result_and_report(run: Path) -> None:
    network = json.loads((run / "result.json").read_text())["network"]
    page = html.unescape((run / "report.html").read_text())
    assert network["first_layer_directions"] == 2
    assert network["first_layer_directions_of"].startswith("above 1%")
    assert "directions of the first layer" in page
    assert network["first_layer_directions_of"] in page
    result = AuditResult.load(run)
    many = result.replace(verdict=result.verdict.replace(n=65))
    assert many.directions == (None, "more samples (65) than inputs (64)")
    changed = result.replace(
        verdict=result.verdict.replace(n=None), knowledge=result.knowledge.replace(sample_count=70)
    )
    assert changed.directions == (None, "more samples (70) than inputs (64)")


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": "9.0"},
        {"extra": 1},
        {"verdict": {}},
        {"artifacts": {"a": 1}},
        {"batches": [{"attack": "binary-kkt"}]},
        {"candidates": None},
    ],
)
def test_other_results_do_not_fit(run: Path, change: dict[str, Any]) -> None:
    result = json.loads((run / "result.json").read_text()) | change
    with pytest.raises(jsonschema.ValidationError):
        schemas.check("result", result)


def test_the_written_sarif(run: Path) -> None:
    log = json.loads((run / "report.sarif").read_text())
    check_sarif(log)
    result = json.loads((run / "result.json").read_text())
    artifact = log["runs"][0]["artifacts"][0]
    assert artifact["hashes"]["sha-256"] == result["inputs"]["checkpoint"]
    assert artifact["location"]["uri"].startswith("file:///")


def every_verdict() -> dict[str, Verdict]:
    """Verdicts of every kind by name, with headlines as long as they get."""
    below = pages.members(60, 40).verdict.replace(limit="near-copy")
    grades = {"verbatim": 60000, "near-copy": 14, "resemblance": 3, "class-level": 2}
    grades["membership"] = 40
    leak = pages.audited().verdict
    longest = leak.replace(grades=grades, grade="class-level", limit="near-copy", not_judged=7)
    return {
        **{outcome: pages.example(outcome).verdict for outcome in EXIT_CODES},
        "membership": pages.members(60, 40).verdict,
        "below the limit": below,
        "without data": pages.without_data().verdict,
        "longest": longest,
    }


@pytest.mark.parametrize(("name", "verdict"), every_verdict().items())
def test_sarif_of_every_verdict(name: str, verdict: Verdict) -> None:
    code = verdict.exit_code
    log = sarif(verdict, file="a b/m#1.pt", tool_version="1", sha256="0f", exit_code=code)
    check_sarif(log)
    result = log["runs"][0]["results"][0]
    kinds = {"leak": ("fail", "error"), "inconclusive": ("open", "none")}
    kinds |= {"below the limit": ("fail", "note"), "longest": ("fail", "note")}
    expected = kinds.get(name, kinds.get(verdict.outcome, ("pass", "none")))
    assert (result["kind"], result["level"]) == expected
    assert result["ruleId"] == RULE == log["runs"][0]["tool"]["driver"]["rules"][0]["id"]
    assert log["runs"][0]["invocations"][0]["exitCode"] == code
    text = result["message"]["text"]
    assert len(text.split()) <= 40
    assert text.startswith(
        verdict.headline if name != "longest" else "Leak found, below your limit"
    )
    stored, reconstruction, membership = (answer.answer for answer in verdict.answers)
    assert text.endswith(
        f"Stored records: {stored}, reconstruction: {reconstruction}, membership: {membership}."
    )
    numbers = result["properties"]
    assert numbers["answers"] == {answer.key: answer.answer for answer in verdict.answers}
    assert numbers["outcome"] == verdict.outcome
    assert numbers.get("recovered") == verdict.recovered
    assert numbers.get("named") == verdict.named
    assert numbers.get("expectedByChance") == verdict.expected_by_chance
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b/m%231.pt"


def test_a_headline_of_any_length_leaves_room_for_the_answers() -> None:
    verdict = every_verdict()["longest"]
    words = " ".join(map(str, range(100)))
    text = format_message(LongHeadline(**{**vars(verdict), "limit": words}))
    assert len(text.split()) == 40
    assert "…. Stored records: no" in text


class LongHeadline(Verdict):
    """A verdict whose headline never ends."""

    @property
    def headline(self) -> str:
        return self.limit


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ((), {"version": "2.0.0"}),
        ((), {"extra": 1}),
        (("runs", 0), {"tool": {}}),
        (("runs", 0, "results", 0), {"kind": "leak"}),
        (("runs", 0, "results", 0), {"message": "text"}),
    ],
)
def test_other_logs_do_not_fit(place: tuple[str | int, ...], change: dict[str, Any]) -> None:
    verdict = pages.example("leak").verdict
    log = sarif(verdict, file="m.pt", tool_version="1", sha256="0f", exit_code=1)
    check_sarif(log)
    section = log
    for key in place:
        section = section[key]
    section |= change
    with pytest.raises(jsonschema.ValidationError):
        check_sarif(log)


def card_cases() -> dict[str, AuditResult]:
    """Audits of every kind, and one whose texts are as long as they get."""
    long = pages.example("inconclusive")
    answers = tuple(a.replace(evidence=f"{'word ' * 500}.") for a in long.verdict.answers)
    long = long.replace(
        subject="a file " * 100,
        verdict=every_verdict()["longest"].replace(answers=answers),
    )
    return {
        **{outcome: pages.example(outcome) for outcome in EXIT_CODES},
        "membership": pages.members(60, 40),
        "without data": pages.without_data(),
        "bare": pages.bare(),
        "long": long,
    }


@pytest.mark.parametrize(("name", "result"), card_cases().items())
def test_a_model_card_is_short_and_answers_the_questions(name: str, result: AuditResult) -> None:
    text = model_card(result)
    plain = text.replace("\\", "")
    assert len(text.split()) <= 150
    for answer in result.verdict.answers:
        assert f"- {answer.question} **{answer.answer.capitalize()}.**" in plain
    assert text.startswith("## Training-data audit")
    assert "2026-03-04 09:30 UTC" in text
    assert result.subject[:40].strip() in plain
    assert result.verdict.headline[:60] in plain
    assert text.endswith("It is no guarantee of privacy.\n")


def test_a_model_card_has_the_evidence_but_no_sentence_that_is_cut() -> None:
    for result in (pages.example("leak"), pages.members(60, 40), pages.without_data()):
        text = html.unescape(model_card(result)).replace("\\", "")
        for answer in result.verdict.answers:
            assert answer.evidence.partition(" By their losses")[0] in text
    assert "word" not in model_card(card_cases()["long"])


def test_names_stay_text_in_the_model_card() -> None:
    result = pages.bare(subject="<img src=x>|[a](javascript:b) `x`\n# head a|b *no*")
    text = model_card(result)
    assert "<img" not in text
    assert "&lt;img" in text
    assert "](javascript" not in text
    assert "\n# head" not in text
    assert "a\\|b" in text


@pytest.mark.parametrize("name", ['a "b" \\ c\n\x7f\x00.npz', "données-\U0001f512.npz"])
def test_any_file_name_is_kept_in_the_configuration(run: Path, tmp_path: Path, name: str) -> None:
    result = AuditResult.load(run)
    with AuditRun.open(tmp_path / "a") as folder:
        write_artifacts(folder.path, result, sources={"checkpoint": "m.pt", "data": name})
    text = (tmp_path / "a" / "config.toml").read_text(encoding="utf-8")
    assert text.startswith("# Repeats this audit: residuum audit --config config.toml")
    assert tomllib.loads(text)["data"] == name


def test_a_file_name_that_is_no_text_is_refused(run: Path, tmp_path: Path) -> None:
    sources = {"checkpoint": "m.pt", "data": "data-\udcff.npz"}
    with (
        AuditRun.open(tmp_path / "a") as folder,
        pytest.raises(OutputError, match=r"Unicode text; 'data = \"data-\\udcff'"),
    ):
        write_artifacts(folder.path, AuditResult.load(run), sources=sources)


def entry(page: str, name: str) -> str:
    """What the report's list of attacks says of one."""
    (item,) = (
        item_html.split("</li>")[0]
        for item_html in page.split("<li ")
        if re.search(rf"<strong><bdi>{name}</bdi></strong>", item_html)
    )
    return item


def test_counts_of_every_attack_are_shown(run: Path) -> None:
    """Counts, chance and p of deciding attacks and baselines, if result.json has them."""
    rows = json.loads((run / "result.json").read_text())["attacks"]
    page = (run / "report.html").read_text()
    assert {row["name"] for row in rows if row["ran"]} > {"first-layer-weights"}
    for row in rows:
        if not row["ran"]:
            assert row["reason"] in html.unescape(page)
            continue
        chance, p = f"{row['expected_by_chance']:.3g}", f"{row['p_value']:.3g}"
        rule = row["rule"].replace(">", "&gt;")
        assert rule.startswith("ncc ")
        if row["decides"]:  # in the table of tests
            cells = re.search(rf"<th scope=\"row\"><bdi>{row['name']}</bdi>.*?</tr>", page)
            assert cells is not None
            assert rule in cells.group()
            assert f"<td>{row['recovered']}</td><td>{chance}</td><td>{p}</td>" in cells.group()
        else:
            line = f"alone {row['recovered']} recovered, {rule} · {chance} by chance · p {p}"
            assert line in entry(page, row["name"])


def test_the_threshold_is_next_to_the_count(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    rule = result["verdict"]["rule"]
    assert rule == f"ncc > {result['scores']['threshold']:.3g}"
    assert rule in (run / "report.html").read_text().replace("&gt;", ">")
    log = json.loads((run / "report.sarif").read_text())
    assert log["runs"][0]["results"][0]["properties"]["rule"] == rule


def test_what_applies_and_was_not_run_is_not_called_inapplicable(run: Path) -> None:
    rows = {row["name"]: row for row in json.loads((run / "result.json").read_text())["attacks"]}
    assert rows["weight-decay"]["applies"]
    assert not rows["weight-decay"]["ran"]
    page = (run / "report.html").read_text()

    for name, tag in (("weight-decay", "not run"), ("multiclass-kkt", "not applicable")):
        assert f'<span class="tag">{tag}</span>' in entry(page, name)


def test_status_and_chance_are_explained(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    page = (run / "report.html").read_text()
    status = result["certificate"]["status"]
    assert status in STATUS
    assert STATUS[status] in page
    chance = result["verdict"]["expected_by_chance"]
    answer = result["verdict"]["answers"][1]
    assert answer["expected_by_chance"] == chance
    assert f"{chance:.2g}" in answer["evidence"]
    assert f'<output id="count-null" for="threshold">{chance:.3g}</output>' in page


def test_the_model_card_of_an_audit(run: Path) -> None:
    text = (run / "model_card.md").read_text()
    assert text == model_card(AuditResult.load(run))
    assert len(text.split()) <= 150


def test_every_command_has_json_and_quiet() -> None:
    for name in COMMANDS:
        assert {"--json", "--quiet"} <= options_of(name)


def test_quiet_commands_print_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--redact", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["report", str(run), "--redact", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["redacted"] is True


def test_completion_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    script = tmp_path / "completion"
    assert main(["--install-completion", "--shell", "bash", "--output", str(script)]) == 0
    assert str(script) in (tmp_path / ".bashrc").read_text()
    assert all(name in script.read_text() for name in COMMANDS)


def test_the_report_says_how_the_network_as_read_does(run: Path) -> None:
    line = json.loads((run / "result.json").read_text())["fit"]["line"]
    assert line in re.sub("<[^>]*>", "", (run / "report.html").read_text())
