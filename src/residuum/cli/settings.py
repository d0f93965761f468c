"""Attack settings from the command line: a preset, options of their own, and ``--set``."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from residuum.cli.options import numbers
from residuum.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from residuum.attacks import AttackConfig


def configure(
    preset: str,
    given: dict[str, Any],
    priors: list[str] | None,
    pairs: list[str] | None,
    split: str | None = None,
) -> AttackConfig:
    """The preset with everything overridden that was said.

    given: values of the options, None where one was not used; priors: ``NAME:WEIGHT``, replacing
    the preset's; pairs: ``KEY=VALUE`` for settings that have no option; split: a way to grow, laid
    over the preset before everything else.
    """
    from residuum.attacks import GROWTH_PRESETS, PRESETS

    if preset not in PRESETS:
        raise InputError(f"No preset {preset!r}.", did_you_mean(preset, tuple(PRESETS)))
    if split is not None and split not in GROWTH_PRESETS:
        raise InputError(f"--split has no {split!r}.", did_you_mean(split, tuple(GROWTH_PRESETS)))
    changes = dict(GROWTH_PRESETS[split]) if split is not None else {}
    changes.update({name: value for name, value in given.items() if value is not None})
    for name, value in changes.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{_option(name)} must be finite; got {value}.", "Correct it.")
    for pair in pairs or ():
        name, value = _read_pair(pair, taken=(*given, "priors", "split"))
        changes[name] = value
    if priors:
        changes["priors"] = tuple(map(_prior, priors))
    _check(changes)
    return dataclasses.replace(PRESETS[preset], **changes)


def _check(changes: dict[str, Any]) -> None:
    """What no attack can work with, said in the options' words."""
    for name in ("seconds", "lr_x", "sigma", "sharpness", "restarts", "steps"):
        if not changes.get(name, 1) > 0:
            raise InputError(f"{_option(name)} must be positive; got {changes[name]}.", "Raise it.")
    if not 0 <= changes.get("rank_tolerance", 0) < 1:
        raise InputError(
            f"--rank-tolerance is a share from 0 up to below 1; got {changes['rank_tolerance']}.",
            "Use 0 for the full space.",
        )
    for name, known in (("rivals", ("tied", "best")), ("gradients", ("theta", "theta0", "both"))):
        if changes.get(name, known[0]) not in known:
            got = changes[name]
            raise InputError(f"{_option(name)} has no {got!r}.", did_you_mean(got, known))


def _read_pair(pair: str, taken: tuple[str, ...]) -> tuple[str, Any]:
    """One ``KEY=VALUE``, as the type that the setting has."""
    from residuum.attacks import AttackConfig

    defaults = {
        field.name: field.default
        for field in dataclasses.fields(AttackConfig)
        if field.name not in taken
    }
    name, equals, text = pair.partition("=")
    name = name.strip().replace("-", "_")
    if name in taken:
        raise InputError(f"--set {name} has an option of its own.", f"Use {_option(name)}.")
    if not equals or name not in defaults:
        raise InputError(
            f"--set takes KEY=VALUE with a setting of the attack; got {pair[:60]!r}.",
            did_you_mean(name, tuple(defaults)),
        )
    return name, _typed(name, text.strip(), defaults[name])


def _typed(name: str, text: str, default: Any) -> Any:
    option = f"--set {name}="
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise InputError(f"{option} is true or false; got {text!r}.", f"Use {option}true.")
        return text.lower() == "true"
    if isinstance(default, tuple):
        found = numbers(text, option, ",".join(f"{value:g}" for value in default))
        if len(found) != len(default):
            raise InputError(f"{option} takes {len(default)} numbers; got {text!r}.", "Count them.")
        return found
    if isinstance(default, int | float):
        found = numbers(text, option, f"{default:g}")
        if len(found) != 1 or (isinstance(default, int) and found[0] != int(found[0])):
            raise InputError(
                f"{option} takes one {type(default).__name__}; got {text!r}.", "Correct it."
            )
        return type(default)(found[0])
    return text


def _prior(text: str) -> tuple[str, float]:
    name, colon, weight = text.partition(":")
    value = numbers(weight, f"--prior {name}:", "1e-4")[0] if colon else 1.0
    if value < 0:
        raise InputError(f"A prior's weight must not be negative; got {text!r}.", "Correct it.")
    return name, value


def _option(name: str) -> str:
    return "--" + {"priors": "prior"}.get(name, name).replace("_", "-")
