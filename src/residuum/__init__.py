"""residuum measures how much of its training data a trained network's weights reveal.

Public names are imported on first use, so that ``import residuum`` and ``residuum --help`` are fast. The
dictionary ``_NAMES`` lists the public names by module. The imports under ``TYPE_CHECKING`` never run: only
editors and type checkers read them. A test checks that these imports agree with ``_NAMES``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {  # maps every module to the public names that it defines, separated by spaces
    "attacks": "PRESETS attack",
    "auditing.comparing": "compare",
    "auditing.result": "AuditResult",
    "auditing.run": "audit",
    "io.checkpoints": "load_checkpoint save_checkpoint",
    "io.release": "Release load",
    "io.modules": "checkpoint_from_module",
    "io.optimizer_state": "read_moment",
    "datasets": "load_dataset",
    "errors": "ResiduumError",
    "evaluation": "score",
    "networks": "Architecture",
    "networks.network": "Network",
    "records": "Certificate Dataset Knowledge Reconstruction RecoveredTable Scores Split same",
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
# Public modules of the package, which users access as in ``residuum.attacks.X``.
_MODULES = ("attacks",)
__all__ = sorted([*_HOME, *_MODULES])  # noqa: PLE0605  the names are the keys of _HOME

if TYPE_CHECKING:
    from residuum import attacks as attacks
    from residuum.attacks import PRESETS as PRESETS
    from residuum.attacks import attack as attack
    from residuum.auditing.comparing import compare as compare
    from residuum.auditing.result import AuditResult as AuditResult
    from residuum.auditing.run import audit as audit
    from residuum.datasets import load_dataset as load_dataset
    from residuum.errors import ResiduumError as ResiduumError
    from residuum.evaluation import score as score
    from residuum.io.checkpoints import load_checkpoint as load_checkpoint
    from residuum.io.checkpoints import save_checkpoint as save_checkpoint
    from residuum.io.modules import checkpoint_from_module as checkpoint_from_module
    from residuum.io.optimizer_state import read_moment as read_moment
    from residuum.io.release import Release as Release
    from residuum.io.release import load as load
    from residuum.networks import Architecture as Architecture
    from residuum.networks.network import Network as Network
    from residuum.records import Certificate as Certificate
    from residuum.records import Dataset as Dataset
    from residuum.records import Knowledge as Knowledge
    from residuum.records import Reconstruction as Reconstruction
    from residuum.records import RecoveredTable as RecoveredTable
    from residuum.records import Scores as Scores
    from residuum.records import Split as Split
    from residuum.records import same as same
    from residuum.scanning.scan import scan as scan
    from residuum.scanning.strip import strip as strip
    from residuum.sweeping import sweep as sweep
    from residuum.theory import certify as certify
    from residuum.training import TrainingConfig as TrainingConfig
    from residuum.training import TrainingState as TrainingState
    from residuum.training import train as train
    from residuum.verbs.alternative import alternatives as alternatives
    from residuum.verbs.certifying import uniqueness as uniqueness
    from residuum.verbs.defending import defend as defend
    from residuum.verbs.exposing import exposure as exposure
    from residuum.verbs.identifying import identify as identify
else:

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(import_module(f"residuum.{_HOME[name]}"), name)
        if name in _MODULES:
            return import_module(f"residuum.{name}")
        raise AttributeError(f"The module 'residuum' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *_HOME, *_MODULES]
