"""The command of the next audit: rendered from the settings and the knowledge of this one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

import residuum as rs
from residuum.auditing.commands import audit_command, knowledge_options, setting_options
from residuum.auditing.config import read_config
from residuum.cli.audit import read_attack
from residuum.cli.main import main
from tests.victims import write

FILES = {"checkpoint": "m.pt", "data": "train.npz", "out": "runs/a"}


def test_facts_that_fit_into_options_become_options() -> None:
    knowledge = rs.Knowledge(
        shape=(1, 8, 8), value_range=(0.0, 1.0), mean=torch.tensor(0.25), sample_count=40
    )
    assert knowledge_options(knowledge, FILES) == [
        *("--shape", "1,8,8", "--value-range", "0,1", "--mean", "0.25"),
        *("--mean-provenance", "user", "--sample-count", "40"),
    ]


def test_one_fact_that_does_not_fit_makes_a_file_of_all() -> None:
    knowledge = rs.Knowledge(value_range=(0.0, 1.0), mean=torch.zeros(1, 8, 8))
    assert knowledge_options(knowledge, FILES) == ["--knowledge", "runs/a/knowledge.safetensors"]


def test_initial_weights_of_a_base_need_no_option() -> None:
    knowledge = rs.Knowledge(theta0={"w": torch.zeros(2)})
    assert knowledge_options(knowledge, {**FILES, "base": "base.pt"}) == []


def test_only_changed_settings_are_rendered() -> None:
    assert setting_options({}) == []
    assert setting_options({"budget": None, "seed": 0, "positive_controls": True}) == []
    settings = {"effort": "thorough", "budget": 900.0, "fail_on": "near-copy", "seed": 3}
    settings |= {"positive_controls": False, "model_code": "net:make"}
    assert setting_options(settings) == [
        *("--effort", "thorough", "--budget", "15m", "--fail-on", "near-copy"),
        *("--no-positive-controls", "--seed", "3", "--model", "net:make", "--trust-code"),
    ]


def test_attacks_are_rendered_with_their_settings() -> None:
    attacks = ["unmix", {"attack": "kkt", "steps": 20, "priors": [["none", 0.0]]}]
    words = setting_options({"attacks": attacks})
    assert words[:3] == ["--attacks", "unmix", "--attacks"]
    assert [read_attack(word) for word in words[1::2]] == attacks


def test_the_next_step_repeats_attacks_with_their_settings(tmp_path: Path) -> None:
    attack = json.dumps({"attack": "kkt", "steps": 20, "restarts": 2})
    short = ["--effort", "quick", "--subsets", "200", "--quiet", "--attacks", attack]
    first, second, third = (tmp_path / name for name in ("first", "again", "third"))
    assert main([*write(tmp_path, "tight"), *short, "--out", str(first)]) == 3
    config = str(first / "config.toml")
    assert main(["audit", "--config", config, "--out", str(second), "--quiet"]) == 3
    for out in (first, second):
        result = rs.AuditResult.load(out)
        assert {row.name for row in result.attacks if row.ran} == {"binary-kkt"}
        words = shlex.split(audit_command(result))[1:-1]
        assert json.loads(words[words.index("--attacks") + 1]) == json.loads(attack)
    assert main([*words, str(third), "--dry-run", "--quiet"]) == 0


@pytest.mark.parametrize("fact_options", [["--value-range", "0,1"], ["--mean", "train"]])
def test_a_replayed_configuration_prints_a_next_step_with_the_same_knowledge(
    fact_options: list[str], tmp_path: Path
) -> None:
    short = ["--effort", "quick", "--attacks", "unmix", "--no-baselines", "--subsets", "200", "-q"]
    arguments = write(tmp_path, "tight")
    for option in ("--mean", "--value-range", "--sample-count"):  # facts that the files come with
        if option in arguments:
            position = arguments.index(option)
            del arguments[position : position + 2]
    first, second, third = (tmp_path / name for name in ("first", "again", "third"))
    assert main([*arguments, *fact_options, *short, "--out", str(first)]) == 3
    config = str(first / "config.toml")
    assert main(["audit", "--config", config, "--out", str(second), "--quiet"]) == 3
    commands = [audit_command(rs.AuditResult.load(out)) for out in (first, second)]
    assert "--no-baselines" in commands[0]
    knowledge = [json.loads((o / "result.json").read_text())["knowledge"] for o in (first, second)]
    assert knowledge[0] == knowledge[1]
    for command in commands:
        assert "--value-range 0,1" in command or "--knowledge" in command
    words = shlex.split(commands[1])[1:-1]
    assert main([*words, str(third), "--dry-run", "--quiet"]) == 0


def test_settings_survive_the_configuration(tmp_path: Path) -> None:
    """Every setting of the request is written to config.toml and read back."""
    changed = {
        "steps": 20,
        "seed": 3,
        "subsets": 300,
        "baselines": False,
        "positive_controls": False,
        "effort": "quick",
        "fail_on": "class-level",
        "recipe": "epochs=5",
        "surface": "weights",
        "task": "binary",
        "preset": "residuum",
    }
    out = tmp_path / "run"
    options = [word for name, value in changed.items() for word in _words(name, value)]
    assert (
        main([*write(tmp_path, "tight"), *options, "--budget", "50s", "--out", str(out), "-q"]) == 3
    )
    config = read_config(out / "config.toml")
    assert {name: getattr(config, name) for name in changed} == changed
    assert config.seconds == 50.0


def _words(name: str, value: object) -> list[str]:
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-")]
    return [option, str(value)]
