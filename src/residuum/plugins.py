"""Plug-ins: installed packages that bring attacks, objectives, network kinds, priors, metrics, defenses.

A package names a module under the entry-point group ``residuum.plugins``; that module adds its parts
to the dicts they belong to (``docs/extending.md``), and importing it is all that happens here. One
that cannot be imported says why and harms nobody.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

GROUP = "residuum.plugins"
OFF = "RESIDUUM_NO_PLUGINS"


@dataclass(frozen=True)
class Plugin:
    """One that is installed; error: why it could not be imported, "" when it was."""

    name: str
    version: str
    error: str = ""


_loaded: tuple[Plugin, ...] | None = None


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
    version = dist.version if dist is not None else "unknown"
    try:
        entry.load()
    except (Exception, SystemExit) as problem:  # noqa: BLE001  a stranger's code may raise anything
        return Plugin(name, version, f"{type(problem).__name__}: {problem}"[:300])
    return Plugin(name, version)
