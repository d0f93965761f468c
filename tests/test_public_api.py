"""The names a user may rely on."""

from __future__ import annotations

import inspect

import pytest

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


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = residuum.nonsense
