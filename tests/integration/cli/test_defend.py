"""``defend``: before and after, resuming by defense, what is refused, how it ends."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save

from residuum.cli.main import main
from residuum.defenses import DEFENSES
from tests.program import interrupt, listing, printed

TINY = [
    "defend",
    "--data",
    "digits",
    "--n",
    "20",
    "--arch",
    "mlp:64-20-1",
    "--steps",
    "80",
    "--gd-steps",
    "60",
    "--attack-steps",
    "40",
    "--restarts",
    "1",
    "--subsets",
    "200",
    "--holdout",
    "150",
    "--no-uniqueness",
]
Capture = pytest.CaptureFixture[str]


def stamps(out: Path) -> dict[str, int]:
    return {str(p.relative_to(out)): p.stat().st_mtime_ns for p in out.rglob("outcome.safetensors")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("defend") / "run"
    arguments = ["--defenses", "shift-rewrite:5,noise:0.1", "--out", str(out), "--quiet"]
    assert main([*TINY, *arguments]) == 0
    return out


def test_a_run_has_everything_side_by_side(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert [row["defense"] for row in result["defenses"]] == [
        "none",
        "shift-rewrite:5",
        "noise:0.1",
    ]
    before, shifted, _ = result["defenses"]
    assert [attack["attacker"] for attack in before["attacks"]] == ["unaware", "unmix"]
    for row in result["defenses"]:
        assert 0.5 < row["accuracy"] <= 1  # two balanced labels: above guessing
        for attacker in (row["unaware"], row["adaptive"], *row["attacks"]):
            assert 0 < attacker["expected_by_chance"] < 1
            assert 0 < attacker["p_value"] <= 1
    assert shifted["accuracy"] == before["accuracy"]
    adapted = shifted["attacks"][1]
    assert adapted["findings"]["balance"]["shift_per_pixel"] == pytest.approx(5, abs=0.3)
    assert set(shifted["rewrite"]) == {"original_multipliers", "closed_form", "refitted", "before"}
    names = listing(finished)
    for name in (
        "comparison.png",
        "report.html",
        "report.md",
        "private/noise-0.1.json",
        "trials/none/released.safetensors",
        "trials/noise-0.1/outcome.safetensors",
    ):
        assert name in names
    assert not [name for name in names if name.startswith("work")]
    assert stat.S_IMODE((finished / "private").stat().st_mode) == 0o700
    assert stat.S_IMODE(finished.stat().st_mode) == 0o700


def test_finished_defenses_are_not_repeated_and_others_are_added(
    finished: Path, capsys: Capture
) -> None:
    before = stamps(finished)
    arguments = ["--defenses", "noise:0.1,early-stop:0.5", "--out", str(finished), "--json"]
    assert main([*TINY, *arguments]) == 0
    output = printed(capsys)
    assert [row["defense"] for row in output["defenses"]] == ["none", "noise:0.1", "early-stop:0.5"]
    after = stamps(finished)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 1


def test_a_trial_of_an_earlier_form_is_tried_again(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "earlier"
    shutil.copytree(finished, out)
    stored_file = out / "trials" / "none" / "outcome.safetensors"
    with safe_open(stored_file, framework="pt") as archive:
        tree = json.loads(archive.metadata()["residuum"])
        tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    del tree["fields"]["strategy"]
    tree["fields"]["attacks"]["$tuple"] = tree["fields"]["attacks"]["$tuple"][:1]
    stored_file.write_bytes(save(tensors, {"residuum": json.dumps(tree)}))
    before = stamps(out)
    assert main([*TINY, "--defenses", "noise:0.1", "--out", str(out), "--quiet"]) == 0
    changed = {name for name, when in stamps(out).items() if before[name] != when}
    assert changed == {"trials/none/outcome.safetensors"}
    row = json.loads((out / "result.json").read_text())["defenses"][0]
    assert [attack["attacker"] for attack in row["attacks"]] == ["unaware", "unmix"]


def test_the_table_for_a_person(finished: Path, capsys: Capture) -> None:
    assert main([*TINY, "--defenses", "shift-rewrite:5", "--out", str(finished)]) == 0
    out = capsys.readouterr().out
    assert "by chance" in out
    assert "biases changed after training" in out
    assert "5 per pixel, norm 40" in out
    assert "not thereby private" in out


def test_another_setting_is_refused(finished: Path, capsys: Capture) -> None:
    arguments = ["--defenses", "noise:0.1", "--out", str(finished), "--seed", "1"]
    assert main([*TINY, *arguments]) == 2
    assert "other settings" in capsys.readouterr().err


def test_finished_trials_of_a_stopped_run_are_not_taken_for_another_setting(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "stopped"
    shutil.copytree(finished, out)
    request = json.loads((out / "result.json").read_text())["request"]
    (out / "result.json").unlink()
    (out / "work").mkdir()
    (out / "work" / "request.json").write_text(json.dumps(request))
    assert main([*TINY, "--defenses", "noise:0.1", "--out", str(out), "--seed", "1"]) == 2
    assert "other settings or inputs" in capsys.readouterr().err
    assert main([*TINY, "--defenses", "noise:0.1", "--out", str(out), "--quiet"]) == 0


@pytest.mark.parametrize(
    ("defenses", "message"),
    [
        ("noize:1", "Did you mean 'noise'"),
        ("noise:x", "NAME:STRENGTH"),
        (",", "no defense"),
        ("noise:1,noise:1.0", "twice"),
        ("dp:0", "Use a number above 0"),
    ],
)
def test_bad_defenses_end_with_two_and_write_nothing(
    defenses: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main([*TINY, "--defenses", defenses, "--out", str(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "run").exists()


def test_what_is_missing_is_named(tmp_path: Path, capsys: Capture) -> None:
    assert main(["defend", "--data", "digits"]) == 2
    assert "--defenses, --out" in capsys.readouterr().err
    assert main([*TINY, "--defenses", "noise:1", "--out", str(tmp_path), "--value-range", "1"]) == 2
    assert "two numbers" in capsys.readouterr().err
    assert main([*TINY, "--defenses", "noise:1", "--out", str(tmp_path), "--subsets", "5"]) == 2
    assert "--subsets must be at least 200; got 5" in capsys.readouterr().err


def test_the_list_names_every_defense(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)  # as if it were not installed
    assert main(["defend", "--list", "--json"]) == 0
    rows = printed(capsys)["defenses"]
    assert [row["name"] for row in rows] == list(DEFENSES)
    assert {row["name"] for row in rows if not row["available"]} == {"dp"}
    assert main(["defend", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 'dp is not installed. Install it with: pip install ".[dp]"' in lines


def test_an_interrupted_run_keeps_what_is_done(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = out / "trials" / "none" / "outcome.safetensors"
    noises = ",".join(f"noise:0.{k}" for k in range(1, 6))
    run = [*TINY, "--attack-steps", "300", "--defenses", noises, "--out", str(out)]
    code, err = interrupt(*run, once=first, after=0.0)
    assert code == 130
    assert "kept" in err
    assert not (out / "result.json").exists()
    stamps_before = stamps(out)
    assert stamps_before
    assert len(stamps_before) < 6
    assert main([*run, "--quiet"]) == 0
    assert {name: stamps(out)[name] for name in stamps_before} == stamps_before
    assert len(json.loads((out / "result.json").read_text())["defenses"]) == 6
