"""The names a user may rely on."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import residuum
from residuum.verbs.defending import DefenseOptions, DefenseRequest
from residuum.verbs.exposing import ExposureOptions, ExposureRequest

NAMES = [
    "Architecture",
    "AuditResult",
    "Certificate",
    "Dataset",
    "Knowledge",
    "Network",
    "PRESETS",
    "Reconstruction",
    "RecoveredTable",
    "Release",
    "ResiduumError",
    "Scores",
    "Split",
    "TrainingConfig",
    "TrainingState",
    "alternatives",
    "attack",
    "attacks",
    "audit",
    "certify",
    "checkpoint_from_module",
    "compare",
    "defend",
    "exposure",
    "identify",
    "load",
    "load_checkpoint",
    "load_dataset",
    "read_moment",
    "same",
    "save_checkpoint",
    "scan",
    "score",
    "strip",
    "sweep",
    "train",
    "uniqueness",
]


def test_exported_names() -> None:
    assert residuum.__all__ == NAMES
    assert set(NAMES) <= set(dir(residuum))


def test_type_checkers_see_the_names_that_are_loaded_on_first_use() -> None:
    tree = ast.parse(Path(residuum.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names if alias.asname}
    assert sorted(seen) == sorted(NAMES)
    for name, module in seen.items():
        assert getattr(import_module(str(module)), name) is getattr(residuum, name)


def test_every_name_is_there_and_documented() -> None:
    for name in NAMES:
        public_object = getattr(residuum, name)
        if name.isupper():  # a table, documented where it stands
            assert isinstance(public_object, dict)
            continue
        if inspect.ismodule(public_object):
            assert public_object.__doc__
            continue
        assert public_object.__name__ == name
        docstring = (
            public_object.__dict__.get("__doc__")
            if inspect.isclass(public_object)
            else public_object.__doc__
        )
        assert docstring
        assert not docstring.startswith(f"{name}("), "a dataclass without a docstring of its own"


def test_an_attack_takes_what_an_audit_takes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1, bias=False))
    checkpoint = residuum.checkpoint_from_module(model)
    file = residuum.save_checkpoint(checkpoint, tmp_path / "m.safetensors")
    settings = residuum.attacks.Auto(steps=5, restarts=1)
    expected = residuum.attack(checkpoint, attack=settings)
    for network in (model, file, str(file), model.state_dict()):
        assert torch.equal(residuum.attack(network, attack=settings).x, expected.x)


@pytest.mark.parametrize("network", [nn.ModuleList([nn.Linear(4, 1)]), {"w": 3}, None])
def test_an_attack_on_anything_else_says_what_to_do(network: Any) -> None:
    with pytest.raises(
        residuum.ResiduumError, match=r"the forward method of ModuleList raised|state_dict\(\)"
    ):
        residuum.attack(network)


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - {".gitignore", ".lock"}


def test_every_verb_can_be_called_twice_and_writes_what_its_command_writes(tmp_path: Path) -> None:
    """Importing what a verb needs must not put a module in the function's place."""
    rs, arch = residuum, "mlp:64-6-1"
    split = rs.load_dataset("digits", 8, holdout=120)
    state = rs.train(arch, split.train, rs.TrainingConfig(steps=30))
    checkpoint = rs.Network(state.theta, arch, task="binary")
    attack = rs.attacks.Auto(steps=6, restarts=1, candidates=8)
    reconstruction = attack.run(checkpoint)
    cubic = rs.Network(
        {"weight": torch.eye(3).double(), "coefficient": torch.ones(3).double()},
        "polynomial:3-3-1,coefficients=0/0/0/1",
    )
    verbs: dict[str, Any] = {
        "alternatives": (
            lambda out: rs.alternatives(checkpoint, split.train, out=out),
            {"alternatives.json", "alternative.npz"},
        ),
        "attack": (lambda out: rs.attack(checkpoint, None, attack), set()),
        "audit": (
            lambda out: rs.audit(checkpoint, effort="quick", steps=5).save(out),
            {"result.json"},
        ),
        "certify": (
            lambda out: rs.certify(checkpoint.copy_module(), split.train.x, split.train.y),
            set(),
        ),
        "defend": (
            lambda out: rs.defend(
                split,
                ["noise:0.5"],
                arch=arch,
                steps=20,
                attack_steps=5,
                restarts=1,
                uniqueness=False,
                out=out,
            ),
            {"result.json", "report.html", "report.md", "trials", "private", "comparison.png"},
        ),
        "identify": (
            lambda out: rs.identify(cubic, out=out),
            {"identify.json", "identification.safetensors"},
        ),
        "score": (lambda out: rs.score(reconstruction.x, split.train, split.holdout), set()),
        "sweep": (
            lambda out: rs.sweep(checkpoint, trials=2, attack=attack, out=out),
            {"sweep.json", "report.html", "attack.json", "reconstruction.safetensors"},
        ),
        "train": (lambda out: rs.train(arch, split.train, rs.TrainingConfig(steps=3)), set()),
        "uniqueness": (
            lambda out: rs.uniqueness(checkpoint, reconstruction, candidates="best", out=out),
            {"uniqueness.json", "uniqueness.safetensors"},
        ),
    }
    assert set(verbs) < set(NAMES)
    for name, (call, files) in verbs.items():
        for time in range(2):
            out = tmp_path / name / str(time)
            assert call(out) is not None
            assert callable(getattr(rs, name)), f"{name} is a module now"
            assert not files or files <= names(out), name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = residuum.nonsense


@pytest.mark.parametrize(
    ("request_type", "options_type", "verb"),
    [(ExposureRequest, ExposureOptions, "exposure"), (DefenseRequest, DefenseOptions, "defend")],
)
def test_options_repeat_the_settings_of_their_request(
    request_type: type[Any], options_type: type[Any], verb: str
) -> None:
    fields = request_type.model_fields
    assert get_type_hints(options_type) == {name: f.annotation for name, f in fields.items()}
    assert all(field.description for field in fields.values())
    with pytest.raises(residuum.ResiduumError, match="no setting 'stepz'") as refused:
        getattr(residuum, verb)("digits", ["noise:1"], stepz=3)
    assert refused.value.exit_code == 2


def test_a_setting_out_of_bounds_is_refused_by_name() -> None:
    with pytest.raises(residuum.ResiduumError, match=r"confidence must be .* got 0\.2\."):
        residuum.exposure("m.pt", "train.npz", confidence=0.2)
    with pytest.raises(residuum.ResiduumError, match=r"releases must be .* got 0\."):
        residuum.defend("digits", ["noise:1"], releases=0)
