"""Attacks that reconstruct training samples from a trained model.

Modules in this package must not import datasets, training or evaluation, so that an attack cannot see data.
"""

from residuum.attacks.base import Attack, AttackProgress, OneShotAttack
from residuum.attacks.cost import estimate
from residuum.attacks.exact.polynomial import PolynomialAttack
from residuum.attacks.inversion.first_layer import FirstLayerWeights
from residuum.attacks.inversion.gradient_matching import (
    Geiping2020,
    Geiping2020OptimizerState,
    GradientMatching,
    OptimizerStateMatching,
)
from residuum.attacks.inversion.model_inversion import ModelInversion
from residuum.attacks.registry import ATTACKS, attack_class, every_attack, make_attack
from residuum.attacks.run import attack
from residuum.attacks.selection import select
from residuum.attacks.stationarity.attack import (
    KKT,
    NTK,
    Auto,
    BinaryKKT,
    MulticlassKKT,
    OptimizerState,
    StationarityAttack,
    WeightDecay,
)
from residuum.attacks.stationarity.objectives import OBJECTIVES
from residuum.attacks.stationarity.priors import PRIORS
from residuum.attacks.tabular.fill import fill
from residuum.attacks.tabular.hyperplanes import Hyperplanes
from residuum.attacks.trees.forest import ForestAttack
from residuum.attacks.unmixing.attack import Unmix, UnmixOptimizerState
from residuum.attacks.unmixing.backbone import BehindBackbone, BehindBackboneOptimizerState
from residuum.settings import PRESETS

__all__ = ["ATTACKS", "KKT", "NTK", "OBJECTIVES", "PRESETS", "PRIORS", "Attack", "OneShotAttack"]
__all__ += ["AttackProgress", "Auto", "BehindBackbone", "BehindBackboneOptimizerState", "BinaryKKT"]
__all__ += ["FirstLayerWeights", "ForestAttack", "Geiping2020", "Geiping2020OptimizerState"]
__all__ += ["GradientMatching"]
__all__ += ["Hyperplanes", "ModelInversion", "MulticlassKKT", "OptimizerState"]
__all__ += [
    "OptimizerStateMatching",
    "PolynomialAttack",
    "StationarityAttack",
    "Unmix",
    "UnmixOptimizerState",
]
__all__ += [
    "WeightDecay",
    "attack",
    "attack_class",
    "estimate",
    "every_attack",
    "fill",
    "make_attack",
]
__all__ += ["select"]
