"""The settings of a public function, declared once as a model and checked when the function is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from residuum.errors import InputError


class Request(BaseModel):
    """Base of the settings of a public function."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Read keyword arguments.

        Raises:
            TypeError: If there is no setting of that name.
            InputError: If a value is not allowed.
        """
        try:
            return cls(**options)
        except ValidationError as problem:
            first = problem.errors()[0]
            name = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                raise TypeError(f"{cls.__name__} has no setting {name!r}.") from None
            rule = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
            raise InputError(
                f"{name}: {rule}; got {first['input']!r}.",
                f"Correct {name}: {cls.model_fields[name].description}",
            ) from None
