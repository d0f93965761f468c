"""Settings of attacks, of training and of the public functions, as pydantic models.

The command line and the documentation are generated from these models.

No module of this package imports torch, because importing torch takes seconds, and ``--help`` must be fast.
"""

from residuum.settings.attack_settings import (
    FALLBACKS,
    FAST_PRECISIONS,
    LR_LAM,
    MODELS,
    NUMBERS,
    PER_RUN,
    PRIOR_NAMES,
    AttackSettings,
    KKTSettings,
    ModelInversionSettings,
    NTKSettings,
    RestartSettings,
    SearchSettings,
    StationaritySettings,
    UnmixSettings,
)
from residuum.settings.base import EXPERT, Settings, bounds_in_words, choices_of, input_error
from residuum.settings.presets import AUTO, PRESETS, Preset
from residuum.settings.requests import (
    TRIAL_RESTARTS,
    DefenseRequest,
    ExposureRequest,
    SweepSettings,
    TableSettings,
)
from residuum.settings.training import LOSSES, TrainingConfig

__all__ = [
    "AUTO",
    "EXPERT",
    "FALLBACKS",
    "FAST_PRECISIONS",
    "LOSSES",
    "LR_LAM",
    "MODELS",
    "NUMBERS",
]
__all__ += ["PER_RUN", "PRESETS", "PRIOR_NAMES", "TRIAL_RESTARTS", "AttackSettings"]
__all__ += ["DefenseRequest", "ExposureRequest", "KKTSettings", "ModelInversionSettings"]
__all__ += ["NTKSettings", "Preset", "RestartSettings", "SearchSettings", "Settings"]
__all__ += [
    "StationaritySettings",
    "SweepSettings",
    "TableSettings",
    "TrainingConfig",
    "UnmixSettings",
]
__all__ += ["bounds_in_words", "choices_of", "input_error"]
