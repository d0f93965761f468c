"""Settings of attacks and of training, as models that the command line and the documentation read too.

Nothing here imports torch, so that help texts stay fast.
"""

from residuum.settings.attack_settings import (
    FAST,
    LEFT_OPEN,
    LR_LAM,
    NUMBERS,
    PRIOR_NAMES,
    VARIED,
    AttackSettings,
    KKTSettings,
    ModelInversionSettings,
    NTKSettings,
    RestartSettings,
    SearchSettings,
    StationaritySettings,
    UnmixSettings,
)
from residuum.settings.base import Settings, bounds_in_words, choices_of, input_error
from residuum.settings.presets import AUTO, PRESETS, Preset
from residuum.settings.training import LOSSES, TrainingConfig

__all__ = ["AUTO", "FAST", "LEFT_OPEN", "LOSSES", "LR_LAM", "NUMBERS", "PRESETS"]
__all__ += ["PRIOR_NAMES", "VARIED", "AttackSettings", "KKTSettings", "ModelInversionSettings"]
__all__ += ["NTKSettings", "Preset", "RestartSettings", "SearchSettings", "Settings"]
__all__ += ["StationaritySettings", "TrainingConfig", "UnmixSettings", "bounds_in_words"]
__all__ += ["choices_of", "input_error"]
