"""The glossary: words that reports and commands use, each explained in a sentence or two.

The texts are in ``glossary.toml``. The report ends with them and links to them from its first screen,
``residuum audit --explain`` prints those it used, and the site of ``docs/`` lists them.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

GLOSSARY: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


@cache
def pattern() -> re.Pattern[str]:
    """Finds words of the glossary, plurals included; the longest first."""
    words = sorted(GLOSSARY, key=len, reverse=True)
    # One letter and abbreviations are words only as they are written.
    forms = [
        word if word.isupper() or len(word) < 2 else f"(?i:{re.escape(word)})" for word in words
    ]
    return re.compile(rf"\b({'|'.join(forms)})(?:e?s)?\b")


def used(text: str) -> tuple[str, ...]:
    """The words of the glossary that a text uses, in its order."""
    found = {match[1].lower() for match in pattern().finditer(text)}
    return tuple(word for word in GLOSSARY if word.lower() in found)
