"""The field's table: one rule for all attacks, resumed where it stopped, open to attacks of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import residuum as rs
from experiments import field
from experiments.field_rows import (
    ARMS,
    BINARY,
    POOLED,
    ROWS,
    WITHOUT_DATA,
    arm_of,
    frozen,
    settings,
)
from experiments.field_victims import Victim, images
from experiments.pages import field as tables_of_field
from experiments.pages.tables import read
from residuum.attacks import ATTACKS
from residuum.records import Knowledge
from residuum.records.rundir import environment
from residuum.surfaces.surface import CHANGE
from tests.documents import ROOT
from tests.slow.test_plugins import brought_attack, install, install_example


@pytest.fixture
def digits() -> Victim:
    train, held, _ = images(ROWS["digits-20"], 0, 1, "")
    checkpoint = rs.Network({}, "mlp:64-1")
    return Victim(checkpoint, train.x.float(), held.float(), train.mean, {}, Knowledge())


def test_the_samples_themselves_score_fully_and_those_of_others_as_chance(digits: Victim) -> None:
    n, nothing = len(digits.x), digits.x[:0]
    exact = field.figures(-digits.x, digits.x[:3], digits, "cpu")  # up to sign
    assert exact["0.9"] == n
    assert exact["right"] == 3
    assert exact["right held out"] == 0
    swapped = Victim(digits.network, digits.held[:n], digits.x, None, {}, Knowledge())
    other_figures, mirrored = (
        field.figures(digits.held[n : 3 * n], nothing, v, "cpu") for v in (digits, swapped)
    )
    assert other_figures["0.9"] < n / 4
    assert "right" not in other_figures
    for level in field.LEVELS:  # the control is the same count on the other set
        assert other_figures[f"{level} held out"] == mirrored[f"{level}"]


def test_a_row_of_a_table_counts_by_its_worst_column() -> None:
    row, span = torch.tensor([[0.2, 0.5]]), torch.tensor([1.0, 2.0])
    similarity = torch.tensor([[0.25, 0.9], [0.2, 1.5]])
    assert field.similarity(similarity, row, span)[:, 0].tolist() == pytest.approx([0.8, 0.5])


def test_victims_of_a_row_share_no_image() -> None:
    row = ROWS["photos-20"]
    sets = [images(row, k, 5, "") for k in range(row.victims)]
    raw = [(train.x + train.mean).flatten(1) for train, _, _ in sets]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert torch.cdist(raw[a], raw[b]).min() > 0.1
    first, held, other_seed = sets[0]
    assert other_seed == 0
    assert torch.cdist(raw[0], (held + first.mean).flatten(1)).min() > 0
    assert [int((first.y == label).sum()) for label in (-1, 1)] == [10, 10]


def test_published_settings_are_as_released_and_every_row_has_a_control() -> None:
    for name, row in ROWS.items():
        assert {*row.arms} <= {*ARMS}, name
        assert "together" in row.arms
        assert row.victims == (2 if row.n == 1000 else 3)
        for arm in row.arms:
            if ARMS[arm].whose == "published" and arm not in ("geiping2020", "geiping2020-moment"):
                assert settings(row, arm).steps >= 50_000
                assert settings(row, arm).restarts == 1
    seeds = json.loads(field.SEEDS_FILE.read_text())["victims"]
    assert {name: len(seeds_drawn) for name, seeds_drawn in seeds.items()} == {
        n: r.victims for n, r in ROWS.items()
    }
    arms = [(ROWS[name], arm) for name in WITHOUT_DATA for arm in BINARY]
    assert len({frozen(*arm) for arm in arms}) == len(arms)


def test_a_wrong_command_line_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    (tmp_path / "file").write_text("")
    for words, message in (
        ([out, "--rows", "cifar-50"], "cifar-50 needs images; there is no FOLDER."),
        ([str(tmp_path), out], "claim/cifar10.npz. Make it by python -m experiments.image_data"),
        ([out, "--attacks", "unmixed"], "No attack 'unmixed'. Did you mean"),
        ([out, "--attacks", "trunk-moment"], "trunk-moment is run on none of these rows."),
        ([out, "--device", "tpu"], "The option --device must be cpu or cuda; got 'tpu'."),
        ([out, "--workers", "0"], "At least one process is needed"),
    ):
        assert field.main(["run", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert field.main(["run", str(tmp_path / "file")]) == 2
    assert "Not a directory" in capsys.readouterr().err
    for command in ("page", "picture"):
        assert field.main([command, str(tmp_path), str(tmp_path / "made")]) == 2
        assert "Run the attacks into that folder first." in capsys.readouterr().err
    (tmp_path / "field.json").write_text("{}")
    assert field.main(["page", str(tmp_path), str(tmp_path / "made")]) == 2
    assert "holds nothing that was found" in capsys.readouterr().err
    np.savez(tmp_path / "field-pictures.npz", photos=np.zeros(1))
    assert field.main(["picture", str(tmp_path), str(tmp_path / "made")]) == 2
    assert "Known: photos." in capsys.readouterr().err


def program(site: Path, *words: str) -> str:
    path = os.pathsep.join((str(site), str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "experiments.field", *words],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_an_attack_of_another_package_is_run_and_shown_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its entry point and one command, with the attacks of the table. Nothing is computed twice."""
    install_example(tmp_path / "site", "first-directions")
    install(tmp_path / "site", "broken", "broken", "import nowhere_to_be_found")
    arguments = ("run", str(tmp_path / "out"), "--rows", "digits-20", "--tiny", "--workers", "1")
    arguments += ("--attacks", "first-directions", "first-layer-weights")
    output = program(tmp_path / "site", *arguments)
    assert "digits-20-0 first-directions:" in output
    assert "plug-in broken 0.1 is left out, ModuleNotFoundError: No module named" in output
    out = tmp_path / "out" / "tiny"
    done: dict[str, Any] = json.loads((out / "field.json").read_text())
    arms = done["victims"]["digits-20/0"]["arms"]
    assert [*arms] == ["first-layer-weights", "first-directions"]
    assert arms["first-directions"]["candidates"] == 20
    assert [len(digest) for digest in done["sha256"]["package"]] == [64]
    row = ROWS["digits-20"].tiny
    assert done["sha256"]["settings"] == {"digits-20": {arm: [frozen(row, arm)] for arm in arms}}
    assert not {*arms} & {*POOLED}
    program(tmp_path / "site", "page", str(out), str(tmp_path / "page.md"))
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith("# One table for the field\n\n*Tables are of another run;")
    assert "| first-directions |" in page
    assert "| first-directions | plugin |  | `first-directions` |  |  |  |" in page
    assert "rows of the first layer" in page
    assert "CIFAR n=500 |" not in page
    assert "| plug-in | `first-directions 0.1` |" in page
    assert (
        "than today's | first-layer-weights on digits-20, first-directions on digits-20 |" in page
    )
    seeds = json.loads(field.SEEDS_FILE.read_text())["victims"]["digits-20"]
    job = ("digits-20", 0, seeds, ["first-layer-weights"], "", str(out), "cpu", True, float("inf"))
    assert field.job(*job) == []
    assert capsys.readouterr().out == ""
    result_file = out / "parts" / "digits-20-0-first-layer-weights.json"
    result_file.write_text(
        json.dumps({**json.loads(result_file.read_text()), "settings": "before"})
    )
    field.job(*job)
    assert [line.split()[1:3] for line in capsys.readouterr().out.splitlines()] == [
        ["digits-20-0", "first-layer-weights:"]
    ]


