"""Installed packages that bring parts of their own: found, run by an audit, and harmless when broken."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import residuum as rs
from residuum import plugins
from residuum.attacks import ATTACKS, OBJECTIVES, Attack, OneShotAttack
from residuum.attacks.base import validate_output
from residuum.cli.main import main
from residuum.errors import InputError
from residuum.evaluation import METRICS, Metric
from residuum.records import Knowledge, Reconstruction
from residuum.surfaces.surface import build_weights_surface
from tests.documents import ROOT

EXAMPLES = ROOT / "examples" / "plugins"
RAISES = "raise RuntimeError('no such library')"
NONSENSE = """
import torch
from residuum.attacks import ATTACKS, OBJECTIVES, OneShotAttack, Attack
from residuum.attacks.stationarity.objectives import Objective

class Flat(OneShotAttack):
    name = "flat"
    def find(self, surface, knowledge):
        found = ATTACKS["first-directions"]().find(surface, knowledge)
        return found.replace(x=found.x.flatten(1)[:, :-1])

class Refuses(Attack):
    name = "refuses"
    def why_not(self, surface, knowledge):
        raise KeyError("layer")

class Wide(Objective):
    name = "wide"
    def covectors(self, point, outputs, labels, lam):
        return lam[..., None].expand(*lam.shape, 7)

ATTACKS.update(flat=Flat, refuses=Refuses)
OBJECTIVES["wide"] = Wide
"""


REPLACES = """
from residuum.{module} import {table}
{table}["own-part"] = {part}
{table}{how}
"""
BLIND = """
from residuum.networks import KINDS, Kind

class Blind(Kind):
    example = "blind:4-1"
    def recognize(self, state):
        raise LookupError("no such tensor")

KINDS["blind"] = Blind()
"""
KNOWS = """
def recognize(self, state):
    known = {"first.weight", "last.weight", "around.weight"} == {*state}
    return (Architecture("skip", (64, 30, 1)), dict(zip(state, state))) if known else None

