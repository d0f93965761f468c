"""Plug-ins: installed packages that add attacks, objectives, network kinds, priors, metrics or defenses.

A package names a module in the entry-point group ``residuum.plugins``. When residuum imports the module, the
module adds its entries to tables (``docs/extending.md``). If a plug-in cannot be imported or would replace an
entry of another package, the error is recorded, and other plug-ins are not affected.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

GROUP = "residuum.plugins"
OFF = "RESIDUUM_NO_PLUGINS"
Entry = TypeVar("Entry")
faults: dict[str, str] = {}  # error messages of plug-in entries, by name of the entry


@dataclass(frozen=True)
class Plugin:
    """An installed plug-in.

    Attributes:
        name: Name of the plug-in.
        version: Version of the package of the plug-in.
        error: Reason why the plug-in could not be imported, or "" if the import succeeded.
    """

    name: str
    version: str
    error: str = ""


class Table(dict[str, Entry]):
    """A dictionary of entries by name, such as all attacks. Plug-ins may add, but not replace entries.

    Args:
        sort: The kind of entry in words, such as "attack". Error messages show this word.
        entries: The entries of residuum itself, without plug-ins.
        shared_names: Another table whose names plug-ins must not use either.
        base: A class of which every entry must be a subclass, or None.
    """

    def __init__(
        self,
        sort: str,
        entries: dict[str, Entry],
        shared_names: dict[str, Any] | None = None,
        base: type | None = None,
    ):
        super().__init__(entries)
        self.sort, self.base = sort, base
        self.shared_names = {} if shared_names is None else shared_names

    def __setitem__(self, name: str, entry: Entry) -> None:
        if _importing and (name in self or name in self.shared_names):
            existing_entry = self.get(name, self.shared_names.get(name))
            owner_module = getattr(existing_entry, "__module__", "another")
            raise ValueError(
                f"plug-in {_importing[-1]!r} must not replace the {self.sort} {name!r} of "
                f"{owner_module}; use another name"
            )
        if self.base is not None and not (isinstance(entry, type) and issubclass(entry, self.base)):
            raise TypeError(
                f"the {self.sort} {name!r} must be a subclass of {self.base.__name__}; got "
                f"{entry!r:.60}; register the class, not an instance"
            )
        if _importing:
            _added.append((self, name))
        super().__setitem__(name, entry)

    def update(self, *entries: Any, **named: Any) -> None:
        """Add entries to the table one by one, so that each entry is checked."""
        for name, entry in dict(*entries, **named).items():
            self[name] = entry

    def __ior__(self, entries: Any) -> Any:  # type: ignore[misc]
        self.update(entries)
        return self


_loaded: tuple[Plugin, ...] | None = None
_importing: list[str] = []
# The entries that the plug-in added so far, while it is imported: the table, and the name of the entry in
# the table.
_added: list[tuple[Table[Any], str]] = []


def load(enabled: bool = True) -> tuple[Plugin, ...]:
    """Import all installed plug-ins. Only the first call in a process imports them.

    Args:
        enabled: Whether to import plug-ins. The environment variable ``RESIDUUM_NO_PLUGINS`` disables them.

    Returns:
        All installed plug-ins.
    """
    global _loaded
    if _loaded is None:
        is_enabled = enabled and not os.environ.get(OFF)
        installed_entries = entry_points(group=GROUP) if is_enabled else ()
        # If a plug-in calls ``load`` during its own import, ``load`` returns () instead of starting again.
        _loaded = ()
        _loaded = tuple(
            _import(entry) for entry in sorted(installed_entries, key=lambda entry: entry.name)
        )
    return _loaded


def forget() -> None:
    """Clear the list of imported plug-ins, so that the next call of ``load`` imports plug-ins again."""
    global _loaded
    _loaded = None


def _import(entry: EntryPoint) -> Plugin:
    name, dist = entry.name, entry.dist
    version, error_text = dist.version if dist is not None else "unknown", ""
    _importing.append(name)
    _added.clear()
    try:
        entry.load()
    except (Exception, SystemExit) as problem:  # noqa: BLE001  a plug-in may raise anything
        error_text = describe(problem)
        for table, entry_name in _added:  # remove the entries of a plug-in whose import failed
            del table[entry_name]
    finally:
        _importing.pop()
    return Plugin(name, version, error_text)


def describe(problem: BaseException) -> str:
    """Return the class and the message of an exception, cut to 300 characters."""
    return f"{type(problem).__name__}: {problem}"[:300]
