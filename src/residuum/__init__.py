"""residuum: what remains of the training data in a trained network's weights?

Public names are loaded on first use, so that ``import residuum`` and ``residuum --help`` stay light.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {  # by the module that they are in
    "attacks": "AttackConfig PRESETS attack",
    "auditing.result": "AuditResult",
    "auditing.run": "audit",
    "auditing.comparing": "compare",
    "io.checkpoints": "load_checkpoint save_checkpoint",
    "io.modules": "checkpoint_from_module",
    "io.optimizer_state": "moment_of",
    "datasets": "load_dataset",
    "errors": "ResiduumError",
    "evaluation": "score",
    "networks": "Architecture",
    "networks.network": "Network",
    "records": "Certificate Dataset Knowledge Reconstruction Scores Split same",
    "scanning.scan": "scan",
    "scanning.strip": "strip",
    "sweeping": "sweep",
    "theory": "certify",
    "training": "TrainingConfig TrainingState train",
    "verbs.alternative": "alternatives",
    "verbs.certifying": "uniqueness",
    "verbs.defending": "defend",
    "verbs.exposing": "exposure",
    "verbs.identifying": "identify",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)  # noqa: PLE0605  names are in the table above


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"residuum.{_HOME[name]}"), name)
    raise AttributeError(f"module 'residuum' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *_HOME]
