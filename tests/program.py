"""The program as a process of its own: started, watched, interrupted; and what it prints."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cyclopts import ArgumentCollection

from residuum.cli.main import app

Capture = pytest.CaptureFixture[str]


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A suite in the background is deaf to Ctrl-C, and so would be its children: restored here."""
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen(
        [sys.executable, "-m", "residuum", *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def interrupt(*arguments: str, once: Path, after: float = 1.2) -> tuple[int, str]:
    """Start, wait until ``once`` exists and ``after`` seconds more, press Ctrl-C; code and stderr."""
    process = start(*arguments)
    try:
        deadline = time.monotonic() + 60
        while not once.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert once.exists(), f"{arguments[0]} did not begin within a minute"
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, err


def printed(capsys: Capture) -> dict[str, Any]:
    """The one JSON object that a command printed, and nothing else."""
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert isinstance(document, dict)
    return document


def one_line(capsys: Capture) -> str:
    """The one line of a command that was refused."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("residuum: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert "Internal error" not in err
    assert err.count(". ") >= 1, "a rule, then a remedy"
    return err


def arguments_of(*command: str) -> ArgumentCollection:
    """The arguments and options of a command, such as ``("attack", "kkt")``."""
    subcommand = app
    for name in command:
        subcommand = subcommand[name]
    return subcommand.assemble_argument_collection()


def options_of(*command: str) -> set[str]:
    """The options of a command, with their negative forms."""
    return {
        name
        for argument in arguments_of(*command)
        for name in (*argument.names, *argument.negatives)
        if name.startswith("-")
    }


def listing(folder: Path) -> list[str]:
    """Every path below ``folder``, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
