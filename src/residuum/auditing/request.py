"""The settings of an audit.

All settings are declared in :class:`AuditRequest`. Its fields are the options of the command line, the
settings in ``config.toml`` and the keyword arguments of ``rs.audit``. :class:`AuditOptions` repeats the names
of the fields for editors and type checkers. A test checks that both classes have the same fields.

This module does not import torch, so that the command line prints its help texts without delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from pydantic import Field, InstanceOf, field_validator

from residuum.auditing.durations import seconds_of
from residuum.auditing.training_recipe import TrainingRecipe
from residuum.errors import require_known
from residuum.settings import EXPERT, AttackSettings, TableSettings
from residuum.settings.presets import PRESETS

MAX_COUNT = 10**9  # largest number of steps or restarts, because more would take years
MAX_SEED = 2**31 - 1  # largest seed that all random generators accept


class AuditRequest(TableSettings):
    """The settings of an audit, as the user chooses them.

    The inputs (model, samples, attacker knowledge) and the output folder are not part of the request.
    """

    effort: Literal["quick", "standard", "thorough"] = Field(
        default="standard",
        description="How much work the audit plans: quick, standard or thorough. A quick audit can show a "
        "leak, but cannot rule out a leak.",
    )
    budget: str | float | None = Field(
        default=None,
        description="Limit of the work, such as 90s, 10min or 1h. The default is 1min, 10min or 2h, "
        "depending on the effort. The audit counts its work in operations, so its plan does not depend on "
        "the speed of this machine. If the limit is too low, the audit skips some tests, names them, and "
        "cannot rule out a leak.",
    )
    fail_on: Literal[
        "verbatim", "near-copy", "resemblance", "attribute", "class-level", "membership"
    ] = Field(
        default="membership",
        description="The weakest grade of a leak for which the audit ends with exit code 1.",
    )
    positive_controls: bool = Field(
        default=True,
        description="Train positive controls, which are networks known to memorize their samples, and test "
        "whether the audit detects a leak in them. Without them the audit cannot rule out a leak.",
    )
    preset: str = Field(
        default="residuum",
        description=f"Name of a group of attack settings. One of: {', '.join(PRESETS)}.",
        json_schema_extra=EXPERT,
    )
    attacks: Sequence[str | InstanceOf[AttackSettings] | dict[str, Any]] = Field(
        default=(),
        description="Attacks to run, by name. By default, all attacks run that apply to this network. "
        "An attack with settings is an "
        """object such as {"attack": "kkt", "steps": 3000}, in Python also rs.attacks.KKT(steps=3000).""",
        json_schema_extra=EXPERT,
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Number of optimization steps in each restart of an attack. A restart is a run from a "
        "new random start. By default, --preset sets the number.",
        json_schema_extra=EXPERT,
    )
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of all random numbers.")
    subsets: int = Field(
        default=2000,
        ge=200,
        le=100_000,
        description="Number of random subsets of the held-out samples. They are used to measure how many "
        "samples an attack seems to recover by chance.",
        json_schema_extra=EXPERT,
    )
    device: str = Field(default="cpu", description="Where the attacks run: cpu or cuda.")
    task: Literal["auto", "binary", "multiclass", "regression"] = Field(
        default="auto",
        description="Task for which the network was trained: binary, multiclass, "
        "regression or auto.",
    )
    arch: str | None = Field(
        default=None,
        description="Architecture of the network, if it cannot be read from the file, such as "
        "convnet:1x28x28-8-16-10,bias=all.",
        json_schema_extra=EXPERT,
    )
    model_code: str | None = Field(
        default=None,
        description="Python function that returns the network, as package.module:function, if --arch "
        "cannot describe the network. The function is run, so --trust-code is needed.",
        json_schema_extra=EXPERT,
    )
    baselines: bool = Field(
        default=True,
        description="Also run simple attacks for comparison (baselines). Their results do not change the "
        "verdict.",
        json_schema_extra=EXPERT,
    )
    recipe: str = Field(
        default="",
        description="How the network was trained, so that the positive controls are trained in the same "
        "way. A positive control is a network that the audit trains to memorize its samples. Pass any of "
        "the settings optimizer, rate, epochs, batch, start and frozen, separated by commas, such as "
        "optimizer=sgd,rate=0.01,frozen=LAYER1+LAYER2.",
        json_schema_extra=EXPERT,
    )
    surface: Literal["all", "weights", "change", "moment"] = Field(
        default="all",
        description="Part of the released file to attack: weights, change (the weight update from known "
        "initial weights), moment (optimizer state), or all of them.",
        json_schema_extra=EXPERT,
    )
    update_kind: Literal["auto", "any", "gradient", "difference", "none"] = Field(
        default="auto",
        description="What the file holds: an update (any), which is a gradient at the base or a difference "
        "of weights after and before training, or weights (none). With 'auto', residuum recognizes updates.",
        json_schema_extra=EXPERT,
    )

    @field_validator("attacks", mode="before")
    @classmethod
    def _name_attacks(cls, attacks: Any) -> Any:
        if isinstance(attacks, str | AttackSettings):
            attacks = (attacks,)
        return tuple(a.to_entry() if isinstance(a, AttackSettings) else a for a in attacks)

    @field_validator("budget")
    @classmethod
    def _check_budget(cls, budget: str | float | None) -> str | float | None:
        if budget is not None:
            seconds_of(budget)
        return budget

    @field_validator("preset")
    @classmethod
    def _check_preset(cls, preset: str) -> str:
        require_known(preset, PRESETS, "No preset")
        return preset

    @field_validator("recipe")
    @classmethod
    def _check_recipe(cls, recipe: str) -> str:
        TrainingRecipe.parse(recipe)
        return recipe

    @property
    def seconds(self) -> float | None:
        """The time budget of the audit in seconds, None for the default of the chosen effort."""
        return None if self.budget is None else seconds_of(self.budget)

    @property
    def chosen_by_user(self) -> tuple[str, ...]:
        """Names of the settings with which the user changed which attacks run, or how attacks run.

        An audit with such settings cannot rule out a leak.
        """
        attack_settings = ("preset", "attacks", "steps", "surface")
        return tuple(name for name in attack_settings if name in self.changed_settings())

    @property
    def training_recipe(self) -> TrainingRecipe:
        """The training recipe, parsed from the text of the setting ``recipe``."""
        return TrainingRecipe.parse(self.recipe)

    def published(self) -> dict[str, Any]:
        """Return the settings as plain values for ``result.json``. The budget is in seconds or None.

        The key "requested" holds the settings that differ from their defaults, as the user passed them.
        """
        setting_values = self.model_dump(exclude={"model_code", "attacks"})
        setting_values |= {"budget": self.seconds, "arch": self.arch or ""}
        setting_values |= {} if self.model_code is None else {"model": self.model_code}
        setting_values |= {"attacks": list(self.attacks)} if self.attacks else {}
        return {**setting_values, "requested": self.changed_settings()}

    def changed_settings(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as plain values."""
        return self.model_dump(mode="json", exclude_defaults=True)


class AuditOptions(TypedDict, total=False):
    """The fields of :class:`AuditRequest`, for editors and type checkers."""

    label: str
    drop: Sequence[str]
    sensitive: Sequence[str]
    effort: Literal["quick", "standard", "thorough"]
    budget: str | float | None
    fail_on: Literal[
        "verbatim", "near-copy", "resemblance", "attribute", "class-level", "membership"
    ]
    positive_controls: bool
    preset: str
    attacks: Sequence[str | AttackSettings | dict[str, Any]]
    steps: int | None
    seed: int
    subsets: int
    device: str
    task: Literal["auto", "binary", "multiclass", "regression"]
    arch: str | None
    model_code: str | None
    baselines: bool
    recipe: str
    surface: Literal["all", "weights", "change", "moment"]
    update_kind: Literal["auto", "any", "gradient", "difference", "none"]
