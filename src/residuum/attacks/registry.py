"""All attacks by name: one per objective of the stationarity family, and the others in ``ATTACKS``."""

from __future__ import annotations

from residuum import plugins
from residuum.attacks.base import Attack
from residuum.attacks.exact.polynomial import PolynomialAttack
from residuum.attacks.inversion.first_layer import FirstLayerWeights
from residuum.attacks.inversion.gradient_matching import GEIPING, OURS, Invert
from residuum.attacks.inversion.model_inversion import ModelInversion
from residuum.attacks.stationarity.attack import Stationarity
from residuum.attacks.stationarity.objectives import OBJECTIVES
from residuum.attacks.tabular.hyperplanes import Corners
from residuum.attacks.unmixing.attack import Unmix
from residuum.attacks.unmixing.backbone import BehindTrunk
from residuum.surfaces.surface import CHANGE, MOMENT, WEIGHTS

# Attacks of their own; every objective makes one more.
ATTACKS: plugins.Table[Attack] = plugins.Table(
    "attack",
    {
        one.name: one
        for one in (
            Unmix("unmix", WEIGHTS),
            Unmix("unmix-moment", MOMENT),
            BehindTrunk("trunk", WEIGHTS),
            BehindTrunk("trunk-moment", MOMENT),
            Invert("invert", CHANGE, OURS),
            Invert("invert-moment", MOMENT, OURS),
            Invert("geiping2020", CHANGE, GEIPING, floor=True),
            Invert("geiping2020-moment", MOMENT, GEIPING, floor=True),
            Corners(),
            PolynomialAttack(),
            ModelInversion(),
            FirstLayerWeights(),
        )
    },
    beside=OBJECTIVES,
)
OBJECTIVES.beside = ATTACKS


def every_attack() -> dict[str, Attack]:
    """By name, as they stand: those of the objectives first."""
    return {name: Stationarity(name, cls) for name, cls in OBJECTIVES.items()} | ATTACKS
