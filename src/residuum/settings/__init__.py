"""What an attack or a training run is told, as data: each setting with its help, bounds and choices.

A group of settings is a small frozen dataclass, and may hold other groups:

    steps: int = setting(3000, "Steps of every restart.", place="basic", above=0)

What stands there is all there is to say: making a group checks it, the command line has its options and
``--set`` from it, ``docs/settings.md`` its tables. Inside its group a setting has a short name
(``growth.every``); to users, in files and in sweeps it goes by one flat name (``split_every``).

Nothing here needs torch, so that ``--help`` stays light.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Self, get_args, get_type_hints

from residuum.errors import InputError, require_known

RULE = "rule"  # key of a field's metadata
BOUNDS = {"above": operator.gt, "least": operator.ge, "most": operator.le, "below": operator.lt}
# Groups of options in the help of every command, in their order.
PLACES = {"basic": "Basic", "granted": "Granted to the attacker", "expert": "Expert"}


@dataclass(frozen=True)
class Rule:
    """What is said about a setting beside its type and default.

    help: one sentence or more, ending in a full stop.
    name: how users say it, where that is not the field's own name.
    place: key of ``PLACES`` that its option stands in; "" has no option and goes by ``--set``.
    choices: the words that it may be; open: plug-ins add to them, so others are looked up later.
    above, least, most, below: bounds of a number; endless: it may be infinite, null in JSON.
    """

    help: str
    name: str = ""
    place: str = ""
    choices: tuple[str, ...] = ()
    open: bool = False
    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None
    endless: bool = False


@dataclass(frozen=True)
class Setting:
    """One setting: its flat name, the way to it through the groups, its type and all that is said of it."""

    name: str
    path: tuple[str, ...]
    kind: Any
    default: Any
    rule: Rule

    def check(self, value: Any) -> None:
        """Refuse a value that breaks the rule; None leaves the choice to the data."""
        rule = self.rule
        if rule.choices and not rule.open and value is not None:
            require_known(str(value), rule.choices, f"No {self.name}")
        if not isinstance(value, int | float):
            return
        if not (math.isfinite(value) or (rule.endless and value == math.inf)):
            wanted = "finite"
        elif not all(BOUNDS[way](value, bound) for way, bound in self.bounds.items()):
            wanted = self.bounds_in_words
        else:
            return
        remedy = "Leave it out." if self.default is None else f"The default is {self.default}."
        raise InputError(f"{self.name} must be {wanted}; got {value}.", remedy)

    @property
    def bounds(self) -> dict[str, float]:
        """By their keys in ``BOUNDS``."""
        found = {way: getattr(self.rule, way) for way in BOUNDS}
        return {way: bound for way, bound in found.items() if bound is not None}

    @property
    def bounds_in_words(self) -> str:
        """Such as "at least 0 and below 1"; "" without any."""
        words = {"above": "above", "least": "at least", "most": "at most", "below": "below"}
        said = " and ".join(f"{words[way]} {bound:g}" for way, bound in self.bounds.items())
        return "positive" if said == "above 0" else said


def setting(default: Any, help: str, **rule: Any) -> Any:
    """A field of a group with what is said about it, see :class:`Rule`."""
    return dataclasses.field(default=default, metadata={RULE: Rule(help, **rule)})


@dataclass(frozen=True)
class Settings:
    """Base of every group: checked when made, changed and written by flat names."""

    def __post_init__(self) -> None:
        for one in settings_of(type(self)).values():
            if len(one.path) == 1:  # a group inside has checked its own
                one.check(getattr(self, one.path[0]))
        for field in dataclasses.fields(self):
            got = getattr(self, field.name)
            if isinstance(field.default, Settings) and not isinstance(got, type(field.default)):
                raise InputError(
                    f"{field.name} is a group of settings ({type(field.default).__name__}); got {got!r}.",
                    f"By flat names: {type(self).__name__}.of({field.name}={got!r}).",
                )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Made by flat names: ``AttackConfig.of(steps=10, split_every=5)``; the rest has its default."""
        return cls().changed(**values)

    def value(self, name: str) -> Any:
        """Of the setting with this flat name."""
        found: Any = self
        for step in settings_of(type(self))[name].path:
            found = getattr(found, step)
        return found

    def changed(self, **changes: Any) -> Self:
        """The same with other values, by flat names: ``changed(steps=10, split_every=5)``."""
        known = settings_of(type(self))
        own: dict[str, Any] = {}
        inside: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            require_known(name, known, "There is no setting")
            first, *rest = known[name].path
            if rest:
                inside.setdefault(first, {})[name] = value
            else:
                own[first] = value
        for group, values in inside.items():
            own[group] = getattr(self, group).changed(**values)
        return dataclasses.replace(self, **own)

    def to_json(self) -> dict[str, Any]:
        """Plain values by flat names; what is endless is null."""
        return {name: _plain(self.value(name)) for name in settings_of(type(self))}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`; what is left out has its default, unknown names are refused."""
        known = settings_of(cls)
        read = {}
        for name, value in values.items():
            require_known(name, known, "There is no setting")
            read[name] = math.inf if value is None and known[name].rule.endless else _tuple(value)
        return cls.of(**read)


def settings_of(group: type[Settings]) -> dict[str, Setting]:
    """All settings of a group and of those inside it, by flat name."""
    if group not in _FOUND:
        found = {one.name: one for one in _settings(group, ())}
        assert len(found) == len([*_settings(group, ())]), "two settings have one name"
        _FOUND[group] = found
    return _FOUND[group]


_FOUND: dict[type[Settings], dict[str, Setting]] = {}  # looked up in every step of an attack


def _settings(group: type[Settings], path: tuple[str, ...]) -> Iterator[Setting]:
    hints = get_type_hints(group)
    for field in dataclasses.fields(group):
        here = (*path, field.name)
        if isinstance(field.default, Settings):
            yield from _settings(type(field.default), here)
        else:
            rule: Rule = field.metadata[RULE]
            kind = hints[field.name]
            if isinstance(kind, UnionType):  # with None, where the data decides
                kind = get_args(kind)[0]
            yield Setting(rule.name or field.name, here, kind, field.default, rule)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
