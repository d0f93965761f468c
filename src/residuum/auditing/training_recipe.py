"""Read the training recipe: the settings with which the audited network was trained, as the user knows them.

Positive controls are trained with the same settings. Settings that the recipe does not contain are inferred
from the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from residuum.errors import InputError, require_known

OPTIMIZERS = ("margin", "gd", "sgd", "adam")
INITIALIZATIONS = ("small", "default", "lecun", "granted")
EXAMPLE = "optimizer=sgd,rate=0.01,epochs=100,batch=50"


@dataclass(frozen=True)
class TrainingRecipe:
    """How the audited network was trained. If a setting is "" or 0, it is inferred from the network.

    Attributes:
        optimizer: "margin", "gd", "sgd" or "adam". "margin" and "gd" use all samples in every step. Unless
            ``rate`` is set, their step size adapts so that the loss keeps falling.
        rate: The learning rate.
        epochs: The number of epochs.
        batch: The batch size.
        start: How the weights are initialized: "small", "default", "lecun" or "granted". With "granted",
            training begins at the initial weights that the attacker knows.
        frozen: Layers that were not trained.
    """

    optimizer: str = ""
    rate: float = 0.0
    epochs: int = 0
    batch: int = 0
    start: str = ""
    frozen: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> TrainingRecipe:
        """Read a training recipe from its text.

        Args:
            text: Settings separated by commas, any of
                ``optimizer=sgd,rate=0.01,epochs=100,batch=50,start=default,frozen=0+2``.

        Returns:
            The recipe.

        Raises:
            InputError: If the name of a setting is unknown, or if its value is not allowed.
        """
        setting_types = {"optimizer": str, "rate": float, "epochs": int, "batch": int}
        setting_types |= {"start": str, "frozen": str}
        setting_values: dict[str, object] = {}
        for setting in filter(None, (item.strip() for item in text.split(","))):
            name, _, value = setting.partition("=")
            require_known(name[:40], setting_types, "A recipe has no")
            try:
                setting_values[name] = setting_types[name](value)
            except ValueError as problem:
                raise InputError(
                    f"The setting {name!r} in a training recipe (--recipe) must be a number; got "
                    f"{value[:40]!r}.",
                    f"Pass --recipe {EXAMPLE}.",
                ) from problem
        for name, choices in (("optimizer", OPTIMIZERS), ("start", INITIALIZATIONS)):
            require_known(
                str(setting_values.get(name, choices[0])), choices, f"A recipe knows no {name}"
            )
        number_settings = [
            float(str(setting_values.get(name, 0))) for name in ("rate", "epochs", "batch")
        ]
        if not all(0 <= value < 1e9 for value in number_settings):
            raise InputError(
                "The settings 'rate', 'epochs' and 'batch' of a training recipe must be at least 0 and less "
                f"than 1e9; got {min(number_settings):g} to {max(number_settings):g}.",
                "Leave out settings that you do not know.",
            )
        setting_values["frozen"] = tuple(
            filter(None, str(setting_values.get("frozen", "")).split("+"))
        )
        return cls(**setting_values)  # type: ignore[arg-type]