Skip.recognize = recognize
"""


def install(site: Path, name: str, module: str, source: str, version: str = "0.1") -> None:
    """What an installer leaves behind, without one: a module and its dist-info."""
    info = site / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{name} = {module}\n")


def install_example(site: Path, name: str) -> None:
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["project"]
    ((entry, module),) = project["entry-points"][plugins.GROUP].items()
    source = (EXAMPLES / name / f"{module}.py").read_text()
    install(site, entry, module, source, project["version"])


def program(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(site), str(ROOT / "src")))
    return subprocess.run(
        [sys.executable, "-m", "residuum", *arguments],
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
    )


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLP and a network with a connection around its hidden layer, and the digits both fit."""
    folder = tmp_path_factory.mktemp("victims")
    split = rs.load_dataset("digits", 20)
    for name, data in (("train", split.train), ("holdout", split.holdout)):
        np.savez(folder / f"{name}.npz", x=data.x.numpy(), y=data.y.numpy())
    state = rs.train("mlp:64-30-1", split.train, rs.TrainingConfig(steps=200))
    rs.save_checkpoint(
        rs.Network(state.theta, "mlp:64-30-1", (1, 8, 8)), folder / "mlp.safetensors"
    )
    generator = torch.Generator().manual_seed(0)
    shapes = {"first.weight": (30, 64), "last.weight": (1, 30), "around.weight": (1, 64)}
    skip = {n: 0.1 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    torch.save(skip, folder / "skip.pt")
    return folder


def audit(site: Path, victims: Path, file: str, out: Path, *more: str) -> dict[str, Any]:
    done = program(
        site,
        "audit",
        str(victims / file),
        "--data",
        str(victims / "train.npz"),
        "--holdout",
        str(victims / "holdout.npz"),
        "--effort",
        "quick",
        "--steps",
        "30",
        "--subsets",
        "200",
        "--out",
        str(out),
        "--json",
        *more,
    )
    assert done.returncode in (0, 1, 3), done.stderr
    return json.loads(done.stdout)


def test_an_audit_runs_an_objective_and_an_attack_of_other_packages(
    victims: Path, tmp_path: Path
) -> None:
    for name in ("equal-kkt", "first-directions"):
        install_example(tmp_path / "site", name)
    install(tmp_path / "site", "broken", "broken_import", RAISES)
    install(tmp_path / "site", "nonsense", "nonsense", NONSENSE)
    output = audit(tmp_path / "site", victims, "mlp.safetensors", tmp_path / "run")
    rows = {row["name"]: row for row in output["attacks"]}
    assert rows["equal-kkt"]["ran"]
    assert rows["equal-kkt"]["residual"] > 0
    assert rows["first-directions"]["ran"]
    assert rows["first-directions"]["decides"]
    assert rows["first-directions"]["residual"] is None
    # What is broken has a row that says so, and nothing else suffers.
    for name, words in (
        ("broken", "no such library"),
        ("flat", "x of shape"),
        ("refuses", "layer"),
        ("wide", "failed"),
    ):
        assert not rows[name]["ran"], name
        assert words in rows[name]["reason"], rows[name]["reason"]
    (warning,) = (text for text in output["warnings"] if text.startswith("Plug-ins that failed"))
    assert {*re.findall(r"[a-z-]+(?=[,.])", warning)} == {"flat", "refuses", "wide", "broken"}
    assert rows["binary-kkt"]["ran"]
    expected = {"broken": "0.1", "equal-kkt": "0.1", "first-directions": "0.1", "nonsense": "0.1"}
    assert output["settings"]["plugins"] == expected

    alone = audit(tmp_path / "site", victims, "mlp.safetensors", tmp_path / "alone", "--no-plugins")
    assert alone["settings"]["plugins"] == {}
    assert not {*expected, "flat", "refuses", "wide"} & {row["name"] for row in alone["attacks"]}


def test_an_audit_runs_a_network_kind_of_another_package(victims: Path, tmp_path: Path) -> None:
    """It knows its own from the weights, or is named; one that raises costs its own row."""
    knows = (EXAMPLES / "skip-network" / "skip_network.py").read_text() + KNOWS
    install(tmp_path / "site", "blind", "blind_kind", BLIND)
    install(tmp_path / "site", "skip-network", "skip_network", knows)
    output = audit(tmp_path / "site", victims, "skip.pt", tmp_path / "run")
    assert output["network"]["arch"] == "skip:64-30-1"
    rows = {row["name"]: row for row in output["attacks"]}
    assert rows["binary-kkt"]["ran"]
    assert [*rows["binary-kkt"]["residuals"]] == ["first", "last", "around"]
    assert "no such tensor" in rows["blind"]["reason"]
    assert not rows["blind"]["ran"]


def test_a_network_kind_that_cannot_recognize_its_own_is_named(
    victims: Path, tmp_path: Path
) -> None:
    install_example(tmp_path / "site", "skip-network")
    skip = ("--arch", "skip:64-30-1")
    named = program(tmp_path / "site", "attack", str(victims / "skip.pt"), *skip, "--dry-run")
    assert named.returncode == 0, named.stderr
    unknown = program(tmp_path / "empty", "attack", str(victims / "skip.pt"), *skip, "--dry-run")
    assert unknown.returncode == 2
    assert "must begin with a known kind of network" in unknown.stderr


def test_an_attack_by_name_finds_a_plug_in_unless_plug_ins_are_off(
    victims: Path, tmp_path: Path
) -> None:
    install_example(tmp_path / "site", "equal-kkt")
    words = (
        "attack",
        "equal-kkt",
        str(victims / "mlp.safetensors"),
        "--steps",
        "30",
        "--restarts",
        "1",
        "--json",
        "--out",
    )
    output = program(tmp_path / "site", *words, str(tmp_path / "run"))
    assert output.returncode == 0, output.stderr
    assert json.loads(output.stdout)["attack"] == "equal-kkt"
    refused = program(tmp_path / "site", *words, str(tmp_path / "other"), "--no-plugins")
    assert refused.returncode == 2
    assert "No attack has the name 'equal-kkt'" in refused.stderr


def brought_attack(
    result: Any = None, refused: str = "", base: type[Attack] = Attack
) -> type[Attack]:
    """An attack as another package has it. It returns or raises ``result``."""

    def produce(*_: Any, **__: Any) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    method = "find" if base is OneShotAttack else "reconstruct"
    members = {"name": "brought", "why_not": lambda *_: refused, method: produce}
    return type("Brought", (base,), {"__module__": __name__, **members})


def candidates(value: float) -> Reconstruction:
    x = torch.full((3, 1, 8, 8), value)
    return Reconstruction.from_candidates("brought", x, torch.zeros(3), torch.ones(3), Knowledge())


@pytest.mark.parametrize(
    ("brought", "message"),
    [
        ((ValueError("on purpose"),), "The plug-in attack brought failed: ValueError: on"),
        ((SystemExit("bye"),), "The plug-in attack brought failed: SystemExit: bye."),
        ((), "must return a Reconstruction; got NoneType."),
        ((candidates(math.nan),), "must return finite x"),
        ((candidates(1.0), "needs rain"), "'brought' does not apply to this network: needs rain."),
        ((candidates(1.0),), ""),
    ],
    ids=["raises", "exits", "nothing", "not finite", "refuses", "sound"],
)
@pytest.mark.parametrize("base", [Attack, OneShotAttack])
def test_whatever_an_attack_of_another_package_does_the_command_names_it(
    base: type[Attack],
    brought: tuple[Any, ...],
    message: str,
    victims: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(ATTACKS, "brought", brought_attack(*brought, base=base))
    words = ["attack", "brought", str(victims / "mlp.safetensors"), "--out"]
    assert main([*words, str(tmp_path / "run")]) == (2 if message else 0)
    assert message in capsys.readouterr().err
    assert (tmp_path / "run" / "attack.json").exists() == (not message)


@pytest.fixture
def fresh_plugins() -> Iterator[None]:
    """Import the installed plug-ins anew, in the test and after it."""
    plugins.forget()
    yield
    plugins.forget()


@pytest.mark.usefixtures("fresh_plugins")
def test_plug_ins_are_imported_once_and_the_variable_turns_them_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = "import pathlib; f = pathlib.Path(__file__).with_suffix('.n'); f.open('a').write('x')"
    install(tmp_path, "counted", "counted_import", count, version="2.5")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(plugins.OFF, "1")
    assert plugins.load() == ()
    plugins.forget()
    monkeypatch.delenv(plugins.OFF)
    assert plugins.Plugin("counted", "2.5") in plugins.load()
    plugins.load()
    assert (tmp_path / "counted_import.n").read_text() == "x"


BUILT_IN = {
    "attack": ("attacks", "ATTACKS", "polynomial"),
    "objective": ("attacks", "OBJECTIVES", "ntk"),
    "prior": ("attacks", "PRIORS", "value-box"),
    "metric": ("evaluation", "METRICS", "ncc"),
    "defense": ("defenses", "DEFENSES", "shift-rewrite"),
    "network kind": ("networks", "KINDS", "mlp"),
}

PARTS = {  # these tables take classes of their own alone
    "attack": "__import__('residuum').attacks.OneShotAttack",
    "objective": "next(iter(OBJECTIVES.values()))",
}


@pytest.mark.usefixtures("fresh_plugins")
@pytest.mark.parametrize(
    ("sort", "registration"),
    [
        *zip(
            BUILT_IN, cycle(["[{!r}] = object()", ".update({{{!r}: object()}})", " |= {{{!r}: 1}}"])
        )
    ],
)
def test_a_plug_in_that_would_replace_a_built_in_part_fails_and_leaves_nothing(
    sort: str, registration: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, table, name = BUILT_IN[sort]
    registry = getattr(importlib.import_module(f"residuum.{module}"), table)
    before = dict(registry)
    code = PARTS.get(sort, "object()")
    source = REPLACES.format(module=module, table=table, how=registration.format(name), part=code)
    module_name = f"takes_{table.lower()}_{len(registration)}"
    install(tmp_path, "taker", module_name, source)
    install(
        tmp_path,
        "other",
        f"{module_name}_other",
        f"from residuum.{module} import {table}\n{table}['another'] = {code}",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    errors = {plugin.name: plugin.error for plugin in plugins.load()}
    assert "'taker'" in errors["taker"]
    assert f"{sort} {name!r} of residuum." in errors["taker"]
    assert errors["other"] == ""
    assert "another" in registry
    del registry["another"]
    assert dict(registry) == before


@pytest.mark.usefixtures("fresh_plugins")
def test_an_attack_of_another_package_cannot_take_the_name_of_an_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are run by name, and an attack would come first."""
    source = "from residuum.attacks import {0}; {0}['{1}'] = object()"
    install(tmp_path, "one", "takes_one", source.format("ATTACKS", "ntk"))
    install(tmp_path, "two", "takes_two", source.format("OBJECTIVES", "polynomial"))
    monkeypatch.syspath_prepend(str(tmp_path))
    errors = {plugin.name: plugin.error for plugin in plugins.load()}
    assert "'ntk'" in errors["one"]
    assert "'polynomial'" in errors["two"]


@pytest.mark.usefixtures("fresh_plugins")
@pytest.mark.parametrize(
    "wrong",
    [
        "ATTACKS['own'] = OneShotAttack()",
        "ATTACKS['own'] = object",
        "OBJECTIVES['own'] = OneShotAttack",
    ],
)
def test_a_plug_in_that_registers_no_class_of_attacks_is_left_out(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object in the table would stop every audit, because audits make the attacks themselves."""
    before = {**ATTACKS, **OBJECTIVES}
    source = f"from residuum.attacks import ATTACKS, OBJECTIVES, OneShotAttack; {wrong}"
    install(tmp_path, "old", f"old_{len(wrong)}_{wrong[0]}", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    (error,) = [plugin.error for plugin in plugins.load() if plugin.name == "old"]
    assert "must be a subclass of" in error
    assert "register the class" in error
    assert before == {**ATTACKS, **OBJECTIVES}


CHECKPOINT = rs.Network({"layers.0.weight": torch.ones(3, 4)}, "mlp:4-3-1")
GOOD = Reconstruction.from_candidates(
    "a", torch.ones(2, 4), torch.zeros(2), torch.ones(2), Knowledge()
)
WRONG = {
    "x": (torch.ones(2, 5), "x of shape"),
    "labels": (torch.zeros(3), "labels of shape"),
    "lam": (torch.full((2,), float("nan")), "finite lam"),
    "run": (torch.ones(2, dtype=torch.long), "integers from 0 to 0 in run"),
    "loss": (torch.zeros(2, 0), "loss of shape"),
    "layers": (torch.zeros(1, 0, 1), "layers of shape"),
}


def test_what_an_attack_of_another_package_returns_is_validated() -> None:
    surface = build_weights_surface(CHECKPOINT, Knowledge())
    assert validate_output(GOOD, surface, Knowledge()) is GOOD
    for name, (value, words) in WRONG.items():
        with pytest.raises(InputError, match=words):
            validate_output(GOOD.replace(**{name: value}), surface, Knowledge())
    for returned in (None, GOOD.replace(x=GOOD.x.long()), GOOD.replace(x=torch.ones(0, 4))):
        with pytest.raises(InputError, match="must return"):
            validate_output(returned, surface, Knowledge())  # type: ignore[arg-type]


def test_a_metric_of_another_package_that_raises_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def score(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise ValueError("wrong library")

    monkeypatch.setitem(METRICS, "mine", Metric("mine", True, None, score, score, "raises"))
    split = rs.load_dataset("digits", 20)
    scores = rs.score(split.train.x, split.train, split.holdout, metrics=("ncc", "mine", "l2"))
    assert {*scores.metrics} == {"ncc", "l2"}
    assert any("mine failed: ValueError: wrong library" in note for note in scores.notes)
    assert not any(metric.is_plugin for name, metric in METRICS.items() if name != "mine")


def test_parts_of_this_package_are_not_from_outside() -> None:
    from residuum.attacks import every_attack

    assert {*every_attack()} == {*OBJECTIVES, *ATTACKS}
    assert not any(kind().is_plugin for kind in every_attack().values())

    class Mine(Attack):
        pass

    assert Mine().is_plugin
