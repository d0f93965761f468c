"""The table of all attacks by name. A new attack needs a class, and an entry here or in a plug-in package."""

from __future__ import annotations

from typing import Any

from residuum import plugins
from residuum.attacks.base import Attack
from residuum.attacks.exact.polynomial import PolynomialAttack
from residuum.attacks.inversion.first_layer import FirstLayerWeights
from residuum.attacks.inversion.gradient_matching import (
    Geiping2020,
    Geiping2020OptimizerState,
    GradientMatching,
    OptimizerStateMatching,
)
from residuum.attacks.inversion.model_inversion import ModelInversion
from residuum.attacks.stationarity.attack import (
    KKT,
    NTK,
    Auto,
    BinaryKKT,
    MulticlassKKT,
    OptimizerState,
    Stationarity,
    WeightDecay,
)
from residuum.attacks.stationarity.objectives import OBJECTIVES
from residuum.attacks.tabular.hyperplanes import Hyperplanes
from residuum.attacks.unmixing.attack import Unmix, UnmixOptimizerState
from residuum.attacks.unmixing.backbone import BehindBackbone, BehindBackboneOptimizerState
from residuum.errors import InputError, require_known
from residuum.records import Knowledge, Reconstruction
from residuum.settings import PRESETS
from residuum.surfaces.surface import CHANGE, MOMENT, WEIGHTS, resolve_surface
from residuum.surfaces.surface import SURFACE_CHOICES as SURFACE_NAMES

STATIONARITY = (BinaryKKT, MulticlassKKT, WeightDecay, NTK, OptimizerState)
ATTACKS: plugins.Table[type[Attack]] = plugins.Table(
    "attack",
    {
        attack.name: attack
        for attack in (
            Unmix,
            UnmixOptimizerState,
            BehindBackbone,
            BehindBackboneOptimizerState,
            GradientMatching,
            OptimizerStateMatching,
            Geiping2020,
            Geiping2020OptimizerState,
            Hyperplanes,
            PolynomialAttack,
            ModelInversion,
            FirstLayerWeights,
        )
    },
    shared_names=OBJECTIVES,
    base=Attack,
)
OBJECTIVES.shared_names = ATTACKS
AUTOMATIC_ATTACKS: dict[str, type[Attack]] = {attack.name: attack for attack in (Auto, KKT)}
CHOICES = {  # the attacks from which "auto" and "kkt" choose
    "auto": ("binary-kkt", "multiclass-kkt", "weight-decay"),
    "kkt": ("binary-kkt", "multiclass-kkt"),
}
# The class Unmix subtracts known initial weights itself, so it also attacks the weight update (CHANGE).
UNMIX = {WEIGHTS: Unmix, CHANGE: Unmix, MOMENT: UnmixOptimizerState}


def every_attack() -> dict[str, type[Attack]]:
    """Return all attack classes by name, including those of plug-in packages."""
    classes = {attack.name: attack for attack in STATIONARITY}
    stationarity_attacks = {
        name: classes[name] if name in classes else Stationarity.with_objective(objective)
        for name, objective in OBJECTIVES.items()
    }
    return {**stationarity_attacks, **ATTACKS}


def attack_class(name: str) -> type[Attack]:
    """Look up the class of an attack by its name. An unknown name raises an ``InputError``.

    Args:
        name: Name of the attack. The classes "auto" and "kkt" choose an attack that suits the network.

    Returns:
        The class of the attack.
    """
    attacks = {**AUTOMATIC_ATTACKS, **every_attack()}
    require_known(name, attacks, "No attack")
    return attacks[name]


def make_attack(name: str = "auto", preset: str = "residuum", **settings: Any) -> Attack:
    """Create an attack with the settings of a preset (a named group of settings).

    An unknown attack or preset and an invalid setting raise an ``InputError``.

    Args:
        name: Name of the attack. "auto" means the attack of the preset.
        preset: Name of the preset. Preset settings that the attack does not have are ignored.
        **settings: Settings that replace those of the preset.

    Returns:
        The attack.
    """
    require_known(preset, PRESETS, "No preset")
    preset_values = PRESETS[preset]
    attack_type = attack_class(preset_values.attack if name == "auto" else name)
    return attack_type(**{**attack_type.select_settings(preset_values.settings), **settings})


def rebuild_attack(reconstruction: Reconstruction) -> Attack:
    """Create the attack, with its settings, that produced a given reconstruction."""
    name = reconstruction.settings.get("attack", reconstruction.attack)
    attack_type = {**AUTOMATIC_ATTACKS, **every_attack()}.get(name, Attack)
    return attack_type.from_json(reconstruction.settings)


def adapt_to_surface(name: str, knowledge: Knowledge, attack: Attack) -> Attack:
    """Return the variant of an attack for the attack surface that a user names.

    Args:
        name: Name of the attack surface: "weights", "change" (the weight update) or "moment" (the optimizer
            state). If the name is "", the function returns the attack unchanged.
        knowledge: What the attacker knows.
        attack: The attack.

    Returns:
        The attack for that attack surface, with the same settings.

    Raises:
        InputError: If the attack has no variant for that attack surface.
    """
    if not name:
        return attack
    surface = resolve_surface(name, knowledge)
    if isinstance(attack, Unmix):
        return UNMIX[surface].like(attack)
    if isinstance(attack, Auto) and surface != WEIGHTS:
        attack_types = every_attack().values()
        return next(t for t in attack_types if t.surface == surface).like(attack)
    if attack.surface != surface:
        surface_names = {value: word for word, value in SURFACE_NAMES.items()}
        raise InputError(
            f"The attack '{attack.name}' needs --surface {surface_names[attack.surface]}; got --surface "
            f"{surface_names[surface]}.",
            "Omit --surface, or choose another attack.",
        )
    return attack
