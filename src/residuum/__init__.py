"""residuum: what remains of the training data in a trained network's weights?

Public names are loaded on first use, so that ``import residuum`` and ``residuum --help`` stay light.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Architecture": "residuum.networks",
    "AttackConfig": "residuum.attacks",
    "AuditResult": "residuum.auditing",
    "Certificate": "residuum.records",
    "Checkpoint": "residuum.records",
    "Dataset": "residuum.records",
    "Inspection": "residuum.checkpoints",
    "Knowledge": "residuum.records",
    "PRESETS": "residuum.attacks",
    "Reconstruction": "residuum.records",
    "ResiduumError": "residuum.errors",
    "Scores": "residuum.records",
    "Split": "residuum.records",
    "TrainingConfig": "residuum.training",
    "TrainingState": "residuum.training",
    "alternatives": "residuum.verbs.alternative",
    "attack": "residuum.attacks",
    "audit": "residuum.auditing",
    "build_model": "residuum.checkpoints",
    "certify": "residuum.theory",
    "checkpoint_from_module": "residuum.checkpoints",
    "defend": "residuum.verbs.defending",
    "identify": "residuum.verbs.identifying",
    "inspect_checkpoint": "residuum.checkpoints",
    "load_checkpoint": "residuum.checkpoints",
    "load_dataset": "residuum.datasets",
    "same": "residuum.records",
    "save_checkpoint": "residuum.checkpoints",
    "score": "residuum.evaluation",
    "sweep": "residuum.sweeping",
    "train": "residuum.training",
    "uniqueness": "residuum.verbs.certifying",
}
__all__ = sorted(_HOME)  # noqa: PLE0605  names are in the table above


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'residuum' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
