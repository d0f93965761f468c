"""Base class of all settings: a pydantic model that refuses wrong values with an error for users.

Each setting is declared once, as a field with a default, bounds and a description. Constructors, the command
line, ``config.toml`` and ``docs/settings.md`` are generated from these fields. This module does not import
torch, because importing torch takes seconds, and ``--help`` must be fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from residuum.errors import InputError, did_you_mean

BOUNDS = {"gt": "above", "ge": "at least", "le": "at most", "lt": "below"}
EXPERT: dict[str, Any] = {"group": "expert"}  # marks a setting that few users need
MAX_VALUE_LENGTH = 60  # number of characters of a refused value that an error message shows


class Settings(BaseModel):
    """Base class of a group of settings. The constructor checks the value of every setting.

    Raises:
        InputError: If there is no setting with a given name, or if a value breaks a rule.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as problem:
            raise input_error(type(self), problem) from problem

    def changed(self, **changes: Any) -> Self:
        """Return a copy of the settings with other values.

        Args:
            **changes: New values by the name of the setting. Unknown names and wrong values raise an
            ``InputError``.

        Returns:
            The copy with the new values.
        """
        set_values = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**set_values, **changes})

    def to_json(self) -> dict[str, Any]:
        """Return all settings as plain values for JSON. Infinite numbers become None."""
        return {name: _plain(getattr(self, name)) for name in type(self).model_fields}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Create settings from values of :meth:`to_json`. Missing settings have their default values."""
        fields = cls.model_fields
        may_be_infinite = {name for name, field in fields.items() if field.default == math.inf}
        return cls(
            **{k: math.inf if v is None and k in may_be_infinite else v for k, v in values.items()}
        )


def input_error(model: type[BaseModel], problem: ValidationError) -> InputError:
    """Convert pydantic's first validation error into an error with the rule, the value and a remedy.

    Args:
        model: Class of the settings that refused the values.
        problem: Validation error that pydantic raised.

    Returns:
        The error, which the caller raises.
    """
    first_fault = problem.errors()[0]
    setting_path = [str(place) for place in first_fault["loc"]]
    name, fields = setting_path[0] if setting_path else "", model.model_fields
    if first_fault["type"] == "extra_forbidden":
        return InputError(f"There is no setting {name!r}.", did_you_mean(name, tuple(fields)))
    refused_value = repr(first_fault["input"])[:MAX_VALUE_LENGTH]
    if (
        name not in fields
    ):  # the error belongs to no single setting, but to a rule about several settings
        return InputError(
            _sentence(first_fault["msg"]), "Change one of the settings that the rule names."
        )
    field = fields[name]
    remedy = f"Leave {name} out." if field.default is None else f"The default is {field.default!r}."
    if choices := choices_of(field):
        allowed_words = ", ".join(map(str, choices))
        return InputError(
            f"{name} must be one of {allowed_words}; got {refused_value}.",
            did_you_mean(str(first_fault["input"]), tuple(map(str, choices))),
        )
    rule = bounds_in_words(field)
    if first_fault["type"] == "finite_number":
        rule = "finite"
    if rule and (
        first_fault["type"] == "finite_number" or isinstance(first_fault["input"], int | float)
    ):
        return InputError(f"{name} must be {rule}; got {refused_value}.", remedy)
    return InputError(
        f"{name} is refused: {_sentence(first_fault['msg'])} Got {refused_value}.", remedy
    )


def choices_of(field: FieldInfo) -> tuple[Any, ...]:
    """Return the words that a setting accepts, () if the setting is not limited to certain words."""
    annotations = [field.annotation, *get_args(field.annotation)]
    return next((get_args(kind) for kind in annotations if get_origin(kind) is Literal), ())


def bounds_in_words(field: FieldInfo) -> str:
    """Return the bounds of a numeric setting in words, such as "at least 0 and below 1"."""
    bounds = [
        f"{words} {getattr(rule, name):g}"
        for name, words in BOUNDS.items()
        for rule in field.metadata
        if getattr(rule, name, None) is not None
    ]
    return "positive" if bounds == ["above 0"] else " and ".join(bounds)


def _sentence(message: str) -> str:
    message_text = message.removeprefix("Value error, ").rstrip(".")
    return f"{message_text[:1].lower()}{message_text[1:]}."


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
