"""The names a user may rely on."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import residuum

NAMES = [
    "Architecture",
    "AttackConfig",
    "AuditResult",
    "Certificate",
    "Checkpoint",
    "Dataset",
    "Inspection",
    "Knowledge",
    "PRESETS",
    "Reconstruction",
    "ResiduumError",
    "Scores",
    "Split",
    "TrainingConfig",
    "TrainingState",
    "attack",
    "audit",
    "build_model",
    "certify",
    "checkpoint_from_module",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_dataset",
    "same",
    "save_checkpoint",
    "score",
    "train",
]


def test_exported_names() -> None:
    assert residuum.__all__ == NAMES
    assert set(NAMES) <= set(dir(residuum))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_documented(name: str) -> None:
    found = getattr(residuum, name)
    if name.isupper():  # a table, documented where it stands
        assert isinstance(found, dict)
        return
    assert found.__name__ == name
    own = found.__dict__.get("__doc__") if inspect.isclass(found) else found.__doc__
    assert own
    assert not own.startswith(f"{name}("), "a dataclass without a docstring of its own"


def test_an_attack_takes_what_an_audit_takes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1, bias=False))
    checkpoint = residuum.checkpoint_from_module(model)
    file = residuum.save_checkpoint(checkpoint, tmp_path / "m.safetensors")
    config = residuum.AttackConfig(steps=5, restarts=1)
    wanted = residuum.attack(checkpoint, config=config)
    for given in (model, file, str(file), model.state_dict()):
        assert torch.equal(residuum.attack(given, config=config).x, wanted.x)


@pytest.mark.parametrize("given", [nn.ModuleList([nn.Linear(4, 1)]), {"w": 3}, None])
def test_an_attack_on_anything_else_says_what_to_do(given: Any) -> None:
    with pytest.raises(
        residuum.ResiduumError, match=r"the forward of ModuleList says|state_dict\(\)"
    ):
        residuum.attack(given)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = residuum.nonsense
