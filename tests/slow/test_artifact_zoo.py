"""Artifacts as people release them: scan and strip say what is true about each."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

import pytest

from experiments.artifact_zoo import register
from experiments.zoo import ARTIFACTS
from residuum.cli.main import main

register()
# Audits take seconds, so other tests cover them. ``python -m experiments.artifact_zoo`` runs everything.
ANSWERS = [
    pytest.param(name, id=name)
    for name, artifact in ARTIFACTS.items()
    if not artifact.library and any("audit" not in check.command for check in artifact.checks)
]


def answer(command: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the programs of a command line in this process until one fails; its exit code, and all output."""
    code, text = 0, ""
    for command_line in command.split(" && "):
        program, *arguments = shlex.split(command_line)
        if program == "residuum":
            code = main(arguments)
        else:
            assert program == "python"
            runpy.run_path(arguments[0])
        out, err = capfd.readouterr()
        text += out + err
        if code and command_line != command.split(" && ")[-1]:
            break
    return code, text


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_true(
    name: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    ARTIFACTS[name].make(tmp_path)
    capfd.readouterr()
    for check in ARTIFACTS[name].checks:
        if "audit" not in check.command:
            code, text = answer(check.command, capfd)
            assert check.problems(code, text) == [], f"{check.command}\n{text}"