def test_an_attack_of_another_package_has_what_its_surface_needs_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_start = brought_attack()
    needs_start.surface = CHANGE
    monkeypatch.setitem(ATTACKS, "late", needs_start)
    assert arm_of("late").grants == "start"
    monkeypatch.setitem(ATTACKS, "brought", brought_attack(SystemExit(0)))
    for folder in ("parts", "victims"):
        (tmp_path / folder).mkdir()
    arms = ["brought", "first-layer-weights"]
    for _ in range(2):  # what failed is tried again
        arguments = ("digits-20", 0, [1], arms, "", str(tmp_path), "cpu", True, float("inf"))
        assert field.job(*arguments) == ["brought on digits-20-0"]
        output = capsys.readouterr().out
        assert (
            "brought: FAILED, PluginError: The plug-in attack brought failed: SystemExit" in output
        )
    assert "first-layer-weights" not in output
    (folder,) = (tmp_path / "parts").glob("*.json")
    assert folder.stem == "digits-20-0-first-layer-weights"
    for damaged in (tmp_path / "victims").iterdir():
        damaged.write_bytes(b"half a file")
    folder.unlink()
    assert field.job(*arguments) == ["brought on digits-20-0"]
    assert folder.exists()


def test_results_from_before_a_change_of_settings_are_distinguished_from_those_after_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "parts").mkdir()
    stored_result = {
        "row": "digits-20",
        "arm": "unmix",
        "package": "p",
        "plugins": ["mine 1"],
        "found": {},
    }
    stored_result["environment"] = environment("cpu")
    now = frozen(ROWS["digits-20"], "unmix")
    for k, then in enumerate((now, "before", now)):
        result_with_settings = {
            **stored_result,
            "of": {"sha256": "v"},
            "victim": k,
            "settings": then,
        }
        (tmp_path / "parts" / f"{k}.json").write_text(json.dumps(result_with_settings))
    done = field.collect(tmp_path)
    assert done["sha256"] == {
        "package": ["p"],
        "settings": {"digits-20": {"unmix": [now, "before"]}},
    }
    sentence = "run with other settings than today's | unmix on digits-20"
    assert sentence in tables_of_field.field_provenance(done)
    done["sha256"]["settings"]["digits-20"]["unmix"].remove("before")
    assert sentence not in tables_of_field.field_provenance(done)


