"""Tables of ``docs/glossary.md``: the words of reports."""

from __future__ import annotations

from experiments.pages.tables import table
from residuum.report.glossary import GLOSSARY


@table
def words() -> str:
    """Return the glossary of reports."""
    return "\n\n".join(f"**{word}**: {text}" for word, text in GLOSSARY.items())
