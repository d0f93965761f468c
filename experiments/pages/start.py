"""Tables of ``docs/start.md``: the commands."""

from __future__ import annotations

from experiments.pages.tables import grid, table
from residuum.cli.main import COMMANDS


@table
def commands() -> str:
    """List what ``residuum --help`` lists."""
    rows = [(f"`residuum {name}`", text) for name, text in COMMANDS.items()]
    return grid("command | what it does", rows, text_columns=2)
