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
from residuum.auditing.verdict import EXIT_CODES, AttackOutcome, Verdict
from residuum.cli.main import COMMANDS, main
from residuum.errors import OutputError
from residuum.records import Knowledge
from residuum.report.html import STATUS, model_card
from residuum.report.sarif import RULE, sarif
from tests import pages, schemas
from tests.program import options_of
from tests.victims import write

PUBLISHED = json.loads((Path(__file__).parent / "data" / "sarif-2.1.0-rtm.5.json").read_text())


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
    found = AuditResult.load(run)
    many = found.replace(verdict=found.verdict.replace(n=65))
    assert many.directions == (None, "more samples (65) than inputs (64)")
    told = found.replace(
        verdict=found.verdict.replace(n=None), knowledge=found.knowledge.replace(sample_count=70)
    )
    assert told.directions == (None, "more samples (70) than inputs (64)")


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


@pytest.mark.parametrize("outcome", EXIT_CODES)
def test_sarif_of_every_outcome(outcome: str) -> None:
    verdict = Verdict(outcome, ("because <b>",), 20, 6, 0.2, (2.0, 9.0), 0.002, "ncc", "ncc > 0.8")
    log = sarif(verdict, file="a b/m#1.pt", tool_version="1", sha256="0f", exit_code=1)
    check_sarif(log)
    result = log["runs"][0]["results"][0]
    assert (result["kind"] == "fail") == (outcome == "leak") == (result["level"] == "error")
    assert result["ruleId"] == RULE
    assert result["properties"]["recovered"] == 6
    assert "NCC above 0.8" in result["message"]["text"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b/m%231.pt"


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
    verdict = Verdict("leak", (), 20, 6, 0.2, (2.0, 9.0), 0.002, "ncc")
    log = sarif(verdict, file="m.pt", tool_version="1", sha256="0f", exit_code=1)
    check_sarif(log)
    part = log
    for key in place:
        part = part[key]
    part |= change
    with pytest.raises(jsonschema.ValidationError):
        check_sarif(log)


def test_names_stay_text_in_the_model_card() -> None:
    result = pages.bare(
        subject="<img src=x>|[a](javascript:b)",
        knowledge=Knowledge(loss="`x`\n# head"),
        attacks=(AttackOutcome("a|b", True, False, False, "*no*"),),
        limitations=("no guarantee",),
    )
    text = model_card(result)
    assert "<img" not in text
    assert "&lt;img" in text
    assert "](javascript" not in text
    assert "\n# head" not in text
    assert "a\\|b" in text
    assert "no guarantee" in text


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
    (found,) = (
        part.split("</li>")[0]
        for part in page.split("<li ")
        if re.search(rf"<strong><bdi>{name}</bdi></strong>", part)
    )
    return found


def test_counts_of_every_attack_are_shown(run: Path) -> None:
    """Baselines beside deciding attacks: count, chance and p, where result.json has them."""
    rows = json.loads((run / "result.json").read_text())["attacks"]
    page, card = ((run / name).read_text() for name in ("report.html", "model_card.md"))
    assert {row["name"] for row in rows if row["ran"]} > {"first-layer-weights", "model-inversion"}
    for row in rows:
        cells = next(line for line in card.splitlines() if line.startswith(f"| {row['name']} |"))
        if row["ran"]:
            chance, p = f"{row['expected_by_chance']:.3g}", f"{row['p_value']:.3g}"
            rule = row["rule"].replace(">", "&gt;")
            assert rule.startswith("ncc ")
            assert f"| {row['recovered']} | {rule} | {chance} | {p} |" in cells
            if row["decides"]:  # in the table of tests
                cells = re.search(rf"<th scope=\"row\"><bdi>{row['name']}</bdi>.*?</tr>", page)
                assert cells is not None
                assert rule in cells.group()
                assert f"<td>{row['recovered']}</td><td>{chance}</td><td>{p}</td>" in cells.group()
            else:
                line = f"alone {row['recovered']} recovered, {rule} · {chance} by chance · p {p}"
                assert line in entry(page, row["name"])
        else:
            assert row["reason"] in cells.replace("\\", "")


def test_the_threshold_stands_beside_the_count(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    verdict = result["verdict"]
    rule = f"above {result['scores']['threshold']:.3g}"
    assert verdict["rule"].startswith("ncc > ")
    for name in ("report.html", "model_card.md", "report.sarif"):
        text = (run / name).read_text().replace("&gt;", ">").replace("\\", "")
        assert rule in text, name


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
    assert f"The verdict counts {chance:.3g} by chance" in page


def test_the_model_card_of_an_audit(run: Path) -> None:
    text = (run / "model_card.md").read_text()
    assert text.startswith("## Training-data reconstruction audit")
    for part in ("### Attacks", "### Granted to the attacker", "### Limitations", "no guarantee"):
        assert part in text


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
    assert f"- {line}" in (run / "model_card.md").read_text().replace("\\", "")
