"""Plug-ins: installed packages that bring attacks, objectives, network kinds, priors, metrics, defenses.

A package names a module under the entry-point group ``residuum.plugins``; that module adds its parts
to the tables they belong to (``docs/extending.md``), and importing it is all that happens here. One
that cannot be imported, or that would replace what is there, says why and harms nobody.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

GROUP = "residuum.plugins"
OFF = "RESIDUUM_NO_PLUGINS"
Part = TypeVar("Part")
faults: dict[str, str] = {}  # parts of plug-ins that raised when asked, and what they said


@dataclass(frozen=True)
class Plugin:
    """One that is installed; error: why it could not be imported, "" when it was."""

    name: str
    version: str
    error: str = ""


class Table(dict[str, Part]):
    """Parts of one sort by name. Plug-ins may add to it; what stands there, none may replace.

    beside: a table of parts that go by name together with these.
    base: every part must be a subclass of this class, because one part that is not would stop all others.
    """

    def __init__(
        self,
        sort: str,
        parts: dict[str, Part],
        beside: dict[str, Any] | None = None,
        base: type | None = None,
    ):
        super().__init__(parts)
        self.sort, self.beside, self.base = sort, {} if beside is None else beside, base

    def __setitem__(self, name: str, part: Part) -> None:
        if _importing and (name in self or name in self.beside):
            owner = getattr(self.get(name, self.beside.get(name)), "__module__", "another")
            raise ValueError(
                f"plug-in {_importing[-1]!r} must not replace the {self.sort} {name!r} of "
                f"{owner}; give its own another name"
            )
        if self.base is not None and not (isinstance(part, type) and issubclass(part, self.base)):
            raise TypeError(
                f"the {self.sort} {name!r} must be a subclass of {self.base.__name__}; got "
                f"{part!r:.60}; register the class, not an object of it"
            )
        if _importing:
            _added.append((self, name))
        super().__setitem__(name, part)

    def update(self, *parts: Any, **named: Any) -> None:
        """One by one, so that each is looked at."""
        for name, part in dict(*parts, **named).items():
            self[name] = part

    def __ior__(self, parts: Any) -> Any:  # type: ignore[misc]
        self.update(parts)
        return self


_loaded: tuple[Plugin, ...] | None = None
_importing: list[str] = []
_added: list[tuple[Table[Any], str]] = []  # by the plug-in that is being imported


def load(wanted: bool = True) -> tuple[Plugin, ...]:
    """Import all that are installed, once; the first call decides for the whole process.

    wanted: False, or the variable ``RESIDUUM_NO_PLUGINS``, leaves them all alone.
    """
    global _loaded
    if _loaded is None:
        use = wanted and not os.environ.get(OFF)
        entries = entry_points(group=GROUP) if use else ()
        _loaded = ()  # a plug-in that asks for plug-ins while it is imported gets none
        _loaded = tuple(_import(entry) for entry in sorted(entries, key=lambda entry: entry.name))
    return _loaded


def _import(entry: EntryPoint) -> Plugin:
    name, dist = entry.name, entry.dist
    version, error = dist.version if dist is not None else "unknown", ""
    _importing.append(name)
    _added.clear()
    try:
        entry.load()
    except (Exception, SystemExit) as problem:  # noqa: BLE001  a stranger's code may raise anything
        error = describe(problem)
        for table, part in _added:  # all of it or nothing
            del table[part]
    finally:
        _importing.pop()
    return Plugin(name, version, error)


def describe(problem: BaseException) -> str:
    """One line about a fault of somebody else's code."""
    return f"{type(problem).__name__}: {problem}"[:300]