def make_result(**counts: tuple[int, int]) -> dict[str, Any]:
    """Results of one row, count above 0.8 and that of held-out samples by attack."""
    arms = {
        arm: {"seconds": 1.0, "chosen": 0}
        | {
            key: value
            for level in ("0.7", "0.8", "0.9")
            for key, value in ((level, n), (f"{level} held out", c))
        }
        for arm, (n, c) in counts.items()
    }
    return {"victims": {"cifar-50/0": {"arms": arms}}, "settings": {}}


def test_where_published_settings_find_more_than_chance_more_the_page_says_so_in_bold() -> None:
    worse = make_result(together=(10, 1), haim2022=(14, 2))
    assert tables_of_field.below(worse) == {"cifar-50": (9, 12)}
    assert "**below published settings**" in tables_of_field.field(worse)
    assert "**On CIFAR n=50 it finds fewer: 9 against 12.**" in tables_of_field.field_verdict(worse)
    # Many held-out samples above the level are no license: 18 against 29, of which 8 are chance.
    assert tables_of_field.below(make_result(together=(80, 62), haim2022=(30, 1)))
    for fine in (
        make_result(together=(80, 62), haim2022=(26, 1)),
        make_result(together=(10, 1), haim2022=(12, 2)),
        make_result(together=(20, 1), haim2022=(14, 2)),
    ):
        assert tables_of_field.below(fine) == {}
        assert "**below" not in tables_of_field.field(fine)


def test_the_committed_table_has_every_row_and_residuum_is_nowhere_far_below() -> None:
    done = read("field-h200")
    for name, row in ROWS.items():
        entries = tables_of_field.entries_of(done, name)
        assert {*row.arms} <= {*entries}, name
        assert {len(entries[arm]) for arm in row.arms} == {row.victims}, name
    assert len(tables_of_field.below(done)) <= 2
    sums = [entry["victim"]["sha256"] for entry in done["victims"].values()]
    assert len({*sums}) == len(sums) == sum(row.victims for row in ROWS.values())
