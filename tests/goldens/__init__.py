"""What must not change unnoticed, as text: help, public names, results of audits, files of runs.

``tests/slow/test_goldens.py`` makes all of it anew and compares it with the files next to this one.
``python -m tests.goldens`` rewrites them; a change is a commit of its own that says why. Clock,
versions and floating numbers are masked, so that a noisy or another machine makes the same text.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import residuum as rs
from residuum.cli.main import COMMANDS, main
from tests.program import listing

HERE = Path(__file__).parent
ARCH, SAMPLES = "mlp:64-60-60-1", "10"
CONFIG = 'effort = "quick"\nsteps = 1500\nsubsets = 300\n'
# Values that are the same on every machine; other whole numbers depend on rounding somewhere.
EXACT = {"arch", "exit_code", "input_shape", "n", "name", "outputs", "parameters", "pool"}
EXACT |= {"restarts", "schema_version", "seed", "steps", "subsets"}
MASKED = {"created", "environment", "version"}  # the clock, and what is installed
MASKED |= {"commands"}  # they name the folder of the run
MASKED |= {"uniqueness"}  # the clock ends the search for its bounds
MASKED |= {"blocked_by"}  # which of several walls a candidate meets first
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
HASH = re.compile(r"[0-9a-f]{12,}")


def make(folder: Path) -> dict[str, str]:
    """Every golden by the name of its file; runs are made in ``folder``."""
    runs = tour(folder)
    texts = {"names.txt": "\n".join(rs.__all__)}
    commands = ("", *COMMANDS, "attack kkt", "attack unmix")
    texts |= {
        f"help/{name.replace(' ', '-') or 'residuum'}.txt": help_of(name) for name in commands
    }
    texts |= {f"folders/{name}.txt": "\n".join(files(folder / name)) for name in runs}
    texts |= {f"{name}.json": result(folder / name) for name in runs if name.startswith("audit-")}
    return {name: text.rstrip("\n") + "\n" for name, text in texts.items()}


def stored() -> dict[str, str]:
    """The goldens as they are stored next to this file."""
    files = [path for path in HERE.rglob("*") if path.suffix in (".txt", ".json")]
    return {path.relative_to(HERE).as_posix(): path.read_text("utf-8") for path in files}


def help_of(command: str) -> str:
    """``--help`` of a command, as wide as on a terminal of 80 columns."""
    out = io.StringIO()
    arguments = [*command.split(), "--help"]
    with mock.patch.dict(os.environ, COLUMNS="80"), contextlib.redirect_stdout(out):
        assert main(arguments) == 0
    return out.getvalue()


def tour(folder: Path) -> list[str]:
    """One small finished run of every command that writes a folder, three of audit; their names."""
    untrained, cubic = str(folder / "untrained.safetensors"), str(folder / "cubic.safetensors")
    torch.manual_seed(0)
    for file, arch in ((untrained, ARCH), (cubic, "polynomial:4-5-1,coefficients=0/0/0/1")):
        theta = dict(rs.Architecture.parse(arch).build().double().state_dict())
        rs.save_checkpoint(rs.Network(theta, arch), file)
    config = folder / "short.toml"
    config.write_text(CONFIG, encoding="utf-8")

    model = str(folder / "train")
    data = ["--data", model, "--holdout", model]
    digits = ["--data", "digits", "--n", SAMPLES, "--data-seed", "0", "--arch", ARCH]
    digits += ["--holdout", "400"]
    few = ["--steps", "30", "--candidates", "40"]
    defense = ["--defenses", "noise:0.1", "--steps", "80", "--attack-steps", "40"]
    defense += ["--restarts", "1", "--subsets", "200", "--no-uniqueness"]
    granted = ["--value-range", "0,1", "--sample-count", SAMPLES, "--config", str(config)]
    mean = ["--mean", "train"]
    runs = {
        "train": ["train", *digits, "--steps", "300"],
        "attack": ["attack", model, *few, "--restarts", "2"],
        "exposure": ["exposure", model, *data],
        "certify": ["certify", model],
        "alternatives": ["alternatives", model],
        "identify": ["identify", cubic],
        "defend": ["defend", *digits, *defense],
        "sweep": ["sweep", model, *few, "--trials", "2"],
        "audit-leak": ["audit", model, *data, *granted, *mean],
        "audit-inconclusive": ["audit", untrained, *data, *granted, *mean],
        "audit-without-data": ["audit", model, *granted],
    }
    codes = {"audit-leak": 1, "audit-inconclusive": 3, "audit-without-data": 3}
    for name, arguments in runs.items():
        run(*arguments, "--out", str(folder / name), code=codes.get(name, 0))
    run("score", str(folder / "attack"), *data)
    run("report", str(folder / "audit-leak"), "--redact")
    return list(runs)


def files(folder: Path) -> list[str]:
    """Every path below a folder; names made of hashes are one name."""
    return list(dict.fromkeys(HASH.sub("HASH", name) for name in listing(folder)))


def result(folder: Path) -> str:
    """result.json of an audit without what a clock, a version or rounding decides."""
    return json.dumps(mask(json.loads((folder / "result.json").read_text("utf-8"))), indent=1)


def run(command: str, *arguments: str, code: int = 0) -> None:
    """A command to its end."""
    ended = main([command, *arguments, "--quiet"])
    assert ended == code, f"residuum {command} ended with {ended}, not {code}"


def mask(value: Any, key: str = "") -> Any:
    """The same structure and words; a number that may differ between machines becomes a sign.

    Of a list only the kinds of its members stay: how many candidates there are depends on rounding.
    """
    if key in MASKED:
        return "MASKED"
    if value is None or isinstance(value, bool) or key in EXACT:
        return value
    if isinstance(value, dict):
        return {name: mask(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        kinds: list[Any] = []
        for inner in (mask(inner, key) for inner in value):
            kinds += [] if inner in kinds else [inner]
        return kinds
    if isinstance(value, str):
        return NUMBER.sub("#", HASH.sub("HASH", value))
    return "INTEGER" if isinstance(value, int) else "FLOAT"
